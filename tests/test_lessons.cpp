// Lesson 01 as its user meets it: the built program, its options, what it prints, what it leaves on disk.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <thread>

#include "../src/safetensors.h"

namespace fs = std::filesystem;
using Words = std::vector<std::string>;

namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::string read(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

void write(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
}

// A folder of its own for each test, with a text to train on.
struct Folder {
  fs::path path;
  Folder() {
    std::string name = (fs::temp_directory_path() / "ringtron-lesson-XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path = name;
    const Words words = {"the ", "rank ", "sends ", "its ", "gradient ", "around ", "a ring.\n", "and ", "waits. "};
    std::mt19937 random(1);
    std::string text;
    for (int i = 0; i < 3000; ++i) text += words[random() % words.size()];
    write(path / "text", text);
  }
  ~Folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  std::string operator/(const std::string& name) const { return (path / name).string(); }
};

struct Result {
  int status;  // the exit status, or minus the signal
  std::string out, err;
  double seconds;
};

struct How {
  std::string folder = {};  // where to run; empty: in the temporary folder
  rlim_t largest_file = 0;  // bytes; 0: no limit
  bool signal_at_limit = false;
  std::function<void(pid_t)> meanwhile = nullptr;
};

Result run(const Folder& folder, const Words& args, const How& how = {}) {
  const std::string program = fs::read_symlink("/proc/self/exe").parent_path() / "01_single";
  REQUIRE_MESSAGE(fs::exists(program), program, " is not built; use `make test`");
  const std::string out = folder / "stdout", err = folder / "stderr";
  const std::string where = how.folder.empty() ? folder.path.string() : how.folder;
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  write(out, "");  // now, so that `meanwhile` does not read the last run's
  const double start = now();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const int o = open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    const int e = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (dup2(o, 1) < 0 || dup2(e, 2) < 0 || chdir(where.c_str()) != 0) _exit(126);
    if (how.largest_file) {
      const rlimit limit = {how.largest_file, how.largest_file};
      if (!how.signal_at_limit) signal(SIGXFSZ, SIG_IGN);
      if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(126);
    }
    alarm(60);  // survives exec: nothing here may hang
    execv(program.c_str(), argv.data());
    _exit(127);
  }
  if (how.meanwhile) how.meanwhile(child);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), read(out), read(err), now() - start};
}

// A model so small that a run takes a blink. What `args` give again counts: the last one wins.
Words small(const Folder& folder, const Words& args = {}) {
  Words all = {"--data",  folder / "text", "--dim", "16",    "--heads", "2",        "--kv-heads", "1", "--layers", "1",
               "--hidden", "24",           "--seq", "16",    "--batch", "4",        "--steps",    "3", "--sample", "0",
               "--log-every", "1"};
  all.insert(all.end(), args.begin(), args.end());
  return all;
}

// For --load, which brings the sizes.
Words more(const Folder& folder, const Words& args) {
  Words all = {"--data", folder / "text", "--batch", "4", "--steps", "3", "--sample", "0", "--log-every", "1"};
  all.insert(all.end(), args.begin(), args.end());
  return all;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// One line on stderr that says all of `parts`, and a status that says failure.
void check_one_line(const Result& r, const Words& parts) {
  CHECK(r.status == 1);
  CHECK(std::count(r.err.begin(), r.err.end(), '\n') == 1);
  CHECK(r.err.starts_with("single: "));
  CHECK(r.err.ends_with("\n"));
  CHECK(r.err.size() < 500);
  CHECK_FALSE(has(r.out, "summary"));
  for (const std::string& part : parts) CHECK_MESSAGE(has(r.err, part), "no '", part, "' in: ", r.err);
}

// The same, and no work was done before.
void refused(const Folder& folder, const Words& args, const Words& parts) {
  std::string line;
  for (const std::string& arg : args) line += arg + " ";
  INFO(line);
  const Result r = run(folder, args);
  check_one_line(r, parts);
  CHECK(r.out == "");
  CHECK(r.seconds < 20);
}

void proved(const Result& r) {
  INFO(r.err);
  INFO(r.out);
  CHECK(r.status == 0);
  CHECK(r.err == "");
  CHECK(has(r.out, "\nsummary\tsingle\tproved\t"));
  CHECK_FALSE(has(r.out, "FAIL"));
}

// Step, loss, norm and learning rate of every progress line: all that must not depend on the machine's speed.
Words progress(const Result& r) {
  Words all;
  std::istringstream lines(r.out);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("  step ") && has(line, "loss")) all.push_back(line.substr(0, line.find("  lr ") + 14));
  return all;
}

