// world.h - all ranks: how they start, what they agree on, what they sent.
//
// A rank is an MPI process (mpiexec -n 4 program) or a thread (program --threads 4); the same body runs on each.
// With a GPU for each rank the collectives are NCCL's; otherwise our own (src/sim/nccl), on a CPU or on one shared
// GPU. If one rank throws, returns early, exits or disagrees with another about a call, all ranks stop within
// seconds, say why, and the program's exit status is not zero.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "config.h"
#include "group.h"

// True if mpiexec started this process, and which of them it is (0 otherwise).
bool under_mpiexec();
int mpi_rank();
// Runs body(rank) on every rank. Returns the program's exit status.
// `name` goes before what is printed about a failure.
int run_ranks(int argc, char** argv, const char* name, const WorldOptions&, const std::function<int(int rank)>& body);
// Instead of run_ranks, when something is wrong before the ranks start: prints it, once if all processes found the same,
// and lets the others end. Returns 1.
int cannot_run(int argc, char** argv, const char* name, const std::string& wrong);
int ranks_to_run(const WorldOptions&);  // how many there will be, known before they start

// Bytes one rank sent, by group and operation, as counted in the transport.
struct Traffic {
  std::string group, operation;
  int64_t calls, messages, sent, received;
};

class World {
 public:
  explicit World(Device&);  // on a rank of run_ranks; all ranks make theirs together
  int rank() const { return all_->rank(); }
  int size() const { return all_->size(); }
  Group& all() { return *all_; }
  std::unique_ptr<Group> split(int color, int key, const std::string& name) { return all_->split(color, key, name); }

  // ---- what ranks tell each other beside training; the ledger keeps it apart, as control traffic ----
  double sum(double mine);                                   // over ranks, in rank order, so the same bits everywhere
  std::vector<std::string> gather(const std::string& mine);  // everybody's bytes, by rank, on every rank
  bool all_true(bool mine);

  // Payload of this rank's calls since the last reset; empty where NCCL carries it, which does not report bytes.
  std::vector<Traffic> traffic() const;
  void reset_traffic();
  static bool counts_traffic();

 private:
  Device& device_;
  std::unique_ptr<Group> all_, control_;
};
