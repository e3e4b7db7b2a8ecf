// The formulas of communication: golden values from interviews and papers, and what must hold for any sizes.
#include <doctest/doctest.h>

#include <cmath>

#include "../src/formulas.h"

namespace {
bool about(double value, double given, double unit) { return std::abs(value - given) <= 0.5 * unit * 1.000001; }
}  // namespace

TEST_CASE("communication: what a rank sends") {
  for (auto [n, share] : {std::pair(2., 1.), {4., 1.5}, {8., 1.75}, {16., 1.875}})  // X24
    CHECK(sent_share(Collective::all_reduce, n) == share);
  CHECK(sent_share(Collective::reduce_scatter, 8) + sent_share(Collective::all_gather, 8) == sent_share(Collective::all_reduce, 8));
  CHECK(sent_share(Collective::all_to_all, 8) == 0.875);
  CHECK(sent_share(Collective::broadcast, 8) == 1);
  CHECK(about(13.477 * sent_share(Collective::all_reduce, 8), 23.58, 0.01));  // Llama-2-7B in bf16
  CHECK(about(13.477 * sent_share(Collective::all_reduce, 64), 26.53, 0.01));
  CHECK(about(2 * 175e9 / 64 / 1e9, 5.5, 0.1));  // X61
  CHECK(hierarchical_bytes_between(8e9, 4, 8) == 1.5e9);
  CHECK(hierarchical_bytes_between(8e9, 1, 8) == 0);
}

TEST_CASE("communication: a ring all-reduce to the element") {
  CHECK(ring_all_reduce_sent(10, 3, 0) == 14);
  CHECK(ring_all_reduce_sent(10, 3, 1) == 13);
  CHECK(ring_all_reduce_sent(10, 3, 2) == 13);
  for (int n = 1; n <= 9; ++n)
    for (int X = 0; X <= 30; ++X) {
      int64_t all = 0;
      for (int r = 0; r < n; ++r) all += ring_all_reduce_sent(X, n, r);
      CHECK(all == 2 * (n - 1) * X);  // as many as to a root and back, but shared
    }
}

TEST_CASE("communication: how long an all-reduce takes") {
  CHECK(about(1e3 * ring_all_reduce_seconds(200e6, 8, 100e-6, 12.5e9), 29.4, 0.1));  // X56
  CHECK(about(1e3 * ring_all_reduce_seconds(1e9, 8, 0, 450e9), 3.9, 0.1));
  CHECK(about(1e3 * ring_all_reduce_seconds(1e9, 8, 0, 50e9), 35, 1));
  CHECK(about(1e6 * ring_all_reduce_seconds(0, 64, 5e-6, 1), 630, 1));
  CHECK(about(1e6 * tree_all_reduce_seconds(0, 64, 5e-6, 1), 60, 1));
  CHECK(halving_all_reduce_seconds(0, 64, 5e-6, 1) == tree_all_reduce_seconds(0, 64, 5e-6, 1));
  CHECK(halving_all_reduce_seconds(1e9, 64, 0, 1e9) == ring_all_reduce_seconds(1e9, 64, 0, 1e9));
  CHECK(root_all_reduce_seconds(1e9, 8, 0, 1e9) == 14);
  CHECK(server_seconds(1e9, 8, 1, 0, 1e9) == 14);
  CHECK(server_seconds(1e9, 8, 2, 0, 1e9) == 7);
  CHECK(server_seconds(1e9, 8, 7, 0, 1e9) == 2);  // a worker that serves nothing still gives away everything
  CHECK(server_seconds(1e9, 8, 8, 0, 1e9) == 1.75);
  CHECK(server_seconds(1e9, 1, 1, 1, 1e9) == 0);
}

TEST_CASE("communication: overlap, stragglers, efficiency") {
  CHECK(about(overlapped_seconds(560, 800. / 560, 0.98), 801, 1));   // X54
  CHECK(about(overlapped_seconds(560, 800. / 560, 2), 1121, 1));
  for (double drained : {0.1, 1., 1.5, 3.}) {
    std::vector<double> ready, drain;
    for (int i = 1; i <= 20; ++i) ready.push_back(i * 1.2), drain.push_back(drained);
    CHECK(std::abs(last_reduced(ready, drain) - overlapped_seconds(20, 1.2, drained)) < 1e-9);
  }
  CHECK(last_reduced({1, 2, 10}, {5, 1, 1}) == 11);
  CHECK(last_reduced({}, {}) == 0);
  CHECK(about(scaling_efficiency(7.6, 8, 1), 0.95, 0.001));          // X40
  CHECK(about(scaling_efficiency(15.1e15, 512, 39e12), 0.76, 0.01));
  CHECK(about(straggler_share(0.001, 1024), 0.64, 0.01));
}
