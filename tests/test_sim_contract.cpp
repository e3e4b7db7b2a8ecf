// Do the simulator's headers say what NVIDIA's say? NVIDIA's are included as they are, ours inside a
// namespace, and the compiler compares every value, size and signature that ours declare. This file alone is
// compiled with -I$(CUDA_HOME)/include before any other; without a toolkit it compiles to a message.
#include <doctest/doctest.h>
#include <cstdio>

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime.h>
#endif
#ifdef CUDART_VERSION  // it is NVIDIA's, then

#include <cublas_v2.h>
#include <cuda_bf16.h>

// What our headers include must not land in the namespace.
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <tuple>
#include <type_traits>

// Macros know no namespace: keep NVIDIA's values, then make room for ours.
namespace theirs {
constexpr unsigned stream_default = cudaStreamDefault, stream_non_blocking = cudaStreamNonBlocking;
constexpr unsigned event_default = cudaEventDefault, event_disable_timing = cudaEventDisableTiming;
constexpr auto create = &cublasCreate;
constexpr auto destroy = &cublasDestroy;
constexpr auto set_stream = &cublasSetStream;
}  // namespace theirs
#undef cudaStreamDefault
#undef cudaStreamNonBlocking
#undef cudaEventDefault
#undef cudaEventDisableTiming
#undef cublasCreate
#undef cublasDestroy
#undef cublasSetStream
#undef CUDART_CB
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__

namespace ours {
#include "../src/sim/include/cublas_v2.h"
#include "../src/sim/include/cuda_bf16.h"
#include "../src/sim/include/cuda_runtime.h"
}  // namespace ours

