#include "../harness/check.h"

namespace {
constexpr int N = 6, V = 24;
// Row i has its own scale and offset; the target is the best word, another one, or hopeless.
struct Case {
  const char* what;
  double scale, offset;
};
double logit(const Case& c, int i, int v) { return float(c.offset + c.scale * ((i * 7 + v * 5) % 11 - 5)); }
int target_of(int i) { return (i * 9 + 2) % V; }
}  // namespace

static void check_loss(int t, const Case& c) {
  Check check(t, format("%d rows, V=%d; %s", N, V, c.what),
              "loss = log sum exp(logit - m) - (logit of the target - m), m over all words;\nsent three all-reduces of N, 6 N (t-1)/t");
  check.tolerance(2e-5);
  const int words = V / t;
  check.run([&](Rank& me) {
    std::vector<float> mine;
    std::vector<int> target;
    for (int i = 0; i < N; ++i) {
      target.push_back(target_of(i));
      for (int v = 0; v < words; ++v) mine.push_back(float(logit(c, i, me.rank * words + v)));
    }
    FloatBuffer logits = me.floats(mine), loss = me.unfilled(N);
    IntBuffer targets = me.ints(target);
    me.measure([&] { vocab_cross_entropy(me.group, loss, FloatTensor(logits.data, {N, words}), targets); });
    me.output(loss);
  });
  std::vector<double> best(N), all(N);
  std::vector<float> want;
  for (int i = 0; i < N; ++i) {
    best[i] = logit(c, i, 0);
    for (int v = 1; v < V; ++v) best[i] = std::max(best[i], logit(c, i, v));
    for (int v = 0; v < V; ++v) all[i] += std::exp(logit(c, i, v) - best[i]);
    want.push_back(float(std::log(all[i]) - (logit(c, i, target_of(i)) - best[i])));
  }
  for (int r = 0; r < t; ++r) {
    auto count = [&](int i) { return N / t + (i % t < N % t); };
    check.want(r, want);
    check.sends(r, t == 1 ? 0 : 3 * 4 * (2 * N - count(r + 1) - count(r + 2)));
  }
  check.memory(3 * 4 * N, "a maximum, a sum and a logit per row");
  if (check.wrong_values()) {
    auto offset_by = [&](double extra) {
      return check.all_got([&](int, int64_t i) { return float(want[i] + extra); });
    };
    double shifted = check.got(0) - want[0];
    check.likely(t > 1 && offset_by(std::log(t)), "log t too large: the sum of exp was reduced twice");
    check.likely(check.got(0) == -INFINITY && c.offset < -10000, "exp of everything is 0, and log of 0 infinite: a maximum must start at a logit or -infinity,\nnot at a number that logits may lie below");
    check.likely(t > 1 && check.called(0, "all_reduce") == 2 && check.all_got([&](int r, int64_t i) {
      const int mine = target_of(int(i)) / words;
      return r == mine ? want[i] : float(std::log(all[i]));
    }), "the target's logit is on one rank only: sum it over ranks, the others give 0");
    check.likely(t > 1 && check.called(0, "all_reduce") == 2 && check.all_got([&](int r, int64_t i) {
      double sum = 0;
      for (int v = r * words; v < (r + 1) * words; ++v) sum += std::exp(logit(c, int(i), v) - best[i]);
      return float(want[i] - std::log(all[i]) + std::log(sum));
    }), "the sum of exp is that of this rank's words only: reduce it, or each rank normalises its own softmax");
    check.likely(t > 1 && check.called(0, "all_reduce") == 2, "each rank subtracts a maximum of its own, so their sums of exp do not belong together: reduce it first");
    check.likely(t > 1 && check.all_got([&](int, int64_t i) {
      double given = 0;
      for (int r = 0; r < t; ++r) given += logit(c, int(i), r * words + target_of(int(i)) % words) - best[i];
      return float(std::log(all[i]) - given);
    }), "every rank gave a logit for the target: only the rank whose words hold it may");
    std::vector<double> sum_of_maxima(N);
    for (int i = 0; i < N; ++i)
      for (int r = 0; r < t; ++r) {
        double m = logit(c, i, r * words);
        for (int v = r * words; v < (r + 1) * words; ++v) m = std::max(m, logit(c, i, v));
        sum_of_maxima[i] += m;
      }
    check.likely(t == 1 || std::isfinite(shifted) ? check.all_got([&](int, int64_t i) { return float(want[i] + best[i]); }) ||
                 check.all_got([&](int, int64_t i) {
                   double sum = 0;
                   for (int v = 0; v < V; ++v) sum += std::exp(logit(c, int(i), v));
                   return float(std::log(sum) - (logit(c, int(i), target_of(int(i))) - best[i]));
                 }) : false, "subtract the maximum before exp as well as from the target's logit");
    check.likely(true, "reduce the maximum over ranks, not their sum; subtract it before exp, and from the target's logit");
  }
  check.likely(check.sent(0) > 3 * 4 * 2 * N, "logits must not travel: three numbers per row are enough");
  check.verdict();
}

TEST_CASE("ordinary logits") {
  for (int t : {4, 2, 3, 1, 8}) check_loss(t, {"logits from -2 to 2", 0.4, 0.1});
}
TEST_CASE("all logits near -20000, and near 20000") {
  for (int t : {2, 3, 4, 1, 8}) check_loss(t, {"logits around -20000", 0.5, -20000}), check_loss(t, {"logits around 20000", 0.5, 20000});
}
TEST_CASE("confident: a wrong answer costs 1000s, not infinity") {
  for (int t : {2, 3, 4, 1, 8}) check_loss(t, {"logits from -5000 to 5000", 1000, 0});
}
