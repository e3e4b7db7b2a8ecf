// grid.cpp - which rank does what: every group of a grid, a picture of it, and what crosses a node.
//
//   make grid ARGS="--tp 2 --pp 4 --dp 2"
//   make grid ARGS="--tp 2 --cp 2 --dp 2 --pp 2 --nodes 8"      with 8 ranks in a node
//   make grid ARGS="--world 16 --pp 2 --ep 4"                   dp follows from the world
//
// All of it is src/grid.h; nothing runs.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "../src/error.h"
#include "../src/grid.h"

namespace {

constexpr int kColumns = 110;

std::string text_of(const std::vector<int>& group) {
  std::string text = "[";
  for (int rank : group) text += (text.size() > 1 ? "," : "") + std::to_string(rank);
  return text + "]";
}

// Words one after the other, a new line where the next would be too long.
void print_wrapped(const std::string& head, const std::vector<std::string>& words) {
  std::string line = head;
  for (const std::string& word : words) {
    if (line.size() + 1 + word.size() > kColumns && line.size() > head.size()) {
      std::printf("%s\n", line.c_str());
      line.assign(head.size(), ' ');
    }
    line += " " + word;
  }
  std::printf("%s\n", line.c_str());
}

// One block a stage, side by side. In it the fastest axis of more than one rank runs to the right, if it
// fits, and the others down.
void print_picture(const Grid& g, std::vector<std::string> axes) {
  std::erase_if(axes, [&](const std::string& axis) { return g.size(axis) == 1; });
  if (!axes.empty() && g.size(axes[0]) > 16) axes.insert(axes.begin(), "");
  const std::string across = axes.empty() ? "" : axes[0];
  const int columns = across.empty() ? 1 : g.size(across), stage = g.world() / g.pp, rows = stage / columns;
  int cell = int(std::to_string(g.world() - 1).size());
  if (!across.empty()) cell = std::max(cell, int((across + std::to_string(columns - 1)).size()));
  cell += 1;

  auto row_name = [&](int row) {
    std::string name;
    for (size_t i = axes.size(); i-- > 1;)  // the slowest first, as an outer loop
      name += format("%s%d ", axes[i].c_str(), g.coordinate(row * columns, axes[i]));
    return name;
  };
  int left = 0;
  for (int row = 0; row < rows; ++row) left = std::max(left, int(row_name(row).size()));
  const int block = std::max(columns * cell, int(format("pp%d", g.pp - 1).size()) + 1) + 2;
  const int at_once = std::max(1, (kColumns - left) / block);

  for (int from = 0; from < g.pp; from += at_once) {
    const int to = std::min(g.pp, from + at_once);
    auto line = [&](const std::string& head, auto text_of_stage) {
      std::string text = format("  %-*s", left, head.c_str());
      for (int p = from; p < to; ++p) text += format("|%-*s", block - 1, text_of_stage(p).c_str());
      std::printf("%s|\n", text.c_str());
    };
    line("", [&](int p) { return format(" pp%d", p); });
    if (!across.empty())
      line("", [&](int) {
        std::string text;
        for (int c = 0; c < columns; ++c)
          text += format("%*s", cell, format("%s%d", across.c_str(), c).c_str());
        return text;
      });
    for (int row = 0; row < rows; ++row)
      line(row_name(row), [&](int p) {
        std::string text;
        for (int c = 0; c < columns; ++c) text += format("%*d", cell, p * stage + row * columns + c);
        return text;
      });
  }
}

void print_groups(const Grid& g, bool experts) {
  for (const GroupKind& kind : kGroupKinds) {
    if (kind.expert != experts) continue;
    const auto groups = g.groups(kind.name);
    std::printf("\n%s: %s\n", kind.name, kind.purpose);
    if (groups[0].size() == 1) {
      std::printf("    every rank alone: this group sends nothing\n");
      continue;
    }
    std::vector<std::string> words;
    for (const std::vector<int>& group : groups) words.push_back(text_of(group));
    print_wrapped(format("%4zu x %zu:", groups.size(), groups[0].size()), words);
  }
}

void print_nodes(const Grid& g, bool experts, int per_node) {
  const int world = g.world();
  std::printf("\nnodes of %d ranks: links inside a node are fast, between nodes slow\n", per_node);
  for (int node = 0; node * per_node < world; ++node) {
    const int first = node * per_node, last = first + per_node - 1;
    const int from = g.coordinate(first, "pp"), to = g.coordinate(last, "pp");
    std::printf("  node %d: ranks %d-%d, %s\n", node, first, last,
                from == to ? format("stage %d", from).c_str() : format("stages %d-%d", from, to).c_str());
  }
  for (const GroupKind& kind : kGroupKinds) {
    if (kind.expert && !experts) continue;
    const auto groups = g.groups(kind.name);
    if (groups[0].size() == 1) continue;
    std::vector<std::string> cross;
    for (const std::vector<int>& group : groups)  // ascending, so its ends are enough
      if (group.front() / per_node != group.back() / per_node) cross.push_back(text_of(group));
    if (cross.empty()) {
      std::printf("  %-10s all %zu inside a node\n", kind.name, groups.size());
    } else if (cross.size() == groups.size()) {
      std::printf("  %-10s all %zu cross\n", kind.name, groups.size());
    } else {
      print_wrapped(
          format("  %-10s %zu inside, %zu cross:", kind.name, groups.size() - cross.size(), cross.size()),
          cross);
    }
  }
}

int run(int argc, char** argv) {
  CLI::App app("grid: which ranks form which group, in Megatron's order (tensor, context, data, pipeline)");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  Grid g;
  int world = 0, per_node = 0;
  app.add_option("--tp", g.tp, "tensor parallel ranks: every matrix cut in so many parts");
  app.add_option("--cp", g.cp, "context parallel ranks: every sequence cut in so many parts");
  CLI::Option* dp =
      app.add_option("--dp", g.dp, "data parallel replicas; left out with --world: what is left");
  app.add_option("--pp", g.pp, "pipeline stages: the layers cut in so many parts");
  app.add_option("--etp", g.etp, "tensor parallel ranks inside an expert");
  app.add_option("--ep", g.ep, "expert parallel ranks; they are ranks of the same world, not more");
  app.add_option("--world", world, "ranks in all, to be checked; 0: tp x cp x dp x pp");
  app.add_option("--nodes,--ranks-per-node", per_node,
                 "ranks of a node: say which groups cross nodes; 0: don't");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  if (world < 0) throw Error(format("--world is %d; it must be at least 1, or 0: not given", world));
  if (world > 0 && dp->count() == 0) g.dp = std::max(1, world / g.world());
  g.validate(world > 0 ? world : g.world());
  world = g.world();
  if (world > 65536) throw Error(format("%d ranks are too many to print; at most 65536", world));
  if (per_node < 0) throw Error(format("--nodes is %d; it is the ranks of a node, or 0", per_node));
  if (per_node > 0 && world % per_node)
    throw Error(
        format("--nodes %d does not divide the %d ranks; every node has the same number", per_node, world));

  const bool experts = g.ep > 1 || g.etp > 1;
  std::printf("%d ranks: tp %d x cp %d x dp %d x pp %d; rank = tp + %d cp + %d dp + %d pp\n", world, g.tp,
              g.cp, g.dp, g.pp, g.tp, g.tp * g.cp, g.tp * g.cp * g.dp);
  print_picture(g, {"tp", "cp", "dp"});
  print_groups(g, false);
  if (experts) {
    std::printf("\nthe same ranks for experts: etp %d x ep %d x edp %d x pp %d\n", g.etp, g.ep, g.edp(),
                g.pp);
    print_picture(g, {"etp", "ep", "edp"});
    print_groups(g, true);
  }
  if (per_node > 0) print_nodes(g, experts, per_node);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& wrong) {
    std::fprintf(stderr, "grid: %s\n", wrong.what());
    return 1;
  }
}
