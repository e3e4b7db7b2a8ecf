// Streams and events of the simulated GPU: a stream is a queue of work, an event marks a place in one.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "internal.h"

using sim::fail;
using sim::in_stream_work;

namespace {

std::atomic<sim::StreamPolicy> stream_policy{sim::StreamPolicy::eager};
std::atomic<unsigned> lazy_seed{1};
thread_local bool stepping_one = false;  // this thread runs a piece of a lazy stream

// A place in a stream. Each record makes a new one, so whoever waits for an older one is not disturbed.
struct Mark {
  std::atomic<int> done{0};                    // an int, so that waiting for it is one futex
  std::chrono::steady_clock::time_point when;  // this and error: written before done
  std::string error;
  std::weak_ptr<CUstream_st> stream;

  void reach(const std::string& stream_error) {
    when = std::chrono::steady_clock::now();
    error = stream_error;
    done = 1;
    done.notify_all();
  }
};

// One entry of a queue: wait for a mark, or do work, or reach a mark.
struct Item {
  std::shared_ptr<Mark> wait;
  std::function<void()> work;
  std::shared_ptr<Mark> reach;
};

}  // namespace

struct CUevent_st {
  std::mutex mutex;
  std::shared_ptr<Mark> mark;  // null until recorded
  bool timed = true;

  std::shared_ptr<Mark> get() {
    std::lock_guard lock(mutex);
    return mark;
  }
};

struct CUstream_st : std::enable_shared_from_this<CUstream_st> {
  const int device = sim::current_device;
  const sim::StreamPolicy policy = stream_policy;
  const bool lazy = policy != sim::StreamPolicy::eager;

  std::mutex mutex;  // guards what follows
  std::condition_variable arrived, drained;
  std::deque<Item> queue;
  bool busy = false, closing = false;
  std::string error;
  std::minstd_rand random{lazy_seed};  // the same on every rank, so that they meet in the same collectives

  std::mutex stepping;  // lazy: one thread at a time runs this stream
  std::thread worker;   // eager

  void push(Item item) {
    std::lock_guard lock(mutex);
    queue.push_back(std::move(item));
    arrived.notify_one();
  }
  bool idle() {
    std::lock_guard lock(mutex);
    return queue.empty() && !busy;
  }
  bool can_run() {  // without waiting for another stream
    std::lock_guard lock(mutex);
    return !queue.empty() && !busy && (!queue.front().wait || queue.front().wait->done);
  }
  std::string take_error() {
    std::lock_guard lock(mutex);
    return std::exchange(error, {});
  }
  bool step();
  bool step_alone();
  void let_others_run();
  void work();
  void finish();
  bool pop(std::unique_lock<std::mutex>& lock);
};

namespace {

std::mutex& all_streams_mutex = *new std::mutex;
std::vector<std::shared_ptr<CUstream_st>>& all_streams = *new std::vector<std::shared_ptr<CUstream_st>>;

std::vector<std::shared_ptr<CUstream_st>> streams_of(int device) {
  std::lock_guard lock(all_streams_mutex);
  std::vector<std::shared_ptr<CUstream_st>> mine;
  for (const auto& s : all_streams)
    if (s->device == device) mine.push_back(s);
  return mine;
}

// A lazy stream does not reach the mark by itself: whoever waits runs it up to there.
void wait_for(Mark& mark) {
  while (!mark.done) {
    auto s = mark.stream.lock();
    if (s == nullptr || !s->lazy || !s->step()) mark.done.wait(0);
  }
}

// CUDA records this too, but it is an answer: the text of a real error stays.
cudaError_t not_ready() { return fail(cudaErrorNotReady); }

cudaError_t report(std::string error) {
  return error.empty() ? cudaSuccess : fail(cudaErrorLaunchFailure, std::move(error));
}

cudaError_t refuse_in_stream_work(const char* what) {
  return fail(cudaErrorNotPermitted,
              sim::line(what, ": called by work on a stream, which would wait for itself"));
}

}  // namespace

// Runs the first item of the queue, if there is one. The lock is held on entry and on return.
bool CUstream_st::pop(std::unique_lock<std::mutex>& lock) {
  if (queue.empty()) return false;
  Item item = std::move(queue.front());
  queue.pop_front();
  busy = true;
  std::string failed = error;
  lock.unlock();
  if (item.wait) {
    wait_for(*item.wait);
    if (failed.empty()) failed = item.wait->error;
  }
  if (item.work && failed.empty()) {
    const bool nested = std::exchange(in_stream_work, true);
    try {
      item.work();
    } catch (const std::exception& e) {
      failed = std::string("work on a stream failed: ") + e.what();
    } catch (...) {
      failed = "work on a stream failed: unknown exception";
    }
    in_stream_work = nested;
  }
  if (item.reach) item.reach->reach(failed);
  item = {};  // what the work captured is gone before anyone is told that it is done
  lock.lock();
  error = std::move(failed);
  busy = false;
  if (queue.empty()) drained.notify_all();
  return true;
}

// Ahead and shuffled: before a piece of this stream, the others of the device may do what they can.
void CUstream_st::let_others_run() {
  if (policy == sim::StreamPolicy::lazy || stepping_one) return;
  const auto streams = streams_of(device);
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& s : streams) {
      if (s.get() == this || !s->lazy || !s->can_run()) continue;
      if (policy == sim::StreamPolicy::shuffled && random() % 2) return;
      moved = s->step_alone();
    }
  }
}

bool CUstream_st::step() {
  let_others_run();
  return step_alone();
}

