#include "../src/data.h"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>

#include "../src/error.h"
#include "../src/random.h"

namespace {

namespace fs = std::filesystem;

struct Folder {  // a folder of our own, gone at the end of the test
  std::string path = (fs::temp_directory_path() / "ringtron-test-XXXXXX").string();
  Folder() { REQUIRE(::mkdtemp(path.data()) != nullptr); }
  Folder(const Folder&) = delete;
  ~Folder() { fs::remove_all(path); }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
};

std::string file(const Folder& folder, const std::string& content) {
  const std::string path = folder / "data.bin";
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

// llm.c's format, written as its data scripts do.
std::string token_file(const std::vector<uint16_t>& tokens, int32_t count, int32_t version = 1,
                       int32_t magic = 20240520) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  std::string content(1024 + 2 * tokens.size(), '\0');
  std::memcpy(content.data(), header.data(), 1024);
  if (!tokens.empty()) std::memcpy(content.data() + 1024, tokens.data(), 2 * tokens.size());
  return content;
}

std::string token_file(const std::vector<uint16_t>& tokens) {
  return token_file(tokens, static_cast<int32_t>(tokens.size()));
}

template <class F>
std::string error_of(F work) {  // the message of the Error that `work` throws, which must be one line
  try {
    work();
  } catch (const Error& e) {
    const std::string text = e.what();
    CHECK(text.find('\n') == std::string::npos);
    return text;
  }
  return "(no error)";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<uint16_t> as_tokens(const std::string& text) {
  std::vector<uint16_t> tokens;
  for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::vector<uint16_t> numbers(size_t n) {  // 0, 1, 2, ...: a token tells its own position
  std::vector<uint16_t> tokens(n);
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return tokens;
}

std::vector<uint16_t> copy(std::span<const uint16_t> tokens) { return {tokens.begin(), tokens.end()}; }

bool near(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance; }  // false for NaN

}  // namespace

TEST_CASE("random: golden values, so that a seed means the same everywhere and for ever") {
  CHECK(mix(0) == 0);
  CHECK(mix(0x9e3779b97f4a7c15u) == 0xe220a8397b1dcdafu);  // SplitMix64 from seed 0, as published
  CHECK(mix(2 * 0x9e3779b97f4a7c15u) == 0x6e789e6aa1b965f4u);
  CHECK(mix(1234567 + 0x9e3779b97f4a7c15u) == 6457827717110365317u);
  CHECK(hash_name("") == 0xcbf29ce484222325u);  // FNV-1a, as published
  CHECK(hash_name("a") == 0xaf63dc4c8601ec8cu);
  CHECK(hash_name("foobar") == 0x85944171f73967e8u);

  // From an independent implementation in Python.
  const uint64_t name = hash_name("model.embed_tokens.weight"), far = 1000000007;
  CHECK(random_bits(0, 0, 0) == 0x568a9b0b1a2c05ecu);
  CHECK(random_bits(1, 2, 3) == 0xeb3aa0ce549fec8cu);
  CHECK(random_bits(42, name, far) == 0x77d45385b3ef67d5u);
  CHECK(random_uniform(0, 0, 0) == 0x1.5a2a6c2c68bp-2);
  CHECK(random_uniform(1, 2, 3) == 0x1.d675419ca93fdp-1);
  CHECK(random_normal(0, 0, 0) == -0x1.be25ap-4f);
  CHECK(random_normal(1, 2, 3) == 0x1.1da5aep+0f);
  CHECK(random_normal(42, name, far) == -0x1.a8773p-1f);
  static_assert(random_bits(0, 0, 0) == 0x568a9b0b1a2c05ecu);
}

TEST_CASE("random: moments of the uniform and the normal") {
  const int n = 200000;
  for (uint64_t seed : {0, 1, 1337}) {
    double u1 = 0, u2 = 0, z1 = 0, z2 = 0, z3 = 0, z4 = 0;
    int within = 0;
    for (int i = 0; i < n; ++i) {
      const double u = random_uniform(seed, 5, i), z = random_normal(seed, 6, i);
      REQUIRE(u >= 0);
      REQUIRE(u < 1);
      u1 += u, u2 += u * u;
      z1 += z, z2 += z * z, z3 += z * z * z, z4 += z * z * z * z;
      within += std::abs(z) < 1;
    }
    // Five standard errors each.
    const double root = 5 / std::sqrt(n);
    CHECK(near(u1 / n, 0.5, root * std::sqrt(1 / 12.0)));
    CHECK(near(u2 / n, 1 / 3.0, root * std::sqrt(4 / 45.0)));
    CHECK(near(z1 / n, 0, root));
    CHECK(near(z2 / n, 1, root * std::sqrt(2)));
    CHECK(near(z3 / n, 0, root * std::sqrt(15)));
    CHECK(near(z4 / n, 3, root * std::sqrt(96)));
    CHECK(near(within / double(n), 0.682689, root * 0.4655));
  }
}

TEST_CASE("random: seeds, streams and neighbouring indices are independent") {
  const int n = 100000;
  const auto correlation = [&](auto a, auto b) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += double(a(i)) * double(b(i));
    return sum / n;
  };
  const auto z = [](uint64_t seed, uint64_t stream, int shift) {
    return [=](int i) { return random_normal(seed, stream, static_cast<uint64_t>(i + shift)); };
  };
  const double bound = 5 / std::sqrt(n);
  CHECK(near(correlation(z(1, 0, 0), z(1, 1, 0)), 0, bound));  // streams next to each other
  CHECK(near(correlation(z(1, 0, 0), z(2, 0, 0)), 0, bound));  // seeds
  CHECK(near(correlation(z(1, 0, 0), z(1, 0, 1)), 0, bound));  // indices
  CHECK(near(correlation(z(1, 2, 0), z(2, 1, 0)), 0, bound));  // swapped
  CHECK(near(correlation(z(0, hash_name("q_proj"), 0), z(0, hash_name("k_proj"), 0)), 0, bound));

  std::set<uint64_t> seen;  // no number twice among 64,000 from small seeds, streams and indices
  for (uint64_t seed = 0; seed < 40; ++seed)
    for (uint64_t stream = 0; stream < 40; ++stream)
      for (uint64_t index = 0; index < 40; ++index) seen.insert(random_bits(seed, stream, index));
  CHECK(seen.size() == 64000);

  int ones[64] = {};  // every bit is a fair coin
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < 64; ++k) ones[k] += random_bits(3, 4, static_cast<uint64_t>(i)) >> k & 1;
  for (int count : ones) CHECK(near(count / double(n), 0.5, 0.5 * bound));
}

