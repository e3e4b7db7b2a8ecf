// Groups of ranks: the lists that Megatron's documentation prints, and what must hold for every grid.
#include "../src/grid.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "../src/error.h"

namespace {

using Groups = std::vector<std::vector<int>>;

// tp, cp, dp, pp, then etp, ep
Grid grid(int tp, int cp, int dp, int pp, int etp = 1, int ep = 1) {
  Grid g;
  g.tp = tp, g.cp = cp, g.dp = dp, g.pp = pp, g.etp = etp, g.ep = ep;
  return g;
}

bool partitions(const Groups& groups, int world) {
  std::set<int> seen;
  int ranks = 0;
  for (const std::vector<int>& group : groups)
    for (int rank : group) seen.insert(rank), ++ranks;
  return ranks == world && int(seen.size()) == world && *seen.begin() == 0 && *seen.rbegin() == world - 1;
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& wrong) {
    return wrong.what();
  }
  return "no error";
}
bool has(const std::string& text, const char* part) {
  if (text.find(part) != std::string::npos) return true;
  MESSAGE("'" << text << "' lacks '" << part << "'");
  return false;
}

template <class F>
void for_every_grid(int largest, F f) {
  for (int tp = 1; tp <= largest; ++tp)
    for (int cp = 1; tp * cp <= largest; ++cp)
      for (int dp = 1; tp * cp * dp <= largest; ++dp)
        for (int pp = 1; tp * cp * dp * pp <= largest; ++pp) {
          const int stage = tp * cp * dp;
          for (int etp = 1; etp <= stage; ++etp)
            for (int ep = 1; etp * ep <= stage; ++ep)
              if (stage % (etp * ep) == 0) f(grid(tp, cp, dp, pp, etp, ep));
        }
}

}  // namespace

TEST_CASE("grid: 16 ranks, tp 2, pp 4, dp 2, as Megatron lists them") {
  const Grid g = grid(2, 1, 2, 4);
  g.validate(16);
  CHECK(g.groups("tp") == Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}});
  CHECK(g.groups("dp") == Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(g.groups("pp") == Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}});
  CHECK(g.groups("embedding") == Groups{{0, 12}, {1, 13}, {2, 14}, {3, 15}});
  CHECK(g.groups("tp-pp") == Groups{{0, 1, 4, 5, 8, 9, 12, 13}, {2, 3, 6, 7, 10, 11, 14, 15}});
  CHECK(g.group_of(6, "dp") == std::vector<int>{4, 6});
  CHECK(g.group_of(6, "embedding").empty());
  CHECK(g.group_of(14, "embedding") == std::vector<int>{2, 14});
}

TEST_CASE("grid: tp 2, cp 2, dp 2, pp 2") {
  const Grid g = grid(2, 2, 2, 2);
  g.validate(16);
  CHECK(g.groups("cp") == Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}});
  CHECK(g.groups("dp") == Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}});
  CHECK(g.groups("dp-cp") == Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}});
  CHECK(g.groups("cp-dp") == g.groups("dp-cp"));
  CHECK(g.groups("tp-cp") == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  CHECK(g.groups("tp-dp") == Groups{{0, 1, 4, 5}, {2, 3, 6, 7}, {8, 9, 12, 13}, {10, 11, 14, 15}});
  CHECK(g.groups("pp") == Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}});
  CHECK(g.coordinate(13, "tp") == 1);  // 13 = 1 + 2*0 + 4*1 + 8*1
  CHECK(g.coordinate(13, "cp") == 0);
  CHECK(g.coordinate(13, "dp") == 1);
  CHECK(g.coordinate(13, "pp") == 1);
}

TEST_CASE("grid: 16 ranks, ep 4, edp 2, pp 2") {
  const Grid g = grid(1, 1, 8, 2, 1, 4);
  g.validate(16);
  CHECK(g.edp() == 2);
  CHECK(g.groups("ep") == Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}});
  CHECK(g.groups("edp") == Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}});
  CHECK(grid(2, 1, 4, 2, 1, 4).groups("ep") == g.groups("ep"));  // experts do not see tp, cp or dp
}

