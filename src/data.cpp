#include "data.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <utility>

#include "error.h"
#include "random.h"

static_assert(std::endian::native == std::endian::little, "token files are read as they lie in memory");

namespace {

// As the first bytes of a text neither magic can occur: 0x98 and 0xb1 never start a character of UTF-8.
constexpr int32_t token_magic = 20240520;       // llm.c, GPT-2: 16-bit tokens
constexpr int32_t wide_token_magic = 20240801;  // llm.c, Llama 3: 32-bit tokens
constexpr int64_t header_bytes = 256 * sizeof(int32_t);

struct Input {
  std::string path;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file{nullptr, std::fclose};
  int64_t size = 0;

  explicit Input(const std::string& path) : path(path) {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (status.type() == fs::file_type::not_found)
      throw Error(format("data '%s': no such file; check the path", path.c_str()));
    if (status.type() == fs::file_type::directory)
      throw Error(format("data '%s' is a directory; give a file", path.c_str()));
    if (fs::exists(status) && status.type() != fs::file_type::regular &&
        status.type() != fs::file_type::unknown)
      throw Error(format("data '%s' is a pipe or a device; save it to a regular file first", path.c_str()));
    file.reset(std::fopen(path.c_str(), "rb"));
    if (!file) throw Error(format("data '%s': cannot open it (%s)", path.c_str(), std::strerror(errno)));
    size = static_cast<int64_t>(fs::file_size(path, error));
    if (error)
      throw Error(format("data '%s': cannot tell its size (%s)", path.c_str(), error.message().c_str()));
    if (size == 0) throw Error(format("data '%s' is empty; give a file with text or tokens", path.c_str()));
  }

  void read(void* to, int64_t bytes) {
    const size_t got = std::fread(to, 1, static_cast<size_t>(bytes), file.get());
    if (static_cast<int64_t>(got) == bytes) return;
    const char* why = std::ferror(file.get()) ? std::strerror(errno) : "it shrank while being read";
    throw Error(format("data '%s': read %zu of %lld bytes (%s); try again or copy the file", path.c_str(),
                       got, static_cast<long long>(bytes), why));
  }
};

// The number of tokens, once the header is known to describe this very file.
int64_t token_count(Input& input) {
  const char* path = input.path.c_str();
  if (input.size < header_bytes)
    throw Error(
        format("token file '%s': header truncated, the file has %lld bytes and the header alone %lld; "
               "write the file again",
               path, static_cast<long long>(input.size), static_cast<long long>(header_bytes)));
  std::array<int32_t, 256> header;
  input.read(header.data(), header_bytes);
  if (header[1] != 1)
    throw Error(
        format("token file '%s': version %d, expected 1 (uint16 tokens); write it with llm.c's "
               "GPT-2 data scripts",
               path, header[1]));
  const int64_t count = header[2], body = input.size - header_bytes;
  if (count == 0) throw Error(format("token file '%s' is empty: its header counts 0 tokens", path));
  if (count < 0)
    throw Error(format("token file '%s': its header counts %lld tokens; write the file again", path,
                       static_cast<long long>(count)));
  if (body < 2 * count)
    throw Error(
        format("token file '%s': truncated, its header counts %lld tokens (%lld bytes), but %lld bytes "
               "follow it; copy the file again",
               path, static_cast<long long>(count), static_cast<long long>(2 * count),
               static_cast<long long>(body)));
  if (body > 2 * count)
    throw Error(
        format("token file '%s': %lld trailing bytes after the %lld tokens its header counts; "
               "write the file again",
               path, static_cast<long long>(body - 2 * count), static_cast<long long>(count)));
  return count;
}

}  // namespace

Corpus Corpus::load(const std::string& path, int min_vocabulary) {
  Input input(path);
  Corpus corpus;
  corpus.path_ = path;
  corpus.name_ = std::filesystem::path(path).filename().string();

  int32_t magic = 0;
  if (input.size >= static_cast<int64_t>(sizeof magic)) input.read(&magic, sizeof magic);
  std::rewind(input.file.get());
  if (magic == wide_token_magic)
    throw Error(
        format("token file '%s': magic %d means 32-bit tokens (Llama 3), which are not supported; "
               "write 16-bit tokens, magic %d",
               path.c_str(), magic, token_magic));

  corpus.is_text_ = magic != token_magic;
  if (corpus.is_text_) {
    corpus.tokens_.resize(static_cast<size_t>(input.size));
    std::vector<unsigned char> bytes(std::min<int64_t>(input.size, 1 << 20));  // widen a piece at a time
    for (int64_t at = 0; at < input.size; at += static_cast<int64_t>(bytes.size())) {
      const int64_t n = std::min<int64_t>(input.size - at, static_cast<int64_t>(bytes.size()));
      input.read(bytes.data(), n);
      std::copy_n(bytes.begin(), n, corpus.tokens_.begin() + at);
    }
    corpus.vocabulary_ = 256;
  } else {
    const int64_t count = token_count(input);
    corpus.tokens_.resize(static_cast<size_t>(count));
    input.read(corpus.tokens_.data(), count * static_cast<int64_t>(sizeof(uint16_t)));
    corpus.vocabulary_ = *std::max_element(corpus.tokens_.begin(), corpus.tokens_.end()) + 1;
  }
  corpus.vocabulary_ = std::max(corpus.vocabulary_, min_vocabulary);
  return corpus;
}

