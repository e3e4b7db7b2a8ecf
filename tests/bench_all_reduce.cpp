// Our ring all-reduce against MPI_Iallreduce, driven by MPI_Test and sched_yield (what MPI does at its best
// with more ranks than cores), alternating, medians. An MPI program: mpiexec -n 4 bench_all_reduce
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <vector>

#include "../src/sim/nccl/world.h"

namespace {

double seconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

void finish(MPI_Request request) {
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done) sched_yield();
}

int bench(int rank) {
  ncclUniqueId id;
  if (rank == 0) ncclGetUniqueId(&id);
  sim::broadcast_bytes(&id, sizeof(id), 0);
  ncclComm_t comm;
  if (ncclCommInitRank(&comm, sim::world_size(), id, rank)) return 1;
  struct Size {
    const char* name;
    size_t count;
    int rounds, times;  // `times` calls are timed together, `rounds` times
    const char* goal;
  };
  for (const Size& s : {Size{"1000_floats", 1000, 9, 50, "<=0.2"}, Size{"4MB", 1 << 20, 15, 5, ">=1.1"},
                        Size{"64MB", 16 << 20, 7, 1, ">=1.4"}}) {
    std::vector<float> in(s.count, 1), out(s.count);
    std::vector<double> ours, theirs;
    auto fence = [&] {
      MPI_Request request;
      MPI_Ibarrier(MPI_COMM_WORLD, &request);
      finish(request);
    };
    for (int round = -1; round < s.rounds; round++) {  // round -1 warms up
      fence();
      double start = seconds();
      for (int i = 0; i < s.times; i++)
        if (ncclAllReduce(in.data(), out.data(), s.count, ncclFloat, ncclSum, comm, nullptr)) return 1;
      fence();
      if (round >= 0) ours.push_back((seconds() - start) / s.times);
      start = seconds();
      for (int i = 0; i < s.times; i++) {
        MPI_Request request;
        MPI_Iallreduce(in.data(), out.data(), int(s.count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
        finish(request);
      }
      fence();
      if (round >= 0) theirs.push_back((seconds() - start) / s.times);
    }
    if (out[0] != float(sim::world_size()) || out[s.count - 1] != out[0]) return 1;
    if (rank) continue;
    const double a = median(ours) * 1e3, b = median(theirs) * 1e3;
    const bool small = s.count == 1000;
    printf("bench\tall_reduce_%s\t%.4f\tms\t%s\n", s.name, a, small ? s.goal : "-");
    printf("bench\tmpi_iallreduce_%s\t%.4f\tms\t-\n", s.name, b);
    printf("bench\tall_reduce_%s_speedup\t%.3f\tx\t%s\n", s.name, b / a, small ? "-" : s.goal);
    fflush(stdout);
  }
  ncclCommDestroy(comm);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return sim::run_mpi(&argc, &argv, {}, bench); }
