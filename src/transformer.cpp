#include "transformer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "../kernels/kernels.h"
#include "host.h"

std::vector<MicroBatch> micro_batches(Device& device, const GlobalBatch& batch, const View& view, int count) {
  const int samples = view.last_sample - view.first_sample, T = int(view.positions.size());
  if (samples < count)
    throw Error(format("this rank has %d of the %d samples of the batch, too few for %d micro-batches; raise --batch",
                       samples, batch.samples, count));
  std::vector<MicroBatch> parts;
  for (int m = 0; m < count; ++m) {
    const int first = view.first_sample + int(int64_t(samples) * m / count);
    const int last = view.first_sample + int(int64_t(samples) * (m + 1) / count);
    std::vector<int> tokens, targets;
    for (int sample = first; sample < last; ++sample)
      for (int position : view.positions) {
        tokens.push_back(batch.inputs[int64_t(sample) * batch.seq + position]);
        targets.push_back(batch.targets[int64_t(sample) * batch.seq + position]);
      }
    MicroBatch part;
    part.index = m;
    part.last = m + 1 == count;
    part.B = last - first;
    part.T = T;
    part.loss_factor = batch.valid_tokens ? 1.f / float(batch.valid_tokens) : 0.f;
    part.positions = view.positions;
    const std::vector<int> order = sort_order(tokens);
    auto to_device = [&](IntBuffer& buffer, const std::vector<int>& values) {
      buffer = device.allocate<int>(Memory::data, {int64_t(values.size())});
      device.upload(buffer.data, values.data(), int64_t(values.size()));
    };
    to_device(part.tokens, tokens);
    to_device(part.targets, targets);
    to_device(part.order, order);
    to_device(part.device_positions, view.positions);
    parts.push_back(std::move(part));
  }
  return parts;
}

Transformer::Transformer(const ModelConfig& config, Parallel& parallel, Device& device, uint64_t seed)
    : config_(config), parallel_(parallel), device_(device), params_(config, parallel, device, seed) {
  heads_ = config.heads, kv_heads_ = config.kv_heads, hidden_ = config.hidden;
  for (const Unit& unit : params_.units())
    for (const Param& p : unit.params) {  // how many heads are here follows from the pieces
      if (p.name.ends_with("q_proj.weight")) heads_ = int(p.local_rows() / config.head_dim());
      if (p.name.ends_with("k_proj.weight")) kv_heads_ = int(p.local_rows() / config.head_dim());
      if (p.name.ends_with("up_proj.weight")) hidden_ = p.local_rows();
    }
}

Transformer::Scratch Transformer::scratch(int64_t rows, int64_t columns) {
  return std::make_shared<Buffer>(device_.allocate<real>(Memory::workspace, {rows, columns}));
}

void Transformer::now_or(Later later, std::function<void()> work) {
  if (later) later->push_back(std::move(work));
  else work();
}

// ---- the embedding: x = table[tokens] ---------------------------------------------------------------------

Buffer Transformer::embedding_forward(const MicroBatch& mb) {
  Param& table = *params_.find("model.embed_tokens.weight");
  Buffer rows = device_.allocate<real>(Memory::activations, {mb.N(), config_.dim});
  ::embedding_forward(rows.data, params_.weight(table).data, mb.tokens.data, mb.N(), config_.dim,
                      int(table.piece.begin), int(table.local_rows()), device_.stream());
  Tensor x = parallel_.leave(rows);  // a split table gives partial rows
  if (x.data == rows.data && x.numel() == rows.numel()) return rows;
  Buffer mine = device_.allocate<real>(Memory::activations, {x[0], x[1]});
  CUDA_CHECK(cudaMemcpyAsync(mine.data, x.data, mine.bytes(), cudaMemcpyDeviceToDevice, device_.stream()));
  return mine;
}

