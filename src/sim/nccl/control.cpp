// What ranks tell each other beside the calls of nccl.h: needed to start those, and for proofs. Apart from nccl.cpp,
// because it also serves where the real NCCL carries the collectives.
#include <numeric>

#include "rank.h"

namespace sim {

Header make_header(Rank& rank, const Call& call, const std::string& group, bool control) {
  Header h;
  h.call = call;
  h.from = rank.id();
  h.control = control;
  snprintf(h.group, sizeof(h.group), "%s", group.c_str());
  return h;
}

void broadcast_bytes(void* data, size_t bytes, int root) {
  auto rank = this_rank();
  Members all;
  all.world.resize(rank->size());
  std::iota(all.world.begin(), all.world.end(), 0);
  all.me = rank->id();
  Call call;
  call.op = Broadcast, call.type = ncclUint8, call.root = root, call.count = bytes;
  call.number = ++rank->bootstraps;
  const Header header = make_header(*rank, call, "bootstrap", true);
  rank->count_call(header);
  std::vector<Batch> batches(1);
  batches[0].stages.emplace_back().push_back(plan(header, all, data, data));
  rank->run(batches);
}

}  // namespace sim
