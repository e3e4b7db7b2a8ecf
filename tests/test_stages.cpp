// Every stage, run as a reader runs it, on several numbers of ranks, as threads and as MPI processes: it must say that
// it proved itself (losses, norms, gradients, parameters against one rank; bytes against the formulas).
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "programs.h"

#ifndef RINGTRON_CUDA

namespace {

const std::string kSmall = " --dim 24 --heads 6 --kv-heads 2 --layers 3 --hidden 40 --seq 16 --batch 8 --steps 3";

// One run of a stage; `lesson` is the file's name without .cpp.
struct Case {
  const char* lesson;
  int ranks;
  const char* options;
};

const Case kCases[] = {
    {"01_single", 1, ""}, {"01_single", 1, "--micro-batches 3"}, {"01_single", 1, "--tied"},
    {"02_dp", 1, ""}, {"02_dp", 2, ""}, {"02_dp", 3, "--servers 2"}, {"02_dp", 4, "--servers 4"},
    {"02_dp", 8, "--servers 3"}, {"02_dp", 4, "--micro-batches 2 --tied"},
    {"03_ring", 1, "--largest 4096"}, {"03_ring", 2, "--largest 65536"}, {"03_ring", 3, "--largest 65536"},
    {"03_ring", 4, "--largest 65536 --micro-batches 2"}, {"03_ring", 8, "--largest 65536"},
    {"04_ddp", 1, ""}, {"04_ddp", 2, "--bucket-kb 10"}, {"04_ddp", 3, "--bucket-kb 1"}, {"04_ddp", 4, "--micro-batches 2"},
    {"04_ddp", 4, "--overlap 0"}, {"04_ddp", 8, "--bucket-kb 20 --tied"}, {"04_ddp", 3, "--batch 10 --bucket-kb 5"},
    {"05_tp", 1, ""}, {"05_tp", 2, "--tied"}, {"05_tp", 3, "--kv-heads 3 --hidden 42 --vocab 257 --seq 5 --batch 7"},
    {"05_tp", 4, "--dim 32 --heads 8 --kv-heads 4 --micro-batches 3"},
    {"05_tp", 8, "--dim 32 --heads 8 --kv-heads 8 --vocab 259 --tied --micro-batches 2"},
    {"06_sp", 1, ""}, {"06_sp", 2, "--tied"}, {"06_sp", 3, "--kv-heads 3 --hidden 42 --vocab 257 --seq 15 --batch 7"},
    {"06_sp", 4, "--dim 32 --heads 8 --kv-heads 4 --micro-batches 3"},
    {"06_sp", 8, "--dim 32 --heads 8 --kv-heads 8 --vocab 259 --tied --micro-batches 2"},
    {"07_gpipe", 1, "--micro-batches 3"}, {"07_gpipe", 2, "--micro-batches 4"}, {"07_gpipe", 3, "--micro-batches 3 --tied"},
    {"07_gpipe", 4, "--layers 5 --micro-batches 3"}, {"07_gpipe", 8, "--layers 8 --micro-batches 2"},
    {"08_1f1b", 1, "--micro-batches 2 --tied"}, {"08_1f1b", 2, "--micro-batches 1"}, {"08_1f1b", 2, "--micro-batches 8"},
    {"08_1f1b", 3, "--layers 5 --micro-batches 4"}, {"08_1f1b", 4, "--layers 5 --micro-batches 8 --tied"},
    {"08_1f1b", 8, "--layers 9 --micro-batches 8"},
    {"09_interleaved", 1, "--micro-batches 3"}, {"09_interleaved", 2, "--layers 5 --micro-batches 4"},
    {"09_interleaved", 2, "--layers 7 --v 3 --micro-batches 2 --tied"}, {"09_interleaved", 3, "--layers 7 --micro-batches 6"},
    {"09_interleaved", 4, "--layers 8 --micro-batches 8"}, {"09_interleaved", 8, "--layers 16 --micro-batches 8"},
    {"10_zero_bubble", 1, "--micro-batches 2"}, {"10_zero_bubble", 2, "--layers 5 --micro-batches 3"},
    {"10_zero_bubble", 3, "--micro-batches 5 --tied"}, {"10_zero_bubble", 4, "--layers 4 --micro-batches 8"},
    {"10_zero_bubble", 8, "--layers 8 --micro-batches 8"},
    {"13_zero1", 1, ""}, {"13_zero1", 2, "--tied"}, {"13_zero1", 3, "--dim 14 --heads 7 --kv-heads 7 --hidden 9 --batch 10"},
    {"13_zero1", 4, "--micro-batches 2"}, {"13_zero1", 8, ""},
    {"14_zero2", 1, "--micro-batches 2"}, {"14_zero2", 2, "--tied --micro-batches 4"},
    {"14_zero2", 3, "--dim 14 --heads 7 --kv-heads 7 --hidden 9 --batch 10 --overlap 0"},
    {"14_zero2", 4, "--micro-batches 2 --every 0"}, {"14_zero2", 4, "--micro-batches 2 --every 0 --overlap 0 --tied"},
    {"14_zero2", 8, ""},
    {"15_zero3", 1, ""}, {"15_zero3", 2, "--tied --micro-batches 4 --prefetch 0"},
    {"15_zero3", 3, "--dim 14 --heads 7 --kv-heads 7 --hidden 9 --batch 10 --tied"},
    {"15_zero3", 4, "--keep 1 --micro-batches 2 --every 0"}, {"15_zero3", 4, "--shard 2 --replicate 2 --tied --keep 1"},
    {"15_zero3", 8, "--prefetch 0"}, {"15_zero3", 8, "--dim 14 --heads 7 --kv-heads 7 --hidden 9 --shard 2"},
    {"16_offload", 1, "--micro-batches 4"}, {"16_offload", 2, "--tied --micro-batches 4 --every 0"},
    {"16_offload", 3, "--dim 14 --heads 7 --kv-heads 7 --hidden 9 --batch 10"}, {"16_offload", 4, "--micro-batches 2 --tied"},
    {"16_offload", 8, ""},
};

bool proved(const Ended& ended, const std::string& lesson) {
  const std::string name = lesson.substr(3);
  return ended.status == 0 && ended.text.find("\nsummary\t" + name + "\tproved\t") != std::string::npos;
}

}  // namespace

