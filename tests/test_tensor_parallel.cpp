// Tensor and sequence parallelism: everything that is known to go wrong, done wrong on purpose where that shows that our
// checks see it. The oracle is one rank, or double precision on the host.
#include <doctest/doctest.h>

#ifndef RINGTRON_CUDA
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <mutex>

#include "../kernels/kernels.h"
#include "../src/random.h"
#include "programs.h"
#include "../lessons/06_sp.cpp"

namespace {

Options small(int vocab = 61) {
  Options o;
  o.model.vocab = vocab, o.model.dim = 32, o.model.layers = 2, o.model.heads = 8, o.model.kv_heads = 8;
  o.model.hidden = 40, o.model.seq = 8;
  o.batch = 3, o.steps = 3, o.warmup = 1;
  return o;
}

std::vector<uint16_t> random_tokens(int vocab, int count = 400) {
  std::vector<uint16_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(uint16_t(random_bits(5, 0, uint64_t(i)) % uint64_t(vocab)));
  return tokens;
}

// What a group of ranks did in o.steps steps, seen from rank 0.
struct Training {
  int status = -1;
  Trajectory what;
  double copies = 0;   // elements that differ between ranks: at the start, of gradients, at the end
  double missing = 0;
  std::vector<int64_t> sent;  // bytes by rank
};

template <class Strategy>
Training train(int ranks, Options o) {
  Training all;
  const std::vector<uint16_t> tokens = random_tokens(o.model.vocab);
  o.world.threads = ranks;
  all.status = run_ranks(0, nullptr, "test", o.world, [&](int rank) {
    Device device(rank);
    World world(device);
    Strategy strategy(world.all(), o.model);
    Transformer model(o.model, strategy, device, o.seed);
    AdamW adamw(model, o);
    auto gathered = [&](bool gradients) {
      const auto packed = world.gather(pack(model.params(), gradients));
      Assembled whole = assemble(o.model, packed);
      if (rank == 0) all.copies += whole.copies.value, all.missing += whole.missing.value;
      return whole.tensors;
    };
    Trajectory mine;
    mine.start = gathered(false);
    world.reset_traffic();
    for (int64_t step = 0; step < o.steps; ++step) {
      const GlobalBatch batch = global_batch(tokens, o.seed, step, o.batch, o.model.seq);
      model.start_step();
      const auto parts = micro_batches(device, batch, strategy.view(batch.samples, batch.seq), o.micro_batches);
      for (const MicroBatch& part : parts) {
        model.forward(part);
        model.backward(part);
      }
      strategy.finish_gradients(model);
      mine.losses.push_back(world.sum(model.loss()));
      const double norm = std::sqrt(world.sum(model.squared_gradient_norm()));
      mine.norms.push_back(norm);
      if (step == 0) mine.gradients = gathered(true);
      adamw.step(o.learning_rate(step), AdamW::clip_factor(norm, o.clip));
    }
    int64_t sent = 0;
    for (const Traffic& row : world.traffic()) sent += row.sent;
    const auto sents = world.gather(std::to_string(sent));
    mine.end = gathered(false);
    if (rank == 0) {
      all.what = std::move(mine);
      for (const std::string& text : sents) all.sent.push_back(std::stoll(text));
    }
    return 0;
  });
  return all;
}

Trajectory one_rank(const Options& o) {
  Device device;
  return train_reference(device, o, random_tokens(o.model.vocab));
}

void check_right(const Training& t, const Trajectory& reference) {
  CHECK(t.status == 0);
  CHECK(t.copies == 0);
  CHECK(t.missing == 0);
  for (const Check& check : compare(t.what, reference, Bounds::standard())) {
    INFO(check.what << ": " << check.value << " " << check.detail);
    CHECK(check.ok());
  }
}

bool caught(const Training& t, const Trajectory& reference) {
  bool wrong = t.status != 0 || t.copies > 0 || t.missing > 0;
  for (const Check& check : compare(t.what, reference, Bounds::standard())) wrong = wrong || !check.ok();
  return wrong;
}

double first_loss_off(const Training& t, const Trajectory& reference) {
  return std::abs(t.what.losses.at(0) - reference.losses.at(0)) / reference.losses.at(0);
}

// ||a|| / ||b|| of one gradient
double ratio(const Trajectory& a, const Trajectory& b, const std::string& name) {
  double top = 0, bottom = 0;
  for (float x : a.gradients.at(name)) top += double(x) * x;
  for (float x : b.gradients.at(name)) bottom += double(x) * x;
  return std::sqrt(top / bottom);
}

const char* const kTable = "model.embed_tokens.weight";

// ---- wrong on purpose ----

struct WithoutF : TensorParallel {  // dx stays a partial sum
  using TensorParallel::TensorParallel;
  Tensor enter_backward(Tensor dx) override { return dx; }
};
struct WithoutNormSum : SequenceParallel {
  using SequenceParallel::SequenceParallel;
  void finish_gradients(Transformer&) override {}
};
struct ReplicatedCountedByAll : TensorParallel {
  using TensorParallel::TensorParallel;
  bool counts(const Param&) const override { return true; }
};
struct LossCountedByAll : TensorParallel {
  using TensorParallel::TensorParallel;
  bool counts_loss() const override { return true; }
};
struct SumTwice : TensorParallel {  // the loss becomes loss + log t
  using TensorParallel::TensorParallel;
  void over_vocabulary(FloatTensor rows, Reduce op) override {
    tp.all_reduce(rows, op);
    if (op == Reduce::sum && ++sums % 2) tp.all_reduce(rows, op);
  }
  int sums = 0;
};
struct KeysOfAnotherRank : TensorParallel {
  using TensorParallel::TensorParallel;
  Piece piece(const Param& p) const override {
    Piece mine = TensorParallel::piece(p);
    if (!p.name.ends_with("k_proj.weight")) return mine;
    const int64_t share = mine.end - mine.begin, r = (tp.rank() + 1) % tp.size();
    return {mine.axis, r * share, (r + 1) * share};
  }
};
// Rows of the local tensor instead of the sum of all ranks' rows.
Tensor own_rows(Group& tp, Tensor x) {
  const int64_t rows = x[0] / tp.size();
  return {x.data + tp.rank() * rows * x[1], {rows, x[1]}};
}
struct SplitWhereSumIsDue : SequenceParallel {  // backward of the all-gather, as if its consumer were replicated
  using SequenceParallel::SequenceParallel;
  Tensor enter_backward(Tensor dx) override { return own_rows(tp, dx); }
};
// After the vocabulary-parallel embedding: split in place of reduce-scatter.
struct SplitAfterEmbedding : SequenceParallel {
  using SequenceParallel::SequenceParallel;
  void open(Unit& unit, bool) override { embedding = unit.index == 0; }
  Tensor leave(Tensor y) override { return embedding ? own_rows(tp, y) : SequenceParallel::leave(y); }
  bool embedding = false;
};
// The same with the sum done before, so that forward is right; and backward sums once more over ranks that all have the
// whole gradient already, as an automatic gradient of all-reduce-then-split does.
struct SumThenSplitAfterEmbedding : SplitAfterEmbedding {
  using SplitAfterEmbedding::SplitAfterEmbedding;
  Tensor leave(Tensor y) override {
    if (embedding) tp.all_reduce(y);
    return SplitAfterEmbedding::leave(y);
  }
  Tensor leave_backward(Tensor dy) override {
    Tensor whole = SequenceParallel::leave_backward(dy);
    if (embedding) tp.all_reduce(whole);
    return whole;
  }
};

}  // namespace

