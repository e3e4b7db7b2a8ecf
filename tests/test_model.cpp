// The model as a whole, against what PyTorch says (tests/reference), and against itself.
#include <doctest/doctest.h>

#include <cmath>
#include <type_traits>

#include "../src/formulas.h"
#include "../src/random.h"
#include "../src/safetensors.h"
#include "../src/verify.h"

namespace {

constexpr bool kFloat = std::is_same_v<real, float>;

double worst(const std::vector<double>& mine, const std::vector<double>& wanted) {
  if (mine.size() != wanted.size()) return INFINITY;
  double off = 0, largest = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double d = std::abs(mine[i] - wanted[i]);
    off = std::isnan(d) ? INFINITY : std::max(off, d);
    largest = std::max(largest, std::abs(wanted[i]));
  }
  return off == 0 ? 0 : off / largest;
}

std::vector<double> widen(const std::vector<float>& values) { return {values.begin(), values.end()}; }

struct Reference {
  Safetensors file;
  Options options;

  explicit Reference(const std::string& path) : file(load_safetensors(path)) {
    const auto& m = file.metadata;
    options.model = from_hugging_face([&] {
      auto fields = m;
      fields["max_position_embeddings"] = std::to_string(file.tensors.at("tokens").shape[2]);
      return fields;
    }(), path);
    options.lr = std::stof(m.at("lr"));
    options.beta1 = 0.9f, options.beta2 = 0.95f;
    options.eps = std::stof(m.at("eps"));
    options.weight_decay = std::stof(m.at("weight_decay"));
    options.clip = std::stof(m.at("clip"));
    options.batch = int(file.tensors.at("tokens").shape[1]);
  }

  GlobalBatch batch(int step) const {
    const int B = options.batch, T = options.model.seq;
    const auto tokens = file.tensors.at("tokens").to_ints(), targets = file.tensors.at("targets").to_ints();
    GlobalBatch b{B, T, {}, {}, 0};
    b.inputs.assign(tokens.begin() + int64_t(step) * B * T, tokens.begin() + int64_t(step + 1) * B * T);
    b.targets.assign(targets.begin() + int64_t(step) * B * T, targets.begin() + int64_t(step + 1) * B * T);
    for (int target : b.targets) b.valid_tokens += target >= 0;
    return b;
  }
  std::vector<double> doubles(const std::string& name) const { return file.tensors.at(name).to_doubles(); }
};

struct Run {
  Device device;
  Parallel parallel;
  Transformer model;
  AdamW adamw;
  Run(const Options& o, uint64_t seed = 1) : model(o.model, parallel, device, seed), adamw(model, o) {}

  std::pair<double, double> gradients(const GlobalBatch& batch, int parts) {
    const auto micro = micro_batches(device, batch, parallel.view(batch.samples, batch.seq), parts);
    model.start_step();
    for (const MicroBatch& part : micro) model.forward(part), model.backward(part);
    const double loss = model.loss();
    return {loss, std::sqrt(model.squared_gradient_norm())};
  }
};

Options small_options() {
  Options o;
  o.model = {};
  o.model.vocab = 50, o.model.dim = 24, o.model.layers = 3, o.model.heads = 6, o.model.kv_heads = 2;
  o.model.hidden = 40, o.model.seq = 19;
  o.batch = 8;
  return o;
}

GlobalBatch random_batch(const Options& o, uint64_t step, int ignored = 0) {
  GlobalBatch b{o.batch, o.model.seq, {}, {}, 0};
  const int n = o.batch * o.model.seq;
  for (int i = 0; i < n; ++i) {
    b.inputs.push_back(int(random_bits(3, step, i) % o.model.vocab));
    b.targets.push_back(i < ignored ? -1 : int(random_bits(4, step, i) % o.model.vocab));
  }
  b.valid_tokens = n - ignored;
  return b;
}

}  // namespace

