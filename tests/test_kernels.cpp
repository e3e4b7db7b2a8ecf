// Every kernel, the matrix products and the attention against plain loops in double, forward and backward.
//
// One TEST_CASE an operation; before it stands its reference, the formula as a loop. A formula for a gradient
// is itself compared with central differences at small sizes, and then serves at every size. Nothing here
// knows whether the GPU is simulated, or whether `real` is float or bf16.
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

using Ints = std::vector<int>;
using Doubles = std::vector<double>;
using Results = std::vector<Doubles>;  // what an operation gives: {y}, {y, rstd, dx, dw}, ...
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr bool kFloats = std::is_same_v<real, float>;

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

// How large `worst` may be. fp32: as given, a few times what was measured. bf16 keeps 8 bits, so storing a number
// moves it by up to 2^-8 of itself; `stores`: how often that happens between the inputs and the result.
double bound(double fp32, double stores = 1) { return kFloats ? fp32 : fp32 + stores * 0x1p-8; }

bool same_bits(const Doubles& a, const Doubles& b) {  // NaN too
  if (a.empty() || a.size() != b.size()) return a.size() == b.size();
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

// Runs twice, which must give the same bits, and compares each result within its limit.
template <class Run>
void check(Run run, const Results& wanted, const Doubles& limits) {
  const Results mine = run(), again = run();
  for (size_t i = 0; i < wanted.size(); ++i) {
    INFO("result ", i);
    CHECK(worst(mine[i], wanted[i]) <= limits[i]);
    CHECK(same_bits(mine[i], again[i]));
  }
}

// Compares a gradient with the central differences of `loss`, a function of x.
template <class Loss>
void check_slope(const Doubles& gradient, Doubles x, Loss loss) {
  constexpr double step = 3e-5;  // the differences are off by about step^2
  Doubles slopes;
  for (double& xi : x) {
    const double middle = xi;
    xi = middle + step;
    const double above = loss(x);
    xi = middle - step;
    slopes.push_back((above - loss(x)) / (2 * step));
    xi = middle;
  }
  CHECK(worst(gradient, slopes) <= 1e-7);
}

double dot(const Doubles& a, const Doubles& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}
Doubles sum(Doubles a, const Doubles& b, double factor = 1) {  // a + factor b
  for (size_t i = 0; i < a.size(); ++i) a[i] += factor * b[i];
  return a;
}

// ---- sizes, numbers, device memory ----

struct Size {
  int N, D;  // rows, width
  bool small() const { return N * D <= 7 * 33; }
};
#ifdef SIM_CHECKED  // every thread costs time there: fewer sizes, still more rows than blocks and wider than a block
constexpr int kSizes[] = {1, 3, 33, 260}, kMany = 601;
#else
constexpr int kSizes[] = {1, 3, 7, 33, 100, 300}, kMany = 70000;
#endif

std::vector<Size> sizes() {
  // No rows; groups of rows that come out even; more rows than a GPU has blocks; and all pairs of kSizes.
  std::vector<Size> all{{0, 7}, {128, 256}, {kMany, 3}};
  for (int N : kSizes)
    for (int D : kSizes) all.push_back({N, D});
  return all;
}

double rounded(double x) { return float(real(float(x))); }

// n numbers in (-size, size) + offset, as `real` can hold them: kernels and double loops start from the same.
Doubles numbers(int64_t n, unsigned seed, double size = 1, double offset = 0) {
  std::mt19937 random(seed);
  Doubles out(n);
  for (double& x : out) x = rounded((random() * 0x1p-31 - 1) * size + offset);
  return out;
}

Ints integers(int n, int below, unsigned seed) {
  std::mt19937 random(seed);
  Ints out(n);
  for (int& x : out) x = int(random() % below);
  return out;
}

Ints counting(int n, int from = 0, int step = 1) {
  Ints out(n);
  for (int i = 0; i < n; ++i) out[i] = from + i * step;
  return out;
}

IntBuffer upload(const Ints& values) {
  IntBuffer out = gpu().allocate<int>(Memory::data, {int64_t(values.size())});
  gpu().upload(out.data, values.data(), int64_t(values.size()));
  return out;
}

// An array on the device, with NaN behind it: a kernel that reads on gets NaN, one that writes on is seen.
template <class T>
struct Array : BufferOf<T> {
  static constexpr int64_t kGuard = 64;
  int64_t size;

  explicit Array(const Doubles& values)
      : BufferOf<T>(gpu(), Memory::data, {int64_t(values.size()) + kGuard}), size(int64_t(values.size())) {
    std::vector<T> host(size + kGuard, T(float(kNaN)));
    std::transform(values.begin(), values.end(), host.begin(), [](double x) { return T(float(x)); });
    gpu().upload(this->data, host.data(), size + kGuard);
  }
  explicit Array(int64_t n) : Array(Doubles(n, kNaN)) {}  // to be overwritten

  operator T*() const { return this->data; }
  TensorOf<T> as(std::initializer_list<int64_t> shape) const { return {this->data, shape}; }

  Doubles host() const {
    Doubles out;
    for (T x : this->to_host())
      if constexpr (std::is_same_v<T, double>) out.push_back(x);
      else out.push_back(float(x));
    CHECK(std::all_of(out.begin() + size, out.end(), [](double x) { return std::isnan(x); }));
    out.resize(size);
    return out;
  }
};
using Reals = Array<real>;
using Floats = Array<float>;

// The next allocation of that many elements finds NaN (the device hands freed blocks out again).
void poison_next(int64_t count) {
  const Buffer block = gpu().allocate<real>(Memory::data, {count});
  fill<real>(block.data, float(kNaN), count, stream());
}

template <class T>
void check_elementwise(double limit) {
  for (int n : {0, 1, 3, 7, 33, 100, 300, 5000}) {
    INFO("n ", n);
    const Doubles a = numbers(n, 1), b = numbers(n, 2), total = sum(a, b);
    const auto run = [&] {
      const Array<T> filled(n), x(a), out(n), left(a), right(b);
      fill<T>(filled, -2.5f, n, stream());
      scale<T>(x, 0.75f, n, stream());
      add<T>(out, left, right, n, stream());
      add<T>(left, left, right, n, stream());  // in place, either way round
      add<T>(right, Array<T>(a), right, n, stream());
      return Results{filled.host(), x.host(), out.host(), left.host(), right.host()};
    };
    check(run, {Doubles(n, -2.5), sum(a, a, -0.25), total, total, total}, {0, limit, limit, limit, limit});
  }
}

TEST_CASE("kernels: fill, scale and add") {
  check_elementwise<real>(bound(1e-7));
  check_elementwise<float>(1e-7);
}

TEST_CASE("kernels: embedding, whole and split by rows") {
  const int V = 37;
  for (const Size s : sizes())
    for (int slices : {1, 2, 4}) {
      const int N = s.N, D = s.D;
      INFO("N ", N, ", D ", D, ", slices ", slices);
      const Ints tokens = integers(N, V, 1);
      Ints order = counting(N);
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
      const Doubles table = numbers(V * D, 2), dout = numbers(int64_t(N) * D, 3), before = numbers(V * D, 4);
      Doubles out(int64_t(N) * D), dtable = before;
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < D; ++i) {
          out[n * D + i] = table[tokens[n] * D + i];
          dtable[tokens[n] * D + i] += dout[n * D + i];  // the operation is linear: no formula to doubt
        }
      const auto run = [&] {  // slice by slice, as ranks would
        Results all{Doubles(out.size()), {}};
        for (int slice = 0; slice < slices; ++slice) {
          const int first = V * slice / slices, end = V * (slice + 1) / slices;
          const auto part = [&](const Doubles& x) {
            return Reals(Doubles(&x[first * D], x.data() + end * D));
          };
          const Reals y(int64_t(N) * D), dpart = part(before);
          embedding_forward(y, part(table), upload(tokens).data, N, D, first, end - first, stream());
          embedding_backward(dpart, Reals(dout), upload(tokens).data, upload(order).data, N, D, first,
                             end - first, stream());
          all[0] = sum(all[0], y.host());
          const Doubles rows = dpart.host();
          all[1].insert(all[1].end(), rows.begin(), rows.end());
        }
        return all;
      };
      check(run, {out, dtable}, {0, bound(3e-6)});  // forward copies, and the other slices give zeros: exact
    }
}

