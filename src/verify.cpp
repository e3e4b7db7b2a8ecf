#include "verify.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "checkpoint.h"

Bounds Bounds::standard() {
  if constexpr (std::is_same_v<real, float>) return {1e-6, 1e-6, 1e-5, 1e-3};
  return {2e-3, 2e-2, 2e-2, 5e-2};
}

namespace {

double relative(double mine, double reference) { return std::abs(mine - reference) / std::abs(reference); }

// NaN counts as infinitely wrong: a comparison with it must never pass.
void worst_of(Check& check, double value, const std::string& detail) {
  if (!(value <= check.value)) check.value = std::isnan(value) ? INFINITY : value, check.detail = detail;
}

void compare_steps(Check& check, const std::vector<double>& mine, const std::vector<double>& reference) {
  if (mine.size() != reference.size() || mine.empty())
    return worst_of(check, INFINITY, format("%zu steps against %zu", mine.size(), reference.size()));
  for (size_t i = 0; i < mine.size(); ++i)
    worst_of(check, relative(mine[i], reference[i]), format("step %zu: %.9g, one rank %.9g", i + 1, mine[i], reference[i]));
}

}  // namespace

std::vector<Check> compare(const Trajectory& mine, const Trajectory& reference, const Bounds& bounds) {
  Check loss{"loss of every step", "", -1, bounds.loss}, norm{"gradient norm of every step", "", -1, bounds.norm};
  Check gradient{"every gradient after step 1", "", -1, bounds.gradient};
  Check end{"every parameter at the end", "", -1, bounds.end};
  compare_steps(loss, mine.losses, reference.losses);
  compare_steps(norm, mine.norms, reference.norms);
  if (reference.gradients.empty()) worst_of(gradient, INFINITY, "no gradients were recorded");
  for (const auto& [name, wanted] : reference.gradients) {
    auto it = mine.gradients.find(name);
    if (it == mine.gradients.end() || it->second.size() != wanted.size()) {
      worst_of(gradient, INFINITY, name + " is missing");
      continue;
    }
    double largest = 0;
    for (float value : wanted) largest = std::max(largest, double(std::abs(value)));
    for (size_t i = 0; i < wanted.size(); ++i) {
      const double off = std::abs(double(it->second[i]) - wanted[i]);
      const double scaled = off == 0 ? 0 : off / largest;
      if (!(scaled <= gradient.value))
        worst_of(gradient, scaled, format("%s[%zu]: %.9g, one rank %.9g", name.c_str(), i, it->second[i], wanted[i]));
    }
  }
  for (const auto& [name, wanted] : reference.end) {
    auto it = mine.end.find(name);
    const auto& start = reference.start.at(name);
    if (it == mine.end.end() || it->second.size() != wanted.size()) {
      worst_of(end, INFINITY, name + " is missing");
      continue;
    }
    double off = 0, moved = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      off += std::pow(double(it->second[i]) - wanted[i], 2);
      moved += std::pow(double(wanted[i]) - start[i], 2);
    }
    worst_of(end, off == 0 ? 0 : std::sqrt(off / moved),
             format("%s: off by %.3g, moved by %.3g", name.c_str(), std::sqrt(off), std::sqrt(moved)));
  }
  return {loss, norm, gradient, end};
}

namespace {

// One stretch of a parameter in a packed message; its floats follow.
struct Stretch {
  int param;            // in the order of Params::describe
  Piece piece;          // what the rank holds
  int64_t begin, end;   // which elements of the piece follow
};

}  // namespace

std::string pack(Params& params, bool gradients) {
  std::string bytes;
  int number = 0;
  std::map<std::string, int> numbers;
  for (const Param& p : Params::describe(params.config())) numbers[p.name] = number++;
  for (const Unit& unit : params.units())
    for (const Param& p : unit.params) {
      // Only the owner of a shard has the sum of its gradients.
      const Params::Part part = gradients ? params.updated_gradient(p) : params.stored_weight(p);
      if (part.values.empty()) continue;
      const Stretch stretch{numbers.at(p.name), p.piece, part.first, part.first + int64_t(part.values.size())};
      bytes.append(reinterpret_cast<const char*>(&stretch), sizeof stretch);
      bytes.append(reinterpret_cast<const char*>(part.values.data()), part.values.size() * sizeof(float));
    }
  return bytes;
}

