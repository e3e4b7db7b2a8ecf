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
  FloatBuffer share = dp.device().allocate<float>(Memory::communication, {mine.numel()});  // of the gradients
  not_implemented("zero1-step", 7);  // your lines, in place of this one
}
