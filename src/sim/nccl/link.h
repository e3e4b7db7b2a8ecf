// A simulated link: every rank has one port out and one port in, and a message of B bytes occupies the
// sender's port out and the receiver's port in for latency + B/bandwidth. So n-1 messages to one rank take
// n-1 times as long as one: that is the parameter server's bottleneck. The ports' clocks are virtual and lie
// on the board; the receiver books a transfer once both sides are ready and then waits for its end, so late
// polls do not add up.
#pragma once

#include <algorithm>
#include <mutex>

#include "board.h"

namespace sim {

struct Link {
  double gbps = 0, us = 0;
  bool on() const { return gbps > 0 || us > 0; }

  // When a message that both sides are ready for at `ready` has arrived.
  int64_t arrival(Board& board, const Header& header, int to, int64_t ready) const {
    const double ns = (header.piece ? 0 : us * 1e3) + (gbps > 0 ? header.bytes / gbps : 0);
    std::lock_guard guard(board.ports);
    int64_t &out = board.rank[header.from].out_free, &in = board.rank[to].in_free;
    return out = in = std::max({ready, out, in}) + int64_t(ns);
  }
};

}  // namespace sim
