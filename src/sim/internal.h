// What runtime.cpp, streams.cpp and cublas.cpp share; nobody else includes this.
#pragma once

#include <memory>
#include <sstream>
#include <string>

#include "include/cuda_runtime.h"
#include "sim.h"

namespace sim {

// The device of the calling thread, and whether it is at work for a stream.
extern constinit thread_local int current_device;
extern constinit thread_local bool in_stream_work;

// line("rank ", 3) is "rank 3".
template <class... Parts>
std::string line(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Record an error for cudaGetLastError() and last_error(), and return its code.
cudaError_t fail(cudaError_t code, std::string text);
cudaError_t fail(cudaError_t code);  // the text is there already

// Keeps memory alive until every stream of the device has done what is queued now.
void release_after_streams(int device, const std::shared_ptr<void>& memory);

}  // namespace sim