void Transformer::embedding_backward(const MicroBatch& mb, Buffer dx, EmbeddingState& state, Half half) {
  Later later = half == Half::input ? &state.weight_half : nullptr;
  auto kept = std::make_shared<Buffer>(std::move(dx));
  now_or(later, [this, kept, &mb] {
    Param& table = *params_.find("model.embed_tokens.weight");
    Tensor dtable = params_.gradient(table);
    if (params_.accumulate(table) == 0) fill(dtable.data, 0.f, dtable.numel(), device_.stream());
    Tensor drows = parallel_.leave_backward(*kept);
    ::embedding_backward(dtable.data, drows.data, mb.tokens.data, mb.order.data, mb.N(), config_.dim,
                         int(table.piece.begin), int(table.local_rows()), device_.stream());
  });
}

// ---- a block: x = x + attention(norm(x)); x = x + mlp(norm(x)) ---------------------------------------------

FloatBuffer Transformer::rope_of(const MicroBatch& mb) {
  FloatBuffer table = device_.allocate<float>(Memory::workspace, {mb.T, config_.head_dim()});
  rope_table(table.data, mb.device_positions.data, mb.T, config_.head_dim(), config_.rope_theta, device_.stream());
  return table;
}

Attention Transformer::attention_of(const MicroBatch& mb, BlockState& s, Tensor out) {
  return {device_, mb.B, mb.T, heads_, kv_heads_, config_.head_dim(), s.q, s.k, s.v, out,
          mb.device_positions.data, mb.positions, std::move(s.probabilities)};
}

Buffer Transformer::block_forward(int unit, const MicroBatch& mb, Buffer x, BlockState& s) {
  const std::string prefix = "model.layers." + std::to_string(unit - 1) + ".";
  auto w = [&](const char* name) { return weight(prefix + name + ".weight"); };
  const auto stream = device_.stream();
  const int N = mb.N(), B = mb.B, T = mb.T, d = config_.head_dim(), R = int(x[0]), D = config_.dim;
  auto keep = [&](std::initializer_list<int64_t> shape) {
    return device_.allocate<real>(Memory::activations, shape);
  };
  s.input = std::move(x);  // (R, D)

  // Attention.
  s.norm1 = keep({R, D});
  s.rstd1 = device_.allocate<float>(Memory::activations, {R});
  rmsnorm_forward(s.norm1.data, s.rstd1.data, s.input.data, w("input_layernorm").data, R, D, config_.norm_eps,
                  stream);
  {
    Tensor h = parallel_.enter(s.norm1);  // (N, D)
    FloatBuffer rope = rope_of(mb);
    auto project = [&](Buffer& out, const char* name, int heads, const float* table) {
      out = keep({B, heads, T, d});
      Scratch flat = scratch(N, int64_t(heads) * d);
      device_.linear(*flat, h, w(name));
      split_heads(out.data, flat->data, table, B, T, heads, d, stream);
    };
    project(s.q, "self_attn.q_proj", heads_, rope.data);
    project(s.k, "self_attn.k_proj", kv_heads_, rope.data);
    project(s.v, "self_attn.v_proj", kv_heads_, nullptr);
  }
  s.attention = keep({N, int64_t(heads_) * d});
  {
    Scratch out = scratch(N, int64_t(heads_) * d);
    Attention a = attention_of(mb, s, *out);
    parallel_.attention(a);
    s.probabilities = std::move(a.probabilities);
    merge_heads(s.attention.data, out->data, nullptr, B, T, heads_, d, stream);
  }
  s.middle = keep({R, D});
  {
    Scratch y = scratch(N, D);
    device_.linear(*y, s.attention, w("self_attn.o_proj"));
    add(s.middle.data, s.input.data, parallel_.leave(*y).data, int64_t(R) * D, stream);
  }

  // MLP.
  s.norm2 = keep({R, D});
  s.rstd2 = device_.allocate<float>(Memory::activations, {R});
  rmsnorm_forward(s.norm2.data, s.rstd2.data, s.middle.data, w("post_attention_layernorm").data, R, D,
                  config_.norm_eps, stream);
  s.gate = keep({N, hidden_}), s.up = keep({N, hidden_}), s.act = keep({N, hidden_});
  {
    Tensor h = parallel_.enter(s.norm2);  // (N, D)
    device_.linear(s.gate, h, w("mlp.gate_proj"));
    device_.linear(s.up, h, w("mlp.up_proj"));
  }
  swiglu_forward(s.act.data, s.gate.data, s.up.data, N * hidden_, stream);
  Buffer out = keep({R, D});
  Scratch y = scratch(N, D);
  device_.linear(*y, s.act, w("mlp.down_proj"));
  add(out.data, s.middle.data, parallel_.leave(*y).data, int64_t(R) * D, stream);
  return out;
}

