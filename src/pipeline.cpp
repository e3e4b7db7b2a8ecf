#include "pipeline.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "../kernels/kernels.h"
#include "formulas.h"
#include "lesson.h"

// ---- the timetable ------------------------------------------------------------------------------------------------

namespace {

bool computes_gradient(const Op& op) { return op.kind == Op::backward || op.kind == Op::backward_input; }
bool frees(const Op& op) { return op.kind == Op::backward || op.kind == Op::backward_weight; }
double duration(const Op& op) { return op.kind == Op::backward ? 2 : 1; }

std::string text(const Op& op) {
  const char* const names[] = {"forward", "backward", "backward_input", "backward_weight", "send", "receive"};
  return format("%s of micro-batch %d, chunk %d", names[op.kind], op.micro_batch, op.chunk);
}

// F3, B3, W3; small letters for odd chunks.
std::string label(const Op& op) {
  const char letter = "FBBW"[op.kind];
  return format("%c%d", op.chunk % 2 ? letter - 'A' + 'a' : letter, op.micro_batch);
}

}  // namespace

Timetable simulate(int p, int m, int v, const Schedule& schedule) {
  Timetable table;
  table.p = p, table.v = v, table.m = m;
  table.stages.resize(p);
  std::vector<Order> orders;
  for (int i = 0; i < p; ++i) orders.push_back(schedule(p, i, m));

  // When forward, gradient and weight half of (chunk of the model, micro-batch) end; -1: not yet.
  const int chunks = p * v;
  std::vector<double> forward(chunks * m, -1), gradient(chunks * m, -1), weight(chunks * m, -1);
  std::vector<double> free_at(p, 0);
  size_t left = 0;
  for (const Order& order : orders) left += order.size();
  for (bool moved = true; moved;) {
    moved = false;
    for (int i = 0; i < p; ++i)
      while (table.stages[i].size() < orders[i].size()) {
        const Op& op = orders[i][table.stages[i].size()];
        if (op.micro_batch < 0 || op.micro_batch >= m || op.chunk < 0 || op.chunk >= v || op.kind > Op::backward_weight)
          throw Error(format("stage %d: %s does not exist with %d micro-batches and %d chunks", i, text(op).c_str(), m, v));
        const int chunk = op.chunk * p + i, at = chunk * m + op.micro_batch;
        // What it needs; 0: nothing, -1: not done yet.
        double ready = 0;
        if (op.kind == Op::forward) ready = chunk == 0 ? 0 : forward[at - m];
        if (computes_gradient(op)) {
          const double above = chunk == chunks - 1 ? 0 : gradient[at + m];
          ready = std::min(forward[at], above) < 0 ? -1 : std::max(forward[at], above);
        }
        if (op.kind == Op::backward_weight) ready = gradient[at];
        if (ready < 0) break;
        double& done = op.kind == Op::forward ? forward[at] : computes_gradient(op) ? gradient[at] : weight[at];
        if (done >= 0)
          throw Error(format("stage %d does %s twice", i, text(op).c_str()));
        const double start = std::max(free_at[i], ready);
        done = free_at[i] = start + duration(op);
        if (op.kind == Op::backward) weight[at] = done;
        table.stages[i].push_back({op, start, done});
        --left, moved = true;
      }
  }
  if (left) {
    std::string stuck;
    for (int i = 0; i < p; ++i)
      if (const size_t at = table.stages[i].size(); at < orders[i].size())
        stuck += format("%sstage %d at %s", stuck.empty() ? "" : ", ", i, text(orders[i][at]).c_str());
    throw Error("the schedule never ends: " + stuck + "; what they wait for comes later or not at all");
  }
  for (int at = 0; at < chunks * m; ++at)
    if (forward[at] < 0 || gradient[at] < 0 || weight[at] < 0)
      throw Error(format("stage %d leaves out a %s of micro-batch %d", at / m % p,
                         forward[at] < 0 ? "forward" : gradient[at] < 0 ? "backward" : "weight half", at % m));
  return table;
}

