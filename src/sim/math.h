// An exponential that vectorizes: a call to the C library's would keep a softmax loop scalar.
#pragma once

#include <bit>
#include <cstdint>

namespace sim {

// exp(x), relative error below 2e-7 over [-87, 88]. No branch: x = n ln2 + r, exp(r) by polynomial, times
// 2^n. NaN gives NaN, overflow infinity; below -104 the result is 0, and from -87.3 on down it is subnormal.
inline float expf(float x) {
  // Both comparisons are false for NaN, which so passes through.
  const float clamped = x > 89.0f ? 89.0f : (x < -104.0f ? -104.0f : x);
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits of the sum.
  const float shifted = clamped * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r =
      (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln2 in two parts: n * 0.693359375 is exact
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  const float e = (p * r * r + r) + 1.0f;
  // 2^n in two factors, because 2^128 and 2^-150 are not floats.
  const std::int32_t i = std::bit_cast<std::int32_t>(shifted) - 0x4B400000;
  const std::int32_t half = i >> 1;
  const float a = std::bit_cast<float>((half + 127) << 23), b = std::bit_cast<float>((i - half + 127) << 23);
  return e * a * b;
}

}  // namespace sim