TEST_CASE("corpus: text is bytes, as they are") {
  const Folder folder;
  const std::string text = std::string("To be, 或不是.\r\n\xff\0", 21) + "end";
  const Corpus corpus = Corpus::load(file(folder, text));
  CHECK(corpus.is_text());
  CHECK(corpus.vocabulary() == 256);
  CHECK(corpus.name() == "data.bin");
  CHECK(copy(corpus.tokens()) == as_tokens(text));
  CHECK(corpus.tokens()[7] == 0xe6);  // the first of the three bytes of a Chinese character
  CHECK(error_of([&] { corpus.check_vocabulary(256); }) == "(no error)");
  CHECK(contains(error_of([&] { corpus.check_vocabulary(128); }), "token id 230 at position 7"));
  CHECK(Corpus::load(file(folder, "ab"), 100).vocabulary() == 256);
  CHECK(Corpus::load(file(folder, "ab"), 300).vocabulary() == 300);
  CHECK(Corpus::load(file(folder, "a")).tokens().size() == 1);  // shorter than a magic number

  std::string large(3'000'001, '\0');  // more than one piece of the reader
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 7 + i / 1000);
  CHECK(copy(Corpus::load(file(folder, large)).tokens()) == as_tokens(large));
}

TEST_CASE("corpus: llm.c token files") {
  const Folder folder;
  const std::vector<uint16_t> tokens = {50256, 0, 513, 65535, 7};
  Corpus corpus = Corpus::load(file(folder, token_file(tokens)));
  CHECK(!corpus.is_text());
  CHECK(corpus.vocabulary() == 65536);
  CHECK(copy(corpus.tokens()) == tokens);
  CHECK(error_of([&] { corpus.check_vocabulary(65536); }) == "(no error)");
  const std::string text = error_of([&] { corpus.check_vocabulary(50257); });
  CHECK_MESSAGE(contains(text, "token id 65535 at position 3 is outside the model's vocabulary of 50257"),
                text);
  CHECK(contains(text, "at least 65536"));

  corpus = Corpus::load(file(folder, token_file({3, 1, 2})));
  CHECK(corpus.vocabulary() == 4);
  CHECK(Corpus::load(folder / "data.bin", 50304).vocabulary() == 50304);
  CHECK(Corpus::load(folder / "data.bin", 2).vocabulary() == 4);
}

