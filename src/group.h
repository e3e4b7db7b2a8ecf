// group.h - some of the ranks, and what they can do together: the collectives by their field names.
//
// All ranks of a group make the same calls in the same order. Calls go to NCCL, or to our implementation of its API
// (src/sim/nccl), on `stream`; 0 (the default) is the rank's compute stream. What travelled is counted in the
// transport, by group and operation.
#pragma once
#include <memory>
#include <optional>
#include <string>

#include "device.h"
#ifdef RINGTRON_NCCL
#include <nccl.h>
#else
#include "sim/include/nccl.h"  // the same calls, over threads or MPI
#endif

enum class Reduce { sum, max };

class Group {
 public:
  Group(ncclComm_t comm, const std::string& name, Device& device, bool control = false);  // owns the communicator
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }  // of the calling rank in this group
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  Device& device() const { return device_; }

  // X elements on every rank become their sum (or maximum) on every rank. Sent: 2 (n-1)/n X.
  template <class T> void all_reduce(TensorOf<T> x, Reduce = Reduce::sum, cudaStream_t stream = nullptr);
  // Rank r gets the sum of everybody's part r: out (X/n) from in (X). Sent: (n-1)/n X.
  template <class T> void reduce_scatter(TensorOf<T> out, TensorOf<T> in, cudaStream_t stream = nullptr);
  // Everybody gets all parts: out (X) from in (X/n). Sent: (n-1)/n X.
  template <class T> void all_gather(TensorOf<T> out, TensorOf<T> in, cudaStream_t stream = nullptr);
  // Rank r's part i goes to rank i's part r. Grouped sends and receives. Sent: (n-1)/n X.
  template <class T> void all_to_all(TensorOf<T> out, TensorOf<T> in, cudaStream_t stream = nullptr);
  template <class T> void broadcast(TensorOf<T> x, int root, cudaStream_t stream = nullptr);
  template <class T> void reduce(TensorOf<T> x, int root, cudaStream_t stream = nullptr);  // in place on the root
  template <class T> void send(TensorOf<T> x, int peer, cudaStream_t stream = nullptr);
  template <class T> void receive(TensorOf<T> x, int peer, cudaStream_t stream = nullptr);

  // Calls between start and end begin together: a send and a receive that wait for each other need this. They run when
  // it ends; given a group and a name, that is one span of the timeline, on the compute stream.
  struct Together {
    Together();
    Together(Group& group, const char* name);
    ~Together() noexcept(false);
    Together(const Together&) = delete;
    std::optional<Trace::Scope> span;
    Group* group = nullptr;
  };

  // The ranks that give the same color, ordered by key, as a group of their own. All ranks of this group call it.
  std::unique_ptr<Group> split(int color, int key, const std::string& name) const;

 private:
  cudaStream_t on(cudaStream_t stream) const { return stream ? stream : device_.stream(); }
  // Runs one call of NCCL, as a span of the timeline.
  template <class Call> void run(const char* name, int64_t bytes, cudaStream_t stream, Call call);
  ncclComm_t comm_;
  std::string name_;
  Device& device_;
  int rank_ = 0, size_ = 1;
  bool together_ = false;  // inside a Together with a name: its calls are no spans of their own
};