TEST_CASE("tensor parallel: shards put together are one rank's weights, bit for bit, and training is the same") {
  const Options o = small();
  const Trajectory reference = one_rank(o);
  for (int t : {1, 2, 4, 8}) {
    CAPTURE(t);
    const Training tp = train<TensorParallel>(t, o), sp = train<SequenceParallel>(t, o);
    CHECK(tp.what.start == reference.start);
    CHECK(sp.what.start == reference.start);
    check_right(tp, reference);
    check_right(sp, reference);
  }
  Options three = small();
  three.model.heads = 6, three.model.kv_heads = 3, three.model.dim = 24, three.model.hidden = 42;
  three.micro_batches = 2;  // of 1 and 2 samples
  three.batch = 3, three.model.seq = 9;
  const Trajectory of_three = one_rank(three);
  check_right(train<TensorParallel>(3, three), of_three);
  check_right(train<SequenceParallel>(3, three), of_three);
}

TEST_CASE("tensor parallel: a vocabulary of 7 on 2, 4 and 8 ranks, and grouped heads") {
  for (bool tied : {false, true}) {
    Options o = small(7);
    o.model.tied = tied;
    const Trajectory reference = one_rank(o);
    for (int t : {2, 4, 8}) {  // of 8 ranks one has no column
      CAPTURE(tied);
      CAPTURE(t);
      check_right(train<TensorParallel>(t, o), reference);
      check_right(train<SequenceParallel>(t, o), reference);
    }
  }
  Options grouped = small();
  grouped.model.kv_heads = 4;
  const Trajectory reference = one_rank(grouped);
  for (int t : {2, 4}) check_right(train<TensorParallel>(t, grouped), reference);
}

