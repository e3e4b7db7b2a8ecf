#include "../harness/check.h"

// Plays the schedules of all stages: work starts when its input is there (a forward from the stage before, a gradient
// from the stage after) and the stage is free. One forward takes 1, one backward 2.
struct Played {
  int stuck = -1;           // a stage that waits for ever, and for what
  std::string waits;
  double makespan = 0;
  std::vector<int> stash;   // most micro-batches kept at a time
  bool complete = true, repeated = false, ordered = true, beyond = false;
};

static Played play(const std::vector<std::vector<Work>>& order, int m) {
  const int p = int(order.size());
  Played out;
  out.stash.assign(p, 0);
  for (const auto& stage : order) {
    std::vector<int> f(m), b(m);
    int last_f = -1, last_b = -1;
    for (const Work& w : stage) {
      if (w.micro_batch < 0 || w.micro_batch >= m || (w.kind != 'F' && w.kind != 'B')) { out.beyond = true; continue; }
      int& last = w.kind == 'F' ? last_f : last_b;
      out.ordered = out.ordered && w.micro_batch > last;
      last = w.micro_batch;
      out.repeated = out.repeated || ++(w.kind == 'F' ? f : b)[w.micro_batch] > 1;
    }
    for (int j = 0; j < m; ++j) out.complete = out.complete && f[j] && b[j];
  }
  if (out.beyond || out.repeated) return out;
  std::vector<std::vector<double>> done_f(p, std::vector<double>(m, -1)), done_b = done_f;
  std::vector<size_t> next(p, 0);
  std::vector<double> free(p, 0);
  std::vector<int> kept(p, 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < p; ++i)
      while (next[i] < order[i].size()) {
        const Work w = order[i][next[i]];
        double ready = 0;
        if (w.kind == 'F') ready = i == 0 ? 0 : done_f[i - 1][w.micro_batch];
        else ready = done_f[i][w.micro_batch] < 0 ? -1 : i + 1 == p ? done_f[i][w.micro_batch] : done_b[i + 1][w.micro_batch];
        if (ready < 0) break;
        free[i] = std::max(free[i], ready) + (w.kind == 'F' ? 1 : 2);
        (w.kind == 'F' ? done_f : done_b)[i][w.micro_batch] = free[i];
        kept[i] += w.kind == 'F' ? 1 : -1;
        out.stash[i] = std::max(out.stash[i], kept[i]);
        ++next[i], moved = true;
      }
  }
  for (int i = 0; i < p; ++i) {
    out.makespan = std::max(out.makespan, free[i]);
    if (next[i] < order[i].size()) {
      const Work w = order[i][next[i]];
      const bool itself = w.kind == 'B' && done_f[i][w.micro_batch] < 0;
      out.stuck = std::max(out.stuck, itself ? 1 : 0);  // the cause, rather than those who wait for it
      out.waits += format("%sstage %d waits in %c%d for %s", out.waits.empty() ? "" : "; ", i, w.kind, w.micro_batch,
                          itself ? "its own forward, which comes later" : w.kind == 'F' ? format("F%d of stage %d", w.micro_batch, i - 1).c_str()
                          : format("B%d of stage %d", w.micro_batch, i + 1).c_str());
    }
  }
  return out;
}

static void check_schedule(int p, int m, double golden = 0) {
  Check check(1, format("p=%d stages, m=%d micro-batches, tF=1, tB=2", p, m),
              "1F1B: min(p-i-1, m) forwards, then one of each, then drain. Stage i keeps\nmin(p-i, m) micro-batches; makespan (m + p - 1) (tF + tB)");
  std::vector<std::vector<Work>> order(p);
  Played played;
  check.call([&] {
    for (int i = 0; i < p; ++i) order[i] = schedule_1f1b(i, p, m);
    played = play(order, m);
    std::vector<float> got{float(played.makespan)};
    for (int kept : played.stash) got.push_back(float(kept));
    return got;
  });
  std::vector<std::string> names{"makespan"};
  std::vector<float> want{float(golden > 0 ? golden : 3. * (m + p - 1))};
  for (int i = 0; i < p; ++i) names.push_back(format("micro-batches kept on stage %d", i)), want.push_back(float(std::min(p - i, m)));
  check.name_values(names);
  check.want(want);
  if (check.ran()) {
    if (played.beyond) check.complain("order", "there is work on micro-batches that do not exist, or of no kind F or B");
    else if (played.repeated) check.complain("order", "a micro-batch goes forward or backward twice on one stage");
    else if (played.stuck >= 0) check.complain("deadlock", played.waits);
    else if (!played.complete) check.complain("order", "not every micro-batch goes forward and backward on every stage");
    else if (!played.ordered) check.complain("order", "micro-batches are not in the order 0 .. m-1");
    check.likely(played.beyond, "more forwards than there are micro-batches: clamp the warm-up, min(p-i-1, m)");
    check.likely(played.stuck == 1, "a backward waits for itself to go forward first: in the steady phase the forward comes before the backward");
    check.likely(!played.complete && played.stuck <= 0, "the drain is missing: backwards that are left when no forward is");
    bool all_m = true, same = true, one = true;
    for (int i = 0; i < p; ++i) {
      all_m = all_m && check.got(0, i + 1) == m;
      same = same && check.got(0, i + 1) == std::min(p, m);
      one = one && check.got(0, i + 1) == std::min(p - i + 1, m);
    }
    check.likely(m > p && all_m, "this is GPipe, all forwards first: as fast, but it keeps m micro-batches on every stage");
    check.likely(m > p && p > 1 && same, "the same warm-up on every stage: a stage needs as many forwards as there are stages after it");
    check.likely(m > p && one, "one micro-batch more than needed is kept: the warm-up is p-i-1, the next forward belongs to the steady phase");
  }
  check.verdict();
}

TEST_CASE("p=4 m=8: 33 units, as GPipe (ideal 24); kept 4 3 2 1") { check_schedule(4, 8, 33); }
TEST_CASE("other golden makespans: p=4 m=16, p=8 m=16, p=2 m=4") {
  check_schedule(4, 16, 57), check_schedule(8, 16, 69), check_schedule(2, 4, 15);
}
TEST_CASE("fewer micro-batches than stages, and all sizes to p+1") {
  for (int p : {1, 2, 3, 4, 8})
    for (int m = 1; m <= p + 1; ++m) check_schedule(p, m);
}
