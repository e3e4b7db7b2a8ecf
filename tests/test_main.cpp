// The tests' main. Fresh buffers are NaN throughout: whatever reads before it writes shows.
// In checked simulation also --order=forward|reverse|random --seed=N --block=threads (src/sim/checked.h).
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#ifndef RINGTRON_CUDA
#include <cuda_runtime.h>

#include "../src/sim/sim.h"
#endif
#ifdef SIM_CHECKED
#include <cstdio>
#include <cstdlib>
#include <string>

// Takes our options out of the command line. False: one of them makes no sense.
static bool take_options(int& argc, char** argv) {
  int kept = 0;
  bool ok = true;
  for (int i = 0; i < argc; ++i) {
    const std::string text = argv[i];
    if (text == "--order=forward") sim::checked.order = sim::Order::forward;
    else if (text == "--order=reverse") sim::checked.order = sim::Order::reverse;
    else if (text == "--order=random") sim::checked.order = sim::Order::random;
    else if (text.starts_with("--seed=")) sim::checked.seed = unsigned(std::atoi(text.c_str() + 7));
    else if (text.starts_with("--block=")) sim::checked.block = std::atoi(text.c_str() + 8);
    else argv[kept++] = argv[i];
    if (text.starts_with("--order=") && kept && argv[kept - 1] == argv[i]) ok = false;
  }
  argc = kept;
  return ok && sim::checked.block >= 0 && sim::checked.block <= 1024;
}
#endif

int main(int argc, char** argv) {
#ifndef RINGTRON_CUDA
  sim::poison_allocations(true);
#endif
#ifdef SIM_CHECKED
  if (!take_options(argc, argv)) return std::puts("test_all: --order=forward|reverse|random --seed=N --block=0..1024"), 2;
  const int status = doctest::Context(argc, argv).run();
  if (status) std::printf("to repeat: %s\n", sim::checked.text().c_str());
  return status;
#else
  return doctest::Context(argc, argv).run();
#endif
}
