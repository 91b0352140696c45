#include "attention_inputs/cpu.h"

#include <vector>

#include "native/parallel.h"
#include "native/rows.h"

namespace moeserve {
namespace {

template <class T>
void widen_head(const AttentionInputs& p, const Heads& heads, int64_t token, int64_t head, float* to) {
  const T* x = static_cast<const T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  if (heads.norm_weight == nullptr) {
    widen_row(x, p.width, to);
  } else {
    scale_row(x, rms_scale(x, p.width, p.eps), static_cast<const T*>(heads.norm_weight), p.width, to);
  }
}

template <class T>
void prepare_token(const AttentionInputs& p, int64_t token, float* wide) {
  const float *cos = p.cos + token * p.num_pairs, *sin = p.sin + token * p.num_pairs;
  for (int64_t head = 0; head < p.queries.num_heads; ++head) {
    widen_head<T>(p, p.queries, token, head, wide);
    rotate_row(wide, cos, sin, p.num_pairs, p.interleaved);
    narrow_row(wide, p.width, static_cast<T*>(p.out) + (token * p.queries.num_heads + head) * p.width);
  }
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  for (int64_t head = 0; head < p.keys.num_heads; ++head) {
    widen_head<T>(p, p.keys, token, head, wide);
    rotate_row(wide, cos, sin, p.num_pairs, p.interleaved);
    store_cache_row(wide, p.key_cache, slot, head);
    widen_head<T>(p, p.values, token, head, wide);
    store_cache_row(wide, p.value_cache, slot, head);
  }
}

}  // namespace

void attention_inputs(const AttentionInputs& p) {
  const int64_t grain = 1 + 16384 / ((p.queries.num_heads + 2 * p.keys.num_heads) * p.width + 1);
  parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> wide(p.width);
    with_float_type(p.dtype, [&](auto type) {
      for (int64_t token = begin; token < end; ++token) prepare_token<decltype(type)>(p, token, wide.data());
    });
  });
}

}  // namespace moeserve
