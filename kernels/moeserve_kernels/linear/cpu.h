// x W^T + b over weights packed in blocks (native/tile_product.h).
#pragma once

#include "native/tile_product.h"

namespace moeserve {

struct LinearArguments {
  const void* x;  // [num_rows, width], dense
  Dtype dtype;    // of x and out
  int64_t num_rows, width, num_outputs;
  const void* blocks;
  Dtype weight_dtype;
  const float* scale;  // of each output, padded to whole blocks; null without quantization
  const float* bias;   // likewise; null without one
  void* out;           // [num_rows, num_outputs]
};

void linear(const LinearArguments& arguments);

// sums[rows][columns] * scale + bias, in place; both begin at the block's first output, or are null.
void finish_sums(const TileFormat& format, const float* scale, const float* bias, int rows, float* sums);

}  // namespace moeserve
