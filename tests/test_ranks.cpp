// Data parallelism on several ranks: what trainers got wrong in public, each against one rank that has the whole batch.
// The strategies are those of lessons 02 to 04; ranks are threads here, and processes where a rank is to die.
#include <doctest/doctest.h>

#ifndef RINGTRON_CUDA
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "../kernels/kernels.h"
#include "../src/data_parallel.h"
#include "../src/formulas.h"
#include "../src/lesson.h"
#include "../src/random.h"
#include "../src/sim/sim.h"
#include "programs.h"

namespace dp_lesson {
#include "../lessons/02_dp.cpp"
}
namespace ring_lesson {
#include "../lessons/03_ring.cpp"
}
namespace ddp_lesson {
#include "../lessons/04_ddp.cpp"
}

namespace {

using ddp_lesson::Ddp;
using dp_lesson::ParameterServer;
using ring_lesson::RingDataParallel;

constexpr bool kFloat = sizeof(real) == 4;

Options small_options() {
  Options o;
  o.model.vocab = 50, o.model.dim = 24, o.model.layers = 3, o.model.heads = 6, o.model.kv_heads = 2;
  o.model.hidden = 40, o.model.seq = 7;
  o.batch = 24;
  o.warmup = 0;
  return o;
}

GlobalBatch random_batch(const Options& o, uint64_t step) {
  GlobalBatch b{o.batch, o.model.seq, {}, {}, 0};
  for (int i = 0; i < o.batch * o.model.seq; ++i) {
    b.inputs.push_back(int(random_bits(3, step, i) % o.model.vocab));
    b.targets.push_back(int(random_bits(4, step, i) % o.model.vocab));
  }
  b.valid_tokens = o.batch * o.model.seq;
  return b;
}

using Make = std::function<std::unique_ptr<DataParallel>(Group&)>;

Make ring() {
  return [](Group& dp) { return std::make_unique<RingDataParallel>(dp); };
}
Make servers(int k) {
  return [=](Group& dp) { return std::make_unique<ParameterServer>(dp, k); };
}
template <class Strategy = Ddp>
Make ddp(int64_t bucket_bytes, Ddp::Mode mode = Ddp::Mode::overlap) {
  return [=](Group& dp) {
    auto strategy = std::make_unique<Strategy>(dp, bucket_bytes);
    strategy->mode = mode;
    return strategy;
  };
}

struct Outcome {
  int status = 1;
  Trajectory trajectory;            // assembled from all ranks
  double differing = 0, missing = 0;  // elements whose copies differ, and that nobody holds; gradients and weights
  bool weights_kept = true;         // between the start of a step and its update, on all ranks
  int64_t all_reduces = 0;          // calls, of rank 0
  std::vector<int64_t> updated;     // elements that each rank updates
};

Outcome train(int n, const Options& o, const std::vector<GlobalBatch>& batches, const Make& make) {
  Outcome out;
  std::mutex lock;
  out.updated.resize(n);
  WorldOptions options;
  options.threads = n;
  out.status = run_ranks(0, nullptr, "ranks", options, [&](int rank) {
    Device device(rank);
    World world(device);
    std::unique_ptr<DataParallel> strategy = make(world.all());
    Transformer model(o.model, *strategy, device, o.seed);
    AdamW adamw(model, o);
    Trajectory mine;
    mine.start = all_weights(model.params());
    bool kept = true;
    auto collect = [&](bool gradients, Tensors& into) {
      const auto packed = world.gather(pack(model.params(), gradients));
      if (rank != 0) return;
      Assembled all = assemble(o.model, packed);
      into = std::move(all.tensors);
      out.differing += all.copies.value, out.missing += all.missing.value;
    };
    world.reset_traffic();
    for (size_t step = 0; step < batches.size(); ++step) {
      const Tensors before = all_weights(model.params());
      model.start_step();
      const View view = strategy->view(batches[step].samples, batches[step].seq);
      for (const MicroBatch& part : micro_batches(device, batches[step], view, o.micro_batches)) {
        model.forward(part);
        model.backward(part);
      }
      strategy->finish_gradients(model);
      kept = kept && all_weights(model.params()) == before;
      mine.losses.push_back(world.sum(model.loss()));
      mine.norms.push_back(std::sqrt(world.sum(model.squared_gradient_norm())));
      if (step == 0) collect(true, mine.gradients);
      strategy->update(adamw, o.learning_rate(int64_t(step)), AdamW::clip_factor(mine.norms.back(), o.clip));
    }
    collect(false, mine.end);
    const std::vector<Traffic> traffic = world.traffic();  // waits for all streams, so not under the lock
    std::lock_guard guard(lock);
    out.weights_kept = out.weights_kept && kept;
    out.updated[rank] = adamw.elements();
    if (rank != 0) return 0;
    for (const Traffic& row : traffic)
      if (row.group == "world" && row.operation == "all_reduce") out.all_reduces += row.calls;
    out.trajectory = std::move(mine);
    return 0;
  });
  return out;
}

Outcome one_rank(Options o, const std::vector<GlobalBatch>& batches) {
  o.micro_batches = 1;
  return train(1, o, batches, [](Group& dp) { return std::make_unique<DataParallel>(dp); });
}

void check_equal(const Outcome& mine, const Outcome& reference) {
  REQUIRE(mine.status == 0);
  for (const Check& check : compare(mine.trajectory, reference.trajectory, Bounds::standard())) {
    INFO(check.what, " ", check.value, " ", check.detail);
    CHECK(check.ok());
  }
  CHECK(mine.differing == 0);
  CHECK(mine.missing == 0);
  CHECK(mine.weights_kept);
}

void check_same_bits(const Outcome& a, const Outcome& b) {
  REQUIRE(a.status == 0);
  REQUIRE(b.status == 0);
  CHECK(a.trajectory.losses == b.trajectory.losses);
  CHECK(a.trajectory.norms == b.trajectory.norms);
  CHECK(a.trajectory.gradients == b.trajectory.gradients);
  CHECK(a.trajectory.end == b.trajectory.end);
}

// Forgets that the compute stream has to wait for the buckets.
struct NoWaitForDone : Ddp {
  using Ddp::Ddp;
  void finish_gradients(Transformer&) override { used = 0; }
};

struct Simulation {  // puts back what a test changes
  ~Simulation() { sim::set_stream_policy(sim::StreamPolicy::eager); }
};

}  // namespace

