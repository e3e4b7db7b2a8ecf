// exercises.h - what you write, as declarations; each is explained in its own file, exercises/<slug>.cpp.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../src/group.h"

// What a hole does until you fill it.
[[noreturn]] void not_implemented(const char* slug, int lines);

// Chunk i of n of x, for any i: X/n elements, one more for the first X mod n. Nothing has to divide.
inline FloatTensor chunk(FloatTensor x, int64_t i, int64_t n) {
  i = (i % n + n) % n;
  const int64_t each = x.numel() / n, more = x.numel() % n;
  return {x.data + i * each + (i < more ? i : more), {each + (i < more)}};
}

// Row-major c (m, n) = a b^T with a (m, k), b (n, k), or a b with b (k, n).
inline void multiply(FloatTensor c, FloatTensor a, FloatTensor b, bool b_transposed) {
  const int64_t m = a[0], k = a[1], n = b_transposed ? b[0] : b[1];
  if ((b_transposed ? b[1] : b[0]) != k || c.numel() != m * n)
    throw Error(format("multiply: (%lld, %lld) and (%lld, %lld)%s do not fit", (long long)m, (long long)k, (long long)b[0],
                       (long long)b[1], b_transposed ? " transposed" : ""));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t l = 0; l < k; ++l) sum += a.data[i * k + l] * b.data[b_transposed ? j * k + l : l * n + j];
      c.data[i * n + j] = sum;
    }
}

// ring-neighbors
struct Neighbors {
  int next, previous;
};
Neighbors ring_neighbors(int rank, int ranks);

// device-mesh
std::vector<int> mesh_group(int rank, const std::vector<int>& sizes, int axis);

// reduce-scatter-all-gather
void ring_reduce_scatter(Group& group, FloatTensor out, FloatTensor x);
void ring_all_gather(Group& group, FloatTensor out, FloatTensor mine);

// ring-all-reduce
void ring_all_reduce(Group& group, FloatTensor x);

// all-to-all
void all_to_all(Group& group, FloatTensor out, FloatTensor in);

// hierarchical-all-reduce
void hierarchical_all_reduce(Group& node, Group& across, FloatTensor x);

// calc-communication
double all_reduce_sent(double bytes, int ranks);
double ring_seconds(double bytes, int ranks, double latency, double bandwidth);
double bus_bandwidth(double bytes, int ranks, double seconds);
double zero_sent(int stage, double parameters, int ranks);

// ddp-average
void ddp_start(Group& dp, FloatTensor weights);
void ddp_after_backward(Group& dp, FloatTensor weights, FloatTensor gradients, bool last_micro_batch);

// token-weighted-loss
float mean_loss(Group& dp, FloatTensor losses, IntTensor targets);

// buckets-overlap
struct Overlap {
  Group& dp;
  cudaStream_t compute, communication;
  std::vector<FloatTensor> buckets;
  std::vector<cudaEvent_t> ready, done;  // one of each per bucket, already created
};
void bucket_is_full(Overlap& overlap, int bucket);
void wait_for_buckets(Overlap& overlap);

// column-row-linear
void mlp_forward(Group& tp, FloatTensor y, FloatTensor x, FloatTensor w1, FloatTensor w2, FloatTensor bias);
void mlp_backward(Group& tp, FloatTensor dx, FloatTensor dy, FloatTensor x, FloatTensor w1, FloatTensor w2);

// vocab-parallel-cross-entropy
void vocab_cross_entropy(Group& tp, FloatTensor loss, FloatTensor logits, IntTensor targets);

// schedule-1f1b
struct Work {
  char kind;  // 'F' or 'B'
  int micro_batch;
};
std::vector<Work> schedule_1f1b(int stage, int stages, int micro_batches);

// zero1-step
void zero1_step(Group& dp, FloatTensor weights, FloatTensor gradients, FloatTensor momentum, float lr, float beta);

// calc-memory
double state_bytes(int zero_stage, double parameters, int ranks);
double layer_activation_bytes(double s, double b, double h, double a, double t, bool sequence_parallel);
double kv_cache_bytes(double layers, double kv_heads, double head_dim, double tokens, double bytes_per_element);
