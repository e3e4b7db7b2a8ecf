// ZeRO: the strategies of lessons 13 to 16, in this process, where a test can look inside; and their printed tables.
#include <doctest/doctest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <mutex>

#include "../lessons/13_zero1.cpp"
#include "../lessons/15_zero3.cpp"
#include "../lessons/16_offload.cpp"
#include "../src/random.h"
#include "programs.h"

#ifndef RINGTRON_CUDA
#include "../src/sim/sim.h"

namespace {

// Ragged: no unit is a multiple of 3, 4 or 8.
//                           vocab dim layers heads kv hidden seq
const ModelConfig kRagged{19, 14, 3, 7, 7, 9, 8};

using Make = std::function<std::unique_ptr<Parallel>(Group&)>;
struct Named {
  const char* name;
  Make make;
};
const Named kStrategies[] = {
    {"zero1", [](Group& g) { return std::make_unique<Zero1>(g); }},
    {"zero2", [](Group& g) { return std::make_unique<Zero2>(g, g, true, true); }},
    {"zero3", [](Group& g) { return std::make_unique<Zero3>(g, g, nullptr, true, true, false); }},
    {"offload", [](Group& g) { return std::make_unique<Offload>(g, true); }},
};

// Runs body on d threads; false if a rank failed or said false. Checks belong to the caller's thread.
bool on_ranks(int d, const std::function<bool(World&, Device&)>& body) {
  WorldOptions options;
  options.threads = d;
  return run_ranks(0, nullptr, "test_zero", options, [&](int rank) {
    Device device(rank);
    World world(device);
    return body(world, device) ? 0 : 1;
  }) == 0;
}

struct Trained {
  std::vector<double> losses, norms;
  Tensors gradients, weights;  // of the first step; at the end
  bool complete = false;       // every element is on some rank, and copies are equal
};

GlobalBatch random_batch(const ModelConfig& c, int samples, uint64_t step) {
  GlobalBatch batch{samples, c.seq, {}, {}, int64_t(samples) * c.seq};
  for (int64_t i = 0; i < batch.valid_tokens; ++i) {
    batch.inputs.push_back(int(random_bits(1, step, i) % c.vocab));
    batch.targets.push_back(int(random_bits(2, step, i) % c.vocab));
  }
  return batch;
}

// Three clipped steps on random tokens, through the seams alone.
Trained train(int d, const ModelConfig& c, int samples, int parts, const Make& make) {
  Trained out;
  Options o;
  o.model = c;
  out.complete = on_ranks(d, [&](World& world, Device& device) {
    std::unique_ptr<Parallel> parallel = make(world.all());
    Transformer model(c, *parallel, device, 1);
    if (auto* zero3 = dynamic_cast<Zero3*>(parallel.get())) zero3->params = &model.params();
    AdamW adamw(model, o);
    bool complete = true;
    auto gather = [&](bool gradients, Tensors& into) {
      const auto packed = world.gather(pack(model.params(), gradients));
      if (world.rank() != 0) return;
      Assembled all = assemble(c, packed);
      complete = complete && all.copies.value == 0 && all.missing.value == 0;
      into = std::move(all.tensors);
    };
    for (int step = 0; step < 3; ++step) {
      const GlobalBatch batch = random_batch(c, samples, step);
      model.start_step();
      for (const MicroBatch& part : micro_batches(device, batch, parallel->view(samples, c.seq), parts))
        model.forward(part), model.backward(part);
      parallel->finish_gradients(model);
      const double loss = world.sum(model.loss()), norm = std::sqrt(world.sum(model.squared_gradient_norm()));
      if (world.rank() == 0) out.losses.push_back(loss), out.norms.push_back(norm);
      if (step == 0) gather(true, out.gradients);
      parallel->update(adamw, 1e-2f, AdamW::clip_factor(norm, 0.5f));
    }
    gather(false, out.weights);
    return complete;
  });
  return out;
}

const Make one_gpu = [](Group&) { return std::make_unique<Parallel>(); };

double worst(const Tensors& mine, const Tensors& wanted) {  // relative to each tensor's largest value
  double most = wanted.empty() || mine.size() != wanted.size() ? INFINITY : 0;
  for (const auto& [name, values] : wanted) {
    double largest = 0, off = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      const double difference = std::abs(double(mine.at(name)[i]) - values[i]);
      off = std::isnan(difference) ? INFINITY : std::max(off, difference);
      largest = std::max(largest, double(std::abs(values[i])));
    }
    if (off > 0) most = std::max(most, off / largest);
  }
  return most;
}