double loss_of(const std::string& line) { return std::stod(line.substr(line.find("loss ") + 5)); }

std::string token_file(int magic, int version, int count, const std::vector<uint16_t>& tokens) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
         std::string(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
}

const Words kFiles = {"model.safetensors", "optimizer.safetensors", "config.json", "trainer.json"};

std::string contents(const fs::path& checkpoint) {
  std::string all;
  for (const std::string& file : kFiles) all += file + ":" + read(checkpoint / file);
  return all;
}

}  // namespace

TEST_CASE("lesson: it trains, proves itself and says the same every time") {
  Folder f;
  const Result first = run(f, small(f)), second = run(f, small(f));
  proved(first);
  proved(second);
  CHECK(progress(first).size() == 3);
  CHECK(progress(first) == progress(second));
  CHECK(progress(first) != progress(run(f, small(f, {"--seed", "2"}))));
  proved(run(f, small(f, {"--micro-batches", "3", "--tied", "--batch", "5"})));

  // Without the comparison it must not claim to be proved.
  const Result unproved = run(f, small(f, {"--no-proof"}));
  CHECK(unproved.status == 0);
  CHECK(has(unproved.out, "summary\tsingle\tskipped\t"));
  CHECK_FALSE(has(unproved.out, "proved"));
}

TEST_CASE("lesson: the loss falls") {
  Folder f;
  const Result r = run(f, small(f, {"--steps", "200", "--dim", "32", "--hidden", "64", "--lr", ".01",
                                   "--sample", "9"}));
  proved(r);
  const Words lines = progress(r);
  REQUIRE(lines.size() == 200);
  CHECK(loss_of(lines.front()) == doctest::Approx(std::log(256)).epsilon(0.02));
  CHECK(loss_of(lines.back()) < 2);
  CHECK(has(r.out, " >>> "));
}

TEST_CASE("lesson: --help names every option, its default and unit") {
  Folder f;
  const Result r = run(f, {"--help"});
  CHECK(r.status == 0);
  CHECK(r.err == "");
  CHECK(has(r.out, "one GPU"));
  for (const std::string part :
       {"--data TEXT=lessons/corpus.txt", "text file (bytes", "--save TEXT", "folder to write", "--load TEXT",
        "folder to continue from", "--seed UINT=1", "--vocab INT=256", "token ids", "--dim INT=128", "elements",
        "--layers INT=2", "blocks", "--heads INT=8", "--kv-heads INT=4", "--hidden INT=0", "--seq INT=128",
        "tokens of a sample", "--tied", "--steps INT=200", "optimizer steps", "--stop-after INT=0", "--batch INT=16",
        "samples", "--micro-batches INT=1", "--lr FLOAT=0.003", "--warmup INT=10", "steps of linear",
        "--weight-decay FLOAT=0.1", "--clip FLOAT=1", "--sample INT=200", "tokens of text", "--log-every INT=25",
        "steps between", "--no-proof", "--logits TEXT"})
    CHECK_MESSAGE(has(r.out, part), part);
  CHECK(has(run(f, {"-h", "--steps", "5"}).out, "--steps"));
}

