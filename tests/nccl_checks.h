// Checks of the NCCL calls that every rank runs, whether it is a thread (test_nccl.cpp) or a process
// (mpi_nccl.cpp). They collect what is wrong as text, because doctest's macros do not belong on rank threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../src/sim/nccl/world.h"

namespace nccl_checks {

using Problems = std::vector<std::string>;

inline void ok(ncclResult_t result) {
  if (result != ncclSuccess) throw std::runtime_error(ncclGetLastError(nullptr));
}

inline ncclComm_t world_comm(const std::string& name = "world") {
  ncclUniqueId id{};
  if (sim::world_rank() == 0) ok(ncclGetUniqueId(&id));
  sim::broadcast_bytes(&id, sizeof(id), 0);
  ncclComm_t comm;
  ok(ncclCommInitRank(&comm, sim::world_size(), id, sim::world_rank()));
  sim::name_comm(comm, name);
  return comm;
}

// Small integers, which every type here holds exactly, even summed over 8 ranks; different for each rank and
// place.
inline int value(int rank, size_t i) { return int((rank * 7 + i * 3 + i / 11) % 13) - 4; }

// A buffer of any type with guards behind it, read and written as integers.
class Buffer {
 public:
  Buffer(ncclDataType_t type, size_t count)
      : type_(type), count_(count), data_((count + 4) * 4, char(0x55)) {}
  void* at(size_t i) { return data_.data() + i * size(); }
  size_t size() const { return type_ <= ncclUint8 ? 1 : type_ == ncclBfloat16 ? 2 : 4; }
  void set(size_t i, int v) {
    float f = float(v);
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint16_t b = uint16_t(u >> 16);
    const char c = char(v);
    const void* from = &v;
    if (type_ == ncclFloat) from = &f;
    if (type_ == ncclBfloat16) from = &b;
    if (size() == 1) from = &c;
    memcpy(at(i), from, size());
  }
  bool is(size_t i, int v) {
    Buffer other(type_, 1);
    other.set(0, v);
    return memcmp(at(i), other.at(0), size()) == 0;
  }
  bool guarded() {
    for (size_t i = count_ * size(); i < data_.size(); i++)
      if (data_[i] != 0x55) return false;
    return true;
  }

