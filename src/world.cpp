#include "world.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "sim/nccl/world.h"
#ifndef RINGTRON_CUDA
#include "sim/sim.h"
#endif

bool under_mpiexec() {
#ifdef HAVE_MPI
  return std::getenv("PMI_RANK") != nullptr;  // set by mpiexec for each process it starts
#else
  return false;
#endif
}

int mpi_rank() {
  const char* rank = under_mpiexec() ? std::getenv("PMI_RANK") : nullptr;
  return rank ? std::atoi(rank) : 0;
}

int ranks_to_run(const WorldOptions& options) {
  const char* size = under_mpiexec() ? std::getenv("PMI_SIZE") : nullptr;
  return size ? std::atoi(size) : options.threads;
}

int run_ranks([[maybe_unused]] int argc, [[maybe_unused]] char** argv, const char* name, const WorldOptions& options,
              const std::function<int(int)>& body) {
#ifndef RINGTRON_CUDA
  if (options.streams != "eager") {  // eager is how streams are; who set something else before keeps it
    sim::set_stream_policy(options.streams == "lazy" ? sim::StreamPolicy::lazy : sim::StreamPolicy::ahead);
    sim::poison_allocations(true);  // a check: make what was never written visible, too
  }
#endif
  sim::WorldOptions world;
  world.timeout_s = options.timeout;
  world.link_gbps = options.link_gbps;
  world.link_us = options.link_us;
  world.print = [name](const std::string& text) { std::fprintf(stderr, "%s: %s\n", name, text.c_str()); };
#ifdef HAVE_MPI
  if (under_mpiexec()) return sim::run_mpi(&argc, &argv, world, body);
#endif
  return sim::run_threads(options.threads, world, body);
}

int cannot_run([[maybe_unused]] int argc, [[maybe_unused]] char** argv, const char* name, const std::string& wrong) {
  bool all = true;
  std::fflush(stdout);
#ifdef HAVE_MPI
  if (under_mpiexec()) all = sim::give_up_mpi(&argc, &argv);
#endif
  if (mpi_rank() == 0 && all) std::fprintf(stderr, "%s: %s\n", name, wrong.c_str());
  if (!all) std::fprintf(stderr, "%s: rank %d cannot start: %s\n", name, mpi_rank(), wrong.c_str());
  return 1;
}

World::World(Device& device) : device_(device) {
  const int rank = sim::world_rank(), size = sim::world_size();
  auto make = [&](const char* name, bool control) {
    ncclUniqueId id;
    ncclComm_t comm;
    if (rank == 0 && ncclGetUniqueId(&id) != ncclSuccess) throw Error(ncclGetLastError(nullptr));
    sim::broadcast_bytes(&id, sizeof id, 0);
    if (ncclCommInitRank(&comm, size, id, rank) != ncclSuccess) throw Error(ncclGetLastError(nullptr));
    return std::make_unique<Group>(comm, name, device, control);
  };
  all_ = make("world", false);
  control_ = make("control", true);
}

double World::sum(double mine) {
  if (size() == 1) return mine;
  IntBuffer in = device_.allocate<int>(Memory::data, {2}), out = device_.allocate<int>(Memory::data, {2 * size()});
  int words[2];  // a double travels as two ints: NCCL's types here have no double
  std::memcpy(words, &mine, sizeof mine);
  device_.upload(in.data, words, 2);
  control_->all_gather<int>(out, in);
  const std::vector<int> all = out.to_host();
  double total = 0;
  for (int rank = 0; rank < size(); ++rank) {
    double value;
    std::memcpy(&value, &all[2 * rank], sizeof value);
    total += value;
  }
  return total;
}

bool World::all_true(bool mine) { return sum(mine ? 0 : 1) == 0; }

std::vector<std::string> World::gather(const std::string& mine) {
  std::vector<std::string> all(size());
  for (int root = 0; root < size(); ++root) {
    uint64_t bytes = root == rank() ? mine.size() : 0;
    sim::broadcast_bytes(&bytes, sizeof bytes, root);
    all[root] = root == rank() ? mine : std::string(bytes, '\0');
    if (bytes) sim::broadcast_bytes(all[root].data(), bytes, root);
  }
  return all;
}

bool World::counts_traffic() {
#ifdef RINGTRON_NCCL
  return false;
#else
  return true;
#endif
}

std::vector<Traffic> World::traffic() const {
  std::vector<Traffic> rows;
  if (!counts_traffic()) return rows;
  CUDA_CHECK(cudaDeviceSynchronize());  // what is still queued has sent nothing yet
  for (const sim::TrafficRow& row : sim::traffic())
    if (!row.control && row.group != "headers")
      rows.push_back({row.group, row.operation, row.calls, row.messages, row.bytes_sent, row.bytes_received});
  return rows;
}

void World::reset_traffic() { sim::reset_traffic(); }