TEST_CASE("sequence parallel: the norms' gradients and weights are the oracle's, and equal on all ranks") {
  Options o = small();
  o.steps = 4;
  const Trajectory reference = one_rank(o);
  const Training sp = train<SequenceParallel>(4, o);
  CHECK(sp.copies == 0);  // of gradients after step 1 and weights at the end
  int norms = 0;
  for (const auto& gradient : reference.gradients) {
    const std::string& name = gradient.first;
    const std::vector<float>& wanted = gradient.second;
    if (name.find("norm") == std::string::npos) continue;
    ++norms;
    CAPTURE(name);
    float largest = 0, off = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      largest = std::max(largest, std::abs(wanted[i]));
      off = std::max(off, std::abs(sp.what.gradients.at(name)[i] - wanted[i]));
    }
    CHECK(largest > 0);
    CHECK(off <= 1e-5f * largest);
  }
  CHECK(norms == 2 * o.model.layers + 1);
  // Without the sum over ranks the first loss is right and the copies drift apart.
  const Training wrong = train<WithoutNormSum>(4, o);
  CHECK(first_loss_off(wrong, reference) < 1e-6);
  CHECK(wrong.copies > 0);
  CHECK(caught(wrong, reference));
}

TEST_CASE("sequence parallel sends what tensor parallelism sends, one all-gather more per pair, and the norms") {
  const Options o = small();
  const int64_t t = 4, L = o.model.layers, D = o.model.dim, N = int64_t(o.batch) * o.model.seq, B = sizeof(real);
  const Training tp = train<TensorParallel>(int(t), o), sp = train<SequenceParallel>(int(t), o);
  for (int64_t r = 0; r < t; ++r) {
    const int64_t gathers = o.steps * (2 * L + 1) * B * N * D / t * (t - 1), norms = o.steps * (2 * L + 1) * B * 2 * D / t * (t - 1);
    CHECK(tp.sent.at(size_t(r)) > 0);
    CHECK(sp.sent.at(size_t(r)) - tp.sent.at(size_t(r)) == gathers + norms);
  }
}

TEST_CASE("tensor parallel: what is wrong is seen, also where the loss is right") {
  const Options o = small();
  const Trajectory reference = one_rank(o);
  const int t = 4;
  SUBCASE("no all-reduce in backward (f)") {
    const Training wrong = train<WithoutF>(t, o);
    CHECK(first_loss_off(wrong, reference) < 1e-6);
    CHECK(caught(wrong, reference));
  }
  SUBCASE("split where reduce-scatter is due, in backward") {
    const Training wrong = train<SplitWhereSumIsDue>(t, o);
    CHECK(first_loss_off(wrong, reference) < 1e-6);
    CHECK(caught(wrong, reference));
  }
  SUBCASE("split where reduce-scatter is due, after the vocabulary-parallel embedding") {
    CHECK(caught(train<SplitAfterEmbedding>(t, o), reference));
  }
  SUBCASE("the same, summed before it is split: the embedding's gradient is t times too large, the loss right") {
    const Training wrong = train<SumThenSplitAfterEmbedding>(t, o);
    CHECK(first_loss_off(wrong, reference) < 1e-6);
    CHECK(std::abs(ratio(wrong.what, reference, kTable) - t) < 1e-3);
    CHECK(caught(wrong, reference));
  }
  SUBCASE("replicated gradients counted by every rank") {
    const Training wrong = train<ReplicatedCountedByAll>(t, o);
    CHECK(first_loss_off(wrong, reference) < 1e-6);
    CHECK(wrong.what.norms.at(0) > reference.norms.at(0) * (1 + 1e-6));
    CHECK(caught(wrong, reference));
  }
  SUBCASE("the loss counted by every rank") {
    const Training wrong = train<LossCountedByAll>(t, o);
    CHECK(std::abs(wrong.what.losses.at(0) / reference.losses.at(0) - t) < 1e-5);
    CHECK(caught(wrong, reference));
  }
  SUBCASE("the sum of exponentials reduced twice: loss + log t") {
    const Training wrong = train<SumTwice>(t, o);
    CHECK(std::abs(wrong.what.losses.at(0) - reference.losses.at(0) - std::log(double(t))) < 1e-5);
    CHECK(caught(wrong, reference));
  }
  SUBCASE("keys of another rank's heads") { CHECK(caught(train<KeysOfAnotherRank>(t, o), reference)); }
}