double Timetable::makespan() const {
  double first = INFINITY, last = 0;
  for (const auto& stage : stages)
    for (const Entry& e : stage) first = std::min(first, e.start), last = std::max(last, e.end);
  return (last - first) / v;
}

std::vector<int> Timetable::stash() const {
  std::vector<int> peaks;
  for (const auto& stage : stages) {
    int kept = 0, peak = 0;
    for (const Entry& e : stage) {
      peak = std::max(peak, kept += e.op.kind == Op::forward);
      kept -= frees(e.op);
    }
    peaks.push_back(peak);
  }
  return peaks;
}

std::string Timetable::draw() const {
  std::string lines;
  for (int i = 0; i < p; ++i) {
    std::string row;
    for (const Entry& e : stages[i]) {  // two columns for a forward of a chunk
      const size_t from = size_t(std::lround(2 * e.start)), to = std::max(from + 1, size_t(std::lround(2 * e.end)));
      if (row.size() < from) row.append(from - row.size(), '.');
      std::string box = label(e.op);
      if (box.size() > 2) box = {box[0], box.back()};  // two digits do not fit: the last one
      box.resize(to - from, '-');
      row.resize(from);
      row += box;
    }
    lines += format("  stage %-2d %s\n", i, row.c_str());
  }
  return lines;
}

std::vector<Span> Timetable::spans() const {
  const char* const names[] = {"forward", "backward", "backward input", "weight half"};
  std::vector<Span> all;
  for (int i = 0; i < p; ++i)
    for (const Entry& e : stages[i])
      all.push_back({i, "compute", "compute", format("%s %d", names[e.op.kind], e.op.micro_batch),
                     v > 1 ? format("chunk %d", e.op.chunk) : "", label(e.op), e.start / v, e.end / v, e.op.chunk % 2 == 1});
  return all;
}

// ---- sends and receives -------------------------------------------------------------------------------------------

Order with_transfers(const Timetable& table, int stage) {
  const int p = table.p, chunks = p * table.v;
  struct Event {
    double time;
    int kind, from;  // at the same time: computing, then transfers, by sender and direction
    Op op;
    bool operator<(const Event& other) const {
      return std::tuple(time, kind, from) < std::tuple(other.time, other.kind, other.from);
    }
  };
  std::vector<Event> events;
  for (int i = 0; i < p; ++i)
    for (const Timetable::Entry& e : table.stages[i]) {
      if (i == stage) events.push_back({e.end, 0, i, e.op});
      const bool gradient = computes_gradient(e.op);
      if (!gradient && e.op.kind != Op::forward) continue;
      const int to = e.op.chunk * p + i + (gradient ? -1 : 1);  // the chunk that needs it
      if (to < 0 || to >= chunks || to % p == i) continue;
      const int kind = gradient ? 2 : 1;
      if (i == stage) events.push_back({e.end, kind, i, {Op::send, e.op.micro_batch, e.op.chunk, to % p, gradient}});
      if (to % p == stage) events.push_back({e.end, kind, i, {Op::receive, e.op.micro_batch, to / p, i, gradient}});
    }
  std::stable_sort(events.begin(), events.end());
  Order order;
  for (const Event& e : events) order.push_back(e.op);
  return order;
}

// ---- a stage ------------------------------------------------------------------------------------------------------

void check_stages(const ModelConfig& config, int p, int v) {
  if (v < 1) throw Error(format("%d chunks on each rank; choose 1 or more", v));
  if (config.layers < p * v)
    throw Error(format("--layers %d for %d stages%s leaves one without a layer; choose at least %d layers, or fewer ranks",
                       config.layers, p, v > 1 ? format(" of %d chunks", v).c_str() : "", p * v));
}

Pipeline::Pipeline(Group& pp, const ModelConfig& config, Schedule schedule, int v)
    : pp_(pp), config_(config), schedule_(std::move(schedule)), v_(v) {
  check_stages(config, pp.size(), v);
  CUDA_CHECK(cudaStreamCreateWithFlags(&transfers_, cudaStreamNonBlocking));
  if (config.tied && pp.size() > 1)
    embedding_ = pp.split(holds(0) || holds(config.head()) ? 0 : NCCL_SPLIT_NOCOLOR, pp.rank(), "embedding");
}

