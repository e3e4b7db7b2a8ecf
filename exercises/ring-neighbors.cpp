// ring-neighbors - who is next to me on a ring?                                                         3 minutes
//
//   0 -> 1 -> 2 -> 3 -> 0 ...      rank 3's next is rank 0, and rank 0's previous is rank 3
//
// Most collectives of this project are built on a ring: each rank sends to the next one and receives from the previous
// one. Return both for `rank` (0 .. ranks-1) of `ranks`. It must hold for one rank too, which is its own neighbor.
#include "exercises.h"

Neighbors ring_neighbors(int rank, int ranks) {
  not_implemented("ring-neighbors", 1);  // your lines, in place of this one
}
