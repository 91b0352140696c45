// Top-k choice of experts on CPUs.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace moeserve {

enum class Scoring { kSoftmax, kSigmoid, kTopkSoftmax };

struct TopkRouting {
  Dtype dtype;  // of the logits
  const void* logits;
  int64_t num_tokens, num_experts, row_stride;
  int64_t top_k;
  Scoring scoring;
  bool renormalize;
  float scaling_factor;
  int64_t num_groups, num_selected_groups;
  int64_t num_scores_of_group;    // a group's score is the sum of so many of its best experts' (1 or 2)
  const float* correction_bias;   // [num_experts] or null
  float* weights;                 // [num_tokens, top_k]
  int64_t* expert_ids;            // [num_tokens, top_k]
  int64_t* load;                  // [num_experts] or null: adds the choices of the first num_counted_tokens tokens
  int64_t num_counted_tokens;
};

void topk_routing(const TopkRouting& p);

}  // namespace moeserve
