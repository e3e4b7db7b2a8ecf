// zero1-step - every rank updates its share of the weights only.                                       15 minutes
//
//   gradients (Psi, this rank's own)  --reduce-scatter-->  sum of my share (Psi/d)
//   momentum  (Psi/d, kept from step to step: only of my share)
//   weights   (Psi)   my share is updated   --all-gather-->  everybody has all of them
//
//   per element of my share:  g = (sum over ranks) / d      momentum = beta momentum + g      weight -= lr momentum
//
// d divides Psi (real trainers pad). chunk(x, r, d) is rank r's share of x. The collectives of src/group.h:
// reduce_scatter(out, in), all_gather(out, in). In all_gather, out may contain in at its place.
// Sent per step: 2 (d-1)/d Psi, exactly as DDP. Memory beyond what is passed in: one share, Psi/d.
#include "exercises.h"

void zero1_step(Group& dp, FloatTensor weights, FloatTensor gradients, FloatTensor momentum, float lr, float beta) {
  const int d = dp.size(), r = dp.rank();
  FloatTensor mine = chunk(weights, r, d);  // of the weights
  //~ first-share: FloatTensor mine = chunk(weights, 0, d);
  //~ says: each rank updates its own share
  FloatBuffer share = dp.device().allocate<float>(Memory::communication, {mine.numel()});  // of the gradients
  //! hole 7
  dp.reduce_scatter<float>(share, gradients);
  //~ all-reduce: dp.all_reduce(gradients); for (int64_t i = 0; i < share.numel(); ++i) share.data[i] = chunk(gradients, r, d).data[i];
  //~ says: a reduce-scatter is enough
  //~ local: for (int64_t i = 0; i < share.numel(); ++i) share.data[i] = chunk(gradients, r, d).data[i];
  //~ says: this rank's own gradients only
  for (int64_t i = 0; i < mine.numel(); ++i) {
    const float g = share.data[i] / float(d);
    //~ sum: const float g = share.data[i];
    //~ says: the mean over ranks, not the sum
    momentum.data[i] = beta * momentum.data[i] + g;
    //~ no-state: momentum.data[i] = g;
    //~ says: momentum from the step before
    mine.data[i] -= lr * momentum.data[i];
    //~ gradient-step: mine.data[i] -= lr * g;
    //~ says: momentum from the step before
  }
  dp.all_gather(weights, mine);
  //~ no-gather:
  //~ says: each rank has updated its own share only
  //! end
}
//? hint 1: Rank r needs the sum of which gradients? And after its update, what do the others not have yet?
//? hint 2: reduce-scatter gradients; g = sum / d; momentum = beta momentum + g; weight -= lr momentum; all-gather.
//? hint 3: dp.reduce_scatter<float>(share, gradients);
//? why: Adam's state is 12 of 16 bytes per parameter in mixed precision; ZeRO-1 leaves 4 + 12/d. It sends no more than
//?      DDP, because an all-reduce is a reduce-scatter and an all-gather, and the update fits between the two.
//? asked: E1: ZeRO-1/2/3: what is sharded, memory left? (ZeRO-1/2/3 各切什么？单卡显存公式？)
