// RMS norm of rows on CPUs, with or without adding a residual first.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace moeserve {

struct RmsNorm {
  Dtype dtype;  // of everything
  int64_t num_rows, width;
  const void* x;
  int64_t row_stride;  // of x in elements; all else is contiguous
  const void* residual;  // null: there is none, and no total
  const void* weight;
  float eps;
  void* total;  // x + residual, rounded to dtype before it is normalised
  void* out;
};

void rms_norm(const RmsNorm& p);

}  // namespace moeserve