TEST_CASE("ranks: the mean is over the tokens of all ranks: 1 token on one and 7 on the other") {
  Options o = small_options();
  o.batch = 2;
  GlobalBatch both = random_batch(o, 0);
  for (int t = 1; t < 7; ++t) both.targets[t] = -1;
  both.valid_tokens = 8;
  GlobalBatch first = both, second = both;
  for (int t = 0; t < 7; ++t) first.targets[7 + t] = -1, second.targets[t] = -1;
  first.valid_tokens = 1, second.valid_tokens = 7;
  const double a = one_rank(o, {first}).trajectory.losses.at(0), b = one_rank(o, {second}).trajectory.losses.at(0);
  const Outcome reference = one_rank(o, {both});
  for (const Make& make : {ring(), servers(1), servers(2), ddp(1000)}) {
    const Outcome out = train(2, o, {both}, make);
    check_equal(out, reference);
    REQUIRE(out.status == 0);
    const double loss = out.trajectory.losses.at(0);
    CHECK(std::abs(loss - (a + 7 * b) / 8) < (kFloat ? 1e-6 : 1e-2) * loss);
    CHECK(std::abs(loss - (a + b) / 2) > 1e-4 * loss);  // the mean of means is another number
  }
  CHECK((2.0 + 7 * 1.0) / 8 == 1.125);  // losses 2 and 1: not 1.5
}

TEST_CASE("ranks: k ranks with j micro-batches each equal one rank, with one reduction a step") {
  Options o = small_options();
  const std::vector<GlobalBatch> batches = {random_batch(o, 0), random_batch(o, 1), random_batch(o, 2)};
  const Outcome reference = one_rank(o, batches);
  for (const std::pair<int, int>& pair : {std::pair(1, 3), {2, 1}, {2, 3}, {3, 2}, {4, 1}, {4, 2}, {8, 3}}) {
    const int k = pair.first, j = pair.second;
    CAPTURE(k);
    CAPTURE(j);
    o.micro_batches = j;
    check_equal(train(k, o, batches, ring()), reference);
    const Outcome out = train(k, o, batches, ddp(1));  // a bucket for each unit
    check_equal(out, reference);
    CHECK(out.all_reduces == 3 * o.model.units());  // steps x buckets, whatever j is
    const Outcome one_bucket = train(k, o, batches, ddp(1 << 30));
    check_equal(one_bucket, reference);
    CHECK(one_bucket.all_reduces == 3);
  }
}