 private:
  ncclDataType_t type_;
  size_t count_;
  std::vector<char> data_;
};

inline sim::TrafficRow row(const std::string& group, const std::string& operation) {
  for (auto& r : sim::traffic())
    if (r.group == group && r.operation == operation && !r.control) return r;
  return {};
}

// Every collective with this count, type, operation; every root; in place and not. Values exactly, bytes
// exactly.
inline void check_collectives(ncclComm_t comm, size_t x, ncclDataType_t type, ncclRedOp_t op,
                              Problems& problems) {
  int n, me;
  ok(ncclCommCount(comm, &n));
  ok(ncclCommUserRank(comm, &me));
  const bool reduces = type != ncclInt8 && type != ncclUint8;
  const int64_t size = int64_t(Buffer(type, 0).size());
  auto reduced = [&](size_t i) {
    int v = value(0, i);
    for (int r = 1; r < n; r++) v = op == ncclSum ? v + value(r, i) : std::max(v, value(r, i));
    return v;
  };
  auto chunk = [&](int i) { return int64_t(x / n + (size_t((i % n + n) % n) < x % n)); };
  auto bytes = [&](const std::string& what, int64_t sent, int64_t received) {
    const auto r = row("world", what);
    if (r.bytes_sent != sent * size || r.bytes_received != received * size || r.calls != 1)
      problems.push_back(what + " of " + std::to_string(x) + " on rank " + std::to_string(me) + " of " +
                         std::to_string(n) + ": sent " + std::to_string(r.bytes_sent) + " bytes, received " +
                         std::to_string(r.bytes_received) + " in " + std::to_string(r.calls) + " calls");
    sim::reset_traffic();
  };
  auto expect = [&](const std::string& what, Buffer& b, size_t first, size_t count, auto want) {
    for (size_t i = 0; i < count; i++)
      if (!b.is(first + i, want(i))) {
        problems.push_back(what + ": rank " + std::to_string(me) + " of " + std::to_string(n) + ", " +
                           std::to_string(x) + " of type " + std::to_string(type) + ": element " +
                           std::to_string(i) + " is wrong");
        return;
      }
    if (!b.guarded()) problems.push_back(what + " wrote behind its buffer");
  };
  sim::reset_traffic();
  const int64_t X = int64_t(x);
  for (bool in_place : {false, true}) {
    if (reduces) {
      Buffer in(type, x), out(type, x);
      for (size_t i = 0; i < x; i++) (in_place ? out : in).set(i, value(me, i));
      ok(ncclAllReduce(in_place ? out.at(0) : in.at(0), out.at(0), x, type, op, comm, nullptr));
      expect("all_reduce", out, 0, x, reduced);
      if (!in_place) expect("all_reduce's input", in, 0, x, [&](size_t i) { return value(me, i); });
      if (n == 1)
        bytes("all_reduce", 0, 0);
      else
        bytes("all_reduce", 2 * X - chunk(me + 1) - chunk(me + 2), 2 * X - chunk(me) - chunk(me + 1));
    }
    if (reduces) {
      Buffer in(type, x * n), out(type, x);
      for (size_t i = 0; i < x * n; i++) in.set(i, value(me, i));
      ok(ncclReduceScatter(in.at(0), in_place ? in.at(me * x) : out.at(0), x, type, op, comm, nullptr));
      expect("reduce_scatter", in_place ? in : out, in_place ? me * x : 0, x,
             [&](size_t i) { return reduced(me * x + i); });
      if (!in_place) expect("reduce_scatter's input", in, 0, x * n, [&](size_t i) { return value(me, i); });
      bytes("reduce_scatter", (n - 1) * X, (n - 1) * X);
    }
    {
      Buffer in(type, x), out(type, x * n);
      for (size_t i = 0; i < x; i++) in_place ? out.set(me * x + i, value(me, i)) : in.set(i, value(me, i));
      ok(ncclAllGather(in_place ? out.at(me * x) : in.at(0), out.at(0), x, type, comm, nullptr));
      expect("all_gather", out, 0, x * n, [&](size_t i) { return value(int(i / x), i % x); });
      bytes("all_gather", (n - 1) * X, (n - 1) * X);
    }
    for (int root = 0; root < n; root++) {
      Buffer in(type, x), out(type, x);
      for (size_t i = 0; i < x; i++) (in_place ? out : in).set(i, value(me, i));
      ok(ncclBroadcast(in_place ? out.at(0) : in.at(0), out.at(0), x, type, root, comm, nullptr));
      expect("broadcast", out, 0, x, [&](size_t i) { return value(root, i); });
      bytes("broadcast", (me + 1) % n == root ? 0 : X, me == root ? 0 : X);
      if (!reduces) continue;
      Buffer sum(type, x);
      for (size_t i = 0; i < x; i++) (in_place ? sum : in).set(i, value(me, i));
      ok(ncclReduce(in_place ? sum.at(0) : in.at(0), sum.at(0), x, type, op, root, comm, nullptr));
      if (me == root) expect("reduce", sum, 0, x, reduced);
      bytes("reduce", me == root ? 0 : X, (root + 1) % n == me ? 0 : X);
    }
  }
}

// Grouped send and receive: block r of mine goes to rank r, uneven and also to myself.
inline void check_all_to_all(ncclComm_t comm, Problems& problems) {
  int n, me;
  ok(ncclCommCount(comm, &n));
  ok(ncclCommUserRank(comm, &me));
  auto length = [](int from, int to) { return size_t(from * 3 + to * 5) % 7 * 100; };
  std::vector<std::vector<float>> out(n), in(n);
  sim::reset_traffic();
  int64_t sent = 0;
  ok(ncclGroupStart());
  for (int r = 0; r < n; r++) {
    out[r].assign(length(me, r), float(me * 100 + r));
    in[r].assign(length(r, me), -1);
    if (r != me) sent += int64_t(out[r].size() * 4);
    ok(ncclSend(out[r].data(), out[r].size(), ncclFloat, r, comm, nullptr));
    ok(ncclRecv(in[r].data(), in[r].size(), ncclFloat, r, comm, nullptr));
  }
  ok(ncclGroupEnd());
  for (int r = 0; r < n; r++)
    for (float v : in[r])
      if (v != float(r * 100 + me)) problems.push_back("all-to-all: wrong value from " + std::to_string(r));
  if (row("world", "send").bytes_sent != sent) problems.push_back("all-to-all: bytes sent");
  // Both neighbours; the same rank twice if n is 2, and then in order.
  std::vector<int> right(3, me * 2), left(3, me * 2 + 1), from_left(3), from_right(3);
  ok(ncclGroupStart());
  ok(ncclSend(right.data(), 3, ncclInt32, (me + 1) % n, comm, nullptr));
  ok(ncclSend(left.data(), 3, ncclInt32, (me + n - 1) % n, comm, nullptr));
  ok(ncclRecv(from_left.data(), 3, ncclInt32, (me + n - 1) % n, comm, nullptr));
  ok(ncclRecv(from_right.data(), 3, ncclInt32, (me + 1) % n, comm, nullptr));
  ok(ncclGroupEnd());
  if (from_left[2] != (me + n - 1) % n * 2 || from_right[2] != (me + 1) % n * 2 + 1)
    problems.push_back("neighbours: crossed");
}

inline void check_split(ncclComm_t comm, Problems& problems) {
  int n, me;
  ok(ncclCommCount(comm, &n));
  ok(ncclCommUserRank(comm, &me));
  for (int colors = 1; colors <= n; colors++) {
    // Reversed by the key; the last rank stays out when there are several colors.
    const bool out = colors > 1 && me == n - 1;
    ncclComm_t part;
    ok(ncclCommSplit(comm, out ? NCCL_SPLIT_NOCOLOR : me % colors, -me, &part, nullptr));
    if (out != (part == nullptr)) problems.push_back("split: wrong membership");
    if (!part) continue;
    std::vector<int> members;
    for (int r = n - 1; r >= 0; r--)
      if (r % colors == me % colors && !(colors > 1 && r == n - 1)) members.push_back(r);
    int size, rank;
    ok(ncclCommCount(part, &size));
    ok(ncclCommUserRank(part, &rank));
    if (size != int(members.size()) || members[rank] != me) problems.push_back("split: wrong rank or size");
    std::vector<int> all(size, -1);
    ok(ncclAllGather(&me, all.data(), 1, ncclInt32, part, nullptr));
    if (all != members) problems.push_back("split: wrong order");
    ok(ncclCommDestroy(part));
  }
}

// Two communicators on two streams and one on stream 0, all in progress at once; calls of one communicator
// that change streams stay in order.
inline void check_streams(ncclComm_t comm, Problems& problems) {
  int n, me;
  ok(ncclCommCount(comm, &n));
  ok(ncclCommUserRank(comm, &me));
  ncclComm_t a, b;
  ok(ncclCommSplit(comm, 0, me, &a, nullptr));
  ok(ncclCommSplit(comm, 0, n - me, &b, nullptr));
  cudaStream_t s, t;
  cudaStreamCreate(&s);
  cudaStreamCreate(&t);
  std::vector<float> x(50000, 1), y(30000, 2), z(1000, 3);
  for (int i = 0; i < 4; i++) {
    ok(ncclAllReduce(x.data(), x.data(), x.size(), ncclFloat, ncclMax, a, s));
    ok(ncclAllReduce(y.data(), y.data(), y.size(), ncclFloat, ncclSum, b, t));
    ok(ncclAllReduce(z.data(), z.data(), z.size(), ncclFloat, ncclMax, comm, nullptr));
    ok(ncclBroadcast(x.data(), x.data(), 10, ncclFloat, 0, a, t));
  }
  if (cudaStreamSynchronize(s) || cudaStreamSynchronize(t)) problems.push_back("streams: error");
  float want = 2;
  for (int i = 0; i < 4; i++) want *= float(n);
  if (x[49999] != 1 || y[29999] != want || z[999] != 3) problems.push_back("streams: wrong values");
  cudaStreamDestroy(s);
  cudaStreamDestroy(t);
  ok(ncclCommDestroy(a));
  ok(ncclCommDestroy(b));
}

// Everything above, at this world's size. `quick` leaves out most combinations.
inline Problems check_all(bool quick) {
  Problems problems;
  const size_t n = size_t(sim::world_size());
  ncclComm_t comm = world_comm();
  for (size_t x : {size_t(0), size_t(1), n - 1, n, n + 1, size_t(1000), size_t(100003)})
    for (auto type : {ncclFloat, ncclBfloat16, ncclInt32, ncclInt8, ncclUint8})
      for (auto op : {ncclSum, ncclMax})
        if (!quick || x < 1001 || (type == ncclFloat && op == ncclSum))
          check_collectives(comm, x, type, op, problems);
  if (n <= 3) check_collectives(comm, 1500007, ncclFloat, ncclSum, problems);  // many pieces
  check_all_to_all(comm, problems);
  check_split(comm, problems);
  check_streams(comm, problems);
  ok(ncclCommDestroy(comm));
  return problems;
}

}  // namespace nccl_checks