TEST_CASE("lesson: bad options") {
  Folder f;
  auto bad = [&](const Words& args, const Words& parts) { refused(f, small(f, args), parts); };
  for (const char* size : {"--vocab", "--dim", "--layers", "--heads", "--kv-heads", "--seq", "--batch", "--steps",
                           "--micro-batches", "--log-every"})
    for (const char* value : {"0", "-1"}) bad({size, value}, {size, value, "must be"});
  for (const char* size : {"--hidden", "--warmup", "--sample", "--stop-after"}) bad({size, "-5"}, {size, "-5"});
  for (const char* name : {"--vocab", "--dim", "--layers", "--heads", "--kv-heads", "--hidden", "--seq", "--batch",
                           "--micro-batches", "--steps", "--stop-after", "--warmup", "--sample", "--log-every",
                           "--seed"})
    for (const char* value : {"abc", "16x", "1.5", "1e3", "99999999999999999999999"})
      bad({name, value}, {name, value, "--help"});
  bad({"--seed", "-1"}, {"--seed -1", "range"});
  for (const char* name : {"--lr", "--weight-decay", "--clip"}) {
    bad({name, "abc"}, {name, "abc", "--help"});
    for (const char* value : {"nan", "-1"}) bad({name, value}, {name, value});
  }
  bad({"--lr", "0"}, {"--lr is 0", "above 0"});
  bad({"--lr", "inf"}, {"--lr is inf", "finite"});
  bad({"--lr", "1e50"}, {"--lr", "finite"});
  bad({"--heads", "3", "--kv-heads", "3"}, {"--dim 16", "--heads 3"});
  bad({"--heads", "8", "--kv-heads", "3"}, {"--heads 8", "--kv-heads 3"});
  bad({"--heads", "2", "--kv-heads", "4"}, {"--heads 2", "--kv-heads 4"});
  bad({"--heads", "16"}, {"head size is 1", "even"});
  bad({"--dim", "18", "--heads", "6"}, {"head size is 3", "even"});
  bad({"--micro-batches", "5"}, {"--micro-batches 5", "4 samples"});
  bad({"--stop-after", "4"}, {"--stop-after is 4", "--steps 3"});
  bad({"--steps", "5000000000"}, {"--steps is 5000000000", "100000000"});
  bad({"--stepz", "3"}, {"--stepz", "--help"});
  bad({"extra"}, {"extra", "--help"});
  bad({"--dim"}, {"--dim", "--help"});
  bad({"--save", ""}, {"--save is empty"});
  bad({"--load", ""}, {"--load is empty"});
  bad({"--logits", ""}, {"--logits is empty"});
  bad({"--logits", f / "nowhere/logits"}, {"--logits", "folder that exists"});
  bad({"--logits", f.path.string()}, {"--logits"});
}

TEST_CASE("lesson: models that no machine holds") {
  Folder f;
  auto bad = [&](const Words& args, const Words& parts) { refused(f, small(f, args), parts); };
  bad({"--dim", "2147483646"}, {"--dim is 2147483646", "at most"});
  bad({"--dim", "2147483646", "--hidden", "0"}, {"--dim is 2147483646"});  // 8/3 of it is no int
  bad({"--layers", "2000000000"}, {"--layers is 2000000000"});
  bad({"--dim", "1000000", "--hidden", "1000000", "--layers", "1000000"}, {"parameters", "GiB", "smaller"});
  bad({"--batch", "2000000000"}, {"--batch 2000000000", "tokens a step"});
  write(f.path / "long", std::string(600000, 'x'));
  bad({"--dim", "65536", "--layers", "20"}, {"GiB", "smaller model"});
  bad({"--data", f / "long", "--seq", "500000", "--batch", "1"}, {"GiB for activations", "--seq"});
}

TEST_CASE("lesson: bad data") {
  Folder f;
  auto bad = [&](const std::string& data, const Words& args, const Words& parts) {
    Words all = small(f, {"--data", data});
    all.insert(all.end(), args.begin(), args.end());
    refused(f, all, parts);
  };
  const std::string file = f / "data";
  const std::vector<uint16_t> tokens(100, 7);
  const int magic = 20240520;
  bad(f / "missing", {}, {"missing", "no such file"});
  bad("", {}, {"no such file"});
  bad(f.path.string(), {}, {"is a directory"});
  bad("/dev/null", {}, {"/dev/null", "device"});
  bad(f / "text/below", {}, {"below"});
  bad(f / "text", {"--vocab", "10"}, {"token id", "vocabulary of 10", "at least"});
  auto bad_bytes = [&](const std::string& bytes, const Words& args, const Words& parts) {
    write(file, bytes);
    bad(file, args, parts);
  };
  bad_bytes("", {}, {"is empty"});
  bad_bytes("short", {}, {"5 tokens", "17"});
  bad_bytes(std::string(16, 'x'), {}, {"16 tokens", "17"});
  const std::string good = token_file(magic, 1, 100, tokens);
  bad_bytes(good.substr(0, good.size() - 1), {}, {"truncated", "100 tokens"});
  bad_bytes(good.substr(0, 1024), {}, {"truncated"});
  bad_bytes(good.substr(0, 1023), {}, {"header truncated"});
  bad_bytes(good.substr(0, 4), {}, {"header truncated"});
  bad_bytes(good + "x", {}, {"trailing"});
  bad_bytes(token_file(magic, 2, 100, tokens), {}, {"version 2"});
  bad_bytes(token_file(magic, 1, 0, {}), {}, {"0 tokens"});
  bad_bytes(token_file(magic, 1, -100, tokens), {}, {"-100 tokens"});
  bad_bytes(token_file(20240801, 7, 100, tokens), {}, {"32-bit", "not supported"});
  bad_bytes(good, {"--vocab", "7"}, {"token id 7", "vocabulary of 7", "at least 8"});
  bad_bytes(good, {"--seq", "100"}, {"100 tokens", "101"});

  // Nothing is left behind by a run that did not begin.
  bad_bytes("short", {"--save", f / "a/b"}, {"5 tokens"});
  CHECK_FALSE(fs::exists(f / "a"));
}

