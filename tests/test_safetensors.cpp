#include "../src/safetensors.h"

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>

#include "../src/error.h"

namespace {

namespace fs = std::filesystem;

struct Folder {  // a folder of our own, gone at the end of the test
  std::string path = (fs::temp_directory_path() / "ringtron-test-XXXXXX").string();
  Folder() { REQUIRE(::mkdtemp(path.data()) != nullptr); }
  Folder(const Folder&) = delete;
  ~Folder() { fs::remove_all(path); }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  int files() const { return static_cast<int>(std::distance(fs::directory_iterator(path), {})); }
};

std::string slurp(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void spill(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

// The message of the Error that `work` throws; a test fails if there is none, or more than one line.
template <class F>
std::string error_of(F work) {
  try {
    work();
  } catch (const Error& e) {
    const std::string text = e.what();
    CHECK(text.find('\n') == std::string::npos);
    return text;
  }
  return "(no error)";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A file as the format's page describes it, put together by hand.
std::string raw(const std::string& header, const std::string& data, int64_t claimed = -1) {
  const uint64_t length = claimed < 0 ? header.size() : static_cast<uint64_t>(claimed);
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + header + data;
}

std::string load_error(const Folder& folder, const std::string& content) {
  const std::string path = folder / "bad.safetensors";
  spill(path, content);
  const std::string text = error_of([&] { load_safetensors(path); });
  CHECK_MESSAGE(contains(text, "bad.safetensors"), text);  // names the file
  return text;
}

Safetensors example() {
  Safetensors file;
  file.tensors["b"] = HostTensor::from_floats({2, 3}, std::vector<float>{1, -2, 0.1f, -0.0f, 1e-45f, 3e38f});
  file.tensors["a.weight"] = HostTensor::bf16_from_floats({3}, std::vector<float>{1, 2, 3});
  file.tensors["tokens"] = HostTensor::from_ints({2}, std::vector<int32_t>{-7, 2147483647});
  file.tensors["moment"] = HostTensor::from_doubles({}, std::vector<double>{0.1});
  file.tensors["empty"] = HostTensor::from_floats({0, 5}, std::vector<float>{});
  file.metadata = {{"format", "pt"}, {"step", "3"}, {"note", "quote \" and 世界"}};
  return file;
}

// Runs `work` with a limit of this process lowered, then puts it back.
template <class F>
void with_limit(int resource, rlim_t value, F work) {
  rlimit old = {};
  REQUIRE(::getrlimit(static_cast<__rlimit_resource_t>(resource), &old) == 0);
  const rlimit lower = {value, old.rlim_max};
  REQUIRE(::setrlimit(static_cast<__rlimit_resource_t>(resource), &lower) == 0);
  work();
  ::setrlimit(static_cast<__rlimit_resource_t>(resource), &old);
}

// Runs `work` as a user whom permissions bind (root may write anything). False where that is not possible.
template <class F>
bool as_ordinary_user(F work) {
  const uid_t me = ::geteuid();
  if (me == 0 && ::seteuid(65534) != 0) return false;
  work();
  if (me == 0) REQUIRE(::seteuid(me) == 0);
  return true;
}

}  // namespace

TEST_CASE("format: printf into a string of any length") {
  CHECK(format("%d of %s", 3, "seven") == "3 of seven");
  CHECK(format("%s", std::string(5000, 'x').c_str()) == std::string(5000, 'x'));
  CHECK(format("%s", "").empty());
}

TEST_CASE("bf16 rounds to nearest, ties to even") {
  CHECK(float_to_bf16(1.0f) == 0x3f80);
  CHECK(float_to_bf16(-2.0f) == 0xc000);
  CHECK(float_to_bf16(0.0f) == 0x0000);
  CHECK(float_to_bf16(-0.0f) == 0x8000);
  CHECK(float_to_bf16(1.0f + 0x1p-8f) == 0x3f80);                 // a tie: down to even
  CHECK(float_to_bf16(1.0f + 3 * 0x1p-8f) == 0x3f82);             // a tie: up to even
  CHECK(float_to_bf16(1.0f + 0x1p-8f + 0x1p-23f) == 0x3f81);      // just above the tie
  CHECK(float_to_bf16(1.0f + 3 * 0x1p-8f - 0x1p-23f) == 0x3f81);  // just below
  CHECK(float_to_bf16(3.3895314e38f) == 0x7f7f);                  // the largest bf16
  CHECK(float_to_bf16(std::numeric_limits<float>::max()) ==
        0x7f80);  // nearer to 2^128: infinity, as IEEE rounds
  CHECK(float_to_bf16(std::numeric_limits<float>::infinity()) == 0x7f80);
  CHECK(float_to_bf16(std::numeric_limits<float>::denorm_min()) == 0);
  for (uint32_t payload : {0x7f800001u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {  // would round to inf or 0
    float nan;
    std::memcpy(&nan, &payload, 4);
    CHECK(std::isnan(bf16_to_float(float_to_bf16(nan))));
  }
  int changed = 0;  // every bf16 value is itself after a round trip
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = bf16_to_float(static_cast<uint16_t>(bits));
    if (!std::isnan(value) && float_to_bf16(value) != bits) ++changed;
  }
  CHECK(changed == 0);
}

TEST_CASE("HostTensor: values in, values out") {
  const auto f = HostTensor::from_floats({2, 2}, std::vector<float>{1.5f, -2, 3, 0.1f});
  CHECK(f.numel() == 4);
  CHECK(f.bytes.size() == 16);
  CHECK(f.at(1) == -2.0f);
  CHECK(f.to_floats() == std::vector<float>{1.5f, -2, 3, 0.1f});
  CHECK(f.to_doubles() == std::vector<double>{1.5, -2, 3, static_cast<double>(0.1f)});

  const auto d = HostTensor::from_doubles({1}, std::vector<double>{0.1});
  CHECK(d.to_doubles()[0] == 0.1);
  CHECK(d.to_floats()[0] == 0.1f);

  const auto i = HostTensor::from_ints({2}, std::vector<int32_t>{-1, 2147483647});
  CHECK(i.to_ints() == std::vector<int32_t>{-1, 2147483647});
  CHECK(i.to_doubles() == std::vector<double>{-1, 2147483647});

  const auto b = HostTensor::bf16_from_floats({2}, std::vector<float>{1, 0.1f});
  CHECK(b.bytes.size() == 4);
  CHECK(b.at(0) == 1.0f);
  CHECK(b.at(1) == 0.10009765625f);

  CHECK(HostTensor::from_floats({}, std::vector<float>{7}).numel() == 1);
  CHECK(HostTensor::from_floats({3, 0}, std::vector<float>{}).numel() == 0);

  CHECK(contains(error_of([&] { f.at(4); }), "element 4"));
  CHECK(contains(error_of([&] { f.at(-1); }), "element -1"));
  CHECK(contains(error_of([&] { f.to_ints(); }), "F32, not I32"));
  CHECK(contains(error_of([] { HostTensor::from_floats({2, 3}, std::vector<float>(5)); }), "[2, 3]"));
  CHECK(contains(error_of([] { HostTensor::from_floats({-1}, std::vector<float>(1)); }), "[-1]"));
  HostTensor broken = f;
  broken.bytes.pop_back();
  CHECK(contains(error_of([&] { broken.to_floats(); }), "15 bytes"));
}

TEST_CASE("safetensors: a round trip is exact, and the same content gives the same bytes") {
  const Folder folder;
  const Safetensors file = example();
  save_safetensors(folder / "x.safetensors", file);
  const Safetensors again = load_safetensors(folder / "x.safetensors");
  CHECK(again == file);
  save_safetensors(folder / "y.safetensors", again);
  CHECK(slurp(folder / "x.safetensors") == slurp(folder / "y.safetensors"));
  CHECK(folder.files() == 2);  // no temporary stays

  const std::string bytes = slurp(folder / "x.safetensors");
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  CHECK(header % 8 == 0);

  save_safetensors(folder / "none.safetensors", {});
  CHECK(slurp(folder / "none.safetensors") == raw("{}      ", ""));
  CHECK(load_safetensors(folder / "none.safetensors") == Safetensors{});
}

TEST_CASE("safetensors: NaN, infinities and every bit pattern survive") {
  const Folder folder;
  HostTensor tensor{DType::F32, {4}, {}};
  for (uint32_t bits : {0x7fc12345u, 0xff800001u, 0x7f800000u, 0x80000000u})
    for (int k = 0; k < 4; ++k) tensor.bytes.push_back(static_cast<std::byte>(bits >> 8 * k));
  save_safetensors(folder / "x", {{{"w", tensor}}, {}});
  CHECK(load_safetensors(folder / "x").tensors.at("w").bytes == tensor.bytes);
}

TEST_CASE("safetensors: the bytes on disk are those the format's page describes") {
  const Folder folder;
  Safetensors file;
  file.tensors["w"] = HostTensor::bf16_from_floats({1}, std::vector<float>{1});  // 80 3f
  file.tensors["x"] = HostTensor::from_ints({1, 1}, std::vector<int32_t>{258});  // 02 01 00 00
  file.metadata["format"] = "pt";
  save_safetensors(folder / "x", file);
  std::string header =
      R"({"__metadata__":{"format":"pt"},"w":{"data_offsets":[4,6],"dtype":"BF16","shape":[1]},)"
      R"("x":{"data_offsets":[0,4],"dtype":"I32","shape":[1,1]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  CHECK(slurp(folder / "x") == raw(header, std::string("\x02\x01\x00\x00\x80\x3f", 6)));

  // Another writer: other key order, spaces, unknown fields, an unaligned header, an empty tensor between
  // two.
  spill(folder / "y", raw(R"({ "z" : {"shape":[2],"extra":1,"dtype":"BF16","data_offsets":[0,4]},)"
                          R"("n":{"dtype":"F64","shape":[0],"data_offsets":[4,4]},)"
                          R"("a":{"dtype":"F32","shape":[],"data_offsets":[4,8]}} )",
                          std::string("\x80\x3f\x00\x40\x00\x00\x40\x40", 8)));
  const Safetensors other = load_safetensors(folder / "y");
  CHECK(other.tensors.at("z").to_floats() == std::vector<float>{1, 2});
  CHECK(other.tensors.at("n").numel() == 0);
  CHECK(other.tensors.at("a").at(0) == 3.0f);
  CHECK(other.metadata.empty());
}

TEST_CASE("safetensors: what is not there, or not a file") {
  const Folder folder;
  CHECK(contains(error_of([&] { load_safetensors(folder / "nowhere"); }), "no such file"));
  CHECK(contains(error_of([&] { load_safetensors(folder.path); }), "is a directory"));
  CHECK(contains(error_of([] { load_safetensors("/dev/zero"); }), "device"));
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0666) == 0);
  CHECK(contains(error_of([&] { load_safetensors(folder / "pipe"); }), "pipe"));  // and does not wait
  spill(folder / "secret", "x");
  fs::permissions(folder.path, fs::perms::all);
  fs::permissions(folder / "secret", fs::perms::none);
  as_ordinary_user(
      [&] { CHECK(contains(error_of([&] { load_safetensors(folder / "secret"); }), "Permission denied")); });
}

TEST_CASE("safetensors: every lie of a header is found, in one line that names file and tensor") {
  const Folder folder;
  const auto one = [](const std::string& body) { return "{\"w\":{" + body + "}}"; };
  const std::string four(4, 'x'), eight(8, 'x');
  struct {
    std::string content, part;
  } const cases[] = {
      {"", "0 bytes"},
      {"1234567", "7 bytes"},
      {raw("{}", "", 3), "claims 3 bytes"},
      {raw("{}", "", INT64_MAX), "claims 9223372036854775807"},
      {std::string(100, '\xff'), "claims 18446744073709551615"},
      {raw("", ""), "bad JSON"},
      {raw(" {}", ""), "bad JSON"},
      {raw("{", ""), "bad JSON"},
      {raw("{}}", ""), "bad JSON"},
      {raw("{\"w\":}", ""), "bad JSON"},
      {raw("{\"w\xff\":1}", ""), "bad JSON"},
      {raw("{\"a\n\":1}", ""), "bad JSON"},
      {raw(std::string("{}\0", 3), ""), "bad JSON"},
      {raw("[1]", ""), "bad JSON"},
      {raw("{\"w\":" + std::string(100000, '['), ""), "nested deeper"},
      {raw("{\"w\":1}", ""), "tensor 'w': the header must give"},
      {raw(one(R"("dtype":"F32","shape":[1])"), four), "tensor 'w': the header must give"},
      {raw(one(R"("dtype":"F32","data_offsets":[0,4])"), four), "must give"},
      {raw(one(R"("shape":[1],"data_offsets":[0,4])"), four), "must give"},
      {raw(one(R"("dtype":"F16","shape":[2],"data_offsets":[0,4])"), four), "tensor 'w': dtype \"F16\""},
      {raw(one(R"("dtype":7,"shape":[2],"data_offsets":[0,4])"), four), "dtype 7"},
      {raw(one(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), four), "shape [-1]"},
      {raw(one(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), four), "shape [1.0]"},
      {raw(one(R"("dtype":"F32","shape":1,"data_offsets":[0,4])"), four), "shape 1"},
      {raw(one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), four), "not a list"},
      {raw(one(R"("dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4])"), four), "be counted"},
      {raw(one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0])"), ""), "be counted"},
      {raw(one(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), four), "needs 8 bytes"},
      {raw(one(R"("dtype":"BF16","shape":[1],"data_offsets":[0,4])"), four), "needs 2 bytes"},
      {raw(one(R"("dtype":"F32","shape":[],"data_offsets":[0,0])"), ""), "needs 4 bytes"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), four), "end before they begin"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"), four), "data_offsets [-4,0]"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4,8])"), four), "is not [begin, end]"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4.0])"), four), "is not [begin, end]"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), "xxx"), "file has only 3: truncated"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[8,12])"), four), "file has only 4"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[9223372036854775803,9223372036854775807])"),
           four),
       "file has only 4"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[4,8])"), eight), "a hole"},
      {raw(one(R"("dtype":"F32","shape":[1],"data_offsets":[0,4])"), eight), "a hole at its end"},
      {raw("{}", "x"), "a hole at its end"},
      {raw(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})",
           "xxxxxx"),
       "tensor 'b' begins at byte 2 of the data, but the tensors before it end at 4: they overlap"},
      {raw(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
           R"("b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
           four),
       "overlap"},
      {raw(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
           R"("b":{"dtype":"F32","shape":[0],"data_offsets":[2,2]}})",
           four),
       "overlap"},
      {raw(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
           R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
           eight),
       "'a' appears twice"},
      {raw(one(R"("dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4])"), four),
       "'shape' appears twice"},
      {raw(R"({"__metadata__":1})", ""), "__metadata__"},
      {raw(R"({"__metadata__":{"step":3}})", ""), "__metadata__"},
      {raw("{\"line\\nbreak\":1}", ""), "tensor 'line?break'"},
  };
  for (const auto& c : cases) {
    const std::string text = load_error(folder, c.content);
    CHECK_MESSAGE(contains(text, c.part), text << "   should say: " << c.part);
  }
}

