// Rows of the KV cache as attention multiplies them.
#pragma once

#include <cstdlib>
#include <memory>

#include "native/kv_cache.h"
#include "paged_attention/cpu_tiles.h"
#include "paged_attention/cpu_work.h"

namespace moeserve {

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <class T>
struct AlignedBuffer {
  explicit AlignedBuffer(int64_t size)
      : data(static_cast<T*>(std::aligned_alloc(64, round_up(size * sizeof(T) + 64, 64))), &std::free) {}
  std::unique_ptr<T[], decltype(&std::free)> data;
  T* get() const { return data.get(); }
};

// Rows of the cache as elements of units: in place where they are that already, else widened into a buffer.
template <class Unit>
class RowReader {
 public:
  using Element = typename Unit::Element;

  explicit RowReader(const CacheView& cache)
      : cache_(cache),
        width_(round_up(cache.width, Unit::kElements)),
        is_direct_(is_element(cache.dtype) && width_ == cache.width),
        buffer_(kTile * width_),
        zeros_(width_ + kLanes) {
    std::fill(buffer_.get(), buffer_.get() + kTile * width_, Element{});
    std::fill(zeros_.get(), zeros_.get() + width_ + kLanes, Element{});
  }

  const Element* zeros() const { return zeros_.get(); }

  const Element* read(const char* row, int64_t place) {
    if (is_direct_) return reinterpret_cast<const Element*>(row);
    Element* to = buffer_.get() + place * width_;
    switch (cache_.dtype) {
      case Dtype::kFloat32:
        convert(reinterpret_cast<const float*>(row), to);
        break;
      case Dtype::kBFloat16:
        convert(reinterpret_cast<const BFloat16*>(row), to);
        break;
      case Dtype::kFloat16:
        convert(reinterpret_cast<const Half*>(row), to);
        break;
      case Dtype::kInt8:
        convert(reinterpret_cast<const int8_t*>(row), to);
        break;
      case Dtype::kFloat8:
        convert(reinterpret_cast<const Float8*>(row), to);
        break;
    }
    return to;
  }

 private:
  static bool is_element(Dtype dtype) {
    return dtype == (Unit::kElements == 1 ? Dtype::kFloat32 : Dtype::kBFloat16);
  }
  template <class T>
  void convert(const T* from, Element* to) const {
    // To bfloat16 by its upper half: of the types that come here as pairs, every value is one exactly.
    for (int64_t i = 0; i < cache_.width; ++i) {
      if constexpr (Unit::kElements == 1) {
        to[i] = to_float(from[i]);
      } else {
        to[i] = static_cast<Element>(bits_of(to_float(from[i])) >> 16);
      }
    }
  }

  const CacheView& cache_;
  int64_t width_;
  bool is_direct_;
  AlignedBuffer<Element> buffer_, zeros_;
};

}  // namespace moeserve
