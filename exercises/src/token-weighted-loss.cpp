// token-weighted-loss - the mean over tokens is not the mean of means.                                  8 minutes
//
//   rank 0: 1 token,  loss 2.0      mean of means: (2.0 + 1.0) / 2 = 1.5
//   rank 1: 7 tokens, loss 1.0      mean over tokens: (1 x 2.0 + 7 x 1.0) / 8 = 1.125
//
// Each rank has N losses, one per token. Tokens whose target is -1 are padding: they count in neither sum (their loss is
// no meaningful number, so do not multiply it by 0). Return the mean over all valid tokens of all ranks, the same on
// every rank; 0 if there is none. Sent: one all-reduce of two numbers, for any N; extra memory: those two.
// (On the simulated GPU x.data[i] can be read and written directly. N may differ between ranks, and may be 0.)
#include "exercises.h"

float mean_loss(Group& dp, FloatTensor losses, IntTensor targets) {
  FloatBuffer sums = dp.device().allocate<float>(Memory::communication, {2});  // sum of losses, valid tokens
  sums.data[0] = sums.data[1] = 0;
  //! hole 8
  for (int64_t i = 0; i < losses.numel(); ++i) {
    if (targets.data[i] == -1) continue;
    //~ padding: ;
    //~ says: padding takes part
    sums.data[0] += losses.data[i];
    sums.data[1] += 1;
  }
  //~ count-all: } sums.data[1] = float(losses.numel());
  //~ says: padding is counted
  //~ mean-of-means: } sums.data[0] /= sums.data[1]; sums.data[1] = 1;
  //~ says: the mean of the ranks' means
  dp.all_reduce<float>(sums);
  //~ local:
  //~ says: each rank has its own mean
  //~ two-calls: dp.all_reduce<float>(FloatTensor(sums.data, {1})), dp.all_reduce<float>(FloatTensor(sums.data + 1, {1}));
  //~ says: both numbers travel in one all-reduce
  //~ maximum: dp.all_reduce<float>(sums, Reduce::max);
  //~ says: a sum over ranks, not a maximum
  return sums.data[1] > 0 ? sums.data[0] / sums.data[1] : 0;
  //~ no-token: return sums.data[0] / sums.data[1];
  //~ says: 0 divided by 0
  //~ per-rank: return sums.data[0] / sums.data[1] / float(dp.size());
  //~ says: divided by the number of ranks once more
  //! end
}
//? hint 1: How much should the one token of rank 0 weigh against the seven of rank 1?
//? hint 2: all-reduce (sum of losses, number of valid tokens), then divide.
//? hint 3: for (int64_t i = 0; i < losses.numel(); ++i) { if (targets.data[i] == -1) continue; ...
//? why: The mean of means depends on how samples happen to lie on ranks and in micro-batches; the token mean does not.
//?      This was a bug of well-known trainers for years: losses looked fine, gradients were not.
//? asked: D3: gradient accumulation, no_sync, loss normalisation. (梯度累积与 DDP、loss 归一化如何配合？)