constexpr double kNear = std::is_same_v<real, float> ? 2e-4 : 0.1;  // of weights after Adam; gradients are tighter

void check_equal(const Trained& mine, const Trained& one) {
  CHECK(mine.complete);
  REQUIRE(mine.losses.size() == 3);
  for (int i = 0; i < 3; ++i) {
    CHECK(std::abs(mine.losses[i] / one.losses[i] - 1) < (kNear < 0.01 ? 1e-6 : 2e-3));
    CHECK(std::abs(mine.norms[i] / one.norms[i] - 1) < (kNear < 0.01 ? 2e-6 : 3e-2));
  }
  CHECK(worst(mine.gradients, one.gradients) < kNear / 10);
  CHECK(worst(mine.weights, one.weights) < kNear);
}

// The numbers that follow `label` on its line of a printed table.
std::vector<double> numbers(const std::string& text, const std::string& label) {
  std::vector<double> all;
  const size_t line = text.find("\n  " + label);
  if (line == std::string::npos) return all;
  const char* at = text.c_str() + line + 3 + label.size();
  for (char* end;; at = end) {
    while (*at == ' ' || *at == 'x') ++at;
    const double value = *at == '\n' ? 0 : std::strtod(at, &end);
    if (*at == '\n' || end == at) return all;
    all.push_back(value);
  }
}

}  // namespace

TEST_CASE("zero: golden bytes, and multiples of Psi (d-1)/d that are sent") {
  const double golden[] = {120, 31.4, 16.6, 1.9};
  for (int stage = 0; stage <= 3; ++stage) {
    CHECK(std::abs(7.5 * zero_state(stage, 64).device() - golden[stage]) < 0.05);
    CHECK(zero_state(stage, 64).device() == zero_bytes_per_parameter(stage, 64));
    CHECK(zero_state(stage, 1, kTrainingStates[0]).device() == 16);
  }
  CHECK(std::abs(16 / zero_state(1, 8).device() - 2.91) < 0.005);
  CHECK(std::abs(16 / zero_state(2, 8).device() - 4.27) < 0.005);
  CHECK(16 / zero_state(3, 8).device() == 8);
  CHECK(zero_state(1, 4, kTrainingStates[0]).device() == 8 + 8 / 4.);
  CHECK(zero_state(2, 4, kTrainingStates[0]).device() == 4 + 12 / 4.);
  CHECK(zero_state(2, 4, kTrainingStates[1], true).device() == 2);
  CHECK(zero_state(2, 4, kTrainingStates[1], true).host == 4);
  CHECK(zero_sent(0) == 2);
  CHECK(zero_sent(1) == 2);
  CHECK(zero_sent(2) == 2);
  CHECK(zero_sent(3) == 3);
  CHECK(zero_sent(1, 4) == 2);
  CHECK(zero_sent(2, 4) == 5);
  CHECK(zero_sent(2, 4, false) == 2);
  CHECK(zero_sent(3, 4) == 12);
  CHECK(zero_sent(3, 1, true, true) == 2);
}

TEST_CASE("zero: make memory prints the table of a model that is only calculated") {
  const std::string text = run(built("memory --params 7.5e9 --dp 64")).text,
                    eight = run(built("memory --params 7.5e9 --dp 8")).text;
  INFO(text);
  using Row = std::vector<double>;  // parameters, gradients, optimizer, all, saves, host, multiple
  auto first = [](Row row, size_t n) { row.resize(std::min(n, row.size())); return row; };
  CHECK(first(numbers(text, "DDP"), 7) == Row{15, 15, 90, 120, 1, 0, 2});
  CHECK(first(numbers(text, "ZeRO-1"), 4) == Row{15, 15, 1.4, 31.4});
  CHECK(first(numbers(text, "ZeRO-2"), 4) == Row{15, 0.2, 1.4, 16.6});
  CHECK(first(numbers(text, "ZeRO-3"), 7) == Row{0.2, 0.2, 1.4, 1.9, 64, 0, 3});
  CHECK(first(numbers(eight, "ZeRO-1"), 5).back() == 2.91);
  CHECK(first(numbers(eight, "ZeRO-2"), 5).back() == 4.27);
  CHECK(run(built("memory --dp 0")).says("memory: --dp is 0"));
  CHECK(run(built("15_zero3 --threads 4 --shard 3")).says("--shard 3 x --replicate 1 is not 4"));
}

