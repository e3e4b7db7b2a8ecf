// checkpoint.h - a folder with what a run needs to go on: model.safetensors and config.json as Hugging Face reads
// them, optimizer.safetensors (both moments, and the fp32 masters of a bf16 run) and trainer.json (the step).
#pragma once
#include <string>

#include "adamw.h"

// Written beside `folder` first and then exchanged with it, so an interrupted save leaves the previous one whole.
void save_checkpoint(const std::string& folder, AdamW&, int64_t step);
// Returns the step to go on from. Throws Error if anything is missing, cut short or of another shape.
int64_t load_checkpoint(const std::string& folder, AdamW&);
// Throws Error now, before any work, if `folder` could not be written later.
void check_writable(const std::string& folder);
// The model that a checkpoint holds.
ModelConfig checkpoint_config(const std::string& folder);
