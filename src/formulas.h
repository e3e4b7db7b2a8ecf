// formulas.h - the formulas of the notes as functions: what a step should cost, to be held against what it did.
// N: tokens of one micro-batch on this rank, all sizes of `c` as they are on this rank, B bytes per element.
#pragma once
#include <vector>

#include "config.h"

// Bytes of what one block keeps for its backward pass:
//   B N (4 D + 2 A + 2 K + 3 F + H T) + 8 N,  with A = H d, K = KV d.
// The residual stream, two norms' outputs and the stream between them (4 D), q and attention's output (2 A), k and v
// (2 K), gate, up and their product (3 F), the probabilities (H T); 8 N for two fp32 rstd.
int64_t block_activation_bytes(const ModelConfig& c, int64_t N, int64_t B);

// The peak of a whole model on one rank, at the start of the head's backward: L blocks, and the head's input, its
// norm, the logits and the gradient that starts down the stream: B N (3 D + V) + 4 N.
int64_t peak_activation_bytes(const ModelConfig& c, int64_t N, int64_t B);

// The largest scratch of any moment of a step: in the backward pass of a block. `tokens`: of all micro-batches of
// the step, whose losses (4 bytes each) are added up at its end.
int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B);

// How the t ranks of a tensor-parallel group cut the model: heads, F and V by t; with sequence parallelism the rows of
// the residual stream too, R = N/t instead of N.
struct TensorCut {
  int t = 1;
  bool sequence = false;
  int64_t vocab = 0;  // V of this rank: pieces may differ by one
  int64_t rows(int64_t N) const { return sequence ? N / t : N; }
};
// The three formulas above on one of these ranks (`c` is the whole model):
//   block      4 B R D + 8 R + B N (2A + 2K + 3F + H T) / t
//   peak       L blocks + B R 3D + 4 R + B N V(rank)
//   workspace  heads and F over t; partial products (N, D) stay whole
int64_t block_activation_bytes(const ModelConfig& c, int64_t N, int64_t B, TensorCut);
int64_t peak_activation_bytes(const ModelConfig& c, int64_t N, int64_t B, TensorCut);
int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B, TensorCut);

// Elements that rank r of n sends in a ring all-reduce of X: chunk i has X/n, one more for the first X mod n, and each
// rank passes on all chunks but one in each of the two halves: 2X - |c(r+1)| - |c(r+2)|.
int64_t all_reduce_sent(int64_t X, int64_t n, int64_t r);
// What a pipeline stage keeps of one micro-batch until its backward: its blocks, and on the last stage the head's
// input, its norm and the logits: B N (2 D + V) + 4 N. With k micro-batches stashed it holds k times that.
int64_t stash_bytes(const ModelConfig& c, int64_t N, int64_t B, int64_t blocks, bool head);
// The scratch of one block's backward. With `postponed` weight halves nothing that they need is freed on the way.
int64_t backward_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t B, bool postponed = false);
int64_t backward_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t B, TensorCut, bool postponed);
// What one block's postponed weight half keeps in scratch: the gradients of the outputs of its seven matrices,
// B N (2 D + 2 F + A + 2 K).
int64_t postponed_bytes(const ModelConfig& c, int64_t N, int64_t B);

// Megatron's formula for GELU, dropout and 16 bits (arXiv:2205.05198), to print beside ours: s b h (34 + 5 a s / h).
double megatron_layer_bytes(double s, double b, double h, double a);

// ---- communication: what a rank sends, and how long it takes. n ranks; S: bytes of the whole tensor; a message of B
// bytes takes `latency` + B / bandwidth, seconds and bytes per second one way (the alpha-beta model) ----

enum class Collective { all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, reduce, send };
// The part of S that each rank sends: all-reduce 2 (n-1)/n, reduce-scatter, all-gather and all-to-all (n-1)/n, the
// others 1. The same factor turns algbw = S / time into nccl-tests' busbw.
double sent_share(Collective, double n);
// Exactly, for a ring all-reduce of X elements, whatever divides: rank r sends 2X - |c(r+1)| - |c(r+2)|, where chunk i
// has X/n + (i < X mod n) elements.
int64_t ring_all_reduce_sent(int64_t X, int64_t n, int64_t r);

// Seconds of an all-reduce:
//   ring                2 (n-1) latency + 2 (n-1)/n S/bandwidth
//   tree                2 log2(n) (latency + S/bandwidth): up and down, nothing overlapped
//   halving, doubling   2 log2(n) latency + 2 (n-1)/n S/bandwidth, n a power of 2 (Rabenseifner)
//   root                2 (n-1) (latency + S/bandwidth): everything through one port, there and back
double ring_all_reduce_seconds(double S, double n, double latency, double bandwidth);
double tree_all_reduce_seconds(double S, double n, double latency, double bandwidth);
double halving_all_reduce_seconds(double S, double n, double latency, double bandwidth);
double root_all_reduce_seconds(double S, double n, double latency, double bandwidth);
// Gradients to k servers and parameters back, servers being workers too. Each server takes n-1 parts of S/k, and each
// worker gives away S, or all but its own part: 2 max((n-1)/k, 1 - [k = n]/n) S/bandwidth and the messages' latencies.
double server_seconds(double S, double n, double k, double latency, double bandwidth);
// Bytes that each of g ranks of M nodes sends between nodes: reduce-scatter inside, all-reduce of S/g between, all-gather
// inside: 2 (M-1)/M S/g.
double hierarchical_bytes_between(double S, double M, double g);