Pipeline::~Pipeline() { cudaStreamDestroy(transfers_); }

// Blocks are dealt out evenly, one more to each of the first L mod (p v) chunks. The embedding belongs to the first
// chunk, the head to the last.
int Pipeline::begin_of(int chunk) const {
  const int chunks = pp_.size() * v_, each = config_.layers / chunks, more = config_.layers % chunks;
  return chunk == 0 ? 0 : chunk == chunks ? config_.units() : 1 + chunk * each + std::min(chunk, more);
}
int Pipeline::chunk_of(int unit) const {
  int chunk = 0;
  while (begin_of(chunk + 1) <= unit) ++chunk;
  return chunk;
}
int Pipeline::stage(int unit) const {
  const int chunk = chunk_of(unit);
  return chunk % pp_.size() == pp_.rank() ? chunk / pp_.size() : -1;
}
int Pipeline::first_unit(int chunk) const { return begin_of(chunk * pp_.size() + pp_.rank()); }
int Pipeline::last_unit(int chunk) const { return begin_of(chunk * pp_.size() + pp_.rank() + 1); }

int Pipeline::blocks() const {
  int count = 0;
  for (int unit = 1; unit <= config_.layers; ++unit) count += holds(unit);
  return count;
}

bool Pipeline::counts(const Param& p) const { return p.name != "model.embed_tokens.weight" || p.unit == 0; }

int Pipeline::sends() const {
  int count = 0;
  for (int chunk = 0; chunk < v_ && pp_.size() > 1; ++chunk)
    count += (first_unit(chunk) > 0) + (last_unit(chunk) < config_.units());
  return count;
}

int64_t Pipeline::parameters() const {
  const ParameterParts parts = parameter_parts(config_);
  int64_t all = blocks() * parts.block();
  if (holds(0)) all += parts.embedding;
  if (holds(config_.head())) all += parts.final_norm + parts.head + (config_.tied && !holds(0) ? parts.embedding : 0);
  return all;
}

std::vector<Op> Pipeline::schedule(int m) const { return with_transfers(timetable(m), pp_.rank()); }

void Pipeline::finish_gradients(Transformer& model) {
  if (!embedding_) return;
  embedding_->all_reduce(model.params().gradient(*model.params().find("model.embed_tokens.weight")));
}

// ---- the engine ---------------------------------------------------------------------------------------------------

namespace {

struct Moment {  // of a stream, that another can wait for
  cudaEvent_t event = nullptr;
  explicit Moment(cudaStream_t stream) {
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(event, stream));
  }
  Moment(Moment&& other) noexcept { std::swap(event, other.event); }
  Moment& operator=(Moment&& other) noexcept { return std::swap(event, other.event), *this; }
  ~Moment() {
    if (event) cudaEventDestroy(event);
  }
  void before(cudaStream_t stream) const { CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0)); }
};

}  // namespace