// dx (R, D): on entry the gradient of the block's output, on return that of its input.
void Transformer::block_backward(int unit, const MicroBatch& mb, Tensor dx, BlockState& s, Half half) {
  const std::string prefix = "model.layers." + std::to_string(unit - 1) + ".";
  auto param = [&](const char* name) { return params_.find(prefix + name + ".weight"); };
  auto w = [&](const char* name) { return params_.weight(*param(name)); };
  const auto stream = device_.stream();
  const int N = mb.N(), B = mb.B, T = mb.T, d = config_.head_dim(), R = int(dx[0]), D = config_.dim;
  Later later = half == Half::input ? &s.weight_half : nullptr;

  // The weight halves. What they read is either part of the state or held by a shared pointer.
  auto weight_gradient = [&](const char* name, Tensor dy, Scratch owner, const Buffer& input) {
    now_or(later, [this, p = param(name), dy, owner, &input] {
      device_.linear_backward_weight(params_.gradient(*p), dy, input, params_.accumulate(*p));
    });
  };
  auto entered_gradient = [&](std::vector<const char*> names, std::vector<Scratch> dys, const Buffer& normed) {
    std::vector<Param*> ps;
    for (const char* name : names) ps.push_back(param(name));
    now_or(later, [this, ps, dys, &normed] {
      Tensor h = parallel_.enter(normed);  // gathered again, if it is split: only the shard was kept
      for (size_t i = 0; i < ps.size(); ++i)
        device_.linear_backward_weight(params_.gradient(*ps[i]), *dys[i], h, params_.accumulate(*ps[i]));
    });
  };
  auto norm_gradient = [&](const char* name, Tensor dnormed, const Buffer& input, const FloatBuffer& rstd) {
    Param* p = param(name);  // cheap, so never postponed
    FloatBuffer partial = device_.allocate<float>(Memory::workspace, {rmsnorm_partial_size(R, D)});
    rmsnorm_backward_weight(params_.gradient(*p).data, partial.data, dnormed.data, input.data, rstd.data, R, D,
                            params_.accumulate(*p), stream);
    rmsnorm_backward(dx.data, dnormed.data, input.data, rstd.data, params_.weight(*p).data, R, D, stream);
  };
  // The gradient that leaves a sublayer. It is dx itself, unless gathered; dx changes below, so a postponed weight
  // half needs a copy.
  auto left = [&](Scratch& owner) {
    Tensor dy = parallel_.leave_backward(dx);
    if (!later) return dy;
    owner = scratch(dy[0], dy[1]);
    CUDA_CHECK(cudaMemcpyAsync(owner->data, dy.data, owner->bytes(), cudaMemcpyDeviceToDevice, stream));
    return Tensor(*owner);
  };

  {  // MLP.
    Scratch owner, dgate = scratch(N, hidden_), dup = scratch(N, hidden_);
    Tensor dy = left(owner);  // (N, D)
    {
      Scratch dact = scratch(N, hidden_);
      device_.linear_backward_input(*dact, dy, w("mlp.down_proj"), 0);
      swiglu_backward(dgate->data, dup->data, dact->data, s.gate.data, s.up.data, N * hidden_, stream);
    }
    weight_gradient("mlp.down_proj", dy, owner, s.act);
    Scratch dh = scratch(N, D);
    device_.linear_backward_input(*dh, *dgate, w("mlp.gate_proj"), 0);
    device_.linear_backward_input(*dh, *dup, w("mlp.up_proj"), 1);
    entered_gradient({"mlp.gate_proj", "mlp.up_proj"}, {dgate, dup}, s.norm2);
    norm_gradient("post_attention_layernorm", parallel_.enter_backward(*dh), s.middle, s.rstd2);
  }
  {  // Attention.
    const int64_t wide = int64_t(heads_) * d, narrow = int64_t(kv_heads_) * d;
    Scratch owner, dq = scratch(N, wide), dk = scratch(N, narrow), dv = scratch(N, narrow);  // (N, heads d)
    Tensor dy = left(owner);
    weight_gradient("self_attn.o_proj", dy, owner, s.attention);
    {
      Scratch dq_heads = scratch(N, wide), dk_heads = scratch(N, narrow), dv_heads = scratch(N, narrow);
      {
        Scratch dmerged = scratch(N, wide), dout = scratch(N, wide);  // (N, H d), (B, H, T, d)
        device_.linear_backward_input(*dmerged, dy, w("self_attn.o_proj"), 0);
        split_heads(dout->data, dmerged->data, nullptr, B, T, heads_, d, stream);
        Attention a = attention_of(mb, s, {});
        parallel_.attention_backward(a, *dout, *dq_heads, *dk_heads, *dv_heads);
        s.probabilities = std::move(a.probabilities);
      }
      FloatBuffer rope = rope_of(mb);
      merge_heads(dq->data, dq_heads->data, rope.data, B, T, heads_, d, stream);
      merge_heads(dk->data, dk_heads->data, rope.data, B, T, kv_heads_, d, stream);
      merge_heads(dv->data, dv_heads->data, nullptr, B, T, kv_heads_, d, stream);
    }
    Scratch dh = scratch(N, D);
    device_.linear_backward_input(*dh, *dq, w("self_attn.q_proj"), 0);
    device_.linear_backward_input(*dh, *dk, w("self_attn.k_proj"), 1);
    device_.linear_backward_input(*dh, *dv, w("self_attn.v_proj"), 1);
    entered_gradient({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, {dq, dk, dv}, s.norm1);
    norm_gradient("input_layernorm", parallel_.enter_backward(*dh), s.input, s.rstd1);
  }
}

// ---- the head: logits = norm(x) W^T, then cross entropy -----------------------------------------------------

void Transformer::head_forward(const MicroBatch& mb, Buffer x, HeadState& s) {
  const auto stream = device_.stream();
  const int N = mb.N(), R = int(x[0]), D = config_.dim;
  Param& table = *params_.find(config_.tied ? "model.embed_tokens.weight" : "lm_head.weight");
  const int V = int(table.local_rows());
  s.input = std::move(x);
  s.normed = device_.allocate<real>(Memory::activations, {R, D});
  s.rstd = device_.allocate<float>(Memory::activations, {R});
  s.logits = device_.allocate<real>(Memory::activations, {N, V});
  rmsnorm_forward(s.normed.data, s.rstd.data, s.input.data, weight("model.norm.weight").data, R, D, config_.norm_eps,
                  stream);
  device_.linear(s.logits, parallel_.enter(s.normed), params_.weight(table));
}

void Transformer::cross_entropy(const MicroBatch& mb, HeadState& s) {
  const auto stream = device_.stream();
  const int N = mb.N(), V = int(s.logits[1]);
  const int first = int(params_.find(config_.tied ? "model.embed_tokens.weight" : "lm_head.weight")->piece.begin);
  auto rows = [&] { return device_.allocate<float>(Memory::workspace, {N}); };
  FloatBuffer row_max = rows(), row_sum = rows(), target_logit = rows(), loss = rows();
  cross_entropy_max(row_max.data, s.logits.data, N, V, stream);
  parallel_.over_vocabulary(row_max, Reduce::max);
  cross_entropy_sum(row_sum.data, target_logit.data, s.logits.data, row_max.data, mb.targets.data, N, V, first,
                    stream);
  parallel_.over_vocabulary(row_sum, Reduce::sum);
  parallel_.over_vocabulary(target_logit, Reduce::sum);
  cross_entropy_loss(loss.data, s.logits.data, row_max.data, row_sum.data, target_logit.data, mb.targets.data, N, V,
                     first, mb.loss_factor, stream);
  losses_.push_back(std::move(loss));
}

Buffer Transformer::head_backward(const MicroBatch& mb, HeadState& s, Half half) {
  const auto stream = device_.stream();
  const int N = mb.N(), R = int(s.input[0]), D = config_.dim;
  Param& table = *params_.find(config_.tied ? "model.embed_tokens.weight" : "lm_head.weight");
  Param& norm = *params_.find("model.norm.weight");
  Buffer dx = device_.allocate<real>(Memory::activations, {R, D});  // the residual stream's gradient, from here down
  fill(dx.data, 0.f, dx.numel(), stream);
  Scratch dh = scratch(N, D);
  device_.linear_backward_input(*dh, s.logits, params_.weight(table), 0);
  now_or(half == Half::input ? &s.weight_half : nullptr, [this, &table, &s] {
    device_.linear_backward_weight(params_.gradient(table), s.logits, parallel_.enter(s.normed),
                                   params_.accumulate(table));
  });
  Tensor dnormed = parallel_.enter_backward(*dh);  // (R, D)
  FloatBuffer partial = device_.allocate<float>(Memory::workspace, {rmsnorm_partial_size(R, D)});
  rmsnorm_backward_weight(params_.gradient(norm).data, partial.data, dnormed.data, s.input.data, s.rstd.data, R, D,
                          params_.accumulate(norm), stream);
  rmsnorm_backward(dx.data, dnormed.data, s.input.data, s.rstd.data, params_.weight(norm).data, R, D, stream);
  return dx;
}

// What a unit's work is called in the timeline.
std::string Transformer::span_name(const char* what, int unit) const {
  if (!device_.trace.on()) return "";
  return format("%s %s", what, unit == 0 ? "embedding" : unit == config_.head() ? "head" : std::to_string(unit).c_str());
}

// ---- ranges of units ------------------------------------------------------------------------------------------

namespace {
struct Paced {  // sleeps the rest of the time that a piece of work shall take
  Device& device;
  double seconds;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  ~Paced() {
    if (seconds <= 0) return;
    (void)cudaStreamSynchronize(device.stream());  // an error shows again at the next call
    std::this_thread::sleep_until(start + std::chrono::duration<double>(seconds));
  }
};
}  // namespace

int Transformer::stashed(int block) const {
  return int(std::count_if(blocks_.begin(), blocks_.end(), [=](auto& state) { return state.first.first == block; }));
}

Buffer Transformer::forward(int first, int last, const MicroBatch& mb, Buffer x) {
  Paced paced{device_, pace_};
  for (int unit = first; unit < last; ++unit) {
    Trace::Scope scope(&device_.trace, device_.stream(), "compute", "compute", span_name("forward", unit));
    parallel_.open(params_.unit(unit), false);
    if (unit == 0) {
      x = embedding_forward(mb);
    } else if (unit == config_.head()) {
      if (config_.tied && params_.has_unit(0)) parallel_.open(params_.unit(0), false);
      head_forward(mb, std::move(x), heads_state_[mb.index]);
      cross_entropy(mb, heads_state_[mb.index]);
      if (config_.tied && params_.has_unit(0)) parallel_.close(params_.unit(0), false, false);
      x = Buffer();
    } else {
      BlockState& state = blocks_[{unit, mb.index}];
      Buffer out = block_forward(unit, mb, std::move(x), state);
      if (!parallel_.keep(unit)) {  // backward will compute the rest again from the input
        BlockState only_input;
        only_input.input = std::move(state.input);
        state = std::move(only_input);
      }
      x = std::move(out);
    }
    parallel_.close(params_.unit(unit), false, mb.last);
  }
  return x;
}

Buffer Transformer::backward(int first, int last, const MicroBatch& mb, Buffer dx, Half half) {
  Paced paced{device_, half == Half::both ? 2 * pace_ : pace_};
  const bool done = mb.last && half == Half::both;
  for (int unit = last - 1; unit >= first; --unit) {
    Trace::Scope scope(&device_.trace, device_.stream(), "compute", "compute", span_name("backward", unit));
    parallel_.open(params_.unit(unit), true);
    if (unit == config_.head()) {
      if (config_.tied && params_.has_unit(0)) parallel_.open(params_.unit(0), true);
      dx = head_backward(mb, heads_state_.at(mb.index), half);
      if (half == Half::both) heads_state_.erase(mb.index);
      if (config_.tied && params_.has_unit(0)) parallel_.close(params_.unit(0), true, false);
    } else if (unit == 0) {
      embedding_backward(mb, std::move(dx), embeddings_[mb.index], half);
      dx = Buffer();
    } else {
      BlockState& state = blocks_.at({unit, mb.index});
      if (!state.norm1) block_forward(unit, mb, std::move(state.input), state);  // recomputed
      block_backward(unit, mb, dx, state, half);
      if (half == Half::both) blocks_.erase({unit, mb.index});
    }
    parallel_.close(params_.unit(unit), true, done);
  }
  return dx;
}

void Transformer::backward_weights(int first, int last, const MicroBatch& mb) {
  Paced paced{device_, pace_};
  for (int unit = last - 1; unit >= first; --unit) {
    Trace::Scope scope(&device_.trace, device_.stream(), "compute", "compute", span_name("weight", unit));
    auto& work = unit == 0                 ? embeddings_.at(mb.index).weight_half
                 : unit == config_.head() ? heads_state_.at(mb.index).weight_half
                                          : blocks_.at({unit, mb.index}).weight_half;
    parallel_.open(params_.unit(unit), true);
    for (auto& half : work) half();
    parallel_.close(params_.unit(unit), true, mb.last);
    if (unit == 0) embeddings_.erase(mb.index);
    else if (unit == config_.head()) heads_state_.erase(mb.index);
    else blocks_.erase({unit, mb.index});
  }
}

void Transformer::forward(const MicroBatch& mb) { forward(0, config_.units(), mb, {}); }
void Transformer::backward(const MicroBatch& mb) { backward(0, config_.units(), mb, {}, Half::both); }

Buffer Transformer::infer(const MicroBatch& mb, double* losses) {
  auto opened = [&](int unit, auto&& work) {
    parallel_.open(params_.unit(unit), false);
    work();
    parallel_.close(params_.unit(unit), false, false);
  };
  Buffer x;
  opened(0, [&] { x = embedding_forward(mb); });
  for (int unit = 1; unit <= config_.layers; ++unit) {
    BlockState state;
    opened(unit, [&] { x = block_forward(unit, mb, std::move(x), state); });
  }
  HeadState state;
  opened(config_.head(), [&] {
    if (config_.tied) opened(0, [&] { head_forward(mb, std::move(x), state); });
    else head_forward(mb, std::move(x), state);
  });
  if (losses) {
    cross_entropy(mb, state);
    *losses = loss();
  }
  return std::move(state.logits);
}

Buffer Transformer::logits(const MicroBatch& mb) { return infer(mb, nullptr); }

double Transformer::evaluate(const MicroBatch& mb) {
  double mean = 0;
  infer(mb, &mean);
  return mean;
}

namespace {
double add_chunks(Device& device, int64_t n, const std::function<void(double*)>& launch) {
  BufferOf<double> chunks = device.allocate<double>(Memory::workspace, {chunk_count(n)});
  launch(chunks.data);
  double sum = 0;
  for (double chunk : chunks.to_host()) sum += chunk;
  return sum;
}
}  // namespace

double Transformer::loss() {
  double sum = 0;
  for (FloatBuffer& loss : losses_)
    if (parallel_.counts_loss()) sum += add_chunks(device_, loss.numel(), [&](double* chunks) {
      chunk_sums(chunks, loss.data, loss.numel(), device_.stream());
    });
  losses_.clear();
  return sum;
}

double Transformer::squared_gradient_norm() {
  const bool on_host = parallel_.storage(Memory::gradients) == Storage::shard_on_host;
  double sum = 0;
  for (const Unit& unit : params_.units())
    for (const Param& p : unit.params) {
      const int64_t from = std::max(unit.begin(), p.offset), to = std::min(unit.end(), p.offset + p.local_size());
      if (to <= from || !parallel_.counts(p)) continue;
      const real* mine = unit.my_gradients().data + (from - unit.begin());
      if (on_host) sum += host_sum_of_squares(mine, to - from);
      else sum += add_chunks(device_, to - from, [&](double* chunks) {
        chunk_sums_of_squares(chunks, mine, to - from, device_.stream());
      });
    }
  return sum;
}
