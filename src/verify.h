// verify.h - the proof: what a run did, held against one rank that trains the same global batches.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "adamw.h"

// What is compared: numbers that a wrong trainer gets wrong, even where its first loss is right.
struct Trajectory {
  std::vector<double> losses, norms;                     // global, of every step
  std::map<std::string, std::vector<float>> gradients;   // of every parameter after the first step, before clipping
  std::map<std::string, std::vector<float>> start, end;  // every parameter, whole
};

// Bounds from the measured noise of reordered fp32 sums (bf16: of its 8 bits of mantissa).
struct Bounds {
  double loss, norm;   // relative
  double gradient;     // of the tensor's largest value
  double end;          // ||w - w_ref|| / ||w_ref - w_start||
  static Bounds standard();
};

struct Check {
  std::string what;
  std::string detail;  // where the worst value is, or what was expected
  double value, bound;
  bool ok() const { return value <= bound; }  // NaN is not
};

// The worst of each kind of number, with the tensor or step it belongs to.
std::vector<Check> compare(const Trajectory& mine, const Trajectory& reference, const Bounds&);

// Whole parameters or gradients as they are on this rank (which must hold all of them).
std::map<std::string, std::vector<float>> all_weights(Params&);
std::map<std::string, std::vector<float>> all_gradients(Params&);

struct Checkpoint;
// One rank, the whole batch in one piece, the same steps, also where they begin with a checkpoint: DESIGN's oracle.
Trajectory train_reference(Device&, const Options&, std::span<const uint16_t> tokens, const Checkpoint* from = nullptr);

// Throws Error naming the step and the first tensor (weights, then gradients, in model order) that is not finite.
void report_not_finite(int64_t step, double loss, double norm, Params&);