void Pipeline::run(Transformer& model, const std::vector<MicroBatch>& parts) {
  Device& device = model.device();
  const cudaStream_t compute = device.stream();
  struct Travelling {
    Buffer data;
    Moment done;
  };
  using Key = std::tuple<bool, int, int>;      // gradient, chunk of the model that needs it, micro-batch
  std::map<Key, Travelling> arriving;          // receives that were posted
  std::map<Key, Buffer> ready;                 // computed here: to be sent, or for a chunk of this rank
  std::vector<Travelling> leaving;             // sends that were posted
  std::vector<Ran> ran;
  const int p = pp_.size(), me = pp_.rank();

  auto let_go = [&] {  // a sent buffer may be used again only when its send is done
    for (const Travelling& sent : leaving) sent.done.before(compute);
    leaving.clear();
  };
  auto take = [&](const Key& key) {
    if (auto it = arriving.find(key); it != arriving.end()) {
      it->second.done.before(compute);
      Buffer data = std::move(it->second.data);
      arriving.erase(it);
      return data;
    }
    auto it = ready.find(key);
    if (it == ready.end()) return Buffer();    // the first chunk's input, the last one's gradient
    Buffer data = std::move(it->second);
    ready.erase(it);
    return data;
  };

  for (const Op& op : schedule(int(parts.size()))) {
    const MicroBatch& part = parts[op.micro_batch];
    const int chunk = op.chunk * p + me, first = first_unit(op.chunk), last = last_unit(op.chunk);
    if (op.kind == Op::receive) {
      Buffer data = device.allocate<real>(Memory::activations, {part.N(), config_.dim});
      Moment(compute).before(transfers_);      // the memory may have been in use until now
      pp_.receive<real>(data, op.peer, transfers_);
      arriving.emplace(Key{op.gradient, chunk, op.micro_batch}, Travelling{std::move(data), Moment(transfers_)});
      continue;
    }
    if (op.kind == Op::send) {
      let_go();
      Buffer data = take(Key{op.gradient, chunk + (op.gradient ? -1 : 1), op.micro_batch});
      Moment(compute).before(transfers_);
      pp_.send<real>(data, op.peer, transfers_);
      leaving.push_back(Travelling{std::move(data), Moment(transfers_)});
      continue;
    }
    const bool gradient = computes_gradient(op);
    Buffer in = op.kind == Op::backward_weight ? Buffer() : take(Key{gradient, chunk, op.micro_batch});
    const double start = seconds();
    {
      const char* const names[] = {"forward", "backward", "backward input", "weight half"};
      Trace::Scope scope(&device.trace, compute, "compute", "compute", names[op.kind],
                         device.trace.on() ? format("micro-batch %d, chunk %d", op.micro_batch, op.chunk) : "",
                         device.trace.on() ? label(op) : "");
      Buffer out;
      if (op.kind == Op::forward) out = model.forward(first, last, part, std::move(in));
      if (op.kind == Op::backward) out = model.backward(first, last, part, std::move(in), Half::both);
      if (op.kind == Op::backward_input) out = model.backward(first, last, part, std::move(in), Half::input);
      if (op.kind == Op::backward_weight) model.backward_weights(first, last, part);
      if (out) ready[Key{gradient, chunk + (gradient ? -1 : 1), op.micro_batch}] = std::move(out);
    }
#ifdef RINGTRON_CUDA
    device.synchronize();  // a launch returns at once; what is timed here is the work
#endif
    ran.push_back({op, start, seconds()});
    int stash = 0;
    for (int c = 0; c < v_; ++c) stash += model.stashed(std::max(1, first_unit(c)));
    peak_stash_ = std::max(peak_stash_, stash);
  }
  let_go();
  ran_.push_back(std::move(ran));
}

// ---- what it should cost ------------------------------------------------------------------------------------------

// Follows this stage's order; visit(op, its chunk's blocks, whether it begins with the embedding, ends with the head).
template <class Visit>
void Pipeline::walk(const std::vector<int>& samples, Visit visit) const {
  for (const Op& op : schedule(int(samples.size()))) {
    const int first = first_unit(op.chunk), last = last_unit(op.chunk);
    const bool embedding = first == 0, head = last == config_.units();
    visit(op, last - first - embedding - head, embedding, head);
  }
}

int64_t Pipeline::peak_activations(const std::vector<int>& samples) const {
  const int64_t B = sizeof(real), D = config_.dim;
  int64_t now = 0, peak = 0, leaving = 0;
  auto hold = [&](int64_t bytes) { peak = std::max(peak, now += bytes); };
  walk(samples, [&](const Op& op, int blocks, bool embedding, bool head) {
    const int64_t N = int64_t(samples[op.micro_batch]) * config_.seq, x = B * N * D;
    const int64_t stash = stash_bytes(config_, N, B, blocks, head);
    switch (op.kind) {
      case Op::receive: hold(x); break;
      case Op::send: now -= leaving, leaving = x; break;     // what was sent before has left
      case Op::forward: hold(stash + (head ? 0 : x) - (embedding ? 0 : x)); break;  // its input becomes part of the stash
      case Op::backward:
        if (head) hold(x);                                   // the gradient begins here
        now -= stash + (embedding ? x : 0);
        break;
      case Op::backward_input:
        if (head) hold(x);
        break;                                               // the embedding keeps its gradient, others send it on
      case Op::backward_weight: now -= stash + (embedding ? x : 0); break;
    }
  });
  return peak;
}

