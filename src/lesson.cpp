#include "lesson.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <new>

#include "formulas.h"
#include "random.h"
#include "sim/nccl/world.h"

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double core_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

namespace {

constexpr int kTracedSteps = 3;  // of --trace: enough to see a pattern, short enough to look at

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + long(values.size()) / 2, values.end());
  return values[values.size() / 2];
}

// 12345 -> "12.3 k"
std::string short_number(double value) {
  const char* const units[] = {"", "k", "M", "G", "T", "P"};
  int unit = 0;
  while (value >= 1000 && unit < 5) value /= 1000, ++unit;
  return format("%.3g %s", value, units[unit]);
}

}  // namespace

double measure_matmul_peak(Device& device, int size, double (*clock)()) {
  Buffer a = device.allocate<real>(Memory::workspace, {size, size});
  Buffer b = device.allocate<real>(Memory::workspace, {size, size});
  Buffer c = device.allocate<real>(Memory::workspace, {size, size});
  const std::vector<real> ones(a.numel(), real(1.f));
  device.upload(a.data, ones.data(), a.numel());
  device.upload(b.data, ones.data(), b.numel());
  std::vector<double> rates;
  for (int i = 0; i < 6; ++i) {  // the first warms up
    const double start = clock();
    device.linear(c, a, b);
    device.synchronize();
    if (i > 0) rates.push_back(2.0 * size * size * size / (clock() - start));
  }
  return median(rates);  // not the best: what disturbs a training step on a shared machine disturbs this as well
}

Lesson::Lesson(const std::string& name, const Options& options, const Corpus& corpus, Device& device, World& world)
    : name_(name), options_(options), corpus_(corpus), device_(device), world_(world) {}

void Lesson::print(const char* text, ...) const {
  if (world_.rank() != 0) return;
  std::va_list arguments;
  va_start(arguments, text);
  std::vprintf(text, arguments);
  va_end(arguments);
  std::fflush(stdout);
}

std::string Lesson::link_text() const {
  const WorldOptions& w = options_.world;
  return (w.linked() ? format(" over a simulated link of %g GB/s and %g us", w.link_gbps, w.link_us) : "") +
         (options_.pace > 0 ? format(", each forward paced to %g ms", options_.pace) : "");
}

void Lesson::start(AdamW& adamw) {
  const ModelConfig& c = config();
  Transformer& model = adamw.model();
  // What could not be done at the end is found here, before training.
  const bool in_parts = world_.sum(!holds_whole(adamw)) > 0, in_stages = !holds_all_units(model);
  const std::pair<const char*, bool> impossible[] = {{"--save", in_parts && !options_.save.empty()},
                                                     {"--load", in_parts && !options_.load.empty()},
                                                     {"--sample", in_stages && options_.sample > 0},
                                                     {"--logits", in_stages && !options_.logits.empty()}};
  for (auto [option, wanted] : impossible)
    if (wanted)
      throw LayoutError(format("%s needs a rank that holds the whole model%s, and here each of %d ranks holds a part; "
                               "leave it out", option, in_stages ? "" : " and optimizer", world_.size()));
  const View view = model.parallel().view(options_.batch, c.seq);
  if (world_.sum(view.last_sample - view.first_sample < options_.micro_batches) > 0)
    throw LayoutError(format("--batch %d is too small: a rank has fewer samples of it than its --micro-batches %d; raise "
                             "--batch, or use fewer of the %d ranks", options_.batch, options_.micro_batches, world_.size()));
  int chunks = 1;  // a chunk of a stage takes its share of the stage's time
  for (int unit = 0; unit < c.units(); ++unit) chunks = std::max(chunks, model.parallel().stage(unit) + 1);
  model.set_pace(1e-3 * options_.pace / chunks);
  if (!options_.load.empty()) {
    loaded_ = read_checkpoint(options_.load);
    first_step_ = restore(*loaded_, adamw);
    if (!options_.proof) loaded_.reset();
  }
  if (first_step_ >= options_.last_step()) {
    const char* name = options_.stop_after ? "--stop-after" : "--steps";
    throw Error(format("--load %s is at step %lld already, and %s is %lld; raise %s to go on", options_.load.c_str(),
                       (long long)first_step_, name, (long long)options_.last_step(), name));
  }
  world_.sum(0);
  peak_flops_ = world_.sum(measure_matmul_peak(device_));  // of all ranks at once: they may share a machine
  print("%s: %s%s%s\n", name_.c_str(), device_.name().c_str(),
        world_.size() == 1 ? "" : format(", %d ranks as %s", world_.size(), under_mpiexec() ? "processes" : "threads").c_str(),
        link_text().c_str());
  print("  model   %lld parameters: dim %d, %d layers, %d heads (%d kv), hidden %d, vocabulary %d, %s\n",
        (long long)c.parameters(), c.dim, c.layers, c.heads, c.kv_heads, c.hidden, c.vocab,
        kPrecision);
  print("  data    %s: %zu tokens; entropy of a token %.3f nats, of one after another %.3f (bigram)\n",
        corpus_.name().c_str(), corpus_.tokens().size(), unigram_entropy(corpus_.tokens()),
        bigram_entropy(corpus_.tokens()));
  print("  batch   %d samples x %d tokens, %d micro-batch%s a rank, steps %lld to %lld\n", options_.batch, c.seq,
        options_.micro_batches, options_.micro_batches == 1 ? "" : "es", (long long)first_step_ + 1,
        (long long)options_.last_step());
  print("  speed   matrix products reach %sFLOP/s here%s; a token needs %sFLOP\n", short_number(peak_flops_).c_str(),
        world_.size() == 1 ? "" : ", all ranks together", short_number(c.flops_per_token()).c_str());
  if (!options_.trace.empty()) device_.trace.start(world_.rank());
  device_.reset_peaks();
  device_.sent_to_host = device_.sent_from_host = 0;
  world_.reset_traffic();
  logged_step_ = first_step_;
  started_ = logged_ = seconds();
}

