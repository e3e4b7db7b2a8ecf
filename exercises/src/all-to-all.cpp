// all-to-all - everybody has something for everybody.                                                  10 minutes
//
//     r0 [00 01 02]         r0 [00 10 20]
//     r1 [10 11 12]   ->    r1 [01 11 21]        the transpose of a matrix whose rows lie on ranks
//     r2 [20 21 22]         r2 [02 12 22]
//
// Block i of rank r's `in` becomes block r of rank i's `out`. Experts get their tokens this way, Ulysses its heads.
// n divides the size of `in`; chunk(x, i, n) is block i. A message to oneself is allowed, and is no traffic. All ranks
// send at once: what must begin together goes between the start and the end of one Group::Together.
// Sent per rank: (n-1)/n X.
#include "exercises.h"

void all_to_all(Group& group, FloatTensor out, FloatTensor in) {
  const int n = group.size();
  //! hole 5
  Group::Together together;
  //~ alone:
  //~ says: put all sends and receives into one Group::Together
  for (int peer = 0; peer < n; ++peer) {
    //~ skip-self: for (int peer = 0; peer < n; ++peer) if (peer != group.rank()) {
    //~ says: the block for yourself
    group.send(chunk(in, peer, n), peer);
    //~ same-block: group.send(chunk(in, group.rank(), n), peer);
    //~ says: each peer gets a block of its own
    //~ everything: group.send(in, peer);
    //~ says: send a block, not the whole tensor
    group.receive(chunk(out, peer, n), peer);
    //~ to-mine: group.receive(chunk(out, group.rank(), n), peer);
    //~ says: every peer's block went into the same place
    //~ reversed: group.receive(chunk(out, n - 1 - peer, n), peer);
    //~ says: the block from rank i is block i of out
  }
  //! end
}
//? hint 1: Look at one rank of the picture: to how many others does it send, and where does what rank 2 sent it lie?
//? hint 2: For every peer: send block `peer` of in to it, receive block `peer` of out from it. All of them together.
//? hint 3: Group::Together together; for (int peer = 0; peer < n; ++peer) { group.send(chunk(in, peer, n), peer); ...
//? why: No ring here: each block has one destination, so a rank sends (n-1)/n of what it has, once. An MoE layer does
//?      this twice forward and twice backward.
//? asked: K1 and A9: expert parallelism: why all-to-all, how many per layer? (讲清专家并行流程：为什么要 All-to-All？每层几次？)