TEST_CASE("lesson: texts and token files of all kinds") {
  Folder f;
  const std::string file = f / "data";
  std::string text;
  for (int i = 0; i < 100; ++i) text += "line one\r\nzwei\r\n\r\n";
  write(file, text);
  proved(run(f, small(f, {"--data", file, "--sample", "20"})));
  text = "\xef\xbb\xbf";
  for (int i = 0; i < 100; ++i) text += "梯度沿着环传递，每个进程等待。\n";
  write(file, text);
  proved(run(f, small(f, {"--data", file, "--sample", "20"})));
  write(file, std::string(17, '\0'));  // the shortest there is: one sample
  proved(run(f, small(f, {"--data", file})));

  std::vector<uint16_t> tokens(5000);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = uint16_t(i * 7 % 1000);
  write(file, token_file(20240520, 1, 5000, tokens));
  const Result ids = run(f, small(f, {"--data", file, "--sample", "5"}));
  proved(ids);
  CHECK(has(ids.out, "vocabulary 1000"));
  const Result padded = run(f, small(f, {"--data", file, "--vocab", "1024"}));
  proved(padded);
  CHECK(has(padded.out, "vocabulary 1024"));
  tokens[17] = 65535;
  write(file, token_file(20240520, 1, 5000, tokens));
  proved(run(f, small(f, {"--data", file, "--steps", "1"})));

  // A path is relative to where the user is.
  fs::create_directory(f / "elsewhere");
  write(f / "elsewhere/notes.txt", read(f / "text"));
  proved(run(f, small(f, {"--data", "notes.txt"}), {.folder = f / "elsewhere"}));
  proved(run(f, small(f, {"--data", "../text", "--save", "kept"}), {.folder = f / "elsewhere"}));
  CHECK(fs::exists(f / "elsewhere/kept/model.safetensors"));
}

TEST_CASE("lesson: numbers that are not finite stop the run") {
  Folder f;
  const Result r = run(f, small(f, {"--lr", "1e30", "--clip", "0", "--steps", "9", "--save", f / "save"}));
  check_one_line(r, {"single: step ", "not finite", "the first bad tensor is the ", " of model.", "lower --lr"});
  CHECK_FALSE(fs::exists(f / "save"));

  proved(run(f, small(f, {"--save", f / "save"})));
  Safetensors weights = load_safetensors(f / "save/model.safetensors");
  HostTensor& up = weights.tensors.at("model.layers.0.mlp.up_proj.weight");
  std::vector<float> values = up.to_floats();
  values[5] = NAN;
  up = HostTensor::from_floats(up.shape, values);
  save_safetensors(f / "save/model.safetensors", weights);
  check_one_line(run(f, more(f, {"--load", f / "save", "--steps", "4"})),
                 {"step 4:", "not finite", "the weight of model.layers.0.mlp.up_proj.weight"});
}