TEST_CASE("ranks: samples that the ranks do not divide, and fewer samples than ranks are the same mean") {
  Options o = small_options();
  for (int batch : {10, 5}) {
    CAPTURE(batch);
    o.batch = batch;
    const std::vector<GlobalBatch> batches = {random_batch(o, 0), random_batch(o, 1)};
    const Outcome reference = one_rank(o, batches);
    for (int n : {3, 4}) {
      check_equal(train(n, o, batches, ring()), reference);
      check_equal(train(n, o, batches, ddp(4000)), reference);
      check_equal(train(n, o, batches, servers(2)), reference);
    }
  }
}

TEST_CASE("ranks: one clipped step has the norm of the reduced gradient") {
  Options o = small_options();
  o.clip = 0.01f;  // far below the norm
  const std::vector<GlobalBatch> batches = {random_batch(o, 0), random_batch(o, 1)};
  const Outcome reference = one_rank(o, batches);
  REQUIRE(reference.trajectory.norms.at(0) > 10 * o.clip);
  for (int n : {2, 3})
    for (const Make& make : {ring(), servers(1), servers(n), ddp(4000)}) check_equal(train(n, o, batches, make), reference);
}

TEST_CASE("ranks: k parameter servers on n ranks equal one rank; each element is updated once") {
  const Options o = small_options();
  const std::vector<GlobalBatch> batches = {random_batch(o, 0), random_batch(o, 1)};
  const Outcome reference = one_rank(o, batches);
  for (const std::pair<int, int>& pair : {std::pair(1, 1), {2, 1}, {2, 2}, {3, 1}, {3, 2}, {4, 3}, {8, 1}, {8, 5}, {8, 8}}) {
    const int n = pair.first, k = pair.second;
    CAPTURE(n);
    CAPTURE(k);
    const Outcome out = train(n, o, batches, servers(k));
    check_equal(out, reference);
    int64_t updated = 0;
    for (int rank = 0; rank < n; ++rank) {
      updated += out.updated[rank];
      CHECK((out.updated[rank] > 0) == (rank < k));
    }
    CHECK(updated == o.model.parameters());
  }
}

TEST_CASE("ranks: overlap changes no bit, nor do lazy streams, their order, or poisoned buffers") {
  const Options o = small_options();
  const std::vector<GlobalBatch> batches = {random_batch(o, 0), random_batch(o, 1)};
  Simulation restore;
  for (int n : {2, 3}) {
    const Outcome after = train(n, o, batches, ddp(5000, Ddp::Mode::after_backward));
    CHECK(after.trajectory.losses.size() == 2);
    check_same_bits(train(n, o, batches, ddp(5000)), after);
    for (unsigned seed : {1u, 2u, 3u}) {
      sim::set_stream_policy(sim::StreamPolicy::lazy, seed);
      check_same_bits(train(n, o, batches, ddp(5000)), after);
      check_same_bits(train(n, o, batches, ddp(5000, Ddp::Mode::after_backward)), after);
      CHECK(sim::get_stream_policy() == sim::StreamPolicy::lazy);  // a run with default options keeps it, and poisoning
      Device device;
      CHECK(std::isnan(float(device.allocate<real>(Memory::data, {1}).to_host()[0])));
    }
    sim::set_stream_policy(sim::StreamPolicy::eager);
    check_same_bits(train(n, o, batches, ddp(5000)), after);
    check_same_bits(train(n, o, batches, ring()), train(n, o, batches, ring()));
    // And the check can fail: a missing event wait shows every time.
    sim::set_stream_policy(sim::StreamPolicy::lazy);
    const Outcome unsafe = train(n, o, {batches[0]}, ddp<NoWaitForDone>(5000));
    CAPTURE(n);
    CHECK((unsafe.status != 0 || unsafe.differing > 0));
    sim::set_stream_policy(sim::StreamPolicy::eager);
  }
}

