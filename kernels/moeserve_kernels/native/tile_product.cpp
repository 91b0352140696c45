// Tile products for each instruction set, written once against a `Format`: how a step of weights becomes vectors, and
// how a word of the panel multiplies them.
#include "native/tile_product.h"

#include <array>
#include <cstring>
#include <utility>

#include "native/simd.h"

namespace moeserve {
namespace {

constexpr int kVectors = 2;
constexpr int kColumns = kVectors * Vec::kWidth;
static_assert(kColumns <= kMaxColumns);
// Vector registers: kVectors sums a row, the weights of a step, and a few for widening them.
constexpr int kRows = Vec::kWidth == 16 ? 12 : 6;
// Ahead of the hardware's prefetcher, which stops at every page. Blocks lie one behind the other: it is never in vain.
constexpr int64_t kPrefetchBytes = 8192;

// Weights of any type, widened to float32.
template <class T>
struct Floats {
  using Weight = T;
  static constexpr int kGroup = 1;
  struct Loader {
    void load(const T* step, Vec (&weights)[kVectors]) const {
      for (int v = 0; v < kVectors; ++v) weights[v] = Vec::load(step + v * Vec::kWidth);
    }
  };
  using Weights = Vec[kVectors];
  static Vec multiply_add(Word word, Vec weights, Vec sum) { return fma(Vec(float_of(word)), weights, sum); }
};

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define MOESERVE_HAS_BF16_DOT 1

// Pairs of bf16: products and sum in float32, two inputs an instruction.
struct BFloat16Pairs {
  using Weight = BFloat16;
  static constexpr int kGroup = 2;
  using Weights = __m512i[kVectors];
  struct Loader {
    void load(const BFloat16* step, __m512i (&weights)[kVectors]) const {
      for (int v = 0; v < kVectors; ++v) weights[v] = _mm512_loadu_si512(step + v * 2 * Vec::kWidth);
    }
  };
  static Vec multiply_add(Word word, __m512i weights, Vec sum) {
    const __m512bh inputs = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(word)));
    return _mm512_dpbf16_ps(sum.v, inputs, reinterpret_cast<__m512bh>(weights));
  }
};

// Pairs of int8, made bf16 on the way: each byte of the result is looked up by the magnitude (the weights are kept as
// sign and magnitude), and interleaving the bytes within 128 bits gives the pairs of `kInt8Order`.
struct Int8Pairs : BFloat16Pairs {
  using Weight = int8_t;
  struct Loader {
    __m512i low[2], high[2];

    Loader() {
      alignas(64) uint8_t low_bytes[128], high_bytes[128];
      for (int magnitude = 0; magnitude < 128; ++magnitude) {
        const uint16_t bits = from_float<BFloat16>(static_cast<float>(magnitude)).bits;
        low_bytes[magnitude] = static_cast<uint8_t>(bits);
        high_bytes[magnitude] = static_cast<uint8_t>(bits >> 8);
      }
      for (int half = 0; half < 2; ++half) {
        low[half] = _mm512_load_si512(low_bytes + 64 * half);
        high[half] = _mm512_load_si512(high_bytes + 64 * half);
      }
    }

    void load(const int8_t* step, __m512i (&weights)[kVectors]) const {
      const __m512i packed = _mm512_loadu_si512(step);
      const __m512i low_bytes = _mm512_permutex2var_epi8(low[0], packed, low[1]);
      const __m512i magnitude = _mm512_permutex2var_epi8(high[0], packed, high[1]);
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
      const __m512i high_bytes = _mm512_ternarylogic_epi32(magnitude, packed, sign, 0xf8);  // a | (b & c)
      weights[0] = _mm512_unpacklo_epi8(low_bytes, high_bytes);
      weights[1] = _mm512_unpackhi_epi8(low_bytes, high_bytes);
    }
  };
};

constexpr std::array<int64_t, kColumns> int8_order() {
  std::array<int64_t, kColumns> order{};
  for (int lane = 0; lane < 4; ++lane) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) order[lane * 8 + half * 4 + i] = half * 16 + lane * 4 + i;
    }
  }
  return order;
}
constexpr std::array<int64_t, kColumns> kInt8Order = int8_order();
#endif

template <class Format, int kTileRows>
void multiply_rows(const void* block, const Word* panel, int64_t steps, float* sums) {
  const auto* weights = static_cast<const typename Format::Weight*>(block);
  const typename Format::Loader loader;
  Vec sum[kTileRows][kVectors];
  for (auto& row : sum) {
    for (Vec& vector : row) vector = Vec(0.0f);
  }
  constexpr int64_t kStep = kColumns * Format::kGroup;
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t line = 0; line < kStep * static_cast<int64_t>(sizeof *weights); line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes + line, 0, 2);
    }
    typename Format::Weights loaded;
    loader.load(weights, loaded);
    for (int row = 0; row < kTileRows; ++row) {
      for (int v = 0; v < kVectors; ++v) sum[row][v] = Format::multiply_add(panel[row], loaded[v], sum[row][v]);
    }
    weights += kStep;
    panel += kTileRows;
  }
  for (int row = 0; row < kTileRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sum[row][v].store(sums + row * kColumns + v * Vec::kWidth);
  }
}