// ---- rmsnorm ----

// {y, rstd, dx, dw}
Results rmsnorm(const Doubles& x, const Doubles& w, const Doubles& dy, Size s, double eps) {
  Doubles y(x.size()), rstd(s.N), dx(x.size()), dw(s.D);
  for (int n = 0; n < s.N; ++n) {
    const int at = n * s.D;
    double squares = 0, mean = 0;
    for (int i = at; i < at + s.D; ++i) squares += x[i] * x[i];
    const double r = rstd[n] = 1 / std::sqrt(squares / s.D + eps);
    for (int i = 0; i < s.D; ++i) mean += dy[at + i] * w[i] * x[at + i] * r / s.D;
    for (int i = 0; i < s.D; ++i) {
      y[at + i] = x[at + i] * r * w[i];
      dx[at + i] = r * (dy[at + i] * w[i] - x[at + i] * r * mean);
      dw[i] += dy[at + i] * x[at + i] * r;
    }
  }
  return {y, rstd, dx, dw};
}

TEST_CASE("kernels: rmsnorm") {
  for (const Size s : sizes())
    for (float eps : {1e-5f, 0.1f}) {
      const int N = s.N, D = s.D;
      const int64_t n = int64_t(N) * D;
      INFO("N ", N, ", D ", D, ", eps ", eps);
      const Doubles w = numbers(D, 2), dy = numbers(n, 3), dx0 = numbers(n, 4), dw0 = numbers(D, 5);
      Doubles x = numbers(n, 1);
      for (int64_t i = 0; i < n; ++i)
        if (i / D % 3 == 2) x[i] = rounded(x[i] * 3e-3);  // rows so small that even 1e-5 counts
      const Results wanted = rmsnorm(x, w, dy, s, eps);
      if (s.small() && eps == 0.1f) {
        check_slope(wanted[2], x, [&](auto& v) { return dot(rmsnorm(v, w, dy, s, eps)[0], dy); });
        check_slope(wanted[3], w, [&](auto& v) { return dot(rmsnorm(x, v, dy, s, eps)[0], dy); });
      }
      const Reals X(x), W(w), DY(dy);
      const auto run = [&] {
        const Reals y(n), dx(dx0), dw(D), dw_added(dw0);
        const Floats rstd(N), partial(rmsnorm_partial_size(N, D));
        rmsnorm_forward(y, rstd, X, W, N, D, eps, stream());
        rmsnorm_backward(dx, DY, X, rstd, W, N, D, stream());
        rmsnorm_backward_weight(dw, partial, DY, X, rstd, N, D, 0, stream());
        rmsnorm_backward_weight(dw_added, partial, DY, X, rstd, N, D, 1, stream());
        return Results{y.host(), rstd.host(), dx.host(), dw.host(), dw_added.host()};
      };
      check(run, {wanted[0], wanted[1], sum(dx0, wanted[2]), wanted[3], sum(dw0, wanted[3])},
            {bound(1e-6), 1e-6, bound(1e-6), bound(3e-6), bound(3e-6)});
    }
}