TEST_CASE("ranks: the global batch is the same for every layout, each sample on one rank in one micro-batch") {
  const Options o = small_options();
  const GlobalBatch batch = random_batch(o, 7);
  for (int n : {1, 2, 3, 4, 8})
    for (int parts : {1, 2, 3}) {
      std::vector<std::vector<int>> inputs(n), targets(n);
      std::vector<double> factors(n);
      WorldOptions options;
      options.threads = n;
      const int status = run_ranks(0, nullptr, "ranks", options, [&](int rank) {
        Device device(rank);
        World world(device);
        DataParallel dp(world.all());
        for (const MicroBatch& part : micro_batches(device, batch, dp.view(batch.samples, batch.seq), parts)) {
          for (int token : part.tokens.to_host()) inputs[rank].push_back(token);
          for (int token : part.targets.to_host()) targets[rank].push_back(token);
          factors[rank] = part.loss_factor;
        }
        return 0;
      });
      CHECK(status == 0);
      std::vector<int> all_inputs, all_targets;
      for (int rank = 0; rank < n; ++rank) {
        all_inputs.insert(all_inputs.end(), inputs[rank].begin(), inputs[rank].end());
        all_targets.insert(all_targets.end(), targets[rank].begin(), targets[rank].end());
        CHECK(float(factors[rank]) == 1.f / float(batch.valid_tokens));  // of the whole batch, not of the part
      }
      CHECK(all_inputs == batch.inputs);
      CHECK(all_targets == batch.targets);
    }
}

TEST_CASE("ranks: the ring by hand sums exactly, for 0 to 20 elements on 1 to 8 ranks, with the bytes of the formula") {
  for (int n = 1; n <= 8; ++n) {
    std::mutex lock;
    std::string wrong;
    WorldOptions options;
    options.threads = n;
    const int status = run_ranks(0, nullptr, "ranks", options, [&](int rank) {
      Device device(rank);
      World world(device);
      for (int X = 0; X <= 20; ++X)
        for (bool by_root : {false, true}) {
          if (X == 0 && by_root) continue;
          Buffer x = device.allocate<real>(Memory::communication, {X + 1});  // one more: to see that it stays
          std::vector<real> start(X + 1);
          for (int i = 0; i <= X; ++i) start[i] = real(float(i % 5 + rank));
          device.upload(x.data, start.data(), X + 1);
          world.reset_traffic();
          Tensor part(x.data, {X});
          by_root ? ring_lesson::root_all_reduce(world.all(), part) : ring_lesson::ring_all_reduce(world.all(), part);
          const std::vector<real> sum = x.to_host();
          bool right = float(sum[X]) == float(start[X]);
          for (int i = 0; i < X; ++i) right = right && float(sum[i]) == float(n * (i % 5) + n * (n - 1) / 2);
          int64_t sent = 0;
          for (const Traffic& row : world.traffic())
            if (row.group == "world") sent += row.sent;
          const int64_t elements = by_root ? (rank == 0 ? n - 1 : 1) * int64_t(X) * (n > 1) : ring_all_reduce_sent(X, n, rank);
          std::lock_guard guard(lock);
          if (!right) wrong += format("sum of %d on rank %d\n", X, rank);
          if (sent != elements * int64_t(sizeof(real)))
            wrong += format("%d elements, rank %d, root %d: sent %lld bytes\n", X, rank, by_root, (long long)sent);
        }
      return 0;
    });
    CAPTURE(n);
    CHECK(status == 0);
    CHECK(wrong == "");
  }
}

// ---- ranks that go wrong: the tool `hangs`, and the lessons as a reader starts them ----

namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const std::string kSmall = " --dim 24 --heads 6 --kv-heads 2 --layers 3 --hidden 40 --seq 16 --batch 8 --steps 3 ";

// Everything stopped soon, and whoever started it can tell that it failed.
void check_failed(const Ended& ended, double within) {
  CHECK(ended.status != 0);
  CHECK(ended.took < within);
  CHECK_FALSE(ended.says("proved"));
  CHECK_FALSE(ended.says("nobody waits"));
}

}  // namespace

