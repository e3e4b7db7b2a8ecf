// estimate.cpp - what a model costs, before anything runs: parameters, FLOPs, bytes, days.
//
//   make estimate ARGS="--model llama-2-7b"
//   make estimate ARGS="--model llama-3-8b --seq 8192 --tokens 15e12 --gpus 1024 --peak 989e12 --mfu 0.4"
//   make estimate ARGS="--dim 128 --layers 2 --heads 8 --kv-heads 4 --seq 128"      the model of the lessons
//   make estimate ARGS="--params 70e9 --gpus 32"                                    only what follows from a count
//
// Arithmetic only, all of it in src/formulas.h; nothing is measured. G is 1e9, a GB 1e9 bytes.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "../src/error.h"
#include "../src/formulas.h"

namespace {

struct Preset {
  const char* name;
  bool gpt;  // GELU, biases, learned positions, tied head; else a Llama
  int vocab, dim, layers, heads, kv_heads, hidden, seq;
};
constexpr Preset kPresets[] = {
    {"llama-2-7b", false, 32000, 4096, 32, 32, 32, 11008, 4096},
    {"llama-2-70b", false, 32000, 8192, 80, 64, 8, 28672, 4096},
    {"llama-3-8b", false, 128256, 4096, 32, 32, 8, 14336, 8192},
    {"gpt-3", true, 50257, 12288, 96, 96, 96, 49152, 2048},
};

struct Job {  // how the model would be trained
  double batch = 1, tokens = 0, gpus = 0, peak = 989e12, mfu = 0.4;
  int lora_rank = 0;
};

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value);
  for (int at = int(digits.size()) - 3; at > 0; at -= 3) digits.insert(size_t(at), 1, ',');
  return digits;
}

// 46087...e6 -> "46.09 G"
std::string short_number(double value) {
  const char* const units[] = {"", " k", " M", " G", " T", " P", " E"};
  int unit = 0;
  while (value >= 1000 && unit < 6) value /= 1000, ++unit;
  return unit == 6 && value >= 1000 ? format("%.3e", value * 1e18) : format("%.4g%s", value, units[unit]);
}

void heading(const char* text) { std::printf("%s\n", text); }
void row(const std::string& what, const std::string& value, const std::string& how = "") {
  std::printf("  %-33s %24s%s%s\n", what.c_str(), value.c_str(), how.empty() ? "" : "   ", how.c_str());
}
std::string gb(double bytes) { return bytes < 1e8 ? format("%.3f MB", bytes / 1e6) : format("%.3f GB", bytes / 1e9); }

void print_parameters(const ParameterParts& p, int layers, bool gpt) {
  heading("parameters");
  row("input embedding", with_commas(p.embedding), gpt ? "V h + s h (learned positions)" : "V D");
  row("attention of a layer", with_commas(p.attention), gpt ? "4 h h + 4 h" : "2 D D + 2 D K");
  row("MLP of a layer", with_commas(p.mlp), gpt ? "8 h h + 5 h" : "3 D F");
  row("norms of a layer", with_commas(p.norms), gpt ? "4 h" : "2 D");
  row("one layer", with_commas(p.block()), gpt ? "12 h h + 13 h" : "");
  row(format("%d layers", layers), with_commas(layers * p.block()));
  row("last norm", with_commas(p.final_norm));
  row("head", with_commas(p.head), p.head ? "V D" : "shares the embedding's table");
  row("all parameters", with_commas(p.all(layers)), "Psi");
}

// N: the parameters that multiply a token. The input embedding is a look-up; a tied table multiplies once, as the head.
void print_flops(const ModelConfig& c, const ParameterParts& p, bool gpt) {
  const double L = c.layers, D = c.dim, T = c.seq;
  const int64_t not_multiplied = gpt ? T * D : c.tied ? 0 : p.embedding;
  const double N = double(p.all(c.layers) - not_multiplied), counted = 6 * double(not_multiplied);
  const double full = attention_flops_per_token(L, D, T, false), causal = attention_flops_per_token(L, D, T, true);
  const double again = 2 * L * double(p.attention + p.mlp);
  heading("FLOPs of one trained token (forward 1, backward 2)");
  row("weights", short_number(6 * N), "6 N, N = " + with_commas(int64_t(N)) +
      (not_multiplied ? gpt ? ", without the positions" : ", without the input embedding" : ""));
  row("full attention", short_number(full), "12 L D T");
  row("causal attention", short_number(causal), "6 L D T");
  row("weights and full attention", short_number(6 * N + full), "counting all parameters: " +
      short_number(6 * N + counted + full));
  row("weights and causal attention", short_number(6 * N + causal), "counting all parameters: " +
      short_number(6 * N + counted + causal));
  row("full attention / weights", format("%.1f %%", 100 * full / (6 * N)));
  row("with full recomputation, causal", short_number(6 * N + causal + again + causal / 3),
      "one more forward of the layers");
}

