// adamw.cu - Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101):
//   m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2,  w -= lr (m_hat / (sqrt(v_hat) + eps) + decay w)
#include "kernels.h"
#include "kernel.cuh"

// All arrays hold n elements. w32 is the fp32 master copy of bf16 weights; in fp32 it is w itself.
__global__ void adamw_kernel(real* w, float* w32, float* __restrict__ m, float* __restrict__ v,
                             const real* __restrict__ g, int64_t n, AdamWStep s) {
  const Span mine = block_span(n);
#ifndef __CUDACC__
#pragma omp simd
#endif
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
    const float gradient = float(g[i]) * s.gradient_scale;
    const float mi = s.beta1 * m[i] + (1.f - s.beta1) * gradient;
    const float vi = s.beta2 * v[i] + (1.f - s.beta2) * gradient * gradient;
    const float step = mi * s.m_correction / (sqrtf(vi * s.v_correction) + s.eps) + s.decay * w32[i];
    const float wi = w32[i] - s.lr * step;
    m[i] = mi;
    v[i] = vi;
    w32[i] = wi;
    w[i] = real(wi);
  }
}

void adamw(real* w, float* w32, float* m, float* v, const real* g, int64_t n, AdamWStep step, cudaStream_t stream) {
  if (n > 0) launch(adamw_kernel, grid_for_elements(n), kThreads, stream, w, w32, m, v, g, n, step);
}
