// ring-all-reduce - everybody gets the sum, and no link carries more than any other.                   20 minutes
//
//   reduce-scatter, n-1 steps: in step k rank r sends chunk r-k to rank r+1, and adds chunk r-k-1, which arrives
//     r0 [a0 b0 c0]    r1 [a1 b1 c1]    r2 [a2 b2 c2]                        (chunk numbers and ranks modulo n)
//   k=0: a0 -> r1       b1 -> r2         c2 -> r0
//   k=1: c0+c2 -> r1    a0+a1 -> r2      b1+b2 -> r0        now rank r holds the whole sum of chunk r+1
//   all-gather, n-1 steps: in step k rank r sends chunk r+1-k, and takes chunk r-k as it is
//
// x (X elements, in place) becomes the sum over all ranks, on every rank. Use only
//   group.send(tensor, peer), group.receive(tensor, peer), and Group::Together: calls between its start and its end
//   begin together, so that a send and a receive that wait for each other do not wait for ever;
//   chunk(x, i, n) of exercises.h: chunk i of n, for any i. Chunks differ by an element where n does not divide X, and
//   are empty where X < n: send and receive those too, it costs nothing.
// Elements are x.data[i]: device memory is the CPU's here, and what a Group::Together began is done at its end.
// Extra memory: one chunk. Sent by rank r: 2X - |c(r+1)| - |c(r+2)| elements, about 2 (n-1)/n X.
#include "exercises.h"

void ring_all_reduce(Group& group, FloatTensor x) {
  const int n = group.size(), r = group.rank(), next = (r + 1) % n, previous = (r + n - 1) % n;
  if (n == 1) return;
  //~ root: if (n == 1) { return; } if (r) { group.send(x, 0); group.receive(x, 0); return; } else { FloatBuffer all = group.device().allocate<float>(Memory::communication, {x.numel()}); for (int p = 1; p < n; ++p) { group.receive<float>(all, p); for (int64_t i = 0; i < x.numel(); ++i) x.data[i] += all.data[i]; } for (int p = 1; p < n; ++p) { group.send(x, p); } return; }
  //~ says: everything goes through rank 0
  FloatBuffer arrived = group.device().allocate<float>(Memory::communication, {chunk(x, 0, n).numel()});  // a largest one
  //~ whole-buffer: FloatBuffer arrived = group.device().allocate<float>(Memory::communication, {x.numel()});
  //~ says: a buffer of one chunk is enough
  //! hole 16
  auto exchange = [&](FloatTensor out, FloatTensor in) {  // to the next, from the previous
    Group::Together together;
    //~ alone: ;
    //~ says: every rank waits in its send
    group.send(out, next);
    //~ backwards: group.send(out, previous);
    //~ says: send to the next rank and receive from the previous one
    group.receive(in, previous);
  };
  for (int k = 0; k < n - 1; ++k) {  // reduce-scatter
    //~ short: for (int k = 0; k < n - 2; ++k) {
    //~ says: one step of the reduce-scatter is missing
    //~ long: for (int k = 0; k < n; ++k) {
    //~ says: reduce-scatter takes n-1 steps
    FloatTensor mine = chunk(x, r - k - 1, n), theirs(arrived.data, {mine.numel()});
    exchange(chunk(x, r - k, n), theirs);
    //~ whole: exchange(chunk(x, r, n), theirs);
    //~ says: chunk r-k, the one that has just been added to
    for (int64_t i = 0; i < mine.numel(); ++i) mine.data[i] += theirs.data[i];
    //~ overwrite: for (int64_t i = 0; i < mine.numel(); ++i) mine.data[i] = theirs.data[i];
    //~ says: add what arrives
  }
  for (int k = 0; k < n - 1; ++k)    // all-gather
    exchange(chunk(x, r + 1 - k, n), chunk(x, r - k, n));
    //~ two-only: exchange(chunk(x, r + 1 + k, n), chunk(x, r + k, n));
    //~ says: right with 2 ranks, wrong with 3
    //~ no-gather: ;
    //~ says: the all-gather is missing
    //~ own: exchange(chunk(x, r, n), chunk(x, r - 1, n));
    //~ says: rank r holds the whole sum of chunk r+1
    //~ everything: for (int64_t i = 0; i < n; ++i) exchange(chunk(x, r + 1 - k, n), chunk(x, r - k, n));
    //~ says: each chunk travels once
  //! end
}
//? hint 1: After step k of the reduce-scatter, of which chunk does rank r hold the sum of k+2 ranks? That is what it
//?         must send in step k+1.
//? hint 2: Step k: send chunk r-k, receive chunk r-k-1 and add it. Then: send chunk r+1-k, receive chunk r-k as it is.
//?         Both n-1 times, each send together with its receive.
//? hint 3: for (int k = 0; k < n - 1; ++k) { Group::Together together; group.send(chunk(x, r - k, n), next); ...
//? why: Each rank sends 2 (n-1)/n X whatever n is, which no all-reduce of this kind can beat: it hardly grows with n,
//?      where rank 0 of "gather and broadcast" would carry 2 (n-1) X. What does grow is the latency: 2 (n-1) steps.
//? asked: A2: derive ring all-reduce: steps, bytes per GPU, time. (推导 Ring All-Reduce 的步数、单卡通信量和时间)
