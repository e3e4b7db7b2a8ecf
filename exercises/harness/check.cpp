#include "check.h"

#include "../../src/sim/nccl/world.h"

namespace {
constexpr int kPlaces = 3;   // ranks that are shown
const char* const kTodo = "not implemented yet: ";

std::string bytes_text(int64_t bytes) { return format("%lld bytes", (long long)bytes); }

// The first lines of a text, each with an indentation.
std::string indented(const std::string& text, int lines) {
  std::string out;
  size_t from = 0;
  for (int i = 0; from <= text.size(); ++i) {
    const size_t end = std::min(text.find('\n', from), text.size());
    if (i == lines) return out + "\n           ...";
    out += (i ? "\n           " : "") + text.substr(from, end - from);
    from = end + 1;
  }
  return out;
}
}  // namespace

void not_implemented(const char* slug, int lines) {
  throw Error(format("%s%s (about %d line%s)", kTodo, slug, lines, lines == 1 ? "" : "s"));
}

Session& session() {
  static Session one;
  return one;
}

float fingerprint(int rank) { return float(int64_t(1) << (3 * rank)); }

std::string decode(float value, int ranks) {
  const double limit = std::pow(8.0, ranks);
  if (!(value >= 0) || value >= limit || value != std::floor(value)) return "no sum of the ranks' contributions";
  // "rank 0, 2; rank 1 is missing; rank 2 twice"
  std::string in, missing, several;
  int64_t rest = int64_t(value);
  const int64_t first = rest % 8;
  int in_it = 0, equal = 0;
  for (int r = 0; r < ranks; ++r, rest /= 8) {
    const int64_t times = rest % 8;
    equal += times == first;
    in_it += times > 0;
    std::string& list = times ? in : missing;
    list += (list.empty() ? "rank " : ", ") + std::to_string(r);
    if (times > 1) several += format("; rank %d %s", r, times == 2 ? "twice" : format("%d times", int(times)).c_str());
  }
  if (equal == ranks && first > 1) return format("every rank %d times", int(first));
  if (equal == ranks) return "every rank once";
  if (in_it > 1) in.insert(4, "s");
  if (ranks - in_it > 1) missing.insert(4, "s");
  return (in.empty() ? "nobody" : in) + (missing.empty() ? "" : "; " + missing + (ranks - in_it > 1 ? " are missing" : " is missing")) +
         several;
}

FloatBuffer Rank::floats(const std::vector<float>& values) {
  FloatBuffer x = device.allocate<float>(Memory::data, {int64_t(values.size())});
  if (!values.empty()) device.upload(x.data, values.data(), int64_t(values.size()));
  return x;
}

IntBuffer Rank::ints(const std::vector<int>& values) {
  IntBuffer x = device.allocate<int>(Memory::data, {int64_t(values.size())});
  if (!values.empty()) device.upload(x.data, values.data(), int64_t(values.size()));
  return x;
}

FloatBuffer Rank::unfilled(int64_t count) { return floats(std::vector<float>(count, NAN)); }

void Rank::measure(const std::function<void()>& call) {
  int64_t before = 0;
  device.reset_peaks();
  for (int kind = 0; kind < kMemoryKinds; ++kind) before += device.current(Memory(kind));
  world.reset_traffic();
  call();
  device.synchronize();
  result.traffic = world.traffic();
  result.peak = -before;
  for (int kind = 0; kind < kMemoryKinds; ++kind) result.peak += device.peak(Memory(kind));
}

Check::Check(int ranks, std::string setup, std::string rule)
    : ranks_(ranks), setup_(std::move(setup)), rule_(std::move(rule)), results_(ranks) {}

void Check::end_of_run(int status) {
  if (status == 0) return;
  kind_ = says(kTodo) ? Kind::todo
          : says("deadlock:") || says(" waits for it") || says("timeout:") ? Kind::deadlock : Kind::wrong;
  if (kind_ != Kind::todo) return;
  const size_t from = failure_.find(kTodo), end = failure_.find(')', from);  // without what the ranks were doing
  failure_ = failure_.substr(from, end == std::string::npos ? end : end + 1 - from);
}

void Check::run(const std::function<void(Rank&)>& body) {
  sim::WorldOptions options;
  options.timeout_s = 20;
  options.print = [&](const std::string& text) {  // on this thread, when all ranks have ended; the first says most
    if (failure_.empty()) failure_ = text;
  };
  end_of_run(sim::run_threads(ranks_, options, [&](int rank) {
    Device device(rank);
    World world(device);
    Rank me{world, device, world.all(), rank, ranks_};
    body(me);
    results_[rank] = std::move(me.result);
    return 0;
  }));
}

void Check::call(const std::function<std::vector<float>()>& body) {
  no_ranks_ = true;
  try {
    results_[0].got = body();
  } catch (const std::exception& e) {
    failure_ = e.what();
    end_of_run(1);
  }
}

void Check::want(int rank, std::vector<float> values) { wanted_.push_back({rank, std::move(values)}); }

int64_t Check::sent(int rank) const {
  int64_t bytes = 0;
  for (const Traffic& row : results_[rank].traffic) bytes += row.sent;
  return bytes;
}

int64_t Check::sent_in(int rank, const std::string& group) const {
  int64_t bytes = 0;
  for (const Traffic& row : results_[rank].traffic) bytes += row.group == group ? row.sent : 0;
  return bytes;
}

