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

using Tensors = std::map<std::string, std::vector<float>>;  // whole parameters or gradients, by name

// What this rank holds of every parameter, or of every gradient that it updates, as bytes to send; and back, from the
// bytes of all ranks. Where several ranks hold the same element, the copies have to be equal, bit for bit.
std::string pack(Params&, bool gradients);
struct Assembled {
  Tensors tensors;
  Check copies;   // how many elements differ between ranks, and the first of them
  Check missing;  // how many elements nobody holds
};
Assembled assemble(const ModelConfig&, const std::vector<std::string>& packed);

// The same for one rank that holds everything.
Tensors all_weights(Params&);
Tensors all_gradients(Params&);

struct Checkpoint;
// One rank, the whole batch in one piece, the same steps, also where they begin with a checkpoint: DESIGN's oracle.
Trajectory train_reference(Device&, const Options&, std::span<const uint16_t> tokens, const Checkpoint* from = nullptr);

// Throws Error naming the step and the first tensor (weights, then gradients, in model order) that is not finite.
void report_not_finite(int64_t step, double loss, double norm, Params&);
