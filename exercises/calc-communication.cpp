// calc-communication - how many bytes, how long, how fast?                                             10 minutes
//
// Four formulas that are asked for most. Sizes in bytes, latency in seconds per step, bandwidth in bytes per second
// and one direction. A number of ranks of 1 means that nothing is sent.
#include "exercises.h"

// Bytes that each rank sends in a ring all-reduce of `bytes`.
double all_reduce_sent(double bytes, int ranks) {
  const double n = ranks;
  not_implemented("calc-communication", 1);  // your lines, in place of this one
}

// Seconds a ring all-reduce takes: steps times latency, and the bytes over the bandwidth.
double ring_seconds(double bytes, int ranks, double latency, double bandwidth) {
  const double n = ranks;
  not_implemented("calc-communication", 1);  // your lines, in place of this one
}

// The bus bandwidth (nccl-tests' busbw) of an all-reduce that took `seconds`: comparable with the link's own speed.
double bus_bandwidth(double bytes, int ranks, double seconds) {
  const double n = ranks;
  not_implemented("calc-communication", 1);  // your lines, in place of this one
}

// Elements that each rank sends per step for a model of so many parameters: stage 0 is DDP (all-reduce), stages 1 to 3
// are ZeRO's, with one micro-batch; stage 3 gathers the parameters again for backward.
double zero_sent(int stage, double parameters, int ranks) {
  const double n = ranks;
  not_implemented("calc-communication", 1);  // your lines, in place of this one
}