// ---- rotary positions, and heads in front of time ----

// Zigzag's gap; and so far that angles in float would fail.
const Ints kPositions{0, 1, 6, 7, 2000, 2001, 131071};
constexpr int kT = 7;

double angle(int t, int i, int d) { return kPositions[t] * std::pow(10000, -2.0 * i / d); }

// out (B, H, T, d) from in (B, T, H, d), or back, a number at a time, by the definition: element i < d/2 and
// its partner i + d/2 are a complex number, turned by position * theta^(-2 i / d).
Doubles move_heads(const Doubles& in, bool split, bool turn, int B, int H, int d) {
  Doubles out(in.size());
  for (int at = 0; at < B * kT * H * d; ++at) {
    const int i = at % d, h = at / d % H, t = at / d / H % kT, b = at / d / H / kT;
    const int by_head = ((b * H + h) * kT + t) * d, by_time = at - i, j = turn ? i % (d / 2) : 0;
    const double* x = &in[split ? by_time : by_head];
    const double c = std::cos(angle(t, j, d)), s = std::sin(angle(t, j, d)) * (split ? 1 : -1);
    const double turned = i < d / 2 ? x[j] * c - x[j + d / 2] * s : x[j] * s + x[j + d / 2] * c;
    out[(split ? by_head : by_time) + i] = turn ? turned : x[i];
  }
  return out;
}

TEST_CASE("kernels: the rope table, split_heads and merge_heads") {
  const int cases[][4] = {{1, 1, 2, 1}, {2, 3, 6, 1}, {3, 7, 66, 1}, {1, 33, 100, 1},
                          {1, 1, 1, 0}, {2, 3, 7, 0}, {3, 1, 33, 0}, {2, 2, 300, 0}};
  for (const auto& c : cases) {
    const int B = c[0], H = c[1], d = c[2], n = B * kT * H * d;
    const bool turn = c[3];
    INFO("B ", B, ", H ", H, ", d ", d);
    const Doubles x = numbers(n, 1), y = numbers(n, 2);
    const auto split = [&](const Doubles& in) { return move_heads(in, true, turn, B, H, d); };
    const Doubles merged = move_heads(y, false, turn, B, H, d);  // the gradient of splitting
    if (n < 300) check_slope(merged, x, [&](auto& v) { return dot(split(v), y); });
    Doubles angles(turn ? kT * d : 0);
    for (int i = 0; i < int(angles.size()); ++i) {
      const double a = angle(i / d, i % d % (d / 2), d);
      angles[i] = i % d < d / 2 ? std::cos(a) : std::sin(a);
    }
    const auto run = [&] {
      const Floats table(int64_t(angles.size()));
      if (turn) rope_table(table, upload(kPositions).data, kT, d, 10000, stream());
      const float* turns = turn ? table.data : nullptr;
      const Reals out(n), back(n), again(n);
      split_heads(out, Reals(x), turns, B, kT, H, d, stream());
      merge_heads(back, Reals(y), turns, B, kT, H, d, stream());
      merge_heads(again, out, turns, B, kT, H, d, stream());
      return Results{table.host(), out.host(), back.host(), again.host()};
    };
    const double limit = turn ? bound(3e-7) : 0;  // unrotated, these are copies
    check(run, {angles, split(x), merged, x}, {1e-7, limit, limit, 2 * limit});
  }
}

// ---- the masked softmax ----

// Row r of (rows, stride) is query (first_row + r) % T; columns from `keys` on stay as they are.
struct Rows {
  int rows, first_row, T, keys, stride;
  Ints queries, positions;  // of the queries (T) and of the keys (keys)
};

