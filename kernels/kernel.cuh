// kernel.cuh - what every kernel here shares: how it is launched, how a block adds up, how it takes exp.
//
// The same source runs on a GPU (nvcc) and on a CPU (g++ and src/sim, where a block has one thread and
// blockDim, threadIdx and warpSize are compile-time constants, so that a kernel becomes a plain loop the
// compiler vectorizes). The rules that make this work:
//   - rows:      for (int row = blockIdx.x; row < rows; row += gridDim.x)       a block takes whole rows
//   - elements:  Span mine = block_span(n); for (i = mine.begin + threadIdx.x; i < mine.end; i += blockDim.x)
//   - never return before a barrier; arguments are outputs first, then inputs, then sizes.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "real.h"

#ifndef __CUDACC__
#include "../src/sim/launch.h"
#include "../src/sim/math.h"
#endif

// ---- launch geometry ------------------------------------------------------------------------------------

constexpr int kThreads = 256;

// As on a GPU: real blocks. In checked simulation (src/sim/checked.h) too, with fewer of them, so that small tests
// go around the loops over rows.
#if defined(__CUDACC__) || defined(SIM_CHECKED)
#define REAL_BLOCKS
#ifdef __CUDACC__
constexpr int kMaxBlocks = 65535;
#else
constexpr int kMaxBlocks = 250;
#endif
inline int grid_for_rows(int64_t rows) { return int(rows < kMaxBlocks ? (rows > 0 ? rows : 1) : kMaxBlocks); }
inline int grid_for_elements(int64_t n) { return grid_for_rows((n + kThreads * 4 - 1) / (kThreads * 4)); }
inline int threads_for(int64_t width) {  // whole warps, at least one
  return width >= kThreads ? kThreads : width < 1 ? 32 : int((width + 31) / 32 * 32);
}
#else  // fast simulation: one block, one thread, all rows or elements in one loop
inline int grid_for_rows(int64_t) { return 1; }
inline int grid_for_elements(int64_t) { return 1; }
inline int threads_for(int64_t) { return 1; }
#endif

#ifdef __CUDACC__
template <class... P, class... A>
void launch(void (*kernel)(P...), int grid, int block, cudaStream_t stream, A... args) {
  kernel<<<grid, block, 0, stream>>>(args...);
  cudaError_t status = cudaPeekAtLastError();
  if (status != cudaSuccess) throw std::runtime_error(std::string("kernel launch: ") + cudaGetErrorString(status));
}
#else
using sim::launch;
#endif

// ---- inside a kernel ------------------------------------------------------------------------------------

struct Span {
  int64_t begin, end;
};

// The contiguous share of n elements that belongs to this block.
static __device__ __forceinline__ Span block_span(int64_t n) {
  const int64_t share = (n + gridDim.x - 1) / gridDim.x;
  const int64_t begin = share * blockIdx.x, end = begin + share;
  return {begin < n ? begin : n, end < n ? end : n};
}

static __device__ __forceinline__ float exponential(float x) {
#ifdef __CUDACC__
  return expf(x);
#else
  return sim::expf(x);  // a polynomial without branches: libm's expf does not vectorize
#endif
}

static __device__ __forceinline__ float larger(float a, float b) { return a > b ? a : b; }

// Shared memory for block_combine. Not declared inside the template: there g++ 12 loses what __shared__ says in checked
// simulation.
static __device__ __forceinline__ float* one_per_warp() {
  __shared__ float of_warp[32];
  return of_warp;
}

// Combines one value per thread over the block; every thread gets the result. Shuffles inside a warp,
// shared memory between warps; both vanish where a block has one thread.
template <class Combine>
static __device__ __forceinline__ float block_combine(float value, Combine combine) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  const int warps = (blockDim.x + warpSize - 1) / warpSize;
  if (warps > 1) {
    float* of_warp = one_per_warp();
    if (threadIdx.x % warpSize == 0) of_warp[threadIdx.x / warpSize] = value;
    __syncthreads();
    value = of_warp[0];
    for (int warp = 1; warp < warps; ++warp) value = combine(value, of_warp[warp]);
    __syncthreads();  // nobody overwrites of_warp while another still reads it
  }
  return value;
}

// Sum of term(i) over i < n, by the whole block. The pragma gives the sum independent lanes on a CPU: one
// serial float sum is several times slower and loses digits. (nvcc ignores it: there threads are the lanes.)
template <class Term>
static __device__ __forceinline__ float block_sum(int n, Term term) {
  float sum = 0;
#ifndef __CUDACC__
#pragma omp simd reduction(+ : sum)
#endif
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += term(i);
  return block_combine(sum, [](float a, float b) { return a + b; });
}

// Maximum of term(i) over i < n; -infinity when n is 0.
template <class Term>
static __device__ __forceinline__ float block_max(int n, Term term) {
  float most = -__builtin_huge_valf();
#ifndef __CUDACC__
#pragma omp simd reduction(max : most)
#endif
  for (int i = threadIdx.x; i < n; i += blockDim.x) most = larger(term(i), most);
  return block_combine(most, larger);
}
