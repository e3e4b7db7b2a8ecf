// notes_check.cpp - are the numbers in the notes still what the commands print?
//
//   notes_check [--write] [FILE.md ...]        from the repository's root; default: notes/*.md and README.md
//
// A block of numbers is a fenced block with the info string `ringtron`:
//
//   ```ringtron
//   $ make run-single ARGS="--steps 3 --no-proof --sample 0" | grep loss
//   ...what it printed...
//   $ another command, if the block needs one
//   ```
//
// Every line that starts with "$ " is a command for bash, the lines up to the next one its output. To show some
// lines only, pipe into grep or sed (not head, which closes the pipe early: that counts as a failed command). A
// command runs once, however often it is written. It must succeed; begin it with `!` where it should fail.
// Blocks show the simulated GPU in fp32 (DEVICE=cpu PRECISION=fp32, unless a command says otherwise), so that every
// machine can check them.
//
// Left out of a block: what only says that something is being built (compiler lines, "make: ...", `make info`,
// "setup: ...") and make's echo of the command of a stage, which holds a build path.
//
// Compared, after runs of spaces are taken as one:
//   words and whole numbers (bytes, counts)                                      exactly
//   numbers with a decimal point or an exponent (losses, norms, estimates)       to 3 significant digits
//   not at all, because they depend on the machine or on rounding:
//     a number before s, ms, us, ns, seconds, tok/s, samples/s, FLOP/s, B/s (with k, M, G, T), "% of peak", "% of measured peak"
//     "0:12 left"
//     a number before "(at most 1e-06)" and what follows it (rounding noise; the word ok or FAIL is compared)
//     the last two fields of a "summary" line
//     numbers that end below a column title tokens/s, tok/s, seconds, s, ms, us, GFLOP/s, GB/s, until an empty line
//
// --write puts the fresh output into the blocks that no longer agree; the others keep theirs, so that a file changes
// only where something did.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using Lines = std::vector<std::string>;

struct Command {  // one "$ " line and the output written below it
  std::string text;
  size_t line;         // of the command, counted from 0
  size_t begin, end;   // the output's lines, [begin, end)
};

struct Run {
  int status = 0;
  Lines output;
};

Lines split_lines(std::istream& in) {
  Lines lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// Throws the number of the line that opens a block which nothing closes.
std::vector<Command> find_commands(const Lines& lines) {
  std::vector<Command> commands;
  std::string fence;  // the backticks that opened the block we are in
  bool ours = false;
  size_t opened = 0;
  for (size_t i = 0; i < lines.size(); ++i) {
    const std::string& line = lines[i];
    const size_t ticks = std::min(line.find_first_not_of('`'), line.size());
    if (fence.empty()) {
      if (ticks < 3) continue;
      fence = line.substr(0, ticks);
      ours = line.substr(ticks) == "ringtron";
      opened = i + 1;
    } else if (ticks >= fence.size() && ticks == line.size()) {
      if (ours && !commands.empty()) commands.back().end = std::min(commands.back().end, i);
      fence.clear();
      ours = false;
    } else if (ours && line.starts_with("$ ")) {
      if (!commands.empty()) commands.back().end = std::min(commands.back().end, i);
      commands.push_back({line.substr(2), i, i + 1, lines.size()});
    }
  }
  if (!fence.empty()) throw opened;
  return commands;
}

// Lines about building, and make's echo of a stage's command.
bool is_noise(const std::string& line) {
  static const std::regex noise(
      R"(^make(\[\d+\])?: .*|^  (g\+\+|clang\+\+|nvcc)\S*  \S+$|^setup: .*)"
      R"(|^(compiler|nvcc|GPUs|NCCL|MPI|BLAS|building) {2,}.*|^(.* )?build/[^/ ]+/\d\d_\w+( .*)?$)");
  return std::regex_match(line, noise);
}

Run run(const std::string& command) {
  Run result;
  setenv("NOTES_COMMAND", command.c_str(), 1);
  std::FILE* pipe = popen("timeout 600 bash -o pipefail -c \"$NOTES_COMMAND\" 2>&1 </dev/null", "r");
  if (!pipe) return {-1, {"notes_check: cannot start bash"}};
  std::string text;
  char buffer[4096];
  for (size_t got; (got = fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, got);
  result.status = pclose(pipe);
  std::istringstream in(text);
  for (std::string& line : split_lines(in)) {
    if (is_noise(line)) continue;
    line.erase(line.find_last_not_of(" \r") + 1);
    result.output.push_back(line);
  }
  while (!result.output.empty() && result.output.back().empty()) result.output.pop_back();
  return result;
}

// The lines with everything that depends on the machine replaced by "~", and runs of spaces by one.
Lines comparable(const Lines& lines) {
  static const std::string number = R"([-+]?\d[\d,]*(\.\d+)?([eE][-+]?\d+)?)";
  static const std::regex measured(number + R"(\s*([kMGTP]?(tok|samples|FLOP|B)/s|(s|ms|us|ns|seconds)\b|% of (measured )?peak))");
  static const std::regex left(R"(\d+:\d\d left)");
  static const std::regex noise(number + R"(( at most|\s+\(at most )([^)]*)\).*)");
  static const std::regex summary(R"(^(summary\t.*)\t[^\t]*\t[^\t]*$)");
  static const std::regex title(R"(\b(tokens/s|tok/s|seconds|s|ms|us|GFLOP/s|GB/s)(?=\s|$))");
  static const std::regex number_only(number), spaces(R"(\s+)");
  static const std::regex numbers_start(R"(\s\d)");
  using Match = std::sregex_iterator;
  Lines result;
  std::set<ptrdiff_t> columns;  // where a column of times or rates ends
  for (std::string line : lines) {
    if (line.empty()) columns.clear();
    for (Match m(line.begin(), line.end(), number_only), end; m != end; ++m)
      if (columns.contains(m->position() + m->length()))
        line.replace(m->position(), m->length(), std::string(m->length(), '~'));
    if (!std::regex_search(line, numbers_start))  // a line of titles has no numbers
      for (Match m(line.begin(), line.end(), title), end; m != end; ++m) columns.insert(m->position() + m->length());
    line = std::regex_replace(line, noise, "~ (at most $4)");
    line = std::regex_replace(line, measured, "~");
    line = std::regex_replace(line, left, "~");
    line = std::regex_replace(line, summary, "$1");
    line = std::regex_replace(line, std::regex("~+"), "~");
    line = std::regex_replace(line, spaces, " ");
    result.push_back(line);
  }
  return result;
}

bool same_number(std::string a, std::string b) {
  if (a == b) return true;
  auto whole = [](const std::string& s) { return s.find_first_of(".eE") == std::string::npos; };
  if (whole(a) && whole(b)) return false;
  auto value = [](std::string s) {
    std::erase(s, ',');
    return std::strtod(s.c_str(), nullptr);
  };
  const double x = value(a), y = value(b), larger = std::max(std::abs(x), std::abs(y));
  return std::abs(x - y) < 1.0001 * std::pow(10, std::floor(std::log10(larger)) - 2);
}

bool same_line(const std::string& a, const std::string& b) {
  static const std::regex number(R"(\d[\d,]*(\.\d+)?([eE][-+]?\d+)?)");
  using Match = std::sregex_iterator;
  Match m(a.begin(), a.end(), number), n(b.begin(), b.end(), number), end;
  std::string rest_a = a, rest_b = b;
  for (; m != end && n != end; ++m, ++n) {
    if (m->prefix() != n->prefix() || !same_number(m->str(), n->str())) return false;
    rest_a = m->suffix(), rest_b = n->suffix();
  }
  return m == end && n == end && rest_a == rest_b;
}

// The first line that differs, or -1.
ptrdiff_t first_difference(const Lines& written, const Lines& printed) {
  const Lines a = comparable(written), b = comparable(printed);
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i)
    if (i >= a.size() || i >= b.size() || !same_line(a[i], b[i])) return ptrdiff_t(i);
  return -1;
}

}  // namespace

