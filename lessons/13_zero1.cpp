// 13_zero1.cpp - ZeRO-1: every rank keeps all parameters and gradients, but 1/d of the optimizer's state.
//
//   gradients of a unit      rank 0 [a0 b0 c0 d0]   rank 1 [a1 b1 c1 d1]   ..        every rank, for its own samples
//       reduce-scatter       rank 0 [ a        ]    rank 1 [   b       ]   ..        each part summed on its owner
//       AdamW on one part    rank 0 [ a'       ]    rank 1 [   b'      ]   ..        with 1/d of m, v (and masters)
//       all-gather           rank 0 [a' b' c' d']   rank 1 [a' b' c' d']   ..        parameters, not gradients
//
// DDP's ring all-reduce is a reduce-scatter and an all-gather too. ZeRO-1 puts the update between the halves, so it
// sends the same: Psi (d-1)/d gradients + Psi (d-1)/d parameters = 2 Psi (d-1)/d elements per rank and step, however
// many micro-batches. Bytes per parameter: fp32 4 + 4 + 8/d, bf16 2 + 2 + 12/d.                     notes/zero.md
#include "../src/data_parallel.h"
#include "../src/lesson.h"
#include "../src/state_table.h"

struct Zero1 : DataParallel {
  using DataParallel::DataParallel;
  // Rank r owns part r of every unit, which is padded so that d divides it. Unit::begin() and end() follow from this,
  // for the reduction, the norm, AdamW and the gathering alike: there is one owner function.
  Shard shard() const override { return {dp.rank(), dp.size()}; }
  bool counts(const Param&) const override { return true; }  // in the norm, each owner counts its part

  // In place: my part of the buffer becomes the sum. The rest of it is of no more use.
  void finish_gradients(Transformer& model) override {
    for (Unit& unit : model.params().units()) dp.reduce_scatter<real>(unit.my_gradients(), unit.gradients);
  }

  void update(AdamW& adamw, float lr, float gradient_scale) override {
    adamw.step(lr, gradient_scale);
    for (Unit& unit : adamw.model().params().units()) dp.all_gather<real>(unit.weights, unit.my_weights());
  }
};

static Options zero1_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  return o;
}

LESSON(zero1, "ZeRO-1: the optimizer's state is divided between the ranks", zero1_defaults({})) {
  Group& all = lesson.world().all();
  Zero1 zero1(all);
  Transformer model(lesson.config(), zero1, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);
    }
    zero1.finish_gradients(model);  // <- the idea: each rank gets the sum of its part only,
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));  // of all parts: the one true norm
    lesson.log(step, loss, norm, model);
    zero1.update(adamw, lesson.learning_rate(step), lesson.clip_factor(norm));  // updates it, and gathers all parts
  }

  int64_t Psi = 0;  // with padding
  for (const Unit& unit : model.params().units()) Psi += unit.padded;
  const int64_t d = all.size(), B = sizeof(real), state = B == 4 ? 8 : 12, steps = int64_t(lesson.steps().size());
  const int64_t half = Psi / d * (d - 1);  // what each of the two sends
  lesson.expect_sent("world", "reduce_scatter", steps * B * half, "steps B Psi (d-1)/d");
  lesson.expect_sent("world", "all_gather", steps * B * half, "steps B Psi (d-1)/d");
  lesson.expect_calls("world", "reduce_scatter", steps * (lesson.config().layers + 2), "steps x units");
  lesson.expect_calls("world", "all_gather", steps * (lesson.config().layers + 2), "steps x units");
  lesson.expect_peak(Memory::parameters, B * Psi, "B Psi");
  lesson.expect_peak(Memory::gradients, B * Psi, "B Psi");
  lesson.expect_peak(Memory::optimizer, state * adamw.elements(), "8 or 12 bytes per parameter of the own parts");
  lesson.expect_peak(Memory::communication, 0, "nothing: in place");
  lesson.expect_activations(model);
  print_state_table(lesson, adamw, {.stage = 1, .ranks = d}, 2 * half);
  lesson.finish(adamw);
  return lesson.prove(model);
}