TEST_CASE("lesson: --save writes what Hugging Face reads") {
  Folder f;
  const int D = 16, F = 24, K = 8, V = 256;
  for (const bool tied : {false, true}) {
    Words args = {"--save", f / "save", "--layers", "2", "--logits", f / "logits"};
    if (tied) args.push_back("--tied");
    proved(run(f, small(f, args)));
    std::map<std::string, std::vector<int64_t>> wanted, found;
    wanted["model.embed_tokens.weight"] = {V, D};
    wanted["model.norm.weight"] = {D};
    if (!tied) wanted["lm_head.weight"] = {V, D};
    for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
      for (const char* norm : {"input_layernorm", "post_attention_layernorm"}) wanted[layer + norm + ".weight"] = {D};
      for (const char* square : {"q_proj", "o_proj"}) wanted[layer + "self_attn." + square + ".weight"] = {D, D};
      for (const char* shared : {"k_proj", "v_proj"}) wanted[layer + "self_attn." + shared + ".weight"] = {K, D};
      for (const char* wide : {"gate_proj", "up_proj"}) wanted[layer + "mlp." + wide + ".weight"] = {F, D};
      wanted[layer + "mlp.down_proj.weight"] = {D, F};
    }
    const Safetensors weights = load_safetensors(f / "save/model.safetensors");
    for (const auto& [name, tensor] : weights.tensors) found[name] = tensor.shape;
    CHECK(found == wanted);
    CHECK(weights.metadata.at("format") == "pt");
    CHECK(load_safetensors(f / "save/optimizer.safetensors").tensors.size() % wanted.size() == 0);

    const auto config = load_flat_json(f / "save/config.json");
    const std::map<std::string, std::string> fields = {
        {"model_type", "llama"}, {"vocab_size", "256"}, {"hidden_size", "16"}, {"intermediate_size", "24"},
        {"num_hidden_layers", "2"}, {"num_attention_heads", "2"}, {"num_key_value_heads", "1"},
        {"max_position_embeddings", "16"}, {"hidden_act", "silu"}, {"tie_word_embeddings", tied ? "true" : "false"}};
    for (const auto& field : fields) CHECK_MESSAGE(config.at(field.first) == field.second, field.first);
    CHECK(has(read(f / "save/config.json"), "\"architectures\": [\"LlamaForCausalLM\"]"));
    CHECK(load_flat_json(f / "save/trainer.json").at("step") == "3");
    Words files;
    for (const auto& entry : fs::directory_iterator(f / "save")) files.push_back(entry.path().filename());
    CHECK(files.size() == kFiles.size());
    CHECK_FALSE(fs::exists(f / "save.new"));

    const Safetensors logits = load_safetensors(f / "logits");
    CHECK(logits.tensors.at("tokens").shape == std::vector<int64_t>{4, 16});
    CHECK(logits.tensors.at("logits").shape == std::vector<int64_t>{4, 16, V});
  }
}

TEST_CASE("lesson: save, load and go on gives the same bits as a run without a break") {
  Folder f;
  for (const Words& model : {Words{}, Words{"--tied", "--micro-batches", "2", "--layers", "2"}}) {
    auto with = [&](Words args) {
      args.insert(args.begin(), model.begin(), model.end());
      return run(f, small(f, args));
    };
    const Result whole = with({"--steps", "6", "--save", f / "whole"});
    proved(whole);
    const Result half = with({"--steps", "6", "--stop-after", "3", "--save", f / "half"});
    proved(half);
    CHECK(has(half.out, "steps 1 to 3"));
    CHECK(contents(f / "half") != contents(f / "whole"));
    // Into the very folder it came from, which the proof then still needs.
    Words go_on = more(f, {"--load", f / "half/", "--save", f / "half", "--steps", "6"});
    if (!model.empty()) go_on.insert(go_on.end(), {"--micro-batches", "2"});
    const Result rest = run(f, go_on);
    proved(rest);
    CHECK(has(rest.out, "steps 4 to 6"));
    for (const std::string& file : kFiles)
      CHECK_MESSAGE(read(f / ("half/" + file)) == read(f / ("whole/" + file)), file);
    Words both = progress(half);
    for (const std::string& line : progress(rest)) both.push_back(line);
    REQUIRE(both.size() == 6);
    for (std::string& line : both) line = line.substr(line.find("loss"));
    Words one = progress(whole);
    for (std::string& line : one) line = line.substr(line.find("loss"));
    CHECK(both == one);
    fs::remove_all(f / "half");
    fs::remove_all(f / "whole");
  }
}