TEST_CASE("safetensors: a file cut anywhere is an error, never a partial load") {
  const Folder folder;
  save_safetensors(folder / "x", example());
  const std::string whole = slurp(folder / "x");
  for (size_t n = 0; n < whole.size(); ++n) {
    const std::string text = load_error(folder, whole.substr(0, n));
    CHECK_MESSAGE(!contains(text, "(no error)"), n);
  }
  CHECK(contains(load_error(folder, whole + "x"), "a hole at its end"));
}

TEST_CASE("safetensors: a flipped byte is an error or a value, never a crash") {
  const Folder folder;
  save_safetensors(folder / "x", example());
  const std::string whole = slurp(folder / "x");
  for (size_t n = 0; n < whole.size(); ++n)
    for (int flip : {1, 0x20, 0x80}) {
      std::string bad = whole;
      bad[n] = static_cast<char>(bad[n] ^ flip);
      spill(folder / "bad", bad);
      error_of([&] { load_safetensors(folder / "bad"); });
    }
}

TEST_CASE("safetensors: a lying header allocates nothing") {
  const Folder folder;
  std::ifstream statm("/proc/self/statm");
  rlim_t pages = 0;
  statm >> pages;
  REQUIRE(pages > 0);
  // 32 MiB above what we have now: any allocation on the word of the headers below ends in bad_alloc.
  const rlim_t limit = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (32 << 20);
  const std::string tensor =
      R"({"w":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}})";
  spill(folder / "tensor", raw(tensor, "xxxx"));
  spill(folder / "header", raw("{}", "", int64_t{1} << 40));
  spill(folder / "sparse", raw("{}", "", int64_t{1} << 30));  // the file really is that long, but of holes
  fs::resize_file(folder / "sparse", 8 + (uint64_t{1} << 30));
  std::string messages;
  with_limit(RLIMIT_AS, limit, [&] {
    for (const char* name : {"tensor", "header", "sparse"}) try {
        load_safetensors(folder / name);
      } catch (const std::exception& e) {
        messages += std::string(e.what()) + "\n";
      }
  });
  CHECK_MESSAGE(contains(messages, "file has only 4: truncated"), messages);
  CHECK_MESSAGE(contains(messages, "claims 1099511627776 bytes"), messages);
  CHECK_MESSAGE(contains(messages, "limit of 100000000"), messages);
}

