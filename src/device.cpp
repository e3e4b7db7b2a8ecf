#include "device.h"

#include <algorithm>
#include <exception>
#include <type_traits>

#include "../kernels/kernels.h"

#ifndef RINGTRON_CUDA
#include "sim/sim.h"
#endif

const char* memory_name(Memory kind) {
  static const char* const names[kMemoryKinds] = {"parameters", "gradients",     "optimizer", "activations",
                                                  "workspace",  "communication", "data",      "host"};
  return names[int(kind)];
}

namespace {
// The simulator knows which buffer was left, and by how much.
std::string detail() {
#ifndef RINGTRON_CUDA
  const char* text = sim::last_error();
  if (text && *text) return std::string(": ") + text;
#endif
  return "";
}
}  // namespace

void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  throw Error(format("%s failed: %s%s", call, cudaGetErrorString(status), detail().c_str()));
}

void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(format("%s failed: %s%s", call, cublasGetStatusString(status), detail().c_str()));
}

Device::Device(int index) : index_(index) {
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  if (count == 0) throw Error("no GPU found; build with DEVICE=cpu to run on the simulated one");
  CUDA_CHECK(cudaSetDevice(index % count));
#ifndef RINGTRON_CUDA  // the simulator computes on stream 0, which runs inline, unless streams are to be checked
  if (sim::get_stream_policy() != sim::StreamPolicy::eager)
#endif
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  CUBLAS_CHECK(cublasCreate(&blas_));
  CUBLAS_CHECK(cublasSetStream(blas_, stream_));
  // bf16 products add up in float to the end, also where a long sum is cut into parts.
  CUBLAS_CHECK(cublasSetMathMode(
      blas_, cublasMath_t(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
}

Device::~Device() {
#ifdef RINGTRON_NCCL
  if (std::uncaught_exceptions()) return;  // a call that others will not join may still be running; the process ends
#endif
  cudaStreamSynchronize(stream_);
  for (auto& [bytes, blocks] : free_)
    for (void* block : blocks) cudaFree(block);
  for (auto& [bytes, blocks] : free_host_)
    for (void* block : blocks) cudaFreeHost(block);
  cublasDestroy(blas_);
  if (stream_) cudaStreamDestroy(stream_);
}

std::string Device::name() const {
  cudaDeviceProp properties;
  int current = 0;
  CUDA_CHECK(cudaGetDevice(&current));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, current));
  return properties.name;
}

void Device::synchronize() { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

// Blocks are kept for their size. When memory runs out, those of other sizes go. (cudaFree waits for their last use.)
bool Device::free_and_allocate(void** data, int64_t bytes) {
  cudaGetLastError();
  for (auto& [size, blocks] : free_) {
    for (void* block : blocks) cudaFree(block);
    blocks.clear();
  }
  if (cudaMalloc(data, bytes) == cudaSuccess) return true;
  cudaGetLastError();
  return false;
}

void* Device::take(Memory kind, int64_t bytes) {
  void* data = nullptr;
  if (bytes == 0) return data;
  const bool on_host = kind == Memory::host;
  std::vector<void*>& blocks = (on_host ? free_host_ : free_)[bytes];
  if (!blocks.empty()) {
    data = blocks.back();
    blocks.pop_back();
  } else if (on_host && cudaMallocHost(&data, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw Error(format("out of page-locked host memory: %lld bytes wanted, with %.1f MB in use; use a smaller model",
                       (long long)bytes, current(Memory::host) / 1e6));
  } else if (!on_host && cudaMalloc(&data, bytes) != cudaSuccess && !free_and_allocate(&data, bytes)) {
    throw Error(format("out of GPU memory: %lld bytes of %s wanted, with %.1f MB of parameters, %.1f MB of "
                       "activations in use; use a smaller --batch, or more --micro-batches",
                       (long long)bytes, memory_name(kind), current(Memory::parameters) / 1e6,
                       current(Memory::activations) / 1e6));
  }
#ifndef RINGTRON_CUDA
  // In tests: reading before writing gives NaN, also in a recycled block.
  // Memory of the device in the order of its stream; memory of the host at once, because the host writes it at once.
  if (kind == Memory::host) sim::poison(data, size_t(bytes));
  else sim::enqueue(stream_, [=] { sim::poison(data, size_t(bytes)); });
#endif
  current_[int(kind)] += bytes;
  peak_[int(kind)] = std::max(peak_[int(kind)], current_[int(kind)]);
  return data;
}

void Device::give_back(Memory kind, void* data, int64_t bytes) {
  if (bytes == 0) return;
  current_[int(kind)] -= bytes;
  (kind == Memory::host ? free_host_ : free_)[bytes].push_back(data);
}

void Device::copy(void* to, const void* from, int64_t bytes, bool to_device) {
  if (bytes == 0) return;
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream_));
  synchronize();
}

void Device::copy_linked(void* to, const void* from, int64_t bytes, bool to_device, cudaStream_t stream) {
  if (bytes == 0) return;
  CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, stream));
  (to_device ? sent_from_host : sent_to_host) += bytes;
}

void Device::matmul(real* c, int64_t c_stride, int64_t c_distance, Matrix a, Matrix b, int m, int n, int k,
                    float alpha, float beta, int batch) {
  if (m == 0 || n == 0 || batch == 0) return;
  const auto type = std::is_same_v<real, float> ? CUDA_R_32F : CUDA_R_16BF;
  const double start = matmul_clock ? matmul_clock() : 0;
  // cuBLAS is column-major: what it sees is the transpose of each matrix, so C^T = B^T A^T.
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(blas_, b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                                          a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k, &alpha, b.data, type,
                                          int(b.stride), b.distance, a.data, type, int(a.stride), a.distance, &beta,
                                          c, type, int(c_stride), c_distance, batch, CUBLAS_COMPUTE_32F,
                                          CUBLAS_GEMM_DEFAULT));
  if (matmul_clock) matmul_seconds += matmul_clock() - start;
  matmul_flops += 2.0 * m * n * k * batch;
}

void Device::linear(Tensor y, Tensor x, Tensor w) {
  matmul(y.data, w[0], 0, {x.data, w[1]}, {w.data, w[1], true}, int(x[0]), int(w[0]), int(w[1]), 1, 0);
}

void Device::linear_backward_input(Tensor dx, Tensor dy, Tensor w, float beta) {
  if (w[0] == 0) {  // a rank without columns of the vocabulary adds nothing
    if (beta == 0) fill(dx.data, 0.f, dx.numel(), stream_);
    return;
  }
  matmul(dx.data, w[1], 0, {dy.data, w[0]}, {w.data, w[1]}, int(dy[0]), int(w[1]), int(w[0]), 1, beta);
}

void Device::linear_backward_weight(Tensor dw, Tensor dy, Tensor x, float beta) {
  matmul(dw.data, dw[1], 0, {dy.data, dw[0], true}, {x.data, dw[1]}, int(dw[0]), int(dw[1]), int(dy[0]), 1, beta);
}