TEST_CASE("the model agrees with PyTorch: logits, loss, every gradient, norm, parameters after three steps") {
  for (const std::string name : {"untied", "tied"}) {
    CAPTURE(name);
    const std::string path = std::string("tests/reference/llama_") + name + ".safetensors";
    Reference reference(path);
    Run run(reference.options);
    Params& params = run.model.params();
    int found = 0;
    for (Unit& unit : params.units())
      for (Param& p : unit.params) {
        params.set_weight(p, reference.file.tensors.at("start." + p.name).to_floats());
        ++found;
      }
    CHECK(found == (reference.options.model.tied ? 20 : 30));
    run.adamw.refresh_masters();

    // bf16 has 8 bits of mantissa: a part in 256 for each rounding, and they add up over three layers.
    const double logit_bound = kFloat ? 1e-5 : 2e-2, loss_bound = kFloat ? 1e-6 : 5e-3;
    const double gradient_bound = kFloat ? 1e-5 : 6e-2, norm_bound = kFloat ? 1e-6 : 2e-2;
    const double end_bound = kFloat ? 1e-3 : 3e-1;

    {
      const GlobalBatch first = reference.batch(0);
      const auto parts = micro_batches(run.device, first, run.parallel.view(first.samples, first.seq), 1);
      const auto logits = run.model.logits(parts[0]).to_host();
      CHECK(worst({logits.begin(), logits.end()}, reference.doubles("logits")) < logit_bound);
    }
    const auto losses = reference.doubles("loss"), norms = reference.doubles("norm");
    for (int step = 0; step < 3; ++step) {
      CAPTURE(step);
      const auto [loss, norm] = run.gradients(reference.batch(step), 1);
      CHECK(std::abs(loss - losses[step]) / losses[step] < loss_bound);
      CHECK(std::abs(norm - norms[step]) / norms[step] < norm_bound);
      if (step == 0)
        for (Unit& unit : params.units())
          for (Param& p : unit.params) {
            CAPTURE(p.name);
            CHECK(worst(widen(params.gradient_to_host(p)), reference.doubles("grad." + p.name)) < gradient_bound);
          }
      run.adamw.step(reference.options.lr, AdamW::clip_factor(norm, reference.options.clip));
    }
    for (Unit& unit : params.units())
      for (Param& p : unit.params) {
        CAPTURE(p.name);
        std::vector<float> end = params.weight_to_host(p);
        if (!kFloat)  // the update is in the fp32 master copy; the bf16 weight rounds it away
          for (AdamW::State& s : run.adamw.states())
            if (s.unit == p.unit) run.device.download(end.data(), s.master.data + p.offset, p.local_size());
        const auto wanted = reference.doubles("end." + p.name), start = reference.doubles("start." + p.name);
        double off = 0, moved = 0;
        for (size_t i = 0; i < wanted.size(); ++i) {
          // In bf16 the master starts from the rounded weight: compare the movement.
          const double from = kFloat ? start[i] : double(float(real(float(start[i]))));
          off += std::pow(double(end[i]) - from - (wanted[i] - start[i]), 2);
          moved += std::pow(wanted[i] - start[i], 2);
        }
        CHECK(std::sqrt(off / moved) < end_bound);
      }
  }
}

TEST_CASE("two runs give the same bits") {
  const Options o = small_options();
  std::vector<std::map<std::string, std::vector<float>>> ends;
  for (int run_number = 0; run_number < 2; ++run_number) {
    Run run(o);
    for (int step = 0; step < 3; ++step) {
      const auto [loss, norm] = run.gradients(random_batch(o, step), 2);
      run.adamw.step(1e-2f, AdamW::clip_factor(norm, 1));
      CHECK(std::isfinite(loss));
    }
    ends.push_back(all_weights(run.model.params()));
  }
  CHECK(ends[0] == ends[1]);
}

