// Checked simulation: the fibers, and who waits for whom. See checked.h.
#ifdef SIM_CHECKED
#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "internal.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else  // AddressSanitizer wants to know on which stack we are
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

// The bounds of all shared memory of the program; the linker makes them.
extern "C" {
extern char __start_sim_shared[] __attribute__((weak));
extern char __stop_sim_shared[] __attribute__((weak));
}

namespace sim {

Checked checked;

std::string Checked::text() const {
  const char* const names[] = {"forward", "reverse", "random"};
  std::string all = line("--order=", names[int(order)]);
  if (order == Order::random) all += line(" --seed=", seed);
  if (block) all += line(" --block=", block);
  return all;
}

namespace {

constexpr size_t kStack = 128 << 10;
constexpr std::uint64_t kPoison = ~std::uint64_t{0};  // NaN as float, double and bfloat16

// A stack to run CUDA threads on: one after the other, while none of them has to wait.
struct Fiber {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t start;
  jmp_buf at;  // swapcontext would ask the kernel for the signal mask at every switch
  bool started = false;
  void* fake_stack = nullptr;
};

enum class State { fresh, ready, at_barrier, at_exchange, ended };

struct Thread {
  uint3 index{};
  State state = State::fresh;
  Fiber* fiber = nullptr;  // while it waits
  Site site{};             // where it waits, and for what
  Exchange kind{};
  unsigned mask = 0, argument = 0, width = 32;
  std::uint64_t value = 0;
};

std::string place(const Site& s) { return line(s.file, ":", s.line); }

// "0-31, 40": of ascending numbers.
std::string list(const std::vector<int>& numbers) {
  std::string text;
  for (size_t i = 0, j; i < numbers.size(); i = j) {
    for (j = i + 1; j < numbers.size() && numbers[j] == numbers[j - 1] + 1;) ++j;
    text += line(i ? ", " : "", numbers[i]);
    if (j - i > 1) text += line("-", numbers[j - 1]);
  }
  return text;
}

class Block {  // one for each OS thread that launches; used again for every block
 public:
  void run(const std::function<void()>& kernel, dim3 size, unsigned seed) {
    kernel_ = &kernel;
    threads_.assign(size.x * size.y * size.z, {});
    for (unsigned i = 0, x = 0, y = 0, z = 0; i < threads_.size(); ++i) {
      threads_[i].index = {x, y, z};
      if (++x == size.x) x = 0, ++y;
      if (y == size.y) y = 0, ++z;
    }
    blockDim = size;
    random_.seed(seed);
    failure_ = nullptr;
    if (idle_.size() < fibers_.size()) fibers_.clear(), idle_.clear();  // the last block failed half-way
    if (__start_sim_shared) std::memset(__start_sim_shared, 0xFF, size_t(__stop_sim_shared - __start_sim_shared));
    const int warps = (count() + 31) / 32;
    while (true) {
      arrange(warp_order_, 0, warps);
      for (int w : warp_order_) run_warp(w * 32, std::min(count(), w * 32 + 32));
      if (all_passed()) return;
    }
  }

  void wait(State state, Site site) {
    Thread& t = threads_[current_];
    t.state = state, t.site = site, t.fiber = fiber_;
    switch_to_scheduler();
  }
  Thread& current() { return threads_[current_]; }
  int lane() const { return current_ % 32; }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(line("block (", blockIdx.x, ", ", blockIdx.y, ", ", blockIdx.z, ") of ", count(),
                                  " threads: ", what, "  [", checked.text(), "]"));
  }

 private:
  int count() const { return int(threads_.size()); }

  void arrange(std::vector<int>& order, int from, int to) {
    order.resize(size_t(to - from));
    std::iota(order.begin(), order.end(), from);
    if (checked.order == Order::reverse) std::reverse(order.begin(), order.end());
    if (checked.order == Order::random) std::shuffle(order.begin(), order.end(), random_);
  }

