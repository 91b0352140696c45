// Packed tiles and their products, for attention: 32-bit units of one float or of a pair of bfloat16, multiplied from a
// row of units (broadcast) and a panel of units (a vector at a time) into float32 accumulators.
//
// A panel is [columns / kLanes][units][kLanes]: for scores a column is a key and the units run over the head, for
// outputs a column is a value dimension and the units run over the keys.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "native/simd.h"

#if defined(MOESERVE_AVX512) && defined(__AVX512BF16__)
#define MOESERVE_BF16_UNITS
#endif

namespace moeserve {

constexpr int kLanes = Vec::kWidth;
constexpr int kMaxRows = 6;                        // rows of one product
constexpr int kMaxVectors = kLanes == 16 ? 4 : 2;  // vectors of columns of one product; accumulators fill the registers

struct FloatUnit {
  using Element = float;
  static constexpr int kElements = 1;

  static Vec multiply_add(Vec sum, const uint32_t* row_unit, const uint32_t* panel) {
    return fma(Vec(std::bit_cast<float>(*row_unit)), Vec::load(reinterpret_cast<const float*>(panel)), sum);
  }
};

#ifdef MOESERVE_BF16_UNITS
struct Bf16Unit {
  using Element = uint16_t;
  static constexpr int kElements = 2;

  static Vec multiply_add(Vec sum, const uint32_t* row_unit, const uint32_t* panel) {
    const __m512i row = _mm512_set1_epi32(static_cast<int>(*row_unit));
    return _mm512_dpbf16_ps(sum.v, (__m512bh)row, (__m512bh)_mm512_loadu_si512(panel));
  }
};
#endif

// c[r][:] = c[r][:] * scale[r] + rows[r] * panel, or without scales just the product.
template <class Unit, int kRows, int kVectors>
void multiply_tile(const uint32_t* rows, int64_t row_stride, const uint32_t* panel, int64_t panel_stride,
                   int64_t num_units, float* c, int64_t c_stride, const float* scale) {
  Vec sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = scale == nullptr ? Vec(0.0f) : Vec::load(c + r * c_stride + v * kLanes) * Vec(scale[r]);
    }
  }
  for (int64_t unit = 0; unit < num_units; ++unit) {
    for (int v = 0; v < kVectors; ++v) {
      const uint32_t* column = panel + v * panel_stride + unit * kLanes;
      for (int r = 0; r < kRows; ++r) {
        sums[r][v] = Unit::multiply_add(sums[r][v], rows + r * row_stride + unit, column);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v].store(c + r * c_stride + v * kLanes);
  }
}

template <class Unit, int kRows>
void multiply_rows(const uint32_t* rows, int64_t row_stride, const uint32_t* panel, int64_t panel_stride,
                   int64_t num_units, int num_vectors, float* c, int64_t c_stride, const float* scale) {
  for (; num_vectors >= kMaxVectors; num_vectors -= kMaxVectors) {
    multiply_tile<Unit, kRows, kMaxVectors>(rows, row_stride, panel, panel_stride, num_units, c, c_stride, scale);
    panel += kMaxVectors * panel_stride;
    c += kMaxVectors * kLanes;
  }
  for (; num_vectors >= 1; --num_vectors) {
    multiply_tile<Unit, kRows, 1>(rows, row_stride, panel, panel_stride, num_units, c, c_stride, scale);
    panel += panel_stride;
    c += kLanes;
  }
}

// As multiply_tile, for any 1 <= num_rows <= kMaxRows and any number of vectors.
template <class Unit>
void multiply(const uint32_t* rows, int64_t row_stride, int num_rows, const uint32_t* panel, int64_t panel_stride,
              int64_t num_units, int num_vectors, float* c, int64_t c_stride, const float* scale) {
  static_assert(kMaxRows == 6);
  constexpr decltype(&multiply_rows<Unit, 1>) kByRows[] = {multiply_rows<Unit, 1>, multiply_rows<Unit, 2>,
                                                           multiply_rows<Unit, 3>, multiply_rows<Unit, 4>,
                                                           multiply_rows<Unit, 5>, multiply_rows<Unit, 6>};
  kByRows[num_rows - 1](rows, row_stride, panel, panel_stride, num_units, num_vectors, c, c_stride, scale);
}

// ---- packing ----

#ifdef MOESERVE_AVX512
// The transpose of the 16 x 16 units at rows[0..15] + first, to out.
inline void transpose_16x16(const uint32_t* const* rows, int64_t first, uint32_t* out) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + first);
  for (int i = 0; i < 8; ++i) {
    b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {  // a[4 i + j]: column 4 lane + j of rows 4 i to 4 i + 3
    a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
    a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
    a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd_low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(out + 16 * j, _mm512_shuffle_i32x4(even_low, even_high, 0x88));
    _mm512_storeu_si512(out + 16 * (4 + j), _mm512_shuffle_i32x4(odd_low, odd_high, 0x88));
    _mm512_storeu_si512(out + 16 * (8 + j), _mm512_shuffle_i32x4(even_low, even_high, 0xdd));
    _mm512_storeu_si512(out + 16 * (12 + j), _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd));
  }
}
#endif

// kLanes keys to one column of a panel: out[unit][lane] = rows[lane][unit].
inline void pack_keys(const uint32_t* const* rows, int64_t num_units, uint32_t* out) {
  int64_t unit = 0;
#ifdef MOESERVE_AVX512
  for (; unit + 16 <= num_units; unit += 16) transpose_16x16(rows, unit, out + unit * 16);
#endif
  for (; unit < num_units; ++unit) {
    for (int lane = 0; lane < kLanes; ++lane) out[unit * kLanes + lane] = rows[lane][unit];
  }
}

// The values of one unit (one key, or two neighbours) to all columns of a panel; padding columns become zero.
inline void pack_values(FloatUnit, const float* const* rows, int64_t width, uint32_t* out, int64_t panel_stride) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes, out += panel_stride) {
    std::memcpy(out, rows[0] + column, kLanes * sizeof(float));
  }
  if (column == width) return;
  std::fill(out, out + kLanes, 0u);
  std::memcpy(out, rows[0] + column, (width - column) * sizeof(float));
}

#ifdef MOESERVE_BF16_UNITS
inline void pack_values(Bf16Unit, const uint16_t* const* rows, int64_t width, uint32_t* out, int64_t panel_stride) {
  const __m512i low = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                       _mm512_slli_epi32(_mm512_set_epi32(47, 46, 45, 44, 43, 42, 41, 40, 39, 38, 37,
                                                                          36, 35, 34, 33, 32), 16));
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16 | 16));
  int64_t column = 0;
  for (; column + 32 <= width; column += 32, out += 2 * panel_stride) {
    const __m512i even = _mm512_loadu_si512(rows[0] + column), odd = _mm512_loadu_si512(rows[1] + column);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(even, low, odd));
    _mm512_storeu_si512(out + panel_stride, _mm512_permutex2var_epi16(even, high, odd));
  }
  for (; column < width; column += 16, out += panel_stride) {
    for (int64_t i = 0; i < 16; ++i) {
      out[i] = column + i < width ? rows[0][column + i] | static_cast<uint32_t>(rows[1][column + i]) << 16 : 0u;
    }
  }
}
#endif

}  // namespace moeserve
