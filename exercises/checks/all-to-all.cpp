#include "../harness/check.h"

static void check_all_to_all(int n, int64_t part) {
  Check check(n, format("blocks of %lld; element i of rank r's block for rank p is 1000 r + 100 p + i", (long long)part),
              "all-to-all: block p of rank r becomes block r of rank p; sent (n-1)/n X");
  auto value = [](int from, int to, int64_t i) { return float(1000 * from + 100 * to + i); };
  check.run([&](Rank& me) {
    std::vector<float> mine;
    for (int p = 0; p < n; ++p)
      for (int64_t i = 0; i < part; ++i) mine.push_back(value(me.rank, p, i));
    FloatBuffer in = me.floats(mine), out = me.unfilled(n * part);
    me.measure([&] { all_to_all(me.group, out, in); });
    me.output(out);
  });
  for (int r = 0; r < n; ++r) {
    std::vector<float> want;
    for (int p = 0; p < n; ++p)
      for (int64_t i = 0; i < part; ++i) want.push_back(value(p, r, i));
    check.want(r, want);
    check.sends(r, 4 * (n - 1) * part, n - 1);
  }
  check.memory(0, "blocks go from in to out");
  check.likely(check.deadlocked() || check.says("to itself"), "each rank waits for a peer that waits for another: put all sends and receives into one Group::Together");
  check.likely(!check.ran() && (check.says("send") || check.says("recv")), "the two sides do not agree: send a block, not the whole tensor, and receive a block");
  if (check.wrong_values() && n > 1) {
    auto is = [&](auto which) {
      return check.all_got([&](int r, int64_t k) { return which(r, int(k / part), k % part); });
    };
    check.likely(std::isnan(check.got(0)) && !std::isnan(check.got(1, 0)), "the block for yourself is missing: it goes from in to out like the others");
    check.likely(is([&](int, int p, int64_t i) { return value(p, p, i); }), "each peer gets a block of its own: block `peer`, not block `rank`");
    check.likely(is([&](int r, int p, int64_t i) { return value(n - 1 - p, r, i); }), "the block from rank i is block i of out");
    check.likely(std::isnan(check.got(0, part)), "it looks as if every peer's block went into the same place: from rank i it is block i of out");
  }
  check.verdict();
}

TEST_CASE("blocks of 3") {
  for (int n : {4, 2, 3, 1, 8}) check_all_to_all(n, 3);
}
TEST_CASE("blocks of 1 and 50") {
  for (int n : {1, 2, 3, 4, 8})
    for (int64_t part : {1, 50}) check_all_to_all(n, part);
}
