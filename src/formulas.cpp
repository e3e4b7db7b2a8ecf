#include "formulas.h"

#include <algorithm>
#include <cmath>

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

int64_t stash_bytes(const ModelConfig& c, int64_t N, int64_t B, int64_t blocks, bool head) {
  return blocks * block_activation_bytes(c, N, B) + (head ? B * N * (2 * c.dim + c.vocab) + 4 * N : 0);
}

int64_t backward_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t B, TensorCut cut, bool postponed) {
  const int64_t N = int64_t(batch) * T, D = c.dim, F = c.hidden / cut.t;
  const int64_t A = int64_t(c.heads) * c.head_dim() / cut.t, K = int64_t(c.kv_heads) * c.head_dim() / cut.t;
  const int64_t partial = 4 * rmsnorm_partial_size(int(cut.rows(N)), c.dim);  // per-group sums of a norm's gradient
  const int64_t rope = 4 * int64_t(T) * c.head_dim();
  const int64_t mlp = postponed ? B * N * D : 0;                       // kept for later: the gradient of the output,
  const int64_t attention = postponed ? mlp + B * N * (2 * F + D) : 0;  // of gate and up, and of attention's output
  const int64_t scratch = attention_scratch_bytes(batch, T, c.heads / cut.t);
  const int64_t moments[] = {
      mlp + B * N * 3 * F,                  // gradients of gate, up and their product
      mlp + B * N * (2 * F + D) + partial,  // of gate, up and the MLP's input, while the norm's is taken
      attention + B * N * 2 * (A + 2 * K) + B * N * 2 * A + scratch,  // q, k, v twice; out twice
      attention + B * N * 2 * (A + 2 * K) + rope,
      attention + B * N * (A + 2 * K + D) + partial,
  };
  return *std::max_element(std::begin(moments), std::end(moments));
}

int64_t backward_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t B, bool postponed) {
  return backward_workspace_bytes(c, batch, T, B, {1, false, c.vocab}, postponed);
}

int64_t postponed_bytes(const ModelConfig& c, int64_t N, int64_t B) {
  const int64_t A = int64_t(c.heads) * c.head_dim(), K = int64_t(c.kv_heads) * c.head_dim();
  return B * N * (2 * c.dim + 2 * c.hidden + A + 2 * K);
}

int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B, TensorCut cut) {
  return 4 * tokens + backward_workspace_bytes(c, batch, T, B, cut, false);
}

int64_t all_reduce_sent(int64_t X, int64_t n, int64_t r) {
  auto chunk = [&](int64_t i) { return X / n + (i % n < X % n); };
  return n == 1 ? 0 : 2 * X - chunk(r + 1) - chunk(r + 2);
}

double megatron_layer_bytes(double s, double b, double h, double a) { return s * b * h * (34 + 5 * a * s / h); }

// ---- communication ----

double sent_share(Collective collective, double n) {
  switch (collective) {
    case Collective::all_reduce: return 2 * (n - 1) / n;
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::all_to_all: return (n - 1) / n;
    default: return 1;
  }
}

int64_t ring_all_reduce_sent(int64_t X, int64_t n, int64_t r) {
  if (n == 1) return 0;
  auto chunk = [&](int64_t i) { return X / n + (i % n < X % n); };
  return 2 * X - chunk(r + 1) - chunk(r + 2);
}

double ring_all_reduce_seconds(double S, double n, double latency, double bandwidth) {
  return 2 * (n - 1) * latency + 2 * (n - 1) / n * S / bandwidth;
}

double tree_all_reduce_seconds(double S, double n, double latency, double bandwidth) {
  return 2 * std::ceil(std::log2(n)) * (latency + S / bandwidth);
}

double halving_all_reduce_seconds(double S, double n, double latency, double bandwidth) {
  return 2 * std::log2(n) * latency + 2 * (n - 1) / n * S / bandwidth;
}

double root_all_reduce_seconds(double S, double n, double latency, double bandwidth) {
  return 2 * (n - 1) * (latency + S / bandwidth);
}

double server_seconds(double S, double n, double k, double latency, double bandwidth) {
  if (n == 1) return 0;
  const double server = (n - 1) / k, worker = k == n ? (n - 1) / n : 1;  // parts of S through the busiest port, one way
  const double messages = std::max(n - 1, k - (k == n));
  return 2 * (messages * latency + std::max(server, worker) * S / bandwidth);
}

double hierarchical_bytes_between(double S, double M, double g) { return 2 * (M - 1) / M * S / g; }

double overlapped_seconds(double buckets, double produced, double drained) {
  return std::max(buckets * produced + drained, produced + buckets * drained);
}

double last_reduced(const std::vector<double>& ready, const std::vector<double>& drain) {
  double end = 0;
  for (size_t i = 0; i < ready.size(); ++i) end = std::max(end, ready[i]) + drain[i];
  return end;
}

double scaling_efficiency(double throughput_n, double n, double throughput_1) { return throughput_n / (n * throughput_1); }

double straggler_share(double share, double n) { return 1 - std::pow(1 - share, n); }

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

StateShare zero_state(int stage, double d, const StateBytes& s, bool offload) {
  StateShare share{stage >= 3 ? s.weights / d : s.weights, stage >= 2 ? s.gradients / d : s.gradients,
                   stage >= 1 ? s.optimizer / d : s.optimizer};
  if (offload) share.gradients = share.optimizer = 0, share.host = s.all() / d;
  return share;
}

double zero_sent(int stage, double m, bool reduce_each, bool keep_parameters) {
  const double reduced = stage >= 2 && reduce_each ? m : 1;
  return reduced + (stage < 3 ? 1 : keep_parameters ? m : 2 * m);
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