TEST_CASE("micro-batches 1, 2, 4, 8 and 3 (ragged) give equal gradients, loss and norm, also with ignored targets") {
  const Options o = small_options();
  for (int ignored : {0, 60}) {  // 60 of 152: the first micro-batches of 8 have none that counts
    Run whole(o);
    const GlobalBatch batch = random_batch(o, 0, ignored);
    const auto [loss, norm] = whole.gradients(batch, 1);
    const auto wanted = all_gradients(whole.model.params());
    for (int parts : {2, 4, 8, 3}) {
      CAPTURE(parts);
      Run run(o);
      const auto [my_loss, my_norm] = run.gradients(batch, parts);
      CHECK(std::abs(my_loss - loss) / loss < (kFloat ? 1e-6 : 1e-2));
      CHECK(std::abs(my_norm - norm) / norm < (kFloat ? 1e-6 : 1e-2));
      for (const auto& gradient : all_gradients(run.model.params())) {  // name, values
        CAPTURE(gradient.first);
        CHECK(worst(widen(gradient.second), widen(wanted.at(gradient.first))) < (kFloat ? 1e-5 : 3e-2));
      }
    }
  }
}

TEST_CASE("the mean loss is over tokens, not over micro-batches") {
  // One sample with 1 valid token, one with 7: the mean of their losses is weighted 1 to 7.
  Options o = small_options();
  o.batch = 2, o.model.seq = 7;
  GlobalBatch batch = random_batch(o, 0);
  for (int t = 1; t < 7; ++t) batch.targets[t] = -1;
  batch.valid_tokens = 8;
  auto loss_of = [&](const GlobalBatch& b, int parts) { return Run(o).gradients(b, parts).first; };
  GlobalBatch first = batch, second = batch;
  for (int t = 0; t < 7; ++t) first.targets[7 + t] = -1, second.targets[t] = -1;
  first.valid_tokens = 1, second.valid_tokens = 7;
  const double a = loss_of(first, 1), b = loss_of(second, 1), both = loss_of(batch, 2);
  CHECK(std::abs(both - (a + 7 * b) / 8) / both < (kFloat ? 1e-6 : 1e-2));
  CHECK(std::abs(both - (a + b) / 2) / both > 1e-4);
}

TEST_CASE("ranges of units, several micro-batches in flight, and split backward give the same bits") {
  for (bool tied : {false, true}) {
    CAPTURE(tied);
    Options o = small_options();
    o.model.tied = tied;
    const GlobalBatch batch = random_batch(o, 1);
    Run whole(o);
    const double loss = whole.gradients(batch, 2).first;
    const auto wanted = all_gradients(whole.model.params());

    // Two stages by hand; both micro-batches forward first, then input halves, and the weight halves at the end.
    Run run(o);
    Transformer& m = run.model;
    const auto parts = micro_batches(run.device, batch, run.parallel.view(batch.samples, batch.seq), 2);
    const int cut = 2, end = o.model.units();
    m.start_step();
    for (const MicroBatch& part : parts) m.forward(cut, end, part, m.forward(0, cut, part, {}));
    for (const MicroBatch& part : parts)
      m.backward(0, cut, part, m.backward(cut, end, part, {}, Half::input), Half::input);
    for (const MicroBatch& part : parts) m.backward_weights(cut, end, part), m.backward_weights(0, cut, part);
    CHECK(m.loss() == loss);
    for (const auto& gradient : all_gradients(m.params())) {  // name, values
      CAPTURE(gradient.first);
      CHECK(worst(widen(gradient.second), widen(wanted.at(gradient.first))) == 0);
    }
    CHECK(run.device.current(Memory::activations) == 0);
    CHECK(run.device.current(Memory::workspace) == 0);
  }
}

