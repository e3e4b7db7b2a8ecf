// ddp-average - equal copies that stay equal.                                                          10 minutes
//
//   once:        weights of rank 0 -> everybody                    (copies that start apart never meet)
//   each step:   every rank has the mean gradient of its own samples; all need the mean over ranks
//                micro-batch 1, 2, ...: only add up locally        last micro-batch: one all-reduce
//
// Gradients are averaged, not weights: the weights change only when the optimizer steps.
// Sent per step: 2 (n-1)/n Psi, one call, whatever the number of micro-batches.
// Collectives of src/group.h: group.broadcast(x, root), group.all_reduce(x), group.reduce(x, root), ...
#include "exercises.h"

// Before the first step.
void ddp_start(Group& dp, FloatTensor weights) {
  not_implemented("ddp-average", 1);  // your lines, in place of this one
}

// After the backward pass of each micro-batch; `gradients` holds the sum of this rank's micro-batches so far.
void ddp_after_backward(Group& dp, FloatTensor weights, FloatTensor gradients, bool last_micro_batch) {
  not_implemented("ddp-average", 4);  // your lines, in place of this one
}