TEST_CASE("zero: equals one rank, also ragged, tied and with micro-batches") {
  for (bool tied : {false, true}) {
    ModelConfig c = kRagged;
    c.tied = tied;
    const Trained one = train(1, c, 13, 1, one_gpu);
    for (const Named& s : kStrategies)
      for (const auto& ranks_and_parts : {std::pair{1, 1}, {2, 4}, {3, 4}, {3, 1}}) {
        const int d = ranks_and_parts.first, parts = ranks_and_parts.second;
        CAPTURE(std::string(s.name)); CAPTURE(tied); CAPTURE(d); CAPTURE(parts);
        check_equal(train(d, c, 13, parts, s.make), one);
      }
  }
}

TEST_CASE("zero: the owner of an element is one rank, the same for reduction, optimizer and proof") {
  for (const Named& s : kStrategies)
    for (int d : {1, 2, 3, 4, 8}) {
      CAPTURE(std::string(s.name)); CAPTURE(d);
      std::mutex mutex;
      std::map<int, std::vector<int>> owners;  // unit -> of each stored element, how many ranks update it
      std::map<int, int64_t> sizes;
      int64_t updated = 0, held = 0;
      const bool ok = on_ranks(d, [&](World& world, Device& device) {
        std::unique_ptr<Parallel> parallel = s.make(world.all());
        Transformer model(kRagged, *parallel, device, 1);
        AdamW adamw(model, Options());
        std::lock_guard lock(mutex);
        for (const Unit& unit : model.params().units()) {
          owners[unit.index].resize(unit.padded);
          sizes[unit.index] = unit.size;
          for (int64_t i = unit.begin(); i < unit.end(); ++i) ++owners[unit.index][i];
        }
        bool same = true;  // AdamW's range is the owned one without the padding
        for (const AdamW::State& state : adamw.states()) {
          const Unit& unit = model.params().unit(state.unit);
          same = same && state.begin == std::min(unit.begin(), unit.size) && state.end == std::min(unit.end(), unit.size);
        }
        updated += adamw.elements();
        held = std::max(held, device.peak(Memory::parameters));
        return same;
      });
      CHECK(ok);
      CHECK(updated == kRagged.parameters());
      int64_t padded = 0;
      for (const auto& [unit, counts] : owners) {
        padded += int64_t(counts.size());
        CHECK(int64_t(counts.size()) - sizes[unit] < d);
        CHECK(std::all_of(counts.begin(), counts.end(), [](int n) { return n == 1; }));
      }
      // Making the model needs no more memory than keeping it.
      CHECK(held == int64_t(sizeof(real)) * (std::string(s.name) == "zero3" ? padded / d : padded));
    }
}

