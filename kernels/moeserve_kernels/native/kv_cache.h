// Where the kernels find a token's key or value in the paged cache.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/dtype.h"
#include "native/rows.h"

namespace moeserve {

// [N, S, G, D] with any strides but that of D, which is 1; a cache without heads has one. Strides are in elements.
struct CacheView {
  void* data;
  Dtype dtype;
  int64_t block_size, width;
  int64_t block_stride, token_stride, head_stride;
  float* scales;  // [N, S, G], contiguous; null unless the dtype is narrow
  int64_t num_heads;

  int64_t element_bytes() const {
    return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kBFloat16 || dtype == Dtype::kFloat16 ? 2 : 1;
  }
  char* row(int64_t slot, int64_t head) const {
    const int64_t element =
        slot / block_size * block_stride + slot % block_size * token_stride + head * head_stride;
    return static_cast<char*>(data) + element * element_bytes();
  }
  float* scale(int64_t slot, int64_t head) const { return scales + slot * num_heads + head; }
};

// Narrows a row of float32 into the cache.
inline void store_cache_row(const float* x, const CacheView& cache, int64_t slot, int64_t head) {
  char* to = cache.row(slot, head);
  switch (cache.dtype) {
    case Dtype::kInt8:
      *cache.scale(slot, head) = quantize_row(x, cache.width, reinterpret_cast<int8_t*>(to));
      return;
    case Dtype::kFloat8:
      *cache.scale(slot, head) = quantize_row(x, cache.width, reinterpret_cast<Float8*>(to));
      return;
    default:
      with_float_type(cache.dtype, [&](auto type) { narrow_row(x, cache.width, reinterpret_cast<decltype(type)*>(to)); });
  }
}

}  // namespace moeserve
