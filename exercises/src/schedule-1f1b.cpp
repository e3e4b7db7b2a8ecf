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
  //! hole 8
  const int warm_up = std::min(stages - stage - 1, micro_batches);
  //~ not-clamped: const int warm_up = stages - stage - 1;
  //~ says: more forwards than there are micro-batches
  //~ one-more: const int warm_up = std::min(stages - stage, micro_batches);
  //~ says: one micro-batch more than needed
  //~ all-p: const int warm_up = std::min(stages - 1, micro_batches);
  //~ says: the same warm-up on every stage
  //~ gpipe: const int warm_up = micro_batches;
  //~ says: this is GPipe
  int forward = 0, backward = 0;
  while (forward < warm_up) order.push_back({'F', forward++});
  while (forward < micro_batches) {
    order.push_back({'F', forward++});
    order.push_back({'B', backward++});
    //~ backward-first: order.insert(order.end() - 1, Work{'B', backward++});
    //~ says: waits for itself
  }
  while (backward < micro_batches) order.push_back({'B', backward++});
  //~ no-drain:
  //~ says: the drain is missing
  //! end
  return order;
}
//? hint 1: When does the last stage begin its first backward? How many forwards has stage i done by the time the
//?         gradient of micro-batch 0 arrives?
//? hint 2: min(p - i - 1, m) forwards; then F, B in turn until no forward is left; then B until none is left.
//? hint 3: const int warm_up = std::min(stages - stage - 1, micro_batches);
//? why: 1F1B takes exactly as long as GPipe: the bubble is (p-1)/m of the ideal time in both. What it saves is memory:
//?      min(p - i, m) micro-batches instead of m. Interleaving and zero-bubble schedules shrink the bubble.
//? asked: I1: derive the bubble of GPipe and 1F1B; does 1F1B reduce it? (推导 GPipe 与 1F1B 的气泡，1F1B 减少气泡吗？)
