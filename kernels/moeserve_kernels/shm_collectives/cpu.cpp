// Collectives between processes of one host over one shared memory segment.
//
// Every member has two slots and a counter of the rounds it has published. A round: write into one's own slot, publish,
// wait until all have published it, read the slots of the others. Slots alternate: the one that is written in round k
// was read in round k - 2, and whoever has published round k - 1 was done with that. So one wait a round is enough. A
// message longer than a slot takes several rounds.
//
// A sum is taken by every member that needs it, in float32 and in rank order: all get the same bits.
#include "shm_collectives/cpu.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "native/simd.h"

namespace moeserve::shm {
namespace {

constexpr int64_t kSecond = 1'000'000'000;  // ns
constexpr int64_t kAliveCheckNs = kSecond / 10;
constexpr int kLooksPerClock = 64;
constexpr uint32_t kMostSkipped = 63;

// Start times of processes that tell nothing more.
constexpr uint64_t kEnded = 0;
constexpr uint64_t kUnknown = ~uint64_t{0};

struct alignas(64) Member {
  std::atomic<uint32_t> published;  // rounds, modulo 2^32; a futex
  std::atomic<uint32_t> num_asleep;
  int32_t pid;
  uint64_t start_time;  // tells the process from a later one with its number
};

// What a member says of its message, so that members that disagree fail instead of reading what is not theirs.
struct alignas(64) Message {
  int64_t op;
  int64_t bytes_to[kMaxMembers];
};

// Whether spinning pays, as a member has found: its own line, which no other reads.
struct alignas(64) Patience {
  uint32_t num_skipped;  // waits without a spin after the last spin that was in vain
  uint32_t num_to_skip;
};

struct alignas(64) Segment {
  int64_t size;
  int64_t slot_bytes;
  int64_t timeout_ns;
  int64_t spin_ns;
  Member members[kMaxMembers];
  Patience patience[kMaxMembers];
  Message messages[kMaxMembers][2];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * kSecond + now.tv_nsec;
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, int64_t at_most_ns) {
  const timespec timeout{at_most_ns / kSecond, at_most_ns % kSecond};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, kMaxMembers, nullptr, nullptr, 0);
}

// In the kernel's ticks. A process counts as ended before its parent has noticed.
uint64_t start_time_of(int32_t pid) {
  char path[32], stat[1024];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return errno == ENOENT || errno == ESRCH ? kEnded : kUnknown;
  stat[std::fread(stat, 1, sizeof stat - 1, file)] = '\0';
  std::fclose(file);
  const char* behind_name = std::strrchr(stat, ')');  // the name is field 2, and may hold anything
  if (behind_name == nullptr) return kEnded;
  char state;
  unsigned long long start_time;
  const int found = std::sscanf(behind_name + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu",
                                &state, &start_time);
  return found != 2 || state == 'Z' || state == 'X' ? kEnded : start_time;
}

// One member's part in one collective: its rounds.
class Call {
 public:
  Call(void* segment, int64_t rank, int64_t op)
      : segment_(*static_cast<Segment*>(segment)),
        rank_(rank),
        round_(segment_.members[rank].published.load(std::memory_order_relaxed) + 1) {
    message().op = op;
  }

  int64_t size() const { return segment_.size; }
  int64_t slot_bytes() const { return segment_.slot_bytes; }
  // The part of a slot that is for one member, in whole cache lines.
  int64_t lane_bytes() const { return slot_bytes() / size() / 64 * 64; }

  char* slot() { return slot_of(rank_); }
  char* slot_of(int64_t member) {
    return reinterpret_cast<char*>(&segment_ + 1) + (2 * member + (round_ & 1)) * slot_bytes();
  }
  Message& message() { return message_of(rank_); }
  Message& message_of(int64_t member) { return segment_.messages[member][round_ & 1]; }

  // Shows the others what was written for this round, and waits for theirs.
  int64_t exchange() {
    publish();
    for (int64_t member = 0; member < size(); member++) {
      if (const int64_t status = wait_for(member); status != kOk) return status;
      if (message_of(member).op != message().op) return kMismatch;
    }
    return kOk;
  }

