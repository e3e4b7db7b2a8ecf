// The contract of checked simulation (src/sim/checked.h): which kernels pass, which do not, and what is said of them.
#ifdef SIM_CHECKED
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "../src/sim/sim.h"

namespace {

struct Ordered {  // in this order, with the block that the launch asks for, for one test
  sim::Checked before = sim::checked;
  explicit Ordered(sim::Order order) { sim::checked = {order, 7, 0}; }
  ~Ordered() { sim::checked = before; }
};

// What a launch of this kernel throws; "" if nothing.
template <class... P, class... A>
std::string error_of(void (*kernel)(P...), int block, A... args) {
  std::string all;
  for (sim::Order order : {sim::Order::forward, sim::Order::reverse, sim::Order::random}) {
    Ordered here(order);
    try {
      sim::launch(kernel, 2, block, nullptr, args...);
    } catch (const std::exception& e) {
      all = e.what();
    }
  }
  return all;
}
bool names(const std::string& text, std::initializer_list<const char*> words) {
  bool all = true;
  for (const char* w : words) all = all && text.find(w) != std::string::npos;
  if (!all) MESSAGE("said: " << text);
  return all;
}

__device__ float* row() {
  __shared__ float values[256];
  return values;
}

// Every thread takes its neighbour's number, through shared memory.
__global__ void rotate(int* out) {
  float* values = row();
  values[threadIdx.x] = float(threadIdx.x);
  __syncthreads();
  out[threadIdx.x] = int(values[(threadIdx.x + 1) % blockDim.x]);
  __syncthreads();
}
__global__ void rotate_without_barrier(float* out) {
  float* values = row();
  values[threadIdx.x] = float(threadIdx.x);
  out[threadIdx.x] = values[(threadIdx.x + 1) % blockDim.x];
}
__global__ void barrier_under_a_condition() {
  if (threadIdx.x < 40) __syncthreads();
}
__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void shuffles(int* out) {
  const int lane = int(threadIdx.x) % 32, me = int(threadIdx.x);
  out[6 * me] = __shfl_xor_sync(~0u, lane, 1);
  out[6 * me + 1] = __shfl_xor_sync(~0u, lane, 2, 4);
  out[6 * me + 2] = __shfl_down_sync(~0u, lane, 3);
  out[6 * me + 3] = __shfl_down_sync(~0u, lane, 3, 8);
  out[6 * me + 4] = __shfl_sync(~0u, lane, 5);
  out[6 * me + 5] = __shfl_sync(~0u, lane, 5, 4);
}
__global__ void half_a_warp_leaves() {
  if (threadIdx.x % 32 < 16) __shfl_xor_sync(0xFFFFFFFFu, 1.f, 1);
}
__global__ void half_a_warp_is_asked(float* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0x0000FFFFu, 1.f, int(threadIdx.x) + 8);
}
__global__ void a_mask_without_the_caller() { __shfl_sync(0xFu, 1.f, 0); }
__global__ void beyond_the_segment() { __shfl_xor_sync(~0u, 1.f, 16, 16); }
__global__ void visits(int* out) { out[(threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x] += 1; }

}  // namespace

TEST_CASE("checked: barriers and shuffles do what a GPU does") {
  std::vector<int> out(6 * 64);
  for (int block : {32, 40, 64}) {
    CHECK(error_of(rotate, block, out.data()) == "");
    for (int i = 0; i < block; ++i) CHECK(out[i] == (i + 1) % block);
  }
  CHECK(error_of(shuffles, 64, out.data()) == "");
  for (int i = 0; i < 64; ++i) {
    const int lane = i % 32;
    CHECK(out[6 * i] == (lane ^ 1));
    CHECK(out[6 * i + 1] == (lane ^ 2));
    CHECK(out[6 * i + 2] == (lane + 3 < 32 ? lane + 3 : lane));
    CHECK(out[6 * i + 3] == (lane % 8 + 3 < 8 ? lane + 3 : lane));
    CHECK(out[6 * i + 4] == 5);
    CHECK(out[6 * i + 5] == lane / 4 * 4 + 1);
  }
  std::vector<int> seen(3 * 4 * 5);
  Ordered here(sim::Order::random);
  sim::launch(visits, 7, dim3(3, 4, 5), nullptr, seen.data());
  for (int n : seen) CHECK(n == 7);
}

TEST_CASE("checked: a missing barrier reads NaN, in every order") {
  for (sim::Order order : {sim::Order::forward, sim::Order::reverse, sim::Order::random}) {
    Ordered here(order);
    std::vector<float> out(64);
    sim::launch(rotate_without_barrier, 1, 64, nullptr, out.data());
    int nans = 0;
    for (float x : out) nans += std::isnan(x);
    CHECK(nans > 0);
  }
}

TEST_CASE("checked: a barrier that not all threads reach is named, and so are they") {
  CHECK(names(error_of(barrier_under_a_condition, 64), {"barrier", "whole block", "test_checked.cpp:", "threads 0-39 wait",
                                                       "threads 40-63 have ended", "--order=random --seed=7"}));
  CHECK(names(error_of(two_barriers, 64), {"threads 0-31 wait", "threads 32-63 wait", "test_checked.cpp:"}));
  std::vector<int> out(64);
  CHECK(error_of(rotate, 64, out.data()) == "");  // the next launch is not disturbed
}

TEST_CASE("checked: a shuffle whose lanes do not all come is named; a lane that is not there gives NaN") {
  CHECK(names(error_of(half_a_warp_leaves, 64), {"lanes of a warp", "shuffle at", "wait in", "have ended"}));
  CHECK(names(error_of(a_mask_without_the_caller, 32), {"mask 0xf does not name that lane"}));
  CHECK(names(error_of(beyond_the_segment, 32), {"a distance of 16 lanes in segments of 16"}));
  std::vector<float> out(16);
  CHECK(error_of(half_a_warp_is_asked, 32, out.data()) == "");
  for (int i = 0; i < 16; ++i) CHECK(std::isnan(out[i]) == (i >= 8));
}

TEST_CASE("checked: on a stream, the error comes with the next synchronize") {
  Ordered here(sim::Order::forward);
  cudaStream_t s;
  REQUIRE(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess);
  sim::launch(barrier_under_a_condition, 1, 64, s);
  CHECK(cudaStreamSynchronize(s) == cudaErrorLaunchFailure);
  CHECK(names(sim::last_error(), {"whole block"}));
  cudaStreamDestroy(s);
  cudaGetLastError();
}
#endif
