// bench.cpp - speed, as ratios within one run: these machines are shared and noisy, so every step is held against a
// matrix-product peak measured right beside it, and the median is printed. On a CPU the clock is the time the core
// has worked for us (one rank is one thread); on a GPU it is the wall's.
// One line a figure: bench<TAB>name<TAB>value<TAB>unit<TAB>goal
#include "bench_pipeline.h"  // first: it includes a lesson without its main

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>

#include "../src/lesson.h"
#include "../src/random.h"
#include "../lessons/04_ddp.cpp"
#include "../lessons/06_sp.cpp"

namespace {

#ifdef RINGTRON_CUDA
constexpr auto now = seconds;
constexpr int kPeakSize = 8192;  // 1024 would not fill it
#else
constexpr auto now = core_seconds;
constexpr int kPeakSize = 1024;
#endif

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void print(const std::string& name, double value, const char* unit, const char* goal = "-") {
  std::printf("bench\t%s\t%.4g\t%s\t%s\n", name.c_str(), value, unit, goal);
  std::fflush(stdout);
}

GlobalBatch random_batch(const ModelConfig& c, int batch) {
  GlobalBatch global{batch, c.seq, {}, {}, int64_t(batch) * c.seq};
  for (int64_t i = 0; i < global.valid_tokens; ++i) {
    global.inputs.push_back(int(random_bits(1, 0, i) % c.vocab));
    global.targets.push_back(int(random_bits(2, 0, i) % c.vocab));
  }
  return global;
}

// Trains a model on random tokens: tokens/s, model FLOP/s, its share of the peak, time outside matrix products.
void train(const char* name, const ModelConfig& c, int batch, int micro_batches_a_step, int steps, const char* goal) {
  Options options;
  options.model = c;
  Device device;
  Parallel one_gpu;
  Transformer model(c, one_gpu, device, 1);
  AdamW adamw(model, options);
  const GlobalBatch global = random_batch(c, batch);
  std::vector<double> rates, flops, shares, outside;
  for (int step = 0; step <= steps; ++step) {
    const double peak_before = measure_matmul_peak(device, kPeakSize, now);
    device.synchronize();
    device.matmul_seconds = 0;
#ifndef RINGTRON_CUDA
    if (step % 2) device.matmul_clock = now;  // every other step, because asking the clock also takes time
#endif
    const double start = now();
    const auto parts = micro_batches(device, global, one_gpu.view(batch, c.seq), micro_batches_a_step);
    model.start_step();
    for (const MicroBatch& part : parts) {
      model.forward(part);
      model.backward(part);
    }
    model.loss();
    const double norm = std::sqrt(model.squared_gradient_norm());
    adamw.step(1e-3f, AdamW::clip_factor(norm, 1));
    device.synchronize();
    const double took = now() - start;
    if (step == 0) continue;  // warms up
    if (device.matmul_clock) {
      outside.push_back(100 * (1 - device.matmul_seconds / took));
      device.matmul_clock = nullptr;
      continue;
    }
    const double rate = double(global.valid_tokens) / took;
    rates.push_back(rate);
    flops.push_back(rate * c.flops_per_token() / 1e9);
    const double peak = 0.5 * (peak_before + measure_matmul_peak(device, kPeakSize, now));
    shares.push_back(100 * rate * c.flops_per_token() / peak);
  }
  const std::string prefix = std::string("single/") + name;
  print(prefix + "/tokens", median(rates), "tok/s");
  print(prefix + "/model_flops", median(flops), "GFLOP/s");
  print(prefix + "/share_of_peak", median(shares), "%", goal);
  if (!outside.empty()) print(prefix + "/outside_matmul", median(outside), "%");
}

#ifndef RINGTRON_CUDA
// Bytes/s of a[i] = b[i] / 2 on arrays that no cache holds, read and written. What a model does beside matrix products,
// and the operands of small ones, cannot be faster.
double measure_memory() {
  const size_t n = 32 << 20;
  std::vector<float> a(n, 1.f), b(n, 1.f);
  std::vector<double> rates;
  for (int run = 0; run < 5; ++run) {
    const double start = now();
    for (size_t i = 0; i < n; ++i) a[i] = b[i] * 0.5f;
    rates.push_back(8.0 * double(n) / (now() - start));
    std::swap(a, b);
  }
  return median(rates);
}

// CPU seconds of all ranks together (threads of this process) for some steps of training.
template <class Strategy>
double work(const ModelConfig& c, int batch, int ranks, int steps) {
  auto process_seconds = [] {
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
  };
  Options options;
  options.model = c;
  options.world.threads = ranks;
  double took = 0;
  const int status = run_ranks(0, nullptr, "bench", options.world, [&](int rank) {
    Device device(rank);
    World world(device);
    Strategy strategy(world.all(), c);
    Transformer model(c, strategy, device, 1);
    AdamW adamw(model, options);
    const GlobalBatch global = random_batch(c, batch);
    double start = 0;
    for (int step = 0; step <= steps; ++step) {
      if (step == 1) {  // the first one warms up
        world.sum(0);
        if (rank == 0) start = process_seconds();
      }
      const auto parts = micro_batches(device, global, strategy.view(batch, c.seq), 1);
      model.start_step();
      model.forward(parts[0]);
      model.backward(parts[0]);
      strategy.finish_gradients(model);
      world.sum(model.loss());
      const double norm = std::sqrt(world.sum(model.squared_gradient_norm()));
      strategy.update(adamw, 1e-3f, AdamW::clip_factor(norm, 1));
      device.synchronize();
    }
    world.sum(0);
    if (rank == 0) took = process_seconds() - start;
    return 0;
  });
  return status == 0 ? took : NAN;
}

// Work inflation: CPU seconds of all ranks over those of one rank for the same tokens. What is above 1 is the price of
// sharing: communication, smaller products, what every rank repeats, and waiting if it spins.
template <class Strategy>
void inflation(const std::string& name, const ModelConfig& c, int batch, int ranks, const char* goal) {
  std::vector<double> ratios;
  double one = work<Strategy>(c, batch, 1, 3);
  for (int round = 0; round < 5; ++round) {
    const double all = work<Strategy>(c, batch, ranks, 3), again = work<Strategy>(c, batch, 1, 3);
    ratios.push_back(all / (0.5 * (one + again)));  // one rank before and after: the machine's speed drifts
    one = again;
  }
  print(name + "/inflation/" + std::to_string(ranks), median(ratios), "x", goal);
}
#endif

struct BucketsOfAMegabyte : Ddp {
  BucketsOfAMegabyte(Group& dp, const ModelConfig&) : Ddp(dp, 1 << 20) {}
};

}  // namespace

