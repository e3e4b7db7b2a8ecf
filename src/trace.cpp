#include "trace.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "device.h"
#include "safetensors.h"

// ---- recording ----

namespace {
double now_us() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::micro>(now).count();
}
}  // namespace

Trace::Recorded::~Recorded() {
  if (begin) cudaEventDestroy(begin);
  if (end) cudaEventDestroy(end);
}

Trace::~Trace() {
  if (base_) cudaEventDestroy(base_);
}

void Trace::start(int rank) {
  read();  // their times count from the base so far
  rank_ = rank;
  if (!base_) CUDA_CHECK(cudaEventCreate(&base_));
  // The event happened between two looks at the clock. A tight pair leaves out the start of the driver.
  double tightest = INFINITY;
  for (int i = 0; i < 10; ++i) {
    const double before = now_us();
    CUDA_CHECK(cudaEventRecord(base_, nullptr));
    CUDA_CHECK(cudaEventSynchronize(base_));
    const double after = now_us();
    base_us_ = (before + after) / 2;
    tightest = std::min(tightest, after - before);
    if (i > 0 && after - before <= 1.5 * tightest) break;
  }
  on_ = true;
}

void Trace::Scope::begin(Trace& trace, cudaStream_t stream, const char* stream_name, const char* category,
                         std::string_view name, std::string_view details, std::string_view label) {
  auto recorded = std::make_unique<Recorded>();
  Span& span = recorded->span;
  span.rank = trace.rank_;
  span.stream = stream_name;
  span.category = category;
  span.name = name;
  span.details = details;
  span.label = label;
  CUDA_CHECK(cudaEventCreate(&recorded->begin));
  CUDA_CHECK(cudaEventCreate(&recorded->end));
  CUDA_CHECK(cudaEventRecord(recorded->begin, stream));
  trace_ = &trace;
  stream_ = stream;
  recorded_ = recorded.release();  // end() gives it to the trace
}

void Trace::Scope::end() noexcept {
  std::unique_ptr<Recorded> recorded(recorded_);
  recorded->status = cudaEventRecord(recorded->end, stream_);
  trace_->recorded_.push_back(std::move(recorded));
}

// All times of one start() are taken from the same event: rounding then keeps their order, so what was nested
// stays so.
void Trace::read() {
  for (const auto& r : recorded_) {
    float begin = 0, end = 0;
    check_cuda(r->status, "cudaEventRecord at the end of a traced scope");
    CUDA_CHECK(cudaEventSynchronize(r->end));
    CUDA_CHECK(cudaEventElapsedTime(&begin, base_, r->begin));
    CUDA_CHECK(cudaEventElapsedTime(&end, base_, r->end));
    r->span.start_us = base_us_ + 1e3 * double(begin);
    r->span.end_us = base_us_ + 1e3 * double(end);
    done_.push_back(std::move(r->span));
  }
  recorded_.clear();
}

std::vector<Span> Trace::spans() {
  read();
  return done_;
}

// ---- as bytes ----

namespace {
using nlohmann::json;

// Bytes that are no UTF-8 become a replacement character: a name must not stop a picture.
std::string dump(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }
}  // namespace

std::string serialize(const std::vector<Span>& spans) {
  json all = json::array();
  for (const Span& s : spans)
    all.push_back({s.rank, s.stream, s.category, s.name, s.details, s.label, s.start_us, s.end_us, s.pale});
  return dump(all);
}

std::vector<Span> parse_spans(const std::string& text) {
  std::vector<Span> spans;
  try {
    for (const json& s : json::parse(text)) {
      if (s.size() != 9) throw Error(format("a span of a timeline has %zu fields, not 9", s.size()));
      spans.push_back({s.at(0), s.at(1), s.at(2), s.at(3), s.at(4), s.at(5), s.at(6), s.at(7), s.at(8)});
    }
  } catch (const json::exception& wrong) {
    throw Error(format("%zu bytes are no spans of a timeline, as serialize() makes them: %s", text.size(),
                       wrong.what()));
  }
  return spans;
}

// ---- what the pictures share ----