TEST_CASE("save: what cannot be written is an error, and no file is made") {
  const Folder folder;
  const std::string path = folder / "x";
  Safetensors file = example();
  file.tensors["b"].shape = {7};
  CHECK(contains(error_of([&] { save_safetensors(path, file); }), "tensor 'b'"));
  file = example();
  file.tensors["__metadata__"] = file.tensors["b"];
  CHECK(contains(error_of([&] { save_safetensors(path, file); }), "reserved"));
  file = example();
  file.tensors["\xff"] = file.tensors["b"];
  CHECK(contains(error_of([&] { save_safetensors(path, file); }), "not UTF-8"));
  CHECK(folder.files() == 0);

  CHECK(contains(error_of([&] { save_safetensors(folder / "no/such/folder/x", {}); }), "No such file"));
  CHECK(contains(error_of([&] { save_safetensors(folder.path, {}); }), "not a regular file"));
  CHECK(contains(error_of([] { save_safetensors("/dev/null", {}); }), "not a regular file"));
  struct stat info = {};
  REQUIRE(::stat("/dev/null", &info) == 0);
  CHECK(S_ISCHR(info.st_mode));
}

TEST_CASE("save: a full disk leaves the old file, and no temporary") {
  const Folder folder;
  save_safetensors(folder / "x", example());
  const std::string before = slurp(folder / "x");
  Safetensors large;
  large.tensors["w"] = HostTensor::from_floats({100000}, std::vector<float>(100000));
  std::string text;
  const auto old = ::signal(SIGXFSZ, SIG_IGN);  // so that write() reports the limit instead
  with_limit(RLIMIT_FSIZE, 100000, [&] {
    text = error_of([&] { save_safetensors(folder / "x", large); });
    error_of([&] { save_safetensors(folder / "new", large); });
  });
  ::signal(SIGXFSZ, old);
  CHECK_MESSAGE(contains(text, "write failed"), text);
  CHECK(contains(text, "the old file is unchanged"));
  CHECK(slurp(folder / "x") == before);
  CHECK(folder.files() == 1);
}

