// schedules.cpp - the four pipeline schedules side by side: drawn, timed, counted. Nothing trains.
//
//   make schedules ARGS="--p 4 --m 8 --v 2"        also writes out/schedules-<name>.svg
//
// The orders are those of the lessons, the timetable is src/pipeline.h's.
#include "../lessons/07_gpipe.cpp"
#include "../lessons/08_1f1b.cpp"
#include "../lessons/09_interleaved.cpp"
#include "../lessons/10_zero_bubble.cpp"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

namespace {

struct Named {
  const char* name;
  int v;
  Schedule order;
};

int show(int p, int m, int v, bool draw, const std::string& folder) {
  const Named all[] = {{"gpipe", 1, gpipe_order},
                       {"1f1b", 1, one_f_one_b_order},
                       {"interleaved", v, [v](int p, int i, int m) { return interleaved_order(p, i, m, v); }},
                       {"zero_bubble", 1, zero_bubble_order}};
  std::printf("%d stages, %d micro-batches; time in tF, a stage's forward; its backward takes 2 tF, each half of it 1\n",
              p, m);
  std::string table = format("%-16s %8s %7s %12s %12s  %s\n", "schedule", "makespan", "ideal", "bubble/ideal",
                             "bubble/step", "peak stash by stage");
  for (const Named& one : all) {
    const std::string title = one.v > 1 ? format("%s, v=%d", one.name, one.v) : one.name;
    if (std::string(one.name) == "interleaved" && m % p) {  // the one that not every m suits
      table += format("%-16s needs a multiple of %d micro-batches\n", title.c_str(), p);
      continue;
    }
    const Timetable t = simulate(p, m, one.v, one.order);
    std::string stash;
    for (int k : t.stash()) stash += format(" %d", k);
    table += format("%-16s %8g %7g %10.1f %% %10.1f %% %s%s\n", title.c_str(), t.makespan(), t.ideal(), 100 * t.overhead(),
                    100 * t.share(), stash.c_str(), one.v > 1 ? format(" chunks of 1/%d stage", one.v).c_str() : "");
    if (draw) std::printf("%s\n%s", title.c_str(), t.draw().c_str());
    if (folder.empty()) continue;
    SvgOptions svg;
    svg.title = format("%s: %d stages, %d micro-batches, %g tF of which %g are work", title.c_str(), p, m, t.makespan(),
                       t.ideal());
    svg.row = "stage", svg.unit = "tF", svg.us_per_unit = 1, svg.idle = true;
    svg.width = std::max(900, int(24 * t.makespan()));
    write_svg(folder + "/schedules-" + one.name + ".svg", t.spans(), svg);
  }
  std::printf("%s", table.c_str());
  if (!folder.empty()) std::printf("drawn in %s/schedules-*.svg\n", folder.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int p = 4, m = 8, v = 2;
  bool no_drawing = false;
  std::string folder = "out";
  CLI::App app("schedules: GPipe, 1F1B, interleaved 1F1B and ZB-H1 side by side");
  app.option_defaults()->always_capture_default();
  app.add_option("--p", p, "stages")->check(CLI::Range(1, 64));
  app.add_option("--m", m, "micro-batches")->check(CLI::Range(1, 1024));
  app.add_option("--v", v, "chunks a rank of the interleaved schedule")->check(CLI::Range(1, 16));
  app.add_option("--svg", folder, "folder for the pictures; empty: none");
  app.add_flag("--no-drawing", no_drawing, "only the table, no pictures");
  CLI11_PARSE(app, argc, argv);
  if (no_drawing) folder.clear();
  try {
    if (!folder.empty()) std::filesystem::create_directories(folder);
    return show(p, m, v, !no_drawing, folder);
  } catch (const std::exception& wrong) {
    std::fprintf(stderr, "schedules: %s\n", wrong.what());
    return 1;
  }
}
