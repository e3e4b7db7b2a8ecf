// 09_interleaved.cpp - interleaved 1F1B: each rank holds several chunks of layers, and the bubble shrinks.
//
//   rank 0: blocks 1-2 and 9-10   rank 1: 3-4 and 11-12   rank 2: 5-6 and 13-14   rank 3: 7-8 and 15-16, head
//   chunk 0 --------------------> chunk 1 -------------> chunk 2 -------------> chunk 3
//   chunk 4 <- from rank 3 -----> chunk 5 -------------> chunk 6 -------------> chunk 7 -> loss
//
//   p = 2, v = 2, m = 2; F0: micro-batch 0 in this rank's first chunk, f0: in its second
//   stage 0  F0F1f0f1....b0--..b1--B0--B1--
//   stage 1  ..F0F1f0b0--f1b1--B0--B1--
//
// The pipeline fills in (p-1) steps of a chunk, which take 1/v of a stage's time: bubble (p-1)/(v m) over ideal. The
// price: p v - 1 boundaries instead of p - 1 (v times the bytes on a rank in the middle, 2v - 1 times on the first and
// the last), and more stashed chunks: 2(p-i-1) + (v-1)p + 1 on stage i, where 1F1B has (p-i) v; at stage 0 that is
// 1 + (p-1)/(pv) times as many.
// Micro-batches go in groups of p, so p must divide m.                            notes/pipeline_parallel.md
#include "../src/lesson.h"
#include "../src/pipeline.h"

// What stage i of p, with v chunks, does in a step of m micro-batches. (Narayanan et al. 2021, arXiv:2104.04473)
Order interleaved_order(int p, int i, int m, int v) {
  if (m % p)
    throw Error(format("--micro-batches %d is not a multiple of the %d ranks; the interleaved schedule sends "
                       "micro-batches in groups of that size", m, p));
  // The k-th piece of work: p micro-batches through the first chunk, the same p through the second, ...; then the
  // next p.
  auto forward = [=](int k) { return Op{Op::forward, k / (p * v) * p + k % p, k / p % v}; };
  auto backward = [=](int k) { return Op{Op::backward, k / (p * v) * p + k % p, v - 1 - k / p % v}; };
  const int all = m * v, warm_up = std::min(2 * (p - i - 1) + (v - 1) * p, all);
  Order order;
  for (int k = 0; k < warm_up; ++k) order.push_back(forward(k));
  for (int k = warm_up; k < all; ++k) {
    order.push_back(forward(k));
    order.push_back(backward(k - warm_up));
  }
  for (int k = all - warm_up; k < all; ++k) order.push_back(backward(k));
  return order;
}

LESSON(interleaved, "interleaved 1F1B: several chunks of layers a rank, a smaller bubble",
       pipeline_defaults(16, {{"v", {2, "chunks of layers on each rank"}}}, [](const Options& o, int p) {
         interleaved_order(p, 0, o.micro_batches, int(o.extra.at("v").value));  // before any work: does it exist?
       })) {
  const int v = int(lesson.option("v"));
  auto order = [v](int p, int i, int m) { return interleaved_order(p, i, m, v); };
  Pipeline pipeline(lesson.world().all(), lesson.config(), order, v);  // <- the idea: v chunks
  Transformer model(lesson.config(), pipeline, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    pipeline.run(model, lesson.batch(step, model));
    pipeline.finish_gradients(model);
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  pipeline.expect(lesson);  // what it sends, and what it holds
  lesson.finish(adamw);
  pipeline.report(lesson);
  return lesson.prove(model);
}
