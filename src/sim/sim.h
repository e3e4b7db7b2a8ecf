// What the simulated GPU offers beyond CUDA's own calls, for the simulated NCCL, launch.h and tests.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

struct CUstream_st;  // cudaStream_t points to one

namespace sim {

// The last error of the calling thread in one line, with its sizes and offsets; "" if there was none.
const char* last_error();
void set_last_error(std::string text);

// ---- buffers: every one knows its size ----

// True if [p, p + bytes) stays inside the buffer that p points into, or if p points into none (ordinary host
// memory is not checked). Otherwise false, and last_error() says "<what>: ...", naming both sizes.
bool check_range(const void* p, size_t bytes, const char* what);

// The same, but p must lie in memory from cudaMalloc or cudaMallocHost: a GPU can touch no other.
bool check_device_range(const void* p, size_t bytes, const char* what);

// Bytes from p to the end of its buffer, or SIZE_MAX if p is in no buffer of cudaMalloc or cudaMallocHost.
size_t bytes_from(const void* p);

// Fill fresh device buffers with 0xFF bytes: NaN as float and as bfloat16. Off at the start.
void poison_allocations(bool on);

// The same for a buffer that is handed out again by an allocator of our own.
void poison(void* p, size_t bytes);

// ---- streams ----

// Queues work on a stream. On stream 0 (nullptr) it runs at once, and what it throws reaches the caller. On
// others an exception is kept: the stream skips its remaining work, and the next synchronize returns
// cudaErrorLaunchFailure with the exception's text in last_error().
void enqueue(CUstream_st* stream, std::function<void()> work);

// eager: a worker thread for each stream, so overlap is real.
// lazy:  no workers. Work is held back until something waits for it. Then the waiting thread runs just what
//        was waited for (several streams: in seeded random order), so a missing cudaStreamWaitEvent fails
//        every time. A query runs one piece of work, so that polling ends.
enum class StreamPolicy { eager, lazy };

// For streams created from now on, in every thread.
void set_stream_policy(StreamPolicy policy, unsigned seed = 1);

// ---- launches (used by launch.h) ----

// Records cudaErrorInvalidConfiguration for cudaGetLastError().
void bad_launch(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz);

}  // namespace sim
