// 03_ring.cpp - all-reduce by hand: the ring, from send and receive only.
//
//   reduce-scatter, n-1 steps: in step k rank r sends chunk r-k to rank r+1, and adds chunk r-k-1, which arrives
//     r0 [a0 b0 c0]    r1 [a1 b1 c1]    r2 [a2 b2 c2]                        (chunk numbers and ranks modulo n)
//   k=0: a0 -> r1       b1 -> r2         c2 -> r0
//   k=1: c0+c2 -> r1    a0+a1 -> r2      b1+b2 -> r0        now rank r holds the whole sum of chunk r+1
//   all-gather, n-1 steps: in step k rank r sends chunk r+1-k, and takes chunk r-k as it is
//
// Every rank sends 2X - |c(r+1)| - |c(r+2)| elements, about 2 (n-1)/n X: it hardly grows with n, and all ports carry
// the same. Time: 2 (n-1) latencies + 2 (n-1)/n X / bandwidth.                              notes/all_reduce.md
#include <algorithm>

#include "../src/data_parallel.h"
#include "../src/lesson.h"
#include "../kernels/kernels.h"

// Chunk i of n: X/n elements, one more for the first X mod n. Nothing has to divide; a chunk may be empty.
static Tensor chunk(Tensor x, int64_t i, int64_t n) {
  i = (i % n + n) % n;
  const int64_t X = x.numel(), each = X / n, more = X % n;
  const int64_t begin = i * each + std::min(i, more);
  return {x.data + begin, {each + (i < more)}};
}

void ring_all_reduce(Group& group, Tensor x) {
  const int n = group.size(), r = group.rank(), next = (r + 1) % n, previous = (r + n - 1) % n;
  if (n == 1) return;
  Device& device = group.device();
  Buffer arrived = device.allocate<real>(Memory::communication, {chunk(x, 0, n).numel()});  // chunk 0 is a largest one

  auto exchange = [&](Tensor out, Tensor in) {  // to the next, from the previous, together: else all would wait
    Group::Together together(group, "exchange");
    if (out.numel()) group.send(out, next);
    if (in.numel()) group.receive(in, previous);
  };
  for (int k = 0; k < n - 1; ++k) {  // reduce-scatter
    Tensor mine = chunk(x, r - k - 1, n);
    exchange(chunk(x, r - k, n), {arrived.data, {mine.numel()}});
    add(mine.data, mine.data, arrived.data, mine.numel(), device.stream());
  }
  for (int k = 0; k < n - 1; ++k)    // all-gather
    exchange(chunk(x, r + 1 - k, n), chunk(x, r - k, n));
}

// The contrast: everything to rank 0 and back. The root's port carries (n-1) X each way.
void root_all_reduce(Group& group, Tensor x) {
  Device& device = group.device();
  if (group.rank() == 0) {
    Buffer theirs = device.allocate<real>(Memory::communication, {x.numel()});
    for (int peer = 1; peer < group.size(); ++peer) {
      group.receive<real>(theirs, peer);
      add(x.data, x.data, theirs.data, x.numel(), device.stream());
    }
    for (int peer = 1; peer < group.size(); ++peer) group.send(x, peer);
  } else {
    group.send(x, 0);
    group.receive(x, 0);
  }
}

struct RingDataParallel : DataParallel {
  using DataParallel::DataParallel;
  void finish_gradients(Transformer& model) override {
    for (Unit& unit : model.params().units()) ring_all_reduce(dp, unit.gradients);
  }
};

