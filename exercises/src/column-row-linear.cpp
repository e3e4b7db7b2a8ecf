// column-row-linear - tensor parallelism of an MLP: two cut matrices, one all-reduce.                  20 minutes
//
//   y = relu(x W1^T) W2^T + bias         x (N, D), W1 (H, D), W2 (D, H), y (N, D); row-major
//
//   W1 is cut by its H outputs, W2 by its H inputs. Rank r of t has  w1 (H/t, D)  and  w2 (D, H/t).
//     x (all) --f--> x w1^T (N, H/t) --relu--> . w2^T (N, D), a part of the sum --g--> y (all)
//   g: forward all-reduce, backward nothing.      f: forward nothing, backward all-reduce.
//
// relu works on each hidden unit alone, so nothing has to be exchanged between the two products. The bias (D) is whole on
// every rank. Two helpers, for row-major a, b, c on the device:
//   multiply(c, a, b, true)    c = a b^T,  a (m, k), b (n, k)
//   multiply(c, a, b, false)   c = a b,    a (m, k), b (k, n)
// Sent per pass: one all-reduce of N D. Memory: the hidden activations of this rank, N H/t (twice in backward).
#include "exercises.h"

// y (N, D) from x (N, D); whole on every rank.
void mlp_forward(Group& tp, FloatTensor y, FloatTensor x, FloatTensor w1, FloatTensor w2, FloatTensor bias) {
  const int64_t N = x[0], H = w1[0];  // H: of this rank
  FloatBuffer hidden = tp.device().allocate<float>(Memory::activations, {N, H});
  //! hole 6
  multiply(hidden, x, w1, true);
  for (int64_t i = 0; i < hidden.numel(); ++i) hidden.data[i] = std::max(hidden.data[i], 0.f);
  //~ no-relu:
  //~ says: relu belongs between the two products
  multiply(y, hidden, w2, true);
  tp.all_reduce(y);
  //~ bias-times-t: for (int64_t i = 0; i < y.numel(); ++i) { y.data[i] += bias.data[i % y[1]]; } tp.all_reduce(y); return;
  //~ says: the bias was added once per rank
  //~ no-g:
  //~ says: each rank has only its part of the sum
  //~ late-relu: tp.all_reduce(y); for (int64_t i = 0; i < y.numel(); ++i) y.data[i] = std::max(y.data[i], 0.f);
  //~ says: relu belongs between the two products, not after them
  //~ sync-between: tp.all_reduce(y); tp.all_reduce<float>(hidden);
  //~ says: one all-reduce per pass
  for (int64_t i = 0; i < y.numel(); ++i) y.data[i] += bias.data[i % y[1]];
  //~ no-bias:
  //~ says: the bias is missing
  //! end
}

// dx (N, D), whole on every rank, from dy (N, D), which is whole too: dx = ((dy W2) * [x W1^T > 0]) W1.
void mlp_backward(Group& tp, FloatTensor dx, FloatTensor dy, FloatTensor x, FloatTensor w1, FloatTensor w2) {
  const int64_t N = x[0], H = w1[0];
  FloatBuffer hidden = tp.device().allocate<float>(Memory::activations, {N, H});
  FloatBuffer dhidden = tp.device().allocate<float>(Memory::activations, {N, H});
  //! hole 6
  multiply(hidden, x, w1, true);  // once more, to know where relu let it through
  multiply(dhidden, dy, w2, false);
  for (int64_t i = 0; i < hidden.numel(); ++i) dhidden.data[i] *= hidden.data[i] > 0;
  multiply(dx, dhidden, w1, false);
  tp.all_reduce(dx);
  //~ no-f:
  //~ says: f is an all-reduce in backward
  //~ g-backward: tp.all_reduce(dx), tp.all_reduce(dx);
  //~ says: reduced twice
  //! end
}
//? hint 1: Rank r's product with w2 lacks the hidden units of the other ranks. What makes it whole? And what would
//?         happen to a bias that is added before that?
//? hint 2: forward: hidden = relu(x w1^T), y = all_reduce(hidden w2^T) + bias. backward: dhidden = (dy w2) where hidden
//?         > 0, dx = all_reduce(dhidden w1).
//? hint 3: multiply(hidden, x, w1, true);
//? why: A column-cut and a row-cut matrix need one all-reduce per pair, not one per matrix: 2 forward and 2 backward in a
//?      layer with attention. The next pair needs the whole input, because of its nonlinearity.
//? asked: F1: how does Megatron split MLP and attention; how many all-reduces per layer? (Megatron 如何切 MLP 与注意力？每层几次 AllReduce？)
