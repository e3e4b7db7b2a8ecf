// data_parallel.h - what every data-parallel strategy shares: each rank holds the whole model and works on its own
// slice of the batch. How the gradients are then summed is what the lessons differ in.
#pragma once
#include "group.h"
#include "parallel.h"

struct DataParallel : Parallel {
  explicit DataParallel(Group& dp) : dp(dp) {}

  // A contiguous slice of the samples, all positions. Slices differ by at most one sample, and losses are divided
  // by the tokens of the global batch, so summing gradients gives the gradient of the global mean.
  View view(int samples, int seq) const override {
    View mine = Parallel::view(samples, seq);
    mine.first_sample = int(int64_t(samples) * dp.rank() / dp.size());
    mine.last_sample = int(int64_t(samples) * (dp.rank() + 1) / dp.size());
    return mine;
  }
  // Summed gradients are equal on all ranks: the norm counts them once.
  bool counts(const Param&) const override { return dp.rank() == 0; }

  Group& dp;
};
