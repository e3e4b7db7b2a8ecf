// lesson.h - what every lesson has around its one idea: options, data, the progress line, and the proof.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "adamw.h"
#include "checkpoint.h"
#include "verify.h"

class Lesson {
 public:
  Lesson(const std::string& name, const Options&, const Corpus&, Device&);

  const Options& options() const { return options_; }
  const ModelConfig& config() const { return options_.model; }
  Device& device() { return device_; }
  uint64_t seed() const { return options_.seed; }

  // ---- the loop ----
  void start(AdamW&);              // loads --load, if given; says what will be trained
  std::vector<int64_t> steps() const;
  std::vector<MicroBatch> batch(int64_t step, Transformer&);  // this rank's part of the step's global batch
  float learning_rate(int64_t step) const { return options_.learning_rate(step); }
  float clip_factor(double norm) const { return AdamW::clip_factor(norm, options_.clip); }
  // Call it between the gradients and the update, with the global loss and norm: records both for the proof, prints
  // a progress line, and stops the run if either is not finite.
  void log(int64_t step, double loss, double norm, Transformer&);

  // ---- the end ----
  void finish(AdamW&);             // saves to --save, prints the held-out loss and a sample of text; --logits
  void expect_peak(Memory kind, int64_t bytes, const std::string& formula);
  int prove(Transformer&);         // prints the proof; 0 if everything holds

 private:
  double held_out_loss(Transformer&);
  void sample(Transformer&);
  void save_logits(Transformer&);

  std::string name_;
  const Options& options_;
  const Corpus& corpus_;
  Device& device_;
  std::optional<Checkpoint> loaded_;
  int64_t first_step_ = 0;
  double peak_flops_ = 0;          // measured matrix-product peak of this machine, FLOP/s
  double started_ = 0, logged_ = 0;
  int64_t logged_step_ = 0;
  std::vector<double> rates_;      // tokens/s of each progress line
  Trajectory mine_;
  std::vector<Check> memory_;
};

// Seconds of a clock that only moves forward.
double seconds();
// The same for the time this thread has really run: what other programs on the machine take does not count.
double core_seconds();
// FLOP/s of the best of several matrix products of `size`, by one of the clocks above.
double measure_matmul_peak(Device&, int size = 1024, double (*clock)() = seconds);

using LessonBody = int (*)(Lesson&);
// What main() of a lesson does: options, data, checks, then the body. Returns the exit status.
int run_lesson(int argc, char** argv, const char* name, const char* title, Options defaults, LessonBody);

// LESSON(name, title, defaults) { body }   makes main(), unless another file includes this lesson.
// `defaults` is a function from Options to Options.
#ifdef LESSON_INCLUDED
#define LESSON_MAIN(name, title, defaults)
#else
#define LESSON_MAIN(name, title, defaults) \
  int main(int argc, char** argv) { return run_lesson(argc, argv, #name, title, defaults, lesson_##name); }
#endif
#define LESSON(name, title, defaults)         \
  static int lesson_##name(Lesson&);          \
  LESSON_MAIN(name, title, defaults)          \
  [[maybe_unused]] static int lesson_##name(Lesson& lesson)
