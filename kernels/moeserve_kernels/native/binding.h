// What bindings share: torch's dtypes as the kernels', and the checks of tensors. Included by library.cpp alone.
#pragma once

#include <ATen/core/Tensor.h>

#include "native/dtype.h"

namespace moeserve {

inline Dtype dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    case at::kChar:
      return Dtype::kInt8;
    case at::kFloat8_e4m3fn:
      return Dtype::kFloat8;
    default:
      TORCH_CHECK(false, "no native kernel for ", type);
  }
}

inline Dtype dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }

inline void check_dense(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu() && tensor.is_contiguous(), name, " must be a contiguous CPU tensor");
}

// The data of an optional contiguous tensor of T, or null.
template <class T>
inline const T* data_or_null(const std::optional<at::Tensor>& tensor, const char* name) {
  if (!tensor.has_value()) return nullptr;
  check_dense(*tensor, name);
  return tensor->const_data_ptr<T>();
}

}  // namespace moeserve
