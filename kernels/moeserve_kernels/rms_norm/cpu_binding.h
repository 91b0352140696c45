#pragma once

#include "native/binding.h"
#include "rms_norm/cpu.h"

namespace moeserve {

inline RmsNorm rms_norm_arguments(const at::Tensor& x, const at::Tensor& weight, double eps, at::Tensor& out) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1), "weight does not fit x");
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "weight must have the dtype of x");
  check_dense(weight, "weight");
  const int64_t width = x.size(-1);
  return RmsNorm{
      .dtype = dtype_of(x),
      .num_rows = width == 0 ? 0 : x.numel() / width,
      .width = width,
      .x = x.const_data_ptr(),
      .row_stride = x.is_contiguous() ? width : x.stride(0),
      .residual = nullptr,
      .weight = weight.const_data_ptr(),
      .eps = static_cast<float>(eps),
      .total = nullptr,
      .out = out.mutable_data_ptr(),
  };
}

// Rows at any distance are read where they lie; other layouts are copied.
inline at::Tensor with_row_stride(const at::Tensor& x) {
  return x.dim() == 2 && x.stride(1) == 1 ? x : x.contiguous();
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
        [](const at::Tensor& x, const at::Tensor& weight, double eps) {
          const at::Tensor rows = with_row_stride(x);
          at::Tensor out = at::empty(x.sizes(), x.options());
          rms_norm(rms_norm_arguments(rows, weight, eps, out));
          return out;
        });
  m.def("add_rms_norm(Tensor x, Tensor weight, float eps, Tensor residual) -> (Tensor, Tensor)",
        [](const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& residual) {
          TORCH_CHECK(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type(),
                      "residual must be like x");
          const at::Tensor rows = with_row_stride(x), other = residual.contiguous();
          at::Tensor out = at::empty(x.sizes(), x.options()), total = at::empty(x.sizes(), x.options());
          RmsNorm arguments = rms_norm_arguments(rows, weight, eps, out);
          arguments.residual = other.const_data_ptr();
          arguments.total = total.mutable_data_ptr();
          rms_norm(arguments);
          return std::make_tuple(out, total);
        });
}

}  // namespace moeserve