namespace {

// One unit of 57 elements: 3 columns of a table of 19 rows. Nothing divides it but 3 and 19.
template <class Base>
struct Flat : Base {
  using Base::Base;
  Piece piece(const Param&) const override { return {1, 0, 3}; }
  int stage(int unit) const override { return unit == 0 ? 0 : -1; }
};

struct FlatResult {
  std::vector<float> weights = std::vector<float>(57, NAN);
  double norm = 0;
  bool padding_is_zero = true;
};

// Three updates with gradients that are integers, different on every rank; `of`: ranks whose gradients are summed.
template <class Make57>
FlatResult flat_57(int d, int of, Make57 make) {
  FlatResult out;
  std::mutex mutex;
  const bool ok = on_ranks(d, [&](World& world, Device& device) {
    auto parallel = make(world.all());
    Transformer model(kRagged, *parallel, device, 1);
    AdamW adamw(model, Options());
    Unit& unit = model.params().unit(0);
    if (unit.size != 57) return false;
    double norm = 0;
    for (int step = 0; step < 3; ++step) {
      parallel->open(unit, true);
      std::vector<real> values(unit.padded, real(1e30f));  // padding that would blow up whatever reads it
      for (int i = 0; i < 57; ++i) {
        float sum = 0;
        for (int r = d == 1 ? 0 : world.rank(); r < (d == 1 ? of : world.rank() + 1); ++r) sum += float((i * 7 + r * 3 + step) % 11 - 4);
        values[i] = real(sum);
      }
      device.upload(unit.gradients.data, values.data(), unit.padded);
      parallel->close(unit, true, true);
      parallel->finish_gradients(model);
      norm = std::sqrt(world.sum(model.squared_gradient_norm()));
      parallel->update(adamw, 1e-2f, AdamW::clip_factor(norm, 1));
    }
    std::lock_guard lock(mutex);
    out.norm = norm;
    const std::vector<real> stored = (unit.weights ? unit.weights : unit.weight_shard).to_host();
    const int64_t from = unit.weights ? 0 : unit.begin();
    for (int64_t i = 0; i < int64_t(stored.size()); ++i) {
      if (from + i < 57) out.weights[from + i] = float(stored[i]);
      else out.padding_is_zero = out.padding_is_zero && float(stored[i]) == 0;
    }
    return true;
  });
  if (!ok) out.norm = NAN;
  return out;
}

}  // namespace

TEST_CASE("zero: a flat size of 57 on 2, 3 and 4 ranks equals one rank; padding is never updated") {
  for (int d : {2, 3, 4}) {
    const FlatResult one = flat_57(1, d, [](Group&) { return std::make_unique<Flat<Parallel>>(); });
    const std::pair<const char*, FlatResult> all[] = {
        {"zero1", flat_57(d, d, [](Group& g) { return std::make_unique<Flat<Zero1>>(g); })},
        {"zero2", flat_57(d, d, [](Group& g) { return std::make_unique<Flat<Zero2>>(g, g, true, true); })},
        {"zero3", flat_57(d, d, [](Group& g) { return std::make_unique<Flat<Zero3>>(g, g, nullptr, true, true, false); })},
        {"offload", flat_57(d, d, [](Group& g) { return std::make_unique<Flat<Offload>>(g, true); })}};
    for (const auto& pair : all) {
      const char* name = pair.first;
      const FlatResult& mine = pair.second;
      CAPTURE(name); CAPTURE(d);
      CHECK(std::abs(mine.norm - one.norm) < 1e-9 * one.norm);  // integers: only the order of doubles may differ
      CHECK(mine.padding_is_zero);
      for (int i = 0; i < 57; ++i) CHECK(std::abs(mine.weights[i] - one.weights[i]) <= 1e-6f);
    }
  }
}

TEST_CASE("zero: overlap and prefetch change no bit; with lazy streams and poisoned memory neither") {
  for (bool tied : {false, true}) {
    ModelConfig c = kRagged;
    c.tied = tied;
    const Make waiting[] = {
        [](Group& g) { return std::make_unique<Zero2>(g, g, true, false); },
        [](Group& g) { return std::make_unique<Zero3>(g, g, nullptr, true, false, false); },
        [](Group& g) { return std::make_unique<Offload>(g, true); }};
    for (int i = 0; i < 3; ++i) {
      CAPTURE(kStrategies[i + 1].name); CAPTURE(tied);
      const Trained wait = train(3, c, 12, 2, waiting[i]), eager = train(3, c, 12, 2, kStrategies[i + 1].make);
      sim::set_stream_policy(sim::StreamPolicy::lazy, 7);
      const Trained lazy = train(3, c, 12, 2, kStrategies[i + 1].make);
      sim::set_stream_policy(sim::StreamPolicy::eager);
      CHECK(wait.complete);
      CHECK(eager.complete);
      CHECK(lazy.complete);
      CHECK(wait.weights == eager.weights);
      CHECK(lazy.weights == eager.weights);
      CHECK(lazy.gradients == eager.gradients);
      CHECK(lazy.norms == eager.norms);
    }
  }
}

