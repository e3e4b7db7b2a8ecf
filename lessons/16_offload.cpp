// 16_offload.cpp - ZeRO-Offload: gradients go down to host memory, AdamW runs there, parameters come back up.
//
//   GPU:   | B head   | B block L| ..  | B embed |                                            | next step
//   link:             | head down| ..            | embed down |      |          | embed up | 1 up | ..
//   host:                                                     | norm | AdamW embed  | 1 | ..
//
// Divided as in ZeRO-2: each rank's host holds its 1/d. On the GPU stay the parameters, B Psi, and the gradients of
// the units at work: none between steps, and no optimizer state at all. Host memory per rank: 16 Psi/d (gradients,
// moments, and the weights that AdamW updates: the fp32 masters, and for bf16 their rounded copies, ready to go up).
// Over the host link per rank and step: B Psi/d down (m times that with --every 1, one per micro-batch), B Psi/d up;
// with one rank 2 + 2 bytes per parameter in bf16. Between ranks as in ZeRO-2. While one unit goes up, the host
// updates the next. On the simulated GPU both memories are RAM; the copies are real and are counted.  notes/offload.md
#include "../src/host.h"
#include "../src/lesson.h"
#include "14_zero2.cpp"

struct Offload : Zero2 {
  Offload(Group& dp, bool every) : Zero2(dp, dp, every, true) {}
  Storage storage(Memory kind) const override {
    return kind == Memory::gradients || kind == Memory::optimizer ? Storage::shard_on_host : Storage::whole;
  }

  // Down: the sum of my shard, through a buffer on the device that lives until settle().
  void reduce(Unit& unit, bool first, cudaStream_t stream) override {
    arrived = device.allocate<real>(Memory::gradients, {unit.share()});
    shards.reduce_scatter<real>(arrived, unit.gradients, stream);
    if (!first) to_add = device.allocate<real>(Memory::host, {unit.share()});
    device.to_host((first ? unit.gradient_shard : to_add).data, arrived.data, unit.share(), stream);
  }

  // The host adds up micro-batches, so it has to wait for the copy itself. (An event wait orders only the stream.)
  void settle() override {
    if (to_add) {
      CUDA_CHECK(cudaEventSynchronize(done));
      host_add(travelling->gradient_shard.data, travelling->gradient_shard.data, to_add.data, to_add.numel());
      to_add = Buffer();
    }
    Zero2::settle();
  }

  void finish_gradients(Transformer& model) override {
    Zero2::finish_gradients(model);
    CUDA_CHECK(cudaStreamSynchronize(comm));  // the host reads them next
  }

  // Up: AdamW::update_unit runs on the host, because storage() has put its state there.
  void update(AdamW& adamw, float lr, float gradient_scale) override {
    adamw.begin_step();
    for (Unit& unit : adamw.model().params().units()) {
      adamw.update_unit(unit, lr, gradient_scale);
      Tensor mine(unit.weights.data + unit.begin(), {unit.share()});
      device.from_host(mine.data, unit.weight_shard.data, unit.share(), comm);
      shards.all_gather<real>(unit.weights, mine, comm);
    }
    CUDA_CHECK(cudaEventRecord(done, comm));
    CUDA_CHECK(cudaStreamWaitEvent(device.stream(), done, 0));
  }

  Buffer to_add;  // on the host: the sum of a later micro-batch
};

static Options offload_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  o.extra["every"] = {1, "1: gradients go down at every micro-batch; 0: they stay whole until the last"};
  return o;
}

LESSON(offload, "ZeRO-Offload: optimizer state and update in host memory", offload_defaults({})) {
  Group& all = lesson.world().all();
  Offload offload(all, lesson.option("every") != 0);
  Transformer model(lesson.config(), offload, lesson.device(), lesson.seed());
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);
      model.backward(part);            // <- the idea: gradients go down in here,
    }
    offload.finish_gradients(model);
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));  // the host's
    lesson.log(step, loss, norm, model);
    offload.update(adamw, lesson.learning_rate(step), lesson.clip_factor(norm));  // and parameters come up in here
  }

  int64_t Psi = 0, largest = 0;  // with padding
  for (const Unit& unit : model.params().units()) Psi += unit.padded, largest = std::max(largest, unit.padded);
  const int64_t d = all.size(), B = sizeof(real), state = B == 4 ? 8 : 12, steps = int64_t(lesson.steps().size());
  const int64_t half = Psi / d * (d - 1), units = lesson.config().units();
  const int m = lesson.options().micro_batches, k = offload.reductions(m);
  lesson.expect_host_link(steps * k * B * Psi / d, steps * B * Psi / d, "steps B Psi/d, down k times, k = m or 1");
  lesson.expect_sent("world", "reduce_scatter", steps * k * B * half, "steps k B Psi (d-1)/d");
  lesson.expect_sent("world", "all_gather", steps * B * half, "steps B Psi (d-1)/d");
  lesson.expect_calls("world", "reduce_scatter", steps * k * units, "steps k units");
  lesson.expect_calls("world", "all_gather", steps * units, "steps x units");
  lesson.expect_peak(Memory::parameters, B * Psi, "B Psi");
  lesson.expect_peak(Memory::gradients, B * offload.most_whole(model.params(), m, d),
                     k < m ? "B (Psi + head/d), or below a small head more"
                           : "B (largest adjacent pair of units, and 1/d of the first; a tied table more)");
  lesson.expect_peak(Memory::optimizer, 0, "nothing");
  lesson.expect_peak(Memory::communication, 0, "nothing");
  lesson.expect_peak(Memory::host, 2 * B * Psi / d + state * adamw.elements() + (k > 1 ? B * largest / d : 0),
                     "16 Psi/d, and one sum to be added if micro-batches go down");
  lesson.expect_activations(model);
  print_state_table(lesson, adamw, {.stage = 2, .ranks = d, .reduce_each = offload.every, .offload = true},
                    (k + 1) * half);
  lesson.finish(adamw);
  return lesson.prove(model);
}
