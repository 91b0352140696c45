// silu(gate) * up on CPUs.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace moeserve {

// x: [num_rows, 2 * width], out: [num_rows, width], both contiguous and of one dtype.
void silu_and_mul(const void* x, Dtype dtype, int64_t num_rows, int64_t width, void* out);

}  // namespace moeserve
