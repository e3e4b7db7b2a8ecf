// device-mesh - which ranks form a group along one axis?                                               10 minutes
//
//   sizes {2, 2, 4} = (tp, dp, pp), first axis fastest: rank = tp + 2 (dp + 2 pp), 16 ranks
//     axis 0 (tp): [0 1] [2 3] [4 5] ...        neighbours: they talk most, so they should be in one node
//     axis 1 (dp): [0 2] [1 3] [4 6] ...
//     axis 2 (pp): [0 4 8 12] [1 5 9 13] ...    far apart: they send least
//
// Return the ranks that differ from `rank` only in their coordinate along `axis`, in ascending order; `rank` itself is
// one of them. `sizes` has any number of axes.
#include "exercises.h"

std::vector<int> mesh_group(int rank, const std::vector<int>& sizes, int axis) {
  std::vector<int> group;
  //! hole 6
  int stride = 1;  // how far apart two neighbours along this axis are
  for (int a = 0; a < axis; ++a) stride *= sizes[a];
  //~ last-fastest: for (int a = axis + 1; a < int(sizes.size()); ++a) stride *= sizes[a];
  //~ says: the first axis is the fastest
  //~ own-size: for (int a = 0; a <= axis; ++a) stride *= sizes[a];
  //~ says: do not count the axis itself
  //~ adjacent:
  //~ says: neighbouring ranks are a group along the first axis only
  const int coordinate = rank / stride % sizes[axis];
  //~ no-modulo: const int coordinate = rank / stride;
  //~ says: the coordinate is (rank / stride) mod size
  //~ from-rank: const int coordinate = 0;
  //~ says: a group must be the same whichever of its ranks asks
  for (int i = 0; i < sizes[axis]; ++i) group.push_back(rank + (i - coordinate) * stride);
  //! end
  return group;
}
//? hint 1: How far apart are two neighbours along dp if tp, before it, has 2 ranks? And along pp?
//? hint 2: stride = product of the sizes before the axis; coordinate = (rank / stride) mod size; the group starts at
//?         rank - coordinate * stride.
//? hint 3: int stride = 1; for (int a = 0; a < axis; ++a) stride *= sizes[a];
//? why: Every process group of a 4D-parallel trainer is such a line through the box of ranks. Which axis is fastest
//?      decides which traffic stays inside a node: tp's, of every layer.
//? asked: J1: world size and process groups for DP/TP/PP/CP/EP. (world size 与各并行维度的关系？进程组如何构造？)