  // Another round of this collective; what this one brought has been read.
  void next_round() {
    const int64_t op = message().op;
    round_++;
    message().op = op;
  }

 private:
  void publish() {
    Member& own = segment_.members[rank_];
    // Sequentially consistent, as the sleeper's increment and look: one of the two sees the other.
    own.published.store(round_, std::memory_order_seq_cst);
    if (own.num_asleep.load(std::memory_order_seq_cst) != 0) futex_wake_all(own.published);
  }

  bool has_published(int64_t member) const {
    return is_this_round(segment_.members[member].published.load(std::memory_order_acquire));
  }
  bool is_this_round(uint32_t published) const { return static_cast<int32_t>(published - round_) >= 0; }

  int64_t wait_for(int64_t member) {
    if (has_published(member) || spin_until_published(member)) return kOk;
    const int64_t start = now_ns();
    do {
      sleep_until_published(member);
      if (has_published(member)) return kOk;
      if (const int64_t lost = lost_member(); lost >= 0) return 1 + lost;
    } while (now_ns() - start < segment_.timeout_ns);
    return kTimedOut;
  }

  // Spinning is the fastest way to wait for a member that runs on another core. Where the member needs this core it is
  // the slowest: so spin less and less often while it is in vain. (Yielding is no way out: the core may go to a process
  // that has nothing to do with us, for milliseconds.)
  bool spin_until_published(int64_t member) {
    Patience& patience = segment_.patience[rank_];
    if (patience.num_skipped < patience.num_to_skip) {
      patience.num_skipped++;
      return false;
    }
    patience.num_skipped = 0;
    for (const int64_t start = now_ns(); now_ns() - start < segment_.spin_ns;) {
      for (int i = 0; i < kLooksPerClock; i++) {
        if (has_published(member)) {
          patience.num_to_skip = 0;
          return true;
        }
        pause_core();
      }
    }
    patience.num_to_skip = std::min(2 * patience.num_to_skip + 1, kMostSkipped);
    return false;
  }

  void sleep_until_published(int64_t member) {
    Member& other = segment_.members[member];
    other.num_asleep.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = other.published.load(std::memory_order_seq_cst);
    if (!is_this_round(seen)) futex_wait(other.published, seen, kAliveCheckNs);
    other.num_asleep.fetch_sub(1, std::memory_order_seq_cst);
  }

  // Some member that will never publish this round, else -1. One that has may be gone: it was its last.
  int64_t lost_member() const {
    for (int64_t member = 0; member < size(); member++) {
      const uint64_t start_time = start_time_of(segment_.members[member].pid);
      const bool has_ended = start_time != kUnknown && start_time != segment_.members[member].start_time;
      if (has_ended && !has_published(member)) return member;
    }
    return -1;
  }

