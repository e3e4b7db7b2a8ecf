// hangs.cpp - ways in which ranks get stuck, to see how each is found.
//
//   make hangs ARGS="--kind order"      two ranks call two collectives in different orders
//
// Every rank does what a trainer does: a few all-reduces of gradients, one after the other. Then rank 1 (or everybody,
// for a cycle) does the wrong thing. All ranks stop, the table says what each was doing, the exit status is not zero.
//                                                                                     notes/debugging_hangs.md
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <stdexcept>

#include "../src/world.h"

namespace {

struct Kind {
  const char* name;
  const char* what;
};
constexpr Kind kKinds[] = {
    {"none", "nothing goes wrong"},
    {"order", "rank 1 calls two collectives in the other order"},
    {"count", "rank 1 reduces one element less"},
    {"skip", "rank 1 leaves one all-reduce out, as after an uneven number of batches"},
    {"branch", "rank 0 alone calls a broadcast: a collective behind `if (rank == 0)`"},
    {"cycle", "every rank sends to the next one first, and would receive later"},
    {"throw", "rank 1 throws"},
    {"exit0", "rank 1 calls exit(0), which a launcher takes for success"},
    {"slow", "rank 1 comes 2 seconds late: no hang, unless --timeout is shorter"},
};

void train(const std::string& kind, Device& device, World& world) {
  Group& all = world.all();
  const int rank = all.rank(), n = all.size();
  const bool culprit = rank == 1 % n;
  Buffer gradients = device.allocate<real>(Memory::gradients, {1000}), more = device.allocate<real>(Memory::gradients, {1000});
  Tensor shorter(gradients.data, {999});

  for (int step = 1; step <= 4; ++step) {  // step 3 is the one that goes wrong
    if (step == 3 && culprit) {
      usleep(300'000);  // the others get as far as they can
      if (kind == "skip") continue;
      if (kind == "throw") throw std::runtime_error("the data of step 3 can't be read");
      if (kind == "exit0") exit(0);
      if (kind == "slow") sleep(2);
    }
    if (step == 3 && kind == "branch" && rank == 0) all.broadcast<real>(more, 0);
    if (step == 3 && kind == "cycle") {
      all.send<real>(gradients, (rank + 1) % n);
      all.receive<real>(more, (rank + n - 1) % n);
    }
    if (step == 3 && kind == "order") {
      if (culprit) all.broadcast<real>(more, 0);
      all.all_reduce<real>(gradients);
      if (!culprit) all.broadcast<real>(more, 0);
    } else {
      all.all_reduce(step == 3 && kind == "count" && culprit ? shorter : Tensor(gradients));
    }
  }
  if (rank == 0) std::printf("hangs: 4 steps on %d ranks, and nobody waits\n", n);
}

int run(int argc, char** argv) {
  std::string kinds;
  for (const Kind& k : kKinds) kinds += format("\n  %-7s %s", k.name, k.what);
  CLI::App app("hangs: ways in which ranks get stuck, and how each is found. --kind is one of" + kinds);
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::string kind = "order";
  WorldOptions options;
  options.threads = 3;
  app.add_option("--kind", kind, "what goes wrong");
  app.add_option("--threads", options.threads, "ranks, as threads of one process");
  app.add_option("--timeout", options.timeout, "seconds that a rank may wait without a byte moving");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  bool known = false;
  for (const Kind& k : kKinds) known = known || kind == k.name;
  if (!known) throw Error("--kind " + kind + " is unknown; choose one of" + kinds);
  if (ranks_to_run(options) < 2 || ranks_to_run(options) > 64)
    throw Error(format("%d ranks; choose 2 to 64, since one waits for nobody", ranks_to_run(options)));
  if (!(options.timeout > 0)) throw Error(format("--timeout is %g; it must be above 0", options.timeout));
  return run_ranks(argc, argv, "hangs", options, [&](int rank) {
    Device device(rank);
    World world(device);
    train(kind, device, world);
    return 0;
  });
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& wrong) {
    return cannot_run(argc, argv, "hangs", wrong.what());
  }
}
