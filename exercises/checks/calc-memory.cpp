#include "../harness/check.h"

TEST_CASE("ZeRO's golden numbers: 7.5e9 parameters, d=64: 120, 31.4, 16.6, 1.9 GB") {
  struct Row { double parameters; int d; std::vector<float> want; };
  for (const Row& row : {Row{7.5e9, 64, {120, 31.40625f, 16.640625f, 1.875f}}, Row{1e9, 8, {16, 5.5f, 3.75f, 2}}, Row{1e9, 1, {16, 16, 16, 16}}}) {
    Check check(1, format("%g parameters on %d ranks, bf16 with fp32 master and Adam", row.parameters, row.d),
                "2 + 2 + 12 bytes; ZeRO-1 4 + 12/d, ZeRO-2 2 + 14/d, ZeRO-3 16/d");
    check.name_values({"GB without ZeRO", "GB with ZeRO-1", "GB with ZeRO-2", "GB with ZeRO-3"});
    check.tolerance(1e-5);
    check.call([&] {
      std::vector<float> got;
      for (int stage = 0; stage < 4; ++stage) got.push_back(float(state_bytes(stage, row.parameters, row.d) / 1e9));
      return got;
    });
    check.want(row.want);
    const float per = check.got(0) / float(row.parameters / 1e9);
    check.likely(per == 12, "the fp32 master copy of the weights is missing: Adam in mixed precision keeps 12 bytes, not 8");
    check.likely(per > 16.5, "16 is a number of bytes already, not elements");
    check.likely(check.got(0, 1) < row.want[1] - 0.01f, "sharded is not gone: the share of 1/d is left on each rank");
    check.likely(check.got(0, 2) > row.want[2] + 0.01f, "ZeRO-2 shards the gradients too");
    check.verdict();
  }
}

TEST_CASE("activations of a GPT-3 layer: 2.869, 0.579 (t=8), 0.359 GB (and sequence parallel)") {
  struct Row { double t; bool sp; float gb; };
  for (const Row& row : {Row{1, false, 2.869f}, Row{8, false, 0.579f}, Row{8, true, 0.359f}}) {
    Check check(1, format("s=2048 b=1 h=12288 a=96 t=%g%s", row.t, row.sp ? ", sequence parallel" : ""),
                "s b h (10 + 24/t + 5as/(ht)); with sequence parallelism s b h / t (34 + 5as/h)");
    check.name_values({"GB"});
    check.tolerance(2e-3);
    check.call([&] { return std::vector<float>{float(layer_activation_bytes(2048, 1, 12288, 96, row.t, row.sp) / 1e9)}; });
    check.want({row.gb});
    check.likely(row.t == 8 && !row.sp && check.got(0) < 0.4f, "without sequence parallelism 10 sbh stay whole: norms, dropout and inputs");
    check.likely(check.got(0) < row.gb / 2, "the attention's scores are missing: 5 a s / h, 80 of 114 here");
    check.verdict();
  }
}

TEST_CASE("KV cache: 512 KiB per token for Llama-2-7B; 4 GiB for 4 sequences of 2048") {
  struct Row { double layers, heads, dim, tokens, bytes, mib; };
  for (const Row& row : {Row{32, 32, 128, 1, 2, 0.5}, Row{32, 32, 128, 8192, 2, 4096}, Row{32, 8, 128, 1, 2, 0.125}, Row{80, 8, 128, 1, 1, 0.15625}}) {
    Check check(1, format("%g layers, %g kv heads of %g, %g token%s, %g byte%s an element", row.layers, row.heads, row.dim, row.tokens,
                          row.tokens > 1 ? "s" : "", row.bytes, row.bytes > 1 ? "s" : ""), "2 (keys and values) x layers x kv heads x head size x tokens x bytes");
    check.name_values({"MiB"});
    check.tolerance(1e-6);
    check.call([&] { return std::vector<float>{float(kv_cache_bytes(row.layers, row.heads, row.dim, row.tokens, row.bytes) / (1 << 20))}; });
    check.want({float(row.mib)});
    const bool half = std::abs(check.got(0) * 2 - row.mib) < 1e-6 * row.mib;
    bool twos = false;  // with 2 bytes an element, half can be either; the one-byte case tells
    try {
      twos = kv_cache_bytes(1, 1, 1, 1, 4) == 2;
    } catch (const std::exception&) {
    }
    check.likely(half && twos, "these are elements, not bytes");
    check.likely(half, "half of it: keys and values are both kept");
    check.verdict();
  }
}
