// Attention over the tiles of keys of one work.
#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "paged_attention/cpu_rows.h"
#include "paged_attention/cpu_tiles.h"
#include "paged_attention/cpu_work.h"

namespace moeserve {

template <class Unit>
class Attention {
 public:
  using Element = typename Unit::Element;

  explicit Attention(const PagedAttention& p)
      : p_(p),
        group_size_(p.num_heads / p.keys.num_heads),
        key_units_(round_up(p.keys.width, Unit::kElements) / Unit::kElements),
        out_width_(round_up(p.values.width, kLanes)),
        key_rows_(p.keys),
        value_rows_(p.values),
        key_panel_(kTile * key_units_),
        value_panel_(kTile / Unit::kElements * out_width_),
        values_are_keys_(p.values.data == p.keys.data) {}

  // next_work: what comes after; its keys are asked for in time.
  void run(const Work& work, const Work& next_work) {
    const int64_t num_rows = work.num_queries * group_size_;
    pack_queries(work);
    states_.resize(2 * work.num_heads * State::size(num_rows, out_width_));
    const auto state = [&](int64_t head, int64_t which) {
      const int64_t size = State::size(num_rows, out_width_);
      return State::at(states_.data() + (2 * head + which) * size, num_rows, out_width_);
    };
    for (int64_t chunk = work.first_chunk; chunk < work.last_chunk; ++chunk) {
      const int64_t which = chunk == work.first_chunk ? 0 : 1;
      for (int64_t head = 0; head < work.num_heads; ++head) state(head, which).clear();
      attend_chunk(work, chunk, next_work, [&](int64_t head) { return state(head, which); });
      if (which == 0) continue;
      for (int64_t head = 0; head < work.num_heads; ++head) state(head, 0).merge(state(head, 1));
    }
    for (int64_t head = 0; head < work.num_heads; ++head) {
      if (work.partial != nullptr) {
        const int64_t size = State::size(num_rows, out_width_);
        std::memcpy(work.partial + head * size, state(head, 0).largest, size * sizeof(float));
      } else {
        finish(p_, work, head, state(head, 0));
      }
    }
  }

 private:
  struct Rows {  // of one product: neighbouring rows of a tile
    int64_t first;
    int count;
    int64_t first_position, last_position;
  };

  void pack_queries(const Work& work) {
    const int64_t width = p_.keys.width, padded = key_units_ * Unit::kElements;
    const int64_t num_rows = work.num_queries * group_size_;
    queries_.resize(work.num_heads * num_rows * padded);
    const int64_t first_token = p_.query_start_loc[work.request] + work.first_query;
    Element* to = queries_.data();
    for (int64_t head = 0; head < work.num_heads; ++head) {
      for (int64_t r = 0; r < num_rows; ++r, to += padded) {
        const int64_t query_head = (work.first_head + head) * group_size_ + r % group_size_;
        const int64_t place = ((first_token + r / group_size_) * p_.num_heads + query_head) * width;
        if constexpr (Unit::kElements == 2) {
          std::memcpy(to, static_cast<const Element*>(p_.q) + place, width * sizeof(Element));
        } else {
          with_float_type(p_.dtype, [&](auto type) {
            widen_row(static_cast<const decltype(type)*>(p_.q) + place, width, to);
          });
        }
        std::fill(to + width, to + padded, Element{});
      }
    }
  }

  // The keys from `start` on that some query of a work sees, up to the end of a tile.
  struct Tile {
    int64_t request, start, first, end;
  };

  // The first tile at or behind `start` that a chunk of the work reads; empty if there is none.
  Tile tile_of(const Work& work, int64_t chunk, int64_t start) const {
    const int64_t num_queries = p_.query_start_loc[work.request + 1] - p_.query_start_loc[work.request];
    const int64_t first_position = p_.seq_lens[work.request] - num_queries + work.first_query;
    const int64_t end = std::min((chunk + 1) * kChunk, first_position + work.num_queries);
    const int64_t first = std::max(start, first_seen(first_position));
    const int64_t tile = first / kTile * kTile;
    return Tile{work.request, tile, first, std::max(tile, std::min(tile + kTile, end))};
  }

