// calc-communication - how many bytes, how long, how fast?                                             10 minutes
//
// Four formulas that are asked for most. Sizes in bytes, latency in seconds per step, bandwidth in bytes per second
// and one direction. A number of ranks of 1 means that nothing is sent.
#include "exercises.h"

// Bytes that each rank sends in a ring all-reduce of `bytes`.
double all_reduce_sent(double bytes, int ranks) {
  const double n = ranks;
  //! hole 1
  return 2 * (n - 1) / n * bytes;
  //~ half: return (n - 1) / n * bytes;
  //~ says: both halves
  //~ grows: return 2 * (n - 1) * bytes;
  //~ says: does not grow with n
  //! end
}

// Seconds a ring all-reduce takes: steps times latency, and the bytes over the bandwidth.
double ring_seconds(double bytes, int ranks, double latency, double bandwidth) {
  const double n = ranks;
  //! hole 1
  return 2 * (n - 1) * latency + 2 * (n - 1) / n * bytes / bandwidth;
  //~ one-phase: return (n - 1) * latency + (n - 1) / n * bytes / bandwidth;
  //~ says: 2 (n-1) steps, not n-1
  //~ logarithm: return __builtin_log2(n) * latency + (n - 1) / n * bytes / bandwidth;
  //~ says: a ring has no log2
  //~ no-latency: return 2 * (n - 1) / n * bytes / bandwidth;
  //~ says: the latency of 2 (n-1) steps
  //! end
}

// The bus bandwidth (nccl-tests' busbw) of an all-reduce that took `seconds`: comparable with the link's own speed.
double bus_bandwidth(double bytes, int ranks, double seconds) {
  const double n = ranks;
  //! hole 1
  return bytes / seconds * 2 * (n - 1) / n;
  //~ algbw: return bytes / seconds;
  //~ says: this is algbw
  //! end
}

// Elements that each rank sends per step for a model of so many parameters: stage 0 is DDP (all-reduce), stages 1 to 3
// are ZeRO's, with one micro-batch; stage 3 gathers the parameters again for backward.
double zero_sent(int stage, double parameters, int ranks) {
  const double n = ranks;
  //! hole 1
  return (stage == 3 ? 3 : 2) * parameters * (n - 1) / n;
  //~ three: return (stage >= 1 ? 3 : 2) * parameters * (n - 1) / n;
  //~ says: ZeRO-1 and ZeRO-2 send as much as DDP
  //~ less: return (stage == 0 ? 2 : stage == 1 ? 1.5 : 1) * parameters * (n - 1) / n;
  //~ says: ZeRO saves memory, not communication
  //! end
}
//? hint 1: An all-reduce is a reduce-scatter and an all-gather. What does each of them send, in how many steps?
//? hint 2: 2 (n-1)/n X bytes; 2 (n-1) alpha + that over the bandwidth; busbw = algbw x 2 (n-1)/n; ZeRO 2, 2, 2, 3 Psi.
//? hint 3: return 2 * (n - 1) / n * bytes;
//? why: The bytes per GPU tend to 2 X and stop there; the latency does not. And ZeRO-1 and 2 save memory for free: only
//?      ZeRO-3 sends half as much again.
//? asked: A2, A10 and E2: bytes and time of ring all-reduce, busbw, communication of ZeRO. (Ring All-Reduce 的通信量与时间、busbw、ZeRO 的通信量)
