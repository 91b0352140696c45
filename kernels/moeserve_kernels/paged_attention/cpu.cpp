// Attention in tiles of queries by tiles of keys, with a running softmax.
//
// A row is one query of one head; a row's keys are read in tiles of kTile, in order, and summed up in chunks of kChunk,
// both counted from position 0. Chunks are merged in order. So a row's result depends on nothing but its own query and
// keys: not on the other rows of its tile, on how a prompt was cut into steps, or on how work was spread over threads.
// The query heads that share a key-value head are rows of one tile: their keys are packed once.

#include "paged_attention/cpu.h"

#include <algorithm>
#include <vector>

#include "native/parallel.h"
#include "paged_attention/cpu_attention.h"

namespace moeserve {
namespace {

constexpr int64_t kRowsWanted = 96;

// The parts of a step, by request: prompts a tile of queries and a head at a time, single queries a chunk at a time.
class Plan {
 public:
  explicit Plan(const PagedAttention& p) : p_(p) {
    int64_t num_chunks = 0;
    for (int64_t request = 0; request < p.num_requests; ++request) num_chunks += (p.seq_lens[request] - 1) / kChunk + 1;
    // All heads of a chunk together read memory in order; few chunks are not enough for many threads.
    heads_per_chunk_ = num_chunks >= kManyChunks ? p.keys.num_heads : 1;
    for (int64_t request = 0; request < p.num_requests; ++request) {
      const int64_t num_queries = p.query_start_loc[request + 1] - p.query_start_loc[request];
      if (num_queries == 1) add_decode(request);
      if (num_queries > 1) add_prefill(request, num_queries);
    }
    partials_.resize(partials_size_);
  }

  int64_t num_works() const { return static_cast<int64_t>(works_.size()); }
  Work work(int64_t i) { return with_memory(works_[i]); }

  // Brings the chunks of one query together.
  int64_t num_merges() const { return static_cast<int64_t>(merges_.size()); }
  void merge(int64_t i) {
    const Merge& merge = merges_[i];
    const Work first = work(merge.first);
    for (int64_t head = 0; head < first.num_heads; ++head) {
      const State state = partial_state(first, head);
      for (int64_t next = merge.first + 1; next < merge.last; ++next) state.merge(partial_state(work(next), head));
      finish(p_, first, head, state);
    }
  }

 private:
  static constexpr int64_t kManyChunks = 32;
  struct Merge {
    int64_t first, last;  // works; last is not in
  };
  struct Planned {
    Work work;
    int64_t partial_place;  // -1: none
  };

  int64_t state_size(int64_t num_rows) const { return State::size(num_rows, round_up(p_.values.width, kLanes)); }
  Work with_memory(const Planned& planned) {
    Work work = planned.work;
    work.partial = planned.partial_place < 0 ? nullptr : partials_.data() + planned.partial_place;
    return work;
  }
  State partial_state(const Work& work, int64_t head) const {
    const int64_t group_size = p_.num_heads / p_.keys.num_heads;
    return State::at(work.partial + head * state_size(group_size), group_size, round_up(p_.values.width, kLanes));
  }
  int64_t first_chunk(int64_t position) const {
    return p_.sliding_window == 0 ? 0 : std::max<int64_t>(0, position - p_.sliding_window + 1) / kChunk;
  }

  void add_decode(int64_t request) {
    const int64_t position = p_.seq_lens[request] - 1;
    const int64_t first = first_chunk(position), last = position / kChunk + 1;
    for (int64_t head = 0; head < p_.keys.num_heads; head += heads_per_chunk_) {
      const int64_t num_heads = heads_per_chunk_;
      if (last - first > 1) merges_.push_back(Merge{num_works(), num_works() + last - first});
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t place = last - first > 1 ? partials_size_ : -1;
        if (place >= 0) partials_size_ += num_heads * state_size(p_.num_heads / p_.keys.num_heads);
        works_.push_back(Planned{Work{request, 0, 1, head, num_heads, chunk, chunk + 1, nullptr}, place});
      }
    }
  }

  void add_prefill(int64_t request, int64_t num_queries) {
    const int64_t tile = std::max<int64_t>(1, kRowsWanted / (p_.num_heads / p_.keys.num_heads));
    const int64_t first_position = p_.seq_lens[request] - num_queries;
    for (int64_t head = 0; head < p_.keys.num_heads; ++head) {
      for (int64_t query = 0; query < num_queries; query += tile) {
        const int64_t count = std::min(tile, num_queries - query), last = first_position + query + count - 1;
        works_.push_back(Planned{
            Work{request, query, count, head, 1, first_chunk(first_position + query), last / kChunk + 1, nullptr}, -1});
      }
    }
  }

  const PagedAttention& p_;
  int64_t heads_per_chunk_ = 1;
  int64_t partials_size_ = 0;
  std::vector<Planned> works_;
  std::vector<Merge> merges_;
  std::vector<float> partials_;
};

template <class Unit>
void attend(const PagedAttention& p) {
  Plan plan(p);
  parallel_for(0, plan.num_works(), 1, [&](int64_t begin, int64_t end) {
    Attention<Unit> attention(p);
    for (int64_t i = begin; i < end; ++i) {
      const Work work = plan.work(i), next = plan.work(std::min(i + 1, end - 1));
      attention.run(work, next);
    }
  });
  parallel_for(0, plan.num_merges(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) plan.merge(i);
  });
}

}  // namespace

void paged_attention(const PagedAttention& p) {
#ifdef MOESERVE_BF16_UNITS
  const bool is_exact_as_bfloat16 =
      p.keys.dtype == Dtype::kBFloat16 || p.keys.dtype == Dtype::kInt8 || p.keys.dtype == Dtype::kFloat8;
  if (p.dtype == Dtype::kBFloat16 && is_exact_as_bfloat16) return attend<Bf16Unit>(p);
#endif
  attend<FloatUnit>(p);
}

}  // namespace moeserve