std::vector<int64_t> Lesson::steps() const {
  std::vector<int64_t> all;
  for (int64_t step = first_step_; step < options_.last_step(); ++step) all.push_back(step);
  return all;
}

std::vector<MicroBatch> Lesson::batch(int64_t step, Transformer& model) {
  const GlobalBatch global = global_batch(corpus_.train(config().seq), seed(), step, options_.batch, config().seq);
  return micro_batches(device_, global, model.parallel().view(global.samples, global.seq), options_.micro_batches);
}

void Lesson::log(int64_t step, double loss, double norm, Transformer& model) {
  if (!std::isfinite(loss) || !std::isfinite(norm)) report_not_finite(step, loss, norm, model.params());
  mine_.losses.push_back(loss);
  mine_.norms.push_back(norm);
  if (step == first_step_ && options_.proof) {
    const auto packed = world_.gather(pack(model.params(), true));
    if (world_.rank() == 0) {
      Assembled all = assemble(config(), packed);
      mine_.gradients = std::move(all.tensors);
      all.copies.what = "gradient " + all.copies.what, all.missing.what = "gradient " + all.missing.what;
      assembly_.insert(assembly_.end(), {all.copies, all.missing});
    }
  }
  if (step == first_step_ + kTracedSteps - 1) device_.trace.stop();
  const int64_t done = step + 1;
  if (done % options_.log_every && done != options_.last_step() && step != first_step_) return;
  const double now = seconds();
  const double rate = double(done - logged_step_) * options_.batch * config().seq / (now - logged_);
  const double flops = rate * config().flops_per_token();
  if (step != first_step_) rates_.push_back(rate);  // the first step also warms up
  const int left = int((now - started_) / double(done - first_step_) * double(options_.last_step() - done) + 0.5);
  print("  step %5lld/%lld  loss %.4f  norm %7.3f  lr %.2e  %8stok/s  %8sFLOP/s %3.0f %% of measured peak  %d:%02d left\n",
        (long long)done, (long long)options_.steps, loss, norm, learning_rate(step), short_number(rate).c_str(),
        short_number(flops).c_str(), 100 * flops / peak_flops_, left / 60, left % 60);
  logged_ = now;
  logged_step_ = done;
}

bool Lesson::holds_all_units(Transformer& model) const {
  return int(model.params().units().size()) == config().units();
}

double Lesson::held_out_loss(Transformer& model) {
  double loss = 0;
  const int rounds = 4;
  for (int round = 0; round < rounds; ++round) {
    const GlobalBatch batch =
        global_batch(corpus_.valid(config().seq), hash_name("held out"), round, options_.batch, config().seq);
    for (const MicroBatch& part : micro_batches(device_, batch, model.parallel().view(batch.samples, batch.seq), 1))
      loss += model.evaluate(part);
  }
  return world_.sum(loss / rounds);
}

