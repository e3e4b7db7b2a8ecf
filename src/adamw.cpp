#include "adamw.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../kernels/kernels.h"
#include "host.h"

void Parallel::update(AdamW& adamw, float lr, float gradient_scale) { adamw.step(lr, gradient_scale); }

namespace {
constexpr bool kHasMaster = !std::is_same_v<real, float>;
}

AdamW::AdamW(Transformer& model, const Options& options)
    : model_(model), options_(options),
      on_host_(model.parallel().storage(Memory::optimizer) == Storage::shard_on_host) {
  Device& device = model.device();
  const Memory where = on_host_ ? Memory::host : Memory::optimizer;
  for (const Unit& unit : model.params().units()) {
    const int64_t begin = std::min(unit.size, unit.begin()), end = std::min(unit.size, unit.end()), n = end - begin;
    State state{unit.index, begin, end, device.allocate<float>(where, {n}), device.allocate<float>(where, {n}), {}};
    if (kHasMaster) state.master = device.allocate<float>(where, {n});
    for (FloatBuffer* zero : {&state.m, &state.v}) {
      if (on_host_) std::fill_n(zero->data, n, 0.f);
      else fill(zero->data, 0.f, n, device.stream());
    }
    states_.push_back(std::move(state));
  }
  refresh_masters();
}

void AdamW::refresh_masters() {
  if (!kHasMaster) return;
  for (State& s : states_) {
    const Tensor mine = model_.params().unit(s.unit).my_weights();
    const int64_t n = s.end - s.begin;
    if (on_host_) {
      std::copy_n(mine.data, n, s.master.data);
      continue;
    }
    std::vector<real> stored(n);
    Device& device = model_.device();
    device.download(stored.data(), mine.data, n);
    const std::vector<float> values(stored.begin(), stored.end());
    device.upload(s.master.data, values.data(), n);
  }
}

void AdamW::step(float lr, float gradient_scale) {
  Device& device = model_.device();
  Trace::Scope scope(&device.trace, device.stream(), "compute", "compute", "update");
  begin_step();
  for (Unit& unit : model_.params().units()) update_unit(unit, lr, gradient_scale);
}

void AdamW::update_unit(Unit& unit, float lr, float gradient_scale) {
  auto state = std::find_if(states_.begin(), states_.end(), [&](const State& s) { return s.unit == unit.index; });
  AdamWStep step{lr, options_.beta1, options_.beta2, options_.eps, 0, 0, 0, gradient_scale};
  step.m_correction = float(1 / (1 - std::pow(double(options_.beta1), double(steps_))));
  step.v_correction = float(1 / (1 - std::pow(double(options_.beta2), double(steps_))));
  for (const Param& p : unit.params) {  // parameter by parameter, because norms do not decay
    const int64_t from = std::max(state->begin, p.offset), to = std::min(state->end, p.offset + p.local_size());
    if (to <= from) continue;
    step.decay = p.decays() ? options_.weight_decay : 0;
    const int64_t at = from - state->begin;
    real* w = unit.my_weights().data + at;
    const real* g = unit.my_gradients().data + at;
    float* w32 = kHasMaster ? state->master.data + at : reinterpret_cast<float*>(w);  // in fp32, w itself
    if (on_host_) host_adamw(w, w32, state->m.data + at, state->v.data + at, g, to - from, step);
    else adamw(w, w32, state->m.data + at, state->v.data + at, g, to - from, step, model_.device().stream());
  }
}
