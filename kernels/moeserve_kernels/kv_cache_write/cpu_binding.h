#pragma once

#include "kv_cache_write/cpu.h"
#include "native/binding.h"

namespace moeserve {

// cache: [N, S, G, D] or [N, S, D], D contiguous; scale: the same without D, contiguous, or nothing.
inline CacheView view_of_cache(const at::Tensor& cache, const std::optional<at::Tensor>& scale) {
  TORCH_CHECK(cache.device().is_cpu() && (cache.dim() == 3 || cache.dim() == 4) && cache.stride(-1) == 1,
              "a cache is [N, S, G, D] or [N, S, D] on the CPU, with neighbouring D");
  TORCH_CHECK(scale.has_value() == (cache.scalar_type() == at::kChar || cache.scalar_type() == at::kFloat8_e4m3fn),
              "narrow caches have scales, others have none");
  if (scale.has_value()) {
    check_dense(*scale, "scale");
    TORCH_CHECK(scale->sizes() == cache.sizes().slice(0, cache.dim() - 1), "scale does not fit the cache");
  }
  const bool has_heads = cache.dim() == 4;
  return CacheView{
      .data = const_cast<void*>(cache.const_data_ptr()),
      .dtype = dtype_of(cache),
      .block_size = cache.size(1),
      .width = cache.size(-1),
      .block_stride = cache.stride(0),
      .token_stride = cache.stride(1),
      .head_stride = has_heads ? cache.stride(2) : 0,
      .scales = scale.has_value() ? const_cast<float*>(scale->const_data_ptr<float>()) : nullptr,
      .num_heads = has_heads ? cache.size(2) : 1,
  };
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("kv_cache_write(Tensor x_T, Tensor(a!) cache_NS, Tensor slot_mapping_T, Tensor(b!)? scale_NS) -> ()",
        [](const at::Tensor& x_T, const at::Tensor& cache_NS, const at::Tensor& slot_mapping_T,
           const std::optional<at::Tensor>& scale_NS) {
          const at::Tensor x = x_T.stride(-1) == 1 ? x_T : x_T.contiguous();
          check_dense(slot_mapping_T, "slot_mapping");
          TORCH_CHECK(x.dim() + 1 == cache_NS.dim(), "rows do not fit the cache");
          kv_cache_write(KvCacheWrite{
              .dtype = dtype_of(x),
              .num_tokens = x.size(0),
              .x = x.const_data_ptr(),
              .token_stride = x.stride(0),
              .head_stride = x.dim() == 3 ? x.stride(1) : 0,
              .slots = slot_mapping_T.const_data_ptr<int64_t>(),
              .cache = view_of_cache(cache_NS, scale_NS),
          });
        });
}

}  // namespace moeserve
