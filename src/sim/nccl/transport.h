// The seam between the algorithms and what carries their bytes: two calls that start a transfer and one that
// asks whether it is done. Nothing here blocks. transport_threads.cpp and transport_mpi.cpp implement it.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "link.h"
#include "world.h"

namespace sim {

// Wire bytes by group and operation, of one rank.
class Ledger {
 public:
  TrafficRow& row(const Header& h) { return row(h.group, op_name(h.call.op), h.control); }
  void sent(const Header& h) {
    add(row(h), 1, h.bytes, 0);
    add(row("headers", "", false), 1, sizeof(Header), 0);
  }
  void received(const Header& h, const Header& mine) {  // booked under the receiver's own call
    add(row(mine), 0, 0, h.bytes);
    add(row("headers", "", false), 0, 0, sizeof(Header));
  }
  std::vector<TrafficRow> rows;

 private:
  static void add(TrafficRow& r, int64_t messages, int64_t sent, int64_t received) {
    r.messages += messages;
    r.bytes_sent += sent;
    r.bytes_received += received;
  }
  TrafficRow& row(const char* group, const char* operation, bool control) {
    for (auto& r : rows)
      if (r.control == control && r.group == group && r.operation == operation) return r;
    TrafficRow fresh;
    fresh.group = group, fresh.operation = operation, fresh.control = control;
    return rows.emplace_back(fresh);
  }
};

// Buffers for messages that are added to something. Kept, because fresh memory costs a page fault every 4
// KiB.
class Spares {
 public:
  std::vector<char> take(size_t bytes) {
    std::vector<char> buffer;
    if (!free_.empty()) {
      buffer = std::move(free_.back());
      free_.pop_back();
    }
    if (buffer.size() < bytes) buffer = std::vector<char>(bytes);
    return buffer;
  }
  void give(std::vector<char> buffer) {
    if (buffer.size() && free_.size() < 4) free_.push_back(std::move(buffer));
  }

 private:
  std::vector<std::vector<char>> free_;
};

// A transfer in progress. Destroying an unfinished one withdraws it: its buffer is not touched any more.
struct Request {
  virtual ~Request() = default;
};

class Transport {
 public:
  Transport(Board* board, const Link& link, int rank) : board(board), link(link), rank(rank) {}
  virtual ~Transport() = default;
  // Messages from one rank to another on a channel are matched in order. A send is done when the receiver has
  // taken it, however small it is: a program that relies on buffering would hang on NCCL, so it must hang
  // here. Both complete the header (bytes, serial, from, posted).
  virtual std::unique_ptr<Request> isend(int peer, const void* data, size_t bytes, Header header) = 0;
  virtual std::unique_ptr<Request> irecv(int peer, void* data, size_t bytes, Header expected) = 0;
  // Throws CommError if the sender's call does not agree with the receiver's, before any payload is written.
  virtual bool test(Request& request) = 0;
  virtual void idle() {}  // called now and then by a rank that has nothing to wait for

  // Of transfers under way on the simulated link: when the next one arrives; 0 if there is none.
  // Reset by the caller before it tests all requests.
  int64_t next_arrival = 0;

  Board* const board;
  const Link link;
  const int rank;
  Ledger ledger;
  Spares spares;

 protected:
  void check(const Header& mine, const Header& theirs) const {
    if (!agree(mine.call, theirs.call) || mine.bytes != theirs.bytes)
      throw CommError(ncclInvalidUsage, disagreement(mine, theirs));
  }
  // True once a message has passed the link; `arrival` is the request's own and starts at 0.
  bool arrived(int64_t& arrival, const Header& theirs, const Header& mine) {
    if (!link.on()) return true;
    if (!arrival) arrival = link.arrival(*board, theirs, rank, std::max(theirs.posted, mine.posted));
    if (now_ns() >= arrival) return true;
    if (!next_arrival || arrival < next_arrival) next_arrival = arrival;
    return false;
  }
  Header complete(Header h, size_t bytes) const {
    h.bytes = bytes;
    h.from = rank;
    h.posted = link.on() ? now_ns() : 0;
    return h;
  }
};

struct Hub;  // where the threads of one world meet
std::shared_ptr<Hub> make_hub(int size);
std::unique_ptr<Transport> threads_transport(std::shared_ptr<Hub>, Board*, const Link&, int rank);
std::unique_ptr<Transport> mpi_transport(Board*, const Link&, int rank);  // only with HAVE_MPI

}  // namespace sim
