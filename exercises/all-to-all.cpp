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
  not_implemented("all-to-all", 5);  // your lines, in place of this one
}
