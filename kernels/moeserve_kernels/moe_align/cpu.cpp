// Two passes: count, then place each row behind those of its expert that came before.
#include "moe_align/cpu.h"

#include <algorithm>
#include <vector>

namespace moeserve {

void moe_align(const int64_t* expert_ids, int64_t num_rows, int64_t num_experts, int64_t* order, int64_t* counts) {
  std::fill(counts, counts + num_experts, 0);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (expert_ids[row] >= 0) ++counts[expert_ids[row]];
  }
  std::vector<int64_t> next(num_experts + 1, 0);
  for (int64_t expert = 0; expert < num_experts; ++expert) next[expert + 1] = next[expert] + counts[expert];
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t expert = expert_ids[row] >= 0 ? expert_ids[row] : num_experts;
    order[next[expert]++] = row;
  }
}

}  // namespace moeserve