TEST_CASE("lesson: the sizes come from the checkpoint, and options that contradict it are errors") {
  Folder f;
  const std::string save = f / "save";
  proved(run(f, small(f, {"--save", save, "--tied"})));
  const std::string whole = contents(save);
  auto bad = [&](const Words& args, const Words& parts) {
    Words all = more(f, {"--load", save, "--steps", "5"});
    all.insert(all.end(), args.begin(), args.end());
    refused(f, all, parts);
  };
  bad({"--dim", "32"}, {"--dim 32", "hidden_size is 16", "config.json"});
  bad({"--layers", "2"}, {"--layers 2", "num_hidden_layers is 1"});
  bad({"--heads", "4"}, {"--heads 4", "num_attention_heads is 2"});
  bad({"--kv-heads", "2"}, {"--kv-heads 2", "num_key_value_heads is 1"});
  bad({"--hidden", "64"}, {"--hidden 64", "intermediate_size is 24"});
  bad({"--vocab", "300"}, {"--vocab 300", "vocab_size is 256"});
  bad({"--tied=false"}, {"--tied=false", "tie_word_embeddings is true"});
  bad({"--steps", "3"}, {"step 3 already", "--steps is 3"});
  bad({"--steps", "2"}, {"step 3 already", "--steps is 2"});
  bad({"--stop-after", "3"}, {"step 3 already", "--stop-after is 3"});
  bad({"--load", f / "missing"}, {"missing", "no such folder"});
  bad({"--load", f / "text"}, {"text", "not a folder"});
  bad({"--load", f.path.string()}, {"config.json", "no such file"});
  std::vector<uint16_t> tokens(1000, 999);
  write(f / "tokens", token_file(20240520, 1, 1000, tokens));
  bad({"--data", f / "tokens"}, {"token id 999", "vocabulary of 256"});
  proved(run(f, small(f, {"--load", save, "--steps", "4", "--tied"})));  // the same sizes again are no contradiction
  const Result longer = run(f, more(f, {"--load", save, "--steps", "4", "--seq", "24", "--hidden", "0"}));
  proved(longer);
  CHECK(has(longer.out, "4 samples x 24 tokens"));
  CHECK(contents(save) == whole);
}

TEST_CASE("lesson: a checkpoint that is cut short, incomplete or of another model") {
  Folder f;
  const std::string save = f / "save", kept = f / "kept";
  proved(run(f, small(f, {"--save", kept})));
  proved(run(f, small(f, {"--save", f / "other", "--dim", "32"})));
  auto fresh = [&] {
    fs::remove_all(save);
    fs::copy(kept, save);
  };
  auto bad = [&](const Words& parts) { refused(f, more(f, {"--load", save, "--steps", "5"}), parts); };
  for (const std::string& file : kFiles) {
    CAPTURE(file);
    const auto size = fs::file_size(fs::path(kept) / file);
    for (const auto length : {uintmax_t(0), uintmax_t(1), uintmax_t(7), size / 3, size - 3}) {
      if (length >= size - 2) continue;
      CAPTURE(length);
      fresh();
      fs::resize_file(fs::path(save) / file, length);
      bad({file});
    }
    fresh();
    fs::remove(fs::path(save) / file);
    bad({file, "no such file"});
    fs::create_directory(fs::path(save) / file);
    bad({file, "directory"});
    if (file.ends_with(".safetensors")) {
      fresh();
      fs::copy_file(f / ("other/" + file), fs::path(save) / file, fs::copy_options::overwrite_existing);
      bad({file, "32", "16"});
    }
  }
  const std::string config = read(kept + "/config.json");
  auto changed = [&](const std::string& from, const std::string& to) {
    fresh();
    std::string text = config;
    REQUIRE(has(text, from));
    write(save + "/config.json", text.replace(text.find(from), from.size(), to));
  };
  auto bad_config = [&](const std::string& from, const std::string& to, Words parts) {
    changed(from, to);
    parts.push_back("config.json");
    bad(parts);
  };
  fresh();
  for (const std::string garbage : {"garbage", "[]", "{}", "{\"vocab_size\": 1", "null"}) {
    write(save + "/config.json", garbage);
    bad({"config.json"});
  }
  for (const char* value : {"0", "-16", "16.5", "1e300", "\"wide\"", "\"\"", "true"})
    bad_config("\"hidden_size\": 16", std::string("\"hidden_size\": ") + value, {"hidden_size"});
  bad_config("\"hidden_size\": 16", "\"hidden_size\": null", {"hidden_size"});
  bad_config("\"hidden_size\": 16", "\"hidden_size\": 2000000", {"2000000"});
  bad_config("\"num_attention_heads\": 2", "\"num_attention_heads\": 3", {"16", "3"});
  bad_config("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 1, \"head_dim\": 64", {"head_dim", "64", "8"});
  bad_config("\"model_type\": \"llama\"", "\"model_type\": \"gpt2\"", {"gpt2", "llama"});
  bad_config("\"hidden_act\": \"silu\"", "\"hidden_act\": \"gelu\"", {"gelu", "silu"});
  bad_config("\"attention_bias\": false", "\"attention_bias\": true", {"attention_bias"});
  bad_config("\"rms_norm_eps\": ", "\"rms_norm_eps\": -", {"rms_norm_eps"});
  changed("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2");
  bad({"model.safetensors", "no tensor model.layers.1."});
  changed("\"intermediate_size\": 24", "\"intermediate_size\": 25");
  bad({"model.safetensors", "24", "25"});
  for (const char* step : {"-1", "\"three\"", "1.5", "1e30", "99999999999999999999", "null"}) {
    fresh();
    write(save + "/trainer.json", std::string("{\"step\": ") + step + "}");
    bad({"trainer.json", "step"});
  }
  // A model of two layers is not silently cut down to one.
  proved(run(f, small(f, {"--save", save, "--layers", "2"})));
  write(save + "/config.json", config);
  bad({"model.layers.1.", "no place"});

  // Weights alone, from elsewhere: a start, not a continuation.
  fresh();
  fs::remove(save + "/optimizer.safetensors");
  fs::remove(save + "/trainer.json");
  const Result start = run(f, more(f, {"--load", save, "--steps", "5"}));
  proved(start);
  CHECK(has(start.out, "steps 1 to 5"));
}

