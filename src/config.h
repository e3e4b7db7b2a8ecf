// config.h - what the model is, how it is trained, and the checks that both make sense.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>

// A Llama. Sizes are global: how they are cut is a matter of Parallel.
struct ModelConfig {
  int vocab = 256;
  int dim = 128;      // D: width of the residual stream
  int layers = 2;     // L
  int heads = 8;      // H: query heads; head size d = dim / heads
  int kv_heads = 4;   // key and value heads, each shared by heads / kv_heads query heads
  int hidden = 0;     // F: width of the MLP; 0: 8/3 dim, rounded up to a multiple of 64
  int seq = 128;      // T: tokens of a sample
  bool tied = false;  // the head uses the embedding table
  float norm_eps = 1e-5f;
  double rope_theta = 10000;

  int head_dim() const { return dim / heads; }
  int units() const { return layers + 2; }  // the embedding, the blocks, the head
  int head() const { return layers + 1; }   // the head's unit; blocks are 1 .. layers
  int64_t parameters() const;               // Psi
  // Model FLOPs of one trained token: 6 N + 6 L D T, where N leaves out the input embedding and the second term
  // is causal attention (half of 12 L D T). Recomputation is not counted. (Megatron-LM, arXiv:2104.04473)
  double flops_per_token() const;
  void validate() const;  // throws Error: one line, the numbers, what to do
};

// How the ranks run and reach each other (src/world.h).
struct WorldOptions {
  int threads = 1;         // ranks, when the program was not started by mpiexec
  double timeout = 30;     // seconds that a rank may wait without a byte moving
  double link_gbps = 0;    // simulated link: 10^9 bytes per second and port; 0: none
  double link_us = 0;      // and microseconds per message
  std::string streams = "eager";  // of the simulated GPU: when work on them runs (src/sim/sim.h)
  bool linked() const { return link_gbps > 0 || link_us > 0; }
};

// An option that only one lesson has.
struct Extra {
  double value;
  std::string help;
};

struct Options {
  ModelConfig model;
  std::string data = "lessons/corpus.txt";
  std::string save, load;      // folders; empty: none
  std::string logits;          // file; empty: none
  int64_t steps = 100;         // the schedule ends at this step, also after --load
  int64_t stop_after = 0;      // the run ends here, as a part of that schedule; 0: at its end
  int batch = 16;              // samples of the global batch
  int micro_batches = 1;       // parts that each rank's share is cut into
  float lr = 1e-3f;            // peak learning rate
  int64_t warmup = 10;         // steps of linear warm-up; then a cosine down to lr / 10 at the last step
  float weight_decay = 0.1f;   // not on norms
  float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
  float clip = 1;              // largest global gradient norm; 0: no clipping
  uint64_t seed = 1;
  int sample = 0;              // tokens to generate at the end
  double pace = 0;             // ms that a forward takes at least, backward twice that; 0: as fast as it goes
  int64_t log_every = 10;
  bool proof = true;
  std::string trace;           // file; empty: none
  WorldOptions world;
  std::map<std::string, Extra> extra;  // by name, without the dashes
  std::set<std::string> given;  // the options on the command line, such as "--dim"
  // Of a lesson: throws Error if its options do not fit the number of ranks, before the ranks start. May be empty.
  std::function<void(const Options&, int ranks)> check;

  // The learning rate of a step, counted from 0: a pure function, so a resumed run continues exactly.
  float learning_rate(int64_t step) const;
  int64_t last_step() const { return stop_after ? stop_after : steps; }
  // Takes the model of a checkpoint, whose config is the file `where`; only --seq may differ. Throws Error if the
  // command line contradicts it.
  void adopt(const ModelConfig& saved, const std::string& where);
  void validate() const;
};

// Reads the command line into `defaults`. `--help` prints and exits 0; an option it can't read throws Error. Whether
// the values make sense is for validate() to say, once the data and the checkpoint have given theirs.
Options parse_options(int argc, char** argv, const std::string& title, Options defaults);

// config.json as Hugging Face writes it for LlamaForCausalLM, and back (from its top-level fields).
std::string to_hugging_face(const ModelConfig&);
ModelConfig from_hugging_face(const std::map<std::string, std::string>& fields, const std::string& path);
