// 08_1f1b.cpp - one forward, one backward: the same bubble as GPipe, with fewer activations waiting.
//
//   stage 0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--
//   stage 1  ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--       warm-up: p-i-1 forwards,
//   stage 2  ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--           then one forward, one backward,
//   stage 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--               then the backwards that are left
//
// A stage begins the backward of a micro-batch as soon as its gradient comes, so stage i keeps the activations of at
// most min(p-i, m) micro-batches, not of m. The last backward ends when it ended with GPipe: the bubble is equal,
// (p-1)/m over ideal, (p-1)/(m+p-1) of the step. Sent: as with GPipe.
// This is PipeDream-Flush: one version of the weights, all micro-batches before the update. (PipeDream itself does
// not wait, and keeps up to p versions.)                                          notes/pipeline_parallel.md
#include "../src/lesson.h"
#include "../src/pipeline.h"

// What stage i of p does in a step of m micro-batches. (Narayanan et al. 2021, arXiv:2104.04473)
Order one_f_one_b_order(int p, int i, int m) {
  const int warm_up = std::min(p - i - 1, m);
  Order order;
  for (int j = 0; j < warm_up; ++j) order.push_back({Op::forward, j});
  for (int j = warm_up; j < m; ++j) {
    order.push_back({Op::forward, j});
    order.push_back({Op::backward, j - warm_up});
  }
  for (int j = m - warm_up; j < m; ++j) order.push_back({Op::backward, j});
  return order;
}

LESSON(1f1b, "one forward, one backward: GPipe's bubble, fewer activations", pipeline_defaults(8)) {
  Pipeline pipeline(lesson.world().all(), lesson.config(), one_f_one_b_order);  // <- the idea: another order
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
