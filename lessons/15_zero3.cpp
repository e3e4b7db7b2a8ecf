// 15_zero3.cpp - ZeRO-3, or FSDP: parameters are divided as well, and gathered unit by unit just before their use.
//
//   compute:  | F embed  | F block 1| F block 2| .. | B head   | B block L| ..        open(): wait for the unit
//   comm:     | ag blk 1 | ag blk 2 | ag blk 3 | .. | ag blk L | rs head  | ag ..     and start to gather the next
//   here:     [e+1]      [1+2]      [2+3]           [head+L]                          close(): free it
//
// Sent per rank and micro-batch: parameters for forward, again for backward, and the gradients: 3 Psi (d-1)/d, half as
// much again as DDP. It does not depend on the batch: what travels are weights, and each rank computes whole layers
// on its own samples. Bytes per parameter 16/d, and at the peak the largest adjacent pair of units, whole (without
// prefetch: the largest unit). A tied head gathers the embedding's table once more each time, and
// holds it beside the others.
//
// FSDP's options: --keep 1 keeps parameters from forward to backward (2 Psi, but all of them in memory; SHARD_GRAD_OP).
// --shard s --replicate r divides only among s ranks (HYBRID_SHARD): the r groups all-reduce their Psi/s gradients
// once a step, 2 (r-1)/r Psi/s, and nothing else leaves a group.                                     notes/zero.md
#include <map>

#include "../src/lesson.h"
#include "14_zero2.cpp"

struct Zero3 : Zero2 {  // gradients live as in ZeRO-2
  Zero3(Group& dp, Group& shards, Group* replicas, bool every, bool prefetch, bool keep_parameters)
      : Zero2(dp, shards, every, prefetch), replicas(replicas), prefetch(prefetch), keep_parameters(keep_parameters) {}
  ~Zero3() override {
    for (auto& [unit, event] : gathered) cudaEventDestroy(event);
  }
  Storage storage(Memory kind) const override {
    return kind == Memory::parameters ? Storage::shard : Zero2::storage(kind);
  }
  bool counts(const Param&) const override { return !replicas || replicas->rank() == 0; }

  void open(Unit& unit, bool backward) override {
    Zero2::open(unit, backward);
    gather(unit);
    if (prefetch) CUDA_CHECK(cudaStreamWaitEvent(device.stream(), gathered.at(unit.index), 0));
    if (!prefetch || !params || users.size() > 1) return;  // inside the head: the next one is on its way already
    const int next = unit.index + (backward ? -1 : 1);
    if (params->has_unit(next)) gather(params->unit(next));
  }

  void close(Unit& unit, bool backward, bool last) override {
    Zero2::close(unit, backward, last);
    if (!keep_parameters || (backward && users.empty())) unit.weights = Buffer();
  }

  // On the stream of the reductions, so that all ranks have one order. It begins when compute has come this far: the
  // memory may have been in use until now.
  void gather(Unit& unit) {
    if (unit.weights) return;
    unit.weights = device.allocate<real>(Memory::parameters, {unit.padded});
    if (!prefetch) return shards.all_gather<real>(unit.weights, unit.weight_shard);
    cudaEvent_t& event = gathered[unit.index];
    if (!event) CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(event, device.stream()));
    CUDA_CHECK(cudaStreamWaitEvent(comm, event, 0));
    shards.all_gather<real>(unit.weights, unit.weight_shard, comm);
    CUDA_CHECK(cudaEventRecord(event, comm));
  }

  // Hybrid: the groups have summed over their own samples; now over all.
  void finish_gradients(Transformer& model) override {
    Zero2::finish_gradients(model);
    if (replicas)
      for (Unit& unit : model.params().units()) replicas->all_reduce<real>(unit.gradient_shard);
  }

  void update(AdamW& adamw, float lr, float gradient_scale) override {
    adamw.step(lr, gradient_scale);
    for (Unit& unit : adamw.model().params().units()) unit.weights = Buffer();  // what is gathered is old now
  }

  // Parameter elements that are gathered at the worst moment, by the formula.
  int64_t most_gathered(Params& params) const {
    const std::vector<Unit>& units = params.units();
    int64_t all = 0, most = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      all += units[i].padded;
      const bool head = i + 1 == units.size();
      const int64_t beside = i > 0 && prefetch ? units[i - 1].padded : 0;  // the pair is the same in both directions
      most = std::max(most, units[i].padded + beside + (head && params.config().tied ? units[0].padded : 0));
    }
    return keep_parameters ? all : most;
  }
  // How often the elements of a unit's shard are sent on per step for gathering, to each of the other ranks.
  int64_t gathers(const Unit& unit, const ModelConfig& c, int micro_batches) const {
    const bool table = c.tied && unit.index == 0;
    return micro_batches * (keep_parameters ? 1 : table ? 4 : 2);
  }

  Group* replicas;           // ranks of other groups that own the same shards; or none
  bool prefetch, keep_parameters;
  Params* params = nullptr;  // where prefetch finds the next unit
  std::map<int, cudaEvent_t> gathered;
};

