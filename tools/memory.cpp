// memory.cpp - what each stage of ZeRO leaves on a GPU, and what it sends, for a model that is only calculated.
//
//   make memory ARGS="--params 7.5e9 --dp 64"                       the figure of the ZeRO paper
//   make memory ARGS="--params 65e9 --dp 64 --link 1.25"            and the seconds on 10 Gbit/s Ethernet
//   make memory ARGS="--params 30e9 --dp 8 --memory 80"             which of them leave room on 80 GB
//
// Arithmetic only, from src/formulas.h; 13_zero1 to 16_offload print the same table for what they really ran.
// Activations, and the units that ZeRO-2 and 3 hold whole for a moment, come on top. A GB is 1e9 bytes.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "../src/error.h"
#include "../src/formulas.h"

namespace {

int run(int argc, char** argv) {
  CLI::App app("memory: training state per GPU and traffic per step, for DDP, ZeRO-1, 2, 3 and offload");
  app.option_defaults()->always_capture_default();
  double params = 7.5e9, link = 0, memory = 0;
  int dp = 64, micro_batches = 1;
  std::string precision = "bf16";
  app.add_option("--params", params, "Psi: parameters of the model");
  app.add_option("--dp", dp, "d: ranks that divide the state");
  app.add_option("--micro-batches", micro_batches, "m: micro-batches of a step; ZeRO-2 and 3 reduce at each");
  app.add_option("--precision", precision, "bf16 (2 + 2 + 12 bytes, fp32 masters) or fp32 (4 + 4 + 8)");
  app.add_option("--link", link, "GB/s that a rank sends: adds the seconds of a step's traffic; 0: not");
  app.add_option("--memory", memory, "GB of a GPU: adds what is left for activations; 0: not");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  if (!(params >= 1 && params < 1e18)) throw Error(format("--params is %g; it must be at least 1", params));
  if (dp < 1) throw Error(format("--dp is %d; it must be at least 1", dp));
  if (micro_batches < 1) throw Error(format("--micro-batches is %d; it must be at least 1", micro_batches));
  if (precision != "bf16" && precision != "fp32")
    throw Error(format("--precision %s is not one of bf16, fp32", precision.c_str()));
  if (!(link >= 0)) throw Error(format("--link is %g; it can't be negative", link));
  if (!(memory >= 0)) throw Error(format("--memory is %g; it can't be negative", memory));

  const StateBytes& bytes = kTrainingStates[precision == "fp32" ? 0 : 1];
  const double d = dp, m = micro_batches, GB = params / 1e9;
  std::printf("%g parameters, %d + %d + %d bytes each (%s), d = %d%s; GB per GPU\n", params, bytes.weights,
              bytes.gradients, bytes.optimizer, bytes.name, dp, m > 1 ? format(", m = %d", micro_batches).c_str() : "");
  std::printf("  %-13s %10s %9s %9s %9s %7s %9s  %-15s %9s%s%s\n", "", "parameters", "gradients", "optimizer", "all",
              "saves", "host", "sent per step", "GB", link > 0 ? "   seconds" : "", memory > 0 ? "      left" : "");
  auto row = [&](const char* name, int stage, bool offload) {
    const StateShare share = zero_state(stage, d, bytes, offload);
    const double multiple = zero_sent(stage, m), sent = multiple * bytes.weights * GB * (d - 1) / d;
    std::printf("  %-13s %10.1f %9.1f %9.1f %9.1f %6.2fx %9.1f  %-15s %9.2f", name, share.weights * GB,
                share.gradients * GB, share.optimizer * GB, share.device() * GB, bytes.all() / share.device(),
                share.host * GB, format("%g Psi (d-1)/d", multiple).c_str(), sent);
    if (link > 0) std::printf(" %9.1f", sent / link);
    if (memory > 0) std::printf(" %9.1f", memory - share.device() * GB);
    std::printf("\n");
  };
  row("DDP", 0, false);
  row("ZeRO-1", 1, false);
  row("ZeRO-2", 2, false);
  row("ZeRO-3", 3, false);
  row("ZeRO-Offload", 2, true);
  std::printf("  offload, over the host link per step: %.2f GB down (%d per micro-batch and parameter, /d), %.2f GB up\n",
              m * bytes.gradients * GB / d, bytes.gradients, bytes.weights * GB / d);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& wrong) {
    std::fprintf(stderr, "memory: %s\n", wrong.what());
    return 1;
  }
}