TEST_CASE("save: without permission the old file stays") {
  const Folder folder;
  const std::string inner = folder / "inner", path = inner + "/x";
  fs::permissions(folder.path, fs::perms::all);
  fs::create_directory(inner);
  save_json_text(path, "old");

  fs::permissions(
      inner, fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read | fs::perms::others_exec);
  fs::permissions(path, fs::perms::all);
  as_ordinary_user(
      [&] { CHECK(contains(error_of([&] { save_json_text(path, "new"); }), "Permission denied")); });
  CHECK(slurp(path) == "old");

  fs::permissions(inner, fs::perms::all);
  fs::permissions(path, fs::perms::owner_read | fs::perms::others_read);
  as_ordinary_user([&] {  // the folder would allow a rename over it
    CHECK(contains(error_of([&] { save_json_text(path, "new"); }), "write-protected"));
  });
  CHECK(slurp(path) == "old");
}

TEST_CASE("save: replaces the old file whole, keeps its permissions, and follows a link") {
  const Folder folder;
  save_json_text(folder / "x", std::string(1000, 'o'));
  ::chmod((folder / "x").c_str(), 0640);
  fs::create_symlink("x", folder / "latest");
  save_json_text(folder / "latest", "new");
  CHECK(fs::is_symlink(folder / "latest"));
  CHECK(slurp(folder / "x") == "new");
  CHECK((fs::status(folder / "x").permissions() & fs::perms::mask) == fs::perms(0640));
  CHECK(folder.files() == 2);
}

