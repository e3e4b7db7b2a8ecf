// The board: memory that all ranks of a world see (a shared MPI window, or plain memory between threads),
// where each writes what it is doing. It is how a rank that gives up can say what everybody else waits for,
// how all learn that one has failed or left, and how a deadlock is found. No payload passes through it.
#pragma once

#include <sched.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "call.h"

namespace sim {

enum Doing : int { Computing, Running, Sending, Receiving, Joining };

class SpinLock {
 public:
  void lock() {
    while (flag_.test_and_set(std::memory_order_acquire)) sched_yield();
  }
  bool try_lock() { return !flag_.test_and_set(std::memory_order_acquire); }
  void unlock() { flag_.clear(std::memory_order_release); }

 private:
  std::atomic_flag flag_ = ATOMIC_FLAG_INIT;
};

struct RankState {
  std::atomic<int64_t> activity{0};   // when this rank last posted or finished a transfer
  std::atomic<int64_t> polled{0};     // when it last looked for messages and found none
  std::atomic<bool> blocked{false};   // it waits, and its own thread cannot issue another call meanwhile
  std::atomic<int64_t> left{0};       // when its body ended; 0: it is alive
  std::atomic<bool> busy{false};      // it works alone on purpose (see Busy in world.h): nobody times out meanwhile
  std::atomic<uint64_t> joining{0};   // see meet() in nccl.cpp
  int64_t out_free = 0, in_free = 0;  // simulated link: when the ports are free again (Board::ports)

  SpinLock lock;  // of what follows, the text for people
  Doing doing = Computing;
  int peer = -1;
  size_t step = 0, steps = 0;
  Header header;
  char goodbye[200] = {};
};

struct Board {
  explicit Board(int size) : size(size) {}
  const int size;
  std::atomic<int> failed{0};  // 1: being written, 2: error, code and culprit are valid
  int culprit = -1;
  ncclResult_t code = ncclSuccess;
  char error[8192] = {};
  SpinLock ports;
  RankState rank[1];  // `size` of them

  static size_t bytes(int size) { return sizeof(Board) + size * sizeof(RankState); }
  static Board* create(void* memory, int size);  // in `bytes(size)` bytes of memory

  // The first failure of the world wins; returns whether this was it.
  bool fail(int rank, ncclResult_t code, const std::string& text);
  bool has_failed() const { return failed.load(std::memory_order_acquire) != 0; }
  [[noreturn]] void throw_failure() const;

  void show(int rank, Doing doing, const Header& header, int peer = -1, size_t step = 0, size_t steps = 0);
  void leave(int rank, const std::string& how);
  bool all_left(int but = -1) const;

  // Every live rank waits, and each has looked for messages since anything last moved anywhere.
  bool deadlocked(int64_t now) const;
  std::string deadlock_text();
  std::string report();  // one line a rank
};

}  // namespace sim