TEST_CASE("corpus: every wrong file is one clear line") {
  const Folder folder;
  const auto load = [&](const std::string& content) {
    const std::string text = error_of([&] { Corpus::load(file(folder, content)); });
    CHECK_MESSAGE(contains(text, "data.bin"), text);
    return text;
  };
  CHECK(contains(error_of([&] { Corpus::load(folder / "nowhere.txt"); }), "no such file"));
  CHECK(contains(error_of([&] { Corpus::load(folder.path); }), "is a directory"));
  CHECK(contains(error_of([] { Corpus::load("/dev/zero"); }), "device"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0666) == 0);
  CHECK(
      contains(error_of([&] { Corpus::load(folder / "pipe"); }), "pipe"));  // and does not wait for a writer
  CHECK(contains(load(""), "is empty"));

  const std::vector<uint16_t> tokens = {1, 2, 3};
  CHECK(contains(load(token_file(tokens).substr(0, 4)), "header truncated, the file has 4 bytes"));
  CHECK(contains(load(token_file(tokens).substr(0, 1023)), "header truncated, the file has 1023 bytes"));
  CHECK(contains(load(token_file(tokens, 3, 2)), "version 2, expected 1"));
  CHECK(contains(load(token_file(tokens, 3, 7, 20240801)), "32-bit tokens"));
  CHECK(
      contains(load(token_file(tokens, 4)), "truncated, its header counts 4 tokens (8 bytes), but 6 bytes"));
  CHECK(contains(load(token_file(tokens).substr(0, 1029)), "truncated"));
  CHECK(contains(load(token_file(tokens, INT32_MAX)), "truncated"));  // and allocates nothing for it
  CHECK(contains(load(token_file(tokens, 2)), "2 trailing bytes after the 2 tokens"));
  CHECK(contains(load(token_file(tokens) + "x"), "1 trailing bytes"));
  CHECK(contains(load(token_file({}, 0)), "is empty"));
  CHECK(contains(load(token_file(tokens, -1)), "counts -1 tokens"));

  const std::string secret = file(folder, "text");
  fs::permissions(folder.path, fs::perms::all);
  fs::permissions(secret, fs::perms::none);
  const uid_t me = ::geteuid();
  if (me != 0 || ::seteuid(65534) == 0) {  // root may read everything
    const std::string text = error_of([&] { Corpus::load(secret); });
    if (me == 0) REQUIRE(::seteuid(me) == 0);
    CHECK_MESSAGE(contains(text, "Permission denied"), text);
  }
}

TEST_CASE("corpus: the length of a sample, and the split") {
  const Folder folder;
  const Corpus corpus = Corpus::load(file(folder, token_file(numbers(105))));
  CHECK(error_of([&] { corpus.check_length(104); }) == "(no error)");
  CHECK(contains(error_of([&] { corpus.check_length(105); }),
                 "has 105 tokens, but one sample of sequence length 105 needs 106"));

  // 10 tokens are held out: enough for one sample of sequence length 9, not of 10.
  CHECK(corpus.train(9).size() == 95);
  CHECK(corpus.valid(9).size() == 10);
  CHECK(corpus.train(9).front() == 0);
  CHECK(corpus.valid(9).front() == 95);
  CHECK(corpus.valid(9).back() == 104);
  CHECK(corpus.train(10).size() == 105);
  CHECK(corpus.valid(10).size() == 105);

  const Corpus tiny = Corpus::load(file(folder, "abc"));
  CHECK(tiny.train(1).size() == 3);
  CHECK(tiny.valid(1).size() == 3);
}

TEST_CASE("global batch: a pure function of (seed, step, sample)") {
  const auto tokens = numbers(1000);
  const GlobalBatch batch = global_batch(tokens, 7, 3, 4, 16);
  CHECK(batch.samples == 4);
  CHECK(batch.seq == 16);
  CHECK(batch.valid_tokens == 64);
  REQUIRE(batch.inputs.size() == 64);
  REQUIRE(batch.targets.size() == 64);
  const int32_t golden[] = {647, 65, 716, 893};  // from an independent implementation in Python
  for (int i = 0; i < 4; ++i)
    for (int t = 0; t < 16; ++t) {
      CHECK(batch.inputs[i * 16 + t] == golden[i] + t);
      CHECK(batch.targets[i * 16 + t] == golden[i] + t + 1);
    }

  CHECK(global_batch(tokens, 7, 3, 4, 16).inputs == batch.inputs);
  CHECK(global_batch(tokens, 7, 4, 4, 16).inputs != batch.inputs);
  CHECK(global_batch(tokens, 8, 3, 4, 16).inputs != batch.inputs);
  // A larger batch begins with the smaller one: a sample does not know how many there are.
  const GlobalBatch more = global_batch(tokens, 7, 3, 9, 16);
  CHECK(std::equal(batch.inputs.begin(), batch.inputs.end(), more.inputs.begin()));
}

