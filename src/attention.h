// attention.h - causal attention with grouped heads over one rank's queries and keys.
#pragma once
#include <vector>

#include "device.h"

// One block's attention for one micro-batch. Positions ascend; a query sees the keys not after it.
struct Attention {
  Device& device;
  int B, T, H, KV, d;         // samples, tokens of a sample here, query heads, key heads, head size
  Tensor q, k, v;             // (B, H, T, d), (B, KV, T, d), (B, KV, T, d), rotated
  Tensor out;                 // (B, H, T, d)
  const int* positions;       // (T), on the device
  const std::vector<int>& host_positions;
  Buffer probabilities;       // (B, H, T, T), kept for backward
};

// Fills a.probabilities and a.out: softmax(q k^T / sqrt(d)) v.
void attention_forward(Attention&);
// From dout (B, H, T, d) the gradients dq (B, H, T, d), dk and dv (B, KV, T, d); all three are overwritten.
void attention_backward(Attention&, Tensor dout, Tensor dq, Tensor dk, Tensor dv);
// Bytes of scratch that attention_backward takes from the device.
int64_t attention_scratch_bytes(int B, int T, int H);
