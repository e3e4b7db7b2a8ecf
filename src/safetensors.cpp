#include "safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "error.h"

static_assert(std::endian::native == std::endian::little, "tensors are read as they lie in memory");

namespace {

using nlohmann::json;
using ll = long long;

constexpr uint64_t max_header = 100'000'000;  // the limit of the reference implementation

// Names from a file go into one-line messages: no control characters, no endless names.
std::string printable(std::string text) {
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  if (text.size() > 200) text = text.substr(0, 200) + "...";
  return text;
}

struct Descriptor {
  int fd = -1;
  explicit Descriptor(int fd) : fd(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

// ---------------------------------------------------------------------------------------------- reading

// A regular file, open for reading.
class Input {
 public:
  // O_NONBLOCK: a pipe without a writer must be an error, not a wait.
  explicit Input(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    struct stat info = {};
    if (file_.fd < 0 && errno == ENOENT)
      throw Error(format("'%s': no such file; check the path", path.c_str()));
    if (file_.fd < 0 || ::fstat(file_.fd, &info) != 0)
      throw Error(format("'%s': cannot open it (%s)", path.c_str(), std::strerror(errno)));
    if (S_ISDIR(info.st_mode)) throw Error(format("'%s' is a directory; give a file in it", path.c_str()));
    if (!S_ISREG(info.st_mode)) throw Error(format("'%s' is a pipe or a device; give a file", path.c_str()));
    size_ = static_cast<uint64_t>(info.st_size);
  }

  uint64_t size() const { return size_; }

  void read(uint64_t offset, void* to, uint64_t bytes) const {
    for (uint64_t done = 0; done < bytes;) {
      const ssize_t n =
          ::pread(file_.fd, static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0)
        throw Error(format("'%s': cannot read byte %llu of %llu (%s); copy the file again", path_.c_str(),
                           static_cast<unsigned long long>(offset + done),
                           static_cast<unsigned long long>(size_),
                           n < 0 ? std::strerror(errno) : "it shrank while being read"));
      done += static_cast<uint64_t>(n);
    }
  }

  std::string text(uint64_t offset, uint64_t bytes) const {
    std::string text(bytes, '\0');
    read(offset, text.data(), bytes);
    return text;
  }

 private:
  std::string path_;
  Descriptor file_;
  uint64_t size_ = 0;
};

// A JSON object in which no key appears twice. `max_depth`: containers may nest that deep, the object itself
// included; it bounds what a hostile text makes the parser build. `what` begins every message.
json parse_object(const std::string& what, const std::string& text, int max_depth) {
  std::vector<std::set<std::string>> keys(static_cast<size_t>(max_depth) +
                                          1);  // of the open object, by depth
  const auto check = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key) {
      const auto name = value.get<std::string>();
      if (!keys[static_cast<size_t>(depth)].insert(name).second)
        throw Error(
            format("%s: '%s' appears twice; write the file again", what.c_str(), printable(name).c_str()));
    }
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= max_depth)
        throw Error(format("%s: bad JSON, nested deeper than %d levels", what.c_str(), max_depth));
      keys[static_cast<size_t>(depth) + 1].clear();
    }
    return true;
  };
  // The parser takes a zero byte for the end of the text, and would not see what follows it.
  if (text.find('\0') != std::string::npos) throw Error(format("%s: bad JSON (a zero byte)", what.c_str()));
  try {
    json object = json::parse(text, check);
    if (!object.is_object()) throw Error(format("%s: the JSON is not an object {...}", what.c_str()));
    return object;
  } catch (const json::exception& e) {
    throw Error(format("%s: bad JSON (%s)", what.c_str(), printable(e.what()).c_str()));
  }
}