TEST_CASE("ranks: every way to hang is found and named, with threads and with processes") {
  struct Case {
    const char* options;
    std::vector<std::string> says;
  };
  const Case cases[] = {
      {"order", {"all_reduce(1000", "broadcast(1000", "as call 3 of group 'world'", "same calls in the same order"}},
      {"count", {"rank 1 called all_reduce(999", "all_reduce(1000", "same calls in the same order"}},
      {"branch", {"ranks disagree", "all_reduce(1000", "as call 3"}},
      {"skip", {"rank 1 has left", "waits for it", "as call 4", "as call 3"}},
      {"cycle", {"deadlock", "rank 0: waiting for rank 1 to take a message in send(1000"}},
      {"throw", {"rank 1 threw: the data of step 3 can't be read", "waiting for"}},
      {"exit0", {"rank 1 called exit before its work was done"}},
      {"slow --timeout 0.5", {"timeout", "rank 1: computing; its last call was all_reduce(1000", "as call 2"}},
  };
  const bool processes = !no_mpiexec();
  for (const Case& c : cases)
    for (bool mpi : {false, true}) {
      if (mpi && !processes) continue;
      const std::string program = built("hangs --kind ") + c.options;
      const Ended ended = run(mpi ? "mpiexec -n 3 " + program : program + " --threads 3");
      CAPTURE(std::string(c.options));
      CAPTURE(mpi);
      CAPTURE(ended.text);
      check_failed(ended, 6);  // 5 s to stop, and the start
      for (const std::string& s : c.says) CHECK_MESSAGE(ended.says(s), s);
    }
  for (const char* kind : {"none", "slow"}) {
    const Ended ended = run(built("hangs --threads 2 --kind ") + kind);
    CHECK(ended.status == 0);
    CHECK(ended.says("nobody waits"));
  }
  CHECK(run(built("hangs --kind sleepy")).says("--kind sleepy is unknown"));
  CHECK(run(built("hangs --threads 1")).status != 0);
}

TEST_CASE("ranks: kill -9 of one process of a running lesson stops all of them") {
  if (no_mpiexec()) return;
  const std::string file = std::filesystem::temp_directory_path() / ("ringtron-kill-" + std::to_string(getpid()));
  const std::string script = "bash -c 'echo $$ >> " + file + "; exec " + built("03_ring") + kSmall +
                             "--steps 1000000 --no-proof --largest 0'";
  double killed = 0;
  const Ended ended = run("mpiexec -n 3 " + script, [&](const std::string& line) {
    if (killed > 0 || line.find("  step ") == std::string::npos) return;
    std::ifstream pids(file);  // in the order in which the processes started
    pid_t last = 0;
    for (pid_t pid; pids >> pid;) last = pid;
    if (last > 0 && kill(last, SIGKILL) == 0) killed = now();
  });
  const double after = now() - killed;
  std::filesystem::remove(file);
  CAPTURE(ended.text);
  REQUIRE(killed > 0);
  CHECK(ended.status != 0);
  CHECK(after < 5);
  CHECK_FALSE(ended.says("summary"));
}

TEST_CASE("ranks: lessons started with different options on different ranks fail, and say so") {
  if (no_mpiexec()) return;
  struct Case {
    const char *lesson, *options_0, *options_1, *says;
  };
  const Case cases[] = {
      {"04_ddp", "--bucket-kb 1", "--bucket-kb 1000", "ranks disagree"},       // other buckets
      {"03_ring", "--largest 0", "--largest 0 --steps 5", ""},                 // one has fewer batches
      {"03_ring", "--largest 0", "--largest 0 --layers 2", "rank"},            // another model
      {"02_dp", "--servers 1", "--servers 2", "rank"},
      {"03_ring", "--largest 0", "--largest 0 --seed 2", "FAIL"},              // other samples and weights: the proof
      {"04_ddp", "", "--data there-is-no-such-file", "rank 1 cannot start: data 'there-is-no-such-file'"},
  };
  for (const Case& c : cases) {
    const std::string program = built(c.lesson) + kSmall;
    const Ended ended = run("mpiexec -n 1 " + program + c.options_0 + " : -n 1 " + program + c.options_1);
    CAPTURE(std::string(c.lesson));
    CAPTURE(std::string(c.options_1));
    CAPTURE(ended.text);
    check_failed(ended, 8);
    CHECK(ended.says(c.says));
  }
}

#endif
