// lesson.h - what every lesson has around its one idea: options, data, the progress line, and the proof.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "adamw.h"
#include "checkpoint.h"
#include "verify.h"
#include "world.h"

struct TensorCut;  // formulas.h

class Lesson {
 public:
  Lesson(const std::string& name, const Options&, const Corpus&, Device&, World&);

  const Options& options() const { return options_; }
  const ModelConfig& config() const { return options_.model; }
  Device& device() { return device_; }
  World& world() { return world_; }
  uint64_t seed() const { return options_.seed; }
  double option(const std::string& name) const { return options_.extra.at(name).value; }  // one of this lesson's own
  // " over a simulated link of ..", "paced to ..", or nothing: goes into every output that used it
  std::string link_text() const;
  void print(const char* text, ...) const __attribute__((format(printf, 2, 3)));  // by rank 0

  // ---- the loop ----
  void start(AdamW&);              // loads --load, if given; says what will be trained
  std::vector<int64_t> steps() const;
  std::vector<MicroBatch> batch(int64_t step, Transformer&);  // this rank's part of the step's global batch
  float learning_rate(int64_t step) const { return options_.learning_rate(step); }
  float clip_factor(double norm) const { return AdamW::clip_factor(norm, options_.clip); }
  double sum(double mine) { return world_.sum(mine); }        // over all ranks: losses, squared norms
  // Call it between the gradients and the update, with the global loss and norm: records both for the proof, prints
  // a progress line, and stops the run if either is not finite.
  void log(int64_t step, double loss, double norm, Transformer&);

  // ---- what training should have cost this rank: formula against what was counted. Call after the loop ----
  void expect_peak(Memory kind, int64_t bytes, const std::string& formula);
  void expect_stored(Memory kind, int64_t bytes, const std::string& formula);  // between steps, so now
  void expect_state(int64_t parameters, int64_t gradients, int64_t optimizer);  // peaks of the three, bytes
  void expect_host_link(int64_t down, int64_t up, const std::string& formula);   // bytes to the host, and from it
  void expect_activations(Transformer&);   // of a rank that runs all layers on its samples
  void expect_activations(Transformer&, const TensorCut&);  // the same, on one of t tensor-parallel ranks
  void expect_sent(const std::string& group, const std::string& operation, int64_t bytes, const std::string& formula);
  void expect_received(const std::string& group, const std::string& operation, int64_t bytes,
                       const std::string& formula);
  void expect_calls(const std::string& group, const std::string& operation, int64_t calls, const std::string& formula);

  // ---- the end ----
  void finish(AdamW&);             // saves to --save, prints the held-out loss and a sample of text; --logits, --trace
  int prove(Transformer&);         // prints the proof; 0 if everything holds

 private:
  struct Cost {                    // one thing counted on this rank
    std::string what, formula;
    int64_t counted, expected;
  };
  void expect_traffic(const std::string& what, const std::string& group, const std::string& operation,
                      int64_t Traffic::*field, int64_t expected, const std::string& formula);
  bool holds_all_units(Transformer&) const;  // false on the stages of a pipeline
  double held_out_loss(Transformer&);
  void sample(Transformer&);
  void save_logits(Transformer&);
  void write_trace();
  bool prove_costs();

  std::string name_;
  const Options& options_;
  const Corpus& corpus_;
  Device& device_;
  World& world_;
  std::optional<Checkpoint> loaded_;
  int64_t first_step_ = 0;
  double peak_flops_ = 0;          // measured matrix-product peak of all ranks together, FLOP/s
  double started_ = 0, logged_ = 0, trained_ = 0;
  int64_t logged_step_ = 0;
  std::vector<double> rates_;      // tokens/s of each progress line
  Trajectory mine_;                // assembled from all ranks, on rank 0
  std::vector<Check> assembly_;    // whether the ranks' parts fit together
  std::vector<Cost> costs_;
  std::set<std::string> traffic_expected_;
};

// Seconds of a clock that only moves forward.
double seconds();
// The same for the time this thread has really run: what other programs on the machine take does not count.
double core_seconds();
// FLOP/s of a matrix product of `size` (median of several), by one of the clocks above: the peak a model's FLOP/s are
// held against.
double measure_matmul_peak(Device&, int size = 1024, double (*clock)() = seconds);

using LessonBody = int (*)(Lesson&);
// What main() of a lesson does: options, data, checks, then the body. Returns the exit status.
int run_lesson(int argc, char** argv, const char* name, const char* title, Options defaults, LessonBody);

// LESSON(name, title, defaults) { body }   makes main(), unless another file includes this lesson for its strategy: the
// compiler's __INCLUDE_LEVEL__ is 0 only in the file it was given. `defaults`: Options, with what the lesson adds.
#define LESSON_MAIN_0(name) \
  int main(int argc, char** argv) { return lesson_main_##name(argc, argv); }
#define LESSON_MAIN_1(name)
#define LESSON_MAIN_2(name)
#define LESSON_JOIN_(a, b) a##b
#define LESSON_JOIN(a, b) LESSON_JOIN_(a, b)
#define LESSON(name, title, defaults)                                          \
  static int lesson_##name(Lesson&);                                           \
  [[maybe_unused]] static int lesson_main_##name(int argc, char** argv) {      \
    return run_lesson(argc, argv, #name, title, defaults, lesson_##name);      \
  }                                                                            \
  LESSON_JOIN(LESSON_MAIN_, __INCLUDE_LEVEL__)(name)                           \
  static int lesson_##name(Lesson& lesson)
