// 10_zero_bubble.cpp - ZB-H1: backward in two halves, so that the weights' half can fill the bubble.
//
//   backward of a linear layer y = x W^T:   B: dx = dy W     the stage above waits for it
//                                           W: dW = dy^T x   nobody waits for it, until the update
//
//   stage 0  F0F1F2F3......B0W0F4B1W1F5B2W2F6B3W3F7B4W4B5W5B6W6B7W7    p-i-1 forwards; then for each j a forward,
//   stage 1  ..F0F1F2....B0F3B1W0F4B2W1F5B3W2F6B4W3F7B5W4B6W5B7W6W7    B_j, and from j = i on W_(j-i);
//   stage 2  ....F0F1..B0F2B1F3B2W0F4B3W1F5B4W2F6B5W3F7B6W4B7W5W6W7    then the W that are left
//   stage 3  ......F0B0F1B1F2B2F3B3W0F4B4W1F5B5W2F6B6W3F7B7W4W5W6W7
//
// Bubble: (p-1)(tF + tB - tW) with tB the input half: with three equal parts a third of 1F1B's. It needs m >= p.
// The price: every stage keeps min(p, m) micro-batches until their W, as much as 1F1B's first stage, and between B and
// W also the gradients of the outputs of its matrices. Sent: as with GPipe.        notes/pipeline_parallel.md
#include "../src/lesson.h"
#include "../src/pipeline.h"

// What stage i of p does in a step of m micro-batches. (Qi et al. 2023, arXiv:2401.10241, schedule ZB-H1)
Order zero_bubble_order(int p, int i, int m) {
  const int warm_up = std::min(p - i - 1, m);
  Order order;
  for (int j = 0; j < warm_up; ++j) order.push_back({Op::forward, j});
  for (int j = 0; j < m; ++j) {
    if (j + warm_up < m) order.push_back({Op::forward, j + warm_up});
    order.push_back({Op::backward_input, j});
    if (j >= i) order.push_back({Op::backward_weight, j - i});
  }
  for (int j = std::max(0, m - i); j < m; ++j) order.push_back({Op::backward_weight, j});
  return order;
}

LESSON(zero_bubble, "ZB-H1: the weights' half of backward fills the bubble", pipeline_defaults(8)) {
  Pipeline pipeline(lesson.world().all(), lesson.config(), zero_bubble_order);  // <- the idea: three kinds of work
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
