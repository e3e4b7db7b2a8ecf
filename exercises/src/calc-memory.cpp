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
  //! hole 4
  const double weights = zero_stage >= 3 ? 2 / d : 2;
  const double gradients = zero_stage >= 2 ? 2 / d : 2;
  //~ gradients-late: const double gradients = zero_stage >= 3 ? 2 / d : 2;
  //~ says: ZeRO-2 shards the gradients
  const double optimizer = zero_stage >= 1 ? 12 / d : 12;
  //~ no-master: const double optimizer = zero_stage >= 1 ? 8 / d : 8;
  //~ says: the fp32 master copy
  //~ limit: const double optimizer = zero_stage >= 1 ? 0 : 12;
  //~ says: the share of 1/d is left
  return parameters * (weights + gradients + optimizer);
  //~ billions: return parameters * (weights + gradients + optimizer) * 4;
  //~ says: bytes already, not elements
  //! end
}

// Activations of one GPT layer (Megatron: 16 bits, GELU, dropout), s tokens, b samples, hidden size h, a heads:
// s b h (34 + 5 a s / h) on one rank. On t tensor-parallel ranks the 10 of norms, dropout and inputs stay whole, and 24 and
// the attention's 5 a s / h are cut; with sequence parallelism everything is cut.
double layer_activation_bytes(double s, double b, double h, double a, double t, bool sequence_parallel) {
  //! hole 1
  return s * b * h * (10 / (sequence_parallel ? t : 1) + 24 / t + 5 * a * s / (h * t));
  //~ all-cut: return s * b * h * (34 / t + 5 * a * s / (h * t));
  //~ says: without sequence parallelism 10 sbh stay whole
  //~ no-attention: return s * b * h * (10 / (sequence_parallel ? t : 1) + 24 / t);
  //~ says: the attention's scores
  //! end
}

// Of the keys and values of all layers for so many tokens (all sequences together).
double kv_cache_bytes(double layers, double kv_heads, double head_dim, double tokens, double bytes_per_element) {
  //! hole 1
  return 2 * layers * kv_heads * head_dim * tokens * bytes_per_element;
  //~ keys-only: return layers * kv_heads * head_dim * tokens * bytes_per_element;
  //~ says: keys and values
  //~ elements: return 2 * layers * kv_heads * head_dim * tokens;
  //~ says: these are elements, not bytes
  //! end
}
//? hint 1: Which of weights, gradients and the three fp32 numbers of Adam does each ZeRO stage divide by d?
//? hint 2: 16, 4 + 12/d, 2 + 14/d, 16/d bytes per parameter; sbh (10 + 24/t + 5as/(ht)); 2 L kv d tokens bytes.
//? hint 3: const double weights = zero_stage >= 3 ? 2 / d : 2;
//? why: A 7B model trains in 112 GB of state, not in the 14 GB of its weights; 4x and 8x for ZeRO-1 and 2 are limits:
//?      at d=8 it is 2.91x and 4.27x.
//? asked: O1, E1 and T1: bytes per parameter, what ZeRO leaves, the KV cache. (每参数多少字节？ZeRO 单卡显存？KV Cache 多大？)