// {p, ds}, from scores and the gradient of p
Results softmax(const Doubles& scores, const Doubles& dp, const Rows& c, double factor = 1) {
  Doubles p = scores, ds = dp;
  for (int r = 0; r < c.rows; ++r) {
    const int begin = r * c.stride, end = begin + c.keys;
    const auto sees = [&](int i) { return c.positions[i - begin] <= c.queries[(c.first_row + r) % c.T]; };
    double most = -kInfinity, total = 0, mean = 0;
    for (int i = begin; i < end; ++i) most = sees(i) ? std::max(most, p[i]) : most;
    for (int i = begin; i < end; ++i) total += p[i] = sees(i) ? std::exp(p[i] - most) : 0;
    for (int i = begin; i < end; ++i) p[i] = sees(i) ? p[i] / total : 0;  // zeros where nothing is seen
    for (int i = begin; i < end; ++i) mean += p[i] * dp[i];
    for (int i = begin; i < end; ++i) ds[i] = p[i] * (dp[i] - mean) * factor;
  }
  return {p, ds};
}

TEST_CASE("kernels: softmax of what a query sees") {
  std::vector<Rows> cases{{kMany, 0, 2, 3, 3, {1, 2}, {0, 1, 2}},
                          {4, 0, 4, 4, 4, {0, 1, 6, 7}, {2, 3, 4, 5}},   // zigzag: another rank's keys
                          {3, 0, 3, 7, 8, {0, 1, 2}, counting(7, 10)}};  // nothing to see
  for (int T : kSizes) {
    cases.push_back({2 * T, 0, T, T, T, counting(T), counting(T)});
    cases.push_back({2 * T + 1, T / 2, T, T, T + 3, counting(T, 5, 2), counting(T, 8, 3)});  // some see nothing
  }
  for (const Rows& c : cases) {
    const int64_t n = int64_t(c.rows) * c.stride;
    const IntBuffer queries = upload(c.queries), keys = upload(c.positions);
    const Doubles dp = numbers(n, 1);
    for (auto [size, offset] : {std::pair{1.0, 0.0}, {100.0, 0.0}, {100.0, -2e4}}) {  // a maximum of -19900
      INFO("T ", c.T, ", rows ", c.rows, ", stride ", c.stride);
      Doubles scores = numbers(n, 2, size, offset);
      for (int64_t i = 0; i < n; ++i)
        if (i % c.stride >= c.keys) scores[i] = 0.5;
      const auto run = [&] {
        const Reals p(scores);
        softmax_forward(p, queries.data, keys.data, c.rows, c.first_row, c.T, c.keys, c.stride, stream());
        return Results{p.host()};
      };
      check(run, {softmax(scores, dp, c)[0]}, {bound(1e-6, 2)});
    }

    const Doubles scores = numbers(n, 3);
    constexpr float factor = 0.375f;
    if (n < 300 && c.stride == c.keys)
      check_slope(softmax(scores, dp, c)[1], scores, [&](auto& s) { return dot(softmax(s, dp, c)[0], dp); });
    const Results wanted = softmax(scores, dp, c, factor);
    const auto run = [&] {
      const Reals d(dp);
      softmax_backward(d, Reals(wanted[0]), c.rows, c.keys, c.stride, factor, stream());
      return Results{d.host()};
    };
    check(run, {wanted[1]}, {bound(1e-6, 3)});  // p is stored too, for each of its two places
  }
}

TEST_CASE("kernels: swiglu") {
  for (int n : {0, 1, 3, 7, 33, 100, 300, 5000})
    for (double size : {3.0, 200.0}) {  // exp(200) is infinite in float
      INFO("n ", n, ", size ", size);
      const Doubles gate = numbers(n, 1, size), up = numbers(n, 2), dout = numbers(n, 3);
      Doubles out(n), dgate(n), dup(n);
      for (int i = 0; i < n; ++i) {
        const double s = 1 / (1 + std::exp(-gate[i]));
        out[i] = gate[i] * s * up[i];
        dgate[i] = dout[i] * up[i] * (s + gate[i] * s * (1 - s));
        dup[i] = dout[i] * gate[i] * s;
        if (i < 33)
          check_slope({dgate[i]}, {gate[i]},
                      [&](auto& g) { return dout[i] * up[i] * g[0] / (1 + std::exp(-g[0])); });
      }
      const auto run = [&] {
        const Reals y(n), dg(n), du(n), G(gate), U(up);
        swiglu_forward(y, G, U, n, stream());
        swiglu_backward(dg, du, Reals(dout), G, U, n, stream());
        return Results{y.host(), dg.host(), du.host()};
      };
      check(run, {out, dgate, dup}, {bound(1e-6), bound(3e-6), bound(1e-6)});
    }
}

// ---- cross entropy ----

