#include "../harness/check.h"

// Powers of two throughout, so that every number is exact.
static void check_steps(int d, int share, int steps) {
  const int X = share * d;
  const float lr = 0.5f, beta = 0.5f;
  Check check(d, format("Psi=%d, %d step%s, lr 1/2, beta 1/2; rank r's gradient of element i is %d (r + 1)(i + 1)", X, steps, steps > 1 ? "s" : "", d),
              "weights as one rank has them after the mean gradient; sent 2 (d-1)/d Psi per step:\none reduce-scatter, one all-gather");
  auto gradient = [&](int r, int i) { return float(d * (r + 1) * (i + 1)); };
  check.run([&](Rank& me) {
    std::vector<float> start(X);
    for (int i = 0; i < X; ++i) start[i] = float(1000 + i);
    FloatBuffer weights = me.floats(start), momentum = me.floats(std::vector<float>(share, 0.f)), gradients = me.unfilled(X);
    me.measure([&] {
      for (int s = 0; s < steps; ++s) {
        for (int i = 0; i < X; ++i) gradients.data[i] = gradient(me.rank, i);
        zero1_step(me.group, weights, gradients, momentum, lr, beta);
      }
    });
    me.output(weights);
  });
  // One rank with every gradient; `g` of an element may be a mistaken one.
  auto trained = [&](int i, float g, bool state, bool through_momentum = true) {
    float w = float(1000 + i), m = 0;
    for (int s = 0; s < steps; ++s) m = (state ? beta * m : 0) + g, w -= lr * (through_momentum ? m : g);
    return w;
  };
  auto sum = [&](int i) {
    float all = 0;
    for (int r = 0; r < d; ++r) all += gradient(r, i);
    return all;
  };
  for (int r = 0; r < d; ++r) {
    std::vector<float> want;
    for (int i = 0; i < X; ++i) want.push_back(trained(i, sum(i) / float(d), true));
    check.want(r, want);
    check.sends(r, int64_t(steps) * 4 * 2 * (d - 1) * share);
    check.calls(r, "all_reduce", 0);
  }
  check.memory(4 * share, "one share of the gradients");
  check.likely(check.called(0, "all_reduce") > 0, "a reduce-scatter is enough: an all-reduce brings the sums of everybody's shares, and all-gather comes on top: 3 Psi");
  if (check.wrong_values()) {
    auto is = [&](auto value) { return check.all_got([&](int r, int64_t i) { return value(r, int(i)); }); };
    check.likely(check.called(0, "reduce_scatter") == 0, "this rank's own gradients only: reduce-scatter them first");
    check.likely(is([&](int, int i) { return trained(i, sum(i), true); }), "the mean over ranks, not the sum: divide by d");
    check.likely(is([&](int, int i) { return trained(i, sum(i) / float(d), false); }), "the momentum from the step before is lost: momentum = beta momentum + g, and the weights move by momentum");
    check.likely(d > 1 && is([&](int r, int i) { return i / share == r ? trained(i, sum(i) / float(d), true) : float(1000 + i); }),
                 "each rank has updated its own share only: all-gather the weights, or the copies drift apart");
    check.likely(d > 1, "each rank updates its own share, chunk r of d, with its own part of the summed gradients");
  }
  check.verdict();
}

TEST_CASE("one step: weights equal those of one rank") {
  for (int d : {4, 2, 1, 8, 3}) check_steps(d, 5, 1);
}
TEST_CASE("three steps: the state is kept") {
  for (int d : {4, 2, 1, 8, 3}) check_steps(d, 1, 3), check_steps(d, 5, 3);
}
