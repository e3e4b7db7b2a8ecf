// state_table.h - the table of the interview answer: bytes of training state per rank, and elements sent per step,
// as they were counted in this run, by the exact formula, and by the textbook's.
#pragma once
#include "formulas.h"
#include "lesson.h"

// What the textbook knows: ZeRO's stage, ranks that divide the state, and how gradients and parameters travel.
struct Textbook {
  int stage;
  int64_t ranks;           // d
  int64_t replicas = 1;    // groups of d ranks, which all-reduce their shards' gradients once a step
  bool reduce_each = true, keep_parameters = false, offload = false;
};

// `sent`: elements per step by the exact formula, all groups together. Also expects what each kind should occupy
// between two steps, with the padding of the units: a wrong byte fails the proof.
void print_state_table(Lesson&, AdamW&, const Textbook&, int64_t sent);