TEST_CASE("stages: each proves itself, ranks as threads") {
  for (const Case& c : kCases) {
    const std::string command = built(c.lesson) + kSmall + " --threads " + std::to_string(c.ranks) + " " + c.options;
    CAPTURE(command);
    const Ended ended = run(command);
    INFO(ended.text);
    CHECK(proved(ended, c.lesson));
  }
}

TEST_CASE("stages: each proves itself, ranks as MPI processes") {
  if (no_mpiexec()) return;
  for (const Case& c : kCases) {
    if (c.ranks == 8 || (c.ranks == 1 && std::string(c.lesson) == "01_single")) continue;
    const std::string command = "mpiexec -n " + std::to_string(c.ranks) + " " + built(c.lesson) +
                                kSmall + " " + c.options;
    CAPTURE(command);
    const Ended ended = run(command);
    INFO(ended.text);
    CHECK(proved(ended, c.lesson));
  }
}

TEST_CASE("stages: threads and processes print the same numbers") {
  if (no_mpiexec()) return;
  auto numbers = [](const std::string& text) {  // the proof's lines: bytes and differences, no times
    std::string lines;
    size_t at = text.find("\nproof of");
    const size_t end = text.find("\nsummary");
    if (at != std::string::npos && end != std::string::npos) lines = text.substr(at, end - at);
    return lines;
  };
  for (const std::string lesson : {"02_dp", "03_ring", "04_ddp", "10_zero_bubble", "15_zero3", "16_offload"}) {
    CAPTURE(lesson);
    const std::string program = built(lesson) + kSmall + (std::string(lesson) == "03_ring" ? " --largest 0" : "");
    const std::string threads = numbers(run(program + " --threads 3").text);
    const std::string processes = numbers(run("mpiexec -n 3 " + program).text);
    CHECK(!threads.empty());
    CHECK(threads == processes);
  }
}

TEST_CASE("stages: a checkpoint that no rank could write whole is refused before training, in one line") {
  const std::string folder = std::filesystem::temp_directory_path() / ("ringtron-parts-" + std::to_string(getpid()));
  for (const std::string lesson : {"02_dp", "05_tp", "06_sp", "07_gpipe", "13_zero1", "14_zero2", "15_zero3", "16_offload"}) {
    const std::string servers = lesson == "02_dp" ? " --servers 2" : "";
    const Ended ended = run(built(lesson) + kSmall + " --threads 2 --save " + folder + servers);
    INFO(ended.text);
    CHECK(ended.status != 0);
    CHECK(ended.says(": --save needs a rank that holds the whole model"));
    CHECK(std::count(ended.text.begin(), ended.text.end(), '\n') == 1);
    CHECK_FALSE(std::filesystem::exists(folder));
  }
}

TEST_CASE("stages: the timeline is written") {
  const std::string file = std::filesystem::temp_directory_path() / ("ringtron-trace-" + std::to_string(getpid()));
  for (const char* kind : {".json", ".svg"}) {
    const Ended ended = run(built("04_ddp") + kSmall + " --threads 2 --trace " + file + kind);
    CHECK(proved(ended, "04_ddp"));
    CHECK(std::filesystem::file_size(file + kind) > 1000);
    std::filesystem::remove(file + kind);
  }
}

#endif