namespace {
struct Forgetful : Zero3 {  // gathers, and never frees
  using Zero3::Zero3;
  void close(Unit& unit, bool backward, bool last) override { Zero2::close(unit, backward, last); }
};

// Peak bytes of parameters of a step, and what the formula says.
std::pair<int64_t, int64_t> peak_of_a_step(const Make& make) {
  std::pair<int64_t, int64_t> result;
  on_ranks(2, [&](World& world, Device& device) {
    std::unique_ptr<Parallel> parallel = make(world.all());
    Transformer model(kRagged, *parallel, device, 1);
    auto& zero3 = dynamic_cast<Zero3&>(*parallel);
    zero3.params = &model.params();
    const GlobalBatch batch = random_batch(kRagged, 4, 0);
    for (const MicroBatch& part : micro_batches(device, batch, parallel->view(4, kRagged.seq), 1))
      model.forward(part), model.backward(part);
    parallel->finish_gradients(model);
    int64_t padded = 0;
    for (const Unit& unit : model.params().units()) padded += unit.padded;
    if (world.rank() == 0)
      result = {device.peak(Memory::parameters), int64_t(sizeof(real)) * (padded / 2 + zero3.most_gathered(model.params()))};
    return true;
  });
  return result;
}
}  // namespace

TEST_CASE("zero: the peak of ZeRO-3 is its formula, and shows parameters that were never freed") {
  const auto right = peak_of_a_step([](Group& g) { return std::make_unique<Zero3>(g, g, nullptr, true, true, false); });
  const auto wrong = peak_of_a_step([](Group& g) { return std::make_unique<Forgetful>(g, g, nullptr, true, true, false); });
  CHECK(right.second > 0);
  CHECK(right.first == right.second);
  CHECK(wrong.first > wrong.second);
}

TEST_CASE("zero: the printed tables, for 1, 2 and 4 ranks, against arithmetic by hand") {
  // D 14, K 14, F 9, V 256: embedding 3584, three blocks of 392 + 392 + 378 + 28, head 14 + 3584.
  const int64_t units[] = {3584, 1190, 1190, 1190, 3598};
  const double B = sizeof(real), state = B == 4 ? 8 : 12;
  const std::string model = " --dim 14 --heads 7 --kv-heads 7 --layers 3 --hidden 9 --seq 8 --steps 2 --no-proof";
  for (int d : {1, 2, 4}) {
    double Psi = 0, padded = 0;
    for (int64_t unit : units) Psi += double(unit), padded += double((unit + d - 1) / d * d);
    auto table = [&](const char* lesson, const std::string& options) {
      return run(built(lesson) + model + " --batch 8 --threads " + std::to_string(d) + options).text;
    };
    struct Row {
      const char* lesson;
      double parameters, gradients, optimizer, sent;
    };
    const double part = padded / d, peer = double(d - 1);
    for (const Row& want : {Row{"13_zero1", padded, padded, 1, 2}, Row{"14_zero2", padded, part, 1, 2},
                            Row{"15_zero3", part, part, 1, 3}, Row{"16_offload", padded, 0, 0, 2}}) {
      CAPTURE(std::string(want.lesson)); CAPTURE(d);
      const std::string text = table(want.lesson, "");
      INFO(text);
      const auto parameters = numbers(text, "parameters"), gradients = numbers(text, "gradients"),
                 optimizer = numbers(text, "optimizer"), sent = numbers(text, "sent per step, elements");
      REQUIRE(parameters.size() >= 4);  // peak, stored, exact, textbook
      CHECK(parameters[1] == B * want.parameters);
      CHECK(gradients[1] == B * want.gradients);
      const double mine = Psi / d;  // rank 0's parts have no padding, so a little more than Psi/d
      CHECK(optimizer[1] >= want.optimizer * state * mine);
      CHECK(optimizer[1] <= want.optimizer * state * part);
      CHECK(std::abs(optimizer[3] - want.optimizer * state * mine) <= 0.5);
      REQUIRE(sent.size() >= 3);
      CHECK(sent[0] == want.sent * part * peer);
      CHECK(sent[1] == sent[0]);
      CHECK(std::abs(sent[2] - want.sent * Psi * peer / d) <= 0.5);
      // Weights travel, not activations: the batch does not matter. (X35)
      const std::string twice = run(built(want.lesson) + model + " --batch 16 --threads " + std::to_string(d)).text;
      CHECK(numbers(twice, "sent per step, elements") == sent);
    }
  }
}
#endif