void Check::count(int rank, int64_t counted, int64_t should, const std::string& unit) {
  if (!ran() || counted == should || communication_.size() > 300) return;
  communication_ += (communication_.empty() ? "" : "\n") +
                    format("rank %d: %lld %s, should be %lld", rank, (long long)counted, unit.c_str(), (long long)should);
}

void Check::sends(int rank, int64_t bytes, int64_t messages) {
  int64_t sent_messages = 0;
  for (const Traffic& row : results_[rank].traffic) sent_messages += row.messages;
  count(rank, sent(rank), bytes, "bytes sent");
  if (messages >= 0) count(rank, sent_messages, messages, "messages sent");
}

void Check::sends_in(int rank, const std::string& group, int64_t bytes) {
  count(rank, sent_in(rank, group), bytes, "bytes sent in group '" + group + "'");
}

int64_t Check::called(int rank, const std::string& operation) const {
  int64_t calls = 0;
  for (const Traffic& row : results_[rank].traffic) calls += row.operation == operation ? row.calls : 0;
  return calls;
}

void Check::calls(int rank, const std::string& operation, int64_t calls) {
  count(rank, called(rank, operation), calls, "calls of " + operation);
}

void Check::memory(int64_t bytes, const std::string& what) {
  for (int r = 0; r < ranks_ && ran() && memory_.empty(); ++r)
    if (results_[r].peak > bytes)
      memory_ = format("rank %d: %lld bytes at the peak, at most %lld are needed (%s)", r, (long long)results_[r].peak,
                       (long long)bytes, what.c_str());
}

void Check::complain(const std::string& what, const std::string& line) {
  if (ran() && own_.empty()) own_ = format("\n  %-9s%s", what.c_str(), line.c_str());
}

float Check::got(int rank, int64_t i) const {
  const std::vector<float>& values = results_[rank].got;
  return i < int64_t(values.size()) ? values[i] : NAN;
}

bool Check::all_got(const std::function<float(int, int64_t)>& value) const {
  for (int r = 0; r < ranks_; ++r) {
    if (results_[r].got.empty()) return false;
    for (size_t i = 0; i < results_[r].got.size(); ++i)
      if (!close(results_[r].got[i], value(r, int64_t(i)))) return false;
  }
  return true;
}

bool Check::close(float got, float want) const {
  if (got == want) return true;  // also infinities
  return std::isfinite(got) && std::isfinite(want) && std::abs(double(got) - want) <= tolerance_ * std::abs(double(want));
}

bool Check::wrong_values() const {
  for (const Wanted& w : wanted_) {
    if (results_[w.rank].got.size() != w.values.size()) return true;
    for (size_t i = 0; i < w.values.size(); ++i)
      if (!close(results_[w.rank].got[i], w.values[i])) return true;
  }
  return false;
}

std::string Check::number(float value) const {
  if (std::isnan(value)) return "NaN (never written, or made of what was never written)";
  std::string text = format("%.8g", value);
  return decode_ ? text + " (" + decode(value, ranks_) + ")" : text;
}

// One place per rank, of at most three ranks.
std::string Check::compare_values() const {
  std::string text;
  int shown = 0, wrong_ranks = 0;
  for (const Wanted& w : wanted_) {
    const std::vector<float>& got = results_[w.rank].got;
    const std::string where = no_ranks_ ? "" : format("rank %d", w.rank);
    std::string line;
    if (got.size() != w.values.size()) line = where + format(": %zu values, should be %zu", got.size(), w.values.size());
    for (size_t i = 0; i < w.values.size() && line.empty(); ++i) {
      if (close(got[i], w.values[i])) continue;
      const std::string name = i < names_.size() ? names_[i] : format("element %zu", i);
      line = where + (where.empty() ? "" : ", ") + name + ": got " + number(got[i]) + ", wanted " + number(w.values[i]);
    }
    if (line.empty()) continue;
    ++wrong_ranks;
    if (shown < kPlaces) text += (shown++ ? "\n" : "") + line;
  }
  if (wrong_ranks > shown) text += format("\nand %d more", wrong_ranks - shown);
  return text;
}

void Check::likely(bool condition, const std::string& text) {
  if (condition && likely_.empty()) likely_ = text;
}

void Check::verdict() {
  session().checks++;
  const std::string values = ran() ? compare_values() : "";
  if (ran() && values.empty() && communication_.empty() && memory_.empty() && own_.empty()) return;
  if (session().kind != Kind::passed) return;  // the first failure is enough
  std::string text = "\n  set-up   " + (no_ranks_ ? "" : format("%d rank%s, ", ranks_, ranks_ == 1 ? "" : "s")) + setup_;
  text += "\n  rule     " + indented(rule_, 4) + (session().note.empty() ? "" : "\n           " + session().note);
  if (kind_ == Kind::passed) kind_ = own_.find("\n  deadlock") == 0 ? Kind::deadlock : Kind::wrong;
  else text += "\n  " + std::string(kind_ == Kind::deadlock ? "waits    " : kind_ == Kind::todo ? "todo     " : "stopped  ") +
               indented(failure_, 6);
  if (!values.empty()) text += "\n  values   " + indented(values, 4);
  if (!communication_.empty()) text += "\n  counted  " + indented(communication_, 3);
  if (!memory_.empty()) text += "\n  memory   " + memory_;
  text += own_;
  if (kind_ != Kind::todo && !likely_.empty()) text += "\n  likely   " + indented(likely_, 4);
  session().kind = kind_;
  session().text = text;
  FAIL("see the report");
}
