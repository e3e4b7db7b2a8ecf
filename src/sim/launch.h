// How a kernel sees its place in the grid, and how it is launched. Included by cuda_runtime.h.
#pragma once

#include <tuple>
#include <type_traits>

#include "sim.h"

#ifdef SIM_CHECKED
#include "checked.h"  // checked simulation: the real blockDim, and one fiber for each CUDA thread
#else
// Fast simulation: a block is one thread, known at compile time. A grid-stride or block-stride loop is then a
// plain loop, which the compiler vectorizes.
static constexpr int warpSize = 1;
static constexpr dim3 blockDim{1, 1, 1};
static constexpr uint3 threadIdx{0, 0, 0};

// One of each per file and thread. The compiler sees every access, so it keeps them in registers; an `extern
// thread_local` costs a call for each access. The price: whatever touches them must be local to its file too.
[[maybe_unused]] static thread_local uint3 blockIdx{0, 0, 0};
[[maybe_unused]] static thread_local dim3 gridDim{1, 1, 1};

// A block runs on one OS thread from start to end, so its shared memory can be that thread's.
#define __shared__ static thread_local

// With one thread there is nobody to wait for, and a warp has the one lane.
inline void __syncthreads() {}
inline void __syncwarp(unsigned /*mask*/ = 0xFFFFFFFFu) {}
template <class T>
inline T __shfl_sync(unsigned, T value, int, int = warpSize) {
  return value;
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int, int = warpSize) {
  return value;
}
template <class T>
inline T __shfl_down_sync(unsigned, T value, unsigned, int = warpSize) {
  return value;
}
#endif

namespace sim {
namespace {  // internal linkage: each file's launch sets that file's blockIdx

template <class... P>
void run_grid(void (*kernel)(P...), dim3 grid, [[maybe_unused]] dim3 block, const std::tuple<P...>& args) {
#ifdef SIM_CHECKED
  run_blocks(grid, block, [&] { std::apply(kernel, args); });
#else
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        std::apply(kernel, args);
      }
#endif
}

// kernel<<<grid, block, 0, stream>>>(args...): arguments are converted and copied now, the kernel runs in
// stream order. An impossible geometry is reported by cudaGetLastError(), as on a GPU. A template that wraps
// this one must have internal linkage too (static, or in an unnamed namespace).
template <class... P, class... A>
[[maybe_unused]] void launch(void (*kernel)(P...), dim3 grid, dim3 block, CUstream_st* stream, A&&... args) {
  static_assert(sizeof...(P) == sizeof...(A), "the kernel takes a different number of arguments");
  static_assert((!std::is_reference_v<P> && ...), "a kernel takes its arguments by value");
  const bool grid_ok = grid.x - 1 < 0x7FFFFFFFu && grid.y - 1 < 65535u && grid.z - 1 < 65535u;
  const bool block_ok =
      block.x - 1 < 1024u && block.y - 1 < 1024u && block.z - 1 < 64u && block.x * block.y * block.z <= 1024u;
  if (!grid_ok || !block_ok) return bad_launch(grid.x, grid.y, grid.z, block.x, block.y, block.z);
  const std::tuple<P...> values(static_cast<P>(args)...);
  if (stream == nullptr) return run_grid(kernel, grid, block, values);
  enqueue(stream, [=] { run_grid(kernel, grid, block, values); });
}

}  // namespace
}  // namespace sim