Assembled assemble(const ModelConfig& config, const std::vector<std::string>& packed) {
  const std::vector<Param> params = Params::describe(config);
  std::vector<std::vector<int>> owner(params.size());  // which rank an element came from; -1: none yet
  Assembled all{{}, {"copies that differ between ranks", "", 0, 0}, {"elements that no rank holds", "", 0, 0}};
  for (size_t i = 0; i < params.size(); ++i) {
    all.tensors[params[i].name].resize(params[i].rows * params[i].columns);
    owner[i].assign(params[i].rows * params[i].columns, -1);
  }
  for (size_t rank = 0; rank < packed.size(); ++rank) {
    const std::string& bytes = packed[rank];
    for (size_t at = 0; at < bytes.size();) {
      Stretch stretch;
      std::memcpy(&stretch, bytes.data() + at, sizeof stretch);
      at += sizeof stretch;
      Param p = params[stretch.param];
      p.piece = stretch.piece;
      std::vector<float>& whole = all.tensors[p.name];
      for (int64_t i = stretch.begin; i < stretch.end; ++i, at += sizeof(float)) {
        float value;
        std::memcpy(&value, bytes.data() + at, sizeof value);
        const int64_t index = p.global_index(i);
        int& from = owner[stretch.param][index];
        if (from < 0) {
          from = int(rank);
          whole[index] = value;
        } else if (std::memcmp(&whole[index], &value, sizeof value) != 0 && all.copies.value++ == 0) {
          all.copies.detail = format("first: %s[%lld] is %.9g on rank %d, %.9g on rank %zu", p.name.c_str(),
                                     (long long)index, whole[index], from, value, rank);
        }
      }
    }
  }
  for (size_t i = 0; i < params.size(); ++i)
    for (size_t index = 0; index < owner[i].size(); ++index)
      if (owner[i][index] < 0 && all.missing.value++ == 0)
        all.missing.detail = format("first: %s[%zu]", params[i].name.c_str(), index);
  return all;
}

Tensors all_weights(Params& params) { return assemble(params.config(), {pack(params, false)}).tensors; }
Tensors all_gradients(Params& params) { return assemble(params.config(), {pack(params, true)}).tensors; }

Trajectory train_reference(Device& device, const Options& options, std::span<const uint16_t> tokens,
                           const Checkpoint* from) {
  Parallel one_gpu;
  Transformer model(options.model, one_gpu, device, options.seed);
  AdamW adamw(model, options);
  const int64_t first = from ? restore(*from, adamw) : 0;
  Trajectory reference;
  reference.start = all_weights(model.params());
  for (int64_t step = first; step < options.last_step(); ++step) {
    const GlobalBatch batch = global_batch(tokens, options.seed, step, options.batch, options.model.seq);
    const auto parts = micro_batches(device, batch, one_gpu.view(batch.samples, batch.seq), 1);
    model.start_step();
    for (const Op& op : one_gpu.schedule(1))
      op.kind == Op::forward ? model.forward(parts[op.micro_batch]) : model.backward(parts[op.micro_batch]);
    const double norm = std::sqrt(model.squared_gradient_norm());
    reference.losses.push_back(model.loss());
    reference.norms.push_back(norm);
    if (step == first) reference.gradients = all_gradients(model.params());
    adamw.step(options.learning_rate(step), AdamW::clip_factor(norm, options.clip));
  }
  reference.end = all_weights(model.params());
  return reference;
}

void report_not_finite(int64_t step, double loss, double norm, Params& params) {
  std::string where = "no weight or gradient is, so an activation is";
  auto bad = [](const std::vector<float>& values) {
    for (float value : values)
      if (!std::isfinite(value)) return true;
    return false;
  };
  for (const char* what : {"weight", "gradient"})
    for (Unit& unit : params.units())
      for (Param& p : unit.params)
        if (bad((*what == 'w' ? params.stored_weight(p) : params.updated_gradient(p)).values)) {
          where = format("the first bad tensor is the %s of %s", what, p.name.c_str());
          goto found;
        }
found:
  throw Error(format("step %lld: loss %g, gradient norm %g are not finite; %s; lower --lr or raise --warmup",
                     (long long)step + 1, loss, norm, where.c_str()));
}
