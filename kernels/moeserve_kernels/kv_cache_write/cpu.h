// Writing rows into the paged KV cache on CPUs.
#pragma once

#include <cstdint>

#include "native/dtype.h"
#include "native/kv_cache.h"

namespace moeserve {

struct KvCacheWrite {
  Dtype dtype;  // of x
  int64_t num_tokens;
  const void* x;
  int64_t token_stride, head_stride;  // of x, in elements
  const int64_t* slots;               // [num_tokens]; negative: not written
  CacheView cache;
};

void kv_cache_write(const KvCacheWrite& p);

}  // namespace moeserve