// {loss (N), dlogits (N, V)}
Results cross_entropy(const Doubles& logits, const Ints& targets, int V, double factor) {
  Doubles loss(targets.size()), dlogits(logits.size());
  for (size_t n = 0; n < targets.size(); ++n) {
    if (targets[n] < 0) continue;
    const double* row = &logits[n * V];
    const double most = *std::max_element(row, row + V);
    double total = 0;
    for (int i = 0; i < V; ++i) total += std::exp(row[i] - most);
    loss[n] = (std::log(total) + most - row[targets[n]]) * factor;
    for (int i = 0; i < V; ++i)
      dlogits[n * V + i] = (std::exp(row[i] - most) / total - (i == targets[n])) * factor;
  }
  return {loss, dlogits};
}

// The same by the three kernels, on ranges of columns as if each were a rank's, combined as ranks would.
Results cross_entropy_on_device(const Doubles& logits, const Ints& targets, int V, float factor, int slices) {
  const int N = int(targets.size());
  const IntBuffer T = upload(targets);
  std::vector<Reals> columns;
  Doubles most(N, -kInfinity), total(N), target(N);
  const auto first = [&](int slice) { return V * slice / slices; };
  const auto width = [&](int slice) { return first(slice + 1) - first(slice); };
  for (int slice = 0; slice < slices; ++slice) {
    Doubles mine;
    for (const double* row = logits.data(); row != logits.data() + logits.size(); row += V)
      mine.insert(mine.end(), row + first(slice), row + first(slice + 1));
    columns.emplace_back(mine);
    const Floats row_max(N);
    cross_entropy_max(row_max, columns[slice], N, width(slice), stream());
    const Doubles host = row_max.host();
    for (int n = 0; n < N; ++n) most[n] = std::max(most[n], host[n]);
  }
  for (int slice = 0; slice < slices; ++slice) {
    const Floats row_sum(N), target_logit(N);
    cross_entropy_sum(row_sum, target_logit, columns[slice], Floats(most), T.data, N, width(slice),
                      first(slice), stream());
    total = sum(total, row_sum.host());
    target = sum(target, target_logit.host());
  }
  Results all{Doubles(), Doubles(logits.size())};
  for (int slice = 0; slice < slices; ++slice) {
    const Floats loss(N);
    cross_entropy_loss(loss, columns[slice], Floats(most), Floats(total), Floats(target), T.data, N,
                       width(slice), first(slice), factor, stream());
    const Doubles here = loss.host(), gradient = columns[slice].host();
    if (slice > 0) CHECK(same_bits(here, all[0]));  // every rank has the loss
    all[0] = here;
    for (int n = 0; n < N; ++n)
      std::copy_n(gradient.data() + n * width(slice), width(slice), all[1].data() + n * V + first(slice));
  }
  return all;
}

TEST_CASE("kernels: cross entropy, whole and with a split vocabulary") {
  constexpr float factor = 1 / 37.f;
  for (const Size s : sizes()) {
    Ints targets = integers(s.N, s.D, 1);
    for (int n = 2; n < s.N; n += 5) targets[n] = -1;  // ignored
    for (const auto& scale : {std::pair{3.0, 0.0}, {1000.0, 0.0}, {1000.0, -2e4}}) {  // the last: a maximum of -19000
      const double size = scale.first, offset = scale.second;
      const Doubles logits = numbers(int64_t(s.N) * s.D, 2, size, offset);
      const Results wanted = cross_entropy(logits, targets, s.D, factor);
      const auto loss = [&](auto& v) {
        return dot(cross_entropy(v, targets, s.D, factor)[0], Doubles(s.N, 1));
      };
      if (s.small() && size == 3) check_slope(wanted[1], logits, loss);
      for (int slices : {1, 2, 4}) {
        if (slices > s.D) continue;
        INFO("N ", s.N, ", V ", s.D, ", size ", size, ", offset ", offset, ", slices ", slices);
        check([&] { return cross_entropy_on_device(logits, targets, s.D, factor, slices); }, wanted,
              {1e-6, bound(1e-6)});
      }
    }
  }
  // One token, sure of the wrong word: the loss is the distance.
  const auto wrong = [] { return cross_entropy_on_device({1000, 0, -3000}, {1}, 3, 1, 1); };
  check(wrong, {{1000}, {1, -1, 0}}, {1e-6, 1e-6});
}

