// One row of numbers: widened to float32, normalised, rotated, narrowed. Shared by the ops around attention.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "native/dtype.h"
#include "native/simd.h"

namespace moeserve {

// Calls body with a value of the type behind a floating dtype.
template <class Body>
void with_float_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::kFloat32:
      return body(float{});
    case Dtype::kBFloat16:
      return body(BFloat16{});
    case Dtype::kFloat16:
      return body(Half{});
    default:
      return;
  }
}

template <class T>
void widen_row(const T* from, int64_t width, float* to) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) Vec::load(from + i).store(to + i);
  for (; i < width; ++i) to[i] = to_float(from[i]);
}

template <class T>
void narrow_row(const float* from, int64_t width, T* to) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) Vec::load(from + i).store(to + i);
  for (; i < width; ++i) to[i] = from_float<T>(from[i]);
}

// 1 / sqrt(mean(x^2) + eps); four sums, so that the additions do not wait for each other.
template <class T>
float rms_scale(const T* x, int64_t width, float eps) {
  Vec sums[4] = {Vec(0.0f), Vec(0.0f), Vec(0.0f), Vec(0.0f)};
  int64_t i = 0;
  for (; i + 4 * Vec::kWidth <= width; i += 4 * Vec::kWidth) {
    for (int j = 0; j < 4; ++j) {
      const Vec part = Vec::load(x + i + j * Vec::kWidth);
      sums[j] = fma(part, part, sums[j]);
    }
  }
  for (; i < width; i += Vec::kWidth) {
    const Vec part = i + Vec::kWidth <= width ? Vec::load(x + i) : load_part(x + i, static_cast<int>(width - i));
    sums[0] = fma(part, part, sums[0]);
  }
  const float sum = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
  return 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
}

// to = x * scale * weight.
template <class T, class To>
void scale_row(const T* x, float scale, const T* weight, int64_t width, To* to) {
  const Vec factor(scale);
  int64_t i = 0;
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
    (Vec::load(x + i) * factor * Vec::load(weight + i)).store(to + i);
  }
  if (i == width) return;
  const int count = static_cast<int>(width - i);
  store_part(load_part(x + i, count) * factor * load_part(weight + i, count), to + i, count);
}

// Rotates num_pairs pairs in place: (2 i, 2 i + 1) if interleaved, else (i, i + num_pairs).
inline void rotate_row(float* x, const float* cos, const float* sin, int64_t num_pairs, bool interleaved) {
  const int64_t step = interleaved ? 2 : 1, distance = interleaved ? 1 : num_pairs;
  float* __restrict first = x;
  float* __restrict second = x + distance;
  if (step == 1) {
    for (int64_t i = 0; i < num_pairs; ++i) {
      const float a = first[i], b = second[i];
      first[i] = a * cos[i] - b * sin[i];
      second[i] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < num_pairs; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * cos[i] - b * sin[i];
    x[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

inline float largest_magnitude(const float* x, int64_t width) {
  Vec largest(0.0f);
  int64_t i = 0;
  for (; i < width; i += Vec::kWidth) {
    const Vec part = i + Vec::kWidth <= width ? Vec::load(x + i) : load_part(x + i, static_cast<int>(width - i));
    largest = max(largest, max(part, Vec(0.0f) - part));
  }
  return reduce_max(largest);
}

// A row of a narrow cache: to = x / scale, so that the largest value becomes the largest of the dtype. Returns scale.
inline float quantize_row(const float* x, int64_t width, int8_t* to) {
  const float largest = largest_magnitude(x, width);
  const float scale = largest > 0.0f ? largest / 127.0f : 1.0f;
  for (int64_t i = 0; i < width; ++i) {
    to[i] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, std::nearbyint(x[i] / scale))));
  }
  return scale;
}
inline float quantize_row(const float* x, int64_t width, Float8* to) {
  const float largest = largest_magnitude(x, width);
  const float scale = largest > 0.0f ? largest / 448.0f : 1.0f;
  for (int64_t i = 0; i < width; ++i) to[i] = from_float<Float8>(std::min(448.0f, std::max(-448.0f, x[i] / scale)));
  return scale;
}

}  // namespace moeserve
