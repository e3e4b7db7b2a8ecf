// collectives.cpp - what a collective sends and how long it takes, before anything runs.
//
//   make collectives ARGS="--ranks 8 --bytes 200e6 --gbps 12.5 --us 100"
//   make collectives ARGS="--params 175e9 --model-ranks 64"             the gradients of a model cut by TP x PP = 64
//   make collectives ARGS="--bytes 14e9 --gbps 50 --us 5 --backward-ms 800 --buckets 560"    DDP's overlap
//
// Arithmetic only, all of it in src/formulas.h; lessons 02 to 04 measure the same. A GB is 1e9 bytes.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "../src/error.h"
#include "../src/formulas.h"

namespace {

struct Job {
  double ranks = 8, bytes = 200e6, gbps = 12.5, us = 5, nodes = 0;
  double params = 0, model_ranks = 1, element = 2;  // instead of bytes: a model's gradients
  double backward_ms = 0, buckets = 1;
  double bandwidth() const { return gbps * 1e9; }
  double latency() const { return us * 1e-6; }
};

std::string gb(double bytes) { return bytes < 1e8 ? format("%.3f MB", bytes / 1e6) : format("%.3f GB", bytes / 1e9); }

void print_volumes(const Job& j) {
  struct Row {
    const char* name;
    Collective kind;
    const char *share, *used;
  };
  const Row rows[] = {
      {"all-reduce", Collective::all_reduce, "2 (n-1)/n", "gradients of data parallelism; activations of TP"},
      {"reduce-scatter", Collective::reduce_scatter, "(n-1)/n", "gradients of ZeRO and FSDP; leaving a region of SP"},
      {"all-gather", Collective::all_gather, "(n-1)/n", "parameters of ZeRO and FSDP; entering a region of SP"},
      {"all-to-all", Collective::all_to_all, "(n-1)/n", "tokens to experts; heads of Ulysses. S: one rank's buffer"},
      {"broadcast", Collective::broadcast, "1", "initial weights"},
      {"reduce", Collective::reduce, "1", "logging; the first half of a root's all-reduce"},
      {"send", Collective::send, "1", "activations from stage to stage; keys of ring attention"},
  };
  std::printf("sent by each rank; the share is also busbw / algbw\n");
  for (const Row& r : rows)
    std::printf("  %-15s %12s   %-9s S   %s\n", r.name, gb(sent_share(r.kind, j.ranks) * j.bytes).c_str(), r.share, r.used);
  if (j.nodes > 1)
    std::printf("  between %.0f nodes: %s by each of %g ranks of a node, 2 (M-1)/M S/g; a flat ring has %s on each of its "
                "links\n", j.nodes, gb(hierarchical_bytes_between(j.bytes, j.nodes, j.ranks / j.nodes)).c_str(),
                j.ranks / j.nodes, gb(sent_share(Collective::all_reduce, j.ranks) * j.bytes).c_str());
}

void print_times(const Job& j) {
  const double S = j.bytes, n = j.ranks, a = j.latency(), B = j.bandwidth();
  auto row = [](const char* name, double seconds, const char* how) {
    std::printf("  %-18s %12.4f milliseconds   %s\n", name, 1e3 * seconds, how);
  };
  std::printf("time of an all-reduce\n");
  const double ring = ring_all_reduce_seconds(S, n, a, B);
  row("ring", ring, "2 (n-1) latency + 2 (n-1)/n S/bandwidth");
  row("tree", tree_all_reduce_seconds(S, n, a, B), "2 log2(n) (latency + S/bandwidth)");
  if (std::exp2(std::round(std::log2(n))) == n)
    row("halving, doubling", halving_all_reduce_seconds(S, n, a, B), "2 log2(n) latency + 2 (n-1)/n S/bandwidth");
  row("root", root_all_reduce_seconds(S, n, a, B), "2 (n-1) (latency + S/bandwidth)");
  row("parameter server", server_seconds(S, n, 1, a, B), "gradients there, parameters back: as the root");
  row("n servers", server_seconds(S, n, n, a, B), "as the ring");
  std::printf("  the ring's algbw is %.3f GB per second, its busbw %.3f: the port's %g less its latencies\n", S / ring / 1e9,
              S / ring / 1e9 * sent_share(Collective::all_reduce, n), j.gbps);
}

void print_growth(const Job& j) {
  std::printf("with the number of ranks\n  %6s  %16s  %7s  %10s  %10s  %10s\n", "n", "ring: sent", "of S", "ring, msec",
              "tree, msec", "root, msec");
  for (double n : {2, 4, 8, 16, 64, 256, 1024}) {
    const double share = sent_share(Collective::all_reduce, n), a = j.latency(), B = j.bandwidth();
    std::printf("  %6.0f  %16s  %7.4f  %10.3f  %10.3f  %10.3f\n", n, gb(share * j.bytes).c_str(), share,
                1e3 * ring_all_reduce_seconds(j.bytes, n, a, B), 1e3 * tree_all_reduce_seconds(j.bytes, n, a, B),
                1e3 * root_all_reduce_seconds(j.bytes, n, a, B));
  }
}

void print_overlap(const Job& j) {
  const double produced = j.backward_ms / j.buckets;
  const double drained = 1e3 * ring_all_reduce_seconds(j.bytes / j.buckets, j.ranks, j.latency(), j.bandwidth());
  const double end = overlapped_seconds(j.buckets, produced, drained), backward = j.backward_ms;
  std::printf("backward of %g milliseconds in %g buckets of %s\n", backward, j.buckets, gb(j.bytes / j.buckets).c_str());
  std::printf("  a bucket is complete every %.3f milliseconds, and reduced in %.3f\n", produced, drained);
  std::printf("  all reduced after    %9.1f milliseconds, %.1f of them exposed: %s\n", end, end - backward,
              drained <= produced ? "only the last bucket" : "the link is behind from the first bucket on");
  std::printf("  without overlap      %9.1f milliseconds\n", backward + j.buckets * drained);
}

int run(int argc, char** argv) {
  CLI::App app("collectives: what is sent and how long it takes");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Job j;
  app.add_option("--ranks", j.ranks, "ranks, n");
  app.add_option("--bytes", j.bytes, "bytes of the whole tensor, S");
  app.add_option("--gbps", j.gbps, "bandwidth of a rank's port, GB/s, one way");
  app.add_option("--us", j.us, "latency of a message, microseconds");
  app.add_option("--nodes", j.nodes, "nodes that the ranks are on; 0: not said");
  app.add_option("--params", j.params, "instead of --bytes: the gradients of so many parameters");
  app.add_option("--model-ranks", j.model_ranks, "with --params: ranks that one copy of the model is cut over, TP x PP");
  app.add_option("--element", j.element, "with --params: bytes of a gradient");
  app.add_option("--backward-ms", j.backward_ms, "milliseconds of backward, to overlap with; 0: not said");
  app.add_option("--buckets", j.buckets, "buckets that the bytes are reduced in");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  auto at_least = [](const char* option, double value, double least) {
    if (!(value >= least)) throw Error(format("%s is %g; it must be at least %g", option, value, least));
  };
  at_least("--ranks", j.ranks, 2);
  at_least("--bytes", j.bytes, 1);
  at_least("--us", j.us, 0);
  at_least("--nodes", j.nodes, 0);
  at_least("--params", j.params, 0);
  at_least("--model-ranks", j.model_ranks, 1);
  at_least("--element", j.element, 1);
  at_least("--backward-ms", j.backward_ms, 0);
  at_least("--buckets", j.buckets, 1);
  if (!(j.gbps > 0)) throw Error(format("--gbps is %g; it must be above 0", j.gbps));
  if (j.ranks != std::floor(j.ranks)) throw Error(format("--ranks is %g; it must be a whole number", j.ranks));
  if (j.nodes > 0 && std::fmod(j.ranks, j.nodes) != 0)
    throw Error(format("--nodes %g does not divide the %g ranks; every node has the same number", j.nodes, j.ranks));
  if (j.params > 0) {
    j.bytes = j.element * j.params / j.model_ranks;
    std::printf("gradients of %g parameters, %g bytes each, over %g ranks of a copy: %s on each\n", j.params, j.element,
                j.model_ranks, gb(j.bytes).c_str());
  }
  std::printf("S = %s on n = %.0f ranks; a port passes %g GB each second, one way, after %g microseconds\n",
              gb(j.bytes).c_str(), j.ranks, j.gbps, j.us);
  print_volumes(j);
  print_times(j);
  print_growth(j);
  if (j.backward_ms > 0) print_overlap(j);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& wrong) {
    std::fprintf(stderr, "collectives: %s\n", wrong.what());
    return 1;
  }
}
