// schedule-1f1b - one forward, one backward: the order of a pipeline stage.                            15 minutes
//
//   p = 4 stages, m = 8 micro-batches; time goes to the right, a backward takes twice as long as a forward
//     stage 0  F0 F1 F2 F3 .  .  .  .  .  .  B0    F4 B1    F5 ...
//     stage 1     F0 F1 F2 .  .  .  .  B0    F3 B1    F4 ...
//     stage 2        F0 F1 .  .  B0    F2 B1    F3 ...
//     stage 3           F0 B0    F1 B1    F2 B2    ...
//
//   warm-up   min(p - i - 1, m) forwards: as many as there are stages after stage i
//   steady    then one forward and one backward in turn, while forwards are left
//   drain     then the remaining backwards
//
// Return the order in which stage i = `stage` works. Micro-batches go forward, and backward, in the order 0 .. m-1.
// So stage i keeps the activations of at most min(p - i, m) micro-batches. m may be smaller than p.
#include "exercises.h"

std::vector<Work> schedule_1f1b(int stage, int stages, int micro_batches) {
  std::vector<Work> order;
  not_implemented("schedule-1f1b", 8);  // your lines, in place of this one
  return order;
}
