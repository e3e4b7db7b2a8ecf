// elementwise.cu - fill, scale, add: the operations without structure.
#include "kernels.h"
#include "kernel.cuh"

template <class T>
__global__ void fill_kernel(T* __restrict__ out, float value, int64_t n) {
  const Span mine = block_span(n);
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) out[i] = T(value);
}

template <class T>
__global__ void scale_kernel(T* __restrict__ x, float factor, int64_t n) {
  const Span mine = block_span(n);
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x) x[i] = T(float(x[i]) * factor);
}

// `out` may be `a` or `b` (the residual stream adds in place), so there is no __restrict__ here.
template <class T>
__global__ void add_kernel(T* out, const T* a, const T* b, int64_t n) {
  const Span mine = block_span(n);
#ifndef __CUDACC__
#pragma omp simd
#endif
  for (int64_t i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x)
    out[i] = T(float(a[i]) + float(b[i]));
}

template <class T>
void fill(T* out, float value, int64_t n, cudaStream_t stream) {
  if (n > 0) launch(fill_kernel<T>, grid_for_elements(n), kThreads, stream, out, value, n);
}

template <class T>
void scale(T* x, float factor, int64_t n, cudaStream_t stream) {
  if (n > 0) launch(scale_kernel<T>, grid_for_elements(n), kThreads, stream, x, factor, n);
}

template <class T>
void add(T* out, const T* a, const T* b, int64_t n, cudaStream_t stream) {
  if (n > 0) launch(add_kernel<T>, grid_for_elements(n), kThreads, stream, out, a, b, n);
}

template void fill(float*, float, int64_t, cudaStream_t);
template void scale(float*, float, int64_t, cudaStream_t);
template void add(float*, const float*, const float*, int64_t, cudaStream_t);
#ifdef PRECISION_BF16
template void fill(real*, float, int64_t, cudaStream_t);
template void scale(real*, float, int64_t, cudaStream_t);
template void add(real*, const real*, const real*, int64_t, cudaStream_t);
#endif
