// trace.h - the timeline: what ran when, on which stream of which rank, and the pictures of it.
#pragma once
#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

// One box of a timeline, and of a drawn pipeline schedule.
struct Span {
  int rank = 0;
  std::string stream;    // the row within the rank
  std::string category;  // compute, communication, other, idle
  std::string name;      // starts with forward, backward, weight or update, if it is one: its colour
  std::string details;   // for whoever points at it: bytes, group
  std::string label;     // a few characters inside the box, if they fit ("F3"); empty: the name
  double start_us = 0, end_us = 0;
  bool pale = false;  // a lighter shade of the colour: the second chunk of a stage

  bool operator==(const Span&) const = default;
};

// One rank's spans, used by the rank's own thread; records nothing until it is switched on.
class Trace {
  struct Recorded {
    Span span;  // without its times, which the events have
    cudaEvent_t begin = nullptr, end = nullptr;
    cudaError_t status = cudaSuccess;  // of what a destructor could not throw
    ~Recorded();
  };

 public:
  Trace() = default;
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  // Switches it on, for the first time or again. Times count from the zero of the machine's steady clock,
  // which all processes of a machine share, so that spans of several ranks lie beside each other; the writers
  // below subtract the earliest. CUDA gives float milliseconds since this call: after 1 s they are 0.1 us
  // fine, after 10 s 1 us. So start shortly before the steps to be seen. Throws Error if CUDA refuses.
  void start(int rank);
  void stop() { on_ = false; }  // keeps what is recorded
  bool on() const { return on_; }

  // Records when the work that is put on `stream` between construction and destruction runs there. CUDA
  // events mark both ends in the stream itself, so it is right for asynchronous streams too. A null or
  // switched-off Trace costs one branch (format() makes its text anyway: ask on() first where that matters).
  class Scope {
   public:
    Scope(Trace* trace, cudaStream_t stream, const char* stream_name, const char* category,
          std::string_view name, std::string_view details = {}, std::string_view label = {}) {
      if (trace && trace->on_) begin(*trace, stream, stream_name, category, name, details, label);
    }
    ~Scope() {
      if (trace_) end();
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void begin(Trace& trace, cudaStream_t stream, const char* stream_name, const char* category,
               std::string_view name, std::string_view details, std::string_view label);
    void end() noexcept;
    Trace* trace_ = nullptr;  // null: nothing to record
    cudaStream_t stream_ = nullptr;
    Recorded* recorded_ = nullptr;
  };

  // Waits for the events; then everything since the first start, in the order in which the scopes ended.
  // Scopes that are still open come with a later call. Throws Error if the work of a stream failed.
  std::vector<Span> spans();

 private:
  void read();  // recorded_ into done_
  bool on_ = false;
  int rank_ = 0;
  cudaEvent_t base_ = nullptr;  // an event whose time is known on both clocks
  double base_us_ = 0;
  std::vector<std::unique_ptr<Recorded>> recorded_;
  std::vector<Span> done_;
};

// Bytes to send spans from rank to rank. parse throws Error if the text is not what serialize makes.
std::string serialize(const std::vector<Span>& spans);
std::vector<Span> parse_spans(const std::string& text);

// Chrome's trace format, which https://ui.perfetto.dev opens: a process is a rank, a thread is a stream.
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
std::string chrome_trace(const std::vector<Span>& spans);
void write_chrome_trace(const std::string& path, const std::vector<Span>& spans);  // whole or not at all

struct SvgOptions {
  std::string title;
  std::string row = "rank";   // what a rank is called: "stage" in a schedule
  double us_per_unit = 1000;  // with `unit`: of the time axis. A schedule in units of tF: 1 and "tF"
  std::string unit = "ms";
  bool idle = false;  // hatch where a row has nothing to do, from the first start to the last end
  int width = 900;    // pixels
  int row_height = 20;
};

// A picture that stands alone: a row for each rank and stream, boxes coloured by what they do (nested spans
// below the one that holds them, as in a flame graph), a time axis, a legend. Has its own background.
std::string svg(const std::vector<Span>& spans, const SvgOptions& options = {});
void write_svg(const std::string& path, const std::vector<Span>& spans, const SvgOptions& options = {});
