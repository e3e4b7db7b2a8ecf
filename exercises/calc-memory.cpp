// calc-memory - where the bytes go.                                                                    10 minutes
//
//   state of bf16 training with Adam:   weights 2, gradients 2, fp32 master 4, m 4, v 4: 16 bytes per parameter
//   ZeRO-1 shards the optimizer's 12, ZeRO-2 the gradients too, ZeRO-3 the weights too, over d ranks
//
// Three formulas that are asked for most; results in bytes.
#include "exercises.h"

// Of weights, gradients and optimizer on one of `ranks` ranks. zero_stage 0 shards nothing.
double state_bytes(int zero_stage, double parameters, int ranks) {
  const double d = ranks;
  not_implemented("calc-memory", 4);  // your lines, in place of this one
}

// Activations of one GPT layer (Megatron: 16 bits, GELU, dropout), s tokens, b samples, hidden size h, a heads:
// s b h (34 + 5 a s / h) on one rank. On t tensor-parallel ranks the 10 of norms, dropout and inputs stay whole, and 24 and
// the attention's 5 a s / h are cut; with sequence parallelism everything is cut.
double layer_activation_bytes(double s, double b, double h, double a, double t, bool sequence_parallel) {
  not_implemented("calc-memory", 1);  // your lines, in place of this one
}

// Of the keys and values of all layers for so many tokens (all sequences together).
double kv_cache_bytes(double layers, double kv_heads, double head_dim, double tokens, double bytes_per_element) {
  not_implemented("calc-memory", 1);  // your lines, in place of this one
}
