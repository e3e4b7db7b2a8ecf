// sum_of_squares.cu - for the gradient norm, and (as plain sums) for the loss.
// Fixed chunks, each added up in double by one block, and the chunks in order by the caller: the result does not
// depend on the launch, and 4 million elements lose no digits (a serial float sum is off by 3e-3 there).
#include "kernels.h"
#include "kernel.cuh"

constexpr int kChunk = 4096;

static __device__ __forceinline__ double* one_per_thread() {
  __shared__ double of_thread[kThreads];
  return of_thread;
}

template <class T, bool kSquare>
__global__ void chunk_sums_kernel(double* __restrict__ sums, const T* __restrict__ x, int64_t n) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    // A thread adds its elements in double; the block adds the threads' sums through shared memory.
    double* of_thread = one_per_thread();
    const int64_t begin = chunk * kChunk, end = begin + kChunk < n ? begin + kChunk : n;
    double sum = 0;
#ifndef __CUDACC__
#pragma omp simd reduction(+ : sum)
#endif
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
      const double value = float(x[i]);
      sum += kSquare ? value * value : value;
    }
    of_thread[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0;
      for (unsigned thread = 0; thread < blockDim.x; ++thread) total += of_thread[thread];
      sums[chunk] = total;
    }
    __syncthreads();  // of_thread is free for the next chunk
  }
}

int64_t chunk_count(int64_t n) { return (n + kChunk - 1) / kChunk; }

void chunk_sums_of_squares(double* sums, const real* x, int64_t n, cudaStream_t stream) {
  if (n > 0) launch(chunk_sums_kernel<real, true>, grid_for_rows(chunk_count(n)), kThreads, stream, sums, x, n);
}

void chunk_sums(double* sums, const float* x, int64_t n, cudaStream_t stream) {
  if (n > 0) launch(chunk_sums_kernel<float, false>, grid_for_rows(chunk_count(n)), kThreads, stream, sums, x, n);
}