  template <class StateOf>
  void attend_chunk(const Work& work, int64_t chunk, const Work& next_work, StateOf state_of) {
    Tile tile = tile_of(work, chunk, chunk * kChunk);
    while (tile.start < tile.end) {
      locate(tile, keys_, values_, slots_);
      const Tile next = tile_of(work, chunk, tile.start + kTile);
      if (next.start < next.end) {
        locate(next, next_keys_, next_values_, next_slots_);
      } else if (chunk + 1 < work.last_chunk) {
        locate(tile_of(work, chunk + 1, (chunk + 1) * kChunk), next_keys_, next_values_, next_slots_);
      } else {
        const int64_t first_chunk = next_work.first_chunk;
        locate(tile_of(next_work, first_chunk, first_chunk * kChunk), next_keys_, next_values_, next_slots_);
      }
      num_keys_ = tile.end - tile.start;
      for (int64_t head = 0; head < work.num_heads; ++head) {
        pack_tile(work.first_head + head);
        attend_tile(work, head, tile.start, state_of(head));
      }
      tile = next;
    }
  }

  int64_t first_seen(int64_t position) const {
    return p_.sliding_window == 0 ? 0 : std::max<int64_t>(0, position - p_.sliding_window + 1);
  }

  // Where the keys and values of head 0 lie, by place in the tile; null where nobody may look.
  void locate(const Tile& tile, const char** keys, const char** values, int64_t* slots) const {
    const int64_t* blocks = p_.block_tables + tile.request * p_.block_table_stride;
    const int64_t block_size = p_.keys.block_size;
    std::fill(keys, keys + kTile, nullptr);
    for (int64_t position = tile.first; position < tile.end;) {
      const int64_t block = blocks[position / block_size], offset = position % block_size;
      const int64_t count = std::min(block_size - offset, tile.end - position);
      const char* key = p_.keys.row(block * block_size + offset, 0);
      const char* value = p_.values.row(block * block_size + offset, 0);
      for (int64_t i = 0; i < count; ++i, ++position) {
        const int64_t place = position - tile.start;
        slots[place] = block * block_size + offset + i;
        keys[place] = key + i * p_.keys.token_stride * p_.keys.element_bytes();
        values[place] = value + i * p_.values.token_stride * p_.values.element_bytes();
      }
    }
  }

  // Packs a tile of one head, and asks for the same rows of the next tile.
  void pack_tile(int64_t head) {
    const int64_t num_columns = round_up(num_keys_, kLanes);
    const int64_t key_place = head * p_.keys.head_stride * p_.keys.element_bytes();
    const int64_t value_place = head * p_.values.head_stride * p_.values.element_bytes();
    const Element* rows[kTile];
    for (int64_t i = 0; i < num_columns; ++i) {
      rows[i] = keys_[i] == nullptr ? key_rows_.zeros() : key_rows_.read(keys_[i] + key_place, i);
    }
    for (int64_t i = 0; i < num_columns; i += kLanes) {
      prefetch(next_keys_ + i, key_place, p_.keys);
      pack_keys(reinterpret_cast<const uint32_t* const*>(rows + i), key_units_, key_panel_.get() + i * key_units_);
    }
    for (int64_t i = 0; i < num_columns; ++i) {
      rows[i] = keys_[i] == nullptr ? value_rows_.zeros() : value_rows_.read(values_[i] + value_place, i);
    }
    for (int64_t i = 0; i < num_columns; i += kLanes) {
      if (!values_are_keys_) prefetch(next_values_ + i, value_place, p_.values);
      for (int64_t j = i; j < i + kLanes; j += Unit::kElements) {
        uint32_t* to = value_panel_.get() + j / Unit::kElements * kLanes;
        pack_values(Unit{}, rows + j, p_.values.width, to, value_panel_stride());
      }
    }
    if (p_.keys.scales == nullptr) return;
    for (int64_t i = 0; i < num_columns; ++i) {
      key_scales_[i] = keys_[i] == nullptr ? 1.0f : *p_.keys.scale(slots_[i], head);
      value_scales_[i] = keys_[i] == nullptr ? 1.0f : *p_.values.scale(slots_[i], head);
    }
  }

  void prefetch(const char* const* rows, int64_t place, const CacheView& cache) const {
    const int64_t bytes = cache.width * cache.element_bytes();
    for (int i = 0; i < kLanes; ++i) {
      for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(rows[i] + place + byte);
    }
  }

  int64_t value_panel_stride() const { return kTile / Unit::kElements * kLanes; }