namespace {
struct KeepNothing : Parallel {
  bool keep(int) const override { return false; }
};
// Records the seams in the order in which they are called.
struct Recorder : Parallel {
  std::vector<std::string> calls;
  void open(Unit& u, bool backward) override { calls.push_back(format("open %d %d", u.index, backward)); }
  void close(Unit& u, bool backward, bool last) override {
    calls.push_back(format("close %d %d %d", u.index, backward, last));
  }
  Tensor enter(Tensor x) override { return calls.push_back("enter"), x; }
  Tensor enter_backward(Tensor x) override { return calls.push_back("enter_backward"), x; }
  Tensor leave(Tensor x) override { return calls.push_back("leave"), x; }
  Tensor leave_backward(Tensor x) override { return calls.push_back("leave_backward"), x; }
  void over_vocabulary(FloatTensor, Reduce r) override { calls.push_back(r == Reduce::max ? "max" : "sum"); }
};
}  // namespace

TEST_CASE("recomputed activations give the same bits, and hold only block inputs") {
  const Options o = small_options();
  const GlobalBatch batch = random_batch(o, 1);
  Run kept(o);
  kept.gradients(batch, 1);
  Device device;
  KeepNothing nothing;
  Transformer model(o.model, nothing, device, 1);
  const auto parts = micro_batches(device, batch, nothing.view(batch.samples, batch.seq), 1);
  model.start_step();
  model.forward(parts[0]), model.backward(parts[0]);
  CHECK(all_gradients(model.params()) == all_gradients(kept.model.params()));
  CHECK(device.peak(Memory::activations) < kept.device.peak(Memory::activations));
}

TEST_CASE("every seam is called where it should be") {
  Options o = small_options();
  o.model.layers = 1;
  Recorder seams;
  Device device;
  Transformer model(o.model, seams, device, 1);
  const GlobalBatch batch = random_batch(o, 1);
  const auto parts = micro_batches(device, batch, seams.view(batch.samples, batch.seq), 1);
  model.start_step();
  model.forward(parts[0]), model.backward(parts[0]);
  const std::vector<std::string> wanted = {
      "open 0 0", "leave", "close 0 0 1",                                                      // the embedding
      "open 1 0", "enter", "leave", "enter", "leave", "close 1 0 1",                           // attention, MLP
      "open 2 0", "enter", "max", "sum", "sum", "close 2 0 1",                                 // the head
      "open 2 1", "enter", "enter_backward", "close 2 1 1",                                    //
      "open 1 1", "leave_backward", "enter", "enter_backward", "leave_backward", "enter", "enter_backward",
      "close 1 1 1", "open 0 1", "leave_backward", "close 0 1 1"};
  CHECK(seams.calls == wanted);
}

TEST_CASE("peak bytes are those of the formulas") {
  for (int parts : {1, 2, 3}) {
    CAPTURE(parts);
    const Options o = small_options();
    Run run(o);
    run.device.reset_peaks();
    run.gradients(random_batch(o, 0), parts);
    const int most = (o.batch + parts - 1) / parts, N = most * o.model.seq;
    const int64_t Psi = o.model.parameters(), B = sizeof(real);
    CHECK(run.device.peak(Memory::parameters) == B * Psi);
    CHECK(run.device.peak(Memory::gradients) == B * Psi);
    CHECK(run.device.peak(Memory::optimizer) == (kFloat ? 8 : 12) * Psi);
    CHECK(run.device.peak(Memory::activations) == peak_activation_bytes(o.model, N, B));
    CHECK(run.device.peak(Memory::workspace) ==
          peak_workspace_bytes(o.model, most, o.model.seq, int64_t(o.batch) * o.model.seq, B));
    CHECK(run.device.current(Memory::activations) == 0);
  }
}