int64_t Pipeline::peak_workspace(const std::vector<int>& samples) const {
  const int64_t B = sizeof(real);
  int64_t kept = 0, losses = 0, peak = 0;
  walk(samples, [&](const Op& op, int blocks, bool, bool head) {
    const int64_t N = int64_t(samples[op.micro_batch]) * config_.seq;
    const bool later = op.kind == Op::backward_input;
    if (op.kind == Op::forward && head) losses += 4 * N;     // of each token, until the step's loss is asked for
    if (op.kind == Op::backward || later)
      for (int block = 0; block < blocks; ++block) {
        peak = std::max(peak, losses + kept + backward_workspace_bytes(config_, samples[op.micro_batch], config_.seq, B, later));
        if (later) kept += postponed_bytes(config_, N, B);
      }
    if (op.kind == Op::backward_weight) kept -= blocks * postponed_bytes(config_, N, B);
  });
  return peak;
}

void Pipeline::expect(Lesson& lesson) const {
  const int64_t B = sizeof(real), Psi = parameters(), m = lesson.options().micro_batches, batch = lesson.options().batch;
  const int64_t steps = int64_t(lesson.steps().size());
  // A chunk in the middle sends an activation down and a gradient up for each micro-batch; the model's first and last
  // chunk send one of them.
  const int64_t ND = batch * config_.seq * config_.dim;  // of all m together
  const std::string neighbours = v_ > 1 ? "(neighbours of its v chunks)" : "(neighbours)";
  lesson.expect_sent("world", "send", steps * sends() * B * ND,
                     "steps x m x " + neighbours + " x B N D of a micro-batch");
  lesson.expect_calls("world", "send", steps * m * sends(), "steps x m x " + neighbours);
  lesson.expect_state(B * Psi, B * Psi, (B == 4 ? 8 : 12) * Psi);
  std::vector<int> samples;
  for (int64_t i = 0; i < m; ++i) samples.push_back(int(batch * (i + 1) / m - batch * i / m));
  lesson.expect_peak(Memory::activations, peak_activations(samples),
                     "stash x (L_i blocks, head) + what waits at the boundaries");
  lesson.expect_peak(Memory::workspace, peak_workspace(samples), "a block's backward + postponed weight halves + losses");
  if (embedding_) {
    const int64_t X = int64_t(config_.vocab) * config_.dim;
    const int64_t r = embedding_->rank(), sent = 2 * X - (X / 2 + ((r + 1) % 2 < X % 2)) - (X / 2 + (r % 2 < X % 2));
    lesson.expect_sent("embedding", "all_reduce", steps * B * sent, "first and last stage: steps B V D");
  } else if (config_.tied && pp_.size() > 1) {
    lesson.expect_sent("embedding", "all_reduce", 0, "first and last stage: steps B V D");
  }
}

