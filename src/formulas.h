// formulas.h - the formulas of the notes as functions: what a step should cost, to be held against what it did.
// N: tokens of one micro-batch on this rank, all sizes of `c` as they are on this rank, B bytes per element.
#pragma once
#include "config.h"

// Bytes of what one block keeps for its backward pass:
//   B N (4 D + 2 A + 2 K + 3 F + H T) + 8 N,  with A = H d, K = KV d.
// The residual stream, two norms' outputs and the stream between them (4 D), q and attention's output (2 A), k and v
// (2 K), gate, up and their product (3 F), the probabilities (H T); 8 N for two fp32 rstd.
int64_t block_activation_bytes(const ModelConfig& c, int64_t N, int64_t B);

// The peak of a whole model on one rank, at the start of the head's backward: L blocks, and the head's input, its
// norm, the logits and the gradient that starts down the stream: B N (3 D + V) + 4 N.
int64_t peak_activation_bytes(const ModelConfig& c, int64_t N, int64_t B);

// The largest scratch of any moment of a step: in the backward pass of a block. `tokens`: of all micro-batches of
// the step, whose losses (4 bytes each) are added up at its end.
int64_t peak_workspace_bytes(const ModelConfig& c, int batch, int T, int64_t tokens, int64_t B);

// Megatron's formula for GELU, dropout and 16 bits (arXiv:2205.05198), to print beside ours: s b h (34 + 5 a s / h).
double megatron_layer_bytes(double s, double b, double h, double a);
