// 01_single.cpp - one GPU: the training loop that every other lesson changes by one idea.
//
//   tokens -> [embedding] -> x -> [block 1] -> x -> ... -> [block L] -> x -> [norm, head] -> logits -> loss
//                              block: x = x + attention(norm(x));  x = x + mlp(norm(x))
//
// A step of training is five lines: the batch, forward, backward, the norm for clipping, the update. When several
// GPUs share the work, they cut the batch (data parallelism), the matrices (tensor), the list of blocks (pipeline), the
// sequence (context), or the state of the update (ZeRO). They step in through one interface, Parallel (src/parallel.h);
// here all of it does nothing.
//
// What it costs on one GPU, in fp32 (notes/transformer.md derives each). Symbols: Psi parameters, L blocks, D width,
// H heads, A = D query features, K key features, F width of the MLP, V vocabulary, T tokens of a sample, N of a
// micro-batch, B bytes of an element (4, in bf16 2).
//   parameters 4 Psi bytes, gradients 4 Psi, AdamW's two moments 8 Psi: 16 bytes per parameter;
//   activations that wait for backward, for N tokens: L blocks of 4 N (4D + 2A + 2K + 3F + H T) + 8 N bytes,
//   and 4 N (3D + V) + 4 N for the head;
//   6 FLOPs per weight and token, and 6 L D T per token for causal attention.
#include "../src/formulas.h"
#include "../src/lesson.h"

static Options defaults(Options o) {
  o.steps = 200;
  o.batch = 16;
  o.lr = 3e-3f;  // the other lessons take a third: rounding differences between layouts grow with it
  o.sample = 200;
  o.log_every = 25;
  return o;
}

LESSON(single, "one GPU: the training loop that every other lesson changes by one idea", defaults({})) {
  // The model: a small Llama. Its weights come from a generator keyed by (seed, name, index), so that every
  // layout of later lessons starts from the same bits.
  Parallel one_gpu;
  Transformer model(lesson.config(), one_gpu, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    // Forward keeps the activations that backward needs; backward adds to the gradients. A micro-batch is a part of
    // the batch: its loss is divided by the tokens of the whole, so that the parts add up to the mean.
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);
    }

    // Clipping is by the norm of all gradients together. It scales the update, not the stored gradients.
    const double loss = model.loss();
    const double norm = std::sqrt(model.squared_gradient_norm());
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  // What this rank should have held at its peak.
  const ModelConfig& c = lesson.config();
  const int64_t Psi = c.parameters(), B = sizeof(real), state = B == 4 ? 8 : 12;  // bf16 adds an fp32 master copy
  const int64_t most = (lesson.options().batch + lesson.options().micro_batches - 1) / lesson.options().micro_batches;
  const int64_t N = most * c.seq, tokens = int64_t(lesson.options().batch) * c.seq;
  lesson.expect_peak(Memory::parameters, B * Psi, "B Psi");
  lesson.expect_peak(Memory::gradients, B * Psi, "B Psi");
  lesson.expect_peak(Memory::optimizer, state * Psi, B == 4 ? "8 Psi" : "12 Psi");
  lesson.expect_peak(Memory::activations, peak_activation_bytes(c, N, B),
                     "L (B N (4D + 2A + 2K + 3F + H T) + 8 N) + B N (3D + V) + 4 N");
  lesson.expect_peak(Memory::workspace, peak_workspace_bytes(c, int(most), c.seq, tokens, B),
                     "the largest scratch of a block's backward");
  lesson.finish(adamw);
  return lesson.prove(model);
}
