#include "silu_and_mul/cpu.h"

#include "native/parallel.h"
#include "native/rows.h"

namespace moeserve {
namespace {

template <class T>
void activate_row(const T* gate, const T* up, int64_t width, T* out) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) {
    const Vec x = Vec::load(gate + i);
    (x * sigmoid(x) * Vec::load(up + i)).store(out + i);
  }
  if (i == width) return;
  const int count = static_cast<int>(width - i);
  const Vec x = load_part(gate + i, count);
  store_part(x * sigmoid(x) * load_part(up + i, count), out + i, count);
}

}  // namespace

void silu_and_mul(const void* x, Dtype dtype, int64_t num_rows, int64_t width, void* out) {
  const int64_t grain = 1 + 16384 / (width + 1);
  parallel_for(0, num_rows, grain, [&](int64_t begin, int64_t end) {
    with_float_type(dtype, [&](auto type) {
      using T = decltype(type);
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(x) + row * 2 * width;
        activate_row(gate, gate + width, width, static_cast<T*>(out) + row * width);
      }
    });
  });
}

}  // namespace moeserve