  // As far as the warp's threads come without the other warps.
  void run_warp(int from, int to) {
    do {
      arrange(lane_order_, from, to);
      for (next_ = 0; next_ < lane_order_.size();) {
        Thread& t = threads_[lane_order_[next_]];
        if (t.state == State::fresh) {
          if (idle_.empty()) new_fiber();
          fiber_ = idle_.back();
          idle_.pop_back();
          switch_to(*fiber_);  // runs the fresh threads from here on, until one waits
        } else {
          enter(lane_order_[next_++]);
          if (t.state == State::ready) switch_to(*(fiber_ = t.fiber));
        }
        if (failure_) std::rethrow_exception(failure_);
      }
    } while (exchange_lanes(from, to));
  }

  // Once no thread of the warp can go on: the shuffles that all their lanes have reached. False: there were none.
  bool exchange_lanes(int from, int to) {
    bool any = false, moved = false;
    for (int i = from; i < to; ++i) {
      const Thread& first = threads_[i];
      if (first.state != State::at_exchange) continue;
      any = true;
      auto takes_part = [&](int t) { return first.mask >> (t - from) & 1; };
      auto same = [&](const Thread& t) {
        return t.state == State::at_exchange && t.site.line == first.site.line && t.site.file == first.site.file &&
               t.mask == first.mask;
      };
      bool complete = true;
      for (int t = from; t < to; ++t) complete = complete && (!takes_part(t) || same(threads_[t]));
      if (!complete) continue;
      std::uint64_t values[32];
      std::fill_n(values, 32, kPoison);  // what a lane that takes no part would give
      for (int t = from; t < to; ++t)
        if (takes_part(t)) values[t - from] = threads_[t].value;
      for (unsigned mask = first.mask, t = unsigned(from); t < unsigned(to); ++t)
        if (mask >> (t - from) & 1) threads_[t].value = values[source(threads_[t], t - from)], threads_[t].state = State::ready;
      moved = true;
    }
    if (any && !moved) fail(absent(from, to, "lanes of a warp must all take part in the exchange"));
    return moved;
  }

  // The lane whose value this one receives, as the PTX manual defines shfl.
  static unsigned source(const Thread& t, unsigned lane) {
    const unsigned first = lane & ~(t.width - 1), last = lane | (t.width - 1);
    unsigned from = lane;
    if (t.kind == Exchange::index) from = first | (t.argument & (t.width - 1));
    if (t.kind == Exchange::flip) from = lane ^ t.argument;
    if (t.kind == Exchange::down) from = lane + t.argument;
    return from <= last ? from : lane;
  }

  // True: all threads have ended. False: all stand at one barrier, and may go on.
  bool all_passed() {
    int ended = 0;
    const Site* site = nullptr;
    bool one = true;
    for (const Thread& t : threads_) {
      ended += t.state == State::ended;
      if (t.state != State::at_barrier) continue;
      if (!site) site = &t.site;
      one = one && t.site.line == site->line && t.site.file == site->file;
    }
    if (ended == count()) return true;
    if (ended || !one) fail(absent(0, count(), "a barrier must be reached by the whole block"));
    for (Thread& t : threads_) t.state = State::ready;
    return false;
  }

  // Who is where.
  std::string absent(int from, int to, const char* rule) const {
    std::string text = line(rule, ", but");
    std::vector<int> ended;
    std::vector<std::pair<std::string, std::vector<int>>> places;
    for (int i = from; i < to; ++i) {
      const Thread& t = threads_[i];
      if (t.state == State::ended) { ended.push_back(i); continue; }
      const char* what = t.state == State::at_barrier || t.kind == Exchange::barrier ? "the barrier at " : "the shuffle at ";
      const std::string at = what + place(t.site);
      auto p = std::find_if(places.begin(), places.end(), [&](auto& known) { return known.first == at; });
      if (p == places.end()) p = places.insert(p, {at, {}});
      p->second.push_back(i);
    }
    for (auto& [at, who] : places) text += line(" threads ", list(who), " wait in ", at, ";");
    if (!ended.empty()) text += line(" threads ", list(ended), " have ended;");
    text.pop_back();
    return text;
  }

  // ---- fibers ----

