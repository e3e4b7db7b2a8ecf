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

// eager:    a worker thread for each stream, so overlap is real.
// The others have no workers. Work, copies from pinned memory included, is held back until something waits for it;
// then the waiting thread runs it. A query runs one piece of work, so that polling ends. They differ in when the
// streams that nobody waits for run:
// lazy:     as late as possible. Finds a missing wait for another stream's result, and memory used again too early.
// ahead:    as early as possible. Finds work that reads what the waited-for stream has yet to write.
// shuffled: the seed decides.
// All are orders a GPU may take, so a program that waits for all it needs gives the same numbers. One limit: a piece
// of work runs to its end on the waiting thread. Two ranks that enter collectives of different streams first would
// block each other; the lessons use one stream for communication.
enum class StreamPolicy { eager, lazy, ahead, shuffled };

// For streams created from now on, in every thread.
void set_stream_policy(StreamPolicy policy, unsigned seed = 1);
StreamPolicy get_stream_policy();

// ---- launches (used by launch.h) ----

// Records cudaErrorInvalidConfiguration for cudaGetLastError().
void bad_launch(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz);

}  // namespace sim
