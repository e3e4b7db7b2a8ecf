// Checked simulation (-DSIM_CHECKED): a block has its real threads, so that barriers and shuffles can go wrong.
//
// Each CUDA thread is a fiber; all fibers of a block share one OS thread, and exactly one runs at a time, until it
// reaches a barrier or a shuffle, or ends. A warp runs as far as it can before the next one is looked at, which is
// the least favourable order for code that lacks a barrier. An error throws from launch() with file and line.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

namespace sim {

// In which order warps, the lanes of a warp, and blocks run. Set once, before the first launch.
enum class Order { forward, reverse, random };
struct Checked {
  Order order = Order::forward;
  unsigned seed = 1;  // of the random order
  int block = 0;      // threads of a block, whatever the launch asks for; 0: what it asks for
  std::string text() const;  // "--order=random --seed=3 --block=64": the options of the tests that repeat this
};
extern Checked checked;

struct Site {
  const char* file;
  int line;
};

// Runs `thread` for every thread of every block. Throws std::runtime_error.
void run_blocks(dim3 grid, dim3 block, const std::function<void()>& thread);

void barrier(Site);
enum class Exchange { index, flip, down, barrier };
std::uint64_t exchange(Exchange, unsigned mask, std::uint64_t value, unsigned argument, unsigned width, Site);

template <class T>
T exchange_as(Exchange kind, unsigned mask, T value, unsigned argument, int width, Site at) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t) && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(kind, mask, bits, argument, unsigned(width), at);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace sim

static constexpr int warpSize = 32;
inline constinit thread_local uint3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0};
inline constinit thread_local dim3 blockDim{1, 1, 1}, gridDim{1, 1, 1};

// In a section of its own, so that run_blocks can fill all of it with NaN. (g++ 12 forgets the section inside a
// template; what is declared there works, but starts with whatever the last block left.)
#define __shared__ static __attribute__((section("sim_shared")))

// The last two arguments are the caller's place in the source.
#define SIM_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(SIM_HERE) { sim::barrier({file, line}); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, SIM_HERE) {
  sim::exchange(sim::Exchange::barrier, mask, 0, 0, 32, {file, line});
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize, SIM_HERE) {
  return sim::exchange_as(sim::Exchange::index, mask, value, unsigned(lane), width, {file, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, SIM_HERE) {
  return sim::exchange_as(sim::Exchange::flip, mask, value, unsigned(lanes), width, {file, line});
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = warpSize, SIM_HERE) {
  return sim::exchange_as(sim::Exchange::down, mask, value, by, width, {file, line});
}
#undef SIM_HERE
