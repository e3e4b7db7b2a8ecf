// bfloat16: the upper half of a float, for machines without a GPU (see cuda_runtime.h beside this file).
#pragma once

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  __nv_bfloat16() = default;

  // Rounds to nearest, ties to even; a NaN becomes 0x7FFF, as on the GPU. One select and no branch, so loops
  // over arrays vectorize.
  __nv_bfloat16(float f) {
    const std::uint32_t u = std::bit_cast<std::uint32_t>(f);
    const std::uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
    bits_ = static_cast<std::uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
  }
  operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits_) << 16); }

 private:
  std::uint16_t bits_;
};

inline __nv_bfloat16 __float2bfloat16(float a) { return a; }
inline float __bfloat162float(__nv_bfloat16 a) { return a; }

// Arithmetic would compute in float here but round to bfloat16 (or not compile) with nvcc, so it is refused:
// convert to float first.
template <class T>
void operator+(__nv_bfloat16, T) = delete;
template <class T>
void operator+(T, __nv_bfloat16) = delete;
template <class T>
void operator-(__nv_bfloat16, T) = delete;
template <class T>
void operator-(T, __nv_bfloat16) = delete;
template <class T>
void operator*(__nv_bfloat16, T) = delete;
template <class T>
void operator*(T, __nv_bfloat16) = delete;
template <class T>
void operator/(__nv_bfloat16, T) = delete;
template <class T>
void operator/(T, __nv_bfloat16) = delete;