TEST_CASE("lesson: folders that can't be saved to") {
  Folder f;
  auto bad = [&](const std::string& save, const Words& parts) { refused(f, small(f, {"--save", save}), parts); };
  bad(f / "text", {"text", "not a folder"});
  bad(f / "text/below", {"below", "can't be written"});
  bad("/proc/ringtron", {"/proc/ringtron", "can't be written"});
  bad("/dev/null", {"/dev/null", "not a folder"});
  bad(".", {"holds the folder you are in"});
  bad("/", {"/", "holds the folder you are in"});
  fs::create_symlink(f / "nowhere", f / "link");
  bad(f / "link", {"link", "not a folder"});

  // What a save has not written is not for a save to remove: in the folder, and in the one beside it.
  for (const char* name : {"mine", "mine.new"}) {
    fs::create_directory(f / name);
    write(f / name + "/thesis.txt", "years of work");
    bad(f / "mine", {"thesis.txt", "would remove"});
    CHECK(read(f / name + "/thesis.txt") == "years of work");
    fs::remove_all(f / name);
  }
  proved(run(f, small(f, {"--save", f / "mine"})));
  write(f / "mine/tokenizer.json", "{}");
  bad(f / "mine", {"tokenizer.json"});
  fs::remove(f / "mine/tokenizer.json");
  proved(run(f, small(f, {"--save", f / "mine/"})));  // over the old one
  if (geteuid() != 0) {
    fs::create_directory(f / "closed");
    fs::permissions(f / "closed", fs::perms::owner_read | fs::perms::owner_exec);
    bad(f / "closed/save", {"can't be written"});
    fs::permissions(f / "closed", fs::perms::owner_all);
  }

  // Neither is a file that appears during the run; and what was trained is not lost.
  const auto late = [&](pid_t) {
    while (!has(read(f / "stdout"), "step ")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    write(f / "mine/late.txt", "precious");
  };
  const Words longer = small(f, {"--steps", "3000", "--no-proof", "--save", f / "mine", "--log-every", "1000"});
  check_one_line(run(f, longer, {.meanwhile = late}), {"late.txt", "the new checkpoint is in", "mine.new"});
  CHECK(read(f / "mine/late.txt") == "precious");
  const Result rescued = run(f, more(f, {"--load", f / "mine.new", "--steps", "3001"}));
  proved(rescued);
  CHECK(has(rescued.out, "steps 3001 to 3001"));
  fs::remove(f / "mine/late.txt");

  // Through a link, the folder that it names is replaced, not the link.
  fs::create_directory_symlink("mine", f / "shortcut");
  proved(run(f, small(f, {"--save", f / "shortcut", "--seed", "9"})));
  CHECK(fs::is_symlink(f / "shortcut"));
  proved(run(f, small(f, {"--save", f / "nine", "--seed", "9"})));
  CHECK(contents(f / "mine") == contents(f / "nine"));
}

TEST_CASE("lesson: a disk that runs full during a save leaves the previous checkpoint whole") {
  Folder f;
  const std::string save = f / "save";
  proved(run(f, small(f, {"--save", save})));
  const std::string before = contents(save);
  const Words again = small(f, {"--save", save, "--seed", "2", "--no-proof"});
  for (rlim_t limit : {10000, 60000}) {  // in the middle of the weights; of the optimizer (82 KB)
    CAPTURE(limit);
    const Result r = run(f, again, {.largest_file = limit});
    check_one_line(r, {"cannot save", "File too large", "still holds what it held"});
    CHECK(contents(save) == before);
    CHECK_FALSE(fs::exists(save + ".new"));
    CHECK(run(f, again, {.largest_file = limit, .signal_at_limit = true}).status == -SIGXFSZ);
    CHECK(contents(save) == before);
  }
  proved(run(f, more(f, {"--load", save, "--steps", "4"})));
  const Result first = run(f, small(f, {"--save", f / "first", "--no-proof"}), {.largest_file = 10000});
  check_one_line(first, {"cannot save", "first was not made"});
  proved(run(f, small(f, {"--save", save})));
}

TEST_CASE("lesson: kill -9 during a save leaves a whole checkpoint, the old one or the new one") {
  Folder f;
  const std::string save = f / "save";
  auto args = [&](const std::string& folder, int seed) {
    return small(f, {"--dim", "64", "--hidden", "192", "--layers", "2", "--steps", "1", "--no-proof", "--save", folder,
                     "--seed", std::to_string(seed)});
  };
  std::vector<std::string> whole;
  for (int seed : {1, 2}) {
    CHECK(run(f, args(f / "one", seed)).status == 0);
    whole.push_back(contents(f / "one"));
  }
  CHECK(whole[0] != whole[1]);
  CHECK(run(f, args(save, 1)).status == 0);

  // The first saves are let through: they show how long one takes, and that no moment is without a checkpoint.
  // Then the kills: half of them anywhere in a save, half near its end, where the folders are exchanged.
  std::mt19937 random(7);
  double save_seconds = 0;
  int killed = 0, gaps = 0;
  std::error_code ignored;
  auto there = [&](const std::string& path) { return fs::exists(save + path, ignored); };
  for (int i = 0; i < 20; ++i) {
    CAPTURE(i);
    const bool let_through = i < 4, late = i % 2;
    const double delay = let_through ? 60 : random() % 1000 / 1000.0 * (late ? 0.0004 : save_seconds);
    fs::remove_all(save + ".new");
    const Result r = run(f, args(save, i % 2 + 1), {.meanwhile = [&](pid_t child) {
      siginfo_t ended = {};
      auto running = [&] {
        gaps += !there("");
        return waitid(P_PID, id_t(child), &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && !ended.si_pid;
      };
      auto begun = [&] { return there(".new") && !fs::is_empty(save + ".new", ignored); };
      while (running() && !(late ? there(".new/trainer.json") : begun())) {}
      const double start = now();
      while (running() && now() - start < delay) {}
      if (let_through) save_seconds = std::max(save_seconds, now() - start);
      else kill(child, SIGKILL);
    }});
    killed += r.status == -SIGKILL;
    CHECK((r.status == -SIGKILL || r.status == 0));
    const std::string after = contents(save);
    CHECK((after == whole[0] || after == whole[1]));
    if (r.status != -SIGKILL) CHECK(after == whole[i % 2]);
    const Result next = run(f, more(f, {"--load", save, "--steps", "2", "--no-proof"}));
    CHECK(next.status == 0);
    CHECK(next.err == "");
  }
  MESSAGE("killed ", killed, " of 16 saves, which take ", save_seconds * 1000, " ms");
  CHECK(killed > 0);
  CHECK(gaps == 0);
  // What a killed save left is no obstacle.
  fs::create_directory(save + ".new");
  write(save + ".new/model.safetensors.12-0.tmp", "half a file");
  CHECK(run(f, args(save, 2)).status == 0);
  CHECK(contents(save) == whole[1]);
  CHECK_FALSE(fs::exists(save + ".new"));
}
