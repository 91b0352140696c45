// Threads for the kernels: torch's own, so that its thread count and its pool are the only ones.
#pragma once

#include <cstdint>
#include <functional>

namespace moeserve {

// Calls body(first, last) on disjoint parts of [begin, end), none of fewer than `grain` items but the last. Which
// thread gets which items may vary: no result may depend on it.
void parallel_for(int64_t begin, int64_t end, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace moeserve
