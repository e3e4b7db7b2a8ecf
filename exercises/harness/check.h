// check.h - how a check of an exercise is written: run the learner's function on ranks that are threads, compare
// values, communication and memory with what they should be, and say what is probably wrong.
//
//   TEST_CASE("every rank ends with the sum") {
//     for (int n : {1, 2, 3, 4, 8}) {
//       Check check(n, "X = 10 elements, rank r contributes 8^r", "all-reduce: every rank ends with the sum over ranks");
//       check.run([&](Rank& me) {
//         FloatBuffer x = me.floats(std::vector<float>(10, fingerprint(me.rank)));
//         me.measure([&] { ring_all_reduce(me.group, x); });
//         me.output(x);
//       });
//       for (int r = 0; r < n; ++r) check.want(r, ...), check.sends(r, bytes, messages);
//       check.likely(condition, "the diagnosis");       // the first whose condition holds is printed
//       check.verdict();                                // the only place that asserts, on the main thread
//     }
//   }
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "../../src/world.h"
#include "../exercises.h"

enum class Kind { passed = 0, wrong = 1, todo = 2, deadlock = 3, crash = 4, harness = 5 };

// Rank r contributes 8^r, which a float holds exactly for 8 ranks: a sum's octal digits tell who is in it how often.
float fingerprint(int rank);
std::string decode(float value, int ranks);  // "ranks 0, 2; rank 1 is missing"

// What a rank has to show afterwards.
struct Result {
  std::vector<float> got;
  std::vector<Traffic> traffic;
  int64_t peak = 0;  // bytes on the device at the same time, beyond those before the call
};

// One rank, as a check's body sees it.
class Rank {
 public:
  World& world;
  Device& device;
  Group& group;  // all ranks
  const int rank, ranks;

  FloatBuffer floats(const std::vector<float>& values);
  IntBuffer ints(const std::vector<int>& values);
  FloatBuffer unfilled(int64_t count);  // NaN
  // Counts what the call sends, and how much memory it takes.
  void measure(const std::function<void()>& call);
  void output(const FloatBuffer& x) { result.got = x.to_host(); }
  void output(const std::vector<float>& x) { result.got = x; }

  Result result{};
};

class Check {
 public:
  Check(int ranks, std::string setup, std::string rule);

  void run(const std::function<void(Rank&)>& body);
  void call(const std::function<std::vector<float>()>& body);  // no ranks: a formula, a schedule

  void decode_sums() { decode_ = true; }  // values are sums of fingerprints
  void name_values(std::vector<std::string> names) { names_ = std::move(names); }
  void tolerance(double relative) { tolerance_ = relative; }
  void want(int rank, std::vector<float> values);
  void want(std::vector<float> values) { want(0, std::move(values)); }
  void sends(int rank, int64_t bytes, int64_t messages = -1);      // in all groups and operations
  void sends_in(int rank, const std::string& group, int64_t bytes);
  void calls(int rank, const std::string& operation, int64_t calls);
  void memory(int64_t bytes, const std::string& what);             // at most, on every rank
  void complain(const std::string& what, const std::string& line);  // a finding of the check's own

  // What came out, for the conditions of likely(); NaN or 0 where a rank got nowhere.
  float got(int rank, int64_t i = 0) const;
  bool all_got(const std::function<float(int rank, int64_t i)>& value) const;  // of every rank and element
  int64_t sent(int rank) const;
  int64_t sent_in(int rank, const std::string& group) const;
  int64_t called(int rank, const std::string& operation) const;
  bool wrong_values() const;
  bool too_much_memory() const { return !memory_.empty(); }
  bool deadlocked() const { return kind_ == Kind::deadlock; }
  bool says(const std::string& text) const { return failure_.find(text) != std::string::npos; }
  bool ran() const { return kind_ == Kind::passed; }

  void likely(bool condition, const std::string& text);
  void verdict();

 private:
  struct Wanted {
    int rank;
    std::vector<float> values;
  };
  void end_of_run(int status);
  void count(int rank, int64_t counted, int64_t should, const std::string& unit);
  bool close(float got, float want) const;
  std::string compare_values() const;
  std::string number(float value) const;
  int ranks_;
  std::string setup_, rule_, failure_, likely_, communication_, memory_, own_;
  std::vector<std::string> names_;
  bool decode_ = false, no_ranks_ = false;
  double tolerance_ = 0;
  Kind kind_ = Kind::passed;  // how the run ended; before verdict() nothing is known of values
  std::vector<Result> results_;
  std::vector<Wanted> wanted_;
};

// What the program knows about itself and has found; main.cpp prints it.
struct Session {
  std::string slug, note;
  int checks = 0;          // verdicts given
  Kind kind = Kind::passed;
  std::string text;        // of the first failure
};
Session& session();
