#include "params.h"

#include <algorithm>

#include "../kernels/kernels.h"
#include "parallel.h"
#include "random.h"

std::vector<Param> Params::describe(const ModelConfig& c) {
  const int64_t D = c.dim, F = c.hidden, kv = int64_t(c.kv_heads) * c.head_dim();
  std::vector<Param> all;
  auto matrix = [&](int unit, std::string name, int64_t rows, int64_t columns, Split split) {
    all.push_back({std::move(name), rows, columns, false, split, unit, {0, 0, rows}, 0, true});
  };
  auto norm = [&](int unit, std::string name) {
    all.push_back({std::move(name), 1, D, true, Split::none, unit, {0, 0, 1}, 0, true});
  };
  matrix(0, "model.embed_tokens.weight", c.vocab, D, Split::rows);
  for (int layer = 0; layer < c.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const int unit = layer + 1;
    norm(unit, prefix + "input_layernorm.weight");
    matrix(unit, prefix + "self_attn.q_proj.weight", D, D, Split::rows);
    matrix(unit, prefix + "self_attn.k_proj.weight", kv, D, Split::rows);
    matrix(unit, prefix + "self_attn.v_proj.weight", kv, D, Split::rows);
    matrix(unit, prefix + "self_attn.o_proj.weight", D, D, Split::columns);
    norm(unit, prefix + "post_attention_layernorm.weight");
    matrix(unit, prefix + "mlp.gate_proj.weight", F, D, Split::rows);
    matrix(unit, prefix + "mlp.up_proj.weight", F, D, Split::rows);
    matrix(unit, prefix + "mlp.down_proj.weight", D, F, Split::columns);
  }
  norm(c.head(), "model.norm.weight");
  if (!c.tied) matrix(c.head(), "lm_head.weight", c.vocab, D, Split::rows);
  return all;
}

float Params::initial_value(const Param& p, uint64_t seed, uint64_t name, int64_t global_index) {
  if (p.vector) return 1;
  return 0.02f * random_normal(seed, name, uint64_t(global_index));  // Hugging Face's initializer_range
}

Params::Params(const ModelConfig& config, Parallel& parallel, Device& device, uint64_t seed) : config_(config), device_(device) {
  std::vector<Param> all = describe(config);
  // A stage with the head but without the embedding needs a tied table too: a copy, stored with the head.
  if (config.tied && parallel.stage(0) < 0) {
    Param copy = all[0];
    copy.unit = config.head();
    all.push_back(std::move(copy));
  }
  for (Param& p : all) {
    if (parallel.stage(p.unit) < 0) continue;
    if (units_.empty() || units_.back().index != p.unit) {
      units_.emplace_back();
      units_.back().index = p.unit;
    }
    Unit& unit = units_.back();
    p.piece = parallel.piece(p);
    p.offset = unit.size;
    unit.size += p.local_size();
    unit.params.push_back(std::move(p));
  }
  gradients_on_host_ = parallel.storage(Memory::gradients) == Storage::shard_on_host;
  for (Unit& unit : units_) {
    unit.shard = parallel.shard();
    unit.padded = (unit.size + unit.shard.count - 1) / unit.shard.count * unit.shard.count;
    if (parallel.storage(Memory::parameters) == Storage::whole)
      unit.weights = device.allocate<real>(Memory::parameters, {unit.padded});
    else
      unit.weight_shard = device.allocate<real>(Memory::parameters, {unit.share()});
    if (parallel.storage(Memory::gradients) == Storage::whole) {
      unit.gradients = device.allocate<real>(Memory::gradients, {unit.padded});
      // Padding is never read by the model, but collectives carry it.
      fill(unit.gradients.data, 0.f, unit.padded, device.stream());
    } else if (parallel.storage(Memory::gradients) == Storage::shard) {
      unit.gradient_shard = device.allocate<real>(Memory::gradients, {unit.share()});
    } else {
      unit.gradient_shard = device.allocate<real>(Memory::host, {unit.share()});
    }
    // Only what is stored is made, so that a rank never holds a whole model that it will not keep.
    const int64_t from = unit.weights ? 0 : unit.begin(), to = unit.weights ? unit.padded : unit.end();
    std::vector<real> values(to - from, real(0.f));
    for (const Param& p : unit.params) {
      const uint64_t name = hash_name(p.name);
      for (int64_t i = std::max(from, p.offset); i < std::min(to, p.offset + p.local_size()); ++i)
        values[i - from] = real(initial_value(p, seed, name, p.global_index(i - p.offset)));
    }
    device.upload(unit.weights ? unit.weights.data : unit.weight_shard.data, values.data(), to - from);
    if (parallel.storage(Memory::optimizer) == Storage::shard_on_host) {  // the host updates its own copy of the shard
      unit.weight_shard = device.allocate<real>(Memory::host, {unit.share()});
      std::copy_n(values.data() + unit.begin(), unit.share(), unit.weight_shard.data);
    }
  }
}