TEST_CASE(
    "grid: every grid up to 16 ranks: each kind partitions the ranks, sizes multiply, coordinates agree") {
  int grids = 0;
  for_every_grid(16, [&](const Grid& g) {
    ++grids;
    const int world = g.world();
    g.validate(world);
    bool all = g.etp * g.ep * g.edp() * g.pp == world;
    for (const std::string kind : {"tp", "cp", "dp", "pp", "dp-cp", "tp-cp", "tp-dp", "tp-pp", "tp-cp-dp-pp", "etp",
                             "ep", "edp", "etp-ep", "ep-edp", "etp-ep-edp-pp"}) {
      const std::string name = kind;
      int size = 1;
      std::vector<std::string> inside;
      for (size_t at = 0; at <= name.size(); at += inside.back().size() + 1) {
        inside.push_back(name.substr(at, name.find('-', at) - at));
        size *= g.size(inside.back());
      }
      const Groups groups = g.groups(kind);
      all = all && partitions(groups, world) && int(groups.size()) * size == world;
      // Members differ in the axes of the kind only, and in one of those at least.
      const bool expert = name[0] == 'e';
      for (const std::vector<int>& group : groups) {
        all = all && int(group.size()) == size;
        for (size_t i = 1; i < group.size(); ++i) {
          bool differs = false;
          for (const std::string axis :
               {expert ? "etp" : "tp", expert ? "ep" : "cp", expert ? "edp" : "dp", "pp"}) {
            const bool same = g.coordinate(group[i], axis) == g.coordinate(group[0], axis);
            const bool free = std::find(inside.begin(), inside.end(), axis) != inside.end();
            all = all && (same || free);
            differs = differs || !same;
          }
          all = all && differs && group[i] > group[i - 1];
        }
        all = all && g.group_of(group.back(), kind) == group;
      }
    }
    for (int rank = 0; rank < world; ++rank) {
      auto at = [&](const char* axis) { return g.coordinate(rank, axis); };
      all = all && at("tp") + g.tp * (at("cp") + g.cp * (at("dp") + g.dp * at("pp"))) == rank;
      all = all && at("etp") + g.etp * (at("ep") + g.ep * (at("edp") + g.edp() * at("pp"))) == rank;
    }
    const Groups stages = g.groups("pp"), ends = g.groups("embedding");
    all = all && stages.size() == ends.size();
    for (size_t i = 0; all && i < ends.size(); ++i)
      all = ends[i].front() == stages[i].front() && ends[i].back() == stages[i].back() &&
            int(ends[i].size()) == std::min(g.pp, 2);
    if (!all)
      FAIL_CHECK("tp " << g.tp << " cp " << g.cp << " dp " << g.dp << " pp " << g.pp << " etp " << g.etp
                       << " ep " << g.ep);
  });
  CHECK(grids > 500);
}

TEST_CASE("grid: what is no grid is refused in one line, with the numbers") {
  CHECK(has(error_of([] { grid(2, 1, 1, 4).validate(16); }),
            "tp 2 x cp 1 x dp 1 x pp 4 = 8 ranks, and there are 16"));
  CHECK(has(error_of([] { grid(2, 1, 1, 4).validate(16); }), "--dp 2 fits"));
  CHECK(has(error_of([] { grid(2, 1, 1, 4).validate(12); }), "12 is not a multiple of tp x cp x pp = 8"));
  CHECK(has(error_of([] { grid(0, 1, 1, 1).validate(1); }), "--tp is 0; it must be at least 1"));
  CHECK(has(error_of([] { grid(1, 1, -3, 1).groups("dp"); }), "--dp is -3"));
  CHECK(has(error_of([] { grid(1, 1, 1, 1, 1, 0).validate(1); }), "--ep is 0"));
  CHECK(has(error_of([] { grid(1, 1, 1, 1).validate(0); }), "0 ranks"));
  CHECK(has(error_of([] { grid(1, 1, 8, 2, 1, 3).validate(16); }),
            "ep 3 x pp 2 = 6 does not divide the 16 ranks"));
  CHECK(has(error_of([] { grid(1, 1, 8, 2, 1, 16).validate(16); }), "a stage has 8 ranks"));
  CHECK(has(error_of([] { grid(1 << 20, 1 << 20, 1 << 20, 1 << 20).world(); }),
            "more ranks than can be numbered"));
  for (const char* kind : {"", "-", "xp", "tp-", "tp-ep", "dp-edp", "Tp"})
    CHECK(has(error_of([&] { grid(2, 1, 2, 1).groups(kind); }), "is no axis or kind of group"));
  CHECK(has(error_of([] { grid(2, 1, 2, 1).coordinate(1, "tp-dp"); }), "is no axis"));
  CHECK(has(error_of([] { grid(2, 1, 2, 1).coordinate(4, "tp"); }),
            "rank 4 is outside the grid's ranks 0 to 3"));
  CHECK(has(error_of([] { grid(2, 1, 2, 1).group_of(-1, "tp"); }), "rank -1"));
}
