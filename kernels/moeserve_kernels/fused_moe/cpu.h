// The experts of one rank, over weights packed in blocks (native/tile_product.h).
#pragma once

#include "native/tile_product.h"

namespace moeserve {

enum class Activation : int32_t { kSilu, kSwigluClamped };

struct FusedMoeArguments {
  const void* hidden;  // [num_tokens, hidden_size], dense
  Dtype dtype;         // of hidden and out
  int64_t num_tokens, hidden_size, top_k;
  const float* weights;       // [num_tokens, top_k]
  const int64_t* expert_ids;  // [num_tokens, top_k]; -1 adds nothing
  int64_t num_experts, width;
  // Of each expert: block j of the gate, block j of up, for every j; then scales and biases (or null) in that order.
  const void* gate_up;
  const void* down;
  Dtype weight_dtype;
  const float *gate_up_scale, *down_scale, *gate_up_bias, *down_bias;
  Activation activation;
  float alpha, limit;
  void* out;  // [num_tokens, hidden_size]
};

void fused_moe(const FusedMoeArguments& arguments);

}  // namespace moeserve
