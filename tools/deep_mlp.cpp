// deep_mlp.cpp - how often must a cut MLP be summed? 4 ranks (threads) run an MLP of 2, 4 and 8 layers, cut by rows and
// by columns in turn: once with an all-reduce after every pair of layers, once with only the one at the end.
//
// Each row-cut layer needs its whole input, and a column-cut layer leaves partial sums. act(W (p0 + p1)) is not
// act(W p0) + act(W p1), so the sums between pairs can't be postponed to the end. (notes/tensor_parallel.md, X15)
#include <cmath>
#include <cstdio>

#include "../kernels/kernels.h"
#include "../src/random.h"
#include "../src/world.h"

namespace {

constexpr int kRanks = 4, N = 32, D = 64, F = 128;

// Layer pair p: h = W1 x, x' = W2 act(h), with act(h) = h silu(h). This rank holds rows [begin, end) of W1 (F, D) and the
// same columns of W2 (D, F). All values depend on their global index only.
void pair(Device& device, Tensor out, Tensor x, int p, int begin, int end) {
  const int mine = end - begin;
  auto weights = [&](int which, int rows, int columns, auto index) {
    Buffer w = device.allocate<real>(Memory::parameters, {rows, columns});
    std::vector<real> values;
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c)
        values.push_back(real(random_normal(1, uint64_t(2 * p + which), uint64_t(index(r, c))) / std::sqrt(float(D))));
    device.upload(w.data, values.data(), int64_t(values.size()));
    return w;
  };
  const Buffer w1 = weights(0, mine, D, [&](int r, int c) { return (begin + r) * D + c; });
  const Buffer w2 = weights(1, D, mine, [&](int r, int c) { return r * F + begin + c; });
  Buffer h = device.allocate<real>(Memory::activations, {N, mine}), act = device.allocate<real>(Memory::activations, {N, mine});
  device.linear(h, x, w1);
  swiglu_forward(act.data, h.data, h.data, h.numel(), device.stream());
  device.linear(out, act, w2);
}

std::vector<float> run(Device& device, Group* tp, int pairs, bool sum_between) {
  const int begin = tp ? F * tp->rank() / kRanks : 0, end = tp ? F * (tp->rank() + 1) / kRanks : F;
  Buffer x = device.allocate<real>(Memory::activations, {N, D}), y = device.allocate<real>(Memory::activations, {N, D});
  std::vector<real> values(N * D);
  for (int i = 0; i < N * D; ++i) values[i] = real(random_normal(1, 1000, uint64_t(i)));
  device.upload(x.data, values.data(), N * D);
  for (int p = 0; p < pairs; ++p) {
    pair(device, y, x, p, begin, end);
    if (tp && (sum_between || p + 1 == pairs)) tp->all_reduce<real>(y);
    std::swap(x, y);
  }
  const std::vector<real> stored = x.to_host();
  return {stored.begin(), stored.end()};
}

// ||a - b|| / ||b||
double off(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) difference += std::pow(double(a[i]) - b[i], 2), size += double(b[i]) * b[i];
  return std::sqrt(difference / size);
}

}  // namespace

int main(int argc, char** argv) {
  WorldOptions options;
  options.threads = kRanks;
  return run_ranks(argc, argv, "deep_mlp", options, [](int rank) {
    Device device(rank);
    World world(device);
    bool right = true;
    for (int pairs : {1, 2, 4}) {
      const std::vector<float> whole = run(device, nullptr, pairs, true);
      const double every = off(run(device, &world.all(), pairs, true), whole);
      const double last = off(run(device, &world.all(), pairs, false), whole);
      right = right && every <= 1e-5 && (pairs == 1 || last > 0.1);
      if (rank != 0) continue;
      if (pairs == 1) std::printf("||y - y of one rank|| / ||y of one rank||, %d ranks\n", kRanks);
      std::printf("  %d layers, summed after each pair   %.1e (at most 1e-05)\n", 2 * pairs, every);
      if (pairs > 1) std::printf("  %d layers, summed once, at the end  %.2f\n", 2 * pairs, last);
    }
    return right ? 0 : 1;
  });
}
