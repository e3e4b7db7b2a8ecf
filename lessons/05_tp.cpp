// 05_tp.cpp - tensor parallelism: every weight matrix is cut, every token is on every rank.
//
//   x --f--> [Wq|Wk|Wv: some heads] -> attention of these heads -> [Wo: their columns] --g--> + x
//   x --f--> [gate|up: some rows]   -> SwiGLU                   -> [down: their columns] --g--> + x
//
// Weights are (out, in) here. A linear layer cut by rows (its outputs) gives each rank some features of every token.
// The next one, cut by columns (its inputs), takes just these, and gives a partial sum of every output. So two layers
// need one sum, and what lies between them (attention of whole heads, SwiGLU) stays local. Megatron, whose weights are
// (in, out), calls the first column-parallel and the second row-parallel.
//   f, into the pair:    forward nothing, backward all-reduce: each rank has one term of the sum that is dx
//   g, out of the pair:  forward all-reduce of the partial sums, backward nothing
// The vocabulary is cut too. Embedding: a rank without a token's row gives zeros, and g sums. Head: f, then each rank
// has the logits of V/t words, and the softmax needs three reductions of one number a token, never the logits.
//
// Sent per rank, for the N tokens of a micro-batch and width D, in elements (to the byte below: chunks are uneven;
// Megatron's papers write b s h for our N D):
//   4 all-reduces of N D in each block: 8 N D (t-1)/t; 2 more for embedding and head: 4 N D (t-1)/t;
//   the loss: 6 N (t-1)/t. Printed below: ring(X) for the ring all-reduce of X elements, 2 X (t-1)/t.
// Held: 1/t of all matrices; norms, and the stream between the pairs, whole on every rank.
//                                                                                       notes/tensor_parallel.md
#include "../src/formulas.h"
#include "../src/lesson.h"

struct TensorParallel : Parallel {
  TensorParallel(Group& tp, const ModelConfig& c) : tp(tp) {
    const int t = tp.size();
    if (c.heads % t || c.kv_heads % t || c.hidden % t)
      throw LayoutError(format("tensor parallelism over %d ranks needs --heads %d, --kv-heads %d and --hidden %d to be "
                               "multiples of %d; change them, or the number of ranks",
                               t, c.heads, c.kv_heads, c.hidden, t));
  }

  // Part r of t: whole heads and their key heads, rows of the MLP, words of the vocabulary (V need not divide).
  Piece piece(const Param& p) const override {
    if (p.split == Split::none) return Parallel::piece(p);
    const int axis = p.split == Split::rows ? 0 : 1, r = tp.rank(), t = tp.size();
    const int64_t size = axis == 0 ? p.rows : p.columns;
    return {axis, size * r / t, size * (r + 1) / t};
  }
  bool counts(const Param& p) const override { return p.split != Split::none || tp.rank() == 0; }
  bool counts_loss() const override { return tp.rank() == 0; }  // all compute the same loss

  Tensor enter_backward(Tensor dx) override { tp.all_reduce(dx); return dx; }  // f
  Tensor leave(Tensor y) override { tp.all_reduce(y); return y; }              // g

  // The row maximum; then, relative to it, the sum of exponentials and the target's logit (0 where it is elsewhere).
  void over_vocabulary(FloatTensor rows, Reduce op) override { tp.all_reduce(rows, op); }

  Group& tp;
};

static Options tp_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  return o;
}

LESSON(tp, "tensor parallelism: every weight matrix is cut, every token is on every rank", tp_defaults({})) {
  const ModelConfig& c = lesson.config();
  Group& all = lesson.world().all();
  TensorParallel tensor(all, c);
  Transformer model(c, tensor, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {  // the same samples on every rank
      model.forward(part);   // <- the idea: g in here,
      model.backward(part);  // and f in here; nothing is left to do at the end of the step
    }
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  const int64_t t = all.size(), r = all.rank(), L = c.layers, D = c.dim, B = sizeof(real);
  const int64_t steps = int64_t(lesson.steps().size()), V = c.vocab * (r + 1) / t - c.vocab * r / t;  // of this rank
  int64_t sent = 0, calls = 0;
  for (const MicroBatch& part : lesson.batch(0, model)) {  // all steps are alike
    const int64_t N = part.N();
    sent += (4 * L + 2) * B * all_reduce_sent(N * D, t, r) + 3 * 4 * all_reduce_sent(N, t, r);
    calls += 4 * L + 2 + 3;
  }
  lesson.expect_sent("world", "all_reduce", steps * sent,
                     "steps sum over micro-batches of (4L + 2) B ring(N D) + 3 x 4 ring(N)");
  lesson.expect_calls("world", "all_reduce", steps * calls, "steps x micro-batches x (4L + 2 + 3)");

  const ParameterParts parts = parameter_parts(c);
  const int64_t block = (parts.attention + parts.mlp) / t + parts.norms;
  const int64_t Psi = (c.tied ? 1 : 2) * V * D + L * block + parts.final_norm;
  lesson.expect_state(B * Psi, B * Psi, (B == 4 ? 8 : 12) * Psi);
  lesson.expect_activations(model, {int(t), false, V});
  lesson.expect_peak(Memory::communication, 0, "all-reduce works in place");
  lesson.finish(adamw);
  return lesson.prove(model);
}
