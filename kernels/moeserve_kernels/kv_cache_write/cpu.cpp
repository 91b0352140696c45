#include "kv_cache_write/cpu.h"

#include <cstring>
#include <vector>

#include "native/parallel.h"

namespace moeserve {

void kv_cache_write(const KvCacheWrite& p) {
  const CacheView& cache = p.cache;
  const int64_t grain = 1 + 32768 / (cache.num_heads * cache.width + 1);
  parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> wide(cache.width);
    with_float_type(p.dtype, [&](auto type) {
      using T = decltype(type);
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = p.slots[token];
        if (slot < 0) continue;
        for (int64_t head = 0; head < cache.num_heads; ++head) {
          const T* x = static_cast<const T*>(p.x) + token * p.token_stride + head * p.head_stride;
          if (cache.dtype == p.dtype) {
            std::memcpy(cache.row(slot, head), x, cache.width * sizeof(T));
          } else {
            widen_row(x, cache.width, wide.data());
            store_cache_row(wide.data(), cache, slot, head);
          }
        }
      }
    });
  });
}

}  // namespace moeserve
