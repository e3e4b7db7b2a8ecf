// The training data: a file of tokens, and the global batch of each step drawn from it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

// A text or a token file, held in memory as token ids.
//  - Text: any file, byte by byte (UTF-8 is simply several tokens a character); vocabulary 256.
//  - llm.c's token file: 256 little-endian int32 (magic 20240520, version 1, count, zeros), then `count`
//  uint16.
class Corpus {
 public:
  // Reads the whole file. `min_vocabulary` raises the vocabulary above what the tokens need (a padded model).
  // Throws Error: missing, not a regular file, empty, unreadable, or a token file whose header does not fit
  // it.
  static Corpus load(const std::string& path, int min_vocabulary = 0);

  const std::string& name() const { return name_; }  // the file's name, without its folder
  bool is_text() const { return is_text_; }
  int vocabulary() const { return vocabulary_; }  // text: 256; token file: largest id + 1; or min_vocabulary
  std::span<const uint16_t> tokens() const { return tokens_; }

  // The last 10 % of the tokens are held out for validation. A corpus so short that one of the parts could
  // not hold a single sample of seq + 1 tokens is not split: both calls return all of it.
  std::span<const uint16_t> train(int seq) const;
  std::span<const uint16_t> valid(int seq) const;

  void check_vocabulary(
      int vocabulary) const;         // throws Error unless every id is below the model's vocabulary
  void check_length(int seq) const;  // throws Error unless one sample of seq + 1 tokens fits

 private:
  size_t train_length(int seq) const;  // all of it when the corpus is not split

  std::string path_, name_;
  bool is_text_ = true;
  int vocabulary_ = 256;
  std::vector<uint16_t> tokens_;
};

// What all ranks together train on in one step.
struct GlobalBatch {
  int samples = 0, seq = 0;
  std::vector<int32_t> inputs, targets;  // (samples, seq), row by row; target -1: ignored by the loss
  int64_t valid_tokens = 0;              // targets that count
};

// Sample i of step n starts at an offset drawn uniformly from [0, tokens - seq - 1] by (seed, n, i) alone. So
// the batch of a step is the same for every layout and rank count, and after a resume. targets[t] = inputs[t
// + 1]. Throws Error if samples or seq is below 1, or one sample does not fit.
GlobalBatch global_batch(std::span<const uint16_t> tokens, uint64_t seed, int64_t step, int samples, int seq);

// Entropies of a text counted from itself, in nats per token: what a model that knows only the frequencies of
// tokens, H(next), or of pairs, H(next | current), can reach at best. 0 for texts too short to count.
double unigram_entropy(std::span<const uint16_t> tokens);
double bigram_entropy(std::span<const uint16_t> tokens);

// The positions of `ids` in order of id, equal ids in their old order: groups the rows that update one row of
// an embedding table (or go to one expert), so they can be summed without atomics and in a fixed order.
std::vector<int32_t> sort_order(std::span<const int32_t> ids);
