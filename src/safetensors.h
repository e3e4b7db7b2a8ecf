// Weights on disk: the safetensors format of Hugging Face (https://huggingface.co/docs/safetensors), and the
// flat config.json beside it. A file is: 8 bytes, little-endian header length; a JSON header {name: {dtype,
// shape, data_offsets}, "__metadata__": {string: string}}; the bytes of the tensors, without holes.
//
// Every function that touches a file throws Error, one line that names the file (and tensor) and the numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

enum class DType { F32, F64, BF16, I32 };

const char* dtype_name(DType dtype);  // as in the file: "F32", "F64", "BF16", "I32"
size_t dtype_size(DType dtype);       // bytes an element

// bfloat16 is the upper half of a float; rounds to nearest, ties to even. NaN stays NaN.
uint16_t float_to_bf16(float value);
float bf16_to_float(uint16_t bits);

// A tensor in host memory, row by row. shape {} is a scalar: one element.
struct HostTensor {
  DType dtype = DType::F32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  int64_t numel() const;
  float at(int64_t i) const;  // element i in flat order, as to_floats(); throws Error outside [0, numel)

  std::vector<float> to_floats() const;    // any dtype, rounded to the nearest float
  std::vector<double> to_doubles() const;  // any dtype, exact
  std::vector<int32_t> to_ints() const;    // I32 only, else throws Error

  // Each throws Error unless there are as many values as the shape has elements.
  static HostTensor from_floats(std::vector<int64_t> shape, std::span<const float> values);    // F32
  static HostTensor from_doubles(std::vector<int64_t> shape, std::span<const double> values);  // F64
  static HostTensor from_ints(std::vector<int64_t> shape, std::span<const int32_t> values);    // I32
  static HostTensor bf16_from_floats(std::vector<int64_t> shape, std::span<const float> values);

  bool operator==(const HostTensor&) const = default;  // bit for bit
};

struct Safetensors {
  std::map<std::string, HostTensor> tensors;
  std::map<std::string, std::string> metadata;

  bool operator==(const Safetensors&) const = default;
};

// Believes nothing the header says before the file's size confirms it.
Safetensors load_safetensors(const std::string& path);

// Writes a temporary beside `path`, flushes it to disk and renames it: at every moment `path` is the old file
// or the new one, whole. An existing file that is write-protected or not a regular file is an error. A save
// that is killed leaves a '<path>.<pid>-<n>.tmp' behind, which may be deleted.
void save_safetensors(const std::string& path, const Safetensors& file);

// The top-level numbers, booleans and strings of a JSON object, as text ("1e-05", "true"). Skips arrays,
// objects and null.
std::map<std::string, std::string> load_flat_json(const std::string& path);

// Writes `text` as it is, in the same way as save_safetensors.
void save_json_text(const std::string& path, std::string_view text);
