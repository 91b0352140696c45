#include "rotary/cpu.h"

#include <vector>

#include "native/parallel.h"
#include "native/rows.h"

namespace moeserve {

void rotary(const Rotary& p) {
  const int64_t grain = 1 + 16384 / (p.num_heads * p.width + 1);
  parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(p.width);
    with_float_type(p.dtype, [&](auto type) {
      using T = decltype(type);
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t head = 0; head < p.num_heads; ++head) {
          const T* x = static_cast<const T*>(p.x) + token * p.token_stride + head * p.head_stride;
          widen_row(x, p.width, row.data());
          rotate_row(row.data(), p.cos + token * p.num_pairs, p.sin + token * p.num_pairs, p.num_pairs, p.interleaved);
          narrow_row(row.data(), p.width, static_cast<T*>(p.out) + (token * p.num_heads + head) * p.width);
        }
      }
    });
  });
}

}  // namespace moeserve