TEST_CASE("save: temporaries left by a killed save are neither read nor in the way") {
  const Folder folder;
  const std::string path = folder / "x";
  save_safetensors(path, example());
  // What a kill between write and rename leaves, under every name this process could choose next.
  for (int n = 0; n < 200; ++n)
    spill(format("%s.%d-%d.tmp", path.c_str(), static_cast<int>(::getpid()), n), "half");
  CHECK(load_safetensors(path) == example());
  Safetensors next = example();
  next.metadata["step"] = "4";
  save_safetensors(path, next);
  CHECK(load_safetensors(path) == next);
  CHECK(folder.files() == 201);  // and none of them was touched: another process may still be writing it
}

TEST_CASE("save: a save that dies half-way leaves the old file") {
  const Folder folder;
  const std::string path = folder / "x";
  save_safetensors(path, example());
  Safetensors large = example();
  large.tensors["w"] = HostTensor::from_floats({1000000}, std::vector<float>(1000000));
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {  // the kernel kills it in the middle of a write
    ::signal(SIGXFSZ, SIG_DFL);
    const rlimit none = {0, 0}, half = {2000000, 2000000};
    ::setrlimit(RLIMIT_CORE, &none);
    ::setrlimit(RLIMIT_FSIZE, &half);
    save_safetensors(path, large);
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(folder.files() == 2);  // the temporary, cut
  CHECK(load_safetensors(path) == example());
  save_safetensors(path, large);
  CHECK(load_safetensors(path) == large);
}

TEST_CASE("config.json: top-level scalars as text") {
  const Folder folder;
  const std::string path = folder / "config.json";
  const std::string text =
      "{\n \"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 64, \"rms_norm_eps\": 1e-05,\n"
      " \"rope_theta\": 10000.0, \"tie_word_embeddings\": false, \"model_type\": \"llama\", \"big\": -3,\n"
      " \"rope_scaling\": null, \"nested\": {\"hidden_size\": 1}, \"empty\": \"\", \"escaped\": \"a\\\"b "
      "世\"}\n";
  save_json_text(path, text);
  CHECK(slurp(path) == text);
  const std::map<std::string, std::string> expected = {{"hidden_size", "64"},
                                                       {"rms_norm_eps", "1e-05"},
                                                       {"rope_theta", "10000.0"},
                                                       {"tie_word_embeddings", "false"},
                                                       {"model_type", "llama"},
                                                       {"big", "-3"},
                                                       {"empty", ""},
                                                       {"escaped", "a\"b 世"}};
  CHECK(load_flat_json(path) == expected);
  CHECK(folder.files() == 1);

  const auto bad = [&](const std::string& content) {
    save_json_text(path, content);
    return error_of([&] { load_flat_json(path); });
  };
  CHECK(contains(bad(""), "bad JSON"));
  CHECK(contains(bad("{\"a\": 1"), "bad JSON"));
  CHECK(contains(bad("[1]"), "not an object"));
  CHECK(contains(bad("{\"a\": 1, \"a\": 2}"), "'a' appears twice"));
  CHECK(contains(bad(std::string(1000000, '[')), "nested deeper"));
  CHECK(contains(error_of([&] { load_flat_json(folder / "none.json"); }), "no such file"));
  CHECK(contains(error_of([&] { load_flat_json(folder.path); }), "is a directory"));
}
