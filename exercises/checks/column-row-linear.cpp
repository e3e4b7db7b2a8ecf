#include "../harness/check.h"

namespace {
constexpr int N = 3, D = 4, H = 24;
// Small integers: all sums are exact in any order.
float x_at(int n, int d) { return float((n * 5 + d * 3) % 7 - 3); }
float w1_at(int h, int d) { return float((h * 3 + d * 2) % 5 - 2); }
float w2_at(int d, int h) { return float((d * 7 + h * 4) % 9 - 4); }
float bias_at(int d) { return float(1000 * (d + 1)); }
float dy_at(int n, int d) { return float((n * 2 + d * 5) % 5 - 2); }

template <class F> std::vector<float> table(int rows, int columns, F at) {
  std::vector<float> out;
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < columns; ++j) out.push_back(at(i, j));
  return out;
}
float hidden(int n, int h) {
  float sum = 0;
  for (int d = 0; d < D; ++d) sum += x_at(n, d) * w1_at(h, d);
  return sum;
}
// The share of hidden units [from, to) in y without bias, and in dx.
float y_part(int n, int d, int from, int to, bool relu = true) {
  float sum = 0;
  for (int h = from; h < to; ++h) sum += (relu ? std::max(hidden(n, h), 0.f) : hidden(n, h)) * w2_at(d, h);
  return sum;
}
float dx_part(int n, int d, int from, int to) {
  float sum = 0;
  for (int h = from; h < to; ++h) {
    float dh = 0;
    for (int e = 0; e < D; ++e) dh += dy_at(n, e) * w2_at(e, h);
    if (hidden(n, h) > 0) sum += dh * w1_at(h, d);
  }
  return sum;
}

struct Shards {
  FloatBuffer x, w1, w2, bias, dy;
  int h;
  explicit Shards(Rank& me) : h(H / me.ranks) {
    x = me.floats(table(N, D, x_at));
    w1 = me.floats(table(h, D, [&](int i, int d) { return w1_at(me.rank * h + i, d); }));
    w2 = me.floats(table(D, h, [&](int d, int i) { return w2_at(d, me.rank * h + i); }));
    bias = me.floats(table(1, D, [](int, int d) { return bias_at(d); }));
    dy = me.floats(table(N, D, dy_at));
  }
};
FloatTensor shaped(FloatBuffer& x, int64_t rows, int64_t columns) { return {x.data, {rows, columns}}; }

void expect_one_all_reduce(Check& check, int n) {
  const int X = N * D;
  for (int r = 0; r < n; ++r) {
    auto c = [&](int i) { return X / n + (i % n < X % n); };
    check.sends(r, n == 1 ? 0 : 4 * (2 * X - c(r + 1) - c(r + 2)), n == 1 ? 0 : 2 * (n - 1));
    check.calls(r, "all_reduce", 1);
  }
}
}  // namespace

TEST_CASE("forward: y equals that of one rank, with a large bias") {
  for (int n : {4, 2, 3, 1, 8}) {
    Check check(n, format("N=%d D=%d H=%d, integers, bias 1000 2000 3000 4000", N, D, H),
                "g: forward all-reduce of the parts, then the bias once; sent 2 (t-1)/t N D");
    check.run([&](Rank& me) {
      Shards s(me);
      FloatBuffer y = me.unfilled(N * D);
      me.measure([&] { mlp_forward(me.group, shaped(y, N, D), shaped(s.x, N, D), shaped(s.w1, s.h, D), shaped(s.w2, D, s.h), s.bias); });
      me.output(y);
    });
    auto whole = [&](int64_t i) { return y_part(int(i) / D, int(i) % D, 0, H) + bias_at(int(i) % D); };
    for (int r = 0; r < n; ++r) {
      std::vector<float> want;
      for (int i = 0; i < N * D; ++i) want.push_back(whole(i));
      check.want(r, want);
    }
    expect_one_all_reduce(check, n);
    check.memory(4 * N * H / n, "this rank's hidden activations");
    if (check.wrong_values()) {
      auto is = [&](auto value) { return check.all_got([&](int r, int64_t i) { return value(r, int(i) / D, int(i) % D); }); };
      check.likely(is([&](int, int i, int d) { return y_part(i, d, 0, H) + n * bias_at(d); }), "the bias was added once per rank: add it after the all-reduce");
      check.likely(is([&](int, int i, int d) { return y_part(i, d, 0, H); }), "the bias is missing: add it once, after the all-reduce");
      check.likely(is([&](int r, int i, int d) { return y_part(i, d, r * H / n, (r + 1) * H / n) + bias_at(d); }), "each rank has only its part of the sum: g is an all-reduce of y");
      check.likely(is([&](int, int i, int d) { return y_part(i, d, 0, H, false) + bias_at(d); }), "relu belongs between the two products");
      check.likely(is([&](int, int i, int d) { return std::max(y_part(i, d, 0, H), 0.f) + bias_at(d); }), "relu belongs between the two products, not after them");
      check.likely(true, "relu belongs between the two products, not after them");
    }
    check.likely(check.called(0, "all_reduce") > 1 || check.called(0, "all_gather") > 0, "one all-reduce per pass: hidden units need none of the others, so nothing is exchanged between the products");
    check.verdict();
  }
}

TEST_CASE("backward: dx equals that of one rank") {
  for (int n : {4, 2, 3, 1, 8}) {
    Check check(n, format("N=%d D=%d H=%d, integers", N, D, H), "f: backward all-reduce of dx; sent 2 (t-1)/t N D");
    check.run([&](Rank& me) {
      Shards s(me);
      FloatBuffer dx = me.unfilled(N * D);
      me.measure([&] { mlp_backward(me.group, shaped(dx, N, D), shaped(s.dy, N, D), shaped(s.x, N, D), shaped(s.w1, s.h, D), shaped(s.w2, D, s.h)); });
      me.output(dx);
    });
    for (int r = 0; r < n; ++r) {
      std::vector<float> want;
      for (int i = 0; i < N * D; ++i) want.push_back(dx_part(i / D, i % D, 0, H));
      check.want(r, want);
    }
    expect_one_all_reduce(check, n);
    check.memory(2 * 4 * N * H / n, "this rank's hidden activations and their gradients");
    if (check.wrong_values()) {
      auto is = [&](auto value) { return check.all_got([&](int r, int64_t i) { return value(r, int(i) / D, int(i) % D); }); };
      check.likely(is([&](int r, int i, int d) { return dx_part(i, d, r * H / n, (r + 1) * H / n); }), "each rank has the gradient through its own hidden units only: f is an all-reduce in backward");
      check.likely(is([&](int, int i, int d) { return n * dx_part(i, d, 0, H); }), "t times the gradient: it was reduced twice");
      check.likely(true, "dhidden is 0 where relu cut off; dx = dhidden w1, then the all-reduce");
    }
    check.verdict();
  }
}
