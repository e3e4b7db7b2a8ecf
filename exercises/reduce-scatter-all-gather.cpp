// reduce-scatter-all-gather - the two halves of an all-reduce, on a ring.                              15 minutes
//
//   reduce-scatter: rank r ends with part r of the sum           all-gather: everybody ends with all parts
//     r0 [a0 b0 c0]        [a0+a1+a2]                              [A]        [A B C]
//     r1 [a1 b1 c1]   ->   [b0+b1+b2]                              [B]   ->   [A B C]
//     r2 [a2 b2 c2]        [c0+c1+c2]                              [C]        [A B C]
//
// On a ring both take n-1 steps; in each a rank sends one part (X/n elements) to the next rank and receives one from
// the previous. The last part that reaches rank r must be part r: so rank r first sends part r-1, and then always what
// it has just added to. n divides X. Group::Together makes a send and a receive begin together. x may be overwritten.
// Sent per rank, each: (n-1)/n X.      `chunk(x, i, n)` is part i of n, for any i, also a negative one.
#include "exercises.h"

// out (X/n) on rank r: the sum over ranks of part r of x (X).
void ring_reduce_scatter(Group& group, FloatTensor out, FloatTensor x) {
  const int n = group.size(), r = group.rank(), next = (r + 1) % n, previous = (r + n - 1) % n;
  not_implemented("reduce-scatter-all-gather", 12);  // your lines, in place of this one
}

// out (X) on every rank: all parts, in rank order; `mine` (X/n) is part r.
void ring_all_gather(Group& group, FloatTensor out, FloatTensor mine) {
  const int n = group.size(), r = group.rank(), next = (r + 1) % n, previous = (r + n - 1) % n;
  not_implemented("reduce-scatter-all-gather", 8);  // your lines, in place of this one
}
