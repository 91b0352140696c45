// Sampling on CPUs: argmax of each row's filtered logits plus noise, and penalties on the logits.
#pragma once

#include <cstdint>

namespace moeserve {

// One value a row; the pointers have num_rows elements each.
struct SamplingSettings {
  const float* temperature;
  const int64_t* top_k;
  const float* top_p;
  const float* min_p;
  const int64_t* seed;
  const int64_t* position;
};

// logits: row r starts at logits + r * row_stride.
void sample(const float* logits, int64_t num_rows, int64_t vocab_size, int64_t row_stride,
            const SamplingSettings& settings, int64_t* token_ids);

// Penalties of num_penalised rows of the logits, in place. The tokens of the i-th of them are token_ids[start_loc[i]] to
// token_ids[start_loc[i + 1]], those of its prompt first. Ids outside the vocabulary are ignored.
struct Penalties {
  int64_t num_penalised;
  const int64_t* rows;
  const int64_t* token_ids;
  const int64_t* start_loc;
  const int64_t* num_prompt_tokens;
  const float* presence;
  const float* frequency;
  const float* repetition;
};
void apply_penalties(float* logits, int64_t vocab_size, int64_t row_stride, const Penalties& penalties);

}  // namespace moeserve
