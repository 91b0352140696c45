// Stable counting sort of routed rows by expert.
#pragma once

#include <cstdint>

namespace moeserve {

// order[num_rows]: the rows by expert, those of id -1 last; counts[num_experts]. Ids are below num_experts.
void moe_align(const int64_t* expert_ids, int64_t num_rows, int64_t num_experts, int64_t* order, int64_t* counts);

}  // namespace moeserve