  void attend_tile(const Work& work, int64_t head, int64_t tile, const State& state) {
    const int64_t num_queries = p_.query_start_loc[work.request + 1] - p_.query_start_loc[work.request];
    const int64_t first_position = p_.seq_lens[work.request] - num_queries + work.first_query;
    const Element* queries = queries_.data() + head * state.num_rows * key_units_ * Unit::kElements;
    for (int64_t first = 0; first < state.num_rows; first += kMaxRows) {
      const int count = static_cast<int>(std::min<int64_t>(kMaxRows, state.num_rows - first));
      const Rows rows{first, count, first_position + first / group_size_,
                      first_position + (first + count - 1) / group_size_};
      const int64_t num_seen = std::min(num_keys_, rows.last_position + 1 - tile);
      if (num_seen <= 0 || first_seen(rows.first_position) >= tile + num_keys_) continue;
      const int num_vectors = static_cast<int>((num_seen + kLanes - 1) / kLanes);
      multiply<Unit>(reinterpret_cast<const uint32_t*>(queries) + first * key_units_, key_units_, count,
                     key_panel_.get(), key_units_ * kLanes, key_units_, num_vectors, scores_, kTile, nullptr);
      float shrink[kMaxRows];
      softmax(rows, tile, num_vectors, state, shrink);
      multiply<Unit>(powers_, kTile / Unit::kElements, count, value_panel_.get(), value_panel_stride(),
                     num_vectors * kLanes / Unit::kElements, static_cast<int>(out_width_ / kLanes),
                     state.out + first * out_width_, out_width_, shrink);
    }
  }

  // Scores to powers of the rows' new maxima; shrink: what the sums so far must be multiplied by.
  void softmax(const Rows& rows, int64_t tile, int num_vectors, const State& state, float* shrink) {
    float* largest = state.largest + rows.first;
    float before[kLanes] = {}, after[kLanes] = {};
    for (int r = 0; r < rows.count; ++r) {
      float* scores = scores_ + r * kTile;
      const int64_t position = rows.first_position + (rows.first + r) / group_size_ - rows.first / group_size_;
      const int64_t seen_from = std::max<int64_t>(0, first_seen(position) - tile), seen_to = position + 1 - tile;
      for (int64_t i = 0; i < std::min<int64_t>(seen_from, num_vectors * kLanes); ++i) scores[i] = -kInfinity;
      for (int64_t i = std::max<int64_t>(0, seen_to); i < num_vectors * kLanes; ++i) scores[i] = -kInfinity;
      Vec best(kNothingSeen);
      for (int v = 0; v < num_vectors; ++v) {
        Vec score = Vec::load(scores + v * kLanes) * Vec(p_.softmax_scale);
        if (p_.keys.scales != nullptr) score = score * Vec::load(key_scales_ + v * kLanes);
        score.store(scores + v * kLanes);
        best = max(score, best);
      }
      before[r] = largest[r];
      after[r] = std::max(largest[r], reduce_max(best));
    }
    float factors[kLanes];
    exp(Vec::load(before) - Vec::load(after)).store(factors);
    for (int r = 0; r < rows.count; ++r) {
      const Vec shift(after[r]);
      Vec sum(0.0f);
      for (int v = 0; v < num_vectors; ++v) {
        Vec power = exp(Vec::load(scores_ + r * kTile + v * kLanes) - shift);
        sum = sum + power;
        if (p_.values.scales != nullptr) power = power * Vec::load(value_scales_ + v * kLanes);
        store_power(power, r, v);
      }
      largest[r] = after[r];
      shrink[r] = factors[r];
      float& total = state.total[rows.first + r];
      total = total * factors[r] + reduce_add(sum);
    }
  }

  void store_power(Vec power, int row, int vector) {
    if constexpr (Unit::kElements == 1) {
      power.store(reinterpret_cast<float*>(powers_ + row * kTile) + vector * kLanes);
    } else {
      power.store(reinterpret_cast<BFloat16*>(powers_ + row * (kTile / 2)) + vector * kLanes);
    }
  }

  static constexpr float kInfinity = std::numeric_limits<float>::infinity();

  const PagedAttention& p_;
  const int64_t group_size_, key_units_, out_width_;
  RowReader<Unit> key_rows_, value_rows_;
  AlignedBuffer<uint32_t> key_panel_, value_panel_;
  std::vector<Element> queries_;
  std::vector<float> states_;
  const bool values_are_keys_;
  const char *keys_[kTile], *values_[kTile], *next_keys_[kTile] = {}, *next_values_[kTile] = {};
  int64_t slots_[kTile], next_slots_[kTile];
  int64_t num_keys_ = 0;  // of the tile, counted from its start
  alignas(64) float key_scales_[kTile];
  alignas(64) float value_scales_[kTile];
  alignas(64) float scores_[kMaxRows * kTile];
  alignas(64) uint32_t powers_[kMaxRows * kTile];
};

}  // namespace moeserve
