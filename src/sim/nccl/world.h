// How ranks start, meet and end. A rank is a thread (run_threads) or an MPI process (run_mpi); the calls of
// nccl.h and those below work inside `body`, on the rank's own thread, and are the same for both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#ifdef RINGTRON_NCCL
#include <nccl.h>  // the real one: then this folder only starts the ranks and carries control traffic
#else
#include "../include/nccl.h"
#endif

namespace sim {

struct WorldOptions {
  double timeout_s = 30;  // a rank that waits this long without a byte moving fails, and with it the world
  double link_gbps = 0;   // simulated link: 10^9 bytes per second and port; 0: not slowed down
  double link_us = 0;     // and microseconds per message
  std::function<void(const std::string&)> print;  // receives error texts; empty: stderr
};

// Runs body(rank) on n threads. Returns 0 only if every body returned 0 and no rank failed: throwing, calling
// exit, disagreeing with a peer, waiting for a rank that has returned, all ranks waiting for each other. Then
// all ranks stop: their NCCL calls return an error and ncclGetLastError() says who did what. Distinct errors
// are printed once. One world at a time. With the real NCCL, a rank that throws ends the process; NCCL itself does not
// find calls that disagree, and waits.
int run_threads(int n, const WorldOptions& options, const std::function<int(int rank)>& body);

#ifdef HAVE_MPI
// The same in a process started by mpiexec (or alone, as the only rank). On failure the process ends here, by
// MPI_Abort with status 1, because other ranks may never answer again.
int run_mpi(int* argc, char*** argv, const WorldOptions& options, const std::function<int(int rank)>& body);

// Instead of run_mpi, in a process that found out that it cannot start: the others' run_mpi then returns 1, rather than
// wait for it. Returns true if none of them could start.
bool give_up_mpi(int* argc, char*** argv);
#endif

int world_rank();  // of the calling rank thread; throws std::logic_error elsewhere
int world_size();

// Control traffic for bootstrapping, e.g. to pass an ncclUniqueId around. All ranks of the world call it.
// Throws std::runtime_error.
void broadcast_bytes(void* data, size_t bytes, int root);

// While one lives, this rank does something long on its own, such as writing a file: whoever waits for it does not time
// out.
struct Busy {
  Busy();
  ~Busy();
  Busy(const Busy&) = delete;
};

// ---- the ledger: what this rank put on the wire ----

struct TrafficRow {
  std::string group, operation;     // "headers" and "" for what every message carries in front
  bool control = false;             // scalars, proofs, bootstrapping: not the payload that formulas speak of
  int64_t calls = 0, messages = 0;  // messages: sent
  int64_t bytes_sent = 0, bytes_received = 0;
};
std::vector<TrafficRow> traffic();
void reset_traffic();

// Names a communicator in errors and in the ledger (18 characters are kept). `control` books all its calls as
// such.
void name_comm(ncclComm_t comm, const std::string& name, bool control = false);

// Calls issued by this thread while one of these lives are booked as control traffic.
struct ControlTraffic {
  ControlTraffic();
  ~ControlTraffic();
  ControlTraffic(const ControlTraffic&) = delete;
};

}  // namespace sim
