// scaling.cpp - the time to exchange gradients against the number of ranks: one server, n servers, a ring.
//
//   make scaling                          over a simulated link of 0.05 GB/s and 50 us a message
//
// The exchange is that of the lessons, without training: 02_dp's push and pull, 03_ring's all-reduce, on the gradients of
// the default model. A slow link makes the port of the one server visible on any machine.  notes/parameter_server.md
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "../kernels/kernels.h"
#include "../src/data_parallel.h"
#include "../src/formulas.h"
#include "../src/lesson.h"

namespace dp_lesson {
#include "../lessons/02_dp.cpp"
}
namespace ring_lesson {
#include "../lessons/03_ring.cpp"
}

namespace {

struct Exchange {
  double seconds;       // until the slowest rank is done, median of 3
  int64_t busiest;      // the most bytes that a rank sent
};

Exchange measure(Options options, int n, int servers) {  // servers 0: a ring
  Exchange result{};
  options.world.threads = n;
  const int status = run_ranks(0, nullptr, "scaling", options.world, [&](int rank) {
    Device device(rank);
    World world(device);
    std::unique_ptr<DataParallel> strategy;
    if (servers) strategy = std::make_unique<dp_lesson::ParameterServer>(world.all(), servers);
    else strategy = std::make_unique<ring_lesson::RingDataParallel>(world.all());
    Transformer model(options.model, *strategy, device, 1);
    AdamW adamw(model, options);
    for (Unit& unit : model.params().units())
      CUDA_CHECK(cudaMemsetAsync(unit.gradients.data, 0, unit.gradients.bytes(), device.stream()));
    std::vector<double> times;
    for (int run = 0; run < 3; ++run) {
      device.synchronize();
      world.reset_traffic();
      world.sum(0);  // all ranks begin together
      const double start = seconds();
      strategy->finish_gradients(model);
      strategy->update(adamw, 0, 1);
      device.synchronize();
      world.sum(0);  // and the slowest one counts
      times.push_back(seconds() - start);
    }
    int64_t sent = 0;
    for (const Traffic& row : world.traffic())
      if (row.group == "world") sent += row.sent;
    int64_t busiest = 0;
    for (const std::string& text : world.gather(std::to_string(sent))) busiest = std::max<int64_t>(busiest, std::stoll(text));
    std::sort(times.begin(), times.end());
    if (rank == 0) result = {times[1], busiest};
    return 0;
  });
  if (status) throw Error("a rank failed");
  return result;
}

int run(int argc, char** argv) {
  CLI::App app("scaling: the time to exchange gradients against the number of ranks");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Options options;
  options.model.hidden = 384;
  int most = 8;
  options.world.link_gbps = 0.05, options.world.link_us = 50;
  app.add_option("--most", most, "the largest number of ranks; 2, 4, 8 .. up to it are measured");
  app.add_option("--gbps", options.world.link_gbps, "bandwidth of the simulated link, GB/s a port; 0: not slowed down");
  app.add_option("--us", options.world.link_us, "and microseconds per message");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  if (most < 2 || most > 64) throw Error(format("--most is %d; choose 2 to 64", most));
  std::printf("gradients of %lld parameters and back, over a simulated link of %g GB/s and %g us\n",
              (long long)options.model.parameters(), options.world.link_gbps, options.world.link_us);
  std::printf("  %5s  %34s  %34s  %34s\n", "", "one server", "n servers", "ring");
  std::printf("  %5s", "n");
  for (int i = 0; i < 3; ++i) std::printf("  %18s %15s", "most sent, bytes", "ms");
  std::printf("\n");
  for (int n = 2; n <= most; n *= 2) {
    std::printf("  %5d", n);
    for (int servers : {1, n, 0}) {
      const Exchange e = measure(options, n, servers);
      std::printf("  %18lld %15.1f", (long long)e.busiest, 1e3 * e.seconds);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& wrong) {
    std::fprintf(stderr, "scaling: %s\n", wrong.what());
    return 1;
  }
}
