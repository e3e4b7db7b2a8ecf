#include "formulas.h"

#include <algorithm>

#include "../kernels/kernels.h"
#include "attention.h"

int64_t block_activation_bytes(const ModelConfig& c, int64_t N, int64_t B) {
  return block_activation_bytes(c, N, B, {1, false, c.vocab});
}

int64_t peak_activation_bytes(const ModelConfig& c, int64_t N, int64_t B) {
  return peak_activation_bytes(c, N, B, {1, false, c.vocab});
}

int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B) {
  return peak_workspace_bytes(c, batch, T, tokens, B, {1, false, c.vocab});
}

int64_t block_activation_bytes(const ModelConfig& c, int64_t N, int64_t B, TensorCut cut) {
  const int64_t A = int64_t(c.heads) * c.head_dim(), K = int64_t(c.kv_heads) * c.head_dim(), R = cut.rows(N);
  return 4 * B * R * c.dim + 8 * R + B * N * (2 * A + 2 * K + 3 * c.hidden + int64_t(c.heads) * c.seq) / cut.t;
}

int64_t peak_activation_bytes(const ModelConfig& c, int64_t N, int64_t B, TensorCut cut) {
  const int64_t R = cut.rows(N);
  const int64_t at_head = c.layers * block_activation_bytes(c, N, B, cut) + B * R * 3 * c.dim + 4 * R + B * N * cut.vocab;
  const int64_t at_embedding = cut.sequence ? B * (N + R) * c.dim : 0;  // its sum before and after it is scattered
  return std::max(at_head, at_embedding);
}

int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B, TensorCut cut) {
  const int64_t N = int64_t(batch) * T, D = c.dim, F = c.hidden / cut.t;
  const int64_t A = int64_t(c.heads) * c.head_dim() / cut.t, K = int64_t(c.kv_heads) * c.head_dim() / cut.t;
  // Per-group sums of a norm's weight gradient.
  const int64_t partial = 4 * rmsnorm_partial_size(int(cut.rows(N)), c.dim);
  const int64_t rope = 4 * int64_t(T) * c.head_dim();
  const int64_t moments[] = {
      B * N * 3 * F,                          // gradients of gate, up and their product
      B * N * (2 * F + D) + partial,          // of gate, up and the MLP's input, while the norm's is taken
      // q, k, v twice; out twice
      B * N * 2 * (A + 2 * K) + B * N * 2 * A + attention_scratch_bytes(batch, T, c.heads / cut.t),
      B * N * 2 * (A + 2 * K) + rope,
      B * N * (A + 2 * K + D) + partial,
  };
  return 4 * tokens + *std::max_element(std::begin(moments), std::end(moments));
}

int64_t all_reduce_sent(int64_t X, int64_t n, int64_t r) {
  auto chunk = [&](int64_t i) { return X / n + (i % n < X % n); };
  return n == 1 ? 0 : 2 * X - chunk(r + 1) - chunk(r + 2);
}

double megatron_layer_bytes(double s, double b, double h, double a) { return s * b * h * (34 + 5 * a * s / h); }

// ---- estimates before a run ----

ParameterParts parameter_parts(const ModelConfig& c) {
  const int64_t D = c.dim, F = c.hidden, V = c.vocab, K = int64_t(c.kv_heads) * c.head_dim();
  return {V * D, 2 * D * D + 2 * D * K, 3 * D * F, 2 * D, D, c.tied ? 0 : V * D};
}

ParameterParts gpt_parameter_parts(int64_t h, int64_t V, int64_t s) {
  return {V * h + s * h, 4 * h * h + 4 * h, 8 * h * h + 5 * h, 4 * h, 2 * h, 0};
}

double attention_flops_per_token(double layers, double dim, double seq, bool causal) {
  return (causal ? 6 : 12) * layers * dim * seq;
}

double block_forward_flops(const ModelConfig& c, double tokens, bool causal) {
  const ParameterParts parts = parameter_parts(c);
  return 2 * tokens * double(parts.attention + parts.mlp) + (causal ? 2 : 4) * tokens * c.seq * c.dim;
}

double gpt_layer_forward_flops(double b, double s, double h) { return 24 * b * s * h * h + 4 * b * s * s * h; }

double megatron_iteration_flops(double B, double s, double L, double h, double V, bool recompute) {
  const double factor = recompute ? 96 : 72, head = recompute ? 16 : 12;
  return factor * B * s * L * h * h * (1 + s / (6 * h) + V / (head * L * h));
}

double zero_bytes_per_parameter(int stage, double d) {
  const double weights = stage >= 3 ? 2 / d : 2, gradients = stage >= 2 ? 2 / d : 2;
  return weights + gradients + (stage >= 1 ? 12 / d : 12);
}

double megatron_layer_bytes(double s, double b, double h, double a, double t, bool sequence_parallel,
                            Recomputed recomputed) {
  if (recomputed == Recomputed::layer) return 2 * s * b * h;
  const double core = recomputed == Recomputed::attention ? 0 : 5 * a * s / (h * t);
  return s * b * h * (10 / (sequence_parallel ? t : 1) + 24 / t + core);
}

int64_t lora_parameters(const ModelConfig& c, int64_t r) {
  const int64_t D = c.dim, K = int64_t(c.kv_heads) * c.head_dim();
  return c.layers * r * (2 * D + D + K);
}

double training_seconds(double flops, double gpus, double peak, double mfu) { return flops / (gpus * peak * mfu); }