bool Params::has_unit(int index) const {
  return std::any_of(units_.begin(), units_.end(), [=](const Unit& u) { return u.index == index; });
}

Unit& Params::unit(int index) {
  for (Unit& unit : units_)
    if (unit.index == index) return unit;
  throw Error(format("unit %d of the model is not on this rank", index));
}

Param* Params::find(const std::string& name) {
  for (Unit& unit : units_)
    for (Param& p : unit.params)
      if (p.name == name) return &p;
  return nullptr;
}

int64_t Params::local_size() const {
  int64_t size = 0;
  for (const Unit& unit : units_) size += unit.size;
  return size;
}

Tensor Params::weight(const Param& p) {
  Unit& u = unit(p.unit);
  if (!u.weights) throw Error(format("%s is used while unit %d is not gathered; open() it first", p.name.c_str(), u.index));
  return {u.weights.data + p.offset, {p.local_rows(), p.local_columns()}};
}

Tensor Params::gradient(const Param& p) {
  Unit& u = unit(p.unit);
  if (!u.gradients) throw Error(format("the gradient of %s is used while unit %d is not open", p.name.c_str(), u.index));
  return {u.gradients.data + p.offset, {p.local_rows(), p.local_columns()}};
}

float Params::accumulate(Param& p) {
  const float beta = p.fresh ? 0.f : 1.f;
  p.fresh = false;
  return beta;
}

void Params::start_step() {
  for (Unit& unit : units_)
    for (Param& p : unit.params) p.fresh = true;
}

namespace {
std::vector<float> to_floats(Device& device, Tensor t) {
  std::vector<real> stored(t.numel());
  device.download(stored.data(), t.data, t.numel());
  return {stored.begin(), stored.end()};
}
}  // namespace

std::vector<float> Params::weight_to_host(const Param& p) {
  Part part = stored_weight(p);
  if (int64_t(part.values.size()) != p.local_size())
    throw Error(format("%s is wanted whole, and this rank stores %zu of its %lld elements", p.name.c_str(),
                       part.values.size(), (long long)p.local_size()));
  return std::move(part.values);
}
std::vector<float> Params::gradient_to_host(const Param& p) { return to_floats(device_, gradient(p)); }

Params::Part Params::to_host(const Param& p, Tensor stretch, int64_t begin, bool on_host) {
  const int64_t from = std::max(begin, p.offset), to = std::min(begin + stretch.numel(), p.offset + p.local_size());
  if (to <= from) return {0, {}};
  std::vector<real> stored(to - from);
  if (on_host) std::copy_n(stretch.data + (from - begin), to - from, stored.data());
  else device_.download(stored.data(), stretch.data + (from - begin), to - from);
  return {from - p.offset, {stored.begin(), stored.end()}};
}

Params::Part Params::stored_weight(const Param& p) {
  Unit& u = unit(p.unit);
  return u.weights ? to_host(p, u.weights, 0) : to_host(p, u.my_weights(), u.begin());
}

Params::Part Params::updated_gradient(const Param& p) {
  Unit& u = unit(p.unit);
  return to_host(p, u.my_gradients(), u.begin(), gradients_on_host_);
}

void Params::set_weight(Param& p, const std::vector<float>& whole) {
  if (int64_t(whole.size()) != p.rows * p.columns)
    throw Error(format("%s has %zu values, the model wants %lld x %lld", p.name.c_str(), whole.size(),
                       (long long)p.rows, (long long)p.columns));
  std::vector<real> values(p.local_size());
  for (int64_t i = 0; i < p.local_size(); ++i) values[i] = real(whole[p.global_index(i)]);
  Unit& u = unit(p.unit);
  if (u.weights) device_.upload(weight(p).data, values.data(), int64_t(values.size()));
  if (!u.weight_shard) return;
  const int64_t from = std::max(u.begin(), p.offset), to = std::min(u.end(), p.offset + p.local_size());
  if (to <= from) return;
  real* const shard = u.weight_shard.data + (from - u.begin());
  if (u.weights) std::copy_n(values.data() + (from - p.offset), to - from, shard);  // the host's copy
  else device_.upload(shard, values.data() + (from - p.offset), to - from);
}
