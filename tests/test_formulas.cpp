// Golden values: figures that are asked for in interviews, worked out by hand or printed in the papers named.
#include "../src/formulas.h"

#include <doctest/doctest.h>

#include <cmath>

namespace {

ModelConfig llama(int vocab, int dim, int layers, int heads, int kv_heads, int hidden, int seq) {
  ModelConfig c;
  c.vocab = vocab, c.dim = dim, c.layers = layers, c.heads = heads, c.kv_heads = kv_heads, c.hidden = hidden;
  c.seq = seq;
  return c;
}
const ModelConfig llama_2_7b = llama(32000, 4096, 32, 32, 32, 11008, 4096);
const ModelConfig llama_3_8b = llama(128256, 4096, 32, 32, 8, 14336, 8192);
constexpr double day = 86400;

// Within half a unit of the last digit that is given.
bool about(double value, double given, double unit) { return std::abs(value - given) <= 0.5 * unit * 1.000001; }

}  // namespace

TEST_CASE("formulas: parameters of a Llama by part") {
  CHECK(llama_2_7b.parameters() == 6738415616);
  CHECK(llama_3_8b.parameters() == 8030261248);
  const ParameterParts seven = parameter_parts(llama_2_7b), eight = parameter_parts(llama_3_8b);
  CHECK(seven.block() == 202383360);
  CHECK(about(eight.attention / 1e6, 41.94, 0.01));  // 33.55 + 8.39
  CHECK(about(eight.mlp / 1e6, 176.16, 0.01));
  CHECK(about(eight.block() / 1e6, 218.1, 0.1));
  CHECK(about((eight.embedding + eight.head) / 1e9, 1.05, 0.01));
  ModelConfig tied = llama_3_8b;
  tied.tied = true;
  for (const ModelConfig& c : {llama_2_7b, llama_3_8b, tied, llama(7, 12, 3, 6, 2, 5, 4)})
    CHECK(parameter_parts(c).all(c.layers) == c.parameters());
}

TEST_CASE("formulas: parameters of GPT-3 and MT-NLG") {
  const ParameterParts gpt = gpt_parameter_parts(12288, 50257, 2048);
  CHECK(gpt.block() == 12LL * 12288 * 12288 + 13 * 12288);
  CHECK(gpt.all(96) == 174604259328);
  CHECK(about(96.0 * (gpt.attention + gpt.mlp) / 1e9, 174.0, 0.1));
  CHECK(about(12.0 * 96 * 12288 * 12288 / 1e9, 173.9, 0.1));
  CHECK(about(12.0 * 105 * 20480 * 20480 / 1e9, 528, 1));
}

TEST_CASE("formulas: FLOPs of a token") {
  const double attention = attention_flops_per_token(32, 4096, 4096, false), table = 6.0 * 32000 * 4096;
  const double causal = llama_2_7b.flops_per_token(), full = causal + attention / 2;
  CHECK(about(full / 1e9, 46.09, 0.01));
  CHECK(about(causal / 1e9, 42.87, 0.01));
  CHECK(about((full + table) / 1e9, 46.87, 0.01));
  CHECK(about((causal + table) / 1e9, 43.65, 0.01));
  // A layer: forward, times three, is what flops_per_token counts for it.
  ModelConfig fewer = llama_2_7b;
  fewer.layers = 31;
  const double norms = 6 * 2 * 4096;  // 6 N counts the norms' weights too; a product they are not
  CHECK(3 * block_forward_flops(llama_2_7b, 1, true) + norms == causal - fewer.flops_per_token());
}

TEST_CASE("formulas: Megatron's FLOPs of an iteration, with and without recomputation") {
  const double B = 1536, s = 2048, L = 96, h = 12288, V = 51200, logits = 6 * B * s * h * V;
  const double forward = L * gpt_layer_forward_flops(B, s, h);
  CHECK(megatron_iteration_flops(B, s, L, h, V, false) == doctest::Approx(3 * forward + logits).epsilon(1e-12));
  CHECK(megatron_iteration_flops(B, s, L, h, V, true) == doctest::Approx(4 * forward + logits).epsilon(1e-12));
  // Attention's two products are s/(6h) of the rest: a sixth at s = h.
  CHECK(gpt_layer_forward_flops(1, h, h) / (24 * h * h * h) == doctest::Approx(1 + 1.0 / 6));
}

