// torch.ops.moeserve.moe_align.
#pragma once

#include "moe_align/cpu.h"
#include "native/binding.h"

namespace moeserve {

// An id that is no expert's would be an index into memory of somebody else.
inline void check_expert_ids(const at::Tensor& expert_ids, int64_t num_experts) {
  check_dense(expert_ids, "expert_ids");
  const int64_t* ids = expert_ids.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < expert_ids.numel(); ++i) {
    TORCH_CHECK(ids[i] >= -1 && ids[i] < num_experts, "expert ids must be between -1 and ", num_experts - 1, ", got ",
                ids[i]);
  }
}

inline std::tuple<at::Tensor, at::Tensor> moe_align_binding(const at::Tensor& expert_ids, int64_t num_experts) {
  const at::Tensor ids = expert_ids.contiguous();
  check_expert_ids(ids, num_experts);
  at::Tensor order = at::empty(ids.sizes(), ids.options()), counts = at::empty({num_experts}, ids.options());
  moe_align(ids.const_data_ptr<int64_t>(), ids.numel(), num_experts, order.mutable_data_ptr<int64_t>(),
            counts.mutable_data_ptr<int64_t>());
  return {order, counts};
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("moe_align(Tensor expert_ids, int num_experts) -> (Tensor, Tensor)", &moe_align_binding);
}

}  // namespace moeserve
