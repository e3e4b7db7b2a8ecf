// What each rank sends and receives in a call, as two lists of moves, and the state machine that works them
// off. Any thread of the rank may push it on at any time; it never blocks.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "transport.h"

namespace sim {

struct Move {
  int peer;          // rank in the world
  char* at;          // what is sent, or where what is received goes
  const char* mine;  // receives only: `at` becomes mine + received (or their maximum); null: just received
  size_t count;      // elements
  size_t after;      // a send waits for this many receives to be done, a receive for this many sends
  uint32_t piece;    // which piece of its chunk
};

class Lane {  // one call in progress
 public:
  explicit Lane(const Header& header) : header(header) {}
  Lane(Lane&&) noexcept = default;

  // Starts and finishes what can be. Returns whether anything happened.
  bool advance(Transport& transport);
  bool done() const { return received_ == receives.size() && sent_ == sends.size() && copies.empty(); }
  void show(Board& board, int rank) const;  // what it waits for
  bool waits_for(int peer) const;

  Header header;
  struct Copy {
    const void* from;
    void* to;
    size_t bytes;
  };
  std::vector<Copy> copies;  // within this rank; made at once
  std::vector<Move> sends, receives;
  std::vector<std::unique_ptr<char[]>> scratch;  // for partial sums that the caller does not get
  size_t landing_bytes = 0;                      // the largest message that is added to something

 private:
  static constexpr size_t kReceiveWindow = 2;  // receives posted at once
  std::vector<char> landing_[kReceiveWindow];  // where a message lands that is added to something
  size_t posted_sends_ = 0, posted_receives_ = 0, sent_ = 0, received_ = 0;
  std::deque<std::unique_ptr<Request>> sending_, receiving_;
};

// Who takes part, in order of rank in the group, and which of them this rank is.
struct Members {
  std::vector<int> world;
  int me = 0;
  int size() const { return int(world.size()); }
};

// The moves of one call. `header.call` says which; `send` and `recv` are the caller's buffers.
Lane plan(const Header& header, const Members& members, const void* send, void* recv);

}  // namespace sim