  Segment& segment_;
  const int64_t rank_;
  uint32_t round_;
};

// out[i] = sum over members of from[member][i], in rank order; out may be one of them.
template <class T>
void sum_floats(const char* const* from, int64_t size, void* out, int64_t count) {
  const auto x = [from](int64_t member) { return reinterpret_cast<const T*>(from[member]); };
  T* to = static_cast<T*>(out);
  int64_t i = 0;
  for (; i + Vec::kWidth <= count; i += Vec::kWidth) {
    Vec sum = Vec::load(x(0) + i);
    for (int64_t member = 1; member < size; member++) sum = sum + Vec::load(x(member) + i);
    sum.store(to + i);
  }
  for (; i < count; i++) {
    float sum = to_float(x(0)[i]);
    for (int64_t member = 1; member < size; member++) sum += to_float(x(member)[i]);
    to[i] = from_float<T>(sum);
  }
}

void sum_integers(const char* const* from, int64_t size, void* out, int64_t count) {
  int64_t* to = static_cast<int64_t*>(out);
  for (int64_t i = 0; i < count; i++) {
    int64_t sum = 0;
    for (int64_t member = 0; member < size; member++) sum += reinterpret_cast<const int64_t*>(from[member])[i];
    to[i] = sum;
  }
}

// Sums of `own` and of what the others have `offset` bytes into their slots.
void sum_members(Call& call, int64_t rank, const void* own, int64_t offset, void* out, int64_t count, Element element) {
  const char* from[kMaxMembers];
  for (int64_t member = 0; member < call.size(); member++) {
    from[member] = member == rank ? static_cast<const char*>(own) : call.slot_of(member) + offset;
  }
  switch (element) {
    case Element::kFloat32:
      return sum_floats<float>(from, call.size(), out, count);
    case Element::kBFloat16:
      return sum_floats<BFloat16>(from, call.size(), out, count);
    case Element::kFloat16:
      return sum_floats<Half>(from, call.size(), out, count);
    case Element::kInt64:
      return sum_integers(from, call.size(), out, count);
  }
}

int64_t bytes_of(Element element) {
  return element == Element::kInt64 ? 8 : element == Element::kFloat32 ? 4 : 2;
}

// What must be the same for all members of a call: the collective, and the length and type of its message.
enum Collective : int64_t { kBarrier = 1, kAllReduce, kAllGather, kAllToAll, kReduceScatter };
int64_t op_code(Collective collective, int64_t length = 0, Element element = Element::kFloat32) {
  return length << 5 | static_cast<int64_t>(element) << 3 | collective;
}

// The parts' bytes one after the other: calls f(part, place in the part, place behind `start`, bytes) for each piece of a
// part that lies in start .. stop.
template <class F>
void for_each_piece(const std::vector<Gathered>& parts, int64_t start, int64_t stop, F&& f) {
  int64_t part_start = 0;
  for (const Gathered& part : parts) {
    const int64_t from = std::max(start, part_start), to = std::min(stop, part_start + part.bytes);
    if (from < to) f(part, from - part_start, from - start, to - from);
    part_start += part.bytes;
  }
}

// What a member sends itself does not go through its slot.
void copy_own(int64_t rank, const void* x, const int64_t* send_bytes, void* out, const int64_t* receive_bytes) {
  const int64_t from = std::accumulate(send_bytes, send_bytes + rank, int64_t{0});
  const int64_t to = std::accumulate(receive_bytes, receive_bytes + rank, int64_t{0});
  std::memcpy(static_cast<char*>(out) + to, static_cast<const char*>(x) + from, send_bytes[rank]);
}

}  // namespace

int64_t segment_bytes(int64_t size, int64_t slot_bytes) { return sizeof(Segment) + 2 * size * slot_bytes; }

void create(void* segment, int64_t size, int64_t slot_bytes, double timeout_s, double spin_s) {
  Segment& created = *static_cast<Segment*>(segment);
  created.size = size;
  created.slot_bytes = slot_bytes;
  created.timeout_ns = static_cast<int64_t>(timeout_s * kSecond);
  created.spin_ns = static_cast<int64_t>(spin_s * kSecond);
}

void join(void* segment, int64_t rank) {
  Member& own = static_cast<Segment*>(segment)->members[rank];
  own.pid = getpid();
  own.start_time = start_time_of(own.pid);
}

int64_t barrier(void* segment, int64_t rank) { return Call(segment, rank, op_code(kBarrier)).exchange(); }

int64_t all_reduce(void* segment, int64_t rank, void* x, int64_t count, Element element) {
  Call call(segment, rank, op_code(kAllReduce, count, element));
  const int64_t most = call.slot_bytes() / bytes_of(element);
  for (int64_t start = 0; start < count; start += most) {
    const int64_t n = std::min(most, count - start);
    char* part = static_cast<char*>(x) + start * bytes_of(element);
    if (start > 0) call.next_round();
    std::memcpy(call.slot(), part, n * bytes_of(element));
    if (const int64_t status = call.exchange(); status != kOk) return status;
    sum_members(call, rank, part, 0, part, n, element);
  }
  return kOk;
}