bool CUstream_st::step_alone() {
  const bool nested = std::exchange(stepping_one, true);
  bool ran;
  {
    std::lock_guard one_at_a_time(stepping);
    std::unique_lock lock(mutex);
    ran = pop(lock);
  }
  stepping_one = nested;
  return ran;
}

void CUstream_st::work() {
  sim::current_device = device;
  std::unique_lock lock(mutex);
  while (true) {
    arrived.wait(lock, [&] { return closing || !queue.empty(); });
    if (!pop(lock)) return;
  }
}

void CUstream_st::finish() {
  if (lazy)
    while (step()) continue;
  std::unique_lock lock(mutex);
  drained.wait(lock, [&] { return queue.empty() && !busy; });
}

namespace sim {

void enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr) return work();
  stream->push({nullptr, std::move(work), nullptr});
}

void set_stream_policy(StreamPolicy policy, unsigned seed) {
  stream_policy = policy;
  lazy_seed = seed;
}

StreamPolicy get_stream_policy() { return stream_policy; }

// On a GPU cudaFree waits for work in flight. Waiting here would hide a missing event wait from the lazy
// policy, so the memory instead lives on until every stream has passed this point.
void release_after_streams(int device, const std::shared_ptr<void>& memory) {
  for (const auto& s : streams_of(device))
    if (!s->idle()) s->push({nullptr, [memory] {}, nullptr});
}

}  // namespace sim

// ---- streams ----

// A stream made with cudaStreamDefault would synchronise with stream 0. No stream does here, which is
// stricter.
cudaError_t cudaStreamCreate(cudaStream_t* pStream) {
  return cudaStreamCreateWithFlags(pStream, cudaStreamNonBlocking);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* pStream, unsigned int /*flags*/) {
  auto stream = std::make_shared<CUstream_st>();
  if (!stream->lazy) stream->worker = std::thread([s = stream.get()] { s->work(); });
  *pStream = stream.get();
  std::lock_guard lock(all_streams_mutex);
  all_streams.push_back(std::move(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamDestroy: the default stream");
  if (in_stream_work) return refuse_in_stream_work("cudaStreamDestroy");
  auto keep = stream->shared_from_this();
  {
    std::lock_guard lock(all_streams_mutex);
    std::erase(all_streams, keep);
  }
  if (std::uncaught_exceptions() > 0) {  // do not start work that may never end; let its waiters go
    std::deque<Item> dropped;
    {
      std::lock_guard lock(stream->mutex);
      dropped.swap(stream->queue);
      if (!stream->busy) stream->drained.notify_all();
    }
    for (Item& item : dropped)
      if (item.reach) item.reach->reach("the stream was destroyed by an exception");
  }
  stream->finish();
  if (stream->worker.joinable()) {
    {
      std::lock_guard lock(stream->mutex);
      stream->closing = true;
      stream->arrived.notify_one();
    }
    stream->worker.join();
  }
  return report(stream->take_error());
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;  // its work ran inline
  if (in_stream_work) return refuse_in_stream_work("cudaStreamSynchronize");
  stream->finish();
  return report(stream->take_error());
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;
  if (stream->idle()) return report(stream->take_error());
  if (stream->lazy && !in_stream_work) stream->step();  // so that a polling loop ends
  return not_ready();
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int /*flags*/) {
  auto mark = event->get();
  if (mark == nullptr) return cudaSuccess;  // never recorded: nothing to wait for, as in CUDA
  if (stream == nullptr) {
    wait_for(*mark);
    return report(mark->error);
  }
  stream->push({std::move(mark), nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* userData) {
  sim::enqueue(stream, [=] { fn(userData); });
  return cudaSuccess;
}

// ---- events ----

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  *event = new CUevent_st;
  (*event)->timed = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaEventDestroy: a null event");
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto mark = std::make_shared<Mark>();
  if (stream != nullptr) mark->stream = stream->weak_from_this();
  {
    std::lock_guard lock(event->mutex);
    event->mark = mark;
  }
  if (stream == nullptr) {
    mark->reach("");
  } else {
    stream->push({nullptr, nullptr, mark});
  }
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (in_stream_work) return refuse_in_stream_work("cudaEventSynchronize");
  auto mark = event->get();
  if (mark == nullptr) return cudaSuccess;
  wait_for(*mark);
  return report(mark->error);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto mark = event->get();
  if (mark == nullptr) return cudaSuccess;
  if (mark->done) return report(mark->error);
  auto stream = mark->stream.lock();
  if (stream != nullptr && stream->lazy && !in_stream_work) stream->step();
  return not_ready();
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  auto from = start->get(), to = end->get();
  if (from == nullptr || to == nullptr || !start->timed || !end->timed)
    return fail(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: an event without a recorded time");
  if (!from->done || !to->done) return not_ready();
  *ms = std::chrono::duration<float, std::milli>(to->when - from->when).count();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (in_stream_work) return refuse_in_stream_work("cudaDeviceSynchronize");
  const auto streams = streams_of(sim::current_device);
  while (true) {  // lazy streams take turns at random
    std::vector<CUstream_st*> waiting;
    for (const auto& s : streams)
      if (s->lazy && !s->idle()) waiting.push_back(s.get());
    if (waiting.empty()) break;
    size_t turn;
    {
      std::lock_guard lock(streams[0]->mutex);
      turn = streams[0]->random() % waiting.size();
    }
    waiting[turn]->step();
  }
  std::string error;
  for (const auto& s : streams) {
    s->finish();
    if (std::string e = s->take_error(); error.empty()) error = std::move(e);
  }
  return report(std::move(error));
}
