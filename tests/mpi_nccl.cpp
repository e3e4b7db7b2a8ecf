// Our NCCL between MPI processes: the checks of nccl_checks.h, and with --fail=... ways to go wrong, for
// tests/test_mpi.cpp. Start it with: mpiexec -n 4 mpi_nccl [--quick] [--link] [--fail=...]
// [--timeout=seconds] Ends with the line "mpi_nccl: success" of rank 0, because mpiexec's status alone proves
// nothing.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "nccl_checks.h"

using namespace nccl_checks;

namespace {

std::string fail;
bool quick = false;

void go_wrong(int rank) {
  const int n = sim::world_size();
  ncclComm_t comm = world_comm();
  std::vector<float> x(1000, 1), y(1000000);
  for (int i = 1; i <= 4; i++) {
    if (rank == 1 && i == 3) {
      usleep(200000);  // let the others get as far as they can
      if (fail == "throw") throw std::runtime_error("out of coffee");
      if (fail == "exit0") exit(0);
      if (fail == "return") return;
      if (fail == "kill") kill(getpid(), SIGKILL);
      if (fail == "slow") sleep(20);
      if (fail == "mismatch") {
        ok(ncclAllGather(x.data(), y.data(), 500, ncclFloat, comm, nullptr));
        continue;
      }
    }
    if (fail == "cycle" && i == 3) ok(ncclSend(x.data(), 1, ncclFloat, (rank + 1) % n, comm, nullptr));
    ok(ncclAllReduce(x.data(), x.data(), 1000, ncclFloat, ncclSum, comm, nullptr));
  }
}

int body(int rank) {
  if (!fail.empty()) {
    go_wrong(rank);
    return 0;
  }
  const Problems problems = check_all(quick);
  for (auto& p : problems) fprintf(stderr, "rank %d: %s\n", rank, p.c_str());
  int bad = int(problems.size());
  ncclComm_t comm = world_comm();
  ok(ncclAllReduce(&bad, &bad, 1, ncclInt32, ncclSum, comm, nullptr));
  ok(ncclCommDestroy(comm));
  if (bad) return 1;
  if (rank == 0) printf("mpi_nccl: success\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  sim::WorldOptions options;
  for (int i = 1; i < argc; i++) {
    const std::string a = argv[i];
    if (a == "--quick") quick = true;
    if (a == "--link") options.link_gbps = 1, options.link_us = 50;
    if (a.rfind("--fail=", 0) == 0) fail = a.substr(7);
    if (a.rfind("--timeout=", 0) == 0) options.timeout_s = atof(a.c_str() + 10);
  }
  return sim::run_mpi(&argc, &argv, options, body);
}