void print_layer_flops(const ModelConfig& c, bool gpt, double b) {
  const double N = b * c.seq;
  heading("FLOPs of one layer, forward");
  if (gpt) {
    row("full attention", short_number(gpt_layer_forward_flops(b, c.seq, c.dim)), "24 b s h h + 4 b s s h");
    return;
  }
  row("full attention", short_number(block_forward_flops(c, N, false)), "2 N (2 D D + 2 D K + 3 D F) + 4 N T D");
  row("causal attention", short_number(block_forward_flops(c, N, true)), "half of the last term");
}

void print_states(double Psi, double gpus) {
  heading("training state: bytes per parameter as weights + gradients + optimizer");
  for (const StateBytes& s : kTrainingStates)
    row(s.name, gb(Psi * s.all()), format("%d + %d + %d = %d", s.weights, s.gradients, s.optimizer, s.all()));
  row("the optimizer's part of bf16", gb(Psi * 12), "4 master + 4 m + 4 v");
  row("weights alone in bf16", gb(Psi * 2), "what inference loads");
  row("checkpoint to resume from", gb(Psi * 12), "master, m, v; the bf16 weights are the master, rounded");
  if (gpus > 1)
    for (int stage = 0; stage <= 3; ++stage)
      row(format("a GPU of %.0f, %s", gpus, stage ? format("ZeRO-%d", stage).c_str() : "plain DDP"),
          gb(Psi * zero_bytes_per_parameter(stage, gpus)),
          stage == 0 ? "16" : stage == 1 ? "4 + 12/d" : stage == 2 ? "2 + 14/d" : "16/d");
}

void print_activations(const ModelConfig& c, bool gpt, double b) {
  const double s = c.seq, h = c.dim, a = c.heads, L = c.layers;
  const int64_t N = int64_t(b * s);
  heading("activations kept for backward in bf16: one layer x layers");
  auto both = [&](const char* what, double bytes, const char* how) {
    const double unit = L * bytes < 1e8 ? 1e6 : 1e9;
    row(what, format("%.3f x %.0f = %.2f %s", bytes / unit, L, L * bytes / unit, unit == 1e6 ? "MB" : "GB"), how);
  };
  if (!gpt) {
    const double ours = double(block_activation_bytes(c, N, 2));
    both("ours: SwiGLU, no dropout", ours, "2 N (4D + 2A + 2K + 3F + H T) + 8 N");
    both("ours without the probabilities", ours - 2.0 * double(N) * a * s, "as with FlashAttention");
  }
  both("Megatron: GELU, dropout", megatron_layer_bytes(s, b, h, a), "s b h (34 + 5 a s / h)");
  both("Megatron, attention recomputed", megatron_layer_bytes(s, b, h, a, 1, false, Recomputed::attention), "34 s b h");
  both("whole layer recomputed", megatron_layer_bytes(s, b, h, a, 1, false, Recomputed::layer), "2 s b h, its input");
  heading("logits");
  row("fp32", gb(4 * b * s * c.vocab), "4 b s V");
  row("bf16", gb(2 * b * s * c.vocab), "2 b s V");
}

void print_training(double Psi, double per_token, const Job& job) {
  heading("training");
  auto time = [&](const char* what, double flops) {
    const double days = training_seconds(flops, job.gpus, job.peak, job.mfu) / 86400;
    row(what, format("%.1f days", days), format("%.0f GPU-hours, %.3g FLOPs", days * 24 * job.gpus, flops));
  };
  row("useful FLOP/s of a GPU", short_number(job.peak * job.mfu), format("%.3g of a peak of %sFLOP/s", job.mfu,
                                                                        short_number(job.peak).c_str()));
  time("6 Psi tokens", 6 * Psi * job.tokens);
  if (per_token > 0) time("6 N tokens and causal attention", per_token * job.tokens);
  time("8 Psi tokens: all recomputed", 8 * Psi * job.tokens);
}

