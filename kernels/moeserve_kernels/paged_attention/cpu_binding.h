#pragma once

#include "kv_cache_write/cpu_binding.h"
#include "native/binding.h"
#include "paged_attention/cpu.h"

namespace moeserve {

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def(
      "paged_attention(Tensor q_THD, Tensor key_cache_NSGD, Tensor value_cache_NSGV, Tensor query_start_loc, "
      "Tensor seq_lens_R, Tensor block_tables_RB, float softmax_scale, int? sliding_window, Tensor? sinks_H, "
      "Tensor? key_scale_NSG, Tensor? value_scale_NSG) -> Tensor",
      [](const at::Tensor& q_THD, const at::Tensor& key_cache, const at::Tensor& value_cache,
         const at::Tensor& query_start_loc, const at::Tensor& seq_lens, const at::Tensor& block_tables,
         double softmax_scale, std::optional<int64_t> sliding_window, const std::optional<at::Tensor>& sinks,
         const std::optional<at::Tensor>& key_scale, const std::optional<at::Tensor>& value_scale) {
        const at::Tensor q = q_THD.contiguous();
        check_dense(query_start_loc, "query_start_loc");
        check_dense(seq_lens, "seq_lens");
        TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, "caches are [N, S, G, D]");
        TORCH_CHECK(block_tables.stride(1) == 1 || block_tables.size(1) <= 1, "a block table must lie in one piece");
        const std::optional<at::Tensor> wide_sinks =
            sinks.has_value() ? std::optional<at::Tensor>(sinks->to(at::kFloat).contiguous()) : std::nullopt;
        at::Tensor out = at::empty({q.size(0), q.size(1), value_cache.size(3)}, q.options());
        paged_attention(PagedAttention{
            .dtype = dtype_of(q),
            .q = q.const_data_ptr(),
            .out = out.mutable_data_ptr(),
            .keys = view_of_cache(key_cache, key_scale),
            .values = view_of_cache(value_cache, value_scale),
            .num_requests = seq_lens.size(0),
            .num_heads = q.size(1),
            .query_start_loc = query_start_loc.const_data_ptr<int64_t>(),
            .seq_lens = seq_lens.const_data_ptr<int64_t>(),
            .block_tables = block_tables.const_data_ptr<int64_t>(),
            .block_table_stride = block_tables.stride(0),
            .softmax_scale = static_cast<float>(softmax_scale),
            .sliding_window = sliding_window.value_or(0),
            .sinks = data_or_null<float>(wide_sinks, "sinks"),
        });
        return out;
      });
}

}  // namespace moeserve
