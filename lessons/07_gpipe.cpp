// 07_gpipe.cpp - a pipeline: each rank holds some of the layers, and micro-batches flow through them.
//
//   rank 0: embedding, blocks 1-2   rank 1: blocks 3-4   rank 2: blocks 5-6   rank 3: blocks 7-8, head, loss
//                    --- activation (N, D) of each micro-batch ------>
//                    <--- its gradient (N, D) --------------------------
//
//   stage 0  F0F1F2F3..................B0--B1--B2--B3--      GPipe: all forwards, then all backwards
//   stage 1  ..F0F1F2F3............B0--B1--B2--B3--
//   stage 2  ....F0F1F2F3......B0--B1--B2--B3--              p = 4, m = 4, tB = 2 tF: 21 tF, of which 12 are work
//   stage 3  ......F0F1F2F3B0--B1--B2--B3--
//
// Time of a step: (m + p-1)(tF + tB). Bubble: (p-1)/m over the ideal time m (tF + tB); (p-1)/(m + p-1) of the step.
// Sent: N D elements per boundary and micro-batch in each direction, over p-1 boundaries.
// Held: 1/p of parameters, gradients and optimizer state, but the activations of all m micro-batches.
//                                                                                  notes/pipeline_parallel.md
#include "../src/lesson.h"
#include "../src/pipeline.h"

// What stage i of p does in a step of m micro-batches. (Huang et al. 2018, arXiv:1811.06965; without recomputation.)
Order gpipe_order(int /*p*/, int /*i*/, int m) {
  Order order;
  for (int j = 0; j < m; ++j) order.push_back({Op::forward, j});
  for (int j = 0; j < m; ++j) order.push_back({Op::backward, j});
  return order;
}

LESSON(gpipe, "a pipeline: all forwards, then all backwards", pipeline_defaults(8)) {
  // The pipeline says which layers are here (stage), and in which order the work is done (schedule). Sends and
  // receives follow from that order; src/pipeline.cpp adds them, and runs the list.
  Pipeline pipeline(lesson.world().all(), lesson.config(), gpipe_order);
  Transformer model(lesson.config(), pipeline, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    pipeline.run(model, lesson.batch(step, model));  // <- the idea: every micro-batch, forward and backward
    pipeline.finish_gradients(model);                // a table that first and last stage share: sum both gradients
    const double loss = lesson.sum(model.loss());    // only the last stage has one; the others add 0
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    adamw.step(lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  pipeline.expect(lesson);  // what it sends, and what it holds
  lesson.finish(adamw);
  pipeline.report(lesson);
  return lesson.prove(model);
}