namespace {

struct Group {
  const char *name, *fill, *pale, *text;  // text: readable on the fill
  const char* chrome;                     // a colour of chrome://tracing; Perfetto chooses its own by name
};
constexpr Group kGroups[] = {
    {"forward", "#3b6fb6", "#9dbde6", "#ffffff", "thread_state_runnable"},
    {"backward", "#4f9d69", "#a9d6b8", "#ffffff", "thread_state_running"},
    {"weight", "#8a63a8", "#cdb6de", "#ffffff", "rail_animation"},
    {"update", "#e3c04b", "#f2e1a4", "#1f2328", "rail_idle"},
    {"compute", "#5f8f9b", "#b3ced5", "#ffffff", "rail_load"},
    {"communication", "#e07b39", "#f3c19f", "#1f2328", "thread_state_iowait"},
    {"other", "#9aa4af", "#cfd5db", "#1f2328", "generic_work"},
    {"idle", "url(#idle)", "url(#idle)", "#1f2328", "white"},
};

// By what it is, then, for compute, by the first word of its name.
const Group& group_of(const Span& s) {
  auto named = [](const std::string& text) {
    size_t word = 0;
    while (word < text.size() && std::isalpha(static_cast<unsigned char>(text[word]))) ++word;
    return std::find_if(std::begin(kGroups), std::end(kGroups),
                        [&](const Group& g) { return text.compare(0, word, g.name) == 0; });
  };
  const Group* it = s.category == "compute" ? named(s.name) : named(s.category);
  if (it == std::end(kGroups)) it = named(s.category);
  return it == std::end(kGroups) ? *named("other") : *it;
}

double first_start(const std::vector<Span>& spans) {
  double first = INFINITY;
  for (const Span& s : spans) first = std::min(first, s.start_us);
  return spans.empty() ? 0 : first;
}

// In the order in which they first appear, the same for every rank.
std::vector<std::string> streams_of(const std::vector<Span>& spans) {
  std::vector<std::string> streams;
  for (const Span& s : spans)
    if (std::find(streams.begin(), streams.end(), s.stream) == streams.end()) streams.push_back(s.stream);
  return streams;
}

// The rows of a picture: rank by rank, its streams in their common order.
std::map<std::pair<int, int>, std::vector<const Span*>> rows_of(const std::vector<Span>& spans,
                                                                const std::vector<std::string>& streams) {
  std::map<std::pair<int, int>, std::vector<const Span*>> rows;
  for (const Span& s : spans)
    rows[{s.rank, int(std::find(streams.begin(), streams.end(), s.stream) - streams.begin())}].push_back(&s);
  for (auto& [key, row] : rows)  // whoever holds another comes before it
    std::stable_sort(row.begin(), row.end(), [](const Span* a, const Span* b) {
      return a->start_us != b->start_us ? a->start_us < b->start_us : a->end_us > b->end_us;
    });
  return rows;
}

}  // namespace

// ---- Chrome trace ----

std::string chrome_trace(const std::vector<Span>& spans) {
  const double first = first_start(spans);
  const std::vector<std::string> streams = streams_of(spans);
  std::string text = "{\"displayTimeUnit\": \"ms\",\n\"traceEvents\": [";
  const char* separator = "\n";
  auto event = [&](const std::string& fields) {
    text += separator + ("{" + fields + "}");
    separator = ",\n";
  };
  auto meta = [&](const char* what, int pid, int tid, const std::string& args) {
    event(format("\"ph\": \"M\", \"name\": \"%s\", \"pid\": %d, \"tid\": %d, \"args\": {%s}", what, pid, tid,
                 args.c_str()));
  };
  int last_pid = 0;
  for (const auto& [key, row] : rows_of(spans, streams)) {
    // From 1: process 0 and thread 0 are the idle task to Perfetto (google/perfetto issues 394, 560).
    const int rank = key.first, pid = rank + 1, tid = key.second + 1;
    if (pid != last_pid) {
      meta("process_name", pid, tid, format("\"name\": \"rank %d\"", rank));
      meta("process_sort_index", pid, tid, format("\"sort_index\": %d", rank));
    }
    last_pid = pid;
    meta("thread_name", pid, tid, "\"name\": " + dump(streams[key.second]));
    meta("thread_sort_index", pid, tid, format("\"sort_index\": %d", tid));
    for (const Span* s : row) {
      // Whole nanoseconds, and the length as their difference, so that rounding can't make neighbours
      // overlap, which the format forbids.
      const long long from = std::llround(1e3 * (s->start_us - first));
      const long long length = std::max(0LL, std::llround(1e3 * (s->end_us - first)) - from);
      json args = json::object();
      if (!s->details.empty()) args["details"] = s->details;
      if (!s->label.empty()) args["label"] = s->label;
      event(format(
          "\"ph\": \"X\", \"name\": %s, \"cat\": %s, \"ts\": %lld.%03lld, \"dur\": %lld.%03lld, \"pid\": %d, "
          "\"tid\": %d, \"cname\": \"%s\", \"args\": %s",
          dump(s->name).c_str(), dump(s->category).c_str(), from / 1000, from % 1000, length / 1000,
          length % 1000, pid, tid, group_of(*s).chrome, dump(args).c_str()));
    }
  }
  return text + "\n]}\n";
}

