#pragma once

#include "native/binding.h"
#include "rotary/cpu.h"

namespace moeserve {

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("rotary(Tensor x_THD, Tensor cos_TR, Tensor sin_TR, bool interleaved) -> Tensor",
        [](const at::Tensor& x_THD, const at::Tensor& cos_TR, const at::Tensor& sin_TR, bool interleaved) {
          const at::Tensor x = x_THD.stride(2) == 1 ? x_THD : x_THD.contiguous();
          check_dense(cos_TR, "cos");
          check_dense(sin_TR, "sin");
          TORCH_CHECK(x.dim() == 3 && cos_TR.size(0) == x.size(0) && 2 * cos_TR.size(1) <= x.size(2),
                      "angles do not fit heads");
          at::Tensor out = at::empty(x.sizes(), x.options());
          rotary(Rotary{
              .dtype = dtype_of(x),
              .num_tokens = x.size(0),
              .num_heads = x.size(1),
              .width = x.size(2),
              .x = x.const_data_ptr(),
              .token_stride = x.stride(0),
              .head_stride = x.stride(1),
              .cos = cos_TR.const_data_ptr<float>(),
              .sin = sin_TR.const_data_ptr<float>(),
              .num_pairs = cos_TR.size(1),
              .interleaved = interleaved,
              .out = out.mutable_data_ptr(),
          });
          return out;
        });
}

}  // namespace moeserve
