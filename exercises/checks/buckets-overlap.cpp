#include "../harness/check.h"

#include "../../src/sim/nccl/world.h"
#include "../../src/sim/sim.h"

// Lazy streams hold work back until something waits for it, so a missing wait shows every time.
static void check_overlap(int n, int buckets, bool communication_first) {
  const int X = 5;
  Check check(n, format("%d buckets of %d; rank r contributes 8^r; %s runs as early as events let it", buckets, X,
                        communication_first ? "communication" : "compute"),
              "all-reduce of bucket i: after what fills it, on a stream of its own; the optimizer\nafter all of them; sent 2 (n-1)/n Psi");
  check.decode_sums();
  std::vector<int> early(n, 0), launched_late(n, 0), wait_blocks(n, 0);
  sim::set_stream_policy(sim::StreamPolicy::lazy, 1);
  check.run([&](Rank& me) {
    cudaStream_t compute, communication;
    CUDA_CHECK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&communication, cudaStreamNonBlocking));
    std::vector<FloatBuffer> data;
    Overlap overlap{me.group, compute, communication, {}, {}, {}};
    for (int b = 0; b < buckets; ++b) {
      data.push_back(me.unfilled(X));
      overlap.buckets.push_back(data[b]);
      for (auto* events : {&overlap.ready, &overlap.done}) {
        events->push_back(nullptr);
        CUDA_CHECK(cudaEventCreateWithFlags(&events->back(), cudaEventDisableTiming));
      }
    }
    std::vector<float> seen(buckets * X, NAN);
    bool filled = false;
    me.measure([&] {
      for (int b = 0; b < buckets; ++b) {
        sim::enqueue(compute, [&, b] {
          filled = true;
          for (int i = 0; i < X; ++i) data[b].data[i] = fingerprint(me.rank);
        });
        bucket_is_full(overlap, b);
      }
      early[me.rank] = filled;
      sim::enqueue(compute, [] {});
      wait_for_buckets(overlap);
      wait_blocks[me.rank] = filled;
      sim::enqueue(compute, [&] {  // the optimizer
        for (int b = 0; b < buckets; ++b)
          for (int i = 0; i < X; ++i) seen[b * X + i] = data[b].data[i];
      });
      // Whichever stream runs first must still find its work in order.
      CUDA_CHECK(cudaStreamSynchronize(communication_first ? communication : compute));
      CUDA_CHECK(cudaStreamSynchronize(communication_first ? compute : communication));
    });
    me.output(seen);
    for (int b = 0; b < buckets; ++b) cudaEventDestroy(overlap.ready[b]), cudaEventDestroy(overlap.done[b]);
    cudaStreamDestroy(compute), cudaStreamDestroy(communication);
  });
  sim::set_stream_policy(sim::StreamPolicy::eager);
  float sum = 0;
  for (int r = 0; r < n; ++r) sum += fingerprint(r);
  for (int r = 0; r < n; ++r) {
    auto c = [&](int i) { return X / n + (i % n < X % n); };
    check.want(r, std::vector<float>(buckets * X, sum));
    check.sends(r, n == 1 ? 0 : int64_t(buckets) * 4 * (2 * X - c(r + 1) - c(r + 2)));
    check.calls(r, "all_reduce", buckets);
  }
  if (early[0]) check.complain("host", "work of the compute stream has run before bucket_is_full returned");
  else if (wait_blocks[0]) check.complain("host", "work of the compute stream has run before wait_for_buckets returned");
  check.likely(early[0], "the host waits in bucket_is_full, so backward cannot go on: order the streams with events instead");
  check.likely(wait_blocks[0], "the host waits in wait_for_buckets: let the compute stream wait, with cudaStreamWaitEvent");
  if (check.wrong_values()) {
    check.likely(check.got(0) > sum, "one bucket was reduced several times: each bucket once");
    check.likely(!communication_first && check.got(0, (buckets - 1) * X) == fingerprint(0), "the optimizer read a bucket that was not reduced yet: in wait_for_buckets compute waits for every done event");
    check.likely(true, "the bucket was reduced before it was full: communication must wait for `ready`, recorded on compute");
  }
  check.verdict();
}

// Nothing of the compute stream must wait for communication before the end: backward's next layer would.
static void check_compute_goes_on(int n) {
  Check check(n, "2 buckets; after the first is full, backward's next layer is put on compute and waited for",
              "only wait_for_buckets makes compute wait: until then backward goes on, whatever\nthe other ranks do");
  std::vector<int64_t> travelled(n, 0);
  sim::set_stream_policy(sim::StreamPolicy::lazy, 1);
  check.run([&](Rank& me) {
    cudaStream_t compute, communication;
    CUDA_CHECK(cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamCreateWithFlags(&communication, cudaStreamNonBlocking));
    FloatBuffer first = me.floats({1, 1}), second = me.floats({1, 1});
    Overlap overlap{me.group, compute, communication, {first, second}, {}, {}};
    for (int b = 0; b < 2; ++b)
      for (auto* events : {&overlap.ready, &overlap.done}) {
        events->push_back(nullptr);
        CUDA_CHECK(cudaEventCreateWithFlags(&events->back(), cudaEventDisableTiming));
      }
    me.measure([&] {
      bucket_is_full(overlap, 0);
      sim::enqueue(compute, [] {});
      CUDA_CHECK(cudaStreamSynchronize(compute));
      // Not World::traffic(), which would first wait for all that is queued.
      for (const sim::TrafficRow& row : sim::traffic()) travelled[me.rank] += row.control ? 0 : row.messages;
      bucket_is_full(overlap, 1);
      wait_for_buckets(overlap);
      CUDA_CHECK(cudaStreamSynchronize(compute));
      CUDA_CHECK(cudaStreamSynchronize(communication));
    });
    me.output(first);
    for (int b = 0; b < 2; ++b) cudaEventDestroy(overlap.ready[b]), cudaEventDestroy(overlap.done[b]);
    cudaStreamDestroy(compute), cudaStreamDestroy(communication);
  });
  sim::set_stream_policy(sim::StreamPolicy::eager);
  for (int r = 0; r < n; ++r) check.want(r, {float(n), float(n)});
  const bool waited = check.ran() && travelled[0] > 0;
  if (waited) check.complain("overlap", "backward's next layer had to wait for the all-reduce of the bucket before it");
  check.likely(check.got(0) > n, "one bucket was reduced several times: each bucket once");
  check.likely(waited, "the all-reduce is on the compute stream, or compute waits for it: nothing overlaps. Reduce on `communication`");
  check.verdict();
}

TEST_CASE("backward goes on while a bucket travels") {
  for (int n : {2, 3, 4, 8}) check_compute_goes_on(n);
}
TEST_CASE("three buckets, streams in any order") {
  for (int n : {2, 3, 4, 1, 8})
    for (bool communication_first : {false, true}) check_overlap(n, 3, communication_first);
}
TEST_CASE("one bucket") {
  for (int n : {1, 2, 3, 4, 8}) check_overlap(n, 1, n % 2 == 0);
}
