// Every kernel, the attention and the matrix products against plain loops in double, forward and backward.
//
// Each TEST_CASE is one operation. In front of it stands its reference: the formula, written as a loop. Where a
// gradient is a formula too, it is first compared with central differences of the forward loop at small sizes, and
// then serves as the reference of the kernel at every size. Nothing here knows whether the GPU is simulated.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include "../kernels/kernels.h"
#include "../src/attention.h"
#include "../src/device.h"

namespace {

using Doubles = std::vector<double>;
using Ints = std::vector<int>;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Device& gpu() {
  static Device device;
  return device;
}
cudaStream_t stream() { return gpu().stream(); }

// ---- what is compared, and how closely ----

// max |mine - wanted| / max |wanted|. NaN equals nothing, so it counts as infinitely wrong.
double worst(const Doubles& mine, const Doubles& wanted) {
  REQUIRE(mine.size() == wanted.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < mine.size(); ++i) {
    const double difference = std::abs(mine[i] - wanted[i]);
    if (!std::isfinite(difference)) return kInfinity;
    error = std::max(error, difference);
    size = std::max(size, std::abs(wanted[i]));
  }
  return error == 0 ? 0 : error / size;
}

// How large `worst` may be. In fp32: as given. bf16 keeps 8 bits, so storing a number moves it by up to 2^-8 of
// itself; `stores` is how many times that happens between an input and the result.
double bound(double fp32, int stores = 1) {
  return std::is_same_v<real, float> ? fp32 : fp32 + stores * 0x1p-8;
}

// The derivative of `loss`, a function of x, by central differences. Its error is of the order of step^2.
template <class Loss>
Doubles slope(Loss loss, Doubles x) {
  constexpr double step = 1e-4;
  Doubles out;
  for (double& xi : x) {
    const double middle = xi;
    xi = middle + step;
    const double above = loss(x);
    xi = middle - step;
    const double below = loss(x);
    xi = middle;
    out.push_back((above - below) / (2 * step));
  }
  return out;
}
constexpr double kSlopeBound = 1e-7;

double dot(const Doubles& a, const Doubles& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// Runs it twice: a kernel whose sums depend on who comes first would not give the same bits.
template <class Run>
auto twice(Run run) {
  const auto first = run(), second = run();
  REQUIRE(first.size() == second.size());
  for (size_t i = 0; i < first.size(); ++i)
    CHECK(std::memcmp(first[i].data(), second[i].data(), first[i].size() * sizeof(double)) == 0);
  return first;
}

// ---- numbers, sizes, device memory ----

double rounded(double x) { return float(real(float(x))); }

// n numbers in (-size, size), as `real` can hold them, so that kernels and double loops start from the same.
Doubles numbers(int64_t n, unsigned seed, double size = 1) {
  std::mt19937 random(seed);
  Doubles out(n);
  for (double& x : out) x = rounded((random() * 0x1p-31 - 1) * size);
  return out;
}

Ints integers(int n, int below, unsigned seed) {
  std::mt19937 random(seed);
  Ints out(n);
  for (int& x : out) x = int(random() % below);
  return out;
}

constexpr int kSizes[] = {1, 3, 7, 33, 100, 300};

struct Size {
  int N, D;  // rows, width
};

std::vector<Size> sizes() {
  std::vector<Size> all{{64, 64}, {128, 256}, {70000, 3}};  // groups that come out even; more rows than a grid has blocks
  for (int N : kSizes)
    for (int D : kSizes) all.push_back({N, D});
  return all;
}
bool small(Size s) { return s.N * s.D <= 7 * 33; }  // for central differences

// An array on the device, with NaN behind it: a kernel that reads on gets NaN, one that writes on is seen.
template <class T>
class Array {
 public:
  explicit Array(const Doubles& values) : Array(int64_t(values.size())) {
    for (int64_t i = 0; i < size_; ++i) host_[i] = T(float(values[i]));
    upload();
  }
  explicit Array(const Ints& values) : Array(int64_t(values.size())) {
    std::copy(values.begin(), values.end(), host_.begin());
    upload();
  }
  // Not initialized, as a kernel finds what it is to overwrite: NaN.
  static Array poisoned(int64_t size) { return Array(Doubles(size, kNaN)); }

  operator T*() const { return memory_.data; }
  TensorOf<T> as(std::initializer_list<int64_t> shape) const { return {memory_.data, shape}; }

  Doubles host() const {
    const std::vector<T> now = memory_.to_host();
    for (int64_t i = size_; i < size_ + kGuard; ++i) CHECK(std::memcmp(&now[i], &host_[i], sizeof(T)) == 0);
    Doubles out(size_);
    for (int64_t i = 0; i < size_; ++i) {
      if constexpr (std::is_same_v<T, double>) out[i] = now[i];
      else out[i] = float(now[i]);
    }
    return out;
  }

 private:
  static constexpr int64_t kGuard = 64;

  static T guard() {
    if constexpr (std::is_same_v<T, int>) return 1 << 30;
    else return T(float(kNaN));
  }
  explicit Array(int64_t size)
      : size_(size), host_(size + kGuard, guard()), memory_(gpu().allocate<T>(Memory::data, {size + kGuard})) {}
  void upload() { gpu().upload(memory_.data, host_.data(), int64_t(host_.size())); }

  int64_t size_;
  std::vector<T> host_;  // as uploaded
  BufferOf<T> memory_;
};
using Reals = Array<real>;
using Floats = Array<float>;

// The next allocation of that many elements gets memory full of NaN (the device hands freed blocks out again).
void poison_next(int64_t count) {
  const Buffer block = gpu().allocate<real>(Memory::data, {count});
  const std::vector<real> nans(count, real(float(kNaN)));
  gpu().upload(block.data, nans.data(), count);
}

// ---- fill, scale, add ----

template <class T>
void check_elementwise(double limit) {
  for (int n : {0, 1, 3, 7, 33, 100, 300, 5000}) {
    CAPTURE(n);
    const Doubles a = numbers(n, 1), b = numbers(n, 2);
    Doubles scaled = a, sum = a;
    for (int i = 0; i < n; ++i) scaled[i] *= 0.75, sum[i] += b[i];

    const auto filled = Array<T>::poisoned(n), out = Array<T>::poisoned(n);
    const Array<T> x(a), left(a), right(b);
    fill<T>(filled, -2.5f, n, stream());
    scale<T>(x, 0.75f, n, stream());
    add<T>(out, left, right, n, stream());
    CHECK(filled.host() == Doubles(n, -2.5));
    CHECK(worst(x.host(), scaled) <= limit);
    CHECK(worst(out.host(), sum) <= limit);
    add<T>(left, left, right, n, stream());  // in place, either way round
    CHECK(left.host() == out.host());
    add<T>(right, Array<T>(a), right, n, stream());
    CHECK(right.host() == out.host());
  }
}

TEST_CASE("kernels: fill, scale and add") {
  check_elementwise<real>(bound(1e-7));
  check_elementwise<float>(1e-7);
}

// ---- embedding ----

TEST_CASE("kernels: embedding, whole and split by rows") {
  for (auto [N, D] : sizes())
    for (int slices : {1, 2, 4}) {
      CAPTURE(N), CAPTURE(D), CAPTURE(slices);
      const int V = 37;
      const Ints tokens = integers(N, V, 1);
      Ints order(N);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
      const Doubles table = numbers(V * D, 2), dout = numbers(int64_t(N) * D, 3), before = numbers(V * D, 4);

      Doubles out(int64_t(N) * D), dtable = before;
      for (int64_t n = 0; n < N; ++n)
        for (int i = 0; i < D; ++i) {
          out[n * D + i] = table[tokens[n] * D + i];
          dtable[tokens[n] * D + i] += dout[n * D + i];  // linear, so this is its gradient
        }

      const Array<int> ids(tokens), sorted(order);
      Doubles out_sum(out.size()), dtable_all;
      for (int slice = 0; slice < slices; ++slice) {
        const int first = V * slice / slices, end = V * (slice + 1) / slices;
        const auto part = [&](const Doubles& x) { return Doubles(&x[first * D], &x[0] + end * D); };
        const auto result = twice([&] {
          const Reals here(part(table)), y = Reals::poisoned(int64_t(N) * D), dhere(part(before));
          embedding_forward(y, here, ids, N, D, first, end - first, stream());
          embedding_backward(dhere, Reals(dout), ids, sorted, N, D, first, end - first, stream());
          return std::vector{y.host(), dhere.host()};
        });
        for (size_t i = 0; i < out.size(); ++i) out_sum[i] += result[0][i];
        dtable_all.insert(dtable_all.end(), result[1].begin(), result[1].end());
      }
      CHECK(out_sum == out);  // copies, and zeros from the other slices: exact
      CHECK(worst(dtable_all, dtable) <= bound(2e-6));
    }
}

// ---- rmsnorm ----

struct RmsNorm {
  Doubles y, rstd;
};
RmsNorm rmsnorm(const Doubles& x, const Doubles& w, Size s, double eps) {
  RmsNorm r{x, Doubles(s.N)};
  for (int n = 0; n < s.N; ++n) {
    double squares = 0;
    for (int i = 0; i < s.D; ++i) squares += x[n * s.D + i] * x[n * s.D + i];
    r.rstd[n] = 1 / std::sqrt(squares / s.D + eps);
    for (int i = 0; i < s.D; ++i) r.y[n * s.D + i] *= r.rstd[n] * w[i];
  }
  return r;
}

struct RmsNormGradient {
  Doubles dx, dw;
};
RmsNormGradient rmsnorm_gradient(const Doubles& dy, const Doubles& x, const Doubles& w, Size s, double eps) {
  RmsNormGradient g{dy, Doubles(s.D)};
  const Doubles rstd = rmsnorm(x, w, s, eps).rstd;
  for (int n = 0; n < s.N; ++n) {
    const int at = n * s.D;
    double mean = 0;
    for (int i = 0; i < s.D; ++i) mean += dy[at + i] * w[i] * x[at + i] * rstd[n] / s.D;
    for (int i = 0; i < s.D; ++i) {
      g.dx[at + i] = rstd[n] * (dy[at + i] * w[i] - x[at + i] * rstd[n] * mean);
      g.dw[i] += dy[at + i] * x[at + i] * rstd[n];
    }
  }
  return g;
}

TEST_CASE("kernels: rmsnorm") {
  constexpr float eps = 1e-5f;
  for (const Size s : sizes()) {
    const auto [N, D] = s;
    CAPTURE(N), CAPTURE(D);
    const int64_t n = int64_t(N) * D;
    // Some rows are so small that eps counts.
    Doubles x = numbers(n, 1), w = numbers(D, 2), dy = numbers(n, 3), dx0 = numbers(n, 4), dw0 = numbers(D, 5);
    for (int64_t i = 0; i < n; ++i)
      if (i / D % 3 == 2) x[i] = rounded(x[i] * 3e-3);
    const RmsNorm wanted = rmsnorm(x, w, s, eps);
    RmsNormGradient gradient = rmsnorm_gradient(dy, x, w, s, eps);
    if (small(s) && N < 3) {  // small x has too large a third derivative for central differences
      CHECK(worst(gradient.dx, slope([&](auto& v) { return dot(rmsnorm(v, w, s, eps).y, dy); }, x)) <= 1e-5);
      CHECK(worst(gradient.dw, slope([&](auto& v) { return dot(rmsnorm(x, v, s, eps).y, dy); }, w)) <= kSlopeBound);
    }

    const Reals X(x), W(w), DY(dy);
    const auto result = twice([&] {
      const Reals y = Reals::poisoned(n), dx(dx0), dw = Reals::poisoned(D), dw_added(dw0);
      const Floats rstd = Floats::poisoned(N), partial = Floats::poisoned(rmsnorm_partial_size(N, D));
      rmsnorm_forward(y, rstd, X, W, N, D, eps, stream());
      rmsnorm_backward(dx, DY, X, rstd, W, N, D, stream());
      rmsnorm_backward_weight(dw, partial, DY, X, rstd, N, D, 0, stream());
      rmsnorm_backward_weight(dw_added, partial, DY, X, rstd, N, D, 1, stream());
      return std::vector{y.host(), rstd.host(), dx.host(), dw.host(), dw_added.host()};
    });
    CHECK(worst(result[0], wanted.y) <= bound(1e-6));
    CHECK(worst(result[1], wanted.rstd) <= 1e-6);
    CHECK(worst(result[3], gradient.dw) <= bound(3e-6));
    for (int64_t i = 0; i < n; ++i) gradient.dx[i] += dx0[i];
    for (int i = 0; i < D; ++i) gradient.dw[i] += dw0[i];
    CHECK(worst(result[2], gradient.dx) <= bound(1e-6));
    CHECK(worst(result[4], gradient.dw) <= bound(3e-6));
  }
}

// ---- rotary positions, and heads in front of time ----

const Ints kPositions{0, 1, 6, 7, 2000, 2001, 131071};  // zigzag's gaps; and far away, where float angles would fail
constexpr double kTheta = 10000;

// out (B, H, T, d) from in (B, T, H, d), or back: one number at a time, by the definition. Element i < d/2 and its
// partner i + d/2 are a complex number, turned by position * theta^(-2 i / d).
Doubles move_heads(const Doubles& in, bool split, bool turn, int B, int T, int H, int d) {
  Doubles out(in.size());
  for (int b = 0; b < B; ++b)
    for (int t = 0; t < T; ++t)
      for (int h = 0; h < H; ++h)
        for (int i = 0; i < d; ++i) {
          const int first = ((b * T + t) * H + h) * d, second = ((b * H + h) * T + t) * d;
          const double* x = &in[split ? first : second];
          double value = x[i];
          if (turn) {
            const int j = i % (d / 2);
            const double angle = kPositions[t] * std::pow(kTheta, -2.0 * j / d) * (split ? 1 : -1);
            const double re = x[j], im = x[j + d / 2];
            value = i < d / 2 ? re * std::cos(angle) - im * std::sin(angle) : re * std::sin(angle) + im * std::cos(angle);
          }
          out[(split ? second : first) + i] = value;
        }
  return out;
}

TEST_CASE("kernels: the rope table") {
  const int T = int(kPositions.size());
  for (int d : {2, 6, 14, 66, 128}) {
    CAPTURE(d);
    Doubles wanted(T * d);
    for (int t = 0; t < T; ++t)
      for (int i = 0; i < d / 2; ++i) {
        const double angle = kPositions[t] * std::pow(kTheta, -2.0 * i / d);
        wanted[t * d + i] = std::cos(angle);
        wanted[t * d + d / 2 + i] = std::sin(angle);
      }
    const Floats table = Floats::poisoned(T * d);
    rope_table(table, Array<int>(kPositions), T, d, kTheta, stream());
    CHECK(worst(table.host(), wanted) <= 1e-7);
  }
}

TEST_CASE("kernels: split_heads and merge_heads, rotated or not") {
  struct Case {
    int B, H, d;
    bool turn;
  };
  const int T = int(kPositions.size());
  for (auto [B, H, d, turn] : {Case{1, 1, 2, true}, {2, 3, 6, true}, {3, 7, 66, true}, {1, 33, 100, true},
                               {1, 1, 1, false}, {2, 3, 7, false}, {3, 1, 33, false}, {2, 2, 300, false}}) {
    CAPTURE(B), CAPTURE(H), CAPTURE(d), CAPTURE(turn);
    const int64_t n = int64_t(B) * T * H * d;
    const Doubles x = numbers(n, 1), y = numbers(n, 2);
    const Doubles split = move_heads(x, true, turn, B, T, H, d), merged = move_heads(y, false, turn, B, T, H, d);
    if (n < 300)  // merging is the gradient of splitting
      CHECK(worst(merged, slope([&, B = B, H = H, d = d, turn = turn](auto& v) {
                    return dot(move_heads(v, true, turn, B, T, H, d), y);
                  }, x)) <= kSlopeBound);

    const Floats angles = Floats::poisoned(T * d);
    rope_table(angles, Array<int>(kPositions), T, d / 2 * 2, kTheta, stream());
    const float* table = turn ? static_cast<float*>(angles) : nullptr;
    const Reals out = Reals::poisoned(n), back = Reals::poisoned(n), again = Reals::poisoned(n);
    split_heads(out, Reals(x), table, B, T, H, d, stream());
    merge_heads(back, Reals(y), table, B, T, H, d, stream());
    merge_heads(again, out, table, B, T, H, d, stream());
    const double limit = turn ? bound(3e-7) : 0;  // unrotated, these are copies
    CHECK(worst(out.host(), split) <= limit);
    CHECK(worst(back.host(), merged) <= limit);
    CHECK(worst(again.host(), x) <= 2 * limit);
  }
}

// ---- the masked softmax ----

struct Rows {  // row r of (rows, stride) is query (first_row + r) % T; columns from `keys` on are not touched
  int rows, first_row, T, keys, stride;
  Ints queries, positions;  // of the queries (T) and of the keys (keys)
};

Doubles softmax(Doubles s, const Rows& c) {
  for (int r = 0; r < c.rows; ++r) {
    const auto sees = [&](int i) { return c.positions[i] <= c.queries[(c.first_row + r) % c.T]; };
    double* row = &s[r * c.stride];
    double most = -kInfinity, sum = 0;
    for (int i = 0; i < c.keys; ++i)
      if (sees(i)) most = std::max(most, row[i]);
    for (int i = 0; i < c.keys; ++i) sum += row[i] = sees(i) ? std::exp(row[i] - most) : 0;
    for (int i = 0; i < c.keys; ++i) row[i] = sees(i) ? row[i] / sum : 0;  // seeing nothing gives zeros, not 0 / 0
  }
  return s;
}

Doubles softmax_gradient(Doubles dp, const Doubles& p, const Rows& c, double factor) {
  for (int r = 0; r < c.rows; ++r) {
    double mean = 0;
    for (int i = r * c.stride; i < r * c.stride + c.keys; ++i) mean += p[i] * dp[i];
    for (int i = r * c.stride; i < r * c.stride + c.keys; ++i) dp[i] = p[i] * (dp[i] - mean) * factor;
  }
  return dp;
}

std::vector<Rows> softmax_cases() {
  std::vector<Rows> cases;
  for (int T : kSizes)
    for (int more : {0, 1}) {  // more columns than keys, rows that start in the middle and wrap around
      Rows c{2 * T + more, more * T / 2, T, T, T + 3 * more, Ints(T), Ints(T)};
      for (int i = 0; i < T; ++i) {
        c.queries[i] = 5 + 2 * i;  // queries and keys of different ranks: the first see nothing
        c.positions[i] = more ? 8 + 3 * i : 2 * i;
      }
      cases.push_back(c);
    }
  cases.push_back({70000, 0, 2, 3, 3, {1, 2}, {0, 1, 2}});
  cases.push_back({4, 0, 4, 4, 4, {0, 1, 6, 7}, {2, 3, 4, 5}});  // zigzag: a rank's queries, another's keys
  return cases;
}

TEST_CASE("kernels: softmax of what a query sees") {
  for (const Rows& c : softmax_cases()) {
    CAPTURE(c.T), CAPTURE(c.rows), CAPTURE(c.stride);
    const int64_t n = int64_t(c.rows) * c.stride;
    const Array<int> queries(c.queries), keys(c.positions);
    for (double size : {1.0, 100.0, -2e4}) {  // -2e4: all of them very negative, below any stand-in for -infinity
      CAPTURE(size);
      Doubles scores = numbers(n, 1, std::min(std::abs(size), 100.0));
      for (int64_t i = 0; i < n; ++i) {
        if (size < 0) scores[i] = rounded(scores[i] + size);
        if (i % c.stride >= c.keys) scores[i] = 0.5;
      }
      const auto result = twice([&] {
        const Reals p(scores);
        softmax_forward(p, queries, keys, c.rows, c.first_row, c.T, c.keys, c.stride, stream());
        return std::vector{p.host()};
      });
      CHECK(worst(result[0], softmax(scores, c)) <= bound(1e-6, 2));
    }

    constexpr float factor = 0.375f;
    const Doubles scores = numbers(n, 2), dp = numbers(n, 3);
    Doubles p = softmax(scores, c);
    if (n < 300) {
      Doubles wanted = softmax_gradient(dp, p, c, 1);
      for (int64_t i = 0; i < n; ++i)
        if (i % c.stride >= c.keys) wanted[i] = dp[i];  // of a plain copy
      CHECK(worst(wanted, slope([&](auto& s) { return dot(softmax(s, c), dp); }, scores)) <= kSlopeBound);
    }
    for (double& x : p) x = rounded(x);
    const auto result = twice([&] {
      const Reals d(dp);
      softmax_backward(d, Reals(p), c.rows, c.keys, c.stride, factor, stream());
      return std::vector{d.host()};
    });
    CHECK(worst(result[0], softmax_gradient(dp, p, c, factor)) <= bound(1e-6));
  }
}

// ---- swiglu ----

double silu(double x) { return x / (1 + std::exp(-x)); }

TEST_CASE("kernels: swiglu") {
  for (int n : {1, 3, 7, 33, 100, 300, 5000})
    for (double size : {3.0, 200.0}) {  // exp(200) is infinite in float
      CAPTURE(n), CAPTURE(size);
      const Doubles gate = numbers(n, 1, size), up = numbers(n, 2), dout = numbers(n, 3);
      Doubles out(n), dgate(n), dup(n), slopes(n);
      for (int i = 0; i < n; ++i) {
        const double s = 1 / (1 + std::exp(-gate[i]));
        out[i] = silu(gate[i]) * up[i];
        dgate[i] = dout[i] * up[i] * (s + gate[i] * s * (1 - s));
        dup[i] = dout[i] * silu(gate[i]);
        slopes[i] = dout[i] * up[i] * slope([](auto& g) { return silu(g[0]); }, {gate[i]})[0];
      }
      CHECK(worst(dgate, slopes) <= kSlopeBound);

      const Reals y = Reals::poisoned(n), dg = Reals::poisoned(n), du = Reals::poisoned(n), G(gate), U(up);
      swiglu_forward(y, G, U, n, stream());
      swiglu_backward(dg, du, Reals(dout), G, U, n, stream());
      CHECK(worst(y.host(), out) <= bound(1e-6));
      CHECK(worst(dg.host(), dgate) <= bound(1e-6));
      CHECK(worst(du.host(), dup) <= bound(1e-6));
    }
}

// ---- cross entropy ----

struct Loss {
  Doubles loss, dlogits;  // (N), (N, V)
};

Loss cross_entropy(const Doubles& logits, const Ints& targets, int V, double factor) {
  Loss r{Doubles(targets.size()), Doubles(logits.size())};
  for (size_t n = 0; n < targets.size(); ++n) {
    if (targets[n] < 0) continue;
    const double* row = &logits[n * V];
    const double most = *std::max_element(row, row + V);
    double sum = 0;
    for (int i = 0; i < V; ++i) sum += std::exp(row[i] - most);
    r.loss[n] = (std::log(sum) + most - row[targets[n]]) * factor;
    for (int i = 0; i < V; ++i)
      r.dlogits[n * V + i] = (std::exp(row[i] - most) / sum - (i == targets[n])) * factor;
  }
  return r;
}

// The three kernels, on `slices` ranges of columns as if each were a rank's, combined as ranks would.
Loss cross_entropy_on_device(const Doubles& logits, const Ints& targets, int V, float factor, int slices = 1) {
  const int N = int(targets.size());
  const Array<int> T(targets);
  std::vector<Reals> columns;
  Doubles most(N, -kInfinity), sum(N), target(N);
  const auto first = [&](int slice) { return V * slice / slices; };
  const auto width = [&](int slice) { return first(slice + 1) - first(slice); };
  for (int slice = 0; slice < slices; ++slice) {
    Doubles here;
    for (int n = 0; n < N; ++n)
      here.insert(here.end(), &logits[n * V + first(slice)], &logits[n * V + first(slice)] + width(slice));
    const Floats row_max = Floats::poisoned(N);
    columns.emplace_back(here);
    cross_entropy_max(row_max, columns.back(), N, width(slice), stream());
    const Doubles host = row_max.host();
    for (int n = 0; n < N; ++n) most[n] = std::max(most[n], host[n]);
  }
  for (int slice = 0; slice < slices; ++slice) {
    const Floats row_sum = Floats::poisoned(N), target_logit = Floats::poisoned(N);
    cross_entropy_sum(row_sum, target_logit, columns[slice], Floats(most), T, N, width(slice), first(slice), stream());
    const Doubles sums = row_sum.host(), targets_here = target_logit.host();
    for (int n = 0; n < N; ++n) sum[n] += sums[n], target[n] += targets_here[n];
  }
  Loss r{{}, Doubles(logits.size())};
  for (int slice = 0; slice < slices; ++slice) {
    const Floats loss = Floats::poisoned(N);
    cross_entropy_loss(loss, columns[slice], Floats(most), Floats(sum), Floats(target), T, N, width(slice),
                       first(slice), factor, stream());
    if (slice > 0) CHECK(std::memcmp(r.loss.data(), loss.host().data(), N * sizeof(double)) == 0);
    r.loss = loss.host();
    const Doubles here = columns[slice].host();
    for (int n = 0; n < N; ++n)
      std::copy_n(&here[n * width(slice)], width(slice), &r.dlogits[n * V + first(slice)]);
  }
  return r;
}

TEST_CASE("kernels: cross entropy, whole and with a split vocabulary") {
  constexpr float factor = 1 / 37.f;
  for (const Size s : sizes()) {
    const auto [N, V] = s;
    Ints targets = integers(N, V, 1);
    for (int n = 2; n < N; n += 5) targets[n] = -1;  // ignored
    for (double size : {3.0, 1000.0, -2e4}) {        // as in softmax; and confidently wrong at 1000
      Doubles logits = numbers(int64_t(N) * V, 2, std::min(std::abs(size), 1000.0));
      if (size < 0)
        for (double& x : logits) x = rounded(x + size);
      const Loss wanted = cross_entropy(logits, targets, V, factor);
      if (small(s) && size == 3)
        CHECK(worst(wanted.dlogits, slope([&, V = V](auto& v) {
                      const Doubles loss = cross_entropy(v, targets, V, factor).loss;
                      return std::accumulate(loss.begin(), loss.end(), 0.0);
                    }, logits)) <= kSlopeBound);
      for (int slices : {1, 2, 4}) {
        if (slices > V) continue;
        CAPTURE(N), CAPTURE(V), CAPTURE(size), CAPTURE(slices);
        const auto result = twice([&, V = V] {
          const Loss r = cross_entropy_on_device(logits, targets, V, factor, slices);
          return std::vector{r.loss, r.dlogits};
        });
        CHECK(worst(result[0], wanted.loss) <= 1e-6);
        CHECK(worst(result[1], wanted.dlogits) <= bound(1e-6));
      }
    }
  }
  // One token, sure of the wrong word: the loss is the distance.
  const Loss wrong = cross_entropy_on_device({1000, 0, -3000}, {1}, 3, 1);
  CHECK(worst(wrong.loss, {1000}) <= 1e-6);
  CHECK(worst(wrong.dlogits, {1, -1, 0}) <= 1e-6);
}

// ---- NaN ----

TEST_CASE("kernels: NaN stays NaN, and in its row") {
  const int N = 3, D = 33;
  const auto is_nan = [](double x) { return std::isnan(x); };
  for (int column : {0, 1, 16, 32}) {
    CAPTURE(column);
    Doubles x = numbers(N * D, 1);
    x[D + column] = kNaN;  // in row 1
    const auto only_row_1 = [&](const Doubles& y, bool all) {
      const auto nans = std::count_if(y.begin() + D, y.begin() + 2 * D, is_nan);
      return (all ? nans == D : nans > 0) && std::count_if(y.begin(), y.end(), is_nan) == nans;
    };
    for (int slices : {1, 2, 4}) {
      const Loss r = cross_entropy_on_device(x, {5, 5, 5}, D, 1, slices);
      CHECK(std::isnan(r.loss[1]));
      CHECK((std::isfinite(r.loss[0]) && std::isfinite(r.loss[2])));
      CHECK(only_row_1(r.dlogits, true));
      CHECK(cross_entropy_on_device(x, {5, -1, 5}, D, 1, slices).loss[1] == 0);  // ignored, whatever stands there
    }
    const Reals y = Reals::poisoned(N * D), p(x), later(x), squares(x);
    const Floats rstd = Floats::poisoned(N);
    rmsnorm_forward(y, rstd, Reals(x), Reals(numbers(D, 2)), N, D, 1e-5f, stream());
    CHECK(only_row_1(y.host(), true));
    swiglu_forward(y, Reals(x), Reals(numbers(N * D, 3)), N * D, stream());
    CHECK(only_row_1(y.host(), false));
    Ints keys(D);
    std::iota(keys.begin(), keys.end(), 0);
    softmax_forward(p, Array<int>({D, D, D}), Array<int>(keys), N, 0, N, D, D, stream());
    CHECK(only_row_1(p.host().size() ? p.host() : x, true));
    softmax_forward(later, Array<int>(Ints(3, column - 1)), Array<int>(keys), N, 0, N, D, D, stream());
    const Doubles unseen = later.host();  // a NaN in the future is not seen
    CHECK(std::none_of(unseen.begin(), unseen.end(), is_nan));
    const auto sum = Array<double>::poisoned(1);
    chunk_sums_of_squares(sum, squares, N * D, stream());
    CHECK(std::isnan(sum.host()[0]));
  }
}

// ---- AdamW ----

TEST_CASE("kernels: AdamW over several steps") {
  for (int n : {1, 3, 7, 33, 100, 300, 5000}) {
    CAPTURE(n);
    AdamWStep s{};
    s.lr = 1e-2f, s.beta1 = 0.9f, s.beta2 = 0.95f, s.eps = 1e-8f, s.decay = 0.1f, s.gradient_scale = 0.37f;
    const Doubles start = numbers(n, 1);
    Doubles w = start, m(n), v(n);
    const Reals weight(start);
    const Floats master(start), M(Doubles(n, 0.0)), V(Doubles(n, 0.0));
    float* w32 = master;
    if constexpr (std::is_same_v<real, float>) w32 = weight;  // no second copy

    for (int step = 1; step <= 5; ++step) {
      Doubles g = numbers(n, 1 + step);
      for (int i = 0; i < n; ++i) g[i] = rounded(i % 11 == 10 ? 0 : g[i] * std::pow(10, -(i % 9)));  // down to eps, and zero
      s.m_correction = float(1 / (1 - std::pow(double(s.beta1), step)));
      s.v_correction = float(1 / (1 - std::pow(double(s.beta2), step)));
      adamw(weight, w32, M, V, Reals(g), n, s, stream());
      for (int i = 0; i < n; ++i) {
        const double gradient = g[i] * s.gradient_scale, b1 = s.beta1, b2 = s.beta2;
        m[i] = b1 * m[i] + (1 - b1) * gradient;
        v[i] = b2 * v[i] + (1 - b2) * gradient * gradient;
        const double m_hat = m[i] / (1 - std::pow(b1, step)), v_hat = v[i] / (1 - std::pow(b2, step));
        w[i] -= s.lr * (m_hat / (std::sqrt(v_hat) + s.eps) + s.decay * w[i]);
      }
      CHECK(worst(M.host(), m) <= 1e-6);
      CHECK(worst(V.host(), v) <= 1e-6);
      CHECK(worst(weight.host(), w) <= bound(1e-6));
      if constexpr (!std::is_same_v<real, float>) {
        CHECK(worst(master.host(), w) <= 1e-6);
        Doubles stored = master.host();
        for (double& x : stored) x = rounded(x);
        CHECK(weight.host() == stored);
      }
    }
    // What counts is how far the weights went: a step of lr 1e-2 would hide a wrong eps or scale behind |w|.
    Doubles moved = std::is_same_v<real, float> ? weight.host() : master.host(), wanted = w;
    for (int i = 0; i < n; ++i) moved[i] -= start[i], wanted[i] -= start[i];
    CHECK(worst(moved, wanted) <= 2e-5);
  }
}

// ---- sums in double ----

TEST_CASE("kernels: sums and sums of squares lose no digits") {
  for (int n : {0, 1, 3, 7, 33, 100, 300, 4095, 4096, 4097, 3 * 4096, 4000003}) {
    CAPTURE(n);
    Doubles x = numbers(n, 1);
    for (double& xi : x) xi = std::abs(xi);  // so that the sum is not near zero
    long double sum = 0, squares = 0;
    for (double xi : x) sum += xi, squares += static_cast<long double>(xi) * xi;
    const Floats F(x);
    const Reals R(x);
    const auto result = twice([&] {
      const auto s = Array<double>::poisoned(chunk_count(n)), q = Array<double>::poisoned(chunk_count(n));
      chunk_sums(s, F, n, stream());
      chunk_sums_of_squares(q, R, n, stream());
      return std::vector{s.host(), q.host()};
    });
    const auto total = [](const Doubles& chunks) { return std::accumulate(chunks.begin(), chunks.end(), 0.0); };
    CHECK(worst({total(result[0])}, {double(sum)}) <= 1e-12);
    CHECK(worst({total(result[1])}, {double(squares)}) <= 1e-12);
  }
}

// ---- matrix products ----

// C (m, n) = A B with A(i, l) and B(l, j) given as functions.
template <class A, class B>
Doubles product(int m, int n, int k, A a, B b) {
  Doubles c(int64_t(m) * n);
  for (int i = 0; i < m; ++i)
    for (int l = 0; l < k; ++l)
      for (int j = 0; j < n; ++j) c[i * n + j] += a(i, l) * b(l, j);
  return c;
}

TEST_CASE("device: the three products of a linear layer") {
  struct Case {
    int N, in, out;
  };
  for (auto [N, in, out] : {Case{1, 1, 1}, {1, 3, 7}, {3, 7, 1}, {7, 1, 33}, {33, 100, 3}, {100, 33, 300},
                            {300, 100, 33}, {3, 300, 100}, {300, 300, 300}, {0, 7, 3}}) {  // no tokens: an idle expert
    CAPTURE(N), CAPTURE(in), CAPTURE(out);
    const Doubles x = numbers(N * in, 1), w = numbers(out * in, 2), dy = numbers(N * out, 3);
    const Reals X(x), W(w), DY(dy), y = Reals::poisoned(N * out);
    const Tensor tx = X.as({N, in}), tw = W.as({out, in}), tdy = DY.as({N, out});
    const auto X_ = [&, in = in](int n, int i) { return x[n * in + i]; };
    const auto W_ = [&, in = in](int o, int i) { return w[o * in + i]; };
    const auto DY_ = [&, out = out](int n, int o) { return dy[n * out + o]; };

    gpu().matmul_flops = 0;
    gpu().linear(y.as({N, out}), tx, tw);
    CHECK(gpu().matmul_flops == 2.0 * N * in * out);
    CHECK(worst(y.host(), product(N, out, in, X_, [&](int i, int o) { return W_(o, i); })) <= bound(1e-6));

    for (float beta : {0.f, 1.f}) {
      CAPTURE(beta);
      const Doubles dx0 = numbers(N * in, 4), dw0 = numbers(out * in, 5);
      const Reals dx = beta == 0 ? Reals::poisoned(N * in) : Reals(dx0);
      const Reals dw = beta == 0 ? Reals::poisoned(out * in) : Reals(dw0);
      gpu().linear_backward_input(dx.as({N, in}), tdy, tw, beta);
      gpu().linear_backward_weight(dw.as({out, in}), tdy, tx, beta);
      Doubles dx_wanted = product(N, in, out, DY_, W_);
      Doubles dw_wanted = product(out, in, N, [&](int o, int n) { return DY_(n, o); }, X_);
      for (size_t i = 0; i < dx0.size(); ++i) dx_wanted[i] += beta * dx0[i];
      for (size_t i = 0; i < dw0.size(); ++i) dw_wanted[i] += beta * dw0[i];
      CHECK(worst(dx.host(), dx_wanted) <= bound(1e-6));
      CHECK(worst(dw.host(), dw_wanted) <= bound(1e-6));
    }
  }
}

TEST_CASE("device: a batch of products, with gaps between rows and between matrices") {
  struct Case {
    int m, n, k, batch;
  };
  for (auto [m, n, k, batch] : {Case{1, 1, 1, 1}, {3, 7, 33, 5}, {33, 3, 100, 2}, {100, 33, 7, 3}, {65, 129, 300, 2}})
    for (int options = 0; options < 8; ++options) {
      const bool ta = options & 1, tb = options & 2;
      const float beta = options & 4 ? 0.5f : 0.f, alpha = 0.25f;
      CAPTURE(m), CAPTURE(n), CAPTURE(k), CAPTURE(batch), CAPTURE(ta), CAPTURE(tb), CAPTURE(beta);
      const int a_rows = ta ? k : m, a_stride = (ta ? m : k) + 5, a_size = a_rows * a_stride + 11;
      const int b_rows = tb ? n : k, b_stride = (tb ? k : n) + 2, b_size = b_rows * b_stride + 3;
      const int c_stride = n + 4, c_size = m * c_stride + 7;
      const Doubles a = numbers(a_size * batch, 1), b = numbers(b_size * batch, 2);
      Doubles c = numbers(c_size * batch, 3), wanted = c;
      for (int x = 0; x < batch; ++x) {
        const double *ax = &a[x * a_size], *bx = &b[x * b_size];
        const Doubles ab = product(
            m, n, k, [&](int i, int l) { return ta ? ax[l * a_stride + i] : ax[i * a_stride + l]; },
            [&](int l, int j) { return tb ? bx[j * b_stride + l] : bx[l * b_stride + j]; });
        for (int i = 0; i < m; ++i)
          for (int j = 0; j < n; ++j) {
            const int at = x * c_size + i * c_stride + j;
            wanted[at] = alpha * ab[i * n + j] + beta * c[at];
            if (beta == 0) c[at] = kNaN;  // the gaps keep what is there
          }
      }
      const Reals A(a), B(b), C(c);
      gpu().matmul(C, c_stride, c_size, {A, a_stride, ta, a_size}, {B, b_stride, tb, b_size}, m, n, k, alpha, beta,
                   batch);
      CHECK(worst(C.host(), wanted) <= bound(1e-6));
    }
}

// ---- attention ----

struct Heads {
  int B, T, H, KV, d;
  Ints positions;
  int queries() const { return B * H * T * d; }
  int keys() const { return B * KV * T * d; }
};

struct AttentionResult {
  Doubles out, dq, dk, dv;
};

// One query at a time: p = softmax(q k / sqrt(d)) over the keys not after it, out = p v, and the way back.
AttentionResult attention(const Heads& c, const Doubles& q, const Doubles& k, const Doubles& v, const Doubles& dout) {
  AttentionResult r{Doubles(q.size()), Doubles(q.size()), Doubles(k.size()), Doubles(k.size())};
  for (int row = 0; row < c.B * c.H * c.T; ++row) {
    const int t = row % c.T, head = row / c.T % c.H, b = row / c.T / c.H;
    const int query = row * c.d, key = (b * c.KV + head / (c.H / c.KV)) * c.T * c.d;
    Doubles p(c.T), dp(c.T);
    double most = -kInfinity, sum = 0, mean = 0;
    const auto sees = [&](int j) { return c.positions[j] <= c.positions[t]; };
    const auto with = [&](const Doubles& x, const Doubles& y, int j) {
      return std::inner_product(&x[query], &x[query] + c.d, &y[key + j * c.d], 0.0);
    };
    for (int j = 0; j < c.T; ++j)
      if (sees(j)) most = std::max(most, p[j] = with(q, k, j) / std::sqrt(double(c.d)));
    for (int j = 0; j < c.T; ++j) sum += p[j] = sees(j) ? std::exp(p[j] - most) : 0;
    for (int j = 0; j < c.T; ++j) p[j] /= sum, dp[j] = with(dout, v, j), mean += p[j] * dp[j];
    for (int j = 0; j < c.T; ++j)
      for (int i = 0; i < c.d; ++i) {
        const double ds = p[j] * (dp[j] - mean) / std::sqrt(double(c.d));
        r.out[query + i] += p[j] * v[key + j * c.d + i];
        r.dv[key + j * c.d + i] += p[j] * dout[query + i];
        r.dq[query + i] += ds * k[key + j * c.d + i];
        r.dk[key + j * c.d + i] += ds * q[query + i];
      }
  }
  return r;
}

Ints counting(int T, int from, int step = 1) {
  Ints p(T);
  for (int t = 0; t < T; ++t) p[t] = from + t * step;
  return p;
}

Ints zigzag(int T) {  // a rank of two: the first and the last quarter of the sequence
  Ints p = counting(T, 0);
  for (int t = T / 2; t < T; ++t) p[t] += T;
  return p;
}

TEST_CASE("attention: causal, with grouped heads, forward and backward") {
  Ints pairs = counting(100, 0);
  for (int& p : pairs) p /= 2;  // two tokens at each position see each other, also across a cut of 64 rows
  pairs.insert(pairs.begin(), -1);
  for (const Heads& c : {Heads{1, 1, 1, 1, 1, {5}}, {2, 3, 2, 1, 7, counting(3, 0)}, {1, 4, 2, 2, 3, {0, 1, 6, 7}},
                         {1, 7, 3, 3, 33, counting(7, 1000)}, {2, 33, 6, 2, 8, counting(33, 0, 5)},
                         {1, 64, 4, 2, 16, counting(64, 0)}, {2, 65, 3, 1, 6, counting(65, 0)},
                         {1, 100, 4, 4, 10, zigzag(100)}, {1, 128, 2, 1, 64, counting(128, 3)},
                         {1, 101, 4, 2, 5, pairs}, {2, 300, 6, 3, 12, zigzag(300)}}) {
    const auto& [B, T, H, KV, d, positions] = c;
    CAPTURE(B), CAPTURE(T), CAPTURE(H), CAPTURE(KV), CAPTURE(d), CAPTURE(positions[0]);
    for (double size : {1.0, 10.0}) {  // 10: scores x100
      CAPTURE(size);
      const Doubles q = numbers(c.queries(), 1, size), k = numbers(c.keys(), 2, size), v = numbers(c.keys(), 3);
      const Doubles dout = numbers(c.queries(), 4);
      const AttentionResult wanted = attention(c, q, k, v, dout);
      if (c.queries() < 100 && size == 1) {
        CHECK(worst(wanted.dq, slope([&](auto& x) { return dot(attention(c, x, k, v, dout).out, dout); }, q)) <= kSlopeBound);
        CHECK(worst(wanted.dk, slope([&](auto& x) { return dot(attention(c, q, x, v, dout).out, dout); }, k)) <= kSlopeBound);
        CHECK(worst(wanted.dv, slope([&](auto& x) { return dot(attention(c, q, k, x, dout).out, dout); }, v)) <= kSlopeBound);
      }

      const Reals Q(q), K(k), V(v), DOUT(dout);
      const Array<int> P(positions);
      const int64_t square = int64_t(B) * H * T * T, scratch = attention_scratch_bytes(B, T, H);
      const auto result = twice([&, B = B, T = T, H = H, KV = KV, d = d] {
        const Reals out = Reals::poisoned(c.queries()), dq = Reals::poisoned(c.queries());
        const Reals dk = Reals::poisoned(c.keys()), dv = Reals::poisoned(c.keys());
        Attention a{gpu(), B, T, H, KV, d, Q.as({B, H, T, d}), K.as({B, KV, T, d}), V.as({B, KV, T, d}),
                    out.as({B, H, T, d}), P, c.positions, {}};
        poison_next(square);
        attention_forward(a);
        CHECK(gpu().current(Memory::activations) == square * int64_t(sizeof(real)));
        poison_next(scratch / int64_t(sizeof(real)));
        gpu().reset_peaks();
        attention_backward(a, DOUT.as({B, H, T, d}), dq.as({B, H, T, d}), dk.as({B, KV, T, d}), dv.as({B, KV, T, d}));
        CHECK(gpu().peak(Memory::workspace) - gpu().current(Memory::workspace) == scratch);
        return std::vector{out.host(), dq.host(), dk.host(), dv.host()};
      });
      const double limit = size == 1 ? bound(2e-6, 3) : bound(1e-5, 30);
      CHECK(worst(result[0], wanted.out) <= limit);
      CHECK(worst(result[1], wanted.dq) <= limit);
      CHECK(worst(result[2], wanted.dk) <= limit);
      CHECK(worst(result[3], wanted.dv) <= limit);
    }
  }
}

}  // namespace
