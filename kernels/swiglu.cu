// swiglu.cu - out = silu(gate) * up, with silu(x) = x * sigmoid(x) (Shazeer, arXiv:2002.05202).
#include "kernels.h"
#include "kernel.cuh"

__global__ void swiglu_forward_kernel(real* __restrict__ out, const real* __restrict__ gate,
                                      const real* __restrict__ up, int64_t n) {
  const Span mine = block_span(n);
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
    const float g = float(gate[i]);
    out[i] = real(g / (1.f + exponential(-g)) * float(up[i]));
  }
}

// dgate and dup from dout. silu'(g) = s + g * s * (1 - s), s = sigmoid(g).
__global__ void swiglu_backward_kernel(real* __restrict__ dgate, real* __restrict__ dup,
                                       const real* __restrict__ dout, const real* __restrict__ gate,
                                       const real* __restrict__ up, int64_t n) {
  const Span mine = block_span(n);
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) {
    const float g = float(gate[i]), u = float(up[i]), d = float(dout[i]);
    const float s = 1.f / (1.f + exponential(-g));
    dgate[i] = real(d * u * (s + g * s * (1.f - s)));
    dup[i] = real(d * g * s);
  }
}

void swiglu_forward(real* out, const real* gate, const real* up, int64_t n, cudaStream_t stream) {
  launch(swiglu_forward_kernel, grid_for_elements(n), kThreads, stream, out, gate, up, n);
}

void swiglu_backward(real* dgate, real* dup, const real* dout, const real* gate, const real* up, int64_t n,
                     cudaStream_t stream) {
  launch(swiglu_backward_kernel, grid_for_elements(n), kThreads, stream, dgate, dup, dout, gate, up, n);
}
