// The contract of the simulated GPU: what src/sim promises to kernels, to src and to the simulated NCCL.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../src/sim/math.h"
#include "../src/sim/sim.h"

namespace {

// True if the last error's text holds every one of these words.
bool last_error_names(std::initializer_list<const char*> words) {
  const std::string text = sim::last_error();
  bool all = true;
  for (const char* w : words) all = all && text.find(w) != std::string::npos;
  if (!all) MESSAGE("last error: " << text);
  return all;
}

template <class T>
struct DeviceBuffer {
  T* p = nullptr;
  size_t n;
  explicit DeviceBuffer(size_t count) : n(count) { REQUIRE(cudaMalloc(&p, n * sizeof(T)) == cudaSuccess); }
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size()) {
    REQUIRE(cudaMemcpy(p, host.data(), n * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(p); }
  std::vector<T> host() const {
    std::vector<T> out(n);
    REQUIRE(cudaMemcpy(out.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return out;
  }
};

struct Stream {
  cudaStream_t s = nullptr;
  Stream() { REQUIRE(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess); }
  ~Stream() { cudaStreamDestroy(s); }
};

struct Event {
  cudaEvent_t e = nullptr;
  Event() { REQUIRE(cudaEventCreate(&e) == cudaSuccess); }
  ~Event() { cudaEventDestroy(e); }
};

struct Policy {  // back to eager at the end of a test
  explicit Policy(sim::StreamPolicy p, unsigned seed = 1) { sim::set_stream_policy(p, seed); }
  ~Policy() { sim::set_stream_policy(sim::StreamPolicy::eager); }
};

void nap(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

__global__ void add(float* y, const float* x, float a, int n) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    y[i] = a * x[i] + y[i];
}

__global__ void who(unsigned* seen) {
  const unsigned flat = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) seen[flat] += 100 * blockIdx.z + 10 * blockIdx.y + blockIdx.x;
}

__global__ void block_sum(double* out, const double* x, int n) {
  __shared__ double lanes[1024];
  double sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
  for (int d = warpSize / 2; d > 0; d /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, d);
  if (threadIdx.x % warpSize == 0) lanes[threadIdx.x / warpSize] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0;
    for (unsigned w = 0; w < (blockDim.x + warpSize - 1) / warpSize; ++w) total += lanes[w];
    *out = total;
  }
}

}  // namespace

TEST_CASE("sim: every buffer knows its size, and an error names what was asked and what there is") {
  DeviceBuffer<char> d(256);
  std::vector<char> host(1000);
  CHECK(cudaMemcpy(d.p, host.data(), 256, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(cudaMemcpy(d.p, host.data(), 257, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(last_error_names({"cudaMemcpy, destination", "257 bytes", "offset 0", "buffer of 256 bytes"}));
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaSuccess);
  CHECK(cudaMemcpy(host.data(), d.p + 200, 57, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
  CHECK(last_error_names({"source", "57 bytes", "offset 200", "256 bytes"}));
  CHECK(cudaMemset(d.p + 6, 0, 251) == cudaErrorInvalidValue);
  CHECK(last_error_names({"cudaMemset", "251 bytes", "offset 6", "256 bytes"}));
  CHECK(cudaMemset(d.p + 6, 0, 250) == cudaSuccess);
  CHECK(cudaMemcpy2DAsync(d.p, 64, host.data(), 60, 60, 4, cudaMemcpyHostToDevice) == cudaSuccess);
  CHECK(cudaMemcpy2DAsync(d.p, 66, host.data(), 60, 60, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(last_error_names({"258 bytes", "256 bytes"}));
  CHECK(cudaMemcpy2DAsync(d.p, 59, host.data(), 60, 60, 4, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(last_error_names({"60 bytes", "59"}));
  cudaGetLastError();
}

TEST_CASE("sim: memory that is not the device's is refused where a GPU would touch it") {
  std::vector<char> a(8), b(8);
  CHECK(cudaMemcpy(a.data(), b.data(), 8, cudaMemcpyDefault) == cudaSuccess);
  CHECK(cudaMemcpy(a.data(), b.data(), 8, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(last_error_names({"no live buffer", "8 bytes"}));
  CHECK(cudaMemset(a.data(), 0, 8) == cudaErrorInvalidValue);
  CHECK(cudaMemset(nullptr, 0, 8) == cudaErrorInvalidValue);
  CHECK(last_error_names({"null"}));
  CHECK(sim::check_range(a.data(), 8, "x"));
  CHECK_FALSE(sim::check_device_range(a.data(), 8, "x"));
  CHECK(sim::bytes_from(a.data()) == SIZE_MAX);
  cudaGetLastError();
}

TEST_CASE("sim: free once, with the right function") {
  char *d, *h;
  REQUIRE(cudaMalloc(&d, 100) == cudaSuccess);
  REQUIRE(cudaMallocHost(&h, 100) == cudaSuccess);
  CHECK(reinterpret_cast<uintptr_t>(d) % 256 == 0);
  CHECK(sim::bytes_from(d) == 100);
  CHECK(sim::bytes_from(d + 99) == 1);
  CHECK(sim::bytes_from(d + 100) == SIZE_MAX);
  CHECK(sim::bytes_from(h + 60) == 40);
  CHECK_FALSE(sim::check_range(h + 60, 41, "pinned"));
  CHECK(last_error_names({"pinned", "41", "offset 60", "100"}));
  CHECK(cudaFree(h) == cudaErrorInvalidValue);
  CHECK(cudaFreeHost(d) == cudaErrorInvalidValue);
  CHECK(cudaFree(d + 1) == cudaErrorInvalidValue);
  CHECK(cudaFree(d) == cudaSuccess);
  CHECK(cudaFree(d) == cudaErrorInvalidValue);
  CHECK(last_error_names({"cudaFree", "freed twice"}));
  CHECK(sim::bytes_from(d) == SIZE_MAX);  // remembered ranges are forgotten
  CHECK(cudaFreeHost(h) == cudaSuccess);
  CHECK(cudaFree(nullptr) == cudaSuccess);
  cudaGetLastError();
}

TEST_CASE("sim: fresh device buffers are NaN when asked for") {
  DeviceBuffer<float> f(33);  // main() asked
  DeviceBuffer<__nv_bfloat16> b(33);
  for (float x : f.host()) CHECK(std::isnan(x));
  for (float x : b.host()) CHECK(std::isnan(x));
}

TEST_CASE("sim: devices are per thread") {
  int n = 0, mine = -1, other = -1;
  CHECK(cudaGetDeviceCount(&n) == cudaSuccess);
  CHECK(n == 64);
  std::thread([&] {
    cudaSetDevice(5);
    cudaGetDevice(&other);
  }).join();
  cudaGetDevice(&mine);
  CHECK(mine == 0);
  CHECK(other == 5);
  CHECK(cudaSetDevice(64) == cudaErrorInvalidDevice);
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0) == cudaSuccess);
  CHECK(prop.totalGlobalMem > 0);
  CHECK(prop.multiProcessorCount >= 1);
  cudaGetLastError();
}

TEST_CASE("sim: a launch visits every block once, in any stream, with its arguments copied") {
  DeviceBuffer<unsigned> seen(std::vector<unsigned>(24, 0));
  sim::launch(who, dim3(4, 3, 2), dim3(32), nullptr, seen.p);
  const auto got = seen.host();
  for (unsigned z = 0, i = 0; z < 2; ++z)
    for (unsigned y = 0; y < 3; ++y)
      for (unsigned x = 0; x < 4; ++x, ++i) CHECK(got[i] == 100 * z + 10 * y + x);

  const int n = 1003;
  DeviceBuffer<float> y(std::vector<float>(n, 1)), x(std::vector<float>(n, 2));
  Stream s;
  float a = 3;
  sim::launch(add, 7, 256, s.s, y.p, x.p, a, n);
  a = 100;
  CHECK(cudaStreamSynchronize(s.s) == cudaSuccess);
  for (float v : y.host()) CHECK(v == 7.0f);

  DeviceBuffer<double> out(1), in(std::vector<double>(100, 0.5));
  sim::launch(block_sum, 1, 256, nullptr, out.p, in.p, 100);
  CHECK(out.host()[0] == 50.0);
}

TEST_CASE("sim: an impossible launch geometry is an error") {
  DeviceBuffer<unsigned> seen(1);
  for (auto [grid, block] : {std::pair{dim3(0), dim3(1)},
                             {dim3(1), dim3(0)},
                             {dim3(1), dim3(1025)},
                             {dim3(1), dim3(32, 33)},
                             {dim3(1, 65536), dim3(1)},
                             {dim3(1), dim3(1, 1, 65)}}) {
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    sim::launch(who, grid, block, nullptr, seen.p);
    CHECK(cudaGetLastError() == cudaErrorInvalidConfiguration);
  }
  CHECK(last_error_names({"(1, 1, 1) blocks", "(1, 1, 65) threads"}));
}

TEST_CASE("sim: a stream keeps its order, streams overlap, events order them") {
  Stream a, b;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) sim::enqueue(a.s, [&, i] { order.push_back(i); });
  CHECK(cudaStreamSynchronize(a.s) == cudaSuccess);
  REQUIRE(order.size() == 100);
  for (int i = 0; i < 100; ++i) CHECK(order[i] == i);

  // Each waits for the other to have started: this ends only if they overlap.
  std::atomic<int> started{0};
  auto meet = [&] {
    ++started;
    while (started < 2) nap(1);
  };
  sim::enqueue(a.s, meet);
  sim::enqueue(b.s, meet);
  CHECK(cudaDeviceSynchronize() == cudaSuccess);

  Event start, e;
  CHECK(cudaEventQuery(e.e) == cudaSuccess);  // never recorded
  std::atomic<int> value{0};
  std::atomic<bool> open{false};
  cudaEventRecord(start.e, a.s);
  sim::enqueue(a.s, [&] {
    while (!open) nap(1);
    value = 1;
  });
  cudaEventRecord(e.e, a.s);
  CHECK(cudaEventQuery(e.e) == cudaErrorNotReady);
  CHECK(cudaStreamQuery(a.s) == cudaErrorNotReady);
  cudaStreamWaitEvent(b.s, e.e);
  int seen = -1;
  sim::enqueue(b.s, [&] { seen = value; });
  nap(20);
  open = true;
  CHECK(cudaStreamSynchronize(b.s) == cudaSuccess);
  CHECK(seen == 1);
  CHECK(cudaStreamSynchronize(a.s) == cudaSuccess);
  CHECK(cudaStreamQuery(a.s) == cudaSuccess);
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, start.e, e.e) == cudaSuccess);
  CHECK(ms > 0.0f);
  CHECK(ms < 60000.0f);

  sim::enqueue(a.s, [&] {
    nap(20);
    value = 2;
  });
  cudaEventRecord(e.e, a.s);
  cudaStreamWaitEvent(nullptr, e.e);  // stream 0 is this thread
  CHECK(value == 2);
  cudaGetLastError();
}

TEST_CASE("sim: work that throws is reported at the next synchronize, once, and passes along events") {
  Stream a, b;
  Event e;
  bool ran = false;
  sim::enqueue(a.s, [] { throw std::runtime_error("ring broke at rank 3"); });
  sim::enqueue(a.s, [&] { ran = true; });
  cudaEventRecord(e.e, a.s);
  cudaStreamWaitEvent(b.s, e.e);
  CHECK(cudaStreamSynchronize(a.s) == cudaErrorLaunchFailure);
  CHECK(last_error_names({"ring broke at rank 3"}));
  CHECK_FALSE(ran);
  CHECK(cudaStreamSynchronize(a.s) == cudaSuccess);
  CHECK(cudaStreamSynchronize(b.s) == cudaErrorLaunchFailure);
  CHECK(cudaEventSynchronize(e.e) == cudaErrorLaunchFailure);
  CHECK_THROWS_WITH(sim::enqueue(nullptr, [] { throw std::runtime_error("inline"); }), "inline");

  sim::enqueue(a.s, [s = a.s] {
    if (cudaStreamSynchronize(s) != cudaErrorNotPermitted) throw std::runtime_error("waited for itself");
  });
  CHECK(cudaDeviceSynchronize() == cudaSuccess);
  cudaGetLastError();
}

TEST_CASE("sim: a stream destroyed by an exception drops its queue and does not hang") {
  bool ran = false;
  std::atomic<bool> recorded{false};
  Event after;
  try {
    Stream s;
    sim::enqueue(s.s, [&] {  // runs until the queue behind it is dropped
      while (!recorded || cudaEventQuery(after.e) == cudaErrorNotReady) nap(1);
    });
    sim::enqueue(s.s, [&] { ran = true; });
    cudaEventRecord(after.e, s.s);
    recorded = true;
    throw 1;
  } catch (int) {
  }
  CHECK_FALSE(ran);
  CHECK(cudaEventSynchronize(after.e) == cudaErrorLaunchFailure);
  cudaGetLastError();
}

TEST_CASE("sim: memory freed while a stream still uses it lives until the stream has passed") {
  for (auto policy : {sim::StreamPolicy::eager, sim::StreamPolicy::lazy}) {
    Policy p(policy);
    Stream s;
    int* d;
    REQUIRE(cudaMalloc(&d, 1 << 24) == cudaSuccess);  // so large that free() gives the pages back
    sim::enqueue(s.s, [=] {
      nap(10);
      d[(1 << 22) - 1] = 1;
    });
    CHECK(cudaFree(d) == cudaSuccess);
    CHECK(cudaStreamSynchronize(s.s) == cudaSuccess);
  }
}

TEST_CASE("sim: the lazy policy makes a missing event wait fail every time") {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    Policy lazy(sim::StreamPolicy::lazy, seed);
    DeviceBuffer<float> x(std::vector<float>(4, 1)), y(std::vector<float>(4, 0));
    Stream compute, comm;
    Event ready;
    sim::launch(add, 1, 1, compute.s, x.p, x.p, 1.0f, 4);  // x = 2
    cudaEventRecord(ready.e, compute.s);
    // Without the wait, comm reads x too early.
    sim::launch(add, 1, 1, comm.s, y.p, x.p, 1.0f, 4);
    CHECK(cudaStreamSynchronize(comm.s) == cudaSuccess);
    CHECK(y.host()[0] == 1.0f);
    // With it, comm runs what it depends on first.
    cudaStreamWaitEvent(comm.s, ready.e);
    sim::launch(add, 1, 1, comm.s, y.p, x.p, 1.0f, 4);
    CHECK(cudaStreamSynchronize(comm.s) == cudaSuccess);
    CHECK(y.host()[0] == 3.0f);
    // Stream 0 does not wait for others by itself.
    sim::launch(add, 1, 1, compute.s, x.p, x.p, 1.0f, 4);  // x = 4
    CHECK(x.host()[0] == 2.0f);
    cudaEventRecord(ready.e, compute.s);
    cudaStreamWaitEvent(nullptr, ready.e);
    CHECK(x.host()[0] == 4.0f);
  }
}

TEST_CASE("sim: lazy streams take turns in an order that the seed decides") {
  auto run = [](unsigned seed, sim::StreamPolicy policy) {
    Policy lazy(policy, seed);
    Stream a, b;
    std::string order;
    for (int i = 0; i < 16; ++i) {
      sim::enqueue(a.s, [&] { order += 'a'; });
      sim::enqueue(b.s, [&] { order += 'b'; });
    }
    cudaDeviceSynchronize();
    return order;
  };
  for (auto policy : {sim::StreamPolicy::lazy, sim::StreamPolicy::shuffled}) {
    CHECK(run(1, policy) == run(1, policy));
    CHECK(run(1, policy) != run(2, policy));
    CHECK(run(1, policy).size() == 32);
  }

  Policy lazy(sim::StreamPolicy::lazy);
  Stream s;
  int done = 0, polls = 0;
  for (int i = 0; i < 3; ++i) sim::enqueue(s.s, [&] { ++done; });
  while (cudaStreamQuery(s.s) == cudaErrorNotReady) ++polls;  // polling ends
  CHECK(done == 3);
  CHECK(polls == 3);
  cudaGetLastError();
}

TEST_CASE("sim: asynchronous copies keep CUDA's promises about host memory") {
  for (auto policy : {sim::StreamPolicy::eager, sim::StreamPolicy::lazy}) {
    Policy p(policy);
    Stream s;
    DeviceBuffer<int> d(1);
    int value = 7, back = 0;
    cudaMemcpyAsync(d.p, &value, sizeof value, cudaMemcpyHostToDevice, s.s);
    value = 8;  // ordinary memory was staged
    cudaMemcpyAsync(&back, d.p, sizeof back, cudaMemcpyDeviceToHost, s.s);
    CHECK(back == 7);  // and to ordinary memory the call waits
  }
  Policy lazy(sim::StreamPolicy::lazy);
  Stream s;
  DeviceBuffer<int> d(std::vector<int>{1});
  int* pinned;
  REQUIRE(cudaMallocHost(&pinned, sizeof(int)) == cudaSuccess);
  *pinned = 0;
  cudaMemcpyAsync(pinned, d.p, sizeof(int), cudaMemcpyDeviceToHost, s.s);
  CHECK(*pinned == 0);  // pinned memory needs a synchronize
  cudaStreamSynchronize(s.s);
  CHECK(*pinned == 1);
  cudaMemcpyAsync(d.p, pinned, sizeof(int), cudaMemcpyHostToDevice, s.s);
  *pinned = 2;  // pinned memory is read late: the copy takes what is there when it runs
  cudaStreamSynchronize(s.s);
  CHECK(d.host()[0] == 2);
  cudaFreeHost(pinned);
}

TEST_CASE("sim: ahead, a stream that waits for nothing runs before what is waited for") {
  for (auto policy : {sim::StreamPolicy::lazy, sim::StreamPolicy::ahead}) {
    Policy p(policy);
    Stream compute, comm;
    Event ready;
    std::string order;
    sim::enqueue(compute.s, [&] { order += 'c'; });
    cudaEventRecord(ready.e, compute.s);
    sim::enqueue(comm.s, [&] { order += 'a'; });
    cudaStreamWaitEvent(comm.s, ready.e);
    sim::enqueue(comm.s, [&] { order += 'b'; });
    sim::enqueue(compute.s, [&] { order += 'd'; });
    CHECK(cudaStreamSynchronize(compute.s) == cudaSuccess);
    CHECK(order == (policy == sim::StreamPolicy::lazy ? "cd" : "acbd"));
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(order.size() == 4);
  }
}

TEST_CASE("sim: many ranks at once") {
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (int r = 0; r < 8; ++r)
    ranks.emplace_back([&, r] {
      cudaSetDevice(r);
      cudaStream_t s;
      cudaEvent_t e;
      cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
      cudaEventCreateWithFlags(&e, cudaEventDisableTiming);
      for (int i = 0; i < 200; ++i) {
        float *d, back[64], x[64];
        for (int j = 0; j < 64; ++j) x[j] = static_cast<float>(r + i + j);
        cudaMalloc(&d, sizeof x);
        cudaMemcpyAsync(d, x, sizeof x, cudaMemcpyHostToDevice, s);
        sim::launch(add, 2, 32, s, d, d, 1.0f, 64);
        cudaEventRecord(e, s);
        cudaStreamWaitEvent(nullptr, e);
        if (cudaMemcpy(back, d, sizeof x, cudaMemcpyDeviceToHost) != cudaSuccess) ++wrong;
        for (int j = 0; j < 64; ++j) wrong += back[j] != 2 * x[j];
        if (sim::check_range(d, sizeof x + 1, "d")) ++wrong;
        cudaFree(d);
      }
      if (cudaStreamDestroy(s) != cudaSuccess) ++wrong;
      cudaEventDestroy(e);
    });
  for (auto& t : ranks) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("sim: expf is within 2e-7 of exp, and right at the edges") {
  double worst = 0;
  for (float x = -87.0f; x <= 88.0f; x += 0.00037f) {
    const double want = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(sim::expf(x) - want) / want);
  }
  MESSAGE("worst relative error: " << worst);
  CHECK(worst < 2e-7);
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(sim::expf(0.0f) == 1.0f);
  CHECK(sim::expf(-inf) == 0.0f);
  CHECK(sim::expf(inf) == inf);
  CHECK(sim::expf(90.0f) == inf);
  CHECK(sim::expf(1e30f) == inf);
  CHECK(sim::expf(-1e30f) == 0.0f);
  CHECK(sim::expf(-95.0f) >= 0.0f);
  CHECK(sim::expf(-95.0f) < 1e-40f);
  CHECK(std::isnan(sim::expf(std::numeric_limits<float>::quiet_NaN())));
}

TEST_CASE("sim: bf16 rounds to nearest even and keeps NaN") {
  auto bits = [](float f) {
    const __nv_bfloat16 b = __float2bfloat16(f);
    std::uint16_t u;
    std::memcpy(&u, &b, 2);
    return u;
  };
  auto from = [](std::uint32_t u) { return std::bit_cast<float>(u); };
  CHECK(bits(1.0f) == 0x3F80);
  CHECK(bits(from(0x3F808000)) == 0x3F80);  // a tie goes to even: down
  CHECK(bits(from(0x3F818000)) == 0x3F82);  // and up
  CHECK(bits(from(0x3F808001)) == 0x3F81);
  CHECK(bits(-0.0f) == 0x8000);
  CHECK(bits(from(0x7F7FFFFF)) == 0x7F80);  // the largest float rounds to infinity
  CHECK(bits(from(0xFF800000)) == 0xFF80);
  CHECK(bits(from(0x7F800001)) == 0x7FFF);  // a NaN whose upper half alone would be infinity
  CHECK(bits(from(0xFFFFFFFF)) == 0x7FFF);
  CHECK(__bfloat162float(__nv_bfloat16(3.140625f)) == 3.140625f);
  for (std::uint32_t u = 0; u < 0x10000; ++u) {
    const float f = from(u << 16);
    if (!std::isnan(f) && bits(f) != u) FAIL("bf16 " << u << " does not survive");
  }
}

namespace {

struct Handle {
  cublasHandle_t h = nullptr;
  Handle() { REQUIRE(cublasCreate(&h) == CUBLAS_STATUS_SUCCESS); }
  ~Handle() { cublasDestroy(h); }
};

template <class T>
constexpr cudaDataType kType = sizeof(T) == 4 ? CUDA_R_32F : CUDA_R_16BF;

// Runs one GEMM with ragged leading dimensions and compares with a double loop. Small integers and halves, so
// that float sums are exact and bf16 operands too.
template <class T, class C>
void check_gemm(cublasHandle_t h, cudaStream_t s, bool ta, bool tb, int m, int n, int k, float alpha,
                float beta, int batches) {
  CAPTURE(ta);
  CAPTURE(tb);
  CAPTURE(m);
  CAPTURE(n);
  CAPTURE(k);
  CAPTURE(beta);
  CAPTURE(batches);
  std::mt19937 random(m * 10007 + n * 101 + k);
  const int lda = (ta ? k : m) + 1, ldb = (tb ? n : k) + 2, ldc = m + 3;
  const size_t sa = size_t(lda) * (ta ? m : k) + 1, sb = size_t(ldb) * (tb ? k : n), sc = size_t(ldc) * n + 2;
  std::vector<T> a(sa * batches), b(sb * batches);
  std::vector<C> c(sc * batches);
  for (T& v : a) v = float(int(random() % 9) - 4);
  for (T& v : b) v = float(int(random() % 9) - 4) / 2;
  for (C& v : c) v = beta == 0 ? NAN : float(int(random() % 9) - 4);
  DeviceBuffer<T> da(a), db(b);
  DeviceBuffer<C> dc(c);
  const auto op = [](bool t) { return t ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const cublasStatus_t status =
      batches == 1 ? cublasGemmEx(h, op(ta), op(tb), m, n, k, &alpha, da.p, kType<T>, lda, db.p, kType<T>,
                                  ldb, &beta, dc.p, kType<C>, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT)
                   : cublasGemmStridedBatchedEx(h, op(ta), op(tb), m, n, k, &alpha, da.p, kType<T>, lda, sa,
                                                db.p, kType<T>, ldb, sb, &beta, dc.p, kType<C>, ldc, sc,
                                                batches, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  REQUIRE(status == CUBLAS_STATUS_SUCCESS);
  cudaStreamSynchronize(s);
  const auto got = dc.host();
  int wrong = 0;
  for (int p = 0; p < batches; ++p)
    for (int j = 0; j < n; ++j)
      for (int i = 0; i < ldc; ++i) {
        const size_t at = p * sc + size_t(j) * ldc + i;
        if (i >= m) {  // the gap between columns stays as it was
          wrong += std::memcmp(&got[at], &c[at], sizeof(C)) != 0;
          continue;
        }
        double sum = 0;
        for (int l = 0; l < k; ++l)
          sum += double(float(a[p * sa + (ta ? l + size_t(i) * lda : i + size_t(l) * lda)])) *
                 double(float(b[p * sb + (tb ? j + size_t(l) * ldb : l + size_t(j) * ldb)]));
        double want = alpha * sum;
        if (beta != 0) want += double(beta) * float(c[at]);
        wrong += !(float(got[at]) == float(C(float(want))));
      }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("sim: gemm equals plain double loops, for every transpose, ragged sizes, types, batches, streams") {
  Handle h;
  CHECK(cublasSetMathMode(h.h, CUBLAS_DEFAULT_MATH) == CUBLAS_STATUS_SUCCESS);
  Stream s;
  for (bool ta : {false, true})
    for (bool tb : {false, true})
      for (int m : {1, 3, 7, 33})
        for (int n : {1, 3, 7, 33})
          for (int k : {1, 3, 7, 33})
            for (float beta : {0.0f, 1.0f})
              check_gemm<float, float>(h.h, nullptr, ta, tb, m, n, k, 0.5f, beta, 1);
  for (cudaStream_t stream : {cudaStream_t(nullptr), s.s}) {
    cublasSetStream(h.h, stream);
    for (bool ta : {false, true})
      for (bool tb : {false, true})
        for (float beta : {0.0f, 2.0f})
          for (int batches : {1, 4}) {
            check_gemm<float, float>(h.h, stream, ta, tb, 33, 7, 3, 1.0f, beta, batches);
            check_gemm<__nv_bfloat16, __nv_bfloat16>(h.h, stream, ta, tb, 7, 33, 3, 1.0f, beta, batches);
            check_gemm<__nv_bfloat16, float>(h.h, stream, ta, tb, 3, 7, 33, 1.0f, beta, batches);
          }
  }
}

TEST_CASE("sim: gemm refuses what would leave a buffer, and says how") {
  Handle h;
  DeviceBuffer<float> a(6), b(6), c(std::vector<float>(4, 5));
  const float one = 1, zero = 0;
  auto gemm = [&](int m, int n, int k, int lda, int ldc) {
    return cublasGemmEx(h.h, CUBLAS_OP_N, CUBLAS_OP_N, m, n, k, &one, a.p, CUDA_R_32F, lda, b.p, CUDA_R_32F,
                        k, &zero, c.p, CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  };
  CHECK(gemm(2, 2, 3, 2, 2) == CUBLAS_STATUS_SUCCESS);
  CHECK(gemm(2, 2, 3, 2, 3) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(last_error_names({"C", "20 bytes", "offset 0", "16 bytes"}));
  CHECK(gemm(2, 2, 3, 3, 2) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(last_error_names({"A", "32 bytes", "24 bytes"}));
  CHECK(gemm(2, 2, 3, 1, 2) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(last_error_names({"A", "leading dimension 1", "2 rows"}));
  CHECK(gemm(-1, 2, 3, 2, 2) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(gemm(0, 2, 3, 2, 2) == CUBLAS_STATUS_SUCCESS);
  CHECK(gemm(2, 2, 0, 2, 2) == CUBLAS_STATUS_INVALID_VALUE);  // ldb = 0
  // The third batch ends 4 bytes too late.
  CHECK(cublasGemmStridedBatchedEx(h.h, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &one, a.p, CUDA_R_32F, 1, 3, b.p,
                                   CUDA_R_32F, 1, 0, &zero, c.p, CUDA_R_32F, 1, 1, 3, CUBLAS_COMPUTE_32F,
                                   CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(last_error_names({"A", "28 bytes", "24 bytes"}));
  CHECK(std::string(cublasGetStatusString(CUBLAS_STATUS_INVALID_VALUE)) == "CUBLAS_STATUS_INVALID_VALUE");

  // An empty inner sum leaves beta C, and does not read C when beta is 0.
  const float nan = NAN;
  cudaMemcpy(c.p, &nan, sizeof nan, cudaMemcpyHostToDevice);
  CHECK(cublasGemmEx(h.h, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 0, &one, a.p, CUDA_R_32F, 2, b.p, CUDA_R_32F, 1,
                     &zero, c.p, CUDA_R_32F, 2, CUBLAS_COMPUTE_32F,
                     CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  for (float v : c.host()) CHECK(v == 0.0f);
}
