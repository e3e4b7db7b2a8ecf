// hierarchical-all-reduce - much inside a node, little between nodes.                                  10 minutes
//
//   node 0: r0 r1 r2 r3      fast links inside a node (NVLink), slow ones between nodes
//   node 1: r4 r5 r6 r7
//
//   1  reduce-scatter inside the node      each rank: 1/k of its node's sum
//   2  all-reduce across nodes             [r0 r4] [r1 r5] [r2 r6] [r3 r7]: of that 1/k only
//   3  all-gather inside the node          everybody: the whole sum
//
// `node` holds the k ranks of this node; `across` the M ranks at my place in all nodes. x (X, a multiple of k) becomes
// the sum over all k M ranks. Use the collectives of src/group.h: reduce_scatter(out, in), all_gather(out, in),
// all_reduce(x). Memory: one part, X/k. Sent between nodes per rank: 2 (M-1)/M X/k.
#include "exercises.h"

void hierarchical_all_reduce(Group& node, Group& across, FloatTensor x) {
  FloatBuffer part = node.device().allocate<float>(Memory::communication, {x.numel() / node.size()});
  not_implemented("hierarchical-all-reduce", 3);  // your lines, in place of this one
}