template <class Format>
void multiply(const void* block, const Word* panel, int64_t steps, int rows, float* sums) {
  using Multiply = void (*)(const void*, const Word*, int64_t, float*);
  constexpr auto table = []<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    return std::array<Multiply, sizeof...(kIndex)>{multiply_rows<Format, kIndex + 1>...};
  }(std::make_integer_sequence<int, kRows>{});
  table[rows - 1](block, panel, steps, sums);
}

template <class Format>
constexpr TileFormat make_format(const int64_t* column_order = nullptr, bool sign_magnitude = false) {
  return {kColumns, Format::kGroup, sizeof(typename Format::Weight), column_order, sign_magnitude, multiply<Format>};
}

constexpr TileFormat kFloat32 = make_format<Floats<float>>(), kFloat16 = make_format<Floats<Half>>(),
                     kInt8 = make_format<Floats<int8_t>>();
#if defined(MOESERVE_HAS_BF16_DOT)
constexpr TileFormat kBFloat16 = make_format<BFloat16Pairs>(), kInt8BFloat16 = make_format<Int8Pairs>(kInt8Order.data(), true);
#else
constexpr TileFormat kBFloat16 = make_format<Floats<BFloat16>>(), kInt8BFloat16 = kInt8;
#endif

template <class T>
void pack_rows(const TileFormat& format, const void* const* inputs, int rows, int64_t width, Word* panel) {
  // A part of the inputs at a time, so that the lines of the panel that it touches stay in the cache.
  constexpr int64_t kPart = 32;
  for (int64_t first = 0; first < width; first += kPart) {
    const int64_t count = width - first < kPart ? width - first : kPart;
    for (int row = 0; row < rows; ++row) {
      const T* input = static_cast<const T*>(inputs[row]) + first;
      Word* words = panel + first / format.group * rows + row;
      if (format.group == 1) {
        for (int64_t i = 0; i < count; ++i) words[i * rows] = bits_of(to_float(input[i]));
      } else {
        for (int64_t i = 0; i < count / 2; ++i) std::memcpy(&words[i * rows], input + 2 * i, sizeof(Word));
        if (count % 2 == 1) words[count / 2 * rows] = from_float<BFloat16>(to_float(input[count - 1])).bits;
      }
    }
  }
}

template <class T>
void store_as(const float* values, int64_t count, T* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) Vec::load(values + i).store(out + i);
  if (i < count) store_part(load_part(values + i, static_cast<int>(count - i)), out + i, static_cast<int>(count - i));
}

}  // namespace

const int kMaxTileRows = kRows;

const TileFormat& tile_format(Dtype input, Dtype weight) {
  if (weight == Dtype::kInt8) return input == Dtype::kBFloat16 ? kInt8BFloat16 : kInt8;
  return weight == Dtype::kFloat32 ? kFloat32 : weight == Dtype::kBFloat16 ? kBFloat16 : kFloat16;
}

void pack_panel(const TileFormat& format, const void* const* inputs, Dtype dtype, int rows, int64_t width, Word* panel) {
  switch (dtype) {
    case Dtype::kFloat32:
      return pack_rows<float>(format, inputs, rows, width, panel);
    case Dtype::kBFloat16:
      return pack_rows<BFloat16>(format, inputs, rows, width, panel);
    default:
      return pack_rows<Half>(format, inputs, rows, width, panel);
  }
}

void pack_panel_part(const TileFormat& format, const float* values, int64_t stride, int rows, int64_t first,
                     int64_t count, Word* panel) {
  panel += first / format.group * rows;
  for (int row = 0; row < rows; ++row) {
    const float* input = values + row * stride;
    if (format.group == 1) {
      for (int64_t i = 0; i < count; ++i) panel[i * rows + row] = bits_of(input[i]);
      continue;
    }
    for (int64_t i = 0; i < count; i += 2) {
      const Word low = from_float<BFloat16>(input[i]).bits;
      const Word high = i + 1 < count ? from_float<BFloat16>(input[i + 1]).bits : 0;
      panel[i / 2 * rows + row] = low | (high << 16);
    }
  }
}

void store_row(const float* values, int64_t count, Dtype dtype, void* out) {
  switch (dtype) {
    case Dtype::kFloat32:
      return store_as(values, count, static_cast<float*>(out));
    case Dtype::kBFloat16:
      return store_as(values, count, static_cast<BFloat16*>(out));
    default:
      return store_as(values, count, static_cast<Half*>(out));
  }
}

}  // namespace moeserve
