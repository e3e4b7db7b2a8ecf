// bench_pipeline.h - the work that a pipeline adds: processor seconds of all ranks over those of one rank that trains the
// same tokens in the same micro-batches. Waiting must cost next to nothing, whatever the bubble.
#pragma once
#include "../lessons/08_1f1b.cpp"

#include <algorithm>
#include <ctime>

#include "../src/random.h"

// Processor seconds of all threads of this process, for `steps` steps on `ranks` thread ranks.
inline double pipeline_core_seconds(int ranks, int steps) {
  Options options;
  options.model = {256, 256, 4, 8, 4, 704, 128};  // vocabulary, dim, layers, heads, kv heads, hidden, seq
  options.batch = 8;
  options.world.threads = ranks;
  GlobalBatch global{options.batch, options.model.seq, {}, {}, int64_t(options.batch) * options.model.seq};
  for (int64_t i = 0; i < global.valid_tokens; ++i) {
    global.inputs.push_back(int(random_bits(1, 0, i) % options.model.vocab));
    global.targets.push_back(int(random_bits(2, 0, i) % options.model.vocab));
  }
  auto used = [] {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
  };
  double spent = 0;
  const int status = run_ranks(0, nullptr, "bench", options.world, [&](int rank) {
    Device device(rank);
    World world(device);
    Pipeline pipeline(world.all(), options.model, one_f_one_b_order);
    Transformer model(options.model, pipeline, device, 1);
    AdamW adamw(model, options);
    double start = 0;
    for (int step = -1; step < steps; ++step) {  // step -1 warms up
      if (step == 0) {
        world.sum(0);
        if (rank == 0) start = used();
      }
      const auto parts = micro_batches(device, global, pipeline.view(global.samples, global.seq), 4);
      model.start_step();
      pipeline.run(model, parts);
      world.sum(model.loss());
      const double norm = std::sqrt(world.sum(model.squared_gradient_norm()));
      adamw.step(1e-3f, AdamW::clip_factor(norm, 1));
    }
    world.sum(0);
    if (rank == 0) spent = used() - start;
    return 0;
  });
  if (status) throw Error("the ranks of the pipeline failed");
  return spent;
}

inline double pipeline_inflation(int ranks) {
  std::vector<double> ratios;
  for (int round = 0; round < 5; ++round) {  // side by side, since the machine's speed changes
    const double one = pipeline_core_seconds(1, 3);
    ratios.push_back(pipeline_core_seconds(ranks, 3) / one);
  }
  std::sort(ratios.begin(), ratios.end());
  return ratios[ratios.size() / 2];
}
