// ring-neighbors - who is next to me on a ring?                                                         3 minutes
//
//   0 -> 1 -> 2 -> 3 -> 0 ...      rank 3's next is rank 0, and rank 0's previous is rank 3
//
// Most collectives of this project are built on a ring: each rank sends to the next one and receives from the previous
// one. Return both for `rank` (0 .. ranks-1) of `ranks`. It must hold for one rank too, which is its own neighbor.
#include "exercises.h"

Neighbors ring_neighbors(int rank, int ranks) {
  //! hole 1
  return {(rank + 1) % ranks, (rank + ranks - 1) % ranks};
  //~ negative: return {(rank + 1) % ranks, (rank - 1) % ranks};
  //~ says: in C++ -1 % 4 is -1
  //~ no-wrap: return {rank + 1, (rank + ranks - 1) % ranks};
  //~ says: the ring does not close
  //~ swapped: return {(rank + ranks - 1) % ranks, (rank + 1) % ranks};
  //~ says: next and previous are swapped
  //~ pairs: return {rank ^ 1, rank ^ 1};
  //~ says: pairs of ranks
  //~ four: return {(rank + 1) % 4, (rank + 3) % 4};
  //~ says: works for one number of ranks only
  //! end
}
//? hint 1: With 4 ranks, what comes after 3, and what before 0? Which operator wraps a number around?
//? hint 2: next = (rank + 1) mod n, previous = (rank - 1) mod n; take care that the left side never is negative.
//? hint 3: return {(rank + 1) % ranks, ...
//? why: On a ring every link carries the same, in one direction: no rank becomes the bottleneck,
//?      whatever n is. Ring all-reduce, ring attention and pipelines all start from these two numbers.
//? asked: A2: derive ring all-reduce: steps, bytes per GPU, time. (推导 Ring All-Reduce 的步数、单卡通信量和时间)
