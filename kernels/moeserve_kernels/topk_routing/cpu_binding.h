#pragma once

#include "native/binding.h"
#include "topk_routing/cpu.h"

namespace moeserve {

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def(
      "topk_routing(Tensor logits_TE, int top_k, str scoring, bool renormalize, float scaling_factor, int num_groups, "
      "int num_selected_groups, str group_score, Tensor? correction_bias_E, Tensor(a!)? load_E, int num_counted_tokens) "
      "-> (Tensor, Tensor)",
      [](const at::Tensor& logits_TE, int64_t top_k, c10::string_view scoring, bool renormalize, double scaling_factor,
         int64_t num_groups, int64_t num_selected_groups, c10::string_view group_score,
         const std::optional<at::Tensor>& correction_bias_E, const std::optional<at::Tensor>& load_E,
         int64_t num_counted_tokens) {
        const at::Tensor logits = logits_TE.stride(1) == 1 ? logits_TE : logits_TE.contiguous();
        const int64_t num_tokens = logits.size(0), num_experts = logits.size(1);
        TORCH_CHECK(1 <= top_k && top_k <= num_experts, "top_k must be between 1 and ", num_experts, ", got ", top_k);
        TORCH_CHECK(0 <= num_counted_tokens && num_counted_tokens <= num_tokens, "num_real_tokens is out of range");
        at::Tensor weights = at::empty({num_tokens, top_k}, logits.options().dtype(at::kFloat));
        at::Tensor expert_ids = at::empty({num_tokens, top_k}, logits.options().dtype(at::kLong));
        topk_routing(TopkRouting{
            .dtype = dtype_of(logits),
            .logits = logits.const_data_ptr(),
            .num_tokens = num_tokens,
            .num_experts = num_experts,
            .row_stride = logits.stride(0),
            .top_k = top_k,
            .scoring = scoring == "softmax"   ? Scoring::kSoftmax
                       : scoring == "sigmoid" ? Scoring::kSigmoid
                                              : Scoring::kTopkSoftmax,
            .renormalize = renormalize,
            .scaling_factor = static_cast<float>(scaling_factor),
            .num_groups = num_groups,
            .num_selected_groups = num_selected_groups,
            .num_scores_of_group = group_score == "max" ? 1 : 2,
            .correction_bias = data_or_null<float>(correction_bias_E, "correction_bias"),
            .weights = weights.mutable_data_ptr<float>(),
            .expert_ids = expert_ids.mutable_data_ptr<int64_t>(),
            .load = const_cast<int64_t*>(data_or_null<int64_t>(load_E, "load")),
            .num_counted_tokens = num_counted_tokens,
        });
        return std::make_tuple(weights, expert_ids);
      });
}

}  // namespace moeserve
