// transformer.h - a Llama on one rank: the embedding, the blocks and the head, forward and backward.
//
// It calls the seams of Parallel wherever a strategy may step in, and can run any range of its units for several
// micro-batches in flight, with the backward of a unit split into its input and its weight half (pipelines).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "data.h"
#include "parallel.h"

// One part of this rank's share of a global batch: B samples of T positions, N = B T tokens.
struct MicroBatch {
  int index = 0;             // 0 .. count - 1, also names the activations it leaves behind
  bool last = true;          // the last of its step: gradients are complete after its backward
  int B = 0, T = 0;
  float loss_factor = 1;     // 1 / valid tokens of the global batch: all losses together are the global mean
  std::vector<int> positions;  // (T)
  IntBuffer tokens, targets;   // (N)
  IntBuffer order;             // (N), 0 .. N-1 sorted by token
  IntBuffer device_positions;  // (T)
  int N() const { return B * T; }
};

// This rank's micro-batches of a global batch: the samples and positions of `view`, in `count` parts.
std::vector<MicroBatch> micro_batches(Device&, const GlobalBatch&, const View& view, int count);

// Both halves of a backward pass at once, or only the gradient of the input (the weights' half is then done by
// backward_weights, later).
enum class Half { both, input };

class Transformer {
 public:
  Transformer(const ModelConfig&, Parallel&, Device&, uint64_t seed);

  // ---- one step of training: forward and backward of each micro-batch, between start_step and the update ----
  void start_step() { params_.start_step(); }
  void forward(const MicroBatch&);
  void backward(const MicroBatch&);
  // This rank's part of the global mean loss since it was last asked for. Of ranks that compute the same losses one
  // has them all and the others nothing, so the sum over all ranks is the mean, whatever the layout.
  double loss();

  // ---- ranges of units [first, last), for pipelines. x and dx: (R, D), R = N unless the tokens are split ----
  Buffer forward(int first, int last, const MicroBatch&, Buffer x);  // unit 0 takes no x; the head returns none
  Buffer backward(int first, int last, const MicroBatch&, Buffer dx, Half half);
  void backward_weights(int first, int last, const MicroBatch&);
  int stashed(int block) const;  // micro-batches whose activations of this block are kept now
  // Gives a call of forward at least so many seconds, and of backward twice as many, by sleeping: so that the order
  // of work can be seen in time where ranks share cores.
  void set_pace(double seconds) { pace_ = seconds; }

  // Without gradients; activations are not kept. Logits (N, V), or this rank's part of the mean loss.
  Buffer logits(const MicroBatch&);
  double evaluate(const MicroBatch&);

  // The squared norm of the gradients that this rank counts: every distinct element of the model is counted on
  // exactly one rank, so the sum over ranks is the square of the one true norm.
  double squared_gradient_norm();

  const ModelConfig& config() const { return config_; }
  Params& params() { return params_; }
  Parallel& parallel() { return parallel_; }
  Device& device() { return device_; }

 private:
  // What one block keeps of one micro-batch for its backward pass. R: rows of the residual stream here.
  struct BlockState {
    Buffer input, norm1, middle, norm2;   // (R, D): residual stream, normed, after attention, normed
    FloatBuffer rstd1, rstd2;             // (R)
    Buffer q, k, v;                       // (B, H, T, d), (B, KV, T, d) twice
    Buffer probabilities;                 // (B, H, T, T)
    Buffer attention;                     // (N, H d), heads merged: the input of o_proj
    Buffer gate, up, act;                 // (N, F)
    std::vector<std::function<void()>> weight_half;  // postponed by Half::input
  };
  struct HeadState {
    Buffer input, normed;                 // (R, D)
    FloatBuffer rstd;                     // (R)
    Buffer logits;                        // (N, V): their gradient, once the loss is computed
    std::vector<std::function<void()>> weight_half;
  };
  struct EmbeddingState {
    std::vector<std::function<void()>> weight_half;
  };
  using Scratch = std::shared_ptr<Buffer>;  // lives until its last user is done, who may be a postponed weight half

  Buffer embedding_forward(const MicroBatch&);
  void embedding_backward(const MicroBatch&, Buffer dx, EmbeddingState&, Half);
  Buffer block_forward(int unit, const MicroBatch&, Buffer x, BlockState&);
  void block_backward(int unit, const MicroBatch&, Tensor dx, BlockState&, Half);
  void head_forward(const MicroBatch&, Buffer x, HeadState&);  // the logits
  void cross_entropy(const MicroBatch&, HeadState&);           // their loss, and their gradient in their place
  Buffer infer(const MicroBatch&, double* loss);
  Buffer head_backward(const MicroBatch&, HeadState&, Half);
  Attention attention_of(const MicroBatch&, BlockState&, Tensor out);
  FloatBuffer rope_of(const MicroBatch&);

  std::string span_name(const char* what, int unit) const;

  Tensor weight(const std::string& name) { return params_.weight(*params_.find(name)); }
  Scratch scratch(int64_t rows, int64_t columns);
  // The parts of a linear layer's and a norm's backward. `later`: postponed work of this unit, or nullptr.
  using Later = std::vector<std::function<void()>>*;
  static void now_or(Later later, std::function<void()> work);

  ModelConfig config_;
  Parallel& parallel_;
  Device& device_;
  Params params_;
  int heads_ = 0, kv_heads_ = 0;  // on this rank
  int64_t hidden_ = 0;
  std::map<std::pair<int, int>, BlockState> blocks_;  // by unit and micro-batch
  std::map<int, HeadState> heads_state_;              // by micro-batch
  std::map<int, EmbeddingState> embeddings_;
  double pace_ = 0;
  std::vector<FloatBuffer> losses_;                   // (N) of each micro-batch, added up when asked for
};
