// parallel.h - the seams: every place where a parallel strategy may step into the training of a transformer.
//
// The defaults do nothing: that is one GPU. Each lesson overrides a few of them, and 18_4d (planned) will forward
// each one to the strategy that owns it. This list is the central idea of the project.
#pragma once
#include <numeric>
#include <vector>

#include "attention.h"
#include "group.h"
#include "params.h"

class Transformer;
class AdamW;

// The part of a global batch (samples x seq) that a rank works on.
struct View {
  int first_sample, last_sample;  // [first, last)
  std::vector<int> positions;     // of each of these samples, ascending
};

// One entry of a schedule: what a rank does next.
struct Op {
  // backward: both halves; or the input half, and the weight half later. send, receive: between stages.
  enum Kind { forward, backward, backward_input, backward_weight, send, receive } kind;
  int micro_batch;
  int chunk = 0;          // which of this rank's model chunks (interleaved pipelines have several)
  int peer = -1;          // of send and receive: the rank at the other end
  bool gradient = false;  // of send and receive: a gradient goes up, otherwise an activation down
  bool operator==(const Op&) const = default;
};

struct Parallel {
  virtual ~Parallel() = default;

  // ---- what this rank holds ----
  virtual Piece piece(const Param& p) const { return {0, 0, p.rows}; }  // which slice of a parameter   tp, moe
  virtual int stage(int /*unit*/) const { return 0; }          // which chunk, or -1: not here            pipelines
  virtual View view(int samples, int seq) const {              // which samples, which positions          dp, context
    View all{0, samples, std::vector<int>(seq)};
    std::iota(all.positions.begin(), all.positions.end(), 0);
    return all;
  }
  virtual Shard shard() const { return {}; }                   // which part of each unit is updated here  dp, zero
  virtual Storage storage(Memory kind) const {                 // what is stored between uses: whole, or that part
    return kind == Memory::optimizer ? Storage::shard : Storage::whole;                      // zero2, zero3, offload
  }
  virtual bool counts(const Param&) const { return true; }     // true on one of the ranks that hold equal copies
  virtual bool counts_loss() const { return true; }            // true on one of the ranks that see equal losses   tp

  // ---- the life of a unit's parameters and gradients ----
  virtual void open(Unit&, bool /*backward*/) {}               // about to be used            zero2, zero3, offload
  virtual void close(Unit&, bool /*backward*/, bool /*last*/) {}  // used; last: its gradients are complete   ddp, ..
  virtual bool keep(int /*unit*/) const { return true; }       // keep activations, or recompute          recompute

  // ---- into and out of a split region: (N/t, D) <-> (N, D) ----
  virtual Tensor enter(Tensor x) { return x; }                 // sp gathers (again in backward, for dW)
  virtual Tensor enter_backward(Tensor dx) { return dx; }      // tp all-reduces (f); sp reduce-scatters
  virtual Tensor leave(Tensor y) { return y; }                 // tp all-reduces (g); sp reduce-scatters
  virtual Tensor leave_backward(Tensor dy) { return dy; }      // sp gathers

  // ---- attention, when this rank holds part of the sequence ----
  virtual void attention(Attention& a) { attention_forward(a); }                    // ulysses, ring_attention
  virtual void attention_backward(Attention& a, Tensor dout, Tensor dq, Tensor dk, Tensor dv) {
    ::attention_backward(a, dout, dq, dk, dv);
  }

  // ---- the softmax over a split vocabulary: a maximum, then sums; rows (N) ----
  virtual void over_vocabulary(FloatTensor /*rows*/, Reduce) {}                     // tp

  // ---- the order of work ----
  virtual std::vector<Op> schedule(int micro_batches) const {                       // pipelines
    std::vector<Op> order;
    for (int m = 0; m < micro_batches; ++m) {
      order.push_back({Op::forward, m});
      order.push_back({Op::backward, m});
    }
    return order;
  }

  // ---- once a step ----
  virtual void finish_gradients(Transformer&) {}               // all that replicate: dp, ring, ddp, zero, sp's norms; tied weights
  virtual void update(AdamW&, float lr, float gradient_scale); // dp, zero, offload, async_ps
};
