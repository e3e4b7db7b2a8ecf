// 06_sp.cpp - Megatron's sequence parallelism: what tensor parallelism left whole is cut by tokens.
//
//   tp:  x (N, D)   -> norm -> h (N, D)                --f--> [ cut by heads ] --g: all-reduce-->       + x (N, D)
//   sp:  x (N/t, D) -> norm -> h (N/t, D) --all-gather--> (N, D) [ cut by heads ] --reduce-scatter--> (N/t, D) + x
//
// Under tensor parallelism every rank holds the whole residual stream and both norms of every block, t equal copies.
// Here rank r holds rows [r N/t, (r+1) N/t) of the N tokens, samples one after another. An all-reduce is a
// reduce-scatter and an all-gather, so the two halves of g and f just move to either side of the norm:
//   into a cut region:    forward all-gather, backward reduce-scatter
//   out of a cut region:  forward reduce-scatter, backward all-gather
// Attention still sees all positions of a sample, with H/t heads. (Ring attention keeps the sequence cut there.)
//
// What is kept for backward is the shard, so the weight gradient gathers it once more: two all-gathers a block above
// tensor parallelism. Sent per rank and micro-batch, in elements: 10 N D (t-1)/t for each block, 5 N D (t-1)/t for
// embedding and head, 6 N (t-1)/t for the loss. A rank sees N/t tokens of each norm, so the norms' gradients are
// summed once a step: 2 (2L+1) D (t-1)/t (below, ring(X) is the ring all-reduce of X elements, 2 X (t-1)/t).
// Held: all activations 1/t.                                                             notes/sequence_parallel.md
#include "../src/lesson.h"
#include "05_tp.cpp"  // TensorParallel

struct SequenceParallel : TensorParallel {
  using TensorParallel::TensorParallel;

  Tensor enter(Tensor x) override { return gather(x); }
  Tensor enter_backward(Tensor dx) override { return scatter(dx); }
  Tensor leave(Tensor y) override { return scatter(y); }
  Tensor leave_backward(Tensor dy) override { return gather(dy); }

  // (N/t, D) of every rank -> (N, D). The transformer uses the result before it asks for the next one, so one buffer
  // serves all.
  Tensor gather(Tensor mine) {
    resize(whole, mine[0] * tp.size(), mine[1]);
    tp.all_gather<real>(whole, mine);
    return whole;
  }
  // (N, D), a partial sum on every rank -> this rank's rows (N/t, D) of the whole sum.
  Tensor scatter(Tensor partial) {
    const int64_t N = partial[0], t = tp.size();
    if (N % t)
      throw LayoutError(format("sequence parallelism cuts the %lld tokens of a micro-batch between %lld ranks, and "
                               "they do not divide; change --batch, --micro-batches or --seq",
                               (long long)N, (long long)t));
    resize(shard, N / t, partial[1]);
    tp.reduce_scatter<real>(shard, partial);
    return shard;
  }
  void resize(Buffer& buffer, int64_t rows, int64_t columns) {
    if (buffer && buffer[0] == rows && buffer[1] == columns) return;
    buffer = Buffer();  // first the old one goes
    buffer = tp.device().allocate<real>(Memory::communication, {rows, columns});
  }

  // Every rank saw only its own tokens pass the norms.
  void finish_gradients(Transformer& model) override {
    for (Unit& unit : model.params().units())
      for (Param& p : unit.params)
        if (p.split == Split::none) tp.all_reduce(model.params().gradient(p));
  }

  Buffer whole, shard;
};

// Where the tokens are, and the activation bytes of one block and micro-batch: ours, and Megatron's for GELU, dropout
// and 16 bits.
static void show_activations(Lesson& lesson, const SequenceParallel& sp) {
  const ModelConfig& c = lesson.config();
  const int64_t N = sp.whole[0];
  const int t = sp.tp.size();
  lesson.print("the stream and the norms are (%lld, %d) on each rank; attention's input is (%lld, %d), samples of all "
               "%d positions\n", (long long)sp.shard[0], c.dim, (long long)N, c.dim, c.seq);
  const double s = c.seq, b = double(N) / s, h = c.dim, a = c.heads;
  lesson.print("activations of a block for backward, bytes (t = %d, N = %lld)\n", t, (long long)N);
  lesson.print("  %-28s %12s %26s\n", "", "ours", "Megatron's GPT, 16 bits");
  auto row = [&](const char* name, TensorCut cut) {
    lesson.print("  %-28s %12lld %26.0f\n", name, (long long)block_activation_bytes(c, N, sizeof(real), cut),
                 megatron_layer_bytes(s, b, h, a, cut.t, cut.sequence, Recomputed::nothing));
  };
  row("one rank", {});
  row("tensor parallel", {t, false});
  row("with sequence parallel", {t, true});
}

LESSON(sp, "Megatron's sequence parallelism: what tensor parallelism left whole is cut by tokens", tp_defaults({})) {
  const ModelConfig& c = lesson.config();
  Group& all = lesson.world().all();
  SequenceParallel sequence(all, c);
  Transformer model(c, sequence, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);              // <- the idea: all-gather and reduce-scatter in here,
      model.backward(part);
    }
    sequence.finish_gradients(model);   // and the norms
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  const int64_t t = all.size(), r = all.rank(), L = c.layers, D = c.dim, B = sizeof(real);
  const int64_t steps = int64_t(lesson.steps().size()), V = c.vocab * (r + 1) / t - c.vocab * r / t;  // of this rank
  int64_t tokens = 0, most = 0, parts = 0, loss = 0;  // of a step
  for (const MicroBatch& part : lesson.batch(0, model)) {
    tokens += part.N(), parts += 1;
    most = std::max<int64_t>(most, part.N());
    loss += 3 * 4 * all_reduce_sent(part.N(), t, r);
  }
  const int64_t norms = (2 * L + 1) * B * all_reduce_sent(D, t, r);
  lesson.expect_sent("world", "all_gather", steps * (6 * L + 3) * B * tokens * D / t * (t - 1),
                     "steps sum over micro-batches of (6L + 3) B N D (t-1)/t");
  lesson.expect_sent("world", "reduce_scatter", steps * (4 * L + 2) * B * tokens * D / t * (t - 1),
                     "steps sum over micro-batches of (4L + 2) B N D (t-1)/t");
  lesson.expect_sent("world", "all_reduce", steps * (norms + loss),
                     "steps ((2L + 1) B ring(D) + sum over micro-batches of 3 x 4 ring(N))");
  lesson.expect_calls("world", "all_gather", steps * parts * (6 * L + 3), "steps x micro-batches x (6L + 3)");
  lesson.expect_calls("world", "reduce_scatter", steps * parts * (4 * L + 2), "steps x micro-batches x (4L + 2)");
  lesson.expect_calls("world", "all_reduce", steps * (2 * L + 1 + 3 * parts), "steps x (2L + 1 + 3 x micro-batches)");

  const ParameterParts sizes = parameter_parts(c);
  const int64_t block = (sizes.attention + sizes.mlp) / t + sizes.norms;
  const int64_t Psi = (c.tied ? 1 : 2) * V * D + L * block + sizes.final_norm;
  lesson.expect_state(B * Psi, B * Psi, (B == 4 ? 8 : 12) * Psi);
  lesson.expect_activations(model, {int(t), true, V});
  lesson.expect_peak(Memory::communication, B * most * D + B * most / t * D, "one gathered (N, D), one shard (N/t, D)");
  show_activations(lesson, sequence);
  lesson.finish(adamw);
  return lesson.prove(model);
}