// bench [part of a name]: only those figures.
int main(int argc, char** argv) try {
  const std::string only = argc > 1 ? argv[1] : "";
  auto wanted = [&](const std::string& name) { return name.find(only) != std::string::npos; };
  if (wanted("matmul")) {
    std::vector<double> peaks;
    Device device;
    for (int i = 0; i < 5; ++i) peaks.push_back(measure_matmul_peak(device, kPeakSize, now) / 1e9);
    print(format("matmul/%d/peak", kPeakSize), median(peaks), "GFLOP/s");
#ifndef RINGTRON_CUDA
    const double memory = measure_memory() / 1e9;
    print("memory/read_and_write", memory, "GB/s");
    print("matmul/flops_per_byte_of_memory", median(peaks) / memory, "FLOP/B");
#endif
  }
  //                 vocab  dim  layers heads kv hidden seq
  const ModelConfig small{256, 128, 4, 8, 4, 512, 128}, large{256, 512, 6, 8, 4, 1408, 256};
  if (wanted("single/dim128")) train("dim128", small, 16, 1, 24, ">=62");
  if (wanted("single/dim128_micro_batches_16")) train("dim128_micro_batches_16", small, 16, 16, 24, "-");
#ifndef RINGTRON_CUDA
  if (wanted("1f1b/inflation/2")) print("1f1b/inflation/2", pipeline_inflation(2), "x", "<=1.15");
#endif
  if (wanted("single/dim512")) train("dim512", large, 4, 1, 12, ">=87");
#ifdef RINGTRON_CUDA
  const ModelConfig gpu{32000, 2048, 16, 16, 8, 5632, 1024};  // about 900 M parameters
  if (wanted("single/gpu")) train("gpu", gpu, 8, 1, 8, "-");
#else
  const ModelConfig middle{256, 256, 4, 8, 4, 704, 128};
  if (wanted("ddp/inflation")) inflation<BucketsOfAMegabyte>("ddp", middle, 32, 4, "<=1.15");
  if (wanted("tp/inflation")) inflation<TensorParallel>("tp", middle, 8, 2, "<=1.25");
  if (wanted("sp/inflation")) inflation<SequenceParallel>("sp", middle, 8, 2, "-");
#endif
} catch (const std::exception& wrong) {
  std::fprintf(stderr, "bench: %s\n", wrong.what());
  return 1;
}
