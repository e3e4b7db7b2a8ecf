#include "../harness/check.h"

// `positions`: the value tells the place too.
static void check_reduce_scatter(int n, int64_t part, bool positions) {
  Check check(n, format("X = %lld elements; ", (long long)(n * part)) +
                     (positions ? "element i of rank r is (r + 1)(i + 1)" : "rank r contributes 8^r in each"),
              "reduce-scatter: rank r ends with part r of the sum; sent (n-1)/n X, in n-1 messages");
  auto value = [&](int r, int64_t i) { return positions ? float((r + 1) * (i + 1)) : fingerprint(r); };
  if (!positions) check.decode_sums();
  check.run([&](Rank& me) {
    std::vector<float> mine(n * part);
    for (int64_t i = 0; i < n * part; ++i) mine[i] = value(me.rank, i);
    FloatBuffer x = me.floats(mine), out = me.unfilled(part);
    me.measure([&] { ring_reduce_scatter(me.group, out, x); });
    me.output(out);
  });
  for (int r = 0; r < n; ++r) {
    std::vector<float> want(part);
    for (int64_t i = 0; i < part; ++i)
      for (int q = 0; q < n; ++q) want[i] += value(q, r * part + i);
    check.want(r, want);
    check.sends(r, 4 * (n - 1) * part, n - 1);
  }
  check.memory(0, "`out` takes what arrives, and x may be overwritten");
  check.likely(check.deadlocked(), "every rank waits in its send for a receive that comes after it: put each send and its\nreceive into one Group::Together");
  auto sum = [&](int64_t i) {
    float all = 0;
    for (int q = 0; q < n; ++q) all += value(q, i);
    return all;
  };
  check.likely(check.sent(0) > 4 * (n - 1) * part, "reduce-scatter takes n-1 steps: after them part r is complete, and a step more moves it once more");
  if (check.wrong_values()) {
    check.likely(n > 1 && !positions && check.all_got([&](int r, int64_t) { return fingerprint((r + n - 1) % n) + fingerprint(r); }),
                 "send on what you have just added to (part r-1-k), not the part of the first step again");
    check.likely(n > 1 && !positions && check.all_got([&](int r, int64_t) { return fingerprint((r + 1) % n); }), "add what arrives to your part, do not overwrite it");
    check.likely(n > 1 && positions && check.all_got([&](int r, int64_t i) { return sum((r + 1) % n * part + i); }), "this is another part of the sum: rank r must end with part r");
    check.likely(n > 1 && check.all_got([&](int r, int64_t i) { return value(r, r * part + i) + value((r + n - 1) % n, r * part + i); }) && n > 2,
                 "send on what you have just added to (part r-1-k), not the part of the first step again");
    check.likely(!positions, "rank r must end with part r: in step k it sends part r-1-k and adds part r-2-k");
  }
  check.verdict();
}

static void check_all_gather(int n, int64_t part) {
  Check check(n, format("X = %lld elements; element i of part r is 1000 r + i", (long long)(n * part)),
              "all-gather: everybody ends with all parts in rank order; sent (n-1)/n X, in n-1 messages");
  check.run([&](Rank& me) {
    std::vector<float> part_r(part);
    for (int64_t i = 0; i < part; ++i) part_r[i] = float(1000 * me.rank + i);
    FloatBuffer mine = me.floats(part_r), out = me.unfilled(n * part);
    me.measure([&] { ring_all_gather(me.group, out, mine); });
    me.output(out);
  });
  std::vector<float> want;
  for (int r = 0; r < n; ++r)
    for (int64_t i = 0; i < part; ++i) want.push_back(float(1000 * r + i));
  for (int r = 0; r < n; ++r) check.want(r, want), check.sends(r, 4 * (n - 1) * part, n - 1);
  check.memory(0, "each part has its place in out");
  check.likely(check.deadlocked(), "every rank waits in its send for a receive that comes after it: put each send and its\nreceive into one Group::Together");
  check.likely(check.wrong_values() && std::isnan(check.got(0)), "a rank's own part does not travel: copy `mine` to its place in out first");
  check.likely(check.wrong_values(), "pass on the part that has just arrived: in step k send part r-k, receive part r-k-1");
  check.verdict();
}

TEST_CASE("reduce-scatter: the sum of all ranks") {
  for (int n : {4, 3, 2, 1, 8}) check_reduce_scatter(n, 3, false);
}
TEST_CASE("reduce-scatter: each part where it belongs") {
  for (int n : {4, 3, 2, 1, 8}) check_reduce_scatter(n, 5, true);
}
TEST_CASE("all-gather: all parts in rank order") {
  for (int n : {4, 3, 2, 1, 8}) check_all_gather(n, 3);
}