int main(int argc, char** argv) {
  bool write = false;
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--write") write = true;
    else files.push_back(argv[i]);
  }
  if (files.empty()) {
    if (std::filesystem::is_directory("notes"))
      for (const auto& entry : std::filesystem::directory_iterator("notes"))
        if (entry.path().extension() == ".md") files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
    if (std::filesystem::exists("README.md")) files.push_back("README.md");
  }
  // A command's make must not take over the options of the make that started this program.
  for (const char* name : {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARGS", "NP"}) unsetenv(name);
  setenv("DEVICE", "cpu", 1);
  setenv("PRECISION", "fp32", 1);
  setenv("LC_ALL", "C.UTF-8", 1);

  int passed = 0, failed = 0;
  std::map<std::string, Run> runs;
  for (const std::string& path : files) {
    std::ifstream in(path);
    if (!in) {
      std::printf("FAIL %s: cannot read it\n", path.c_str());
      ++failed;
      continue;
    }
    Lines lines = split_lines(in);
    std::vector<Command> commands;
    try {
      commands = find_commands(lines);
    } catch (size_t line) {
      std::printf("FAIL %s:%zu the block that begins here is not closed\n", path.c_str(), line);
      ++failed;
    }
    Lines fresh;        // the file as --write leaves it
    size_t copied = 0;  // lines of it that are in `fresh`
    bool changed = false;
    for (const Command& c : commands) {
      if (!runs.contains(c.text)) runs[c.text] = run(c.text);
      const Run& result = runs[c.text];
      const Lines written(lines.begin() + long(c.begin), lines.begin() + long(c.end));
      const ptrdiff_t at = first_difference(written, result.output);
      const std::string where = path + ":" + std::to_string(c.line + 1) + " " + c.text;
      auto line_of = [](const Lines& from, ptrdiff_t i) {
        return i >= 0 && i < ptrdiff_t(from.size()) ? from[size_t(i)] : std::string("(no such line)");
      };
      if (result.status != 0) {
        std::printf("FAIL %s\n     the command failed; the end of its output: %s\n", where.c_str(),
                    line_of(result.output, ptrdiff_t(result.output.size()) - 1).c_str());
        ++failed;
      } else if (at < 0) {
        std::printf("ok   %s\n", where.c_str());
        ++passed;
      } else if (write) {
        std::printf("new  %s\n", where.c_str());
        fresh.insert(fresh.end(), lines.begin() + long(copied), lines.begin() + long(c.begin));
        fresh.insert(fresh.end(), result.output.begin(), result.output.end());
        copied = c.end;
        changed = true;
        ++passed;
      } else {
        std::printf("FAIL %s\n     written: %s\n     printed: %s\n", where.c_str(), line_of(written, at).c_str(),
                    line_of(result.output, at).c_str());
        ++failed;
      }
      std::fflush(stdout);
    }
    if (changed) {
      fresh.insert(fresh.end(), lines.begin() + long(copied), lines.end());
      std::ofstream out(path);
      for (const std::string& line : fresh) out << line << '\n';
      if (!out.flush()) {
        std::printf("FAIL %s: cannot write it\n", path.c_str());
        ++failed;
      }
    }
  }
  if (passed + failed == 0) std::printf("FAIL no block of numbers in %zu files\n", files.size());
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}