void write_chrome_trace(const std::string& path, const std::vector<Span>& spans) {
  save_json_text(path, chrome_trace(spans));
}

// ---- SVG ----

namespace {

std::string xml(const std::string& text) {
  std::string safe;
  for (char c : text) switch (c) {
      case '&': safe += "&amp;"; break;
      case '<': safe += "&lt;"; break;
      case '>': safe += "&gt;"; break;
      case '"': safe += "&quot;"; break;
      default: safe += static_cast<unsigned char>(c) < 32 ? ' ' : c;  // XML forbids most of these
    }
  return safe;
}

// Pixels that text of this size takes, a little too many: fonts differ.
double text_width(const std::string& text, double size) {
  int letters = 0;
  for (char c : text) letters += (c & 0xc0) != 0x80;  // UTF-8: continuation bytes are no letters
  return 0.62 * size * letters;
}

// A round distance of ticks, 1, 2 or 5 times a power of ten, for at most `most` of them.
double tick_distance(double length, int most) {
  const double power = std::pow(10, std::floor(std::log10(length / most)));
  for (double round : {1.0, 2.0, 5.0})
    if (round * power * most >= length) return round * power;
  return 10 * power;
}

constexpr const char* kInk = "#1f2328";
constexpr const char* kFaint = "#59636e";

}  // namespace

