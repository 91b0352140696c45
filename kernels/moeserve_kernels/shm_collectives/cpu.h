// Collectives between processes of one host over one shared memory segment.
#pragma once

#include <cstdint>
#include <vector>

namespace moeserve::shm {

// What sums can be taken of.
enum class Element : int32_t { kFloat32, kBFloat16, kFloat16, kInt64 };

// A collective returns 0, one of these, or 1 + the rank of a member whose process has ended.
constexpr int64_t kOk = 0;
constexpr int64_t kTimedOut = -1;
constexpr int64_t kMismatch = -2;

constexpr int64_t kMaxMembers = 64;
constexpr int64_t kMinSlotBytes = 64 * kMaxMembers;

// Bytes of a segment for `size` members with slots of `slot_bytes`, a multiple of 64.
int64_t segment_bytes(int64_t size, int64_t slot_bytes);

// Sets up a segment of zeros; by one member, before any joins.
// spin_s: how long a member that waits keeps its core before it sleeps.
void create(void* segment, int64_t size, int64_t slot_bytes, double timeout_s, double spin_s);

// Tells the others which process `rank` is; all have joined before the first collective.
void join(void* segment, int64_t rank);

int64_t barrier(void* segment, int64_t rank);

// x[i] = sum of all members' x[i].
int64_t all_reduce(void* segment, int64_t rank, void* x, int64_t count, Element element);

// out: x of every member, `bytes` of each, in rank order.
struct Gathered {
  const void* x;
  void* out;
  int64_t bytes;
};

// All parts go together.
int64_t all_gather(void* segment, int64_t rank, const std::vector<Gathered>& parts);

// x: what goes to each member, in rank order; out: what came from each.
int64_t all_to_all(void* segment, int64_t rank, const void* x, const int64_t* send_bytes, void* out,
                   const int64_t* receive_bytes);

// x: `count` addends for each member, in rank order; out: the sums of all members' addends for this one.
int64_t reduce_scatter(void* segment, int64_t rank, const void* x, void* out, int64_t count, Element element);

}  // namespace moeserve::shm
