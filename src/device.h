// device.h - one rank's GPU (or its simulation): memory with a ledger, matrix products, error checks.
#pragma once
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <array>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "error.h"
#include "tensor.h"
#include "trace.h"

// What a buffer is for. The ledger keeps current and peak bytes of each kind.
// `host` is the other side of the link: page-locked memory of the host, where offloaded state lives.
enum class Memory { parameters, gradients, optimizer, activations, workspace, communication, data, host };
constexpr int kMemoryKinds = 8;
const char* memory_name(Memory kind);

// Throws Error with the call, the CUDA or cuBLAS message and, in the simulator, what exactly was wrong.
void check_cuda(cudaError_t status, const char* call);
void check_cublas(cublasStatus_t status, const char* call);
#define CUDA_CHECK(call) check_cuda((call), #call)
#define CUBLAS_CHECK(call) check_cublas((call), #call)

template <class T> class BufferOf;
using Buffer = BufferOf<real>;
using FloatBuffer = BufferOf<float>;
using IntBuffer = BufferOf<int>;

class Device {
 public:
  explicit Device(int index = 0);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  cudaStream_t stream() const { return stream_; }  // where a rank computes
  std::string name() const;
  void synchronize();
  Trace trace;                                     // the timeline; off until started

  // ---- memory ----
  // Freed blocks are kept and handed out again for the same size, because cudaMalloc is slow on a GPU.
  // Allocation and release follow the order of stream(); whoever uses a buffer on another stream waits first.
  template <class T> BufferOf<T> allocate(Memory kind, std::initializer_list<int64_t> shape);
  int64_t current(Memory kind) const { return current_[int(kind)]; }  // bytes
  int64_t peak(Memory kind) const { return peak_[int(kind)]; }
  void reset_peaks() { peak_ = current_; }

  // ---- copies between this device and ordinary host memory; they wait for the stream ----
  template <class T> void upload(T* to, const T* from, int64_t count) { copy(to, from, count * sizeof(T), true); }
  template <class T> void download(T* to, const T* from, int64_t count) { copy(to, from, count * sizeof(T), false); }

  // ---- the host link: copies to and from pinned memory (Memory::host), in the order of `stream`, counted ----
  template <class T> void to_host(T* to, const T* from, int64_t count, cudaStream_t stream) {
    copy_linked(to, from, count * sizeof(T), false, stream);
  }
  template <class T> void from_host(T* to, const T* from, int64_t count, cudaStream_t stream) {
    copy_linked(to, from, count * sizeof(T), true, stream);
  }
  int64_t sent_to_host = 0, sent_from_host = 0;  // bytes of these copies

  // ---- matrix products ----
  // Row-major C (m, n) = alpha * A (m, k) * B (k, n) + beta * C, for `batch` matrices at fixed distances.
  // A transposed operand is stored (k, m) or (n, k); `stride` is the distance between two rows in memory.
  struct Matrix {
    const real* data;
    int64_t stride;        // elements from row to row
    bool transposed = false;
    int64_t distance = 0;  // elements from one matrix of the batch to the next
  };
  void matmul(real* c, int64_t c_stride, int64_t c_distance, Matrix a, Matrix b, int m, int n, int k, float alpha,
              float beta, int batch = 1);

  // The three products of a linear layer y = x w^T, with x (N, in), w (out, in), y (N, out).
  void linear(Tensor y, Tensor x, Tensor w);
  void linear_backward_input(Tensor dx, Tensor dy, Tensor w, float beta);    // dx = dy w    + beta dx
  void linear_backward_weight(Tensor dw, Tensor dy, Tensor x, float beta);  // dw = dy^T x  + beta dw

  // Counted at every product: 2 m n k. The seconds only if there is a clock, which makes sense where products
  // are synchronous (the simulated GPU).
  double matmul_flops = 0, matmul_seconds = 0;
  double (*matmul_clock)() = nullptr;

 private:
  template <class T> friend class BufferOf;
  void* take(Memory kind, int64_t bytes);
  bool free_and_allocate(void** data, int64_t bytes);
  void give_back(Memory kind, void* data, int64_t bytes);
  void copy_linked(void* to, const void* from, int64_t bytes, bool to_device, cudaStream_t stream);
  void copy(void* to, const void* from, int64_t bytes, bool to_device);

  int index_;
  cudaStream_t stream_ = nullptr;
  cublasHandle_t blas_ = nullptr;
  std::array<int64_t, kMemoryKinds> current_{}, peak_{};
  std::map<int64_t, std::vector<void*>> free_, free_host_;  // by size in bytes
};

// Device memory that is released with its owner.
template <class T>
class BufferOf : public TensorOf<T> {
 public:
  BufferOf() = default;
  BufferOf(Device& device, Memory kind, std::initializer_list<int64_t> shape)
      : TensorOf<T>(nullptr, shape), device_(&device), kind_(kind) {
    this->data = static_cast<T*>(device.take(kind, bytes()));
  }
  BufferOf(BufferOf&& other) noexcept { swap(other); }
  BufferOf& operator=(BufferOf&& other) noexcept {
    BufferOf old(std::move(*this));  // released here
    swap(other);
    return *this;
  }
  ~BufferOf() {
    if (device_) device_->give_back(kind_, this->data, bytes());
  }
  int64_t bytes() const { return this->numel() * int64_t(sizeof(T)); }
  explicit operator bool() const { return device_ != nullptr; }
  std::vector<T> to_host() const {
    std::vector<T> host(this->numel());
    if (!host.empty()) device_->download(host.data(), this->data, host.size());
    return host;
  }

 private:
  void swap(BufferOf& other) {
    std::swap(static_cast<TensorOf<T>&>(*this), static_cast<TensorOf<T>&>(other));
    std::swap(device_, other.device_);
    std::swap(kind_, other.kind_);
  }
  Device* device_ = nullptr;
  Memory kind_ = Memory::workspace;
};

template <class T>
BufferOf<T> Device::allocate(Memory kind, std::initializer_list<int64_t> shape) {
  return BufferOf<T>(*this, kind, shape);
}
