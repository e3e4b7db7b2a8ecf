// cross_entropy.cu - the loss of each token, and the gradient of its logits, in three kernels:
//   1. the row maximum   2. the sum of exp(logit - maximum), and the target's logit   3. loss and gradient.
// Between them a rank that holds only some columns of the vocabulary (first .. first + V) can combine its
// numbers with the other ranks: a maximum, then two sums. With the whole vocabulary here, nothing is needed.
#include "kernels.h"
#include "kernel.cuh"

// row_max (N), logits (N, V)
__global__ void cross_entropy_max_kernel(float* __restrict__ row_max, const real* __restrict__ logits, int N,
                                         int V) {
  for (int n = blockIdx.x; n < N; n += gridDim.x) {
    const real* row = logits + int64_t(n) * V;
    const float most = block_max(V, [=](int i) { return float(row[i]); });
    if (threadIdx.x == 0) row_max[n] = most;
  }
}

// row_sum (N), target_logit (N): relative to the maximum; zero where the target is another rank's, or ignored.
__global__ void cross_entropy_sum_kernel(float* __restrict__ row_sum, float* __restrict__ target_logit,
                                         const real* __restrict__ logits, const float* __restrict__ row_max,
                                         const int* __restrict__ targets, int N, int V, int first) {
  for (int n = blockIdx.x; n < N; n += gridDim.x) {
    const real* row = logits + int64_t(n) * V;
    const float most = row_max[n];
    const float sum = block_sum(V, [=](int i) { return exponential(float(row[i]) - most); });
    if (threadIdx.x == 0) {
      const int column = targets[n] - first;
      row_sum[n] = sum;
      target_logit[n] = targets[n] >= 0 && column >= 0 && column < V ? float(row[column]) - most : 0.f;
    }
  }
}

// loss (N) = (log(sum) - target_logit) * factor; logits become their own gradient (p - 1{target}) * factor.
// A target of -1 is ignored: no loss, no gradient.
__global__ void cross_entropy_loss_kernel(float* __restrict__ loss, real* __restrict__ logits,
                                          const float* __restrict__ row_max, const float* __restrict__ row_sum,
                                          const float* __restrict__ target_logit, const int* __restrict__ targets,
                                          int N, int V, int first, float factor) {
  for (int n = blockIdx.x; n < N; n += gridDim.x) {
    real* row = logits + int64_t(n) * V;
    const bool counts = targets[n] >= 0;
    const float most = row_max[n], scale = counts ? factor / row_sum[n] : 0.f;
    const int column = counts ? targets[n] - first : -1;
    if (counts) {
      for (int i = threadIdx.x; i < V; i += blockDim.x) {
        const float p = exponential(float(row[i]) - most) * scale;
        row[i] = real(i == column ? p - factor : p);
      }
    } else {
      for (int i = threadIdx.x; i < V; i += blockDim.x) row[i] = real(0.f);
    }
    if (threadIdx.x == 0) loss[n] = counts ? (logf(row_sum[n]) - target_logit[n]) * factor : 0.f;
  }
}

void cross_entropy_max(float* row_max, const real* logits, int N, int V, cudaStream_t stream) {
  launch(cross_entropy_max_kernel, grid_for_rows(N), threads_for(V), stream, row_max, logits, N, V);
}

void cross_entropy_sum(float* row_sum, float* target_logit, const real* logits, const float* row_max,
                       const int* targets, int N, int V, int first, cudaStream_t stream) {
  launch(cross_entropy_sum_kernel, grid_for_rows(N), threads_for(V), stream, row_sum, target_logit, logits, row_max,
         targets, N, V, first);
}

void cross_entropy_loss(float* loss, real* logits, const float* row_max, const float* row_sum,
                        const float* target_logit, const int* targets, int N, int V, int first, float factor,
                        cudaStream_t stream) {
  launch(cross_entropy_loss_kernel, grid_for_rows(N), threads_for(V), stream, loss, logits, row_max, row_sum,
         target_logit, targets, N, V, first, factor);
}
