// rmsnorm.cu - y = x / sqrt(mean(x^2) + eps) * w, row by row (Zhang and Sennrich, arXiv:1910.07467).
#include "kernels.h"
#include "kernel.cuh"

// y (N, D), rstd (N), x (N, D), w (D)
__global__ void rmsnorm_forward_kernel(real* __restrict__ y, float* __restrict__ rstd, const real* __restrict__ x,
                                       const real* __restrict__ w, int N, int D, float eps) {
  for (int n = blockIdx.x; n < N; n += gridDim.x) {
    const real* xn = x + int64_t(n) * D;
    real* yn = y + int64_t(n) * D;
    const float squares = block_sum(D, [=](int i) { return float(xn[i]) * float(xn[i]); });
    const float r = 1.f / sqrtf(squares / D + eps);
    for (int i = threadIdx.x; i < D; i += blockDim.x) yn[i] = real(float(xn[i]) * r * float(w[i]));
    if (threadIdx.x == 0) rstd[n] = r;
  }
}

// dx (N, D) += gradient of x. With g = w * dy and xhat = x * rstd:  dx = rstd * (g - xhat * mean(g * xhat)).
// It adds, because x also feeds the residual stream.
__global__ void rmsnorm_backward_kernel(real* __restrict__ dx, const real* __restrict__ dy,
                                        const real* __restrict__ x, const float* __restrict__ rstd,
                                        const real* __restrict__ w, int N, int D) {
  for (int n = blockIdx.x; n < N; n += gridDim.x) {
    const real* xn = x + int64_t(n) * D;
    const real* dyn = dy + int64_t(n) * D;
    real* dxn = dx + int64_t(n) * D;
    const float r = rstd[n];
    const float dot = block_sum(D, [=](int i) { return float(w[i]) * float(dyn[i]) * float(xn[i]); });
    const float pull = dot * r * r / D;
    for (int i = threadIdx.x; i < D; i += blockDim.x)
      dxn[i] = real(float(dxn[i]) + r * (float(w[i]) * float(dyn[i]) - float(xn[i]) * pull));
  }
}

// The gradient of w is a sum over rows. Fixed groups of rows are summed first (partial (groups, D)), then the
// groups in order: parallel on a GPU, and the same bits whatever the launch looks like.
constexpr int kGroupRows = 64;

__global__ void rmsnorm_weight_partial_kernel(float* __restrict__ partial, const real* __restrict__ dy,
                                              const real* __restrict__ x, const float* __restrict__ rstd, int N,
                                              int D) {
  const int groups = (N + kGroupRows - 1) / kGroupRows;
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    const int begin = group * kGroupRows, end = begin + kGroupRows < N ? begin + kGroupRows : N;
    float* sums = partial + int64_t(group) * D;
    for (int i = threadIdx.x; i < D; i += blockDim.x) sums[i] = 0;
    for (int n = begin; n < end; ++n) {  // each thread owns its columns, so no barrier is needed
      const int64_t at = int64_t(n) * D;
      const float r = rstd[n];
      for (int i = threadIdx.x; i < D; i += blockDim.x) sums[i] += float(dy[at + i]) * float(x[at + i]) * r;
    }
  }
}

__global__ void rmsnorm_weight_kernel(real* __restrict__ dw, const float* __restrict__ partial, int groups, int D,
                                      float beta) {
  const Span mine = block_span(D);
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
    float sum = beta == 0 ? 0.f : float(dw[i]);
    for (int group = 0; group < groups; ++group) sum += partial[int64_t(group) * D + i];
    dw[i] = real(sum);
  }
}

void rmsnorm_forward(real* y, float* rstd, const real* x, const real* w, int N, int D, float eps,
                     cudaStream_t stream) {
  launch(rmsnorm_forward_kernel, grid_for_rows(N), threads_for(D), stream, y, rstd, x, w, N, D, eps);
}

void rmsnorm_backward(real* dx, const real* dy, const real* x, const float* rstd, const real* w, int N, int D,
                      cudaStream_t stream) {
  launch(rmsnorm_backward_kernel, grid_for_rows(N), threads_for(D), stream, dx, dy, x, rstd, w, N, D);
}

int64_t rmsnorm_partial_size(int N, int D) { return int64_t((N + kGroupRows - 1) / kGroupRows) * D; }

void rmsnorm_backward_weight(real* dw, float* partial, const real* dy, const real* x, const float* rstd, int N,
                             int D, float beta, cudaStream_t stream) {
  const int groups = (N + kGroupRows - 1) / kGroupRows;
  launch(rmsnorm_weight_partial_kernel, grid_for_rows(groups), threads_for(D), stream, partial, dy, x, rstd, N, D);
  launch(rmsnorm_weight_kernel, grid_for_elements(D), kThreads, stream, dw, partial, groups, D, beta);
}
