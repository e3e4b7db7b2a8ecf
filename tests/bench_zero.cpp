// What ZeRO costs in work: CPU seconds of all ranks together for one step, as a ratio to DDP's in the same run. 4 ranks
// as threads, dim 256, steps alternating between the strategies, medians. Waiting must not spin: it would count here.
// bench<TAB>name<TAB>value<TAB>unit<TAB>goal
#include <ctime>

#include "../lessons/04_ddp.cpp"
#include "../lessons/13_zero1.cpp"
#include "../lessons/15_zero3.cpp"
#include "../lessons/16_offload.cpp"
#include "../src/random.h"

namespace {

double process_seconds() {  // of every thread: ranks and their streams
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

//                         vocab  dim  layers heads kv hidden seq
const ModelConfig kModel{256, 256, 4, 8, 4, 704, 64};
constexpr int kRanks = 4, kSamples = 16, kRounds = 11;

int bench(int rank) {
  Device device(rank);
  World world(device);
  Group& all = world.all();
  Options options;
  options.model = kModel;
  GlobalBatch batch{kSamples, kModel.seq, {}, {}, int64_t(kSamples) * kModel.seq};
  for (int64_t i = 0; i < batch.valid_tokens; ++i) {
    batch.inputs.push_back(int(random_bits(1, 0, i) % kModel.vocab));
    batch.targets.push_back(int(random_bits(2, 0, i) % kModel.vocab));
  }
  struct Run {
    const char* name;
    const char* goal;
    std::unique_ptr<Parallel> parallel;
    std::unique_ptr<Transformer> model;
    std::unique_ptr<AdamW> adamw;
    std::vector<double> seconds, ratios;
  };
  Run runs[5];
  runs[0].name = "ddp", runs[0].goal = "-", runs[0].parallel = std::make_unique<Ddp>(all, 4 << 20);
  runs[1].name = "zero1", runs[1].goal = "<=1.10", runs[1].parallel = std::make_unique<Zero1>(all);
  runs[2].name = "zero2", runs[2].goal = "<=1.10", runs[2].parallel = std::make_unique<Zero2>(all, all, true, true);
  runs[3].name = "zero3", runs[3].goal = "<=1.25";
  runs[3].parallel = std::make_unique<Zero3>(all, all, nullptr, true, true, false);
  runs[4].name = "offload", runs[4].goal = "-", runs[4].parallel = std::make_unique<Offload>(all, true);
  for (Run& run : runs) {
    run.model = std::make_unique<Transformer>(kModel, *run.parallel, device, 1);
    run.adamw = std::make_unique<AdamW>(*run.model, options);
    if (auto* zero3 = dynamic_cast<Zero3*>(run.parallel.get())) zero3->params = &run.model->params();
  }
  for (int round = -1; round < kRounds; ++round)  // round -1 warms up
    for (Run& run : runs) {
      const auto parts = micro_batches(device, batch, run.parallel->view(kSamples, kModel.seq), 1);
      world.sum(0);  // all ranks begin together
      const double start = process_seconds();
      run.model->start_step();
      run.model->forward(parts[0]);
      run.model->backward(parts[0]);
      run.parallel->finish_gradients(*run.model);
      run.model->loss();
      const double norm = std::sqrt(world.sum(run.model->squared_gradient_norm()));
      run.parallel->update(*run.adamw, 1e-3f, AdamW::clip_factor(norm, 1));
      device.synchronize();
      world.sum(0);  // and the slowest one ends it
      if (round < 0) continue;
      run.seconds.push_back(process_seconds() - start);
      run.ratios.push_back(run.seconds.back() / runs[0].seconds.back());
    }
  if (rank == 0)
    for (Run& run : runs) {
      if (&run == runs) std::printf("bench\tddp/step/%d\t%.4g\tcore-s\t-\n", kRanks, median(run.seconds));
      else std::printf("bench\t%s/inflation/%d\t%.3f\tx\t%s\n", run.name, kRanks, median(run.ratios), run.goal);
    }
  return 0;
}

}  // namespace

int main() {
  WorldOptions world;
  world.threads = kRanks;
  return run_ranks(0, nullptr, "bench_zero", world, bench);
}
