#include "../harness/check.h"

static const char* const kRule = "every rank has one next and one previous rank, in 0 .. n-1; the next of my previous is me";

TEST_CASE("next and previous at 1, 2, 3, 4 and 8 ranks") {
  for (int n : {4, 1, 2, 3, 8}) {
    Check check(1, format("a ring of %d", n), kRule);
    std::vector<std::string> names;
    std::vector<float> want;
    for (int r = 0; r < n; ++r) {
      names.push_back(format("next of rank %d", r)), names.push_back(format("previous of rank %d", r));
      want.push_back(float(r + 1 == n ? 0 : r + 1)), want.push_back(float(r == 0 ? n - 1 : r - 1));
    }
    check.name_values(names);
    check.call([&] {
      std::vector<float> got;
      for (int r = 0; r < n; ++r) {
        const Neighbors at = ring_neighbors(r, n);
        got.push_back(float(at.next)), got.push_back(float(at.previous));
      }
      return got;
    });
    check.want(want);
    auto all = [&](auto value) {
      for (int r = 0; r < n; ++r)
        if (check.got(0, 2 * r) != value(r).first || check.got(0, 2 * r + 1) != value(r).second) return false;
      return true;
    };
    check.likely(n != 4 && all([&](int r) { return std::pair<int, int>((r + 1) % 4, (r + 3) % 4); }),
                 "it works for one number of ranks only: use `ranks`, not a constant");
    check.likely(check.got(0, 1) == -1, "in C++ -1 % 4 is -1: add n before taking the remainder");
    check.likely(check.got(0, 2 * n - 2) == float(n), "the ring does not close: rank n-1's next is rank 0");
    check.likely(all([&](int r) { return std::pair<int, int>((r + n - 1) % n, (r + 1) % n); }), "next and previous are swapped");
    check.likely(all([&](int r) { return std::pair<int, int>(r ^ 1, r ^ 1); }), "these are pairs of ranks, not a ring: right for 2 ranks only");
    check.verdict();
  }
}

TEST_CASE("a token that everybody passes on comes home") {
  for (int n : {2, 3, 4, 8}) {
    Check check(n, "each rank sends its fingerprint 8^r to its next, n times", kRule);
    check.decode_sums();
    check.run([&](Rank& me) {
      const Neighbors at = ring_neighbors(me.rank, n);
      FloatBuffer token = me.floats({fingerprint(me.rank)}), arrived = me.unfilled(1);
      me.measure([&] {
        for (int step = 0; step < n; ++step) {
          {
            Group::Together together;
            me.group.send<float>(token, at.next);
            me.group.receive<float>(arrived, at.previous);
          }
          std::swap(token, arrived);
        }
      });
      me.output(token);
    });
    for (int r = 0; r < n; ++r) check.want(r, {fingerprint(r)}), check.sends(r, 4 * n, n);
    check.likely(check.deadlocked(), "one rank's next must have that rank as its previous");
    check.verdict();
  }
}
