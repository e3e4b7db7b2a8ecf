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
  not_implemented("column-row-linear", 6);  // your lines, in place of this one
}

// dx (N, D), whole on every rank, from dy (N, D), which is whole too: dx = ((dy W2) * [x W1^T > 0]) W1.
void mlp_backward(Group& tp, FloatTensor dx, FloatTensor dy, FloatTensor x, FloatTensor w1, FloatTensor w2) {
  const int64_t N = x[0], H = w1[0];
  FloatBuffer hidden = tp.device().allocate<float>(Memory::activations, {N, H});
  FloatBuffer dhidden = tp.device().allocate<float>(Memory::activations, {N, H});
  not_implemented("column-row-linear", 6);  // your lines, in place of this one
}
