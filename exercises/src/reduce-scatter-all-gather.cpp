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
  //! hole 12
  for (int k = 0; k < n - 1; ++k) {
    //~ long: for (int k = 0; k < n; ++k) {
    //~ says: n-1 steps
    FloatTensor going = chunk(x, r - 1 - k, n), mine = chunk(x, r - 2 - k, n);
    //~ shifted: FloatTensor going = chunk(x, r - k, n), mine = chunk(x, r - 1 - k, n);
    //~ says: rank r must end with part r
    //~ same: FloatTensor going = chunk(x, r - 1, n), mine = chunk(x, r - 2 - k, n);
    //~ says: send on what you have just added to
    {
      Group::Together together;
      //~ alone: ;
      //~ says: every rank waits in its send
      group.send(going, next);
      group.receive(out, previous);
    }
    for (int64_t i = 0; i < out.numel(); ++i) mine.data[i] += out.data[i];
    //~ overwrite: for (int64_t i = 0; i < out.numel(); ++i) mine.data[i] = out.data[i];
    //~ says: add what arrives
  }
  FloatTensor mine = chunk(x, r, n);
  for (int64_t i = 0; i < out.numel(); ++i) out.data[i] = mine.data[i];
  //! end
}

// out (X) on every rank: all parts, in rank order; `mine` (X/n) is part r.
void ring_all_gather(Group& group, FloatTensor out, FloatTensor mine) {
  const int n = group.size(), r = group.rank(), next = (r + 1) % n, previous = (r + n - 1) % n;
  //! hole 8
  for (int64_t i = 0; i < mine.numel(); ++i) chunk(out, r, n).data[i] = mine.data[i];
  //~ not-mine:
  //~ says: a rank's own part does not travel
  for (int k = 0; k < n - 1; ++k) {
    Group::Together together;
    group.send(chunk(out, r - k, n), next);
    //~ own-again: group.send(chunk(out, r, n), next);
    //~ says: pass on the part that has just arrived
    group.receive(chunk(out, r - k - 1, n), previous);
  }
  //! end
}
//? hint 1: Reduce-scatter: which part must rank r receive in the last step, and who added to it before?
//? hint 2: Reduce-scatter, step k: send part r-1-k, receive and add part r-2-k. All-gather, step k: send part r-k,
//?         receive part r-k-1.
//? hint 3: for (int k = 0; k < n - 1; ++k) { FloatTensor going = chunk(x, r - 1 - k, n), mine = chunk(x, r - 2 - k, n);
//? why: All-reduce = reduce-scatter + all-gather, in result and in bytes. That is why ZeRO-1 and Megatron's sequence
//?      parallelism cost no more than what they replace: they only stop in the middle.
//? asked: A4 and A7: why is all-reduce = reduce-scatter + all-gather; which chunk at step k? (为什么 AllReduce=ReduceScatter+AllGather？第 k 步收发哪一块？)
