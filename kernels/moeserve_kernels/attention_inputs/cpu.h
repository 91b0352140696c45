// Queries and keys normalised and rotated, keys and values written to the KV cache, on CPUs.
#pragma once

#include <cstdint>

#include "native/dtype.h"
#include "native/kv_cache.h"

namespace moeserve {

struct Heads {
  const void* data;
  int64_t num_heads, token_stride, head_stride;  // strides in elements; a head lies in one piece
  const void* norm_weight;                       // [width], or null: not normalised
};

struct AttentionInputs {
  Dtype dtype;  // of heads, norm weights and out
  int64_t num_tokens, width;
  Heads queries, keys, values;
  float eps;
  const float* cos;  // [num_tokens, num_pairs], as sin
  const float* sin;
  int64_t num_pairs;
  bool interleaved;
  const int64_t* slots;  // [num_tokens]; negative: not written
  CacheView key_cache, value_cache;
  void* out;  // queries: [num_tokens, num_heads, width]
};

void attention_inputs(const AttentionInputs& p);

}  // namespace moeserve
