#include "config.h"

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <tuple>

#include "error.h"

int64_t ModelConfig::parameters() const {
  const int64_t D = dim, F = hidden, V = vocab, kv = int64_t(head_dim()) * kv_heads;
  const int64_t block = 2 * D * D + 2 * D * kv + 3 * D * F + 2 * D;
  return (tied ? 1 : 2) * V * D + layers * block + D;
}

double ModelConfig::flops_per_token() const {
  const double input_embedding = tied ? 0 : double(vocab) * dim;  // a tied table works once, as the head
  return 6 * (double(parameters()) - input_embedding) + 6.0 * layers * dim * seq;
}

void ModelConfig::validate() const {
  const std::pair<const char*, int> sizes[] = {{"--vocab", vocab},   {"--dim", dim},           {"--layers", layers},
                                               {"--heads", heads},   {"--kv-heads", kv_heads}, {"--hidden", hidden},
                                               {"--seq", seq}};
  for (auto [name, value] : sizes) {
    if (value < 1) throw Error(format("%s is %d; it must be at least 1", name, value));
    if (value > 1000000) throw Error(format("%s is %d; it can be at most 1000000", name, value));
  }
  if (dim % heads)
    throw Error(format("--dim %d is not a multiple of --heads %d; every head needs the same size", dim, heads));
  if (heads % kv_heads)
    throw Error(format("--heads %d is not a multiple of --kv-heads %d; each key head serves the same number of "
                       "query heads", heads, kv_heads));
  if (head_dim() % 2)
    throw Error(format("the head size is %d (--dim %d / --heads %d); rotary positions pair its elements, so it must "
                       "be even", head_dim(), dim, heads));
  const double gib = double(parameters()) * 16 / (1 << 30);
  if (gib > 4096)
    throw Error(format("this model has %.3g parameters, %.0f GiB of training state; choose smaller sizes",
                       double(parameters()), gib));
}

float Options::learning_rate(int64_t step) const {
  if (step < warmup) return lr * float(step + 1) / float(warmup);
  const double done = steps > warmup ? double(step - warmup) / double(steps - warmup) : 1;
  const double pi = 3.14159265358979323846;
  return float(lr * (0.1 + 0.45 * (1 + std::cos(pi * std::min(done, 1.0)))));
}

void Options::adopt(const ModelConfig& saved, const std::string& where) {
  const std::tuple<const char*, const char*, int ModelConfig::*> sizes[] = {
      {"--vocab", "vocab_size", &ModelConfig::vocab},
      {"--dim", "hidden_size", &ModelConfig::dim},
      {"--layers", "num_hidden_layers", &ModelConfig::layers},
      {"--heads", "num_attention_heads", &ModelConfig::heads},
      {"--kv-heads", "num_key_value_heads", &ModelConfig::kv_heads},
      {"--hidden", "intermediate_size", &ModelConfig::hidden}};
  for (auto [name, key, size] : sizes)
    if (given.count(name) && model.*size != saved.*size)
      throw Error(format("%s %d contradicts %s, where %s is %d; leave %s out", name, model.*size, where.c_str(), key,
                         saved.*size, name));
  if (given.count("--tied") && model.tied != saved.tied)
    throw Error(format("--tied%s contradicts %s, where tie_word_embeddings is %s; leave --tied out",
                       model.tied ? "" : "=false", where.c_str(), saved.tied ? "true" : "false"));
  const int seq = given.count("--seq") ? model.seq : saved.seq;
  model = saved;
  model.seq = seq;
}

void Options::validate() const {
  model.validate();
  if (steps < 1 || steps > 100000000)
    throw Error(format("--steps is %lld; it must be from 1 to 100000000", (long long)steps));
  if (batch < 1) throw Error(format("--batch is %d; it must be at least 1 sample", batch));
  if (micro_batches < 1) throw Error(format("--micro-batches is %d; it must be at least 1", micro_batches));
  if (micro_batches > batch)
    throw Error(format("--micro-batches %d is more than the %d samples of --batch; each part needs a sample",
                       micro_batches, batch));
  if (int64_t(batch) * model.seq > (1 << 26))
    throw Error(format("--batch %d x --seq %d is %lld tokens a step; at most %d", batch, model.seq,
                       (long long)batch * model.seq, 1 << 26));
  if (!(lr > 0) || !std::isfinite(lr)) throw Error(format("--lr is %g; it must be a finite number above 0", lr));
  if (warmup < 0) throw Error(format("--warmup is %lld; it can't be negative", (long long)warmup));
  if (!(weight_decay >= 0) || !std::isfinite(weight_decay))
    throw Error(format("--weight-decay is %g; it must be a finite number, 0 or more", weight_decay));
  if (!(clip >= 0)) throw Error(format("--clip is %g; it must be 0 or more (0: no clipping)", clip));
  if (sample < 0) throw Error(format("--sample is %d; it can't be negative", sample));
  if (stop_after < 0 || stop_after > steps)
    throw Error(format("--stop-after is %lld; it must be from 1 to --steps %lld, or 0: the end", (long long)stop_after,
                       (long long)steps));
  if (world.threads < 1 || world.threads > 255)
    throw Error(format("--threads is %d; choose 1 to 255 ranks", world.threads));
  if (!(pace >= 0 && pace <= 100)) throw Error(format("--pace is %g; it must be from 0 (off) to 100 ms", pace));
  if (!(world.timeout > 0)) throw Error(format("--timeout is %g; it must be above 0 seconds", world.timeout));
  if (world.streams != "eager" && world.streams != "lazy" && world.streams != "ahead")
    throw Error(format("--streams is %s; choose eager, lazy or ahead", world.streams.c_str()));
  if (log_every < 1) throw Error(format("--log-every is %lld; it must be at least 1", (long long)log_every));
  const std::pair<const char*, const std::string&> paths[] = {{"--save", save}, {"--load", load}, {"--logits", logits}};
  for (auto& [name, path] : paths)
    if (given.count(name) && path.empty()) throw Error(format("%s is empty; give a path, or leave it out", name));
}

