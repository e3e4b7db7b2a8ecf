#include "../harness/check.h"

static const char* const kRule =
    "all-reduce: every rank ends with the sum over ranks. On a ring rank r sends\n"
    "2X - |c(r+1)| - |c(r+2)| elements, in 2 (n-1) messages";

static void check_ring(int n, int64_t X, bool positions) {
  Check check(n, positions ? format("X = %lld elements; element i of rank r is (r + 1)(i + 1)", (long long)X)
                           : format("X = %lld elements; rank r contributes 8^r in each", (long long)X), kRule);
  if (!positions) check.decode_sums();
  auto value = [&](int rank, int64_t i) { return positions ? float((rank + 1) * (i + 1)) : fingerprint(rank); };
  check.run([&](Rank& me) {
    std::vector<float> mine(X);
    for (int64_t i = 0; i < X; ++i) mine[i] = value(me.rank, i);
    FloatBuffer x = me.floats(mine);
    me.measure([&] { ring_all_reduce(me.group, x); });
    me.output(x);
  });
  std::vector<float> sum(X, 0.f);
  for (int r = 0; r < n; ++r)
    for (int64_t i = 0; i < X; ++i) sum[i] += value(r, i);
  auto c = [&](int64_t i) { return X / n + (i % n < X % n); };
  for (int r = 0; r < n; ++r) {
    check.want(r, sum);
    check.sends(r, n == 1 ? 0 : 4 * (2 * X - c(r + 1) - c(r + 2)), n == 1 ? 0 : 2 * (n - 1));
  }
  check.memory(n == 1 ? 0 : 4 * c(0), "one chunk, the largest");

  // What the typical mistakes look like, played through without communication.
  auto play = [&](auto&& reduce_send, bool add, int reduce_steps, auto&& gather_send, auto&& gather_take, int gather_steps) {
    std::vector<std::vector<float>> x(n, std::vector<float>(n));  // chunks of one element, fingerprints
    for (int r = 0; r < n; ++r)
      for (int i = 0; i < n; ++i) x[r][i] = positions ? float(r + 1) : fingerprint(r);
    auto at = [&](int i) { return ((i % n) + n) % n; };
    for (int k = 0; k < reduce_steps; ++k) {
      const auto old = x;
      for (int r = 0; r < n; ++r) {
        const int p = at(r - 1);
        float& mine = x[r][at(r - k - 1)];
        mine = (add ? mine : 0) + old[p][at(reduce_send(p, k))];
      }
    }
    for (int k = 0; k < gather_steps; ++k) {
      const auto old = x;
      for (int r = 0; r < n; ++r) x[r][at(gather_take(r, k))] = old[at(r - 1)][at(gather_send(at(r - 1), k))];
    }
    return check.ran() && n > 1 && X >= n && check.all_got([&](int r, int64_t i) {
      int64_t begin = 0;
      int which = 0;
      while (i >= begin + c(which)) begin += c(which++);
      return x[r][which] * (positions ? float(i + 1) : 1);
    });
  };
  auto rk = [](int r, int k) { return r - k; };
  auto gs = [](int r, int k) { return r + 1 - k; };
  check.likely(check.deadlocked() && check.says("send"), "every rank waits in its send for a receive that comes after it, or in the wrong\n"
               "direction: put each send and its receive into one Group::Together, and send to the next rank and receive from\n"
               "the previous one");
  check.likely(check.says("disagree"), "the chunk that rank r sends in a step must be the one that rank r+1 receives: send r-k, receive r-k-1; then r+1-k and r-k");
  check.likely(n > 2 && check.sent(0) > 2 * check.sent(1), "everything goes through rank 0, whose link carries (n-1) X each way: give every rank a chunk to sum");
  check.likely(!check.wrong_values() && check.sent(0) > 2 * 4 * X && n > 1, "each chunk travels once per phase: 2 (n-1) messages of about X/n");
  check.likely(check.ran() && !check.wrong_values() && check.too_much_memory(), "a buffer of one chunk is enough: what arrives is added at once");
  check.likely(play(rk, true, n - 1, gs, rk, 0), "the all-gather is missing: rank r has only the sum of chunk r+1");
  check.likely(play(rk, true, n - 2, gs, rk, n - 1), "one step of the reduce-scatter is missing: it takes n-1");
  check.likely(play(rk, true, n, gs, rk, n - 1), "a step too many: reduce-scatter takes n-1 steps, after that a chunk would be added twice");
  check.likely(play(rk, false, n - 1, gs, rk, n - 1), "add what arrives to your chunk, do not overwrite it; or, if you add it: the all-gather starts with chunk r+1, not r");
  check.likely(play([](int r, int) { return r; }, true, n - 1, gs, rk, n - 1),
               "in step k send chunk r-k, the one that has just been added to, not chunk r again");
  check.likely(play(rk, true, n - 1, [](int r, int) { return r; }, [](int r, int) { return r - 1; }, n - 1),
               "after the reduce-scatter rank r holds the whole sum of chunk r+1: the all-gather starts with that one");
  check.likely(n > 2 && play(rk, true, n - 1, [](int r, int k) { return r + 1 + k; }, [](int r, int k) { return r + k; }, n - 1),
               "right with 2 ranks, wrong with 3: in the all-gather pass on what has just arrived, chunk r+1-k, not r+1+k");
  check.verdict();
}

TEST_CASE("24 elements: the sum of all ranks") {
  for (int n : {4, 2, 3, 1, 8}) check_ring(n, 24, false);
}
TEST_CASE("ragged and empty chunks: 10, 13, 3 and 1 elements") {
  for (int n : {2, 3, 4, 8})
    for (int64_t X : {10, 13, 3, 1}) check_ring(n, X, true);
}
TEST_CASE("1000 elements, each in its place") {
  for (int n : {1, 2, 3, 4, 8}) check_ring(n, 1000, true);
}
