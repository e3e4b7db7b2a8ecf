// A call of one rank, as it is written in front of every message, and what it means for two ranks to
// disagree.
#pragma once

#include <time.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#ifdef RINGTRON_NCCL
#include <nccl.h>  // the real one: then this folder only starts the ranks and carries control traffic
#else
#include "../include/nccl.h"
#endif

namespace sim {

enum Op : int32_t { AllReduce, ReduceScatter, AllGather, Broadcast, Reduce, Send, Recv, Split, Join };

inline const char* op_name(int op) {
  static const char* names[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
                                "send",       "recv",           "split",      "join"};
  return names[op];
}

struct Call {
  uint32_t channel = 0;  // the communicator's number, the same on all its ranks
  uint32_t number = 0;   // counts its collectives; its sends and receives count apart (ranks differ in those)
  int32_t op = 0, type = 0, red = 0;
  int32_t root =
      0;  // of broadcast and reduce: rank in the group; of send and recv: the peer's rank in the world
  uint64_t count = 0;  // as the caller passed it
};

struct Header {
  Call call;
  uint64_t bytes = 0;  // of payload that follows
  int64_t posted = 0;  // when the sender was ready (simulated link; CLOCK_MONOTONIC is one clock per machine)
  int32_t from = 0;    // rank in the world
  uint32_t serial = 0;  // counts the messages between two ranks on a channel
  uint32_t piece = 0;   // of a chunk that is sent in pieces; only piece 0 pays the link's latency
  char group[19] = {};  // name, for messages to people
  uint8_t control = 0;  // how the ledger books it
};
static_assert(sizeof(Header) == 80);

inline size_t size_of(int type) { return type <= ncclUint8 ? 1 : type == ncclBfloat16 ? 2 : 4; }

// "all_reduce(1000 float sum)"
inline std::string describe(const Call& c) {
  const char* types[] = {"int8", "uint8", "int32", "", "", "", "", "float", "", "bfloat16"};
  std::string s = op_name(c.op);
  if (c.op == Join || c.op == Split) return s;
  s.append("(").append(std::to_string(c.count)).append(" ").append(types[c.type]);
  if (c.op == AllReduce || c.op == ReduceScatter || c.op == Reduce) s += c.red == ncclMax ? " max" : " sum";
  if (c.op == Broadcast || c.op == Reduce) s += ", root " + std::to_string(c.root);
  if (c.op == Send) s += " to rank " + std::to_string(c.root);
  if (c.op == Recv) s += " from rank " + std::to_string(c.root);
  return s + ")";
}

inline std::string describe(const Header& h) {
  return describe(h.call) + " as call " + std::to_string(h.call.number) + " of group '" + h.group + "'";
}

// What the receiving rank's call expects of a message, against what it says.
inline bool agree(const Call& mine, const Call& theirs) {
  if (mine.count != theirs.count || mine.type != theirs.type) return false;
  if (mine.op == Recv || mine.op == Send) return theirs.op == Send + Recv - mine.op;
  return mine.op == theirs.op && mine.red == theirs.red && mine.root == theirs.root &&
         mine.number == theirs.number;
}

inline std::string disagreement(const Header& a, const Header& b) {
  const Header &low = a.from < b.from ? a : b, &high = a.from < b.from ? b : a;
  const bool pair = (a.call.op == Send || a.call.op == Recv) && (b.call.op == Send || b.call.op == Recv);
  return "ranks disagree: rank " + std::to_string(low.from) + " called " + describe(low) + ", rank " +
         std::to_string(high.from) + " called " + describe(high) +
         (pair ? "; both sides have to name the same count and type"
               : "; all ranks of a group have to make the same calls in the same order");
}

struct CommError : std::runtime_error {
  ncclResult_t code;
  CommError(ncclResult_t code, const std::string& text) : std::runtime_error(text), code(code) {}
};

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

}  // namespace sim