// Seconds until the last bucket is reduced, when backward finishes one of `buckets` every `produced` seconds and the
// link reduces one in `drained`: drained faster than produced, only the last one is left over.
double overlapped_seconds(double buckets, double produced, double drained);
// The same for any buckets: bucket i is complete at ready[i] and takes drain[i] on a link that does one at a time.
double last_reduced(const std::vector<double>& ready, const std::vector<double>& drain);
// Throughput of n ranks over n times that of one.
double scaling_efficiency(double throughput_n, double n, double throughput_1);
// The part of steps in which at least one of n ranks is slow, each in `share` of its steps: 1 - (1 - share)^n.
double straggler_share(double share, double n);

// ---- estimates before a run: tools/estimate.cpp prints them, notes/transformer.md derives them ----

// Parameters by part; attention, mlp and norms are those of one block.
struct ParameterParts {
  int64_t embedding, attention, mlp, norms, final_norm, head;
  int64_t block() const { return attention + mlp + norms; }
  int64_t all(int64_t layers) const { return embedding + layers * block() + final_norm + head; }
};
// A Llama: attention 2 D^2 + 2 D K with K = KV d, MLP 3 D F, no biases.
ParameterParts parameter_parts(const ModelConfig& c);
// GPT-2 and GPT-3: attention 4 h^2 + 4 h, MLP 8 h^2 + 5 h, norms 4 h (so 12 h^2 + 13 h), s learned positions counted
// with the embedding, and the head shares the embedding's table. (arXiv:2005.14165)
ParameterParts gpt_parameter_parts(int64_t h, int64_t V, int64_t s);

// FLOPs of attention's two products per trained token, forward and backward: 12 L D T, half of it if causal.
double attention_flops_per_token(double layers, double dim, double seq, bool causal);
// Forward FLOPs of one Llama block over `tokens` tokens: 2 per weight and token, and 4 D T per token for attention.
double block_forward_flops(const ModelConfig& c, double tokens, bool causal);
// The same for GPT with full attention: 24 b s h^2 + 4 b s^2 h. (arXiv:2104.04473)
double gpt_layer_forward_flops(double b, double s, double h);
// FLOPs of an iteration over B samples: 72 B s L h^2 (1 + s/(6h) + V/(12 L h)); with full recomputation of the blocks
// 96 B s L h^2 (1 + s/(6h) + V/(16 L h)). (arXiv:2104.04473, equation 3)
double megatron_iteration_flops(double B, double s, double L, double h, double V, bool recompute);

// Bytes per parameter of training state under AdamW.
struct StateBytes {
  const char* name;
  int weights, gradients, optimizer;
  int all() const { return weights + gradients + optimizer; }
};
constexpr StateBytes kTrainingStates[] = {
    {"fp32", 4, 4, 8}, {"bf16, fp32 master", 2, 2, 12}, {"bf16, fp32 master and gradients", 2, 4, 12}};
// Bytes per parameter on one of d ranks, 2 + 2 + 12 in all: ZeRO stage 0: 16, 1: 4 + 12/d, 2: 2 + 14/d, 3: 16/d.
// (arXiv:1910.02054)
double zero_bytes_per_parameter(int stage, double d);

// The same by kind, for any of the states above. Offloaded (arXiv:2101.06840), a rank's shard of the gradients and of
// the optimizer's state lies in host memory, with the weights that the host updates: 2 + 2 + 12 of it again.
struct StateShare {
  double weights, gradients, optimizer, host = 0;
  double device() const { return weights + gradients + optimizer; }
};
StateShare zero_state(int stage, double d, const StateBytes& = kTrainingStates[1], bool offload = false);
// Elements that a rank sends in a step of m micro-batches, as a multiple of Psi (d-1)/d. An all-reduce (stage 0) is a
// reduce-scatter and an all-gather: 2. Stage 1: the same, gradients in, parameters out. Stage 2 reduces at every
// micro-batch (m + 1), or once (2). Stage 3 also gathers the parameters at every micro-batch, for forward and for
// backward, or only once if they stay in between; it has nothing to gather after the update.
double zero_sent(int stage, double m = 1, bool reduce_each = true, bool keep_parameters = false);

// Megatron's activation bytes of a layer on one of t tensor-parallel ranks, 16 bits, GELU and dropout
// (arXiv:2205.05198, table 2): s b h (10 + 24/t + 5as/(ht)); with sequence parallelism s b h / t (34 + 5as/h), and
// 34 s b h / t if attention's core is recomputed; 2 s b h if the whole layer is (its input, not split).
enum class Recomputed { nothing, attention, layer };
double megatron_layer_bytes(double s, double b, double h, double a, double t, bool sequence_parallel, Recomputed);

// Parameters of LoRA adapters of rank r on q and v of every block: L r ((D + A) + (D + K)). (arXiv:2106.09685)
int64_t lora_parameters(const ModelConfig& c, int64_t r);

// Seconds that `flops` take on `gpus` GPUs of `peak` FLOP/s each, of which `mfu` (0 to 1) does model work.
double training_seconds(double flops, double gpus, double peak, double mfu);
