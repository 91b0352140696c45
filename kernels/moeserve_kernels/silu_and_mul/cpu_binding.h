#pragma once

#include "native/binding.h"
#include "silu_and_mul/cpu.h"

namespace moeserve {

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("silu_and_mul(Tensor x_T2F) -> Tensor", [](const at::Tensor& x_T2F) {
    const at::Tensor x = x_T2F.contiguous();
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() /= 2;
    at::Tensor out = at::empty(shape, x.options());
    const int64_t width = shape.back();
    silu_and_mul(x.const_data_ptr(), dtype_of(x), width == 0 ? 0 : out.numel() / width, width, out.mutable_data_ptr());
    return out;
  });
}

}  // namespace moeserve