// Elements of a shape, false if the number does not fit.
bool count_elements(const std::vector<int64_t>& shape, int64_t& numel) {
  // A zero anywhere makes the product 0, but only if no partial product before it overflowed.
  numel = std::find(shape.begin(), shape.end(), 0) == shape.end();
  for (int64_t n : shape)
    if (n < 0 || __builtin_mul_overflow(numel, n, &numel)) return false;
  return true;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

bool is_index(const json& value) {  // a whole number that fits int64
  return value.is_number_unsigned() && value.get<uint64_t>() <= uint64_t{INT64_MAX};
}

struct Entry {  // one tensor as the header describes it
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
  int64_t begin, end;  // bytes from the start of the data
};

Entry parse_entry(const std::string& path, const std::string& name, const json& info, int64_t data_bytes) {
  const std::string what = format("'%s', tensor '%s'", path.c_str(), printable(name).c_str());
  const auto fail = [&](const std::string& why) { throw Error(what + ": " + why); };
  if (!info.is_object() || !info.contains("dtype") || !info.contains("shape") ||
      !info.contains("data_offsets"))
    fail("the header must give dtype, shape and data_offsets");

  Entry entry{name, {}, {}, 0, 0};
  const json& dtype = info["dtype"];
  const DType known[] = {DType::F32, DType::F64, DType::BF16, DType::I32};
  const auto found =
      std::find_if(std::begin(known), std::end(known), [&](DType d) { return dtype == dtype_name(d); });
  if (found == std::end(known))
    fail(format("dtype %s is not supported; convert it to F32, F64, BF16 or I32",
                printable(dtype.dump()).c_str()));
  entry.dtype = *found;

  const json& shape = info["shape"];
  if (!shape.is_array() || !std::all_of(shape.begin(), shape.end(), is_index))
    fail(format("shape %s is not a list of sizes", printable(shape.dump()).c_str()));
  entry.shape = shape.get<std::vector<int64_t>>();

  const json& offsets = info["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !is_index(offsets[0]) || !is_index(offsets[1]))
    fail(format("data_offsets %s is not [begin, end]", printable(offsets.dump()).c_str()));
  entry.begin = offsets[0].get<int64_t>();
  entry.end = offsets[1].get<int64_t>();
  if (entry.begin > entry.end)
    fail(format("data_offsets [%lld, %lld] end before they begin", ll{entry.begin}, ll{entry.end}));

  int64_t bytes = 0;
  if (!count_elements(entry.shape, bytes) || __builtin_mul_overflow(bytes, dtype_size(entry.dtype), &bytes))
    fail(format("shape %s of %s is more bytes than can be counted",
                printable(shape_text(entry.shape)).c_str(), dtype_name(entry.dtype)));
  if (bytes != entry.end - entry.begin)
    fail(format("shape %s of %s needs %lld bytes, but its data_offsets [%lld, %lld] hold %lld",
                printable(shape_text(entry.shape)).c_str(), dtype_name(entry.dtype), ll{bytes},
                ll{entry.begin}, ll{entry.end}, ll{entry.end - entry.begin}));
  if (entry.end > data_bytes)
    fail(format("ends at byte %lld of the data, but the file has only %lld: truncated; copy the file again",
                ll{entry.end}, ll{data_bytes}));
  return entry;
}

// The tensors must tile the data: no overlap, no hole. Then all of them together are as large as the file.
void check_tiling(const std::string& path, std::vector<Entry>& entries, int64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  int64_t at = 0;
  for (const Entry& entry : entries) {
    if (entry.begin != at)
      throw Error(
          format("'%s', tensor '%s' begins at byte %lld of the data, but the tensors before it end at "
                 "%lld: %s; write the file again",
                 path.c_str(), printable(entry.name).c_str(), ll{entry.begin}, ll{at},
                 entry.begin < at ? "they overlap" : "a hole"));
    at = entry.end;
  }
  if (at != data_bytes)
    throw Error(
        format("'%s': the tensors end at byte %lld of the data, but the file has %lld: a hole at its end; "
               "write the file again",
               path.c_str(), ll{at}, ll{data_bytes}));
}

// ---------------------------------------------------------------------------------------------- writing

// Writes the pieces, one after the other, as the new content of `path`: all of them or nothing.
void write_atomically(const std::string& path, const std::vector<std::span<const std::byte>>& pieces) {
  namespace fs = std::filesystem;
  const auto fail = [&](const std::string& why, int error, const char* advice) {
    throw Error(format("cannot save '%s': %s%s%s; %s", path.c_str(), why.c_str(), error ? ": " : "",
                       error ? std::strerror(error) : "", advice));
  };

  // rename() would replace a link, a device or a write-protected file without asking: follow the first,
  // refuse the others.
  std::string target = path;
  struct stat old = {};
  const bool exists = ::stat(path.c_str(), &old) == 0;
  if (exists) {
    if (!S_ISREG(old.st_mode)) fail("it exists and is not a regular file", 0, "choose another path");
    if (::faccessat(AT_FDCWD, path.c_str(), W_OK, AT_EACCESS) != 0)
      fail("the existing file is write-protected", errno, "choose another path");
    std::error_code error;
    const fs::path real = fs::canonical(path, error);
    if (!error) target = real.string();
  }

  static std::atomic<int> counter = 0;  // ranks may be threads of one process
  std::string temporary;
  int fd = -1;
  do {  // O_EXCL: never write into a file that somebody else is writing, or left behind
    temporary = format("%s.%d-%d.tmp", target.c_str(), static_cast<int>(::getpid()), counter++);
    fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EEXIST);
  if (fd < 0) fail("cannot create a file there", errno, "check that the folder exists and may be written");

  const char* failed = nullptr;
  int why = 0;
  const auto check = [&](bool good, const char* step) {
    if (!good && !failed) failed = step, why = errno;
  };
  check(!exists || ::fchmod(fd, old.st_mode & 07777) == 0, "cannot keep the old file's permissions");
  for (const std::span<const std::byte> piece : pieces)
    for (size_t done = 0; done < piece.size() && !failed;) {
      const ssize_t n = ::write(fd, piece.data() + done, piece.size() - done);
      check(n >= 0 || errno == EINTR, "write failed");
      if (n > 0) done += static_cast<size_t>(n);
    }
  // Without fsync a power cut after the rename could leave a file of zeros. (EINVAL: a file system without
  // it.)
  if (!failed) check(::fsync(fd) == 0 || errno == EINVAL, "flush failed");
  check(::close(fd) == 0, "close failed");
  if (!failed) check(::rename(temporary.c_str(), target.c_str()) == 0, "rename failed");
  if (failed) {
    ::unlink(temporary.c_str());
    fail(failed, why, exists ? "the old file is unchanged" : "no file was made");
  }

  // Makes the rename itself durable. If that fails, `path` is still a whole file, so it is no error.
  const fs::path folder = fs::path(target).parent_path();
  const Descriptor directory(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.fd >= 0) ::fsync(directory.fd);
}

template <class T>
HostTensor make(DType dtype, std::vector<int64_t> shape, std::span<const T> values) {
  int64_t numel = 0;
  if (!count_elements(shape, numel) || static_cast<uint64_t>(numel) != values.size())
    throw Error(format("a tensor of shape %s cannot hold %zu values; give one value per element",
                       shape_text(shape).c_str(), values.size()));
  const auto bytes = std::as_bytes(values);
  return {dtype, std::move(shape), {bytes.begin(), bytes.end()}};
}

template <class T>
T load(const std::byte* from) {  // bytes need not be aligned
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

double element(const HostTensor& tensor, int64_t i) {
  const std::byte* from = tensor.bytes.data() + static_cast<size_t>(i) * dtype_size(tensor.dtype);
  switch (tensor.dtype) {
    case DType::F32:
      return load<float>(from);
    case DType::F64:
      return load<double>(from);
    case DType::BF16:
      return bf16_to_float(load<uint16_t>(from));
    case DType::I32:
      return load<int32_t>(from);
  }
  return 0;
}

// Guards the conversions against a tensor put together by hand.
int64_t checked_numel(const HostTensor& tensor, const char* what) {
  int64_t numel = 0;
  const uint64_t size = dtype_size(tensor.dtype);
  if (!count_elements(tensor.shape, numel) || tensor.bytes.size() / size != static_cast<uint64_t>(numel) ||
      tensor.bytes.size() % size != 0)
    throw Error(
        format("%s: a shape of %s of %s does not fit its %zu bytes; make it with from_floats or its kin",
               what, shape_text(tensor.shape).c_str(), dtype_name(tensor.dtype), tensor.bytes.size()));
  return numel;
}

template <class T>
std::vector<T> convert(const HostTensor& tensor) {
  std::vector<T> values(static_cast<size_t>(checked_numel(tensor, "tensor")));
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<T>(element(tensor, static_cast<int64_t>(i)));
  return values;
}

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::F32:
      return "F32";
    case DType::F64:
      return "F64";
    case DType::BF16:
      return "BF16";
    case DType::I32:
      return "I32";
  }
  return "?";
}

size_t dtype_size(DType dtype) { return dtype == DType::F64 ? 8 : dtype == DType::BF16 ? 2 : 4; }

uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  // Rounding could carry a NaN into infinity or zero: truncate it, and set a bit that survives.
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  // Half a unit of the last kept place, less one unless that place is odd: ties go to even.
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

int64_t HostTensor::numel() const {
  int64_t numel = 1;
  for (int64_t n : shape) numel *= n;
  return numel;
}

float HostTensor::at(int64_t i) const {
  const int64_t n = checked_numel(*this, "tensor");
  if (i < 0 || i >= n)
    throw Error(format("element %lld of a tensor of shape %s, which has %lld", ll{i},
                       shape_text(shape).c_str(), ll{n}));
  return static_cast<float>(element(*this, i));
}

std::vector<float> HostTensor::to_floats() const { return convert<float>(*this); }
std::vector<double> HostTensor::to_doubles() const { return convert<double>(*this); }

std::vector<int32_t> HostTensor::to_ints() const {
  if (dtype != DType::I32)
    throw Error(format("a tensor of shape %s holds %s, not I32: it has no integers to read",
                       shape_text(shape).c_str(), dtype_name(dtype)));
  return convert<int32_t>(*this);
}

HostTensor HostTensor::from_floats(std::vector<int64_t> shape, std::span<const float> values) {
  return make(DType::F32, std::move(shape), values);
}

HostTensor HostTensor::from_doubles(std::vector<int64_t> shape, std::span<const double> values) {
  return make(DType::F64, std::move(shape), values);
}

HostTensor HostTensor::from_ints(std::vector<int64_t> shape, std::span<const int32_t> values) {
  return make(DType::I32, std::move(shape), values);
}

HostTensor HostTensor::bf16_from_floats(std::vector<int64_t> shape, std::span<const float> values) {
  std::vector<uint16_t> rounded(values.size());
  std::transform(values.begin(), values.end(), rounded.begin(), float_to_bf16);
  return make(DType::BF16, std::move(shape), std::span<const uint16_t>(rounded));
}

Safetensors load_safetensors(const std::string& path) {
  const Input input(path);
  const std::string what = "'" + path + "'";
  const auto size = static_cast<unsigned long long>(input.size());
  if (size < 8)
    throw Error(
        format("%s: %llu bytes are too few for a safetensors file; copy it again", what.c_str(), size));
  uint64_t header_bytes = 0;
  input.read(0, &header_bytes, 8);
  const auto claimed = static_cast<unsigned long long>(header_bytes);
  if (claimed > size - 8)
    throw Error(
        format("%s: its header claims %llu bytes, but the file has %llu: truncated, or not safetensors",
               what.c_str(), claimed, size));
  if (claimed > max_header)
    throw Error(format("%s: its header claims %llu bytes, more than the format's limit of %llu", what.c_str(),
                       claimed, static_cast<unsigned long long>(max_header)));

  const std::string text = input.text(8, header_bytes);
  if (!text.starts_with('{'))
    throw Error(
        format("%s: its header is bad JSON, it does not begin with '{'; is it safetensors?", what.c_str()));
  json header = parse_object(what + ", header", text, 3);

  Safetensors file;
  if (const auto metadata = header.find("__metadata__"); metadata != header.end()) {
    const auto is_string = [](const json& value) { return value.is_string(); };
    if (!metadata->is_object() || !std::all_of(metadata->begin(), metadata->end(), is_string))
      throw Error(format("%s: __metadata__ is not an object of strings", what.c_str()));
    file.metadata = metadata->get<std::map<std::string, std::string>>();
    header.erase(metadata);
  }

  const auto data_bytes = static_cast<int64_t>(size - 8 - header_bytes);
  std::vector<Entry> entries;
  for (const auto& [name, info] : header.items())
    entries.push_back(parse_entry(path, name, info, data_bytes));
  check_tiling(path, entries, data_bytes);
  for (Entry& entry : entries) {
    std::vector<std::byte> bytes(static_cast<size_t>(entry.end - entry.begin));
    input.read(8 + header_bytes + static_cast<uint64_t>(entry.begin), bytes.data(), bytes.size());
    file.tensors[entry.name] = {entry.dtype, std::move(entry.shape), std::move(bytes)};
  }
  return file;
}

void save_safetensors(const std::string& path, const Safetensors& file) {
  json header = json::object();  // sorts its keys
  if (!file.metadata.empty()) header["__metadata__"] = file.metadata;

  // Wider types first, then by name, so that every tensor is aligned to its element: PyTorch maps the file
  // and refuses a view that is not.
  std::vector<const std::map<std::string, HostTensor>::value_type*> order;
  for (const auto& tensor : file.tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) {
    return dtype_size(a->second.dtype) > dtype_size(b->second.dtype);
  });

  std::vector<std::span<const std::byte>> pieces(2);  // the header's length and the header, filled in below
  size_t at = 0;
  for (const auto* named : order) {
    const auto& [name, tensor] = *named;
    const std::string what = format("cannot save '%s', tensor '%s'", path.c_str(), printable(name).c_str());
    if (name == "__metadata__") throw Error(what + ": that name is reserved by the format; choose another");
    checked_numel(tensor, what.c_str());
    header[name] = {{"dtype", dtype_name(tensor.dtype)},
                    {"shape", tensor.shape},
                    {"data_offsets", {at, at + tensor.bytes.size()}}};
    at += tensor.bytes.size();
    pieces.push_back(tensor.bytes);
  }

  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& e) {  // a name or a metadata string that is not UTF-8
    throw Error(
        format("cannot save '%s': a name is not UTF-8 (%s)", path.c_str(), printable(e.what()).c_str()));
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data begin at a multiple of 8
  if (text.size() > max_header)
    throw Error(
        format("cannot save '%s': a header of %zu bytes is above the format's limit of %llu; "
               "save fewer tensors or less metadata",
               path.c_str(), text.size(), static_cast<unsigned long long>(max_header)));
  const uint64_t length = text.size();
  pieces[0] = std::as_bytes(std::span(&length, 1));
  pieces[1] = std::as_bytes(std::span(text));
  write_atomically(path, pieces);
}

std::map<std::string, std::string> load_flat_json(const std::string& path) {
  const Input input(path);
  if (input.size() > max_header)
    throw Error(format("'%s': %llu bytes are too many for a config; give the model's config.json",
                       path.c_str(), static_cast<unsigned long long>(input.size())));
  const json object = parse_object("'" + path + "'", input.text(0, input.size()), 100);
  std::map<std::string, std::string> fields;
  for (const auto& [key, value] : object.items())
    if (value.is_string())
      fields[key] = value.get<std::string>();
    else if (value.is_primitive() && !value.is_null())
      fields[key] = value.dump();
  return fields;
}

void save_json_text(const std::string& path, std::string_view text) {
  write_atomically(path, {std::as_bytes(std::span(text))});
}