void Lesson::finish(AdamW& adamw) {
  Transformer& model = adamw.model();
  trained_ = seconds() - started_;
  device_.trace.stop();
  for (const Traffic& row : world_.traffic())  // nothing may travel that no formula spoke of
    if (row.sent && !traffic_expected_.count(row.group + " " + row.operation))
      costs_.push_back({"sent by " + row.operation + " in " + row.group, "nothing", row.sent, 0});
  if (!options_.save.empty() && world_.rank() == 0) {
    sim::Busy writing;  // the others wait for as long as it takes
    save_checkpoint(options_.save, adamw, options_.last_step());
  }
  if (!options_.save.empty()) print("  saved   %s\n", options_.save.c_str());
  double last = 0;
  const int window = int(std::min<size_t>(10, mine_.losses.size()));
  for (int i = 0; i < window; ++i) last += mine_.losses[mine_.losses.size() - 1 - i] / window;
  const bool used = options_.sample > 0 || !options_.logits.empty();  // by rank 0, on its own
  if (options_.proof || (used && world_.size() > 1)) {
    const auto packed = world_.gather(pack(model.params(), false));
    if (world_.rank() == 0) {
      Assembled all = assemble(config(), packed);
      mine_.end = std::move(all.tensors);
      all.copies.what = "parameter " + all.copies.what, all.missing.what = "parameter " + all.missing.what;
      assembly_.insert(assembly_.end(), {all.copies, all.missing});
    }
  }
  // A pipeline's stages would have to evaluate together; their loss on held-out text is that of one rank.
  const std::string held_out = holds_all_units(model) ? format(", %.3f on held-out text", held_out_loss(model)) : "";
  print("  loss    %.3f over the last %d steps%s; bigram entropy %.3f\n", last, window, held_out.c_str(),
        bigram_entropy(corpus_.tokens()));
  if (!options_.trace.empty()) write_trace();
  if (world_.rank() != 0 || !used) return;
  // Whatever the layout was in training, rank 0 now puts the ranks' pieces together and needs nobody else.
  Parallel one_gpu;
  std::optional<Transformer> whole;
  if (world_.size() > 1) {
    whole.emplace(config(), one_gpu, device_, seed());
    for (Unit& unit : whole->params().units())
      for (Param& p : unit.params) whole->params().set_weight(p, mine_.end.at(p.name));
  }
  Transformer& alone = whole ? *whole : model;
  if (!options_.logits.empty()) save_logits(alone);
  if (options_.sample > 0) sample(alone);
}

void Lesson::write_trace() {
  std::vector<Span> spans;
  for (const std::string& text : world_.gather(serialize(device_.trace.spans())))
    for (Span& span : parse_spans(text)) spans.push_back(std::move(span));
  if (world_.rank() != 0) return;
  if (options_.trace.ends_with(".svg")) {
    SvgOptions svg;
    svg.title = format("%s, %d rank%s%s", name_.c_str(), world_.size(), world_.size() == 1 ? "" : "s",
                       link_text().c_str());
    svg.width = 600 * kTracedSteps;  // room for labels
    write_svg(options_.trace, spans, svg);
  } else {
    write_chrome_trace(options_.trace, spans);
  }
  print("  trace   %s: %zu spans of the first %d steps\n", options_.trace.c_str(), spans.size(), kTracedSteps);
}

// For other programs to check: tests/reference/check_transformers.py.
void Lesson::save_logits(Transformer& model) {
  const int T = config().seq, V = config().vocab;
  const GlobalBatch batch = global_batch(corpus_.valid(T), hash_name("held out"), 0, options_.batch, T);
  const auto part = micro_batches(device_, batch, model.parallel().view(batch.samples, T), 1);
  const Buffer logits = model.logits(part[0]);
  const std::vector<real> values = logits.to_host();
  const std::vector<float> floats(values.begin(), values.end());
  Safetensors file;
  file.tensors["tokens"] = HostTensor::from_ints({batch.samples, T}, batch.inputs);
  file.tensors["logits"] = HostTensor::from_floats({batch.samples, T, V}, floats);
  save_safetensors(options_.logits, file);
  std::printf("  logits  %s\n", options_.logits.c_str());
}

