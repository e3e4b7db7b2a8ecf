// 14_zero2.cpp - ZeRO-2: a unit's gradients exist whole only while backward writes them; then their owners keep 1/d.
//
//   backward:  | head      | block 4   | block 3   | block 2   | ..      of each unit: open() allocates its gradients,
//   comm:                  | rs head   | rs block 4| rs block 3| ..      close() starts their reduce-scatter
//   gradients: [head]   [head+4]    [4+3]       [3+2]                    and one unit later they are freed
//
// Sent as in ZeRO-1: 2 Psi (d-1)/d. Gradients take B Psi/d, and at the peak the largest adjacent pair of units (without
// overlap: the largest unit); a tied head's table more, which waits for the embedding's part. Bytes per parameter: fp32
// 4 + 12/d, bf16 2 + 14/d.
//
// With m micro-batches there is a choice, and each has a price:
//   --every 1  reduce after every micro-batch and add up the parts: (m + 1) Psi (d-1)/d sent;
//   --every 0  keep the whole gradients until the last one: 2 Psi (d-1)/d, and B Psi bytes beside the shards.
//                                                                                              notes/zero.md
#if __INCLUDE_LEVEL__
#pragma once
#endif
#include <set>

#include "../kernels/kernels.h"
#include "../src/data_parallel.h"
#include "../src/lesson.h"
#include "../src/state_table.h"

