// Rotary embedding of heads on CPUs.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace moeserve {

struct Rotary {
  Dtype dtype;
  int64_t num_tokens, num_heads, width;
  const void* x;
  int64_t token_stride, head_stride;  // of x, in elements
  const float* cos;                   // [num_tokens, num_pairs], as sin
  const float* sin;
  int64_t num_pairs;
  bool interleaved;
  void* out;  // [num_tokens, num_heads, width]
};

void rotary(const Rotary& p);

}  // namespace moeserve
