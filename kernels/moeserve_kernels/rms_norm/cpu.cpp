#include "rms_norm/cpu.h"

#include "native/parallel.h"
#include "native/rows.h"

namespace moeserve {
namespace {

template <class T>
void add_row(const T* a, const T* b, int64_t width, T* sum) {
  int64_t i = 0;
  for (; i + Vec::kWidth <= width; i += Vec::kWidth) (Vec::load(a + i) + Vec::load(b + i)).store(sum + i);
  for (; i < width; ++i) sum[i] = from_float<T>(to_float(a[i]) + to_float(b[i]));
}

template <class T>
void norm_rows(const RmsNorm& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.row_stride;
    if (p.residual != nullptr) {
      T* total = static_cast<T*>(p.total) + row * p.width;
      add_row(x, static_cast<const T*>(p.residual) + row * p.width, p.width, total);
      x = total;
    }
    const float scale = rms_scale(x, p.width, p.eps);
    scale_row(x, scale, static_cast<const T*>(p.weight), p.width, static_cast<T*>(p.out) + row * p.width);
  }
}

}  // namespace

void rms_norm(const RmsNorm& p) {
  const int64_t grain = 1 + 32768 / (p.width + 1);  // a thread is worth some ten microseconds of work
  parallel_for(0, p.num_rows, grain, [&](int64_t begin, int64_t end) {
    with_float_type(p.dtype, [&](auto type) { norm_rows<decltype(type)>(p, begin, end); });
  });
}

}  // namespace moeserve