namespace {

struct VocabularyLoss {
  std::vector<double> losses;     // (N)
  std::vector<double> gradients;  // (N, V)
};

VocabularyLoss on_the_host(const std::vector<float>& logits, const std::vector<int>& targets, int V) {
  VocabularyLoss r;
  for (size_t n = 0; n < targets.size(); ++n) {
    const float* row = &logits[n * size_t(V)];
    const double most = *std::max_element(row, row + V);
    double sum = 0;
    for (int v = 0; v < V; ++v) sum += std::exp(double(row[v]) - most);
    r.losses.push_back(targets[n] < 0 ? 0 : std::log(sum) - (row[targets[n]] - most));
    for (int v = 0; v < V; ++v)
      r.gradients.push_back(targets[n] < 0 ? 0 : std::exp(double(row[v]) - most) / sum - (v == targets[n]));
  }
  return r;
}

// The three kernels and the seam, on t ranks.
VocabularyLoss on_ranks(int t, const std::vector<float>& logits, const std::vector<int>& targets, int V,
                        std::vector<int64_t>& sent) {
  const int N = int(targets.size());
  VocabularyLoss all;
  all.gradients.resize(logits.size());
  sent.assign(size_t(t), -1);
  std::mutex lock;
  WorldOptions options;
  options.threads = t;
  const int status = run_ranks(0, nullptr, "test", options, [&](int rank) {
    Device device(rank);
    World world(device);
    TensorParallel tp(world.all(), small().model);
    const int first = V * rank / t, mine = V * (rank + 1) / t - first;
    std::vector<real> part;
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < mine; ++v) part.push_back(real(logits[size_t(n * V + first + v)]));
    Buffer x = device.allocate<real>(Memory::activations, {N, mine});
    device.upload(x.data, part.data(), int64_t(part.size()));
    IntBuffer wanted = device.allocate<int>(Memory::data, {N});
    device.upload(wanted.data, targets.data(), N);
    auto rows = [&] { return device.allocate<float>(Memory::workspace, {N}); };
    FloatBuffer most = rows(), sum = rows(), target = rows(), loss = rows();
    world.reset_traffic();
    cross_entropy_max(most.data, x.data, N, mine, device.stream());
    tp.over_vocabulary(most, Reduce::max);
    cross_entropy_sum(sum.data, target.data, x.data, most.data, wanted.data, N, mine, first, device.stream());
    tp.over_vocabulary(sum, Reduce::sum);
    tp.over_vocabulary(target, Reduce::sum);
    cross_entropy_loss(loss.data, x.data, most.data, sum.data, target.data, wanted.data, N, mine, first, 1, device.stream());
    const std::vector<float> losses = loss.to_host();
    const std::vector<real> gradient = x.to_host();
    std::lock_guard guard(lock);
    sent[size_t(rank)] = 0;
    for (const Traffic& row : world.traffic()) sent[size_t(rank)] += row.sent;
    if (rank == 0) all.losses.assign(losses.begin(), losses.end());
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < mine; ++v) all.gradients[size_t(n * V + first + v)] = float(gradient[size_t(n * mine + v)]);
    return 0;
  });
  if (status != 0) all.losses.clear();
  return all;
}

}  // namespace

TEST_CASE("tensor parallel: the loss over a split vocabulary, at logits of every size") {
  const int V = 7, N = 10;
  std::vector<int> targets;
  for (int n = 0; n < N; ++n) targets.push_back(n == 4 ? -1 : n % V);
  struct Kind {
    const char* what;
    float factor, shift;
  };
  for (const Kind& kind : {Kind{"ordinary", 1, 0}, {"times 1000", 1000, 0}, {"all near -20000", 1, -2e4f}, {"equal", 0, 0}}) {
    std::vector<float> logits;
    for (int i = 0; i < N * V; ++i) logits.push_back(kind.factor * random_normal(3, 0, uint64_t(i)) + kind.shift);
    if (kind.factor == 1000)  // a confident wrong answer costs 1000, not infinity
      for (int v = 0; v < V; ++v) logits[size_t(v)] = v == 3 ? 1000.f : 0.f;
    const VocabularyLoss wanted = on_the_host(logits, targets, V);
    if (kind.factor == 1000) CHECK(std::abs(wanted.losses[0] - 1000) < 1e-9);
    for (int t : {1, 2, 4, 8}) {
      CAPTURE(kind.what);
      CAPTURE(t);
      std::vector<int64_t> sent;
      const VocabularyLoss got = on_ranks(t, logits, targets, V, sent);
      REQUIRE(got.losses.size() == wanted.losses.size());
      double loss_off = 0, gradient_off = 0;
      for (size_t n = 0; n < wanted.losses.size(); ++n) {
        const double off = std::abs(got.losses[n] - wanted.losses[n]) / std::max(1.0, std::abs(wanted.losses[n]));
        if (!(off <= loss_off)) loss_off = off;  // NaN stays
      }
      for (size_t i = 0; i < wanted.gradients.size(); ++i) {
        const double off = std::abs(got.gradients[i] - wanted.gradients[i]);
        if (!(off <= gradient_off)) gradient_off = off;
      }
      CHECK(loss_off < 1e-5);
      CHECK(gradient_off < 1e-5);
      for (int r = 0; r < t; ++r) CHECK(sent[size_t(r)] == 3 * 4 * all_reduce_sent(N, t, r));  // 6 b s (t-1)/t, never N V
    }
  }
}

