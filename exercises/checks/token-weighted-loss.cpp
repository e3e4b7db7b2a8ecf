#include "../harness/check.h"

static void check_loss(int n, const std::string& what, const std::vector<std::vector<float>>& losses, const std::vector<std::vector<int>>& targets) {
  Check check(n, what, "sum of the losses of all valid tokens / their number, over all ranks;\nsent: one all-reduce of 2 numbers");
  check.tolerance(1e-6);
  check.name_values({"mean loss"});
  check.run([&](Rank& me) {
    FloatBuffer mine = me.floats(losses[me.rank]);
    IntBuffer valid = me.ints(targets[me.rank]);
    float mean = NAN;
    me.measure([&] { mean = mean_loss(me.group, mine, valid); });
    me.output(std::vector<float>{mean});
  });
  double sum = 0, tokens = 0, all_tokens = 0, means = 0, all_losses = 0;
  bool empty_rank = false;
  for (int r = 0; r < n; ++r) {
    double s = 0, t = 0;
    for (size_t i = 0; i < losses[r].size(); ++i) {
      all_losses += losses[r][i];
      if (targets[r][i] != -1) s += losses[r][i], t += 1;
    }
    sum += s, tokens += t, all_tokens += double(losses[r].size()), means += s / t / n;
    empty_rank = empty_rank || t == 0;
  }
  const float want = tokens > 0 ? float(sum / tokens) : 0;
  for (int r = 0; r < n; ++r) {
    check.want(r, {want});
    auto c = [&](int i) { return 2 / n + (i % n < 2 % n); };
    check.sends(r, n == 1 ? 0 : 4 * (4 - c(r + 1) - c(r + 2)));
    check.calls(r, "all_reduce", 1);
  }
  check.memory(8, "a sum and a count");
  auto near = [](double a, double b) { return std::abs(a - b) < 1e-5 * std::abs(b); };
  const float got = check.got(0);
  if (check.ran()) {
    check.likely(check.called(0, "all_reduce") == 0, "each rank has its own mean: sum over the ranks before dividing");
    check.likely(check.called(0, "all_reduce") == 2, "both numbers travel in one all-reduce: latency is what this costs");
    check.likely(tokens > 0 && near(got, means), "this is the mean of the ranks' means: it gives the tokens of a rank with few of them more weight");
    check.likely(near(got, all_losses / all_tokens) && !near(want, got), "padding takes part, in the sum and in the count: leave out tokens whose target is -1");
    check.likely(tokens > 0 && near(got, sum / all_tokens) && !near(want, got), "padding is counted: divide by the number of valid tokens");
    check.likely(near(got, want / n) && n > 1, "divided by the number of ranks once more: the count is global already");
    check.likely(tokens == 0 || (empty_rank && std::isnan(got)), "0 divided by 0: a rank, or all of them, may have no valid token");
    check.likely(n > 1 && check.wrong_values(), "it needs a sum over ranks, not a maximum, of both numbers");
  }
  check.verdict();
}

// `padding` rows of each rank have a loss that must not be used.
static void check_random(int n, bool no_tokens, bool nan_padding) {
  std::vector<std::vector<float>> losses(n);
  std::vector<std::vector<int>> targets(n);
  for (int r = 0; r < n; ++r)
    for (int i = 0; i < 8; ++i) {
      const bool valid = !no_tokens && i <= 2 * r % 8 && r != 2;
      losses[r].push_back(valid ? float(1 + i + r) : nan_padding ? NAN : 100.f);
      targets[r].push_back(valid ? 5 : -1);
    }
  check_loss(n, no_tokens ? "8 tokens each, all of them padding" : nan_padding ? "8 tokens each, padding has loss NaN, rank 2 has only padding"
             : "8 tokens each, rank r has 2 r mod 8 + 1 valid ones, rank 2 none", losses, targets);
}

TEST_CASE("1 token of loss 2 and 7 of loss 1: 1.125, not 1.5") {
  check_loss(2, "losses: rank 0 [2], rank 1 [1 1 1 1 1 1 1]", {{2}, {1, 1, 1, 1, 1, 1, 1}}, {{3}, {1, 2, 3, 4, 5, 6, 7}});
}
TEST_CASE("padding counts in neither sum") {
  check_loss(2, "losses: rank 0 [2 9], rank 1 [1 1 1 9]; those of 9 are padding", {{2, 9}, {1, 1, 1, 9}}, {{3, -1}, {1, 2, 3, -1}});
  for (int n : {1, 2, 3, 4, 8}) check_random(n, false, false), check_random(n, false, true);
}
TEST_CASE("no valid token anywhere: 0") {
  for (int n : {1, 2, 3, 4, 8}) check_random(n, true, false);
}
