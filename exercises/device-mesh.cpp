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
  not_implemented("device-mesh", 6);  // your lines, in place of this one
  return group;
}
