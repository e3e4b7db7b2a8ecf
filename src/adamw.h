// adamw.h - AdamW over the part of each unit that this rank updates, with its state and the learning rate's step.
#pragma once
#include "transformer.h"

class AdamW {
 public:
  AdamW(Transformer&, const Options&);

  // One step with the gradients times `gradient_scale`. Gradients are left as they were.
  void step(float lr, float gradient_scale);
  // The same, unit by unit, for strategies that send each unit on as soon as it is done. begin_step first.
  void begin_step() { ++steps_; }
  void update_unit(Unit&, float lr, float gradient_scale);

  // The factor that brings a gradient of this norm to at most `clip` (0: no clipping).
  static float clip_factor(double norm, float clip) { return clip > 0 && norm > clip ? float(clip / norm) : 1.f; }

  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }  // after loading a checkpoint

  // State of one unit, for its elements [begin, end): this rank's shard, without padding.
  struct State {
    int unit;
    int64_t begin, end;
    FloatBuffer m, v;      // (end - begin), in host memory if that is where the update is
    FloatBuffer master;    // fp32 weights, if the model's are bf16; else empty
  };
  std::vector<State>& states() { return states_; }
  int64_t elements() const {  // that this rank updates
    int64_t all = 0;
    for (const State& s : states_) all += s.end - s.begin;
    return all;
  }
  void refresh_masters();    // after weights were set from outside
  bool on_host() const { return on_host_; }
  Transformer& model() { return model_; }

 private:
  Transformer& model_;
  const Options& options_;
  std::vector<State> states_;
  bool on_host_;             // where Parallel::storage puts the state, and so the update
  int64_t steps_ = 0;
};