void Pipeline::report(Lesson& lesson) const {
  // From every rank: what it computed when, in every step, and its peak stash.
  std::string mine(reinterpret_cast<const char*>(&peak_stash_), sizeof peak_stash_);
  for (const auto& step : ran_) mine.append(reinterpret_cast<const char*>(step.data()), step.size() * sizeof(Ran));
  const std::vector<std::string> all = lesson.world().gather(mine);
  if (lesson.world().rank() != 0) return;

  const int p = pp_.size(), m = lesson.options().micro_batches;
  const Timetable predicted = timetable(m);
  struct Step {
    double makespan, busy;  // seconds; busy: of the average stage
    size_t index;
  };
  std::vector<Step> steps;
  auto ran = [&](int rank, size_t step, size_t i) {
    Ran one;
    const size_t ops = predicted.stages[rank].size();
    std::memcpy(&one, all[rank].data() + sizeof(int) + (step * ops + i) * sizeof(Ran), sizeof one);
    return one;
  };
  for (size_t step = 0; step < ran_.size(); ++step) {
    double first = INFINITY, last = 0, busy = 0;
    for (int rank = 0; rank < p; ++rank)
      for (size_t i = 0; i < predicted.stages[rank].size(); ++i) {
        const Ran one = ran(rank, step, i);
        first = std::min(first, one.start), last = std::max(last, one.end), busy += (one.end - one.start) / p;
      }
    steps.push_back({last - first, busy, step});
  }
  if (steps.size() > 1) steps.erase(steps.begin());  // the first step also warms up
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.makespan < b.makespan; });
  const Step fastest = steps[0], median = steps[steps.size() / 2];  // what else the machine does can only delay

  auto list = [&](const std::vector<int>& stash) {
    std::string text;
    for (int k : stash) text += format("%s%d", text.empty() ? "" : " ", k);
    return text;
  };
  std::vector<int> stash(p);
  for (int rank = 0; rank < p; ++rank) std::memcpy(&stash[rank], all[rank].data(), sizeof(int));
  const char* const what = v_ > 1 ? "chunks of micro-batches" : "micro-batches";
  const double tF = 1e-3 * lesson.options().pace;

  lesson.print("timetable of %d stage%s%s, %d micro-batches; a stage's forward takes tF, its backward 2 tF\n", p,
               p > 1 ? "s" : "", v_ > 1 ? format(" of %d chunks", v_).c_str() : "", m);
  if (2 * v_ * predicted.makespan() <= 150) lesson.print("%s", predicted.draw().c_str());
  lesson.print("  predicted  step %6g tF, ideal %g tF: bubble %.1f %% over ideal, %.1f %% of the step\n",
               predicted.makespan(), predicted.ideal(), 100 * predicted.overhead(), 100 * predicted.share());
  if (tF > 0)
    lesson.print("  measured   step %6.2f tF, ideal %g tF: bubble %.1f %% over ideal, %.1f %% of the step; fastest of %zu "
                 "steps of tF = %g ms, median %.2f tF\n", fastest.makespan / tF, predicted.ideal(),
                 100 * (fastest.makespan / tF / predicted.ideal() - 1), 100 * (1 - predicted.ideal() * tF / fastest.makespan),
                 steps.size(), 1e3 * tF, median.makespan / tF);
  else
    lesson.print("  measured   step %.1f ms, a stage computes for %.1f ms; to see the bubble with fewer cores than "
                 "stages, add --pace 20\n", 1e3 * median.makespan, 1e3 * median.busy);
  lesson.print("  stash      %s %s predicted, %s measured, by stage\n", list(predicted.stash()).c_str(), what,
               list(stash).c_str());
  if (tF > 0 && 2 * v_ * fastest.makespan / tF <= 160) {
    Timetable measured = predicted;  // the same boxes, where the clock saw them
    double first = INFINITY;
    for (int rank = 0; rank < p; ++rank)
      for (size_t i = 0; i < predicted.stages[rank].size(); ++i) first = std::min(first, ran(rank, fastest.index, i).start);
    for (int rank = 0; rank < p; ++rank)
      for (size_t i = 0; i < predicted.stages[rank].size(); ++i) {
        const Ran one = ran(rank, fastest.index, i);
        measured.stages[rank][i] = {one.op, (one.start - first) / tF * v_, (one.end - first) / tF * v_};
      }
    lesson.print("  measured, drawn in the same units\n%s", measured.draw().c_str());
  }
}

Options pipeline_defaults(int layers, std::map<std::string, Extra> extra,
                          std::function<void(const Options&, int)> check) {
  Options o;
  o.world.threads = 4;
  o.model.dim = 64;
  o.model.layers = layers;
  o.model.seq = 64;
  o.micro_batches = 8;
  o.steps = 10;
  o.extra = std::move(extra);
  o.check = [check](const Options& options, int p) {
    const auto v = options.extra.find("v");
    check_stages(options.model, p, v == options.extra.end() ? 1 : int(v->second.value));
    if (check) check(options, p);
  };
  return o;
}