TEST_CASE("formulas: bytes of training state") {
  CHECK(kTrainingStates[0].all() == 16);
  CHECK(kTrainingStates[1].all() == 16);
  CHECK(kTrainingStates[2].all() == 18);
  CHECK(7e9 * 16 == 112e9);
  CHECK(70e9 * 16 == 1120e9);
  const double golden[] = {120, 31.4, 16.6, 1.9};  // 7.5e9 parameters on 64 ranks (arXiv:1910.02054, figure 1)
  for (int stage = 0; stage <= 3; ++stage)
    CHECK(about(7.5 * zero_bytes_per_parameter(stage, 64), golden[stage], 0.1));
  CHECK(7 * zero_bytes_per_parameter(1, 8) == 38.5);  // 7B on eight GPUs
  CHECK(7 * zero_bytes_per_parameter(2, 8) == 26.25);
  CHECK(7 * zero_bytes_per_parameter(3, 8) == 14);
  CHECK(70 * zero_bytes_per_parameter(3, 8) == 140);
  CHECK(70 * zero_bytes_per_parameter(3, 16) == 70);
  CHECK(about(16 / zero_bytes_per_parameter(1, 8), 2.91, 0.01));
  CHECK(about(16 / zero_bytes_per_parameter(2, 8), 4.27, 0.01));
}

TEST_CASE("formulas: activations of a GPT-3 layer") {
  const double s = 2048, b = 1, h = 12288, a = 96;
  auto gb = [&](double t, bool sp, Recomputed r) { return megatron_layer_bytes(s, b, h, a, t, sp, r) / 1e9; };
  CHECK(about(megatron_layer_bytes(s, b, h, a) / 1e9, 2.869, 0.001));
  CHECK(gb(1, false, Recomputed::nothing) == megatron_layer_bytes(s, b, h, a) / 1e9);
  CHECK(about(gb(8, false, Recomputed::nothing), 0.579, 0.001));
  CHECK(about(gb(8, true, Recomputed::nothing), 0.359, 0.001));
  CHECK(about(gb(8, true, Recomputed::attention), 0.107, 0.001));
  CHECK(about(gb(8, true, Recomputed::layer), 0.050, 0.001));
}

TEST_CASE("formulas: activations of a 7B model") {
  auto all = [&](double s, Recomputed r) { return 32 * megatron_layer_bytes(s, 1, 4096, 32, 1, false, r) / 1e9; };
  CHECK(about(all(4096, Recomputed::nothing), 104, 1));
  CHECK(about(all(4096, Recomputed::attention), 18.3, 0.1));
  CHECK(about(all(4096, Recomputed::layer), 1.07, 0.01));
  CHECK(about(all(1024, Recomputed::nothing), 9.9, 0.1));
  CHECK(about(all(1024, Recomputed::attention), 4.6, 0.1));
  CHECK(32 * megatron_layer_bytes(1024, 1, 4096, 32, 1, false, Recomputed::layer) == 256.0 * (1 << 20));
  CHECK(about(4.0 * 4096 * 128256 / 1e9, 2.1, 0.1));  // the logits of Llama-3-8B, fp32, one sample
}

TEST_CASE("formulas: how long training takes") {
  CHECK(about(training_seconds(8 * 175e9 * 300e9, 1024, 140e12, 1) / day, 34, 1));
  CHECK(about(training_seconds(6 * 70e9 * 15e12, 1024, 400e12, 1) / day, 178, 1));
  const double seconds = training_seconds(6 * 7e9 * 1e12, 64, 989e12, 0.4);
  CHECK(about(seconds / day, 19.2, 0.1));
  CHECK(about(seconds * 64 / 3600, 29500, 100));
  CHECK(about(training_seconds(6 * 7e9 * 1e12, 1, 1e15, 1) / 3600, 11667, 1));
  CHECK(about(100 * 6 * 7e9 * 1e4 / 989e12, 42.5, 0.1));  // 7B at 10,000 tokens/s on one H100: the MFU
}

TEST_CASE("formulas: checkpoints and LoRA") {
  CHECK(70e9 * 2 == 140e9);
  CHECK(70e9 * 12 / 20e9 == 42);        // seconds at 20 GB/s: master, m and v
  CHECK(70e9 * 14 / 20e9 == 49);        // and the bf16 weights
  CHECK(70e9 * 12 / 2e9 / 60 == 7);     // minutes, one writer of 2 GB/s
  CHECK(lora_parameters(llama_2_7b, 16) == 8388608);
  CHECK(about(16 * 8388608 / 1e9, 0.13, 0.01));
}
