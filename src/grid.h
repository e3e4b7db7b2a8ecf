// grid.h - which ranks form which group: the ranks as a box of (tp, cp, dp, pp), cut along any of its axes.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Megatron's rank order (Narayanan et al. 2021): the tensor axis is fastest, so that the groups that talk
// most are neighbours and stay inside a node; then context, data, and the pipeline last, which sends least.
//   rank = tp + TP * (cp + CP * (dp + DP * pp)),   world = TP * CP * DP * PP
// Experts see the same ranks as a second box, (etp, ep, edp, pp). Expert parallelism adds no ranks: edp is
// what is left, world / (ETP * EP * PP). The pipeline is last and of the same size in both, so a stage is the
// same ranks.
struct Grid {
  int tp = 1, cp = 1, dp = 1, pp = 1;  // tensor, context, data, pipeline
  int etp = 1, ep = 1;  // expert tensor, expert (Megatron's default for etp is tp; here it is 1)

  // Each of these throws Error, one line with the numbers, if the sizes are no grid.
  int world() const;               // ranks
  int edp() const;                 // copies of each expert
  void validate(int world) const;  // also throws unless the grid has exactly `world` ranks

  // A kind is one axis, or several joined by '-' in any order: "tp", "dp-cp", "tp-pp", "ep", "etp-ep". The
  // groups of a kind hold the ranks that differ in those axes only, ascending; every rank is in exactly one.
  // "embedding" is special: the first and last rank of each pp group, which share a tied table, none between.
  std::vector<std::vector<int>> groups(const std::string& kind) const;
  std::vector<int> group_of(int rank, const std::string& kind) const;  // {} for "embedding" of a middle stage
  int coordinate(int rank, const std::string& axis) const;             // 0 .. size(axis) - 1
  int size(const std::string& axis) const;  // axis: "tp", "cp", "dp", "pp", "etp", "ep" or "edp"
};

// What each kind of group is for, in the order of the axes. `expert`: of the second box.
struct GroupKind {
  const char* name;
  const char* purpose;
  bool expert;
};
inline constexpr GroupKind kGroupKinds[] = {
    {"tp", "activations of every layer: all-reduce, or all-gather and reduce-scatter", false},
    {"cp", "keys and values (ring) or heads (Ulysses) of every layer", false},
    {"dp", "replicas that read different samples", false},
    {"pp", "activations from stage to stage", false},
    {"tp-cp", "the ranks that read the same samples", false},
    {"dp-cp", "gradients: the ranks that hold the same weights and other tokens", false},
    {"tp-dp", "one stage, one part of the sequence", false},
    {"tp-pp", "one whole copy of the weights: the gradient norm", false},
    {"embedding", "first and last stage: gradients of a tied table", false},
    {"etp", "activations inside an expert", true},
    {"ep", "tokens to their experts and back: all-to-all", true},
    {"edp", "gradients of the experts", true},
    {"etp-ep", "one copy of all experts of a stage", true},
};
