// Every head by a matrix of its own, over weights packed in blocks (native/tile_product.h).
#pragma once

#include "native/tile_product.h"

namespace moeserve {

struct HeadLinear {
  Dtype dtype;  // of x, weights and out
  int64_t num_tokens, num_heads, width, num_outputs;
  const void* x;  // [num_tokens, num_heads, width]
  int64_t x_token_stride, x_head_stride;  // in elements; a head lies in one piece
  const void* blocks;                     // of head 0, then of head 1, ...
  void* out;                              // [num_tokens, num_heads, num_outputs]
  int64_t out_token_stride, out_head_stride;
};

void head_linear(const HeadLinear& p);

}  // namespace moeserve