static Options zero3_defaults(Options o) {
  o.world.threads = 4;
  o.steps = 20;
  o.extra["prefetch"] = {1, "1: gather the next unit, and reduce the one before, while a unit computes; 0: wait"};
  o.extra["keep"] = {0, "1: keep gathered parameters from forward to backward"};
  o.extra["every"] = {1, "1: reduce gradients at every micro-batch; 0: keep them whole until the last"};
  o.extra["shard"] = {0, "ranks that divide the state between them; 0: all"};
  o.extra["replicate"] = {0, "groups of such ranks; 0: as many as there are ranks for"};
  return o;
}

LESSON(zero3, "ZeRO-3 (FSDP): parameters are gathered just before their use", zero3_defaults({})) {
  Group& all = lesson.world().all();
  int s = int(lesson.option("shard")), r = int(lesson.option("replicate"));
  if (s == 0) s = r > 0 ? all.size() / r : all.size();
  if (r == 0) r = s > 0 ? all.size() / s : 0;
  if (s < 1 || r < 1 || s * r != all.size())
    throw Error(format("--shard %d x --replicate %d is not %d, the number of ranks; choose two whose product it is", s,
                       r, all.size()));
  std::unique_ptr<Group> shards, replicas;  // neighbours divide: inside a node, links are fast
  if (r > 1) {
    shards = lesson.world().split(all.rank() / s, all.rank(), "shard");
    replicas = lesson.world().split(all.rank() % s, all.rank(), "replicate");
  }
  Group& divided = shards ? *shards : all;
  Zero3 zero3(all, divided, replicas.get(), lesson.option("every") != 0, lesson.option("prefetch") != 0,
              lesson.option("keep") != 0);
  Transformer model(lesson.config(), zero3, lesson.device(), lesson.seed());
  zero3.params = &model.params();
  AdamW adamw(model, lesson.options());
  lesson.start(adamw);

  for (int64_t step : lesson.steps()) {
    model.start_step();
    for (const MicroBatch& part : lesson.batch(step, model)) {
      model.forward(part);             // <- the idea: open() gathers and close() frees parameters in here,
      model.backward(part);            //    and in here once more
    }
    zero3.finish_gradients(model);
    const double loss = lesson.sum(model.loss());
    const double norm = std::sqrt(lesson.sum(model.squared_gradient_norm()));
    lesson.log(step, loss, norm, model);
    zero3.update(adamw, lesson.learning_rate(step), lesson.clip_factor(norm));  // my shard; nothing to send
  }

  const int m = lesson.options().micro_batches, k = zero3.reductions(m);
  int64_t Psi = 0, largest = 0, gathered = 0, calls = 0, replicated = 0;
  for (const Unit& unit : model.params().units()) {
    Psi += unit.padded, largest = std::max(largest, unit.padded);
    const int64_t times = zero3.gathers(unit, lesson.config(), m);
    gathered += times * unit.share() * (s - 1), calls += times;
    auto c = [&](int64_t i) { return unit.share() / r + (i % r < unit.share() % r); };
    if (replicas) replicated += 2 * unit.share() - c(replicas->rank() + 1) - c(replicas->rank() + 2);
  }
  const int64_t B = sizeof(real), state = B == 4 ? 8 : 12, steps = int64_t(lesson.steps().size());
  const int64_t reduced = k * (Psi / s) * (s - 1), units = lesson.config().units();
  const char* group = shards ? "shard" : "world";
  lesson.expect_sent(group, "all_gather", steps * B * gathered,
                     zero3.keep_parameters ? "steps m B Psi (d-1)/d" : "steps m 2 B Psi (d-1)/d, a tied table 4");
  lesson.expect_sent(group, "reduce_scatter", steps * B * reduced, "steps k B Psi (d-1)/d, k = m or 1");
  lesson.expect_calls(group, "all_gather", steps * calls, "steps m units, twice unless kept");
  lesson.expect_calls(group, "reduce_scatter", steps * k * units, "steps k units");
  if (replicas)
    lesson.expect_sent("replicate", "all_reduce", steps * B * replicated,
                       "steps B sum of 2X - |c(r+1)| - |c(r+2)|, X = unit/s");
  lesson.expect_peak(Memory::parameters, B * (Psi / s + zero3.most_gathered(model.params())),
                     zero3.keep_parameters ? "B (Psi/d + Psi)"
                     : zero3.prefetch      ? "B (Psi/d + largest adjacent pair of units; a tied table more)"
                                           : "B (Psi/d + largest unit; a tied table more)");
  lesson.expect_peak(Memory::gradients, B * (Psi / s + zero3.most_whole(model.params(), m)),
                     k < m            ? "B (Psi/d + Psi)"
                     : zero3.prefetch ? "B (Psi/d + largest adjacent pair of units; a tied table more)"
                                      : "B (Psi/d + largest unit; a tied table more)");
  lesson.expect_peak(Memory::optimizer, state * adamw.elements(), "8 or 12 bytes per parameter of the own parts");
  lesson.expect_peak(Memory::communication, k > 1 ? B * largest / s : 0,
                     k > 1 ? "B largest unit/d: the part that is added" : "none, with one reduction a step");
  lesson.expect_activations(model);
  print_state_table(lesson, adamw, {.stage = 3, .ranks = s, .replicas = r, .reduce_each = zero3.every,
                                    .keep_parameters = zero3.keep_parameters}, gathered + reduced + replicated);
  lesson.finish(adamw);
  return lesson.prove(model);
}