TEST_CASE("kernels: NaN stays NaN, and in its row") {
  const int N = 3, D = 33;
  const auto is_nan = [](double x) { return std::isnan(x); };
  const auto nans_only_in_row_1 = [&](const Doubles& y) {
    const auto nans = std::count_if(y.begin() + D, y.begin() + 2 * D, is_nan);
    return nans > 0 && std::count_if(y.begin(), y.end(), is_nan) == nans;
  };
  for (int column : {0, 1, 16, 32}) {
    INFO("column ", column);
    Doubles x = numbers(N * D, 1);
    x[D + column] = kNaN;  // in row 1
    for (int slices : {1, 2, 4}) {
      const Results r = cross_entropy_on_device(x, {5, 5, 5}, D, 1, slices);
      CHECK(std::isnan(r[0][1]));
      CHECK(std::count_if(r[0].begin(), r[0].end(), is_nan) == 1);
      CHECK(nans_only_in_row_1(r[1]));
      const Results ignored = cross_entropy_on_device(x, {5, -1, 5}, D, 1, slices);
      CHECK(ignored[0][1] == 0);
      CHECK(worst(ignored[1], ignored[1]) == 0);  // no NaN
    }
    const Reals normed(N * D), product(N * D), seen(x), unseen(x), X(x), ones(Doubles(N * D, 1.0));
    const Floats rstd(N);
    const Array<double> squares(1);
    const IntBuffer keys = upload(counting(D));
    const IntBuffer last = upload(Ints(N, D - 1)), before = upload(Ints(N, column - 1));
    rmsnorm_forward(normed, rstd, X, ones, N, D, 1e-5f, stream());
    swiglu_forward(product, X, ones, N * D, stream());
    softmax_forward(seen, last.data, keys.data, N, 0, N, D, D, stream());
    softmax_forward(unseen, before.data, keys.data, N, 0, N, D, D, stream());
    chunk_sums_of_squares(squares, X, N * D, stream());
    for (const Reals* y : {&normed, &product, &seen}) CHECK(nans_only_in_row_1(y->host()));
    CHECK(std::isfinite(dot(unseen.host(), Doubles(N * D, 1))));  // what comes later is not looked at
    CHECK(std::isnan(squares.host()[0]));
  }
}

TEST_CASE("kernels: AdamW over several steps") {
  for (int n : {0, 1, 3, 7, 33, 100, 300, 5000}) {
    INFO("n ", n);
    constexpr int kSteps = 5;
    AdamWStep s{};
    s.lr = 1e-2f, s.beta1 = 0.9f, s.beta2 = 0.95f, s.eps = 1e-8f, s.decay = 0.1f, s.gradient_scale = 0.37f;
    const double b1 = s.beta1, b2 = s.beta2;
    const Doubles start = numbers(n, 1);
    Doubles w = start, m(n), v(n);
    Results gradients;
    for (int step = 1; step <= kSteps; ++step) {
      gradients.push_back(numbers(n, 1 + step));
      for (int i = 0; i < n; ++i) {
        double& g = gradients.back()[i];
        g = i % 11 == 10 ? 0 : rounded(g * std::pow(10, -(i % 9)));  // down to where eps counts, and zero
        m[i] = b1 * m[i] + (1 - b1) * g * s.gradient_scale;
        v[i] = b2 * v[i] + (1 - b2) * std::pow(g * s.gradient_scale, 2);
        const double m_hat = m[i] / (1 - std::pow(b1, step)), v_hat = v[i] / (1 - std::pow(b2, step));
        w[i] -= s.lr * (m_hat / (std::sqrt(v_hat) + s.eps) + s.decay * w[i]);
      }
    }
    const auto run = [&] {
      const Reals weight(start);
      const Floats master(start), M(Doubles(n, 0.0)), V(Doubles(n, 0.0));
      float* w32 = kFloats ? reinterpret_cast<float*>(weight.data) : master.data;  // fp32 has no second copy
      for (int step = 1; step <= kSteps; ++step) {
        s.m_correction = float(1 / (1 - std::pow(b1, step)));
        s.v_correction = float(1 / (1 - std::pow(b2, step)));
        adamw(weight, w32, M, V, Reals(gradients[step - 1]), n, s, stream());
      }
      const Doubles w_now = weight.host(), exact = kFloats ? w_now : master.host();
      if (!kFloats) CHECK(w_now == Reals(exact).host());  // the master's value, rounded
      return Results{w_now, sum(exact, start, -1), M.host(), V.host()};
    };
    // How far the weights went is the sharper test: beside |w|, a wrong eps would not show.
    check(run, {w, sum(w, start, -1), m, v}, {bound(1e-6), 1e-4, 1e-6, 1e-6});
  }
}

TEST_CASE("kernels: sums and sums of squares lose no digits") {
  for (int n : {0, 1, 3, 7, 33, 100, 300, 4095, 4096, 4097, 3 * 4096, 4000003}) {
    INFO("n ", n);
    const Doubles x = numbers(n, 1, 0.5, 0.5);  // positive, so that the sum is not near zero
    long double plain = 0, squares = 0;
    for (double xi : x) plain += xi, squares += static_cast<long double>(xi) * xi;
    const Floats F(x);
    const Reals R(x);
    const auto run = [&] {
      const Array<double> sums(chunk_count(n)), sums_of_squares(chunk_count(n));
      chunk_sums(sums, F, n, stream());
      chunk_sums_of_squares(sums_of_squares, R, n, stream());
      const Doubles ones(chunk_count(n), 1);
      return Results{{dot(sums.host(), ones)}, {dot(sums_of_squares.host(), ones)}};
    };
    check(run, {{double(plain)}, {double(squares)}}, {1e-12, 1e-12});
  }
}

// ---- matrix products ----

