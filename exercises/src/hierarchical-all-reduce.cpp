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
  //! hole 3
  node.reduce_scatter<float>(part, x);
  across.all_reduce<float>(part);
  //~ no-across:
  //~ says: nothing crosses between the nodes
  //~ sum-all: across.all_reduce<float>(x), node.reduce_scatter<float>(part, x);
  //~ says: k times too much between the nodes
  //~ inside: node.all_reduce<float>(part);
  //~ says: across the nodes, not inside the node
  //~ twice: across.all_reduce<float>(part), across.all_reduce<float>(part);
  //~ says: summed over the nodes twice
  node.all_gather<float>(x, part);
  //~ no-gather:
  //~ says: the all-gather is missing
  //~ reduce-again: node.all_gather<float>(x, part), node.all_reduce<float>(x);
  //~ says: k times the sum
  //! end
}
//? hint 1: After the first step each rank of a node holds another part. With whom must it still be summed?
//? hint 2: reduce_scatter in node (X), all_reduce in across (X/k), all_gather in node (X).
//? hint 3: node.reduce_scatter<float>(part, x);
//? why: The slow link carries 2 (M-1)/M X/k per rank instead of about 2 X: with 8 GPUs a node, an eighth. All k network
//?      cards of a node work at the same time.
//? asked: A11: hierarchical all-reduce: bytes per GPU between nodes, against a flat ring? (M 机 g 卡分层 AllReduce 的跨机单卡流量？与平铺 ring 比？)
