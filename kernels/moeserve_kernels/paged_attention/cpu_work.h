// A part of the work of paged attention, and the running softmax that it leaves.
#pragma once

#include <algorithm>
#include <cmath>

#include "native/rows.h"
#include "paged_attention/cpu.h"

namespace moeserve {

constexpr int64_t kTile = 64;           // keys
constexpr int64_t kChunk = 1024;        // keys
constexpr float kNothingSeen = -1e30f;  // a maximum below every score, and finite: differences stay numbers

// Some queries of one request, for some key-value heads, over some of their chunks.
struct Work {
  int64_t request;
  int64_t first_query, num_queries;  // within the request's queries of this step
  int64_t first_head, num_heads;     // key-value heads
  int64_t first_chunk, last_chunk;   // last_chunk is not in
  float* partial;                    // where the state goes if other work has the other chunks; null: to the output
};

// The running softmax of num_rows rows: out[r] / total[r] is the result.
struct State {
  float* largest;  // [num_rows]
  float* total;    // [num_rows]
  float* out;      // [num_rows][width]
  int64_t num_rows, width;

  static int64_t size(int64_t num_rows, int64_t width) { return num_rows * (2 + width); }
  static State at(float* memory, int64_t num_rows, int64_t width) {
    return State{memory, memory + num_rows, memory + 2 * num_rows, num_rows, width};
  }
  void clear() const {
    std::fill(largest, largest + num_rows, kNothingSeen);
    std::fill(total, total + (1 + width) * num_rows, 0.0f);
  }
  // Takes in the state of the next chunk. One copy for prefill and decode: both round alike.
  [[gnu::noinline]] void merge(const State& next) const {
    for (int64_t r = 0; r < num_rows; ++r) {
      const float both = std::max(largest[r], next.largest[r]);
      const float mine = std::exp(largest[r] - both), theirs = std::exp(next.largest[r] - both);
      largest[r] = both;
      total[r] = total[r] * mine + next.total[r] * theirs;
      float* to = out + r * width;
      const float* from = next.out + r * width;
      for (int64_t i = 0; i < width; ++i) to[i] = to[i] * mine + from[i] * theirs;
    }
  }
};

// Divides by the total, with the sink in it, and writes the output of one key-value head of the work.
inline void finish(const PagedAttention& p, const Work& work, int64_t head, const State& state) {
  const int64_t group_size = p.num_heads / p.keys.num_heads;
  const int64_t first_head = (work.first_head + head) * group_size;
  const int64_t first_token = p.query_start_loc[work.request] + work.first_query;
  for (int64_t r = 0; r < state.num_rows; ++r) {
    const int64_t token = first_token + r / group_size, query_head = first_head + r % group_size;
    float factor = 1.0f, total = state.total[r];
    if (p.sinks != nullptr) {
      const float largest = std::max(state.largest[r], p.sinks[query_head]);
      factor = std::exp(state.largest[r] - largest);
      total = total * factor + std::exp(p.sinks[query_head] - largest);
    }
    float* row = state.out + r * state.width;
    for (int64_t i = 0; i < p.values.width; ++i) row[i] = row[i] * factor / total;
    with_float_type(p.dtype, [&](auto type) {
      using T = decltype(type);
      T* out = static_cast<T*>(p.out) + (token * p.num_heads + query_head) * p.values.width;
      narrow_row(row, p.values.width, out);
    });
  }
}

}  // namespace moeserve
