// Attention over block tables on CPUs.
#pragma once

#include <cstdint>

#include "native/dtype.h"
#include "native/kv_cache.h"

namespace moeserve {

struct PagedAttention {
  Dtype dtype;    // of q and out
  const void* q;  // [T, H, D], contiguous
  void* out;      // [T, H, V], contiguous
  CacheView keys, values;
  int64_t num_requests, num_heads;
  const int64_t* query_start_loc;  // [R + 1]
  const int64_t* seq_lens;         // [R]
  const int64_t* block_tables;     // of request r: at block_tables + r * block_table_stride
  int64_t block_table_stride;
  float softmax_scale;
  int64_t sliding_window;  // tokens that a query sees, itself included; 0: all
  const float* sinks;      // [H] or null
};

void paged_attention(const PagedAttention& p);

}  // namespace moeserve