  void new_fiber() {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber& f = *fibers_.back();
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get();
    f.start.uc_stack.ss_size = kStack - fibers_.size() * 192 % 12288;  // tops in different lines of the cache
    f.start.uc_link = nullptr;
    makecontext(&f.start, &Block::fiber_main, 0);
    idle_.push_back(&f);
  }

  void enter(int thread) {
    current_ = thread;
    threadIdx = threads_[thread].index;
  }

  static void fiber_main();
  void run_fresh() {  // on a fiber, for ever
    Fiber* const mine = fiber_;
    __sanitizer_finish_switch_fiber(nullptr, &stack_, &stack_size_);
    while (true) {
      while (next_ < lane_order_.size() && threads_[lane_order_[next_]].state == State::fresh && !failure_) {
        enter(lane_order_[next_++]);
        try {
          (*kernel_)();
        } catch (...) {
          failure_ = std::current_exception();
        }
        threads_[current_].state = State::ended;
      }
      idle_.push_back(mine);
      switch_to_scheduler();
    }
  }

  __attribute__((noinline)) void switch_to(Fiber& fiber) {
    __sanitizer_start_switch_fiber(&fake_stack_, fiber.stack.get(), kStack);
    if (_setjmp(at_) == 0) {
      if (fiber.started) _longjmp(fiber.at, 1);
      fiber.started = true;
      setcontext(&fiber.start);
    }
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
  }

  __attribute__((noinline)) void switch_to_scheduler() {
    Fiber& mine = *fiber_;
    __sanitizer_start_switch_fiber(&mine.fake_stack, stack_, stack_size_);
    if (_setjmp(mine.at) == 0) _longjmp(at_, 1);
    __sanitizer_finish_switch_fiber(fiber_->fake_stack, &stack_, &stack_size_);
  }

  const std::function<void()>* kernel_ = nullptr;
  std::vector<Thread> threads_;
  std::vector<int> warp_order_, lane_order_;
  size_t next_ = 0;  // place in lane_order_
  int current_ = 0;  // the thread that runs
  std::minstd_rand random_;
  std::exception_ptr failure_;

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  Fiber* fiber_ = nullptr;
  jmp_buf at_;  // the scheduler
  void* fake_stack_ = nullptr;
  const void* stack_ = nullptr;
  size_t stack_size_ = 0;
};

Block& this_block() {
  thread_local Block block;
  return block;
}

void Block::fiber_main() { this_block().run_fresh(); }

}  // namespace

void run_blocks(dim3 grid, dim3 block, const std::function<void()>& thread) {
  static std::mutex one_at_a_time;  // ranks as threads, and streams, share the memory of __shared__ variables
  std::lock_guard lock(one_at_a_time);
  if (checked.block) block = dim3(unsigned(checked.block));
  gridDim = grid;
  const unsigned long blocks = 1ul * grid.x * grid.y * grid.z;
  const unsigned long stride = checked.order == Order::random ? 1000003 : 1, first = checked.seed % blocks;
  for (unsigned long i = 0; i < blocks; ++i) {
    unsigned long at = checked.order == Order::reverse ? blocks - 1 - i : i;
    if (checked.order == Order::random && blocks % stride != 0) at = (first + i * stride) % blocks;
    blockIdx = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y), unsigned(at / grid.x / grid.y)};
    this_block().run(thread, block, checked.seed + unsigned(at));
  }
}

void barrier(Site site) { this_block().wait(State::at_barrier, site); }

std::uint64_t exchange(Exchange kind, unsigned mask, std::uint64_t value, unsigned argument, unsigned width, Site site) {
  Block& block = this_block();
  if (!(mask >> block.lane() & 1))
    block.fail(line("the exchange at ", place(site), ": lane ", block.lane(), " calls it, and mask 0x", std::hex, mask,
                    " does not name that lane"));
  if (width == 0 || width > 32 || (width & (width - 1)) || (kind != Exchange::index && argument >= width))
    block.fail(line("the shuffle at ", place(site), ": a distance of ", argument, " lanes in segments of ", width));
  Thread& t = block.current();
  t.kind = kind, t.mask = mask, t.value = value, t.argument = argument, t.width = width;
  block.wait(State::at_exchange, site);
  return block.current().value;
}

}  // namespace sim
#endif
