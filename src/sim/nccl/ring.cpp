#include "ring.h"

#include <algorithm>
#include <cstring>

namespace sim {

namespace {

// A chunk travels in pieces, so that while one is added up the next is on its way, and so that a piece is
// still in the cache when it is added and sent on: halves of a chunk, of at most 1 MiB. Measured with 4 ranks on
// 2 cores: at 4 MB (chunks of 1 MB) halves are 1.15 times as fast as whole chunks; at 64 MB pieces of 1 MiB are
// 1.3 times as fast as whole chunks, and as pieces of 128 KiB. Both ends cut alike, because they agree on the count.
constexpr size_t kSmallestPiece = 64 << 10, kLargestPiece = 1 << 20;  // bytes
constexpr size_t kSendWindow = 4;          // transfers posted at once
constexpr size_t kMessageBytes = 1 << 30;  // MPI counts bytes in an int

float to_float(uint16_t b) {
  uint32_t u = uint32_t(b) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
uint16_t to_bfloat16(float f) {  // to nearest, ties to even
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return uint16_t(u >> 16 | 0x40);
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Spelled out for each, so that the compiler vectorizes them. NaN wins a maximum, from either side.
template <typename T>
void combine(T* to, const T* mine, const T* in, size_t n, bool max) {
  if (max)
    for (size_t i = 0; i < n; i++) to[i] = mine[i] > in[i] || mine[i] != mine[i] ? mine[i] : in[i];
  else if constexpr (std::is_same_v<T, int32_t>)
    for (size_t i = 0; i < n; i++)
      to[i] = int32_t(uint32_t(mine[i]) + uint32_t(in[i]));  // wraps, as on a GPU
  else
    for (size_t i = 0; i < n; i++) to[i] = mine[i] + in[i];
}
// Added in float, but rounded to bfloat16 at every hop, because what travels is bfloat16: with n ranks a sum
// is rounded n-1 times, where a reduction in float would round once. Reduce in float where that matters.
void combine(uint16_t* to, const uint16_t* mine, const uint16_t* in, size_t n, bool max) {
  for (size_t i = 0; i < n; i++) {
    const float a = to_float(mine[i]), b = to_float(in[i]);
    to[i] = max ? (a > b || a != a ? mine[i] : in[i]) : to_bfloat16(a + b);
  }
}

void combine(const Call& call, char* to, const char* mine, const char* in, size_t n) {
  const bool max = call.red == ncclMax;
  auto as = [&]<typename T>(T) { combine((T*)to, (const T*)mine, (const T*)in, n, max); };
  if (call.type == ncclFloat) as(float());
  if (call.type == ncclInt32) as(int32_t());
  if (call.type == ncclBfloat16) as(uint16_t());
}

}  // namespace

bool Lane::advance(Transport& transport) {
  bool moved = false;
  const size_t size = size_of(header.call.type);
  for (auto& c : copies)
    if (c.bytes) memmove(c.to, c.from, c.bytes);
  moved |= !copies.empty();
  copies.clear();
  for (; posted_receives_ < receives.size() && posted_receives_ < received_ + kReceiveWindow;
       posted_receives_++) {
    const Move& m = receives[posted_receives_];
    if (sent_ < m.after) break;
    header.piece = m.piece;
    auto& beside = landing_[posted_receives_ % kReceiveWindow];
    if (m.mine && beside.empty()) beside = transport.spares.take(landing_bytes);
    receiving_.push_back(transport.irecv(m.peer, m.mine ? beside.data() : m.at, m.count * size, header));
    moved = true;
  }
  while (!receiving_.empty() && transport.test(*receiving_.front())) {
    receiving_.pop_front();
    const Move& m = receives[received_];
    if (m.mine) combine(header.call, m.at, m.mine, landing_[received_ % kReceiveWindow].data(), m.count);
    received_++;
    moved = true;
  }
  for (; posted_sends_ < sends.size() && posted_sends_ < sent_ + kSendWindow; posted_sends_++) {
    const Move& m = sends[posted_sends_];
    if (received_ < m.after) break;
    header.piece = m.piece;
    sending_.push_back(transport.isend(m.peer, m.at, m.count * size, header));
    moved = true;
  }
  while (!sending_.empty() && transport.test(*sending_.front())) {
    sending_.pop_front();
    sent_++;
    moved = true;
  }
  if (moved && done())
    for (auto& buffer : landing_) transport.spares.give(std::move(buffer));
  return moved;
}

void Lane::show(Board& board, int rank) const {
  const size_t all = sends.size() + receives.size(), finished = sent_ + received_;
  if (!receiving_.empty())
    board.show(rank, Receiving, header, receives[received_].peer, finished, all);
  else if (!sending_.empty())
    board.show(rank, Sending, header, sends[sent_].peer, finished, all);
  else
    board.show(rank, Running, header, -1, finished, all);
}

bool Lane::waits_for(int peer) const {
  return (!receiving_.empty() && receives[received_].peer == peer) ||
         (!sending_.empty() && sends[sent_].peer == peer);
}

namespace {

// Builds the lists of a lane. Offsets and lengths are in elements.
struct Planner {
  Lane lane;
  const Members& members;
  const size_t size = size_of(lane.header.call.type);
  const int n = members.size(), r = members.me;

  // Elements of a piece of a chunk of `count`.
  size_t piece(size_t count) const { return std::clamp((count + 1) / 2, kSmallestPiece / size, kLargestPiece / size); }

  static constexpr size_t kNever = ~size_t(0);

  // `after`: the first of the receives that bring these pieces, one each.
  void send(int to, const char* at, size_t count, size_t after = kNever) {
    cut(count, piece(count), [&](size_t first, size_t length, uint32_t i) {
      const size_t wait = after == kNever ? 0 : after + i + 1;
      lane.sends.push_back({members.world[mod(to)], (char*)at + first * size, nullptr, length, wait, i});
    });
  }
  // `after`: the first of the sends that must have left, one a piece, before `at` is overwritten.
  void receive(int from, char* at, const char* mine, size_t count, size_t after = kNever) {
    cut(count, piece(count), [&](size_t first, size_t length, uint32_t i) {
      const size_t wait = after == kNever ? 0 : after + i + 1;
      const char* add = mine ? mine + first * size : nullptr;
      lane.receives.push_back({members.world[mod(from)], at + first * size, add, length, wait, i});
      if (mine) lane.landing_bytes = std::max(lane.landing_bytes, length * size);
    });
  }
  template <typename F>
  static void cut(size_t count, size_t piece, F use) {
    size_t first = 0;
    uint32_t i = 0;
    do {  // an empty chunk is a message too: its header is checked
      const size_t length = std::min(piece, count - first);
      use(first, length, i++);
      first += length;
    } while (first < count);
  }
  char* new_scratch(size_t count) {
    lane.scratch.emplace_back(new char[count * size]);
    return lane.scratch.back().get();
  }
  void copy(const char* from, char* to, size_t count) {
    if (from != to && count) lane.copies.push_back({from, to, count * size});
  }
  int mod(int i) const { return ((i % n) + n) % n; }

  // Chunk i of X elements has X/n + (i < X mod n) of them, so nothing must divide.
  size_t chunk(int i, size_t x) const { return x / n + (size_t(mod(i)) < x % n); }
  size_t start(int i, size_t x) const { return x / n * mod(i) + std::min<size_t>(mod(i), x % n); }

  // 2(n-1) steps. Reduce-scatter step k: send chunk r-k, receive chunk r-k-1 and add. Now chunk r+1 is
  // complete here. All-gather step k: send chunk r+1-k, receive chunk r-k.
  void all_reduce(const char* send_at, char* recv_at, size_t x) {
    if (n == 1) return copy(send_at, recv_at, x);
    std::vector<size_t> sent;
    size_t came = kNever;  // the first receive of the step before, whose chunk this step sends
    for (int k = 0; k < n - 1; k++) {
      const int out = r - k, in = r - k - 1;
      sent.push_back(lane.sends.size());
      send(r + 1, (k == 0 ? send_at : recv_at) + start(out, x) * size, chunk(out, x), came);
      came = lane.receives.size();
      receive(r - 1, recv_at + start(in, x) * size, send_at + start(in, x) * size, chunk(in, x));
    }
    for (int k = 0; k < n - 1; k++) {
      const int out = r + 1 - k, in = r - k;
      send(r + 1, recv_at + start(out, x) * size, chunk(out, x), came);
      came = lane.receives.size();
      receive(r - 1, recv_at + start(in, x) * size, nullptr, chunk(in, x), sent[k]);
    }
  }

  // Step k: send the partial sum of chunk r-k-1, receive that of chunk r-k-2 and add; the last is chunk r.
  // The caller's send buffer must stay, so partial sums live in two buffers in turn.
  void reduce_scatter(const char* send_at, char* recv_at, size_t c) {
    if (n == 1) return copy(send_at, recv_at, c);
    char* partial[2] = {};
    std::vector<size_t> sent;
    size_t came = kNever;
    for (int k = 0; k < n - 1; k++) {
      const int out = mod(r - k - 1), in = mod(r - k - 2);
      sent.push_back(lane.sends.size());
      send(r + 1, k == 0 ? send_at + out * c * size : partial[(k - 1) % 2], c, came);
      came = lane.receives.size();
      if (k < n - 2 && k < 2) partial[k] = new_scratch(c);
      receive(r - 1, k < n - 2 ? partial[k % 2] : recv_at, send_at + in * c * size, c,
              k >= 2 && k < n - 2 ? sent[k - 1] : kNever);
    }
  }

  // Step k: send chunk r-k, receive chunk r-k-1.
  void all_gather(const char* send_at, char* recv_at, size_t c) {
    copy(send_at, recv_at + r * c * size, c);
    size_t came = kNever;
    for (int k = 0; k < n - 1; k++) {
      send(r + 1, k == 0 ? send_at : recv_at + mod(r - k) * c * size, c, came);
      came = lane.receives.size();
      receive(r - 1, recv_at + mod(r - k - 1) * c * size, nullptr, c);
    }
  }

  // A chain: root, root+1, ..., root-1. The last sends nothing.
  void broadcast(const char* send_at, char* recv_at, size_t x, int root) {
    const int place = mod(r - root);
    if (place == 0) copy(send_at, recv_at, x);
    if (place > 0) receive(r - 1, recv_at, nullptr, x);
    if (place < n - 1) send(r + 1, place == 0 ? send_at : recv_at, x, place == 0 ? kNever : 0);
  }

  // A chain: root+1, root+2, ..., root. The root sends nothing; those between keep no more than a few pieces.
  void reduce(const char* send_at, char* recv_at, size_t x, int root) {
    if (n == 1) return copy(send_at, recv_at, x);
    const int place = mod(r - root - 1);
    if (place == 0) return send(r + 1, send_at, x);
    if (place == n - 1) return receive(r - 1, recv_at, send_at, x);
    const size_t slot = std::min(x, piece(x));
    char* partial = new_scratch(kSendWindow * slot);
    receive(r - 1, partial, send_at, x);
    send(r + 1, partial, x, 0);
    for (size_t i = 0; i < lane.sends.size(); i++) {
      lane.sends[i].at = lane.receives[i].at = partial + i % kSendWindow * slot * size;
      if (i >= kSendWindow) lane.receives[i].after = i - kSendWindow + 1;
    }
  }

  void point_to_point(bool sending, char* at, size_t x, int peer) {
    cut(x, kMessageBytes / size, [&](size_t first, size_t length, uint32_t i) {
      (sending ? lane.sends : lane.receives).push_back({peer, at + first * size, nullptr, length, 0, i});
    });
  }
};

}  // namespace

Lane plan(const Header& header, const Members& members, const void* send, void* recv) {
  Planner p{Lane(header), members};
  const Call& c = header.call;
  const char* from = static_cast<const char*>(send);
  char* to = static_cast<char*>(recv);
  switch (c.op) {
    case AllReduce:
      p.all_reduce(from, to, c.count);
      break;
    case ReduceScatter:
      p.reduce_scatter(from, to, c.count);
      break;
    case AllGather:
    case Split:
    case Join:
      p.all_gather(from, to, c.count);
      break;
    case Broadcast:
      p.broadcast(from, to, c.count, c.root);
      break;
    case Reduce:
      p.reduce(from, to, c.count, c.root);
      break;
    case Send:
      p.point_to_point(true, const_cast<char*>(from), c.count, c.root);
      break;
    case Recv:
      p.point_to_point(false, to, c.count, c.root);
      break;
  }
  return std::move(p.lane);
}

}  // namespace sim