struct Zero2 : DataParallel {
  // `dp`: the ranks that share the batch. `shards`: those of them that divide the state; here all.
  Zero2(Group& dp, Group& shards, bool every, bool overlap)
      : DataParallel(dp), shards(shards), device(dp.device()), every(every), overlap(overlap) {
    if (overlap) CUDA_CHECK(cudaStreamCreateWithFlags(&comm, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  }
  ~Zero2() override {
    if (comm) cudaStreamDestroy(comm);
    cudaEventDestroy(ready), cudaEventDestroy(done);
  }
  Shard shard() const override { return {shards.rank(), shards.size()}; }
  Storage storage(Memory kind) const override {
    return kind == Memory::gradients ? Storage::shard : DataParallel::storage(kind);
  }
  bool counts(const Param&) const override { return true; }  // in the norm, each owner counts its part

  // Backward is about to write the gradients of this unit: room for all of them.
  void open(Unit& unit, bool backward) override {
    users.push_back(&unit);
    if (!backward) return settle();
    if (unit.gradients) return;  // the table of a tied head, or kept from the micro-batch before
    unit.gradients = device.allocate<real>(Memory::gradients, {unit.padded});
    fill(unit.gradients.data + unit.size, 0.f, unit.padded - unit.size, device.stream());  // padding travels too
    for (Param& p : unit.params) p.fresh = true;
  }

  // All of them are written: to their owners.
  void close(Unit& unit, bool backward, bool last) override {
    users.pop_back();
    if (!backward || !users.empty()) return;  // closed inside the head: a tied table, to be used once more
    if (!last && !every) return;
    settle();
    const cudaStream_t stream = overlap ? comm : device.stream();
    CUDA_CHECK(cudaEventRecord(ready, device.stream()));
    if (overlap) CUDA_CHECK(cudaStreamWaitEvent(comm, ready, 0));
    reduce(unit, begun.insert(&unit).second, stream);
    CUDA_CHECK(cudaEventRecord(done, stream));
    travelling = &unit;
    if (!overlap) settle();
  }

  // Into my shard: the sum over ranks of this micro-batch, after the first one of a step added to what is there.
  virtual void reduce(Unit& unit, bool first, cudaStream_t stream) {
    if (first) return shards.reduce_scatter<real>(unit.gradient_shard, unit.gradients, stream);
    arrived = device.allocate<real>(Memory::communication, {unit.share()});
    shards.reduce_scatter<real>(arrived, unit.gradients, stream);
    add(unit.gradient_shard.data, unit.gradient_shard.data, arrived.data, unit.share(), stream);
  }

  // The gradients that are on their way have arrived: their memory is free for what compute does next.
  virtual void settle() {
    if (!travelling) return;
    CUDA_CHECK(cudaStreamWaitEvent(device.stream(), done, 0));
    travelling->gradients = Buffer();
    arrived = Buffer();
    travelling = nullptr;
  }

  void finish_gradients(Transformer&) override {
    settle();
    begun.clear();
  }

  void update(AdamW& adamw, float lr, float gradient_scale) override {
    adamw.step(lr, gradient_scale);
    for (Unit& unit : adamw.model().params().units()) shards.all_gather<real>(unit.weights, unit.my_weights());
  }

  // Gradient elements beside the stored shards at the worst moment of backward, by the formula. `ways`: a unit that
  // travels also takes a ways-th of itself, where its sum arrives (offload); 0: not so.
  int64_t most_whole(Params& params, int micro_batches, int64_t ways = 0) const {
    const std::vector<Unit>& units = params.units();
    auto sum = [&](const Unit& unit) { return ways ? unit.padded / ways : 0; };
    int64_t below = 0, kept = 0, most = 0;  // kept: if all are whole when the last backward begins, and go from the top
    for (size_t i = 0; i < units.size(); ++i) {
      below += units[i].padded;
      kept = std::max(kept, below + sum(units[i]));
      const Unit* above = overlap && i + 1 < units.size() ? &units[i + 1] : nullptr;  // travels while this one computes
      const int64_t table = params.config().tied && i > 0 ? units[0].padded : 0;      // waits for the embedding's part
      most = std::max({most, units[i].padded + table + (above ? above->padded + sum(*above) : 0),
                       units[i].padded + table + sum(units[i])});
    }
    return every || micro_batches == 1 ? most : kept;
  }
  int reductions(int micro_batches) const { return every ? micro_batches : 1; }  // per step and unit

  Group& shards;
  Device& device;
  bool every, overlap;
  std::vector<Unit*> users;     // the units that are open now, each inside the one before
  std::set<const Unit*> begun;  // units whose shards hold a part of this step's sum
  Unit* travelling = nullptr;   // between its reduce-scatter and settle()
  Buffer arrived;               // its sum, if that is to be added
  cudaStream_t comm = nullptr;
  cudaEvent_t ready, done;      // its gradients are written; its sum is in place
};

static Options zero2_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  o.extra["every"] = {1, "1: reduce gradients at every micro-batch; 0: keep them whole until the last"};
  o.extra["overlap"] = {1, "1: reduce a unit while backward computes the next; 0: wait for it"};
  return o;
}

LESSON(zero2, "ZeRO-2: gradients are divided too, as soon as backward has them", zero2_defaults({})) {
  Group& all = lesson.world().all();
  Zero2 zero2(all, all, lesson.option("every") != 0, lesson.option("overlap") != 0);
  Transformer model(lesson.config(), zero2, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);          // <- the idea: open() and close() allocate, reduce and free gradients in here
    }
    zero2.finish_gradients(model);   // waits for the last unit
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    zero2.update(adamw, lesson.learning_rate(step), lesson.clip_factor(norm));
  }

  int64_t Psi = 0, largest = 0;  // with padding
  for (const Unit& unit : model.params().units()) Psi += unit.padded, largest = std::max(largest, unit.padded);
  const int64_t d = all.size(), B = sizeof(real), state = B == 4 ? 8 : 12, steps = int64_t(lesson.steps().size());
  const int64_t half = Psi / d * (d - 1), units = lesson.config().units();
  const int m = lesson.options().micro_batches, k = zero2.reductions(m);
  lesson.expect_sent("world", "reduce_scatter", steps * k * B * half, "steps k B Psi (d-1)/d, k = m or 1");
  lesson.expect_sent("world", "all_gather", steps * B * half, "steps B Psi (d-1)/d");
  lesson.expect_calls("world", "reduce_scatter", steps * k * units, "steps k units");
  lesson.expect_calls("world", "all_gather", steps * units, "steps x units");
  lesson.expect_peak(Memory::parameters, B * Psi, "B Psi");
  lesson.expect_peak(Memory::gradients, B * (Psi / d + zero2.most_whole(model.params(), m)),
                     k < m           ? "B (Psi/d + Psi)"
                     : zero2.overlap ? "B (Psi/d + largest adjacent pair of units; a tied table more)"
                                     : "B (Psi/d + largest unit; a tied table more)");
  lesson.expect_peak(Memory::optimizer, state * adamw.elements(), "8 or 12 bytes per parameter of the own parts");
  lesson.expect_peak(Memory::communication, k > 1 ? B * largest / d : 0,
                     k > 1 ? "B largest unit/d: the part that is added" : "none, with one reduction a step");
  lesson.expect_activations(model);
  print_state_table(lesson, adamw, {.stage = 2, .ranks = d, .reduce_each = zero2.every}, (k + 1) * half);
  lesson.finish(adamw);
  return lesson.prove(model);
}