std::string svg(const std::vector<Span>& spans, const SvgOptions& o) {
  const double first = first_start(spans);
  double last = first;
  for (const Span& s : spans) last = std::max(last, s.end_us);
  const std::vector<std::string> streams = streams_of(spans);
  const auto rows = rows_of(spans, streams);

  // Columns: the rank, its stream (if there are several), the time.
  double rank_width = 0, stream_width = 0;
  for (const auto& [key, row] : rows)
    rank_width = std::max(rank_width, text_width(o.row + " " + std::to_string(key.first), 12));
  if (streams.size() > 1)
    for (const std::string& name : streams) stream_width = std::max(stream_width, text_width(name, 11) + 10);
  const double margin = 20, left = margin + rank_width + stream_width + 12, right = o.width - margin;
  const double scale = last > first ? (right - left) / (last - first) : 0;  // pixels per microsecond
  auto x_of = [&](double us) { return left + (us - first) * scale; };

  std::string tracks, grid, boxes, front;  // drawn in this order
  auto text = [](std::string& to, double x, double y, double size, const char* fill, const char* more,
                 const std::string& what) {
    to += format("<text x=\"%.2f\" y=\"%.2f\" font-size=\"%g\" fill=\"%s\"%s>%s</text>\n", x, y, size, fill,
                 more, xml(what).c_str());
  };
  auto rectangle = [](std::string& to, double x, double y, double width, double height, const char* fill) {
    to += format("<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"", x, y, width,
                 height, fill);
  };

  // Title, and a legend of what occurs.
  double y = margin;
  if (!o.title.empty()) {
    text(front, margin, y + 13, 16, kInk, " font-weight=\"600\"", o.title);
    y += 28;
  }
  double legend_x = margin;
  for (const Group& g : kGroups) {
    const bool idle = std::string_view(g.name) == "idle";
    if (!(idle && o.idle) &&
        std::none_of(spans.begin(), spans.end(), [&](auto& s) { return &group_of(s) == &g; }))
      continue;
    const double wide = 18 + text_width(g.name, 12) + 12;
    if (legend_x > margin && legend_x + wide > right) legend_x = margin, y += 20;
    rectangle(front, legend_x, y, 12, 12, g.fill);
    front += idle ? " stroke=\"#c5ccd3\" stroke-width=\"0.8\" rx=\"2\"/>\n" : " rx=\"2\"/>\n";
    text(front, legend_x + 18, y + 10.5, 12, kFaint, "", g.name);
    legend_x += wide;
  }
  y += 28;
  const double top = y;

  int last_rank = rows.empty() ? 0 : rows.begin()->first.first;
  bool new_rank = true;
  for (const auto& [key, row] : rows) {
    const auto [rank, stream] = key;
    if (rank != last_rank) y += 7, new_rank = true;
    last_rank = rank;

    // A span that begins while others still run goes below them. A quarter of a pixel is no overlap.
    std::vector<int> depth;
    std::vector<double> open;
    int lanes = 1;
    for (const Span* s : row) {
      while (!open.empty() && (open.back() - s->start_us) * scale < 0.25) open.pop_back();
      depth.push_back(int(open.size()));
      open.push_back(s->end_us);
      lanes = std::max(lanes, int(open.size()));
    }
    const double height = double(o.row_height) * lanes, middle = y + o.row_height / 2.0 + 4;
    if (new_rank)
      text(front, margin, middle, 12, kInk, " font-weight=\"600\"", o.row + " " + std::to_string(rank));
    new_rank = false;
    if (streams.size() > 1) text(front, margin + rank_width + 10, middle, 11, kFaint, "", streams[stream]);
    rectangle(tracks, left, y, right - left, height, o.idle ? "url(#idle)" : "#f3f5f7");
    tracks += "/>\n";

    // Slivers of one colour that would touch are drawn as one box, or a long trace would be a huge file.
    std::vector<std::pair<const Span*, double>> sliver(lanes);  // what it began with, its right end
    auto draw = [&](const Span& s, double from, double to, double lane_y) {
      const Group& g = group_of(s);
      const double wide = std::max(0.4, to - from), gap = wide > 4 ? 0.5 : 0;
      boxes += "<g>";
      rectangle(boxes, from + gap / 2, lane_y + 1, wide - gap, o.row_height - 2, s.pale ? g.pale : g.fill);
      if (wide > 4) boxes += " rx=\"2\"";
      boxes += format("><title>%s%s%s, %.6g to %.6g %s</title></rect>", xml(s.name).c_str(),
                      s.details.empty() ? "" : ", ", xml(s.details).c_str(),
                      (s.start_us - first) / o.us_per_unit, (s.end_us - first) / o.us_per_unit,
                      xml(o.unit).c_str());
      const std::string& label = s.label.empty() ? s.name : s.label;
      const double size = std::min(11.0, o.row_height * 0.6);
      if (!label.empty() && text_width(label, size) + 4 <= wide)
        text(boxes, from + wide / 2, lane_y + o.row_height / 2.0 + size * 0.36, size, s.pale ? kInk : g.text,
             " text-anchor=\"middle\" pointer-events=\"none\"", label);
      boxes += "</g>\n";
    };
    auto flush = [&](int lane) {
      auto& [begin, end] = sliver[lane];
      if (begin) draw(*begin, x_of(begin->start_us), end, y + lane * o.row_height);
      begin = nullptr;
    };
    for (size_t i = 0; i < row.size(); ++i) {
      const Span& s = *row[i];
      const double from = x_of(s.start_us), to = x_of(s.end_us);
      auto& [begin, end] = sliver[depth[i]];
      const bool small = to - from < 0.5;
      if (small && begin && &group_of(*begin) == &group_of(s) && begin->pale == s.pale && from - end < 0.25) {
        end = std::max(end, to);
        continue;
      }
      flush(depth[i]);
      if (small)
        begin = &s, end = to;
      else
        draw(s, from, to, y + depth[i] * o.row_height);
    }
    for (int lane = 0; lane < lanes; ++lane) flush(lane);
    y += height + 2;
  }
  const double bottom = y + 2;

  // The time axis.
  if (scale > 0) {
    const double length = (last - first) / o.us_per_unit, step = tick_distance(length, 10);
    const int digits = std::max(0, int(-std::floor(std::log10(step) + 1e-9)));
    for (int i = 0; i * step <= length * (1 + 1e-9); ++i) {
      const double x = x_of(first + i * step * o.us_per_unit);
      grid += format("<path d=\"M%.2f %.2fV%.2f\" stroke=\"#d5dbe1\" stroke-width=\"1\"/>\n", x, top - 4,
                     bottom + 4);
      text(front, x, bottom + 17, 11, kFaint, " text-anchor=\"middle\"", format("%.*f", digits, i * step));
    }
    text(front, margin, bottom + 17, 11, kFaint, "", "time, " + o.unit);
  } else {
    text(front, margin, bottom + 17, 11, kFaint, "", "nothing was recorded");
  }
  const double height = bottom + 17 + margin;

  return format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%.0f\" viewBox=\"0 0 %d %.0f\" "
             "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', "
             "sans-serif\">\n"
             "<title>%s</title>\n"
             "<defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
             "patternTransform=\"rotate(45)\"><rect width=\"6\" height=\"6\" fill=\"#f3f5f7\"/>"
             "<rect width=\"1.6\" height=\"6\" fill=\"#d8dee4\"/></pattern></defs>\n"
             "<rect x=\"0.5\" y=\"0.5\" width=\"%d\" height=\"%.0f\" rx=\"8\" fill=\"#ffffff\" "
             "stroke=\"#d5dbe1\"/>\n",
             o.width, height, o.width, height, xml(o.title.empty() ? "timeline" : o.title).c_str(),
             o.width - 1, height - 1) +
         tracks + grid + boxes + front + "</svg>\n";
}

void write_svg(const std::string& path, const std::vector<Span>& spans, const SvgOptions& options) {
  save_json_text(path, svg(spans, options));
}
