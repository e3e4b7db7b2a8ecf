#include "../harness/check.h"

TEST_CASE("all copies start equal") {
  for (int n : {4, 2, 3, 1, 8}) {
    Check check(n, "6 weights; rank r was initialised with 8^r", "copies of the model start with the same weights, those of rank 0");
    check.decode_sums();
    check.run([&](Rank& me) {
      FloatBuffer weights = me.floats(std::vector<float>(6, fingerprint(me.rank)));
      me.measure([&] { ddp_start(me.group, weights); });
      me.output(weights);
    });
    for (int r = 0; r < n; ++r) check.want(r, std::vector<float>(6, fingerprint(0)));
    if (n > 1) {
      check.likely(check.wrong_values() && check.sent(0) == 0, "the copies start apart, and stay apart for ever: broadcast the weights once");
      check.likely(check.wrong_values(), "everybody takes the weights of rank 0: a sum or mean of initial values is no initialisation");
    }
    check.verdict();
  }
}

static void check_steps(int n, int micro_batches) {
  const int X = 12;
  Check check(n, format("%d gradients, %d micro-batch%s; rank r's gradient is n 8^r in each", X, micro_batches, micro_batches > 1 ? "es" : ""),
              "after the last micro-batch all ranks hold mean(gradient); weights unchanged;\nsent 2 (n-1)/n Psi, in one call");
  check.decode_sums();
  check.run([&](Rank& me) {
    const float mine = float(n) * fingerprint(me.rank);
    FloatBuffer weights = me.floats(std::vector<float>(2, fingerprint(me.rank))), gradients = me.floats(std::vector<float>(X, 0.f));
    me.measure([&] {
      for (int m = 0; m < micro_batches; ++m) {
        for (int i = 0; i < X; ++i) gradients.data[i] += mine;
        ddp_after_backward(me.group, weights, gradients, m == micro_batches - 1);
      }
    });
    std::vector<float> out = gradients.to_host();
    for (float w : weights.to_host()) out.push_back(w);
    me.output(out);
  });
  float mean = 0;
  for (int r = 0; r < n; ++r) mean += float(micro_batches) * fingerprint(r);
  for (int r = 0; r < n; ++r) {
    std::vector<float> want(X, mean);
    want.insert(want.end(), 2, fingerprint(r));
    check.want(r, want);
    auto c = [&](int i) { return X / n + (i % n < X % n); };
    check.sends(r, n == 1 ? 0 : 4 * (2 * X - c(r + 1) - c(r + 2)), n == 1 ? 0 : 2 * (n - 1));
    check.calls(r, "all_reduce", 1);
  }
  check.memory(0, "gradients are reduced in place");
  check.likely(check.ran() && check.got(0, X) != fingerprint(0), "average the gradients, not the weights: these change when the optimizer steps");
  check.likely(check.called(0, "all_reduce") == micro_batches && micro_batches > 1, "reduce only after the last micro-batch: before, every one of them would be reduced, and the first ones again");
  check.likely(check.called(0, "all_reduce") > 0 && check.called(0, "all_reduce") < micro_batches, "reduce after the last micro-batch, not after the first ones: what comes later is lost");
  check.likely(check.called(0, "all_reduce") == 0 && check.called(0, "reduce") > 0, "a reduce and a broadcast load rank 0 with everything: one all-reduce does it evenly");
  check.likely(check.ran() && check.called(0, "all_reduce") == 0 && check.got(0) == float(micro_batches), "each rank keeps its own gradient: nothing was reduced");
  check.likely(check.ran() && check.called(0, "all_reduce") == 0, "nothing happened after the last micro-batch: reduce then (last_micro_batch is true), and not after the first ones");
  check.likely(check.got(0) == mean * float(n) && n > 1, "this is the sum, not the mean: divide by the number of ranks");
  check.verdict();
}

TEST_CASE("one micro-batch: the mean gradient, and weights left alone") {
  for (int n : {4, 2, 3, 1, 8}) check_steps(n, 1);
}
TEST_CASE("three micro-batches: one reduction") {
  for (int n : {2, 3, 4, 1, 8}) check_steps(n, n < 8 ? 3 : 2);
}