// Times and checks the three ways to all-reduce for sizes from 1 KB to `largest` bytes, and fits the ring's time to
// 2 (n-1) alpha + 2 (n-1)/n X beta. False if a sum is wrong.
static bool compare_all_reduces(Lesson& lesson, int64_t largest) {
  Group& all = lesson.world().all();
  const int64_t n = all.size();
  lesson.print("all-reduce of X bytes on %d ranks%s; algbw = X / time, busbw = algbw x 2 (n-1)/n\n", all.size(),
               lesson.link_text().c_str());
  lesson.print("  %9s  %28s  %28s  %10s\n", "X", "ring: time, algbw, busbw", "library: the same", "root: time");
  lesson.print("  %9s  %9s %9s %8s  %9s %9s %8s  %10s\n", "bytes", "ms", "GB/s", "GB/s", "ms", "GB/s", "GB/s", "ms");
  bool right = true;
  std::vector<double> sizes, times;
  for (int64_t bytes = 1024; bytes <= largest; bytes *= 4) {
    const int64_t X = bytes / int64_t(sizeof(real));
    Buffer x = lesson.device().allocate<real>(Memory::communication, {X});
    // Integers sum exactly in any order, in bf16 up to 256: element i of rank r is (i + r) mod 2.
    std::vector<real> start(X), sums(X);
    for (int64_t i = 0; i < X; ++i) {
      start[i] = real(float((i + all.rank()) % 2));
      sums[i] = real(float(i % 2 ? (n + 1) / 2 : n / 2));
    }
    auto measure = [&](auto&& all_reduce) {
      std::vector<double> runs;
      for (int run = 0; run < (bytes < 1 << 22 ? 7 : 3); ++run) {
        lesson.device().upload(x.data, start.data(), X);
        lesson.sum(0);  // all ranks begin together
        const double from = seconds();
        all_reduce();
        lesson.device().synchronize();
        lesson.sum(0);  // and the slowest one counts
        runs.push_back(seconds() - from);
      }
      const std::vector<real> result = x.to_host();
      for (int64_t i = 0; i < X; ++i) right = right && float(result[i]) == float(sums[i]);
      std::sort(runs.begin(), runs.end());
      return runs[runs.size() / 2];
    };
    const double ring = measure([&] { ring_all_reduce(all, x); });
    const double library = measure([&] { all.all_reduce<real>(x); });
    const double root = measure([&] { root_all_reduce(all, x); });
    auto bus = [&](double time) { return double(bytes) / time * 2 * double(n - 1) / double(n) / 1e9; };
    lesson.print("  %9lld  %9.3f %9.3f %8.3f  %9.3f %9.3f %8.3f  %10.3f\n", (long long)bytes, 1e3 * ring,
                 double(bytes) / ring / 1e9, bus(ring), 1e3 * library, double(bytes) / library / 1e9, bus(library),
                 1e3 * root);
    sizes.push_back(double(bytes)), times.push_back(ring);
  }
  if (n > 1) {  // latency from the smallest sizes, bandwidth from the largest
    const double alpha = times.front() / (2 * double(n - 1));
    const double beta =
        (times.back() - times.front()) / (2 * double(n - 1) / double(n) * (sizes.back() - sizes.front()));
    lesson.print("  fit     alpha %.1f us per step, %.2f GB/s per rank\n", 1e6 * alpha, 1e-9 / beta);
  }
  lesson.print("  %-4s sums of integers are exact, all three ways\n", right ? "ok" : "FAIL");
  return right;
}

static Options ring_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  o.extra["largest"] = {1 << 26, "largest message of the comparison, bytes; 0: no comparison"};
  return o;
}

LESSON(ring, "all-reduce by hand: the ring, from send and receive only", ring_defaults({})) {
  Group& all = lesson.world().all();
  RingDataParallel ring(all);
  Transformer model(lesson.config(), ring, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);
    }
    ring.finish_gradients(model);  // <- the idea
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  int64_t sent = 0, largest_chunk = 0, Psi = 0;
  for (Unit& unit : model.params().units()) {
    const int n = all.size(), r = all.rank();
    Psi += unit.padded;
    if (n == 1) continue;
    sent += 2 * unit.padded - chunk(unit.gradients, r + 1, n).numel() - chunk(unit.gradients, r + 2, n).numel();
    largest_chunk = std::max(largest_chunk, chunk(unit.gradients, 0, n).numel());
  }
  const int64_t B = sizeof(real);
  lesson.expect_sent("world", "send", int64_t(lesson.steps().size()) * B * sent,
                     "steps B sum over units of 2X - |c(r+1)| - |c(r+2)|");
  lesson.expect_state(B * Psi, B * Psi, (B == 4 ? 8 : 12) * Psi);
  lesson.expect_activations(model);
  lesson.expect_peak(Memory::communication, B * largest_chunk, "the largest chunk of the largest unit");
  lesson.finish(adamw);
  const bool right = lesson.option("largest") == 0 || compare_all_reduces(lesson, int64_t(lesson.option("largest")));
  return lesson.prove(model) || !right;
}