int64_t all_gather(void* segment, int64_t rank, const std::vector<Gathered>& parts) {
  const int64_t bytes =
      std::accumulate(parts.begin(), parts.end(), int64_t{0}, [](int64_t sum, const Gathered& p) { return sum + p.bytes; });
  Call call(segment, rank, op_code(kAllGather, bytes));
  for (int64_t start = 0; start < bytes; start += call.slot_bytes()) {
    if (start > 0) call.next_round();
    const int64_t stop = start + call.slot_bytes();
    for_each_piece(parts, start, stop, [&](const Gathered& part, int64_t at, int64_t in_slot, int64_t n) {
      std::memcpy(call.slot() + in_slot, static_cast<const char*>(part.x) + at, n);
    });
    if (const int64_t status = call.exchange(); status != kOk) return status;
    for (int64_t member = 0; member < call.size(); member++) {
      for_each_piece(parts, start, stop, [&](const Gathered& part, int64_t at, int64_t in_slot, int64_t n) {
        const char* from = member == rank ? static_cast<const char*>(part.x) + at : call.slot_of(member) + in_slot;
        std::memcpy(static_cast<char*>(part.out) + member * part.bytes + at, from, n);
      });
    }
  }
  return kOk;
}

int64_t all_to_all(void* segment, int64_t rank, const void* x, const int64_t* send_bytes, void* out,
                   const int64_t* receive_bytes) {
  Call call(segment, rank, op_code(kAllToAll));
  if (send_bytes[rank] != receive_bytes[rank]) return kMismatch;
  copy_own(rank, x, send_bytes, out, receive_bytes);
  const int64_t lane = call.lane_bytes();
  int64_t longest = 0;
  for (int64_t start = 0; start == 0 || start < longest; start += lane) {
    if (start > 0) call.next_round();
    const char* from = static_cast<const char*>(x);
    for (int64_t to = 0; to < call.size(); from += send_bytes[to++]) {
      call.message().bytes_to[to] = to == rank ? 0 : send_bytes[to];
      const int64_t n = std::min(lane, call.message().bytes_to[to] - start);
      if (n > 0) std::memcpy(call.slot() + to * lane, from + start, n);
    }
    if (const int64_t status = call.exchange(); status != kOk) return status;
    char* to = static_cast<char*>(out);
    for (int64_t member = 0; member < call.size(); to += receive_bytes[member++]) {
      const int64_t* bytes_to = call.message_of(member).bytes_to;
      if (member != rank && bytes_to[rank] != receive_bytes[member]) return kMismatch;
      // As many rounds as the longest message needs, whoever sends it: all members must come to the same number.
      longest = std::max(longest, *std::max_element(bytes_to, bytes_to + call.size()));
      const int64_t n = std::min(lane, bytes_to[rank] - start);
      if (n > 0) std::memcpy(to + start, call.slot_of(member) + rank * lane, n);
    }
  }
  return kOk;
}

int64_t reduce_scatter(void* segment, int64_t rank, const void* x, void* out, int64_t count, Element element) {
  Call call(segment, rank, op_code(kReduceScatter, count, element));
  const int64_t lane = call.lane_bytes(), bytes = bytes_of(element);
  for (int64_t start = 0; start < count; start += lane / bytes) {
    const int64_t n = std::min(lane / bytes, count - start);
    if (start > 0) call.next_round();
    const auto addends_for = [&](int64_t member) { return static_cast<const char*>(x) + (member * count + start) * bytes; };
    for (int64_t to = 0; to < call.size(); to++) {
      if (to != rank) std::memcpy(call.slot() + to * lane, addends_for(to), n * bytes);
    }
    if (const int64_t status = call.exchange(); status != kOk) return status;
    sum_members(call, rank, addends_for(rank), rank * lane, static_cast<char*>(out) + start * bytes, n, element);
  }
  return kOk;
}

}  // namespace moeserve::shm
