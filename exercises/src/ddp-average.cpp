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
  //! hole 1
  dp.broadcast(weights, 0);
  //~ no-start:
  //~ says: the copies start apart
  //~ mean-start: dp.all_reduce(weights);
  //~ says: the weights of rank 0
  //! end
}

// After the backward pass of each micro-batch; `gradients` holds the sum of this rank's micro-batches so far.
void ddp_after_backward(Group& dp, FloatTensor weights, FloatTensor gradients, bool last_micro_batch) {
  //! hole 4
  if (!last_micro_batch) return;
  //~ every: ;
  //~ says: only after the last micro-batch
  //~ first: if (last_micro_batch) return;
  //~ says: not after the first ones
  dp.all_reduce(gradients);
  //~ weights: dp.all_reduce(weights);
  //~ says: average the gradients, not the weights
  //~ local:
  //~ says: each rank keeps its own gradient
  //~ gather: dp.reduce(gradients, 0), dp.broadcast(gradients, 0);
  //~ says: one all-reduce
  for (int64_t i = 0; i < gradients.numel(); ++i) gradients.data[i] /= float(dp.size());
  //~ sum: ;
  //~ says: the sum, not the mean
  //! end
}
//? hint 1: If two ranks start with different weights and add the same update, when do they become equal?
//? hint 2: Start: broadcast from rank 0. Last micro-batch: gradients = all_reduce(gradients) / n. Others: nothing.
//? hint 3: if (!last_micro_batch) return;
//? why: With equal starts and equal gradients, every rank takes the same step for ever: n copies of one training run.
//?      A sum instead of a mean is a learning rate n times as large, which Adam even hides.
//? asked: D1 and D3: one DDP iteration; accumulation and no_sync. (一次 DDP 迭代发生了什么？梯度累积如何配合？)