struct View {  // of a matrix whose rows are `stride` apart
  const double* data;
  int stride;
  bool transposed = false;
  double operator()(int i, int j) const { return transposed ? data[j * stride + i] : data[i * stride + j]; }
};

Doubles product(int m, int n, int k, View a, View b) {  // (m, n) = a (m, k) b (k, n)
  Doubles c(m * n);
  for (int i = 0; i < m; ++i)
    for (int l = 0; l < k; ++l)
      for (int j = 0; j < n; ++j) c[i * n + j] += a(i, l) * b(l, j);
  return c;
}

TEST_CASE("device: the three products of a linear layer") {
  const int cases[][3] = {{1, 1, 1},      {1, 3, 7},      {3, 7, 1},     {7, 1, 33},      {33, 100, 3},
                          {100, 33, 300}, {300, 100, 33}, {3, 300, 100}, {300, 300, 300}, {0, 7, 3}};  // no tokens
  for (const auto& c : cases) {
    const int N = c[0], in = c[1], out = c[2];
    INFO("N ", N, ", in ", in, ", out ", out);
    const Doubles x = numbers(N * in, 1), w = numbers(out * in, 2), dy = numbers(N * out, 3);
    const Doubles dx0 = numbers(N * in, 4), dw0 = numbers(out * in, 5);
    const View vx{x.data(), in}, vw{w.data(), in}, vdy{dy.data(), out};
    const Doubles y = product(N, out, in, vx, {w.data(), in, true}), dx = product(N, in, out, vdy, vw);
    const Doubles dw = product(out, in, N, {dy.data(), out, true}, vx);
    const auto run = [&] {
      const Reals X(x), W(w), DY(dy), Y(N * out), DX(N * in), DX1(dx0), DW(out * in), DW1(dw0);
      gpu().matmul_flops = 0;
      gpu().linear(Y.as({N, out}), X.as({N, in}), W.as({out, in}));
      gpu().linear_backward_input(DX.as({N, in}), DY.as({N, out}), W.as({out, in}), 0);
      gpu().linear_backward_input(DX1.as({N, in}), DY.as({N, out}), W.as({out, in}), 1);
      gpu().linear_backward_weight(DW.as({out, in}), DY.as({N, out}), X.as({N, in}), 0);
      gpu().linear_backward_weight(DW1.as({out, in}), DY.as({N, out}), X.as({N, in}), 1);
      CHECK(gpu().matmul_flops == 5 * 2.0 * N * in * out);
      return Results{Y.host(), DX.host(), DX1.host(), DW.host(), DW1.host()};
    };
    check(run, {y, dx, sum(dx0, dx), dw, sum(dw0, dw)}, Doubles(5, bound(3e-6)));
  }
}

TEST_CASE("device: a batch of products, with gaps between rows and between matrices") {
  const int cases[][4] = {{1, 1, 1, 1}, {3, 7, 33, 5}, {33, 3, 100, 2}, {100, 33, 7, 3}, {65, 129, 300, 2}};
  for (const auto& s : cases)
    for (int options = 0; options < 8; ++options) {
      const int m = s[0], n = s[1], k = s[2], batch = s[3];
      const bool ta = options & 1, tb = options & 2;
      const float beta = options & 4 ? 0.5f : 0.f, alpha = 0.25f;
      INFO("m ", m, ", n ", n, ", k ", k, ", batch ", batch, ", ta ", ta, ", tb ", tb, ", beta ", beta);
      const int a_stride = (ta ? m : k) + 5, a_size = (ta ? k : m) * a_stride + 11;
      const int b_stride = (tb ? k : n) + 2, b_size = (tb ? n : k) * b_stride + 3;
      const int c_stride = n + 4, c_size = m * c_stride + 7;
      const Doubles a = numbers(a_size * batch, 1), b = numbers(b_size * batch, 2);
      Doubles c = numbers(c_size * batch, 3), wanted = c;  // the gaps keep what is there
      for (int x = 0; x < batch; ++x) {
        const Doubles ab = product(m, n, k, {&a[x * a_size], a_stride, ta}, {&b[x * b_size], b_stride, tb});
        for (int i = 0; i < m * n; ++i) {
          const int at = x * c_size + i / n * c_stride + i % n;
          wanted[at] = alpha * ab[i] + beta * c[at];
          if (beta == 0) c[at] = kNaN;
        }
      }
      const auto run = [&] {
        const Reals A(a), B(b), C(c);
        gpu().matmul(C, c_stride, c_size, {A, a_stride, ta, a_size}, {B, b_stride, tb, b_size}, m, n, k,
                     alpha, beta, batch);
        return Results{C.host()};
      };
      check(run, {wanted}, {bound(3e-6)});
    }
}

// ---- attention ----

struct Heads {
  int B, T, H, KV, d;
  Ints positions;
};

