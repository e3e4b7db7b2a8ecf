// The timeline: times are what happened on the streams, and its files are what their readers expect.
#include "../src/trace.h"

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "../src/device.h"

namespace {

void nap(void* ms) { std::this_thread::sleep_for(std::chrono::milliseconds(*static_cast<int*>(ms))); }

const Span& named(const std::vector<Span>& spans, const std::string& name) {
  auto it = std::find_if(spans.begin(), spans.end(), [&](const Span& s) { return s.name == name; });
  REQUIRE(it != spans.end());
  return *it;
}

Span box(int rank, const char* stream, const char* category, const char* name, double start, double end) {
  Span s;
  s.rank = rank, s.stream = stream, s.category = category, s.name = name, s.start_us = start, s.end_us = end;
  return s;
}

// Every tag is closed in order, every & begins an entity, and no attribute lacks its quotes.
bool well_formed(const std::string& text) {
  std::vector<std::string> open;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '&') {
      const std::string entity = text.substr(at, text.find(';', at) + 1 - at);
      if (!std::set<std::string>{"&amp;", "&lt;", "&gt;", "&quot;"}.count(entity)) return false;
    }
    if (static_cast<unsigned char>(text[at]) < 32 && text[at] != '\n') return false;
    if (text[at] == '>') return false;
    if (text[at] != '<') continue;
    const size_t end = text.find('>', at);
    if (end == std::string::npos) return false;
    const std::string tag = text.substr(at + 1, end - at - 1);
    if (std::count(tag.begin(), tag.end(), '"') % 2 || tag.find('<') != std::string::npos) return false;
    const std::string name = tag.substr(0, tag.find_first_of(" /", 1));
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return false;
      open.pop_back();
    } else if (tag.back() != '/') {
      open.push_back(name);
    }
    at = end;
  }
  return open.empty();
}

int count(const std::string& text, const std::string& part) {
  int times = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++times;
  return times;
}

}  // namespace

