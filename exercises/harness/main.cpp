// main.cpp - runs the checks of one exercise (doctest cases) and prints what a learner wants to know.
//
//   <slug>[--variant] [--repeat N] [--min-checks N] [--note TEXT] [--quiet] [doctest's options]
//
// Exit status: 0 all passed, 1 wrong, 2 not implemented yet, 3 deadlock, 4 crash or endless, 5 the harness itself:
// fewer checks ran than the manifest says, or an option is wrong.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // ours say more
#include "check.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool quiet = false;
char case_name[200] = "the start";

const char* word(Kind kind) {
  static const char* const words[] = {"passed", "wrong", "TODO", "deadlock", "crash", "harness"};
  return words[int(kind)];
}

// One line a case, in place of doctest's own report.
struct Report : doctest::IReporter {
  explicit Report(const doctest::ContextOptions&) {}
  void test_case_start(const doctest::TestCaseData& in) override {
    std::snprintf(case_name, sizeof case_name, "%s", in.m_name);
    alarm(60);
  }
  void test_case_end(const doctest::CurrentTestCaseStats& in) override {
    alarm(0);
    if (in.failure_flags == 0 && !quiet) std::printf("  ok       %s\n", case_name);
    if (in.failure_flags != 0 && !said) {
      said = true;
      if (session().kind == Kind::passed) {  // a check threw, or asserted by itself
        session().kind = Kind::harness;
        session().text = "\n  the check itself failed: " + thrown;
      }
      std::printf("%-9s  %s%s\n", word(session().kind), case_name, session().text.c_str());
    }
    std::fflush(stdout);
  }
  void test_case_exception(const doctest::TestCaseException& in) override { thrown = in.error_string.c_str(); }
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
  bool said = false;
  std::string thrown;
};
REGISTER_REPORTER("exercise", 0, Report);

// Only calls that are allowed in a signal handler.
void say(const char* text) { (void)!write(1, text, std::strlen(text)); }
void on_signal(int number) {
  say("crash      ");
  say(case_name);
  say(number == SIGALRM ? "\n  stopped  it did not end within 60 seconds: an endless loop?\n"
      : number == SIGFPE ? "\n  stopped  signal 8: an integer was divided by 0\n"
      : number == SIGABRT ? "\n  stopped  signal 6: something was freed twice or overwritten\n"
                          : "\n  stopped  signal 11: memory was used that is not there; look at indices and sizes\n");
  _exit(int(Kind::crash));
}

}  // namespace

int main(int argc, char** argv) {
  const char* name = std::strrchr(argv[0], '/');
  session().slug = name ? name + 1 : argv[0];
  session().slug = session().slug.substr(0, session().slug.find("--"));
  int repeat = 1, min_checks = 1;
  std::vector<const char*> rest{argv[0]};
  for (int i = 1; i < argc; ++i) {
    auto is = [&](const char* option) { return std::strcmp(argv[i], option) == 0 && i + 1 < argc; };
    if (is("--repeat")) repeat = std::atoi(argv[++i]);
    else if (is("--min-checks")) min_checks = std::atoi(argv[++i]);
    else if (is("--note")) session().note = argv[++i];
    else if (std::strcmp(argv[i], "--quiet") == 0) quiet = true;
    else rest.push_back(argv[i]);
  }
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // those report by themselves
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGABRT}) signal(number, on_signal);
#endif
  signal(SIGALRM, on_signal);
  for (int i = 0; i < repeat && session().kind == Kind::passed; ++i) {
    const int before = session().checks;
    doctest::Context context(int(rest.size()), rest.data());
    context.setOption("reporters", "exercise");
    context.setOption("no-breaks", true);
    context.setOption("abort-after", 1);
    context.setOption("no-run", false);
    const int status = context.run();
    if (status != 0 && session().kind == Kind::passed) session().kind = Kind::harness;
    if (session().kind == Kind::passed && session().checks - before < min_checks) {
      std::printf("harness    %d checks ran, the manifest wants %d\n", session().checks - before, min_checks);
      session().kind = Kind::harness;
    }
    quiet = true;
  }
  if (session().kind == Kind::passed)
    std::printf("passed     %s: %d checks%s\n", session().slug.c_str(), session().checks / std::max(repeat, 1),
                repeat > 1 ? format(", %d times", repeat).c_str() : "");
  return int(session().kind);
}
