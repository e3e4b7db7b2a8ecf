#include "formulas.h"

#include <algorithm>

#include "../kernels/kernels.h"
#include "attention.h"

int64_t block_activation_bytes(const ModelConfig& c, int64_t N, int64_t B) {
  const int64_t A = int64_t(c.heads) * c.head_dim(), K = int64_t(c.kv_heads) * c.head_dim();
  return B * N * (4 * c.dim + 2 * A + 2 * K + 3 * c.hidden + int64_t(c.heads) * c.seq) + 8 * N;
}

int64_t peak_activation_bytes(const ModelConfig& c, int64_t N, int64_t B) {
  return c.layers * block_activation_bytes(c, N, B) + B * N * (3 * c.dim + c.vocab) + 4 * N;
}

int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B) {
  const int64_t N = int64_t(batch) * T, D = c.dim, F = c.hidden;
  const int64_t A = int64_t(c.heads) * c.head_dim(), K = int64_t(c.kv_heads) * c.head_dim();
  const int64_t partial = 4 * rmsnorm_partial_size(int(N), c.dim);  // per-group sums of a norm's weight gradient
  const int64_t rope = 4 * int64_t(T) * c.head_dim();
  const int64_t moments[] = {
      B * N * 3 * F,                          // gradients of gate, up and their product
      B * N * (2 * F + D) + partial,          // of gate, up and the MLP's input, while the norm's is taken
      B * N * 2 * (A + 2 * K) + B * N * 2 * A + attention_scratch_bytes(batch, T, c.heads),  // q, k, v twice; out twice
      B * N * 2 * (A + 2 * K) + rope,
      B * N * (A + 2 * K + D) + partial,
  };
  return 4 * tokens + *std::max_element(std::begin(moments), std::end(moments));
}

double megatron_layer_bytes(double s, double b, double h, double a) { return s * b * h * (34 + 5 * a * s / h); }
