// One vector of float32, `Vec`, as wide as the instruction set compiled for allows: 16 lanes with AVX-512, else 8.
//
// Kernels are written once against it. Loads and stores convert from and to bf16 and fp16 (to nearest, ties to even).
// Reductions over lanes have a fixed order, which depends on nothing but the width.
#pragma once

#include <cmath>
#include <cstdint>

#include "native/dtype.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace moeserve {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define MOESERVE_AVX512

struct Vec {
  static constexpr int kWidth = 16;
  static constexpr const char* kIsa = "avx512";
  __m512 v;

  Vec() = default;
  Vec(__m512 value) : v(value) {}
  Vec(float value) : v(_mm512_set1_ps(value)) {}

  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec load(const BFloat16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  void store(BFloat16* p) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(v)); }
  void store(Half* p) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  friend Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.v, b.v); }
  friend Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.v, b.v); }
  friend Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.v, b.v); }
  friend Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.v, b.v); }
  // a * b + c, rounded once.
  friend Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.v, b.v, c.v); }
  // A NaN in `a` is lost, one in `b` stays.
  friend Vec max(Vec a, Vec b) { return _mm512_max_ps(a.v, b.v); }
  friend Vec min(Vec a, Vec b) { return _mm512_min_ps(a.v, b.v); }
  friend Vec round(Vec a) { return _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // a * 2^n for whole n, down to subnormals and up to infinity.
  friend Vec scale_by_power(Vec a, Vec n) { return _mm512_scalef_ps(a.v, n.v); }

 private:
  static __m512 widen(__m256i bits) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m256i narrow(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, is_nan, quiet), 16));
  }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Vec {
  static constexpr int kWidth = 8;
  static constexpr const char* kIsa = "avx2";
  __m256 v;

  Vec() = default;
  Vec(__m256 value) : v(value) {}
  Vec(float value) : v(_mm256_set1_ps(value)) {}

  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec load(const BFloat16* p) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Vec load(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static Vec load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  void store(BFloat16* p) const { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(v)); }
  void store(Half* p) const {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }

  friend Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.v, b.v); }
  friend Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.v, b.v); }
  friend Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.v, b.v); }
  friend Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.v, b.v); }
  friend Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.v, b.v, c.v); }
  friend Vec max(Vec a, Vec b) { return _mm256_max_ps(a.v, b.v); }
  friend Vec min(Vec a, Vec b) { return _mm256_min_ps(a.v, b.v); }
  friend Vec round(Vec a) { return _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  friend Vec scale_by_power(Vec a, Vec n) {
    // In two halves: 2^n itself need not be a normal float32 where a * 2^n is one.
    const __m256i whole = _mm256_cvtps_epi32(_mm256_max_ps(_mm256_min_ps(n.v, _mm256_set1_ps(252)), _mm256_set1_ps(-252)));
    const __m256i half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(a.v, power(half)), power(_mm256_sub_epi32(whole, half)));
  }

 private:
  static __m256 power(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static __m128i narrow(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
  }
};

#else

// Plain loops over eight lanes, which the compiler turns into whatever vectors the machine has.
struct Vec {
  static constexpr int kWidth = 8;
  static constexpr const char* kIsa = "generic";
  float v[kWidth];

  Vec() = default;
  Vec(float value) {
    for (float& lane : v) lane = value;
  }

  template <class T>
  static Vec load(const T* p) {
    return make([&](int i) { return to_float(p[i]); });
  }
  template <class T>
  void store(T* p) const {
    for (int i = 0; i < kWidth; ++i) p[i] = from_float<T>(v[i]);
  }

  friend Vec operator+(Vec a, Vec b) { return make([&](int i) { return a.v[i] + b.v[i]; }); }
  friend Vec operator-(Vec a, Vec b) { return make([&](int i) { return a.v[i] - b.v[i]; }); }
  friend Vec operator*(Vec a, Vec b) { return make([&](int i) { return a.v[i] * b.v[i]; }); }
  friend Vec operator/(Vec a, Vec b) { return make([&](int i) { return a.v[i] / b.v[i]; }); }
  // Rounded once or twice, as the machine can: std::fma in software would be a hundred times slower.
  friend Vec fma(Vec a, Vec b, Vec c) { return make([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
  friend Vec max(Vec a, Vec b) { return make([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  friend Vec min(Vec a, Vec b) { return make([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  friend Vec round(Vec a) { return make([&](int i) { return std::nearbyint(a.v[i]); }); }
  friend Vec scale_by_power(Vec a, Vec n) {
    return make([&](int i) {
      const int whole = static_cast<int>(n.v[i] > 252 ? 252 : n.v[i] > -252 ? n.v[i] : -252), half = whole >> 1;
      return a.v[i] * power(half) * power(whole - half);
    });
  }

 private:
  static float power(int n) { return float_of(static_cast<uint32_t>(n + 127) << 23); }
  template <class Lane>
  static Vec make(Lane lane) {
    Vec result;
    for (int i = 0; i < kWidth; ++i) result.v[i] = lane(i);
    return result;
  }
};

#endif

// The first `count` numbers, then `fill`; reads nothing behind them.
template <class T>
inline Vec load_part(const T* p, int count, float fill = 0.0f) {
  float lanes[Vec::kWidth];
  for (int i = 0; i < Vec::kWidth; ++i) lanes[i] = i < count ? to_float(p[i]) : fill;
  return Vec::load(lanes);
}

// The first `count` lanes; writes nothing behind them.
template <class T>
inline void store_part(Vec value, T* p, int count) {
  T lanes[Vec::kWidth];
  value.store(lanes);
  std::memcpy(p, lanes, static_cast<size_t>(count) * sizeof(T));
}

// Folded in halves: lane i takes lane i + width / 2, and so on down to one.
inline float reduce_add(Vec value) {
#ifdef MOESERVE_AVX512
  return _mm512_reduce_add_ps(value.v);  // the same order
#else
  float lanes[Vec::kWidth];
  value.store(lanes);
  for (int half = Vec::kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

inline float reduce_max(Vec value) {
#ifdef MOESERVE_AVX512
  return _mm512_reduce_max_ps(value.v);
#else
  float lanes[Vec::kWidth];
  value.store(lanes);
  for (int half = Vec::kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
#endif
}

// e^x within 2 units in the last place; 0 for -infinity, infinity above 88.73, NaN for NaN. Cody and Waite's reduction
// to |r| <= ln 2 / 2, then the Taylor polynomial of degree 7 (its remainder is below 2^-26 there).
inline Vec exp(Vec x) {
  x = min(Vec(130.0f), max(Vec(-130.0f), x));  // in this order of arguments a NaN stays
  const Vec n = round(x * Vec(1.44269504088896341f));
  Vec r = fma(n, Vec(-0.693359375f), x);
  r = fma(n, Vec(2.12194440e-4f), r);
  Vec sum = Vec(1.9841270e-4f);
  for (const float coefficient : {1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f}) {
    sum = fma(sum, r, Vec(coefficient));
  }
  return scale_by_power(sum, n);
}

inline Vec sigmoid(Vec x) { return Vec(1.0f) / (Vec(1.0f) + exp(Vec(0.0f) - x)); }

}  // namespace moeserve
