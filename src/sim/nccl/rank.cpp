#include "rank.h"

#include <sched.h>
#include <sys/prctl.h>

namespace sim {

namespace {
// How a waiting rank shares the cores. There may be more ranks than cores, so it gives way at once and often,
// and sleeps when nothing comes for a while: measured, this decides everything for small messages.
constexpr int kYields = 60;
constexpr int64_t kNap = 20'000, kLongNap = 500'000, kWatch = 1'000'000;  // nanoseconds

void nap(int64_t ns) {
  thread_local bool precise = false;
  if (!precise) prctl(PR_SET_TIMERSLACK, 1000);  // otherwise a nap of 20 us takes 75
  precise = true;
  timespec t{0, ns};
  nanosleep(&t, nullptr);
}

thread_local std::shared_ptr<Rank> t_rank;
}  // namespace

std::shared_ptr<Rank> this_rank_or_null() { return t_rank; }
void set_this_rank(std::shared_ptr<Rank> rank) { t_rank = std::move(rank); }
std::shared_ptr<Rank> this_rank() {
  if (!t_rank)
    throw std::logic_error("this thread is no rank: call this inside sim::run_threads or sim::run_mpi");
  return t_rank;
}

Rank::Rank(std::unique_ptr<Transport> transport, std::shared_ptr<Board> b, double timeout_s)
    : board(std::move(b)),
      transport_(std::move(transport)),
      timeout_s_(timeout_s),
      own_thread_(pthread_self()) {
  pthread_getcpuclockid(own_thread_, &own_clock_);
}

void Rank::run(std::vector<Batch>& batches) {
  auto all_done = [&] {
    for (auto& b : batches)
      if (!b.stages.empty()) return false;
    return true;
  };
  const Header first = batches.front().stages.front().front().header;
  auto remove = [&] {
    for (auto& b : batches) active_.remove(&b);
  };
  {
    std::lock_guard guard(lock_);
    for (auto& b : batches) active_.push_back(&b);
  }
  board->show(id(), Running, first);
  try {
    wait(all_done, nullptr);
  } catch (...) {
    std::lock_guard guard(lock_);
    remove();
    batches.clear();  // withdraws what was posted
    throw;
  }
  board->show(id(), Computing, first);
  std::lock_guard guard(lock_);
  remove();
}

void Rank::wait_until(const Header& header, const std::function<bool()>& ready) {
  board->show(id(), Joining, header);
  wait(ready, &header);
  board->show(id(), Computing, header);
}

// Under the lock: pushes on every call in progress on this rank, whoever waits for it.
bool Rank::advance_all() {
  bool moved = false;
  transport_->next_arrival = 0;
  for (Batch* batch : active_) {
    while (!batch->stages.empty()) {
      bool done = true;
      for (Lane& lane : batch->stages.front()) {
        moved |= lane.advance(*transport_);
        done &= lane.done();
      }
      if (!done) break;
      batch->stages.pop_front();
      moved = true;
    }
  }
  return moved;
}

void Rank::wait(const std::function<bool()>& done, const Header* joining) {
  struct Waits {  // keeps count of the threads of this rank in here
    Rank& rank;
    const bool own = pthread_equal(pthread_self(), rank.own_thread_);
    explicit Waits(Rank& r) : rank(r) { r.waiters_++, r.own_waits_ += own; }
    ~Waits() {
      rank.own_waits_ -= own;
      rank.waiters_--;
      rank.board->rank[rank.id()].blocked = false;  // if others still wait, they find out anew
    }
  } waits(*this);
  const int64_t since = now_ns();
  for (int idle = 0;;) {
    bool moved = false;
    int64_t arrival = 0;
    if (board->has_failed()) board->throw_failure();
    if (std::unique_lock guard(lock_, std::try_to_lock); guard) {
      try {
        moved = advance_all();
      } catch (const CommError& e) {
        guard.unlock();
        fail(e.code, e.what());
      }
      arrival = transport_->next_arrival;
      if (moved || arrival) {
        board->rank[id()].blocked = false;
        board->rank[id()].activity = now_ns();
      }
      if (done()) return;
    }
    if (moved) {
      idle = 0;
    } else if (arrival) {
      const int64_t left = arrival - now_ns();
      if (left > 0) nap(std::min(left, kLongNap));
    } else if (++idle < kYields) {
      sched_yield();
    } else {
      watch(since, joining);
      nap(kNap);
    }
  }
}

// The rank's own thread may rest in a wait for a stream instead of here, or compute and yet issue calls. If
// it has used no processor time for a while, it rests.
bool Rank::own_thread_rests(int64_t now) {
  timespec t;
  clock_gettime(own_clock_, &t);
  const int64_t used = t.tv_sec * 1000000000LL + t.tv_nsec;
  if (used != own_cpu_) own_worked_ = now;
  own_cpu_ = used;
  return own_waits_ > 0 || now - own_worked_ > 400'000'000;
}

// Looks, every millisecond of waiting, whether it is still worth while.
void Rank::watch(int64_t since, const Header* joining) {
  std::unique_lock guard(lock_);
  const int64_t now = now_ns();
  if (now - watched_ < kWatch) return;
  watched_ = now;
  RankState& mine = board->rank[id()];
  std::string missing;
  if (joining) board->show(id(), Joining, *joining);
  const int64_t quiet = now - std::max(since, mine.activity.load());
  bool shown = joining;
  for (Batch* batch : active_) {
    if (batch->stages.empty()) continue;
    for (const Lane& lane : batch->stages.front()) {
      if (lane.done()) continue;
      if (!shown) lane.show(*board, id());
      shown = true;
      for (int r = 0; r < size() && missing.empty(); r++) {
        const int64_t left = board->rank[r].left;
        // The grace is for messages it sent before it left.
        if (left && now - left > 300'000'000 && quiet > 300'000'000 && lane.waits_for(r)) {
          lane.show(*board, id());
          missing = "rank " + std::to_string(r) + " has left, and rank " + std::to_string(id()) +
                    " waits for it: one made a call less than the other";
        }
      }
    }
  }
  mine.polled = now;
  mine.blocked = own_thread_rests(now);
  guard.unlock();
  if (!missing.empty()) fail(ncclRemoteError, missing);
  if (board->deadlocked(now)) fail(ncclInvalidUsage, board->deadlock_text());
  bool busy = false;
  for (int r = 0; r < size(); r++) busy |= board->rank[r].busy && !board->rank[r].left;
  if (busy) mine.activity = now;
  if (!busy && quiet > timeout_s_ * 1e9) {
    char text[200];
    snprintf(text, sizeof(text),
             "timeout: nothing has moved on rank %d for %.1f s; look for the rank that is behind, and raise --timeout "
             "only if it is slow on purpose", id(), quiet / 1e9);
    fail(ncclSystemError, text);
  }
}

void Rank::fail(ncclResult_t code, const std::string& text) {
  board->fail(id(), code, text + "; what every rank is doing:" + board->report());
  board->throw_failure();
}

std::vector<TrafficRow> Rank::traffic() {
  std::lock_guard guard(lock_);
  return transport_->ledger.rows;
}
void Rank::reset_traffic() {
  std::lock_guard guard(lock_);
  transport_->ledger.rows.clear();
}
void Rank::count_call(const Header& header) {
  std::lock_guard guard(lock_);
  transport_->ledger.row(header).calls++;
}
void Rank::idle() {
  std::lock_guard guard(lock_);
  transport_->idle();
}
// Numbers of channels are unique in the world without asking anybody: 8 bits of rank, 12 of a counter.
uint32_t Rank::new_channel() {
  if (size() > 255) throw std::runtime_error("more than 255 ranks");
  if ((++channels_ & 0xfff) == 0) channels_++;  // channel 0 is for bootstrapping
  return uint32_t(id()) << 12 | (channels_ & 0xfff);
}

}  // namespace sim
