// torch.ops.moeserve.fused_moe.
#pragma once

#include "fused_moe/cpu.h"
#include "moe_align/cpu_binding.h"
#include "native/binding.h"

namespace moeserve {

inline at::Tensor fused_moe_binding(const at::Tensor& hidden, const at::Tensor& weights, const at::Tensor& expert_ids,
                                    const at::Tensor& gate_up, const at::Tensor& down, int64_t width,
                                    const std::optional<at::Tensor>& gate_up_scale,
                                    const std::optional<at::Tensor>& down_scale,
                                    const std::optional<at::Tensor>& gate_up_bias,
                                    const std::optional<at::Tensor>& down_bias, bool clamped, double alpha,
                                    double limit) {
  const at::Tensor x = hidden.contiguous(), factors = weights.contiguous(), ids = expert_ids.contiguous();
  check_dense(x, "hidden");
  check_dense(factors, "weights");
  check_dense(gate_up, "gate_up");
  check_dense(down, "down");
  const int64_t num_tokens = x.size(0), hidden_size = x.size(1), num_experts = gate_up.size(0);
  check_expert_ids(ids, num_experts);
  const Dtype dtype = dtype_of(x), weight_dtype = dtype_of(gate_up);
  const TileFormat& format = tile_format(dtype, weight_dtype);
  TORCH_CHECK(weight_dtype == Dtype::kInt8 || weight_dtype == dtype, "hidden and weights must have one dtype");
  TORCH_CHECK(dtype_of(down) == weight_dtype && down.size(0) == num_experts, "gate_up and down must match");
  const int64_t inner = 2 * format.num_blocks(width), outer = format.num_blocks(hidden_size);
  TORCH_CHECK(static_cast<int64_t>(gate_up.nbytes()) == num_experts * inner * format.block_bytes(hidden_size) &&
                  static_cast<int64_t>(down.nbytes()) == num_experts * outer * format.block_bytes(width),
              "weights must be packed for ", hidden_size, " inputs and a width of ", width);
  for (const auto* values : {&gate_up_scale, &gate_up_bias}) {
    TORCH_CHECK(!*values || (*values)->numel() == num_experts * inner * format.columns, "gate_up: not whole blocks");
  }
  for (const auto* values : {&down_scale, &down_bias}) {
    TORCH_CHECK(!*values || (*values)->numel() == num_experts * outer * format.columns, "down: not whole blocks");
  }
  at::Tensor out = at::empty(x.sizes(), x.options());
  fused_moe({.hidden = x.const_data_ptr(),
             .dtype = dtype,
             .num_tokens = num_tokens,
             .hidden_size = hidden_size,
             .top_k = ids.size(1),
             .weights = factors.const_data_ptr<float>(),
             .expert_ids = ids.const_data_ptr<int64_t>(),
             .num_experts = num_experts,
             .width = width,
             .gate_up = gate_up.const_data_ptr(),
             .down = down.const_data_ptr(),
             .weight_dtype = weight_dtype,
             .gate_up_scale = data_or_null<float>(gate_up_scale, "gate_up_scale"),
             .down_scale = data_or_null<float>(down_scale, "down_scale"),
             .gate_up_bias = data_or_null<float>(gate_up_bias, "gate_up_bias"),
             .down_bias = data_or_null<float>(down_bias, "down_bias"),
             .activation = clamped ? Activation::kSwigluClamped : Activation::kSilu,
             .alpha = static_cast<float>(alpha),
             .limit = static_cast<float>(limit),
             .out = out.mutable_data_ptr()});
  return out;
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def(
      "fused_moe(Tensor hidden, Tensor weights, Tensor expert_ids, Tensor gate_up, Tensor down, int width, "
      "Tensor? gate_up_scale, Tensor? down_scale, Tensor? gate_up_bias, Tensor? down_bias, bool clamped, float alpha, "
      "float limit) -> Tensor",
      &fused_moe_binding);
}

}  // namespace moeserve