// {out, dq, dk, dv}: p = softmax(q k / sqrt(d)) over the keys not after the query, out = p v; and back.
Results attention(const Heads& c, const Doubles& q, const Doubles& k, const Doubles& v, const Doubles& dout) {
  const int rows = c.B * c.H * c.T, T = c.T;
  const double factor = 1 / std::sqrt(double(c.d));
  Doubles out(q.size()), dq(q.size()), dk(k.size()), dv(k.size()), scores(rows * T), dp(rows * T);
  const auto each = [&](auto visit) {  // where in p, in q and in k, for every product
    for (int row = 0; row < rows; ++row)
      for (int j = 0; j < T; ++j) {
        const int b = row / T / c.H, head = row / T % c.H / (c.H / c.KV);
        for (int i = 0; i < c.d; ++i)
          visit(row * T + j, row * c.d + i, ((b * c.KV + head) * T + j) * c.d + i);
      }
  };
  each([&](int at, int query, int key) {
    scores[at] += q[query] * k[key] * factor;
    dp[at] += dout[query] * v[key];
  });
  const Results s = softmax(scores, dp, {rows, 0, T, T, T, c.positions, c.positions}, factor);
  each([&](int at, int query, int key) {
    out[query] += s[0][at] * v[key];
    dv[key] += s[0][at] * dout[query];
    dq[query] += s[1][at] * k[key];
    dk[key] += s[1][at] * q[query];
  });
  return {out, dq, dk, dv};
}

TEST_CASE("attention: causal, with grouped heads, forward and backward") {
  Ints zigzag = counting(300), pairs = counting(101, 1);
  for (int t = 150; t < 300; ++t) zigzag[t] += 300;  // the first and the last quarter of 600
  for (int& p : pairs) p /= 2;                       // two tokens a position, one pair across a cut at 64
  std::vector<Heads> cases{{1, 1, 1, 1, 1, {5}}, {1, 4, 2, 2, 3, {0, 1, 6, 7}}, {1, 101, 4, 2, 5, pairs}};
  cases.push_back({2, 3, 2, 1, 7, counting(3)});
  cases.push_back({1, 7, 3, 3, 33, counting(7, 1000)});
  cases.push_back({2, 33, 6, 2, 8, counting(33, 0, 5)});
  cases.push_back({1, 64, 4, 2, 16, counting(64)});
  cases.push_back({2, 65, 3, 1, 6, counting(65)});
  cases.push_back({1, 100, 4, 4, 10, counting(100, 3, 2)});
  cases.push_back({1, 128, 2, 1, 64, counting(128)});
  cases.push_back({2, 300, 6, 3, 12, zigzag});
  for (const Heads& c : cases)
    for (double size : {1.0, 10.0}) {  // 10: scores x100
      const int B = c.B, T = c.T, H = c.H, KV = c.KV, d = c.d, queries = B * H * T * d, keys = B * KV * T * d;
      INFO("B ", B, ", T ", T, ", H ", H, ", KV ", KV, ", d ", d, ", size ", size);
      const Doubles q = numbers(queries, 1, size), k = numbers(keys, 2, size), v = numbers(keys, 3);
      const Doubles dout = numbers(queries, 4);
      const Results wanted = attention(c, q, k, v, dout);
      if (queries < 100 && size == 1) {
        check_slope(wanted[1], q, [&](auto& x) { return dot(attention(c, x, k, v, dout)[0], dout); });
        check_slope(wanted[2], k, [&](auto& x) { return dot(attention(c, q, x, v, dout)[0], dout); });
        check_slope(wanted[3], v, [&](auto& x) { return dot(attention(c, q, k, x, dout)[0], dout); });
      }
      const Reals Q(q), K(k), V(v), DOUT(dout);
      const IntBuffer positions = upload(c.positions);
      const int64_t square = int64_t(B) * H * T * T, scratch = attention_scratch_bytes(B, T, H);
      const auto heads = [&](const Reals& x) { return x.as({B, H, T, d}); };
      const auto shared = [&](const Reals& x) { return x.as({B, KV, T, d}); };
      const auto run = [&] {
        const Reals out(queries), dq(queries), dk(keys), dv(keys);
        Attention a{gpu(), B, T, H, KV, d, heads(Q), shared(K), shared(V), heads(out),
                    positions.data, c.positions, {}};
        poison_next(square);
        attention_forward(a);
        CHECK(gpu().current(Memory::activations) == square * int64_t(sizeof(real)));
        poison_next(scratch / int64_t(sizeof(real)));
        gpu().reset_peaks();
        attention_backward(a, heads(DOUT), heads(dq), shared(dk), shared(dv));
        CHECK(gpu().peak(Memory::workspace) == scratch);
        return Results{out.host(), dq.host(), dk.host(), dv.host()};
      };
      // A score stored in bf16 is off by 2^-8 of itself, and exp makes that a relative error of p. Where p is
      // almost 0 or 1 (size 10), the gradients of the scores are small differences.
      const double stores = 4 + (size - 1) * size * std::sqrt(d), tight = bound(5e-6, stores);
      const double gradient = size == 1 ? tight : bound(1e-4, stores);
      check(run, wanted, {size == 1 ? tight : bound(5e-5, stores), gradient, gradient, tight});
    }
}

}  // namespace
