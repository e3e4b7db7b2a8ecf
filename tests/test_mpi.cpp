// Our NCCL between processes: starts tests/mpi_nccl.cpp under mpiexec and looks at what it prints, how it
// ends and how long that takes.
#include "programs.h"

namespace {

// Its status alone proves nothing: the program also says "success".
Ended mpi(int n, const std::string& options) {
  return run("mpiexec -n " + std::to_string(n) + " " + built("mpi_nccl") + " " + options);
}

}  // namespace

TEST_CASE("mpi: collectives, all-to-all, split and streams at 1, 2, 3, 4, 8 ranks, and on a slow link") {
  if (no_mpiexec()) return;
  for (int n : {1, 2, 3, 4, 8}) {
    CAPTURE(n);
    const auto out = mpi(n, "--quick");
    CAPTURE(out.text);
    CHECK(out.status == 0);
    CHECK(out.says("mpi_nccl: success"));
  }
  const auto out = mpi(2, "--quick --link");
  CAPTURE(out.text);
  CHECK(out.status == 0);
  CHECK(out.says("mpi_nccl: success"));
}

TEST_CASE("mpi: when a rank goes wrong, all stop within 5 seconds, say why, and mpiexec reports failure") {
  if (no_mpiexec()) return;
  struct Case {
    const char *mode, *says, *and_says;
  };
  const Case cases[] = {
      {"throw", "rank 1 threw: out of coffee", "in all_reduce(1000 float sum) as call 3 of group 'world'"},
      {"exit0", "rank 1 called exit", "in all_reduce(1000 float sum) as call 3 of group 'world'"},
      {"return", "rank 1 has left", "in all_reduce(1000 float sum) as call 3 of group 'world'"},
      {"mismatch", "called all_reduce(1000 float sum) as call 3 of group 'world'",
       "rank 1 called all_gather(500 float)"},
      {"cycle", "deadlock", "rank 0: waiting for rank 1 to take a message in send(1 float to rank 1)"},
      {"slow --timeout=1", "timeout", "rank 0: waiting for"},
      {"kill", "", ""},
  };
  for (const Case& c : cases)
    for (int n : {2, 4}) {
      CAPTURE(std::string(c.mode));
      CAPTURE(n);
      const auto out = mpi(n, std::string("--fail=") + c.mode);
      CAPTURE(out.text);
      CHECK(out.status != 0);
      CHECK(out.took < 6);  // and starting takes its time
      CHECK(out.says(c.says));
      CHECK(out.says(c.and_says));
    }
}
