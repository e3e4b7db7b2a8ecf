#include "../harness/check.h"

TEST_CASE("bytes of an all-reduce: Llama-2-7B's gradients, 13.477 GB") {
  for (auto [n, want] : {std::pair{8, 23.58475}, {64, 26.53284}, {2, 13.477}, {1, 0.}}) {
    Check check(1, format("13.477 GB over %d ranks", n), "reduce-scatter and all-gather send (n-1)/n X each: 2 (n-1)/n X");
    check.name_values({"GB sent per rank"});
    check.tolerance(1e-5);
    check.call([&, n = n] { return std::vector<float>{float(all_reduce_sent(13.477e9, n) / 1e9)}; });
    check.want({float(want)});
    check.likely(std::abs(check.got(0) - want / 2) < 1e-3, "all-reduce is reduce-scatter and all-gather: count both halves");
    check.likely(check.got(0) > 2 * 13.477, "what a rank sends does not grow with n: a step moves X/n, and tends to 2 X in all");
    check.verdict();
  }
}

TEST_CASE("time of a ring: 200 MB, 8 ranks, 100 us, 12.5 GB/s") {
  struct Row { double bytes; int n; double latency, bandwidth, ms; };
  for (const Row& row : {Row{200e6, 8, 100e-6, 12.5e9, 29.4}, Row{1000, 16, 10e-6, 1e9, 0.301875}, Row{1e9, 1, 1, 1, 0}}) {
    Check check(1, format("%g bytes, %d ranks, %g us a step, %g GB/s", row.bytes, row.n, row.latency * 1e6, row.bandwidth / 1e9),
                "2 (n-1) steps, each with its latency and X/n bytes");
    check.name_values({"milliseconds"});
    check.tolerance(1e-5);
    check.call([&] { return std::vector<float>{float(1e3 * ring_seconds(row.bytes, row.n, row.latency, row.bandwidth))}; });
    check.want({float(row.ms)});
    check.likely(std::abs(check.got(0) * 2 - row.ms) < 1e-4 * row.ms, "half of it: there are 2 (n-1) steps, not n-1");
    check.likely(std::abs(check.got(0) + 2e3 * (row.n - 1) * row.latency - row.ms) < 1e-4 * row.ms, "the latency of 2 (n-1) steps is missing");
    check.likely(check.got(0) < 0.6 * row.ms, "a ring has no log2 in it (a tree has): 2 (n-1) latencies");
    check.verdict();
  }
}

TEST_CASE("bus bandwidth: 1 GB in 10 ms on 8 and 2 ranks") {
  for (auto [n, want] : {std::pair{8, 175.}, {2, 100.}}) {
    Check check(1, format("1 GB in 10 ms on %d ranks", n), "busbw = algbw x 2 (n-1)/n for an all-reduce, algbw = X / time");
    check.name_values({"GB/s"});
    check.tolerance(1e-5);
    check.call([&, n = n] { return std::vector<float>{float(bus_bandwidth(1e9, n, 10e-3) / 1e9)}; });
    check.want({float(want)});
    check.likely(check.got(0) == 100, "this is algbw: what a link really carries is 2 (n-1)/n times it");
    check.verdict();
  }
}

TEST_CASE("ZeRO's communication: 2, 2, 2, 3 Psi") {
  for (int n : {8, 2}) {
    Check check(1, format("10^9 parameters on %d ranks, one micro-batch", n),
                "DDP, ZeRO-1 and ZeRO-2: reduce-scatter + all-gather, 2 Psi (n-1)/n; ZeRO-3 one\nall-gather more, 3 Psi (n-1)/n");
    check.name_values({"DDP, 10^9 elements", "ZeRO-1", "ZeRO-2", "ZeRO-3"});
    check.tolerance(1e-5);
    check.call([&] {
      std::vector<float> got;
      for (int stage = 0; stage < 4; ++stage) got.push_back(float(zero_sent(stage, 1e9, n) / 1e9));
      return got;
    });
    const float whole = float(n - 1) / float(n);
    check.want({2 * whole, 2 * whole, 2 * whole, 3 * whole});
    check.likely(check.got(0, 1) > 2 * whole, "ZeRO-1 and ZeRO-2 send as much as DDP: reduce-scatter + all-gather is an all-reduce");
    check.likely(check.got(0, 3) < 2 * whole, "ZeRO saves memory, not communication");
    check.verdict();
  }
}
