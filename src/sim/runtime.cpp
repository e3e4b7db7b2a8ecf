// The CUDA runtime on a CPU: errors, devices, and buffers that know their size. Device memory is ordinary
// memory, and a device is only a number. Streams and events are in streams.cpp.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "internal.h"

using sim::fail;
using sim::line;

// ---- errors ----

namespace {

thread_local cudaError_t last_code = cudaSuccess;

std::string& error_text() {
  thread_local std::string text;
  return text;
}

struct ErrorWords {
  cudaError_t code;
  const char *name, *text;
};
constexpr ErrorWords kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "an argument is out of range"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "impossible launch geometry"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "no such device"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "a stream or event not fit for this"},
    {cudaErrorNotReady, "cudaErrorNotReady", "not done yet"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "work on a stream failed"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "not permitted here"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},  // stays last
};

const ErrorWords& words(cudaError_t error) {
  for (const ErrorWords& w : kErrors)
    if (w.code == error) return w;
  return *std::prev(std::end(kErrors));
}

}  // namespace

namespace sim {

constinit thread_local int current_device = 0;
constinit thread_local bool in_stream_work = false;

const char* last_error() { return error_text().c_str(); }
void set_last_error(std::string text) { error_text() = std::move(text); }

cudaError_t fail(cudaError_t code) { return last_code = code; }
cudaError_t fail(cudaError_t code, std::string text) {
  set_last_error(std::move(text));
  return last_code = code;
}

void bad_launch(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz) {
  fail(cudaErrorInvalidConfiguration, line("launch: no GPU has a grid of (", gx, ", ", gy, ", ", gz,
                                           ") blocks of (", bx, ", ", by, ", ", bz, ") threads"));
}

}  // namespace sim