namespace {

// Our types, written with NVIDIA's names: Theirs<ours::cudaError(*)(int)> is cudaError(*)(int).
template <class T>
struct Map {
  using type = T;
};
template <class T>
using Theirs = typename Map<T>::type;
template <class T>
struct Map<T*> {
  using type = Theirs<T>*;
};
template <class T>
struct Map<const T> {
  using type = const Theirs<T>;
};
template <class R, class... A>
struct Map<R(A...)> {
  using type = Theirs<R>(Theirs<A>...);
};
#define SAME_TYPE(name)    \
  template <>              \
  struct Map<ours::name> { \
    using type = ::name;   \
  };
SAME_TYPE(cudaError)
SAME_TYPE(cudaMemcpyKind)
SAME_TYPE(cudaDeviceProp)
SAME_TYPE(CUstream_st)
SAME_TYPE(CUevent_st)
SAME_TYPE(dim3)
SAME_TYPE(uint3)
SAME_TYPE(cudaDataType_t)
SAME_TYPE(cublasStatus_t)
SAME_TYPE(cublasOperation_t)
SAME_TYPE(cublasComputeType_t)
SAME_TYPE(cublasGemmAlgo_t)
SAME_TYPE(cublasMath_t)
SAME_TYPE(cublasContext)
SAME_TYPE(__nv_bfloat16)

// A cast to one exact type picks it from a set of overloads, and fails if it is not among them.
#define SAME_FUNCTION(name) \
  static_assert(            \
      requires { static_cast<Theirs<decltype(&ours::name)>>(&::name); }, #name)
#define SAME_OVERLOAD(name, ...)                                                                \
  static_assert(                                                                                \
      requires { static_cast<std::add_pointer_t<__VA_ARGS__>>(&ours::name); }, "ours: " #name); \
  static_assert(                                                                                \
      requires { static_cast<std::add_pointer_t<Theirs<__VA_ARGS__>>>(&::name); }, "NVIDIA's: " #name)
#define SAME_ALIAS(name) static_assert(std::is_same_v<Theirs<ours::name>, ::name>, #name)
#define SAME_VALUE(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name), #name)
#define SAME_SIZE(name) \
  static_assert(sizeof(ours::name) == sizeof(::name) && alignof(ours::name) == alignof(::name), #name)
#define SAME_MEMBER(type, name) \
  static_assert(std::is_same_v<decltype(ours::type::name), decltype(::type::name)>, #name)

SAME_VALUE(cudaSuccess);
SAME_VALUE(cudaErrorInvalidValue);
SAME_VALUE(cudaErrorMemoryAllocation);
SAME_VALUE(cudaErrorInvalidConfiguration);
SAME_VALUE(cudaErrorInvalidDevice);
SAME_VALUE(cudaErrorInvalidResourceHandle);
SAME_VALUE(cudaErrorNotReady);
SAME_VALUE(cudaErrorLaunchFailure);
SAME_VALUE(cudaErrorNotPermitted);
SAME_VALUE(cudaErrorUnknown);
SAME_VALUE(cudaMemcpyHostToHost);
SAME_VALUE(cudaMemcpyHostToDevice);
SAME_VALUE(cudaMemcpyDeviceToHost);
SAME_VALUE(cudaMemcpyDeviceToDevice);
SAME_VALUE(cudaMemcpyDefault);
SAME_VALUE(CUDA_R_32F);
SAME_VALUE(CUDA_R_16BF);
SAME_VALUE(CUBLAS_STATUS_SUCCESS);
SAME_VALUE(CUBLAS_STATUS_NOT_INITIALIZED);
SAME_VALUE(CUBLAS_STATUS_ALLOC_FAILED);
SAME_VALUE(CUBLAS_STATUS_INVALID_VALUE);
SAME_VALUE(CUBLAS_STATUS_EXECUTION_FAILED);
SAME_VALUE(CUBLAS_STATUS_INTERNAL_ERROR);
SAME_VALUE(CUBLAS_STATUS_NOT_SUPPORTED);
SAME_VALUE(CUBLAS_OP_N);
SAME_VALUE(CUBLAS_OP_T);
SAME_VALUE(CUBLAS_COMPUTE_32F);
SAME_VALUE(CUBLAS_GEMM_DEFAULT);
SAME_VALUE(CUBLAS_DEFAULT_MATH);
SAME_VALUE(CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
static_assert(cudaStreamDefault == theirs::stream_default);
static_assert(cudaStreamNonBlocking == theirs::stream_non_blocking);
static_assert(cudaEventDefault == theirs::event_default);
static_assert(cudaEventDisableTiming == theirs::event_disable_timing);

SAME_SIZE(uint3);
SAME_SIZE(dim3);
SAME_SIZE(__nv_bfloat16);
SAME_SIZE(cudaError);
SAME_SIZE(cudaMemcpyKind);
SAME_SIZE(cudaDataType_t);
SAME_SIZE(cublasStatus_t);
SAME_SIZE(cublasOperation_t);
SAME_SIZE(cublasComputeType_t);
SAME_SIZE(cublasGemmAlgo_t);
SAME_SIZE(cublasMath_t);
SAME_MEMBER(uint3, x);
SAME_MEMBER(uint3, y);
SAME_MEMBER(uint3, z);
SAME_MEMBER(dim3, x);
SAME_MEMBER(dim3, y);
SAME_MEMBER(dim3, z);
SAME_MEMBER(cudaDeviceProp, name);
SAME_MEMBER(cudaDeviceProp, totalGlobalMem);
SAME_MEMBER(cudaDeviceProp, major);
SAME_MEMBER(cudaDeviceProp, minor);
SAME_MEMBER(cudaDeviceProp, multiProcessorCount);
SAME_ALIAS(cudaError_t);
SAME_ALIAS(cudaStream_t);
SAME_ALIAS(cudaEvent_t);
SAME_ALIAS(cudaHostFn_t);
SAME_ALIAS(cudaDataType);
SAME_ALIAS(cublasHandle_t);
static_assert(ours::dim3(5).x == 5 && ours::dim3(5).y == 1 && ours::dim3().z == ::dim3().z);

SAME_FUNCTION(cudaGetLastError);
SAME_FUNCTION(cudaPeekAtLastError);
SAME_FUNCTION(cudaGetErrorName);
SAME_FUNCTION(cudaGetErrorString);
SAME_FUNCTION(cudaGetDeviceCount);
SAME_FUNCTION(cudaGetDevice);
SAME_FUNCTION(cudaSetDevice);
SAME_FUNCTION(cudaGetDeviceProperties);
SAME_FUNCTION(cudaDeviceSynchronize);
SAME_OVERLOAD(cudaMalloc, ours::cudaError_t(void**, size_t));
SAME_OVERLOAD(cudaMalloc, ours::cudaError_t(float**, size_t));
SAME_OVERLOAD(cudaMallocHost, ours::cudaError_t(void**, size_t));
SAME_OVERLOAD(cudaMallocHost, ours::cudaError_t(float**, size_t, unsigned int));
SAME_FUNCTION(cudaFree);
SAME_FUNCTION(cudaFreeHost);
SAME_FUNCTION(cudaMemGetInfo);
SAME_FUNCTION(cudaMemcpy);
SAME_FUNCTION(cudaMemcpyAsync);
SAME_FUNCTION(cudaMemcpy2DAsync);
SAME_FUNCTION(cudaMemset);
SAME_FUNCTION(cudaMemsetAsync);
SAME_FUNCTION(cudaStreamCreate);
SAME_FUNCTION(cudaStreamCreateWithFlags);
SAME_FUNCTION(cudaStreamDestroy);
SAME_FUNCTION(cudaStreamSynchronize);
SAME_FUNCTION(cudaStreamQuery);
SAME_FUNCTION(cudaStreamWaitEvent);
SAME_FUNCTION(cudaLaunchHostFunc);
SAME_FUNCTION(cudaEventCreate);
SAME_FUNCTION(cudaEventCreateWithFlags);
SAME_FUNCTION(cudaEventDestroy);
SAME_FUNCTION(cudaEventRecord);
SAME_FUNCTION(cudaEventSynchronize);
SAME_FUNCTION(cudaEventQuery);
SAME_FUNCTION(cudaEventElapsedTime);
SAME_FUNCTION(cublasSetMathMode);
SAME_FUNCTION(cublasGetStatusString);
SAME_OVERLOAD(cublasGemmEx, decltype(ours::cublasGemmEx));
SAME_OVERLOAD(cublasGemmStridedBatchedEx, decltype(ours::cublasGemmStridedBatchedEx));
SAME_FUNCTION(__float2bfloat16);
SAME_FUNCTION(__bfloat162float);
static_assert(
    std::is_same_v<Theirs<decltype(&ours::cublasCreate)>, std::remove_const_t<decltype(theirs::create)>>);
static_assert(
    std::is_same_v<Theirs<decltype(&ours::cublasDestroy)>, std::remove_const_t<decltype(theirs::destroy)>>);
static_assert(std::is_same_v<Theirs<decltype(&ours::cublasSetStream)>,
                             std::remove_const_t<decltype(theirs::set_stream)>>);

// Default arguments, which a type does not show.
static_assert(requires(cudaStream_t s, cudaEvent_t e, void* p, float* f) {
  ::cudaMemcpyAsync(p, p, 1, cudaMemcpyDefault);
  ::cudaMemcpy2DAsync(p, 1, p, 1, 1, 1, cudaMemcpyDefault);
  ::cudaMemsetAsync(p, 0, 1);
  ::cudaStreamWaitEvent(s, e);
  ::cudaEventRecord(e);
  ::cudaMallocHost(&f, size_t{4});
});

}  // namespace

TEST_CASE("sim contract: bf16 rounds to the same bits as NVIDIA's") {
  auto same = [](std::uint32_t u) {
    const float f = std::bit_cast<float>(u);
    const ours::__nv_bfloat16 a = ours::__float2bfloat16(f);
    const ::__nv_bfloat16 b = ::__float2bfloat16(f);
    if (std::memcmp(&a, &b, sizeof a) != 0) return false;
    const float back_a = ours::__bfloat162float(a), back_b = ::__bfloat162float(b);
    return std::memcmp(&back_a, &back_b, sizeof back_a) == 0;
  };
  int wrong = 0;
  for (std::uint32_t high = 0; high < 0x10000; ++high)
    for (std::uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      wrong += !same(high << 16 | low);
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) wrong += !same(random());
  CHECK(wrong == 0);
}

#else

TEST_CASE("sim contract: needs NVIDIA's headers") {
  std::puts("skipped: no CUDA toolkit first on the include path, so the simulator's headers are compared with nothing");
}

#endif
