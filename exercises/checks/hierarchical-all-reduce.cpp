#include "../harness/check.h"

static void check_two_levels(int M, int k, int64_t X, bool positions) {
  const int n = M * k;
  Check check(n, format("%d node%s of %d, X = %lld; ", M, M > 1 ? "s" : "", k, (long long)X) +
                     (positions ? "element i of rank r is (r + 1)(i + 1)" : "rank r contributes 8^r"),
              "every rank ends with the sum of all; sent between nodes 2 (M-1)/M X/k per rank,\ninside a node 2 (k-1)/k X");
  auto value = [&](int r, int64_t i) { return positions ? float((r + 1) * (i + 1)) : fingerprint(r); };
  if (!positions) check.decode_sums();
  check.run([&](Rank& me) {
    auto node = me.world.split(me.rank / k, me.rank, "node");
    auto across = me.world.split(me.rank % k, me.rank, "across");
    std::vector<float> mine(X);
    for (int64_t i = 0; i < X; ++i) mine[i] = value(me.rank, i);
    FloatBuffer x = me.floats(mine);
    me.measure([&] { hierarchical_all_reduce(*node, *across, x); });
    me.output(x);
  });
  std::vector<float> sum(X, 0.f);
  for (int64_t i = 0; i < X; ++i)
    for (int r = 0; r < n; ++r) sum[i] += value(r, i);
  const int64_t part = X / k;
  for (int r = 0; r < n; ++r) {
    auto c = [&](int64_t i) { return part / M + (i % M < part % M); };
    check.want(r, sum);
    check.sends_in(r, "across", M == 1 ? 0 : 4 * (2 * part - c(r / k + 1) - c(r / k + 2)));
    check.sends_in(r, "node", 4 * 2 * (k - 1) * part);
  }
  check.memory(4 * part, "one part, X/k");
  auto node_sum = [&](int r, int64_t i) {
    float all = 0;
    for (int q = 0; q < k; ++q) all += value(r / k * k + q, i);
    return all;
  };
  const int64_t across = check.sent_in(0, "across"), c0 = part / M + (1 % M < part % M), c1 = part / M + (2 % M < part % M);
  const bool more_across = M > 1 && across > 4 * (2 * part - c0 - c1);
  if (check.wrong_values()) {
    check.likely(M > 1 && across == 0 && check.all_got(node_sum), "nothing crosses between the nodes: sum the parts in group `across`");
    check.likely(M > 1 && across == 0, "the parts must be summed across the nodes, not inside the node");
    check.likely(more_across && check.all_got([&](int, int64_t i) { return M * sum[i]; }), "summed over the nodes twice: one all-reduce in group `across` is enough");
    check.likely(check.all_got([&](int, int64_t i) { return k * sum[i]; }), "k times the sum: the last step only gathers, it must not add again");
    check.likely(k > 1 && check.got(0) == value(0, 0), "x is as it was: the all-gather is missing, which brings the parts home");
  }
  check.likely(more_across, "k times too much between the nodes: first reduce-scatter inside, then all-reduce the part only");
  check.verdict();
}

TEST_CASE("two nodes of two and of four: the sum of all ranks") {
  check_two_levels(2, 2, 12, false);
  check_two_levels(2, 4, 8, false);
}
TEST_CASE("each element in its place, also with three nodes") {
  for (auto [M, k] : {std::pair{2, 2}, {3, 1}, {1, 3}, {4, 2}, {2, 4}, {1, 1}}) check_two_levels(M, k, 60, true);
}
