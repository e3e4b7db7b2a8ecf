// vocab-parallel-cross-entropy - the loss without ever gathering the logits.                           20 minutes
//
//   loss(i) = log(sum over v of exp(logit(i, v) - m)) - (logit(i, target) - m),     m = maximum over v of logit(i, v)
//
//   rank 0 has the logits of words 0 .. V/t-1, rank 1 of V/t .. 2V/t-1, ...       (N, V/t) each
//     1  m        all-reduce of N maxima
//     2  sum exp  all-reduce of N sums
//     3  target   all-reduce of N numbers: the rank that has the target gives its logit, the others 0
//
// targets (N) are global word numbers. Logits may be as low as -20000 and as high as 20000, and the loss must stay
// exact: subtract the *global* maximum before exp. Sent: 6 N (t-1)/t elements. Memory: three numbers per row.
#include "exercises.h"

// loss (N), the same on every rank, from this rank's logits (N, V/t).
void vocab_cross_entropy(Group& tp, FloatTensor loss, FloatTensor logits, IntTensor targets) {
  const int64_t N = logits[0], V = logits[1], first = tp.rank() * V;  // this rank's words: first .. first + V - 1
  FloatBuffer maximum = tp.device().allocate<float>(Memory::workspace, {N});
  FloatBuffer sum = tp.device().allocate<float>(Memory::workspace, {N});
  FloatBuffer target = tp.device().allocate<float>(Memory::workspace, {N});
  //! hole 14
  for (int64_t i = 0; i < N; ++i) {
    maximum.data[i] = logits.data[i * V];
    //~ low-start: maximum.data[i] = -10000;
    //~ says: a maximum must start at a logit or -infinity
    for (int64_t v = 1; v < V; ++v) maximum.data[i] = std::max(maximum.data[i], logits.data[i * V + v]);
  }
  tp.all_reduce<float>(maximum, Reduce::max);
  //~ local-max:
  //~ says: each rank subtracts a maximum of its own
  //~ sum-max: tp.all_reduce<float>(maximum);
  //~ says: the maximum over ranks, not their sum
  for (int64_t i = 0; i < N; ++i) {
    sum.data[i] = target.data[i] = 0;
    for (int64_t v = 0; v < V; ++v) sum.data[i] += std::exp(logits.data[i * V + v] - maximum.data[i]);
    //~ no-shift: for (int64_t v = 0; v < V; ++v) sum.data[i] += std::exp(logits.data[i * V + v]);
    //~ says: subtract the maximum before exp
    const int64_t mine = targets.data[i] - first;
    //~ local-target: const int64_t mine = targets.data[i] % V;
    //~ says: every rank gave a logit for the target
    if (mine >= 0 && mine < V) target.data[i] = logits.data[i * V + mine] - maximum.data[i];
  }
  tp.all_reduce<float>(sum);
  //~ sum-twice: tp.all_reduce<float>(sum), tp.all_reduce<float>(sum);
  //~ says: log t too large
  //~ local-sum:
  //~ says: the sum of exp is that of this rank's words only
  tp.all_reduce<float>(target);
  //~ no-target:
  //~ says: the target's logit is on one rank only
  for (int64_t i = 0; i < N; ++i) loss.data[i] = std::log(sum.data[i]) - target.data[i];
  //! end
}
//? hint 1: Which three numbers per row does the formula need from all ranks, and with which reduction?
//? hint 2: maxima (Reduce::max); then sums of exp(logit - m) and, from the rank whose words hold the target, logit - m.
//? hint 3: for each row: maximum.data[i] = the largest of logits.data[i * V .. i * V + V - 1]; then tp.all_reduce<float>(maximum, Reduce::max);
//? why: Logits are the largest activation of a language model: N V. This sends 6 N (t-1)/t numbers instead of gathering
//?      them, and no rank ever holds a whole row.
//? asked: F8: vocabulary-parallel cross entropy: how much communication does it save? (并行交叉熵省多少通信？)