Options parse_options(int argc, char** argv, const std::string& title, Options o) {
  CLI::App app(title);
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  bool no_proof = !o.proof;
  app.add_option("--data", o.data, "text file (bytes, vocabulary 256) or llm.c token file")->group("Data");
  app.add_option("--save", o.save, "folder to write at the end: safetensors and config.json, Hugging Face names")
      ->group("Data");
  app.add_option("--load", o.load, "folder to continue from, as --save wrote it; it gives the sizes of the model")
      ->group("Data");
  app.add_option("--seed", o.seed, "seed of the initial weights and of the order of the data")->group("Data");
  app.add_option("--vocab", o.model.vocab, "vocabulary, token ids; left out: what the data need")->group("Model");
  app.add_option("--dim", o.model.dim, "D: width of the residual stream, elements")->group("Model");
  app.add_option("--layers", o.model.layers, "L: transformer blocks")->group("Model");
  app.add_option("--heads", o.model.heads, "query heads; must divide --dim")->group("Model");
  app.add_option("--kv-heads", o.model.kv_heads, "key and value heads; must divide --heads")->group("Model");
  app.add_option("--hidden", o.model.hidden, "F: width of the MLP; 0: 8/3 of --dim, rounded up to 64")->group("Model");
  app.add_option("--seq", o.model.seq, "T: tokens of a sample")->group("Model");
  app.add_flag("--tied", o.model.tied, "share the table of embedding and head")->group("Model");
  app.add_option("--steps", o.steps, "optimizer steps; a run continued with --load ends at this step too")
      ->group("Training");
  app.add_option("--stop-after", o.stop_after,
                 "step to stop at (and --save), to go on with --load and the same --steps; 0: at --steps")
      ->group("Training");
  app.add_option("--batch", o.batch, "samples of the global batch")->group("Training");
  app.add_option("--micro-batches", o.micro_batches, "parts of each rank's share of the batch, one after the other")
      ->group("Training");
  app.add_option("--lr", o.lr, "peak learning rate")->group("Training");
  app.add_option("--warmup", o.warmup, "steps of linear warm-up, then a cosine down to lr/10")->group("Training");
  app.add_option("--weight-decay", o.weight_decay, "AdamW's decay, not on norms")->group("Training");
  app.add_option("--clip", o.clip, "largest global gradient norm; 0: no clipping")->group("Training");
  app.add_option("--sample", o.sample, "tokens of text to generate at the end")->group("Output");
  app.add_option("--log-every", o.log_every, "steps between progress lines")->group("Output");
  app.add_option("--logits", o.logits, "file to write at the end: tokens and logits of a held-out batch, safetensors")
      ->group("Output");
  app.add_option("--trace", o.trace, "file to write the timeline of the first steps to: .json for Perfetto, or .svg")
      ->group("Output");
  app.add_flag("--no-proof", no_proof, "skip the proof (it trains a second time, as the reference)")->group("Output");
  app.add_option("--threads", o.world.threads, "ranks as threads of one process, unless mpiexec starts them")
      ->group("Ranks");
  app.add_option("--timeout", o.world.timeout, "seconds a rank may wait without a byte moving")->group("Ranks");
  app.add_option("--pace", o.pace,
                 "ms that each forward takes at least, a backward twice that, each of its halves as much; 0: off")
      ->group("Ranks");
  std::string link;
  app.add_option("--link", link, "simulated link, GB/s,us: bandwidth of each rank's two ports, latency of a message")
      ->group("Ranks");
#ifndef RINGTRON_CUDA
  app.add_option("--streams", o.world.streams,
                 "when streams of the simulated GPU run: eager (at once), lazy (as late as possible) or ahead (before "
                 "what is waited for); a missing event wait shows in one of the last two")
      ->group("Ranks");
#endif
  for (auto& [name, extra] : o.extra) app.add_option("--" + name, extra.value, extra.help)->group("This lesson");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    std::exit(app.exit(help));
  } catch (const CLI::ConversionError& wrong) {
    throw Error(std::string(wrong.what()) + ": not such a number, or too large; --help lists the options");
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  o.proof = !no_proof;
  if (!link.empty()) {
    char rest = 0;
    if (std::sscanf(link.c_str(), "%lf,%lf%c", &o.world.link_gbps, &o.world.link_us, &rest) != 2 ||
        !(o.world.link_gbps > 0) || !(o.world.link_us >= 0))
      throw Error(format("--link %s is not bandwidth,latency; for 0.1 GB/s and 50 us write --link 0.1,50", link.c_str()));
  }
  for (const CLI::Option* option : app.get_options()) {
    if (!option->count()) continue;
    const std::string name = option->get_name(), type = option->get_type_name(), value = option->results().back();
    o.given.insert(name);
    // CLI11 makes a number that is too large the largest there is, and wraps a negative one where none may be.
    errno = 0;
    if (type == "INT") std::strtoll(value.c_str(), nullptr, 0);
    if (type == "UINT") std::strtoull(value.c_str(), nullptr, 0);
    if (errno == ERANGE || (type == "UINT" && value.find('-') != std::string::npos))
      throw Error(format("%s %s is out of range; --help lists the options", name.c_str(), value.c_str()));
  }
  if (o.model.hidden == 0) {
    o.given.erase("--hidden");
    o.model.hidden = int((int64_t(o.model.dim) * 8 / 3 + 63) / 64 * 64);
  }
  return o;
}