void Lesson::sample(Transformer& model) {
  const int T = config().seq;
  const auto text = corpus_.valid(T);
  std::vector<int> tokens(text.begin(), text.begin() + std::min<size_t>(text.size(), 16));  // the prompt
  const size_t prompt = tokens.size();
  for (int i = 0; i < options_.sample; ++i) {
    GlobalBatch window{1, std::min(T, int(tokens.size())), {}, {}, 0};
    window.inputs.assign(tokens.end() - window.seq, tokens.end());
    window.targets.assign(window.seq, -1);
    Parallel one_gpu;
    const auto parts = micro_batches(device_, window, one_gpu.view(1, window.seq), 1);
    const std::vector<real> logits = model.logits(parts[0]).to_host();
    const real* row = logits.data() + int64_t(window.seq - 1) * config().vocab;
    std::vector<double> weights(config().vocab);
    float most = -INFINITY;
    for (int v = 0; v < config().vocab; ++v) most = std::max(most, float(row[v]));
    double sum = 0;
    for (int v = 0; v < config().vocab; ++v) sum += weights[v] = std::exp((float(row[v]) - most) / 0.8);
    double at = random_uniform(seed(), hash_name("sample"), uint64_t(i)) * sum;
    int choice = 0;
    while (choice + 1 < config().vocab && (at -= weights[choice]) >= 0) ++choice;
    tokens.push_back(choice);
  }
  std::string shown;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i == prompt) shown += corpus_.is_text() ? " >>> " : "| ";
    if (!corpus_.is_text()) shown += std::to_string(tokens[i]) + " ";
    else if (tokens[i] == '\n') shown += "\n          ";
    else shown += char(tokens[i]);
  }
  print("  sample  %s\n", shown.c_str());
}

void Lesson::expect_peak(Memory kind, int64_t bytes, const std::string& formula) {
  costs_.push_back({format("peak %s", memory_name(kind)), formula, device_.peak(kind), bytes});
}

void Lesson::expect_stored(Memory kind, int64_t bytes, const std::string& formula) {
  costs_.push_back({format("stored %s", memory_name(kind)), formula, device_.current(kind), bytes});
}

void Lesson::expect_state(int64_t parameters, int64_t gradients, int64_t optimizer) {
  expect_peak(Memory::parameters, parameters, "B Psi");
  expect_peak(Memory::gradients, gradients, "B Psi");
  expect_peak(Memory::optimizer, optimizer, sizeof(real) == 4 ? "8 per parameter updated here" : "12 per parameter updated here");
}

void Lesson::expect_activations(Transformer& model, const TensorCut& cut) {
  const View view = model.parallel().view(options_.batch, config().seq);
  const int64_t samples = view.last_sample - view.first_sample, T = int64_t(view.positions.size());
  const int64_t most = (samples + options_.micro_batches - 1) / options_.micro_batches, B = sizeof(real);
  expect_peak(Memory::activations, peak_activation_bytes(config(), most * T, B, cut),
              cut.sequence ? "(L (B N (4D + 2A + 2K + 3F + H T) + 8 N) + B N 3D + 4 N) / t + B N V(rank)"
                           : "L (B N (4D + (2A + 2K + 3F + H T) / t) + 8 N) + B N (3D + V(rank)) + 4 N");
  expect_peak(Memory::workspace, peak_workspace_bytes(config(), int(most), int(T), samples * T, B, cut),
              "the largest scratch of a block's backward");
}

void Lesson::expect_host_link(int64_t down, int64_t up, const std::string& formula) {
  costs_.push_back({"copied to the host", formula, device_.sent_to_host, down});
  costs_.push_back({"copied from the host", formula, device_.sent_from_host, up});
}

void Lesson::expect_activations(Transformer& model) {
  const View view = model.parallel().view(options_.batch, config().seq);
  const int64_t samples = view.last_sample - view.first_sample, T = int64_t(view.positions.size());
  const int64_t most = (samples + options_.micro_batches - 1) / options_.micro_batches, B = sizeof(real);
  expect_peak(Memory::activations, peak_activation_bytes(config(), most * T, B),
              "L (B N (4D + 2A + 2K + 3F + H T) + 8 N) + B N (3D + V) + 4 N");
  expect_peak(Memory::workspace, peak_workspace_bytes(config(), int(most), int(T), samples * T, B),
              "the largest scratch of a block's backward");
}

