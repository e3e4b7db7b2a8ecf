// checkpoint.h - a folder with what a run needs to go on: model.safetensors and config.json as Hugging Face reads
// them, optimizer.safetensors (both moments, and the fp32 masters of a bf16 run) and trainer.json (the step).
#pragma once
#include <string>

#include "adamw.h"
#include "safetensors.h"

// Whether this rank has all of the model and of the optimizer's state, as save_checkpoint and restore need it.
bool holds_whole(AdamW&);
// Written beside `folder` first and then exchanged with it, so an interrupted save leaves the previous one whole.
void save_checkpoint(const std::string& folder, AdamW&, int64_t step);
// Throws Error now, before any work, if `folder` could not be written later, or holds anything but a checkpoint
// (which a save would remove).
void check_writable(const std::string& folder);

// A checkpoint in host memory, read once: --save may then replace the very folder that --load names.
struct Checkpoint {
  std::string folder;
  Safetensors weights, state;  // of model and optimizer
  int64_t step = -1;           // done already; -1: there are weights alone, from elsewhere, to start with
};
// Throws Error if anything is missing or cut short.
Checkpoint read_checkpoint(const std::string& folder);
// Returns the step to go on from. Throws Error if anything is missing or of another shape.
int64_t restore(const Checkpoint&, AdamW&);
// The model that a checkpoint holds.
ModelConfig checkpoint_config(const std::string& folder);
