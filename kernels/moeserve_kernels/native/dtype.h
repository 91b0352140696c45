// The number types that kernels read and write, and how each becomes a float32.
#pragma once

#include <cstdint>
#include <cstring>

namespace moeserve {

enum class Dtype : int32_t { kFloat32, kBFloat16, kFloat16, kInt8, kFloat8 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct Float8 {  // e4m3fn: no infinities, largest 448
  uint8_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }
inline float to_float(int8_t value) { return static_cast<float>(value); }
inline float to_float(BFloat16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
inline float to_float(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1fu, mantissa = value.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in float32
    return float_of(bits_of(static_cast<float>(mantissa) * 5.9604644775390625e-8f) | sign);
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
  return float_of(sign | (wide << 23) | (mantissa << 13));
}

inline float to_float(Float8 value) {  // the bits as those of a float32, whose exponent has another bias; never of a NaN
  return float_of((value.bits & 0x80u) << 24 | (value.bits & 0x7fu) << 20) * 0x1p120f;
}

// Rounds to nearest, ties to even; a NaN stays one.
template <class T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bits_of(value);
  if (value != value) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
inline Half from_float<Half>(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    return {static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24 in the mantissa, rounded
    return {static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

template <>
inline Float8 from_float<Float8>(float value) {  // of a magnitude up to 464, which rounds to 448
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  // Below 2^-6 the steps are 2^-9: adding 2^14 leaves multiples of 2^-9 in the mantissa, rounded.
  const uint32_t small = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  return {static_cast<uint8_t>((bits >> 24 & 0x80u) | (magnitude < 0x3c800000u ? small : normal))};
}

}  // namespace moeserve
