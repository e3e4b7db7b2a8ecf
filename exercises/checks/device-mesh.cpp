#include "../harness/check.h"

static const char* const kRule =
    "first axis fastest: stride = product of the sizes before the axis, and a group is\n"
    "rank - coordinate * stride + i * stride, with coordinate = (rank / stride) mod size";

static void check_mesh(std::vector<int> sizes, std::vector<std::string> names) {
  int world = 1;
  std::string shape;
  for (size_t a = 0; a < sizes.size(); ++a) world *= sizes[a], shape += format("%s%s=%d", a ? " " : "", names[a].c_str(), sizes[a]);
  for (int axis = 0; axis < int(sizes.size()); ++axis) {
    Check check(1, format("%d ranks, %s; the %s groups", world, shape.c_str(), names[axis].c_str()), kRule);
    // By coordinates, without strides.
    std::vector<std::vector<int>> at(world);
    for (int r = 0; r < world; ++r)
      for (int a = 0, rest = r; a < int(sizes.size()); rest /= sizes[a++]) at[r].push_back(rest % sizes[a]);
    std::vector<float> want;
    std::vector<std::string> places;
    auto members = [&](int r) {
      std::vector<int> group;
      for (int q = 0; q < world; ++q) {
        bool same = true;
        for (int a = 0; a < int(sizes.size()); ++a) same = same && (a == axis || at[q][a] == at[r][a]);
        if (same) group.push_back(q);
      }
      return group;
    };
    for (int r = 0; r < world; ++r)
      for (int q : members(r)) places.push_back(format("rank %d's %s group", r, names[axis].c_str())), want.push_back(float(q));
    check.name_values(places);
    check.call([&] {
      std::vector<float> got;
      for (int r = 0; r < world; ++r)
        for (int q : mesh_group(r, sizes, axis)) got.push_back(float(q));
      return got;
    });
    check.want(want);
    const int size = sizes[axis];
    int stride = 1, after = 1;
    for (int a = 0; a < axis; ++a) stride *= sizes[a];
    for (int a = axis + 1; a < int(sizes.size()); ++a) after *= sizes[a];
    auto played = [&](int step, auto coordinate) {
      return check.all_got([&](int, int64_t k) {
        const int r = int(k) / size;
        return float(r + (int(k) % size - coordinate(r, step)) * step);
      });
    };
    auto right = [&](int r, int step) { return r / step % size; };
    if (check.wrong_values()) {
      check.likely(played(after, right), "the first axis is the fastest: multiply the sizes before `axis`, not those after it");
      check.likely(played(stride * size, right), "the stride is the product of the sizes before the axis; do not count the axis itself");
      check.likely(stride > 1 && played(1, right), "neighbouring ranks are a group along the first axis only; other axes have a stride");
      check.likely(played(stride, [](int r, int step) { return r / step; }), "the coordinate is (rank / stride) mod size: without the remainder it counts the later axes too");
      check.likely(played(stride, [](int, int) { return 0; }), "a group must be the same whichever of its ranks asks: go back to its first rank, by\ncoordinate * stride");
    }
    check.verdict();
  }
}

TEST_CASE("tp=2 dp=2 pp=4, 16 ranks: Megatron's groups") { check_mesh({2, 2, 4}, {"tp", "dp", "pp"}); }
TEST_CASE("tp=2 cp=2 dp=2 pp=2, 16 ranks") { check_mesh({2, 2, 2, 2}, {"tp", "cp", "dp", "pp"}); }
TEST_CASE("sizes that differ: tp=3 dp=2 pp=5, and axes of size 1") {
  check_mesh({3, 2, 5}, {"tp", "dp", "pp"});
  check_mesh({1, 4, 1}, {"tp", "dp", "pp"});
}
