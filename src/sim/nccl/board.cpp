#include "board.h"

#include <algorithm>
#include <mutex>
#include <new>

namespace sim {

static_assert(std::atomic<int64_t>::is_always_lock_free, "the board lies between processes");

Board* Board::create(void* memory, int size) {
  Board* board = new (memory) Board(size);
  for (int r = 1; r < size; r++) new (board->rank + r) RankState;
  return board;
}

bool Board::fail(int rank, ncclResult_t why, const std::string& text) {
  int expected = 0;
  if (!failed.compare_exchange_strong(expected, 1)) return false;
  culprit = rank;
  code = why;
  snprintf(error, sizeof(error), "%s", text.c_str());
  failed.store(2, std::memory_order_release);
  return true;
}

void Board::throw_failure() const {
  while (failed.load(std::memory_order_acquire) != 2) sched_yield();
  throw CommError(code, error);
}

void Board::show(int r, Doing doing, const Header& header, int peer, size_t step, size_t steps) {
  std::lock_guard guard(rank[r].lock);
  rank[r].doing = doing;
  rank[r].header = header;
  rank[r].header.from = r;
  rank[r].peer = peer;
  rank[r].step = step;
  rank[r].steps = steps;
}

void Board::leave(int r, const std::string& how) {
  std::lock_guard guard(rank[r].lock);
  if (rank[r].left) return;
  snprintf(rank[r].goodbye, sizeof(rank[r].goodbye), "%s", how.c_str());
  rank[r].left = now_ns();
}

bool Board::all_left(int but) const {
  for (int r = 0; r < size; r++)
    if (r != but && !rank[r].left) return false;
  return true;
}

bool Board::deadlocked(int64_t now) const {
  const int64_t quiet = 400'000'000;  // long enough for any message of MPI to arrive
  int64_t last = 0, polled = now;
  int live = 0;
  for (int r = 0; r < size; r++) {
    last = std::max(last, std::max(rank[r].activity.load(), rank[r].left.load()));
    if (rank[r].left) continue;
    live++;
    if (!rank[r].blocked) return false;
    polled = std::min(polled, rank[r].polled.load());
  }
  return live > 0 && now - last > quiet && polled - last > quiet / 2;
}

std::string Board::deadlock_text() {
  // Two roots that both send, or both receive, never exchange the headers that would show it. The board does.
  for (int a = 0; a < size; a++)
    for (int b = 0; b < a; b++) {
      std::scoped_lock guard(rank[a].lock, rank[b].lock);
      const Header &x = rank[a].header, &y = rank[b].header;
      const bool collective =
          x.call.op != Send && x.call.op != Recv && y.call.op != Send && y.call.op != Recv;
      if (rank[a].left || rank[b].left || !collective || x.call.channel != y.call.channel) continue;
      if (x.call.op != Join && y.call.op != Join && !agree(x.call, y.call)) return disagreement(x, y);
    }
  return "deadlock: every rank waits, and none of them for a message that was sent; a send ends when its peer "
         "receives, so let one side receive first, or group the calls";
}

std::string Board::report() {
  std::string text;
  for (int r = 0; r < size; r++) {
    RankState& s = rank[r];
    std::lock_guard guard(s.lock);
    text += "\n  rank " + std::to_string(r) + ": ";
    const std::string call = describe(s.header), peer = std::to_string(s.peer);
    if (s.left) text += std::string("left: ") + s.goodbye + (s.header.group[0] ? "; " : "");
    if (!s.left && s.doing == Computing) text += s.header.group[0] ? "computing; " : "computing";
    if ((s.left || s.doing == Computing) && s.header.group[0]) text += "its last call was " + call;
    if (s.left || s.doing == Computing) continue;
    if (s.doing == Running) text += "busy in " + call;
    if (s.doing == Sending) text += "waiting for rank " + peer + " to take a message in " + call;
    if (s.doing == Receiving) text += "waiting for a message from rank " + peer + " in " + call;
    if (s.doing == Joining) text += "waiting for the other ranks of a new group, in " + call;
    if (s.steps > 2)
      text += " (" + std::to_string(s.step) + " of " + std::to_string(s.steps) + " messages done)";
  }
  return text;
}

}  // namespace sim
