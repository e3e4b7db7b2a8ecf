// programs.h - for the tests: starts the built programs as a reader does, and keeps what they print.
#pragma once
#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

// The path of a program in the folder of the one that runs: lessons and tools stand beside the tests.
inline std::string built(const std::string& name) {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / name).string();
}

struct Ended {
  std::string text;  // stdout and stderr
  int status;        // 0 only if it succeeded
  double took;       // seconds
  bool says(const std::string& s) const { return text.find(s) != std::string::npos; }
};

// Runs a command and waits for its end; what has not ended after 100 s is stopped, and that is a failure.
inline Ended run(const std::string& command, const std::function<void(const std::string&)>& on_line = nullptr) {
  using Clock = std::chrono::steady_clock;
  Ended ended;
  const auto start = Clock::now();
  std::FILE* pipe = popen(("exec 2>&1 </dev/null; MPIEXEC_TIMEOUT=90 timeout 100 " + command).c_str(), "r");
  REQUIRE(pipe);
  char line[4096];
  while (std::fgets(line, sizeof line, pipe)) {
    ended.text += line;
    if (on_line) on_line(line);
  }
  ended.status = pclose(pipe);
  ended.took = std::chrono::duration<double>(Clock::now() - start).count();
  return ended;
}

// True, and said so that scripts/test.sh counts it, where ranks can't be processes.
inline bool no_mpiexec() {
#ifdef HAVE_MPI
  if (std::system("command -v mpiexec >/dev/null") == 0) return false;
#endif
  std::puts("skipped: no mpiexec");
  return true;
}