TEST_CASE("trace: spans lie where their work ran, on the stream they name") {
  cudaStream_t side = nullptr;
  CUDA_CHECK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
  int twenty = 20, thirty = 30;
  Trace trace;
  CHECK(!trace.on());
  const auto clock_us = [] {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  trace.start(3);
  CHECK(trace.on());
  const double before = clock_us();
  {
    Trace::Scope sent(&trace, side, "communication", "communication", "all-reduce", "bytes 4096", "AR");
    CUDA_CHECK(cudaLaunchHostFunc(side, nap, &thirty));
  }
  {
    Trace::Scope outer(&trace, nullptr, "compute", "compute", "forward");
    Trace::Scope inner(&trace, nullptr, "compute", "compute", "block");
    CUDA_CHECK(cudaLaunchHostFunc(nullptr, nap, &twenty));
  }
  {
    Trace::Scope open(&trace, nullptr, "compute", "compute", "open");
    CHECK(trace.spans().size() == 3);  // it has not ended
  }
  const std::vector<Span> spans = trace.spans();
  const double after = clock_us();
  REQUIRE(spans.size() == 4);
  CHECK(trace.spans() == spans);
  const Span &forward = named(spans, "forward"), &block = named(spans, "block"),
             &sent = named(spans, "all-reduce");
  CHECK(sent.rank == 3);
  CHECK(sent.stream == "communication");
  CHECK(sent.details == "bytes 4096");
  CHECK(sent.label == "AR");
  CHECK(forward.start_us <= block.start_us);
  CHECK(block.end_us <= forward.end_us);
  for (const Span& s : spans) {  // on the clock that all ranks share
    CHECK(s.start_us >= before - 1000);
    CHECK(s.start_us <= s.end_us);
    CHECK(s.end_us <= after + 1000);
  }
  CHECK(block.end_us - block.start_us > 19000);
  CHECK(sent.end_us - sent.start_us > 29000);
#ifndef RINGTRON_CUDA  // a GPU may run the host functions of its streams one after the other
  CHECK(sent.start_us < forward.end_us);
  CHECK(forward.start_us < sent.end_us);
#endif
  trace.stop();
  { Trace::Scope off(&trace, nullptr, "compute", "compute", "off"); }
  CHECK(trace.spans() == spans);
  trace.start(5);
  { Trace::Scope on(&trace, nullptr, "compute", "compute", "again"); }
  REQUIRE(trace.spans().size() == 5);
  CHECK(trace.spans()[4].rank == 5);
  CHECK(trace.spans()[4].start_us >= after - 1000);
  CUDA_CHECK(cudaStreamDestroy(side));
}

TEST_CASE("trace: switched off it records nothing and takes no time") {
  Trace off;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 1000000; ++i) {
    Trace::Scope none(nullptr, nullptr, "compute", "compute", "forward");
    Trace::Scope nothing(&off, nullptr, "compute", "compute", "forward", "bytes", "F");
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  CHECK(off.spans().empty());
  CHECK(took.count() < 0.5);  // two events alone would take longer
}

TEST_CASE("trace: spans as bytes come back as they were") {
  std::vector<Span> spans = {box(0, "compute", "compute", "forward", 1234567890123.4375, 1234567890456.1),
                             box(1, "a \"b\"\n", "communication",
                                 "Gr\xc3\xb6\xc3\x9f"
                                 "e <&>",
                                 0.1, 1.0 / 3)};
  spans[1].details = "bytes 17";
  spans[1].label = "B1";
  spans[1].pale = true;
  CHECK(parse_spans(serialize(spans)) == spans);
  CHECK(parse_spans(serialize({})).empty());
  for (const std::string wrong :
       {"", "nonsense", "[[1,2]]", "[1]", "{}x", "[[0,\"\",\"\",\"\",\"\",\"\",0,\"1\",false]]"})
    CHECK_THROWS_AS(parse_spans(wrong), Error);
  const std::string text = serialize(spans);
  CHECK_THROWS_AS(parse_spans(text.substr(0, text.size() / 2)), Error);
}

TEST_CASE("trace: the Chrome trace has what Perfetto needs") {
  std::vector<Span> spans;
  for (int rank = 0; rank < 2; ++rank) {
    spans.push_back(box(rank, "compute", "compute", "forward", 1e12 + 100, 1e12 + 350.5));
    spans.push_back(box(rank, "compute", "compute", "back\"ward", 1e12 + 350.5, 1e12 + 800));
    spans.push_back(box(rank, "communication", "communication", "all-reduce \xff", 1e12 + 400, 1e12 + 700));
    spans.back().details = "bytes 4096";
  }
  const std::string path =
      (std::filesystem::temp_directory_path() / format("ringtron_trace_%d.json", int(getpid()))).string();
  write_chrome_trace(path, spans);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  const nlohmann::json trace = nlohmann::json::parse(text.str());
  std::map<std::string, int> seen;
  std::set<std::string> colours;
  for (const auto& e : trace.at("traceEvents")) {
    CHECK(e.at("pid").get<int>() >= 1);
    CHECK(e.at("tid").get<int>() >= 1);
    const std::string phase = e.at("ph"), name = e.at("name");
    if (phase == "M") {
      ++seen[name];
      if (name == "process_name")
        CHECK(e.at("args").at("name") == format("rank %d", e.at("pid").get<int>() - 1));
      continue;
    }
    CHECK(phase == "X");
    ++seen[e.at("cat")];
    colours.insert(e.at("cname"));
    if (name == "forward") {
      CHECK(e.at("ts").get<double>() == 0);
      CHECK(e.at("dur").get<double>() == 250.5);
    }
    if (e.at("cat") == "communication") CHECK(e.at("args").at("details") == "bytes 4096");
  }
  CHECK(seen["process_name"] == 2);
  CHECK(seen["thread_name"] == 4);
  CHECK(seen["compute"] == 4);
  CHECK(seen["communication"] == 2);
  CHECK(colours.size() == 3);
  CHECK(nlohmann::json::parse(chrome_trace({})).at("traceEvents").empty());
}

TEST_CASE("trace: the SVG is well formed, and shows every box") {
  std::vector<Span> spans;
  for (int rank = 0; rank < 3; ++rank) {
    spans.push_back(box(rank, "compute", "compute", "forward", 0, 4000));
    spans.push_back(box(rank, "compute", "compute", "attention <&\" \x01", 500, 3000));
    spans.push_back(box(rank, "compute", "compute", "backward", 4000, 9000));
    spans.push_back(box(rank, "communication", "communication", "all-reduce", 5000, 9500));
    spans.back().details = "bytes > 0 & <1 GB";
    spans.push_back(box(rank, "compute", "compute", "update", 9500, 10000));
  }
  SvgOptions options;
  options.title = "data \"parallel\" & <overlap>";
  options.idle = true;
  const std::string picture = svg(spans, options);
  CHECK(well_formed(picture));
  CHECK(count(picture, "<g>") == 15);
  for (const char* text :
       {">rank 0<", ">rank 2<", ">communication<", ">forward<", ">update<", ">time, ms<", ">10<"})
    CHECK(picture.find(text) != std::string::npos);
  CHECK(count(picture, ">attention &lt;&amp;&quot;  <") == 3);
  CHECK(picture.find("NaN") == std::string::npos);
  CHECK(picture.find("nan") == std::string::npos);

  CHECK(well_formed(svg({})));
  CHECK(well_formed(svg({box(0, "", "", "", 5, 5)})));
  CHECK(svg({}).find("nothing was recorded") != std::string::npos);

  // A hundred thousand slivers stay a small picture; what lies far apart stays apart.
  std::vector<Span> many;
  for (int i = 0; i < 100000; ++i) many.push_back(box(0, "compute", "compute", "forward", i, i + 0.9));
  CHECK(svg(many).size() < 200000);
  CHECK(well_formed(svg(many)));
}
