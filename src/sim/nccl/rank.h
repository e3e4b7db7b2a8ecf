// One rank's engine: its transport, its calls in progress, and the one loop in which anybody waits.
#pragma once

#include <pthread.h>

#include <functional>
#include <list>
#include <mutex>

#include "ring.h"

namespace sim {

// Calls on one communicator that start together: collectives one after the other (so that their messages stay
// in order), then all sends and receives at once.
struct Batch {
  std::list<std::vector<Lane>> stages;
};

class Rank {
 public:
  // To be made on the rank's own thread.
  Rank(std::unique_ptr<Transport> transport, std::shared_ptr<Board> board, double timeout_s);

  int id() const { return transport_->rank; }
  int size() const { return board->size; }
  // Starts the batches and returns when all are done. Any thread. Throws CommError, on every rank of the
  // world.
  void run(std::vector<Batch>& batches);
  // Returns when `ready()`; meanwhile the board says that this rank waits in `header`.
  void wait_until(const Header& header, const std::function<bool()>& ready);
  [[noreturn]] void fail(ncclResult_t code,
                         const std::string& text);  // the whole world, with everyone's report

  std::vector<TrafficRow> traffic();
  void reset_traffic();
  void count_call(const Header& header);
  void idle();  // for a rank that has ended and waits for the others
  uint32_t new_channel();

  const std::shared_ptr<Board> board;
  uint32_t bootstraps = 0;  // calls of broadcast_bytes

 private:
  void wait(const std::function<bool()>& done, const Header* joining);
  bool advance_all();
  void watch(int64_t since, const Header* joining);
  bool own_thread_rests(int64_t now);

  std::mutex lock_;  // of everything below, and of all calls of MPI
  std::unique_ptr<Transport> transport_;
  std::list<Batch*> active_;
  uint32_t channels_ = 0;
  const double timeout_s_;
  clockid_t own_clock_;
  const pthread_t own_thread_;
  std::atomic<int> own_waits_{0}, waiters_{0};
  int64_t own_cpu_ = 0, own_worked_ = 0, watched_ = 0;
};

Header make_header(Rank& rank, const Call& call, const std::string& group, bool control);

// The calling rank thread's engine, or null. Worker threads of streams get theirs from the communicator.
std::shared_ptr<Rank> this_rank_or_null();
void set_this_rank(std::shared_ptr<Rank> rank);
std::shared_ptr<Rank> this_rank();  // throws std::logic_error where there is none

}  // namespace sim