TEST_CASE("global batch: offsets are uniform over the whole range, ends included") {
  const int seq = 5, positions = 16;
  const auto tokens = numbers(positions + seq);
  std::vector<int> counts(positions);
  for (int step = 0; step < 2000; ++step) {
    const GlobalBatch batch = global_batch(tokens, 1, step, 8, seq);
    for (int i = 0; i < 8; ++i) {
      const int32_t offset = batch.inputs[i * seq];
      REQUIRE(offset >= 0);
      REQUIRE(offset < positions);  // [0, len - seq - 1]
      ++counts[offset];
    }
  }
  double chi_square = 0;
  for (int count : counts) chi_square += (count - 1000.0) * (count - 1000.0) / 1000.0;
  CHECK(chi_square < 45);  // 15 degrees of freedom: exceeded once in 10,000 by fair draws; these are fixed
  CHECK(*std::min_element(counts.begin(), counts.end()) > 0);

  const GlobalBatch only = global_batch(numbers(6), 1, 0, 3, 5);  // one place to start
  for (int i = 0; i < 3; ++i) {
    CHECK(only.inputs[i * 5] == 0);
    CHECK(only.targets[i * 5 + 4] == 5);
  }
  CHECK(contains(error_of([] { global_batch(numbers(5), 1, 0, 3, 5); }), "needs 6"));
  CHECK(contains(error_of([] { global_batch({}, 1, 0, 3, 5); }), "0 tokens"));
  CHECK(contains(error_of([] { global_batch(numbers(9), 1, 0, 0, 5); }), "0 samples"));
  CHECK(contains(error_of([] { global_batch(numbers(9), 1, 0, 1, 0); }), "0 tokens"));
}

TEST_CASE("entropy: small texts by hand") {
  CHECK(near(unigram_entropy(as_tokens("abab")), std::log(2), 1e-12));
  CHECK(near(unigram_entropy(as_tokens("aaab")), 0.75 * std::log(4 / 3.0) + 0.25 * std::log(4), 1e-12));
  CHECK(unigram_entropy(as_tokens("aaaa")) == 0);
  CHECK(unigram_entropy({}) == 0);

  CHECK(bigram_entropy(as_tokens("ababab")) == 0);  // the next one is certain
  CHECK(bigram_entropy(as_tokens("a")) == 0);
  CHECK(bigram_entropy({}) == 0);
  CHECK(near(bigram_entropy(as_tokens("aabba")), std::log(2), 1e-12));  // aa ab bb ba: each once
  // abacab: of a: b, c, b; of b: a; of c: a. Only a's three of five pairs are uncertain.
  const double of_a = 2 / 3.0 * std::log(1.5) + 1 / 3.0 * std::log(3);
  CHECK(near(bigram_entropy(as_tokens("abacab")), 3 / 5.0 * of_a, 1e-12));
  CHECK(near(bigram_entropy(std::vector<uint16_t>{65535, 0, 65535, 1, 65535, 0}), 3 / 5.0 * of_a, 1e-12));

  std::vector<uint16_t> noise(400000);  // independent fair draws from 4: both are log 4
  for (size_t i = 0; i < noise.size(); ++i) noise[i] = random_bits(9, 9, i) & 3;
  CHECK(near(unigram_entropy(noise), std::log(4), 1e-4));
  CHECK(near(bigram_entropy(noise), std::log(4), 1e-4));
}

TEST_CASE("sort_order is a stable argsort") {
  CHECK(sort_order({}).empty());
  CHECK(sort_order(std::vector<int32_t>{3, 1, 3, 0, 1}) == std::vector<int32_t>{3, 1, 4, 0, 2});
  CHECK(sort_order(std::vector<int32_t>{5, 5, 5}) == std::vector<int32_t>{0, 1, 2});
  CHECK(sort_order(std::vector<int32_t>{2147483647, -1, 0}) == std::vector<int32_t>{1, 2, 0});
  std::vector<int32_t> ids(1000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(random_bits(1, 1, i) % 17);
  const auto order = sort_order(ids);
  std::set<int32_t> once(order.begin(), order.end());
  CHECK(once.size() == ids.size());
  bool sorted = true;
  for (size_t k = 1; k < order.size(); ++k)
    sorted &= std::pair(ids[order[k - 1]], order[k - 1]) < std::pair(ids[order[k]], order[k]);
  CHECK(sorted);
}
