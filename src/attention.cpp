#include "attention.h"

#include <algorithm>
#include <cmath>

#include "../kernels/kernels.h"

namespace {

// How the B x H x T query rows are cut into matrix products. This is launch geometry, like blockDim:
//   GPU: one strided-batched product; the heads of one key head are H/KV * T contiguous rows, the batch is B x KV.
//   CPU: blocks of 64 rows of one head, which stay in cache and skip the keys that none of their rows can see.
#ifdef RINGTRON_CUDA
constexpr int kRows = 0;
#else
constexpr int kRows = 64;
#endif

struct Product {
  int64_t row;   // first query row, counted through (B, H, T)
  int rows;      // query rows of one matrix
  int keys;      // columns that any of them can see
  int64_t group; // which (sample, key head), counted through (B, KV)
  int batch;     // matrices, from this group on
  bool opens;    // the first product of its group in backward order: it writes dk and dv, the others add
};

std::vector<Product> products(const Attention& a) {
  const int shared = a.H / a.KV;
  if (kRows == 0) return {{0, shared * a.T, a.T, 0, a.B * a.KV, true}};
  std::vector<Product> cut;
  for (int64_t head = 0; head < int64_t(a.B) * a.H; ++head)
    for (int t = 0; t < a.T; t += kRows) {
      const int rows = std::min(kRows, a.T - t);
      const auto& p = a.host_positions;
      const int keys = int(std::upper_bound(p.begin(), p.end(), p[t + rows - 1]) - p.begin());
      cut.push_back({head * a.T + t, rows, keys, head / shared, 1, head % shared == shared - 1 && t + rows == a.T});
    }
  return cut;
}

}  // namespace

int64_t attention_scratch_bytes(int B, int T, int H) {
  return int64_t(sizeof(real)) * T * (kRows == 0 ? int64_t(B) * H * T : std::min(kRows, T));
}

void attention_forward(Attention& a) {
  const int64_t T = a.T, d = a.d, shared = a.H / a.KV;
  a.probabilities = a.device.allocate<real>(Memory::activations, {a.B, a.H, T, T});
  for (const Product& p : products(a)) {
    real* scores = a.probabilities.data + p.row * T;
    const real* q = a.q.data + p.row * d;
    const real* k = a.k.data + p.group * T * d;
    const real* v = a.v.data + p.group * T * d;
    a.device.matmul(scores, T, shared * T * T, {q, d, false, shared * T * d}, {k, d, true, T * d}, p.rows, p.keys,
                    a.d, 1 / std::sqrt(float(d)), 0, p.batch);
    softmax_forward(scores, a.positions, a.positions, int64_t(p.rows) * p.batch, p.row % T, a.T, p.keys, a.T,
                    a.device.stream());
    a.device.matmul(a.out.data + p.row * d, d, shared * T * d, {scores, T, false, shared * T * T},
                    {v, d, false, T * d}, p.rows, a.d, p.keys, 1, 0, p.batch);
  }
}

void attention_backward(Attention& a, Tensor dout, Tensor dq, Tensor dk, Tensor dv) {
  const int64_t T = a.T, d = a.d, shared = a.H / a.KV;
  Buffer scratch = a.device.allocate<real>(
      Memory::workspace, {attention_scratch_bytes(a.B, a.T, a.H) / int64_t(sizeof(real))});
  const std::vector<Product> cut = products(a);
  // Backwards, because the last rows see every key: their product writes all of dk and dv, the others add.
  for (auto p = cut.rbegin(); p != cut.rend(); ++p) {
    const real* probabilities = a.probabilities.data + p->row * T;
    const real* q = a.q.data + p->row * d;
    const real* k = a.k.data + p->group * T * d;
    const real* v = a.v.data + p->group * T * d;
    const real* dout_rows = dout.data + p->row * d;
    real* dk_rows = dk.data + p->group * T * d;
    real* dv_rows = dv.data + p->group * T * d;
    const float beta = p->opens ? 0.f : 1.f;
    const int64_t square = shared * T * T, rows = shared * T * d;  // distances inside a batch
    // dv += probabilities^T dout;  dprobabilities = dout v^T
    a.device.matmul(dv_rows, d, T * d, {probabilities, T, true, square}, {dout_rows, d, false, rows}, p->keys, a.d,
                    p->rows, 1, beta, p->batch);
    a.device.matmul(scratch.data, T, square, {dout_rows, d, false, rows}, {v, d, true, T * d}, p->rows, p->keys,
                    a.d, 1, 0, p->batch);
    softmax_backward(scratch.data, probabilities, int64_t(p->rows) * p->batch, p->keys, a.T,
                     1 / std::sqrt(float(d)), a.device.stream());
    // dq = dscores k;  dk += dscores^T q
    a.device.matmul(dq.data + p->row * d, d, rows, {scratch.data, T, false, square}, {k, d, false, T * d}, p->rows,
                    a.d, p->keys, 1, 0, p->batch);
    a.device.matmul(dk_rows, d, T * d, {scratch.data, T, true, square}, {q, d, false, rows}, p->keys, a.d, p->rows,
                    1, beta, p->batch);
  }
}