// The sizes that --model names, then those given one by one.
int run(int argc, char** argv) {
  CLI::App app("estimate: parameters, FLOPs, bytes and days of a model, from the formulas of the notes");
  app.option_defaults()->always_capture_default();
  ModelConfig c;
  Job job;
  std::string name;
  double params = 0;
  bool gpt = false;
  for (int i = 1; i + 1 < argc; ++i)  // the preset first, so that the order of options does not matter
    if (std::string(argv[i]) == "--model") name = argv[i + 1];
  if (!name.empty()) {
    const Preset* found = nullptr;
    std::string names;
    for (const Preset& p : kPresets) {
      names += std::string(names.empty() ? "" : ", ") + p.name;
      if (name == p.name) found = &p;
    }
    if (!found) throw Error(format("--model %s is not one of %s", name.c_str(), names.c_str()));
    gpt = found->gpt;
    c.vocab = found->vocab, c.dim = found->dim, c.layers = found->layers, c.heads = found->heads;
    c.kv_heads = found->kv_heads, c.hidden = found->hidden, c.seq = found->seq;
  }
  app.add_option("--model", name, "llama-2-7b, llama-2-70b, llama-3-8b or gpt-3; without it, the lessons' model");
  app.add_option("--params", params, "instead of a model: only what follows from this many parameters");
  app.add_option("--vocab", c.vocab, "V: vocabulary, token ids")->group("Model");
  app.add_option("--dim", c.dim, "D: width of the residual stream, elements")->group("Model");
  app.add_option("--layers", c.layers, "L: transformer blocks")->group("Model");
  app.add_option("--heads", c.heads, "H: query heads")->group("Model");
  app.add_option("--kv-heads", c.kv_heads, "key and value heads")->group("Model");
  app.add_option("--hidden", c.hidden, "F: width of the MLP; 0: 8/3 of --dim, rounded up to 64")->group("Model");
  app.add_option("--seq", c.seq, "T: tokens of a sample")->group("Model");
  app.add_flag("--tied", c.tied, "share the table of embedding and head")->group("Model");
  app.add_option("--batch", job.batch, "samples of a micro-batch (activations, logits)")->group("Training");
  app.add_option("--tokens", job.tokens, "tokens to train on; 0: say nothing about time")->group("Training");
  app.add_option("--gpus", job.gpus, "GPUs; also the d of ZeRO")->group("Training");
  app.add_option("--peak", job.peak, "dense FLOP/s of a GPU")->group("Training");
  app.add_option("--mfu", job.mfu, "share of the peak that does model work, 0 to 1")->group("Training");
  app.add_option("--lora-rank", job.lora_rank, "also LoRA adapters of this rank on q and v")->group("Training");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  if (gpt) c.hidden = 4 * c.dim;
  if (c.hidden == 0) c.hidden = (c.dim * 8 / 3 + 63) / 64 * 64;
  ModelConfig one_layer = c;  // validate() refuses models too large to train here; estimating one is the point
  one_layer.layers = std::min(c.layers, 1);
  one_layer.validate();
  if (!(job.batch >= 1)) throw Error(format("--batch is %g; it must be at least 1", job.batch));
  if (!(job.gpus >= 0)) throw Error(format("--gpus is %g; it can't be negative", job.gpus));
  if (!(job.tokens >= 0)) throw Error(format("--tokens is %g; it can't be negative", job.tokens));
  if (job.tokens > 0 && !(job.gpus >= 1)) throw Error("--tokens needs --gpus, at least 1");
  if (!(job.peak > 0)) throw Error(format("--peak is %g; it must be above 0", job.peak));
  if (!(job.mfu > 0 && job.mfu <= 1)) throw Error(format("--mfu is %g; it must be above 0 and at most 1", job.mfu));
  if (!(params >= 0)) throw Error(format("--params is %g; it can't be negative", params));

  if (params > 0) {
    std::printf("%s parameters\n", short_number(params).c_str());
    print_states(params, job.gpus);
    if (job.tokens > 0) print_training(params, 0, job);
    return 0;
  }
  const ParameterParts parts = gpt ? gpt_parameter_parts(c.dim, c.vocab, c.seq) : parameter_parts(c);
  const double Psi = double(parts.all(c.layers));
  std::printf("%s: dim %d, %d layers, %d heads (%d kv), hidden %d, vocabulary %d, sequence %d, micro-batch %.0f\n",
              name.empty() ? "model" : name.c_str(), c.dim, c.layers, c.heads, c.kv_heads, c.hidden, c.vocab, c.seq,
              job.batch);
  print_parameters(parts, c.layers, gpt);
  print_flops(c, parts, gpt);
  print_layer_flops(c, gpt, job.batch);
  print_states(Psi, job.gpus);
  if (job.lora_rank > 0) {
    const int64_t adapters = lora_parameters(c, job.lora_rank);
    heading("LoRA on q and v");
    row("adapter parameters", with_commas(adapters), "L r (3 D + K)");
    row("their training state", gb(16.0 * double(adapters)), "16 bytes each");
    row("frozen base, bf16", gb(2 * Psi));
    row("frozen base, 4 bits", gb(0.5 * Psi), "and the scales");
  }
  print_activations(c, gpt, job.batch);
  const double positions = gpt ? 6.0 * c.seq * c.dim : 0;
  const double per_token = gpt ? 6 * Psi - positions + attention_flops_per_token(c.layers, c.dim, c.seq, true)
                               : c.flops_per_token();
  if (job.tokens > 0) print_training(Psi, per_token, job);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& wrong) {
    std::fprintf(stderr, "estimate: %s\n", wrong.what());
    return 1;
  }
}