void Lesson::expect_traffic(const std::string& what, const std::string& group, const std::string& operation,
                            int64_t Traffic::*field, int64_t expected, const std::string& formula) {
  int64_t counted = 0;
  for (const Traffic& row : world_.traffic())
    if (row.group == group && row.operation == operation) counted += row.*field;
  traffic_expected_.insert(group + " " + operation);
  costs_.push_back({what + " " + operation + " in " + group, formula, World::counts_traffic() ? counted : -1, expected});
}

void Lesson::expect_sent(const std::string& group, const std::string& operation, int64_t bytes, const std::string& formula) {
  expect_traffic("sent by", group, operation, &Traffic::sent, bytes, formula);
}

void Lesson::expect_received(const std::string& group, const std::string& operation, int64_t bytes,
                             const std::string& formula) {
  expect_traffic("received by", group, operation, &Traffic::received, bytes, formula);
}

void Lesson::expect_calls(const std::string& group, const std::string& operation, int64_t calls, const std::string& formula) {
  expect_traffic("calls of", group, operation, &Traffic::calls, calls, formula);
}

// Gathers what every rank counted; a line for each cost, with the ranks' numbers if they differ.
bool Lesson::prove_costs() {
  std::string mine;
  for (const Cost& c : costs_) mine += format("%lld %lld\n", (long long)c.counted, (long long)c.expected);
  std::vector<std::vector<std::pair<int64_t, int64_t>>> ranks;
  for (const std::string& text : world_.gather(mine)) {
    ranks.emplace_back();
    const char* at = text.c_str();
    for (int used = 0; *at; at += used) {
      long long counted, expected;
      if (std::sscanf(at, "%lld %lld\n%n", &counted, &expected, &used) != 2) break;
      ranks.back().push_back({counted, expected});
    }
  }
  bool ok = true;
  for (size_t i = 0; i < costs_.size(); ++i) {
    std::string counted, expected;
    bool equal = true, right = true, known = true;
    for (const auto& rank : ranks) {
      if (i >= rank.size()) { right = false; continue; }
      equal = equal && rank[i] == ranks[0][i];
      known = known && rank[i].first >= 0;
      right = right && (rank[i].first == rank[i].second || rank[i].first < 0);
    }
    for (size_t r = 0; r < (equal ? 1 : ranks.size()); ++r) {
      if (i >= ranks[r].size()) continue;
      counted += format("%s%lld", r ? ", " : "", (long long)ranks[r][i].first);
      expected += format("%s%lld", r ? ", " : "", (long long)ranks[r][i].second);
    }
    ok = ok && right;
    if (!known) print("  --   %-28s formula: %s = %s (NCCL does not report bytes)\n", costs_[i].what.c_str(),
                      costs_[i].formula.c_str(), expected.c_str());
    else if (right) print("  ok   %-28s %s = %s\n", costs_[i].what.c_str(), counted.c_str(), costs_[i].formula.c_str());
    else print("  FAIL %-28s %s by rank, but %s = %s\n", costs_[i].what.c_str(), counted.c_str(),
               costs_[i].formula.c_str(), expected.c_str());
  }
  return ok;
}

int Lesson::prove(Transformer&) {
  print("proof of %s\n", name_.c_str());
  print(" same bytes as the formula, over %lld steps%s\n", (long long)mine_.losses.size(),
        world_.size() > 1 ? "; one number if it is the same on every rank, else by rank" : "");
  bool ok = prove_costs();
  if (world_.rank() != 0) return 0;  // the numbers are rank 0's to compare; its exit status speaks for all
  if (options_.proof) {
    const Trajectory reference =
        train_reference(device_, options_, corpus_.train(config().seq), loaded_ ? &*loaded_ : nullptr);
    print(" same numbers as one rank with the whole batch in one piece: worst difference\n");
    for (const Check& check : compare(mine_, reference, Bounds::standard())) {
      ok = ok && check.ok();
      print("  %-4s %-28s %.2e (at most %.0e)  %s\n", check.ok() ? "ok" : "FAIL", check.what.c_str(), check.value,
            check.bound, check.ok() && check.value == 0 ? "" : check.detail.c_str());
    }
    for (const Check& check : assembly_) {
      if (world_.size() == 1) continue;
      ok = ok && check.ok();
      print("  %-4s %-43s %.0f  %s\n", check.ok() ? "ok" : "FAIL", check.what.c_str(), check.value,
            check.detail.c_str());
    }
  } else {
    print(" numbers not compared: --no-proof\n");
  }
  print("summary\t%s\t%s\t%d\t%.4f\t%.4f\t%.0f\t%.1f\n", name_.c_str(),
        !ok ? "FAILED" : options_.proof ? "proved" : "skipped", world_.size(), mine_.losses.front(),
        mine_.losses.back(), median(rates_), seconds() - started_);
  return ok ? 0 : 1;
}

