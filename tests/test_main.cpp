// The tests' main. Fresh buffers are NaN throughout: whatever reads before it writes shows.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#ifndef RINGTRON_CUDA
#include "../src/sim/sim.h"
#endif

int main(int argc, char** argv) {
#ifndef RINGTRON_CUDA
  sim::poison_allocations(true);
#endif
  return doctest::Context(argc, argv).run();
}