cudaError_t cudaGetLastError() { return std::exchange(last_code, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_code; }
const char* cudaGetErrorName(cudaError_t error) { return words(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return words(error).text; }

// ---- devices ----

static constexpr int kDevices = 64;

static cudaError_t no_such_device(int device) {
  return fail(cudaErrorInvalidDevice, line("device ", device, " of ", kDevices));
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = sim::current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return no_such_device(device);
  sim::current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  if (device < 0 || device >= kDevices) return no_such_device(device);
  *prop = {};
  std::strcpy(prop->name, "simulated GPU (CPU)");
  prop->major = 8;  // the first with bfloat16
  prop->multiProcessorCount = 1;
  size_t free;
  return cudaMemGetInfo(&free, &prop->totalGlobalMem);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  *free = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  *total = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  return cudaSuccess;
}

// ---- buffers ----

namespace {

struct Buffer {
  std::uintptr_t begin = 0;
  size_t size = 0;
  int device = 0;
  bool pinned = false;
};

// Never destroyed: a worker may still need it while the process exits.
struct Registry {
  std::shared_mutex mutex;
  std::map<std::uintptr_t, Buffer> live;
};
Registry& registry = *new Registry;
std::atomic<unsigned> frees{0};
std::atomic<bool> poisoning{false};

// The live buffer that holds p, or null. Every small GEMM asks three times, so each thread remembers the last
// few answers until anyone frees a buffer; that leaves a few nanoseconds. Valid until the next call.
const Buffer* find(const void* p) {
  constexpr unsigned kRecent = 8;
  thread_local Buffer recent[kRecent];
  thread_local unsigned next = 0, as_of = 0;

  const unsigned now = frees.load(std::memory_order_acquire);
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  if (as_of != now) {
    for (Buffer& b : recent) b.size = 0;
    as_of = now;
  }
  for (const Buffer& b : recent)
    if (address - b.begin < b.size) return &b;

  std::shared_lock lock(registry.mutex);
  auto after = registry.live.upper_bound(address);
  if (after == registry.live.begin()) return nullptr;
  const Buffer& b = std::prev(after)->second;
  if (address - b.begin >= b.size) return nullptr;
  recent[next] = b;
  const Buffer* found = &recent[next];
  next = (next + 1) % kRecent;
  return found;
}

bool check(const void* p, size_t bytes, const char* what, bool device_only) {
  if (bytes == 0) return true;
  const Buffer* b = find(p);
  if (b == nullptr) {
    if (p != nullptr && !device_only) return true;
    sim::set_last_error(
        line(what, ": ", bytes, " bytes at ",
             p == nullptr ? "a null pointer" : "a pointer into no live buffer of the device"));
    return false;
  }
  const size_t offset = reinterpret_cast<std::uintptr_t>(p) - b->begin;
  if (bytes <= b->size - offset) return true;
  sim::set_last_error(line(what, ": ", bytes, " bytes at offset ", offset, " leave a ",
                           b->pinned ? "pinned" : "device", " buffer of ", b->size, " bytes"));
  return false;
}

cudaError_t allocate(void** out, size_t size, bool pinned) {
  *out = nullptr;
  if (size == 0) return cudaSuccess;
  void* p = nullptr;  // of exactly this size, so that AddressSanitizer sees the first byte behind it
  if (posix_memalign(&p, 256, size) != 0) return fail(cudaErrorMemoryAllocation, line("no memory for ", size, " bytes"));
  if (!pinned) sim::poison(p, size);
  const auto begin = reinterpret_cast<std::uintptr_t>(p);
  std::unique_lock lock(registry.mutex);
  registry.live[begin] = {begin, size, sim::current_device, pinned};
  *out = p;
  return cudaSuccess;
}

cudaError_t release(void* p, bool pinned, const char* what) {
  if (p == nullptr) return cudaSuccess;
  int device;
  {
    std::unique_lock lock(registry.mutex);
    auto it = registry.live.find(reinterpret_cast<std::uintptr_t>(p));
    if (it == registry.live.end() || it->second.pinned != pinned)
      return fail(cudaErrorInvalidValue, line(what, ": the pointer is not the start of a live ",
                                              pinned ? "pinned" : "device", " buffer (freed twice?)"));
    device = it->second.device;
    registry.live.erase(it);
    ++frees;
  }
  sim::release_after_streams(device, std::shared_ptr<void>(p, std::free));
  return cudaSuccess;
}

}  // namespace

namespace sim {

bool check_range(const void* p, size_t bytes, const char* what) { return check(p, bytes, what, false); }
bool check_device_range(const void* p, size_t bytes, const char* what) { return check(p, bytes, what, true); }

size_t bytes_from(const void* p) {
  const Buffer* b = find(p);
  return b == nullptr ? SIZE_MAX : b->size - (reinterpret_cast<std::uintptr_t>(p) - b->begin);
}

void poison_allocations(bool on) { poisoning = on; }

void poison(void* p, size_t bytes) {
  if (poisoning) std::memset(p, 0xFF, bytes);
}

}  // namespace sim

cudaError_t cudaMalloc(void** devPtr, size_t size) { return allocate(devPtr, size, false); }
cudaError_t cudaMallocHost(void** ptr, size_t size) { return allocate(ptr, size, true); }
cudaError_t cudaFree(void* devPtr) { return release(devPtr, false, "cudaFree"); }
cudaError_t cudaFreeHost(void* ptr) { return release(ptr, true, "cudaFreeHost"); }

// ---- copies ----

namespace {

void copy_rows(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height) {
  for (size_t i = 0; i < height; ++i)
    std::memmove(static_cast<char*>(dst) + i * dpitch, static_cast<const char*>(src) + i * spitch, width);
}

cudaError_t copy(const char* what, void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                 size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width == 0 || height == 0) return cudaSuccess;
  if (height > 1 && (dpitch < width || spitch < width))
    return fail(cudaErrorInvalidValue,
                line(what, ": rows of ", width, " bytes do not fit pitches of ", dpitch, " and ", spitch));
  const size_t dst_bytes = (height - 1) * dpitch + width, src_bytes = (height - 1) * spitch + width;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (!check(dst, dst_bytes, "destination of a copy", to_device) ||
      !check(src, src_bytes, "source of a copy", from_device))
    return fail(cudaErrorInvalidValue, line(what, ", ", sim::last_error()));
  if (stream == nullptr) {
    copy_rows(dst, dpitch, src, spitch, width, height);
    return cudaSuccess;
  }
  // From ordinary host memory CUDA copies to a staging area before it returns, so the source may change at
  // once; to ordinary host memory it returns only when the copy is done.
  if (find(src) == nullptr) {
    auto staged = std::make_shared<std::vector<char>>(width * height);
    copy_rows(staged->data(), width, src, spitch, width, height);
    sim::enqueue(stream, [=] { copy_rows(dst, dpitch, staged->data(), width, width, height); });
  } else {
    sim::enqueue(stream, [=] { copy_rows(dst, dpitch, src, spitch, width, height); });
  }
  return find(dst) == nullptr ? cudaStreamSynchronize(stream) : cudaSuccess;
}

}  // namespace

cudaError_t cudaMemcpy(void* dst, const void* src, size_t count, cudaMemcpyKind kind) {
  return copy("cudaMemcpy", dst, count, src, count, count, 1, kind, nullptr);
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy("cudaMemcpyAsync", dst, count, src, count, count, 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
  return copy("cudaMemcpy2DAsync", dst, dpitch, src, spitch, width, height, kind, stream);
}

cudaError_t cudaMemset(void* devPtr, int value, size_t count) {
  return cudaMemsetAsync(devPtr, value, count, nullptr);
}

cudaError_t cudaMemsetAsync(void* devPtr, int value, size_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  if (!sim::check_device_range(devPtr, count, "cudaMemset")) return fail(cudaErrorInvalidValue);
  sim::enqueue(stream, [=] { std::memset(devPtr, value, count); });
  return cudaSuccess;
}
