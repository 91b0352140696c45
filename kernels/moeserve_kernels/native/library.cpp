// The one translation unit that sees torch: its threads, and the bindings of every op.
//
// bindings.inc is written by the builder: it includes each op's cpu_binding.h.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "native/binding.h"
#include "native/parallel.h"
#include "native/simd.h"

namespace moeserve {

void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  at::parallel_for(begin, end, grain, body);
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("native_isa() -> str", []() { return std::string(Vec::kIsa); });
}

}  // namespace moeserve

#include "bindings.inc"
