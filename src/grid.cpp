#include "grid.h"

#include <algorithm>
#include <climits>

#include "error.h"

namespace {

struct Axis {
  std::string name;
  int size;
};
using Axes = std::vector<Axis>;  // the fastest first

Axes dense_axes(const Grid& g) { return {{"tp", g.tp}, {"cp", g.cp}, {"dp", g.dp}, {"pp", g.pp}}; }
Axes expert_axes(const Grid& g) { return {{"etp", g.etp}, {"ep", g.ep}, {"edp", g.edp()}, {"pp", g.pp}}; }

const Axis* find(const Axes& axes, const std::string& name) {
  auto it = std::find_if(axes.begin(), axes.end(), [&](const Axis& a) { return a.name == name; });
  return it == axes.end() ? nullptr : &*it;
}

// "tp 2 x cp 1 x dp 4 x pp 2"
std::string text_of(const Axes& axes) {
  std::string text;
  for (const Axis& a : axes) text += format("%s%s %d", text.empty() ? "" : " x ", a.name.c_str(), a.size);
  return text;
}

int product(const Axes& axes) {
  int64_t all = 1;
  for (const Axis& a : axes) {
    if (a.size < 1) throw Error(format("--%s is %d; it must be at least 1", a.name.c_str(), a.size));
    all *= a.size;
    if (all > INT_MAX)
      throw Error(text_of(axes) + " are more ranks than can be numbered; choose smaller sizes");
  }
  return int(all);
}

// The whole of it. A rank is the sum of coordinate * stride over the axes. The `chosen` axes give the
// distances of a group's members from its first rank, the other axes give the first ranks.
std::vector<std::vector<int>> cut(const Axes& axes, const std::vector<std::string>& chosen) {
  std::vector<int> members{0}, firsts{0};
  int stride = 1;
  for (const Axis& axis : axes) {
    const bool inside = std::find(chosen.begin(), chosen.end(), axis.name) != chosen.end();
    std::vector<int>& list = inside ? members : firsts;
    const size_t before = list.size();
    for (int i = 1; i < axis.size; ++i)
      for (size_t k = 0; k < before; ++k) list.push_back(list[k] + i * stride);
    stride *= axis.size;
  }
  std::vector<std::vector<int>> groups;
  for (int first : firsts) {
    groups.emplace_back();
    for (int member : members) groups.back().push_back(first + member);
  }
  return groups;
}

[[noreturn]] void unknown(const std::string& name) {
  throw Error(format(
      "'%s' is no axis or kind of group; it is tp, cp, dp, pp joined by '-', or etp, ep, edp, pp joined "
      "by '-', or embedding",
      name.c_str()));
}

}  // namespace

int Grid::world() const { return product(dense_axes(*this)); }

int Grid::edp() const {
  const int ranks = world();
  const Axes experts = {{"etp", etp}, {"ep", ep}, {"pp", pp}};
  const int one_copy = product(experts);
  if (ranks % one_copy)
    throw Error(format(
        "%s = %d does not divide the %d ranks of %s; a stage has %d ranks, and --etp x --ep must divide "
        "that",
        text_of(experts).c_str(), one_copy, ranks, text_of(dense_axes(*this)).c_str(), ranks / pp));
  return ranks / one_copy;
}

void Grid::validate(int given) const {
  if (given < 1) throw Error(format("%d ranks are no world; at least 1 is needed", given));
  const int mine = world(), replica = mine / dp;
  if (mine != given) {
    std::string remedy;
    if (given % replica == 0)
      remedy = format("--dp %d fits", given / replica);
    else
      remedy = format(
          "no --dp fits, because %d is not a multiple of tp x cp x pp = %d; change those, or the number of "
          "ranks",
          given, replica);
    throw Error(format("%s = %d ranks, and there are %d; %s", text_of(dense_axes(*this)).c_str(), mine, given,
                       remedy.c_str()));
  }
  edp();
}

std::vector<std::vector<int>> Grid::groups(const std::string& kind) const {
  validate(world());
  if (kind == "embedding") {
    std::vector<std::vector<int>> ends = groups("pp");
    for (std::vector<int>& stages : ends)
      if (stages.size() > 2) stages = {stages.front(), stages.back()};
    return ends;
  }
  std::vector<std::string> chosen;
  for (size_t at = 0; at <= kind.size();) {
    const size_t end = std::min(kind.find('-', at), kind.size());
    chosen.push_back(kind.substr(at, end - at));
    at = end + 1;
  }
  for (const Axes& axes : {dense_axes(*this), expert_axes(*this)})
    if (std::all_of(chosen.begin(), chosen.end(), [&](const std::string& name) { return find(axes, name); }))
      return cut(axes, chosen);
  unknown(kind);
}

std::vector<int> Grid::group_of(int rank, const std::string& kind) const {
  coordinate(rank, "pp");  // refuses a rank that does not exist
  for (std::vector<int>& group : groups(kind))
    if (std::find(group.begin(), group.end(), rank) != group.end()) return std::move(group);
  return {};
}

int Grid::coordinate(int rank, const std::string& name) const {
  const int ranks = world();
  if (rank < 0 || rank >= ranks)
    throw Error(format("rank %d is outside the grid's ranks 0 to %d", rank, ranks - 1));
  for (const Axes& axes : {dense_axes(*this), expert_axes(*this)}) {
    int stride = 1;
    for (const Axis& axis : axes) {
      if (axis.name == name) return rank / stride % axis.size;
      stride *= axis.size;
    }
  }
  unknown(name);
}

int Grid::size(const std::string& name) const {
  validate(world());
  for (const Axes& axes : {dense_axes(*this), expert_axes(*this)})
    if (const Axis* axis = find(axes, name)) return axis->size;
  unknown(name);
}