// A simulated GPU lets any allocation pass, and the kernel kills whoever then uses it.
static void check_memory(const Options& o) {
#ifndef RINGTRON_CUDA
  size_t free = 0, total = 0;
  CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const ModelConfig& c = o.model;
  const int parts = o.proof ? 1 : o.micro_batches;  // the proof's reference takes the batch in one piece
  const double rows = double((o.batch + parts - 1) / parts) * c.seq, kv = double(c.head_dim()) * c.kv_heads;
  const double state = 16.0 * double(c.parameters()) * (o.proof ? 2 : 1);
  const double activations = sizeof(real) * rows *
      (c.layers * (6.0 * c.dim + 2 * kv + 3.0 * c.hidden + double(c.heads) * c.seq) + c.vocab);
  const double gib = 1 << 30;
  if (state + activations > double(total))
    throw Error(format("this run needs %.1f GiB for weights and optimizer%s and %.1f GiB for activations, and this "
                       "machine has %.1f; choose a smaller model, --seq or --batch", state / gib,
                       o.proof ? ", the proof's too," : "", activations / gib, double(total) / gib));
#else
  (void)o;  // there, the allocation itself fails
#endif
}

// The folder of a file to write must be there.
static void check_file(const char* option, const std::string& name) {
  if (name.empty()) return;
  const std::filesystem::path file = name, folder = file.parent_path();
  if (std::filesystem::is_directory(file) || access(folder.empty() ? "." : folder.c_str(), W_OK) != 0)
    throw Error(format("%s %s can't be written; name a file in a folder that exists", option, name.c_str()));
}

int run_lesson(int argc, char** argv, const char* name, const char* title, Options defaults, LessonBody body) {
  auto say = [&](const std::string& wrong) {
    std::fflush(stdout);
    std::fprintf(stderr, "%s: %s\n", name, wrong.c_str());
    return 1;
  };
  try {
    Options options = parse_options(argc, argv, std::string(name) + ": " + title, defaults);
    if (!options.load.empty()) options.adopt(checkpoint_config(options.load), options.load + "/config.json");
    options.validate();
    const Corpus corpus = Corpus::load(options.data);
    if (!options.given.count("--vocab") && options.load.empty()) options.model.vocab = corpus.vocabulary();
    corpus.check_vocabulary(options.model.vocab);
    corpus.check_length(options.model.seq);
    const int ranks = ranks_to_run(options.world);
    if (int64_t(ranks) > 1 && defaults.world.threads == 1)
      throw Error(format("this lesson is about one rank, and %d were asked for; start it without mpiexec and --threads",
                         ranks));
    if (options.check) options.check(options, ranks);
    check_memory(options);
    check_file("--logits", options.logits);
    check_file("--trace", options.trace);
    if (!options.save.empty() && mpi_rank() == 0) check_writable(options.save);
    return run_ranks(argc, argv, name, options.world, [&](int rank) {
      try {
        Device device(rank);
        World world(device);
        Lesson lesson(name, options, corpus, device, world);
        return body(lesson);
      } catch (const LayoutError& wrong) {
        return rank == 0 ? say(wrong.what()) : 1;
      } catch (const std::bad_alloc&) {
        throw Error("out of memory; choose a smaller model, --seq, --batch or --steps");
      } catch (const std::exception& wrong) {
        if (ranks > 1) throw;  // the others hear of it
        return say(wrong.what());
      }
    });
  } catch (const std::bad_alloc&) {
    return cannot_run(argc, argv, name, "out of memory; choose a smaller model, --seq, --batch or --steps");
  } catch (const std::exception& wrong) {
    return cannot_run(argc, argv, name, wrong.what());
  }
}