std::string to_hugging_face(const ModelConfig& c) {
  return format(
      "{\n"
      "  \"architectures\": [\"LlamaForCausalLM\"],\n"
      "  \"model_type\": \"llama\",\n"
      "  \"vocab_size\": %d,\n  \"hidden_size\": %d,\n  \"intermediate_size\": %d,\n"
      "  \"num_hidden_layers\": %d,\n  \"num_attention_heads\": %d,\n  \"num_key_value_heads\": %d,\n"
      "  \"max_position_embeddings\": %d,\n  \"rms_norm_eps\": %.9g,\n  \"rope_theta\": %.17g,\n"
      "  \"tie_word_embeddings\": %s,\n  \"hidden_act\": \"silu\",\n"
      "  \"attention_bias\": false,\n  \"mlp_bias\": false,\n  \"initializer_range\": 0.02,\n"
      "  \"torch_dtype\": \"float32\",\n  \"bos_token_id\": null,\n  \"eos_token_id\": null\n}\n",
      c.vocab, c.dim, c.hidden, c.layers, c.heads, c.kv_heads, c.seq, double(c.norm_eps), c.rope_theta,
      c.tied ? "true" : "false");
}

ModelConfig from_hugging_face(const std::map<std::string, std::string>& fields, const std::string& path) {
  auto text = [&](const char* key) {
    auto it = fields.find(key);
    if (it == fields.end()) throw Error(format("%s has no \"%s\"; is it a Llama's config.json?", path.c_str(), key));
    return it->second;
  };
  auto number = [&](const char* key) {
    const std::string value = text(key);
    char* end = nullptr;
    const double number = std::strtod(value.c_str(), &end);
    if (end == value.c_str() || *end || !(number > 0) || !std::isfinite(number))
      throw Error(format("%s: \"%s\" is %s, not a number above 0", path.c_str(), key, value.c_str()));
    return number;
  };
  auto size = [&](const char* key) {
    const double value = number(key);
    if (value > INT32_MAX || value != std::floor(value))
      throw Error(format("%s: \"%s\" is %s, not a whole number that is a size", path.c_str(), key, text(key).c_str()));
    return int(value);
  };
  ModelConfig c;
  c.vocab = size("vocab_size");
  c.dim = size("hidden_size");
  c.hidden = size("intermediate_size");
  c.layers = size("num_hidden_layers");
  c.heads = size("num_attention_heads");
  c.kv_heads = size("num_key_value_heads");
  c.seq = size("max_position_embeddings");
  c.norm_eps = float(number("rms_norm_eps"));
  c.rope_theta = number("rope_theta");
  c.tied = text("tie_word_embeddings") == "true";
  try {
    c.validate();
  } catch (const Error& wrong) {
    throw Error(path + ": " + wrong.what());
  }
  // What else a config may ask for, and this Llama can't do.
  const std::pair<const char*, std::string> wanted[] = {
      {"model_type", "llama"},     {"hidden_act", "silu"},
      {"attention_bias", "false"}, {"mlp_bias", "false"},
      {"head_dim", std::to_string(c.head_dim())}};
  for (auto& [key, value] : wanted)
    if (auto it = fields.find(key); it != fields.end() && it->second != value)
      throw Error(format("%s: \"%s\" is %s, and only %s works here", path.c_str(), key, it->second.c_str(),
                         value.c_str()));
  return c;
}