TEST_CASE("parameters and FLOPs: known models, and what the products really did") {
  ModelConfig llama{32000, 4096, 32, 32, 32, 11008, 4096, false, 1e-5f, 10000};
  CHECK(llama.parameters() == 6738415616);                      // Llama-2-7B
  CHECK(std::abs(llama.flops_per_token() - 42.87e9) < 0.01e9);  // causal
  ModelConfig llama3{128256, 4096, 32, 32, 8, 14336, 8192, false, 1e-5f, 500000};
  CHECK(llama3.parameters() == 8030261248);                     // Llama-3-8B

  Options o = small_options();
  o.model.seq = 128;  // whole blocks of 64 rows
  Run run(o);
  run.device.matmul_flops = 0;
  run.gradients(random_batch(o, 0), 1);
  const double tokens = double(o.batch) * o.model.seq;
  const double weights = 6 * double(o.model.parameters() - o.model.vocab * o.model.dim -
                                    (2 * o.model.layers + 1) * o.model.dim);  // norms multiply no matrix
  const double attention = 12.0 * o.model.layers * o.model.dim;                // per visible key
#ifdef RINGTRON_CUDA
  const double keys = o.model.seq;  // one product over everything, masked part included
#else
  const double keys = 0.5 * (64 + 128);  // blocks of 64 rows skip the keys that none of them sees
#endif
  CHECK(run.device.matmul_flops == tokens * (weights + attention * keys));
}

TEST_CASE("initial values are a pure function of seed, name and index") {
  const ModelConfig c = small_options().model;
  Device device;
  Parallel one;
  Params a(c, one, device, 7), b(c, one, device, 7), other(c, one, device, 8);
  CHECK(all_weights(a) == all_weights(b));
  CHECK(all_weights(a) != all_weights(other));
  const auto weights = all_weights(a);
  CHECK(weights.at("model.layers.0.mlp.up_proj.weight") != weights.at("model.layers.1.mlp.up_proj.weight"));
  CHECK(weights.at("model.norm.weight") == std::vector<float>(c.dim, 1.f));
  double sum = 0, squares = 0;
  const auto& up = weights.at("model.layers.0.mlp.up_proj.weight");
  for (float w : up) sum += w, squares += double(w) * w;
  CHECK(std::abs(std::sqrt(squares / double(up.size())) - 0.02) < 0.002);
  CHECK(std::abs(sum / double(up.size())) < 0.003);
}

TEST_CASE("the learning rate is a pure function of the step") {
  Options o;
  o.lr = 1, o.warmup = 10, o.steps = 110;
  CHECK(o.learning_rate(0) == 0.1f);
  CHECK(o.learning_rate(4) == 0.5f);
  CHECK(o.learning_rate(9) == 1.0f);
  CHECK(o.learning_rate(10) == 1.0f);
  CHECK(std::abs(o.learning_rate(60) - 0.55f) < 1e-6f);
  CHECK(std::abs(o.learning_rate(110) - 0.1f) < 1e-6f);
  CHECK(std::abs(o.learning_rate(1000) - 0.1f) < 1e-6f);
  o.warmup = 0;
  CHECK(o.learning_rate(0) == 1.0f);
}

TEST_CASE("a comparison that must fail, fails") {
  Trajectory reference;
  reference.losses = {2, 1}, reference.norms = {1, 1};
  reference.gradients["w"] = {1, -2}, reference.start["w"] = {0, 0}, reference.end["w"] = {1, 1};
  auto failures = [&](const Trajectory& t) {
    int count = 0;
    for (const Check& check : compare(t, reference, {1e-6, 1e-6, 1e-5, 1e-3})) count += !check.ok();
    return count;
  };
  CHECK(failures(reference) == 0);
  Trajectory wrong = reference;
  wrong.losses[1] = NAN;
  CHECK(failures(wrong) == 1);
  wrong = reference, wrong.norms.pop_back();
  CHECK(failures(wrong) == 1);
  wrong = reference, wrong.gradients["w"][1] *= 1.001f;
  CHECK(failures(wrong) == 1);
  wrong = reference, wrong.gradients.clear();
  CHECK(failures(wrong) == 1);
  wrong = reference, wrong.end["w"][0] = 1.01f;
  CHECK(failures(wrong) == 1);
  wrong = reference, wrong.end.erase("w");
  CHECK(failures(wrong) == 1);
}
