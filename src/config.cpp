#include "config.h"

#include <CLI/CLI.hpp>
#include <cmath>

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
  for (auto [name, value] : sizes)
    if (value < 1) throw Error(format("%s is %d; it must be at least 1", name, value));
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

void Options::validate() const {
  model.validate();
  if (steps < 1) throw Error(format("--steps is %lld; it must be at least 1", (long long)steps));
  if (batch < 1) throw Error(format("--batch is %d; it must be at least 1 sample", batch));
  if (micro_batches < 1) throw Error(format("--micro-batches is %d; it must be at least 1", micro_batches));
  if (micro_batches > batch)
    throw Error(format("--micro-batches %d is more than the %d samples of --batch; each part needs a sample",
                       micro_batches, batch));
  if (int64_t(batch) * model.seq > (1 << 26))
    throw Error(format("--batch %d x --seq %d is %lld tokens a step; at most %d", batch, model.seq,
                       (long long)batch * model.seq, 1 << 26));
  if (!(lr > 0) || !std::isfinite(lr)) throw Error(format("--lr is %g; it must be above 0", lr));
  if (warmup < 0) throw Error(format("--warmup is %lld; it can't be negative", (long long)warmup));
  if (!(weight_decay >= 0)) throw Error(format("--weight-decay is %g; it can't be negative", weight_decay));
  if (!(clip >= 0)) throw Error(format("--clip is %g; it can't be negative (0: no clipping)", clip));
  if (sample < 0) throw Error(format("--sample is %d; it can't be negative", sample));
  if (log_every < 1) throw Error(format("--log-every is %lld; it must be at least 1", (long long)log_every));
}

Options parse_options(int argc, char** argv, const std::string& title, Options o) {
  CLI::App app(title);
  app.option_defaults()->always_capture_default();
  bool no_proof = !o.proof;
  app.add_option("--data", o.data, "text file (bytes, vocabulary 256) or llm.c token file")->group("Data");
  app.add_option("--save", o.save, "folder to write at the end: safetensors and config.json, Hugging Face names");
  app.add_option("--load", o.load, "folder to continue from, as --save wrote it");
  app.add_option("--seed", o.seed, "seed of the initial weights and of the order of the data");
  auto* vocab = app.add_option("--vocab", o.model.vocab, "vocabulary, token ids (256 for text)")->group("Model");
  app.add_option("--dim", o.model.dim, "D: width of the residual stream, elements")->group("Model");
  app.add_option("--layers", o.model.layers, "L: transformer blocks")->group("Model");
  app.add_option("--heads", o.model.heads, "query heads; must divide --dim")->group("Model");
  app.add_option("--kv-heads", o.model.kv_heads, "key and value heads; must divide --heads")->group("Model");
  app.add_option("--hidden", o.model.hidden, "F: width of the MLP; 0: 8/3 of --dim, rounded up to 64")->group("Model");
  app.add_option("--seq", o.model.seq, "T: tokens of a sample")->group("Model");
  app.add_flag("--tied", o.model.tied, "share the table of embedding and head")->group("Model");
  app.add_option("--steps", o.steps, "optimizer steps; a run continued with --load ends at this step too")
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
  app.add_flag("--no-proof", no_proof, "skip the proof (it trains a second time, as the reference)")->group("Output");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    std::exit(app.exit(help));
  } catch (const CLI::ParseError& wrong) {
    throw Error(std::string(wrong.what()) + "; --help lists the options");
  }
  o.proof = !no_proof;
  o.vocab_given = vocab->count() > 0;
  if (o.model.hidden == 0) o.model.hidden = (o.model.dim * 8 / 3 + 63) / 64 * 64;
  o.validate();
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
    try {
      return std::stod(value);
    } catch (const std::exception&) {
      throw Error(format("%s: \"%s\" is %s, not a number", path.c_str(), key, value.c_str()));
    }
  };
  ModelConfig c;
  c.vocab = int(number("vocab_size"));
  c.dim = int(number("hidden_size"));
  c.hidden = int(number("intermediate_size"));
  c.layers = int(number("num_hidden_layers"));
  c.heads = int(number("num_attention_heads"));
  c.kv_heads = int(number("num_key_value_heads"));
  c.seq = int(number("max_position_embeddings"));
  c.norm_eps = float(number("rms_norm_eps"));
  c.rope_theta = number("rope_theta");
  c.tied = text("tie_word_embeddings") == "true";
  c.validate();
  return c;
}
