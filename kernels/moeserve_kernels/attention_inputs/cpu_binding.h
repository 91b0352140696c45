#pragma once

#include "attention_inputs/cpu.h"
#include "kv_cache_write/cpu_binding.h"
#include "native/binding.h"

namespace moeserve {

inline Heads heads_of(const at::Tensor& x, const std::optional<at::Tensor>& norm_weight, const at::Tensor& like) {
  TORCH_CHECK(x.dim() == 3 && x.size(0) == like.size(0) && x.size(2) == like.size(2), "heads are [T, H, D]");
  TORCH_CHECK(x.stride(2) == 1 && x.scalar_type() == like.scalar_type(), "heads lie in one piece and have one dtype");
  if (norm_weight.has_value()) {
    check_dense(*norm_weight, "norm weight");
    TORCH_CHECK(norm_weight->numel() == x.size(2) && norm_weight->scalar_type() == x.scalar_type(),
                "a norm weight is [D] and has the dtype of the heads");
  }
  return Heads{
      .data = x.const_data_ptr(),
      .num_heads = x.size(1),
      .token_stride = x.stride(0),
      .head_stride = x.stride(1),
      .norm_weight = norm_weight.has_value() ? norm_weight->const_data_ptr() : nullptr,
  };
}

inline at::Tensor attention_inputs_binding(
    const at::Tensor& q_THD, const at::Tensor& k_TGD, const at::Tensor& v_TGD, const at::Tensor& cos_TR,
    const at::Tensor& sin_TR, bool interleaved, const at::Tensor& slot_mapping_T, const at::Tensor& key_cache,
    const at::Tensor& value_cache, const std::optional<at::Tensor>& key_scale,
    const std::optional<at::Tensor>& value_scale, const std::optional<at::Tensor>& q_norm_weight_D,
    const std::optional<at::Tensor>& k_norm_weight_D, double eps) {
  check_dense(cos_TR, "cos");
  check_dense(sin_TR, "sin");
  check_dense(slot_mapping_T, "slot_mapping");
  for (const at::Tensor& cache : {key_cache, value_cache}) {
    TORCH_CHECK(cache.dim() == 4 && cache.size(2) == k_TGD.size(1) && cache.size(3) == k_TGD.size(2),
                "heads do not fit the cache");
  }
  at::Tensor out = at::empty(q_THD.sizes(), q_THD.options());
  attention_inputs(AttentionInputs{
      .dtype = dtype_of(q_THD),
      .num_tokens = q_THD.size(0),
      .width = q_THD.size(2),
      .queries = heads_of(q_THD, q_norm_weight_D, q_THD),
      .keys = heads_of(k_TGD, k_norm_weight_D, q_THD),
      .values = heads_of(v_TGD, std::nullopt, q_THD),
      .eps = static_cast<float>(eps),
      .cos = cos_TR.const_data_ptr<float>(),
      .sin = sin_TR.const_data_ptr<float>(),
      .num_pairs = cos_TR.size(1),
      .interleaved = interleaved,
      .slots = slot_mapping_T.const_data_ptr<int64_t>(),
      .key_cache = view_of_cache(key_cache, key_scale),
      .value_cache = view_of_cache(value_cache, value_scale),
      .out = out.mutable_data_ptr(),
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def(
      "attention_inputs(Tensor q_THD, Tensor k_TGD, Tensor v_TGD, Tensor cos_TR, Tensor sin_TR, bool interleaved, "
      "Tensor slot_mapping_T, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!)? key_scale, "
      "Tensor(d!)? value_scale, Tensor? q_norm_weight_D, Tensor? k_norm_weight_D, float eps) -> Tensor",
      &attention_inputs_binding);
}

}  // namespace moeserve