size_t Corpus::train_length(int seq) const {
  const size_t n = tokens_.size(), held_out = n / 10, sample = static_cast<size_t>(seq) + 1;
  return held_out >= sample && n - held_out >= sample ? n - held_out : n;
}

std::span<const uint16_t> Corpus::train(int seq) const { return tokens().first(train_length(seq)); }

std::span<const uint16_t> Corpus::valid(int seq) const {
  const size_t n = train_length(seq);
  return n == tokens_.size() ? tokens() : tokens().subspan(n);
}

void Corpus::check_vocabulary(int vocabulary) const {
  const auto bad = std::find_if(tokens_.begin(), tokens_.end(), [&](int id) { return id >= vocabulary; });
  if (bad == tokens_.end()) return;
  throw Error(
      format("data '%s': token id %d at position %lld is outside the model's vocabulary of %d; "
             "use a model with a vocabulary of at least %d or other data",
             path_.c_str(), *bad, static_cast<long long>(bad - tokens_.begin()), vocabulary,
             *std::max_element(bad, tokens_.end()) + 1));
}

void Corpus::check_length(int seq) const {
  if (static_cast<int64_t>(tokens_.size()) > seq) return;
  throw Error(
      format("data '%s' has %zu tokens, but one sample of sequence length %d needs %lld; "
             "use a longer file or a shorter sequence",
             path_.c_str(), tokens_.size(), seq, seq + 1LL));
}

GlobalBatch global_batch(std::span<const uint16_t> tokens, uint64_t seed, int64_t step, int samples,
                         int seq) {
  if (samples < 1 || seq < 1)
    throw Error(format("a global batch of %d samples of %d tokens: both must be at least 1", samples, seq));
  const int64_t offsets = static_cast<int64_t>(tokens.size()) - seq;  // where a sample may start
  if (offsets < 1)
    throw Error(
        format("%zu tokens of data, but one sample of sequence length %d needs %lld; "
               "use a longer file or a shorter sequence",
               tokens.size(), seq, seq + 1LL));

  GlobalBatch batch{samples, seq, {}, {}, static_cast<int64_t>(samples) * seq};
  batch.inputs.resize(static_cast<size_t>(batch.valid_tokens));
  batch.targets.resize(static_cast<size_t>(batch.valid_tokens));
  // The tag keeps these draws apart from the initial values, which use the same seed.
  const uint64_t key = seed ^ hash_name("global batch");
  for (int i = 0; i < samples; ++i) {
    const double u = random_uniform(key, static_cast<uint64_t>(step), static_cast<uint64_t>(i));
    const auto offset = static_cast<size_t>(u * static_cast<double>(offsets));
    const auto sample = tokens.subspan(offset, static_cast<size_t>(seq) + 1);
    const auto row = static_cast<std::ptrdiff_t>(i) * seq;
    std::copy(sample.begin(), sample.end() - 1, batch.inputs.begin() + row);
    std::copy(sample.begin() + 1, sample.end(), batch.targets.begin() + row);
  }
  return batch;
}

double unigram_entropy(std::span<const uint16_t> tokens) {
  std::vector<int64_t> counts(1 << 16);
  for (uint16_t id : tokens) ++counts[id];
  double nats = 0;
  for (int64_t count : counts)
    if (count > 0) nats += count * std::log(static_cast<double>(tokens.size()) / count);
  return tokens.empty() ? 0 : nats / static_cast<double>(tokens.size());
}

double bigram_entropy(std::span<const uint16_t> tokens) {
  if (tokens.size() < 2) return 0;
  // Sort the successors by their predecessor (a counting sort), then count those of one predecessor at a
  // time: linear in time and memory, where a table of all pairs would need vocabulary^2 counters.
  const size_t ids = 1 << 16, pairs = tokens.size() - 1;
  std::vector<size_t> start(ids + 1);  // successors of id lie at [start[id], start[id + 1])
  for (size_t i = 0; i < pairs; ++i) ++start[tokens[i] + 1u];
  std::partial_sum(start.begin(), start.end(), start.begin());
  std::vector<uint16_t> next(pairs);
  std::vector<size_t> end(start.begin(), start.end() - 1);
  for (size_t i = 0; i < pairs; ++i) next[end[tokens[i]]++] = tokens[i + 1];

  std::vector<int64_t> counts(ids);
  double nats = 0;
  for (size_t id = 0; id < ids; ++id) {
    const std::span successors(next.data() + start[id], start[id + 1] - start[id]);
    for (uint16_t successor : successors) ++counts[successor];
    for (uint16_t successor : successors) {
      const int64_t count = std::exchange(counts[successor], 0);  // 0 from the second meeting on
      if (count > 0) nats += count * std::log(static_cast<double>(successors.size()) / count);
    }
  }
  return nats / static_cast<double>(pairs);
}

std::vector<int32_t> sort_order(std::span<const int32_t> ids) {
  std::vector<int32_t> order(ids.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
  return order;
}
