// Counter-based random numbers: every number is a pure function of (seed, stream, index). There is no state
// to advance, so a rank that holds a slice draws exactly the numbers one GPU would have drawn for that slice.
#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014; constants: Stafford's variant 13). A bijection:
// every bit of the input changes about half the bits of the output.
constexpr uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// FNV-1a, 64 bits: turns a parameter's name into a stream. (std::hash may differ between standard libraries.)
constexpr uint64_t hash_name(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

// 64 random bits. Within one (seed, stream) this is the sequence of SplitMix64 started at a scrambled key.
constexpr uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr uint64_t golden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio; keeps mix(0) = 0 out of reach
  const uint64_t key = mix(mix(seed + golden) + stream);
  return mix(key + (index + 1) * golden);
}

// Uniform in [0, 1): a multiple of 2^-53. random_uniform() * n stays below n for every integer n up to 2^53.
constexpr double random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return static_cast<double>(random_bits(seed, stream, index) >> 11) * 0x1p-53;
}

// Standard normal, by Box and Muller (1958), from the uniforms 2 * index and 2 * index + 1 of the stream.
// Computed in double and rounded once: last-bit differences between maths libraries almost never survive.
inline float random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  constexpr double two_pi = 6.283185307179586476925;
  const double u = 1.0 - random_uniform(seed, stream, 2 * index);  // in (0, 1], so its logarithm is finite
  const double v = random_uniform(seed, stream, 2 * index + 1);
  return static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(two_pi * v));
}