TEST_CASE("tensor parallel: what does not divide is one line with the numbers, before any work") {
  struct Wrong {
    const char *options, *number;
  };
  for (const std::string lesson : {"05_tp", "06_sp"})
    for (const Wrong& wrong : {Wrong{"--threads 3 --dim 48 --heads 8 --kv-heads 4 --hidden 48", "--heads 8"},
                               {"--threads 4 --dim 48 --heads 8 --kv-heads 2 --hidden 48", "--kv-heads 2"},
                               {"--threads 2 --dim 48 --heads 8 --kv-heads 4 --hidden 49", "--hidden 49"}}) {
      const Ended ended = run(built(lesson) + " --steps 1 " + wrong.options);
      CAPTURE(ended.text);
      CHECK(ended.status != 0);
      CHECK(ended.says(wrong.number));
      CHECK(std::count(ended.text.begin(), ended.text.end(), '\n') == 1);
    }
  const Ended ended =
      run(built("06_sp --threads 2 --dim 16 --heads 2 --kv-heads 2 --hidden 8 --seq 5 --batch 3 --steps 1"));
  CAPTURE(ended.text);
  CHECK(ended.status != 0);
  CHECK(ended.says("cuts the 15 tokens of a micro-batch between 2 ranks"));
  CHECK_FALSE(ended.says("step "));
}

TEST_CASE("tensor parallel: activations by our formula and by Megatron's") {
  ModelConfig c;
  c.dim = 32, c.layers = 2, c.heads = 8, c.kv_heads = 4, c.hidden = 48, c.seq = 16, c.vocab = 61;
  const int64_t N = 64, B = 4;
  // By hand: D 32, A 32, K 16, F 48, H T 128; 4 N (128 + 64 + 32 + 144 + 128) + 8 N.
  CHECK(block_activation_bytes(c, N, B) == 4 * 64 * 496 + 8 * 64);
  CHECK(block_activation_bytes(c, N, B, {4, false, 0}) == 4 * 64 * (128 + 368 / 4) + 8 * 64);
  CHECK(block_activation_bytes(c, N, B, {4, true, 0}) * 4 == block_activation_bytes(c, N, B));
  CHECK(peak_activation_bytes(c, N, B, {4, true, 16}) == 2 * block_activation_bytes(c, N, B) / 4 + 4 * 16 * 96 + 4 * 16 + 4 * 64 * 16);
  CHECK(all_reduce_sent(10, 3, 0) == 14);
  CHECK(all_reduce_sent(10, 3, 1) == 13);
  CHECK(all_reduce_sent(10, 3, 2) == 13);
  CHECK(all_reduce_sent(10, 1, 0) == 0);
  // A layer of GPT-3, one sample: 2.869 GB; 0.579 on 8 ranks; 0.359 with sequence parallelism; 0.107 with attention's
  // core recomputed; 0.050 if only the input is kept.
  const double s = 2048, b = 1, h = 12288, a = 96;
  auto gb = [&](double t, bool sp, Recomputed kind) { return megatron_layer_bytes(s, b, h, a, t, sp, kind) / 1e9; };
  CHECK(std::abs(gb(1, false, Recomputed::nothing) - 2.869) < 5e-4);
  CHECK(std::abs(gb(8, false, Recomputed::nothing) - 0.579) < 5e-4);
  CHECK(std::abs(gb(8, true, Recomputed::nothing) - 0.359) < 5e-4);
  CHECK(std::abs(gb(8, true, Recomputed::attention) - 0.107) < 5e-4);
  CHECK(std::abs(gb(8, true, Recomputed::layer) - 0.050) < 5e-4);
}
#endif
