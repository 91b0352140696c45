#pragma once

#include "native/binding.h"
#include "sampling/cpu.h"

namespace moeserve {

inline void check_logits(const at::Tensor& logits) {
  TORCH_CHECK(logits.device().is_cpu() && logits.dim() == 2 && logits.scalar_type() == at::kFloat, "logits: [R, V] float32");
  TORCH_CHECK(logits.stride(1) == 1 || logits.size(1) <= 1, "the logits of a row must be neighbours");
}

template <class T>
const T* row_settings(const at::Tensor& tensor, int64_t num_rows, const char* name) {
  check_dense(tensor, name);
  TORCH_CHECK(tensor.numel() == num_rows, name, " must have one value a row");
  return tensor.const_data_ptr<T>();
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def(
      "sample(Tensor logits_RV, Tensor temperature_R, Tensor top_k_R, Tensor top_p_R, Tensor min_p_R, Tensor seed_R, "
      "Tensor position_R) -> Tensor",
      [](const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k, const at::Tensor& top_p,
         const at::Tensor& min_p, const at::Tensor& seed, const at::Tensor& position) {
        check_logits(logits);
        const int64_t num_rows = logits.size(0);
        at::Tensor token_ids = at::empty({num_rows}, seed.options());
        const SamplingSettings settings{
            .temperature = row_settings<float>(temperature, num_rows, "temperature"),
            .top_k = row_settings<int64_t>(top_k, num_rows, "top_k"),
            .top_p = row_settings<float>(top_p, num_rows, "top_p"),
            .min_p = row_settings<float>(min_p, num_rows, "min_p"),
            .seed = row_settings<int64_t>(seed, num_rows, "seed"),
            .position = row_settings<int64_t>(position, num_rows, "position"),
        };
        sample(logits.const_data_ptr<float>(), num_rows, logits.size(1), logits.stride(0), settings,
               token_ids.mutable_data_ptr<int64_t>());
        return token_ids;
      });
  m.def(
      "apply_penalties(Tensor(a!) logits_RV, Tensor rows_r, Tensor token_ids_N, Tensor start_loc, "
      "Tensor num_prompt_tokens_r, Tensor presence_r, Tensor frequency_r, Tensor repetition_r) -> ()",
      [](const at::Tensor& logits, const at::Tensor& rows, const at::Tensor& token_ids, const at::Tensor& start_loc,
         const at::Tensor& num_prompt_tokens, const at::Tensor& presence, const at::Tensor& frequency,
         const at::Tensor& repetition) {
        check_logits(logits);
        const int64_t num_penalised = rows.numel();
        check_dense(token_ids, "token_ids");
        const Penalties penalties{
            .num_penalised = num_penalised,
            .rows = row_settings<int64_t>(rows, num_penalised, "rows"),
            .token_ids = token_ids.const_data_ptr<int64_t>(),
            .start_loc = row_settings<int64_t>(start_loc, num_penalised + 1, "start_loc"),
            .num_prompt_tokens = row_settings<int64_t>(num_prompt_tokens, num_penalised, "num_prompt_tokens"),
            .presence = row_settings<float>(presence, num_penalised, "presence"),
            .frequency = row_settings<float>(frequency, num_penalised, "frequency"),
            .repetition = row_settings<float>(repetition, num_penalised, "repetition"),
        };
        apply_penalties(const_cast<float*>(logits.const_data_ptr<float>()), logits.size(1), logits.stride(0), penalties);
      });
}

}  // namespace moeserve
