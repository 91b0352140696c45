// Rows are sorted by expert, and every expert's weights are streamed once for all of its rows.
#include "fused_moe/cpu.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "linear/cpu.h"
#include "moe_align/cpu.h"
#include "native/parallel.h"
#include "native/simd.h"

namespace moeserve {
namespace {

// Tokens are taken in parts whose rows fit into this; each part streams the weights again.
constexpr int64_t kWorkspaceBytes = 128 << 20;
// Tiles that one task takes with a block of weights: enough to keep many threads busy with few experts.
constexpr int64_t kTilesPerTask = 8;
// Below this many multiplications a second thread costs more than it gains.
constexpr int64_t kMinWork = 1 << 19;

// A workspace of this thread, kept from call to call: fresh pages of memory would cost a seventh of a long prefill.
char* workspace(int64_t bytes) {
  thread_local std::unique_ptr<char[]> memory;
  thread_local int64_t size = 0;
  if (bytes > size) {
    memory.reset();
    memory.reset(new char[bytes]);
    size = bytes;
  }
  return memory.get();
}

// A tile of rows of one expert; `first` counts the rows sorted by expert.
struct ExpertTile {
  int64_t expert, first;
  int rows;
};

// Consecutive tiles of one expert.
struct TileGroup {
  int64_t begin, end;
};

// gate[i] = activation(gate[i], up[i]).
void activate(const FusedMoeArguments& arguments, float* gate, const float* up, int count) {
  const Vec limit(arguments.limit), negative_limit(-arguments.limit), alpha(arguments.alpha);
  for (int i = 0; i < count; i += Vec::kWidth) {
    Vec g = Vec::load(gate + i), u = Vec::load(up + i);
    if (arguments.activation == Activation::kSilu) {
      (g * sigmoid(g) * u).store(gate + i);
    } else {
      g = min(limit, g);
      u = max(negative_limit, min(limit, u));
      (g * sigmoid(alpha * g) * (u + Vec(1.0f))).store(gate + i);
    }
  }
}

// The experts over a part of the tokens.
class Part {
 public:
  Part(const FusedMoeArguments& arguments, int64_t first_token, int64_t num_tokens)
      : a_(arguments),
        format_(tile_format(a_.dtype, a_.weight_dtype)),
        first_token_(first_token),
        num_tokens_(num_tokens),
        expert_ids_(a_.expert_ids + first_token * a_.top_k),
        in_steps_(format_.steps(a_.hidden_size)),
        mid_steps_(format_.steps(a_.width)) {
    sort_rows();
  }

  void run() {
    const int64_t panel_bytes = num_rows_ * (in_steps_ + mid_steps_) * static_cast<int64_t>(sizeof(Word));
    const int64_t result_bytes = num_tokens_ * a_.top_k * a_.hidden_size * static_cast<int64_t>(sizeof(float));
    char* memory = workspace(panel_bytes + result_bytes);
    in_panels_ = reinterpret_cast<Word*>(memory);
    mid_panels_ = in_panels_ + num_rows_ * in_steps_;
    results_ = reinterpret_cast<float*>(memory + panel_bytes);
    const int64_t grain = std::max<int64_t>(1, (1 << 14) / (kMaxTileRows * in_steps_ + 1));
    parallel_for(0, static_cast<int64_t>(tiles_.size()), grain, [this](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) gather(tiles_[tile]);
    });
    for_blocks(format_.num_blocks(a_.width), 2 * a_.hidden_size,
               [this](const ExpertTile& tile, int64_t block, float* sums) { gate_up(tile, block, sums); });
    for_blocks(format_.num_blocks(a_.hidden_size), a_.width,
               [this](const ExpertTile& tile, int64_t block, float* sums) { down(tile, block, sums); });
    parallel_for(0, num_tokens_, std::max<int64_t>(1, (1 << 15) / (a_.top_k * a_.hidden_size + 1)),
                 [this](int64_t begin, int64_t end) {
                   for (int64_t token = begin; token < end; ++token) combine(token);
                 });
  }

 private:
  void sort_rows() {
    const int64_t num_choices = num_tokens_ * a_.top_k;
    order_.resize(num_choices);
    std::vector<int64_t> counts(a_.num_experts);
    moe_align(expert_ids_, num_choices, a_.num_experts, order_.data(), counts.data());
    num_rows_ = 0;
    for (int64_t expert = 0; expert < a_.num_experts; ++expert) {
      const Tiles tiles(counts[expert]);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t index = static_cast<int64_t>(tiles_.size());
        if (tile % kTilesPerTask == 0) groups_.push_back({index, index});
        tiles_.push_back({expert, num_rows_ + tiles.first_row(tile), tiles.rows(tile)});
        groups_.back().end = index + 1;
      }
      num_rows_ += counts[expert];
    }
  }

  // Calls body(tile, block, sums) for every tile and block; a block meets the tiles of a group one after the other.
  template <class Body>
  void for_blocks(int64_t num_blocks, int64_t width, const Body& body) {
    const int64_t work = format_.columns * (width + 1) * (num_rows_ / static_cast<int64_t>(groups_.size() + 1) + 1);
    const int64_t num_tasks = static_cast<int64_t>(groups_.size()) * num_blocks;
    parallel_for(0, num_tasks, std::max<int64_t>(1, kMinWork / work), [&](int64_t begin, int64_t end) {
      alignas(64) float sums[2 * 32 * kMaxColumns];
      for (int64_t task = begin; task < end; ++task) {
        const TileGroup group = groups_[task / num_blocks];
        for (int64_t tile = group.begin; tile < group.end; ++tile) body(tiles_[tile], task % num_blocks, sums);
      }
    });
  }

  void gather(const ExpertTile& tile) {
    const void* inputs[32];
    for (int row = 0; row < tile.rows; ++row) {
      const int64_t token = first_token_ + order_[tile.first + row] / a_.top_k;
      inputs[row] = static_cast<const char*>(a_.hidden) + token * a_.hidden_size * bytes_of(a_.dtype);
    }
    pack_panel(format_, inputs, a_.dtype, tile.rows, a_.hidden_size, in_panels_ + tile.first * in_steps_);
  }

  // Both projections for the inner columns of a block, and what the activation makes of them.
  void gate_up(const ExpertTile& tile, int64_t block, float* sums) {
    const int64_t block_bytes = format_.block_bytes(a_.hidden_size), num_blocks = format_.num_blocks(a_.width);
    const int64_t index = 2 * (tile.expert * num_blocks + block), column = block * format_.columns;
    const Word* panel = in_panels_ + tile.first * in_steps_;
    const int num_sums = tile.rows * format_.columns;
    for (int half = 0; half < 2; ++half) {
      const char* weights = static_cast<const char*>(a_.gate_up) + (index + half) * block_bytes;
      format_.multiply(weights, panel, in_steps_, tile.rows, sums + half * num_sums);
      finish_sums(format_, at(a_.gate_up_scale, (index + half) * format_.columns),
                  at(a_.gate_up_bias, (index + half) * format_.columns), tile.rows, sums + half * num_sums);
    }
    activate(a_, sums, sums + num_sums, num_sums);
    const int64_t count = std::min<int64_t>(format_.columns, a_.width - column);
    pack_panel_part(format_, sums, format_.columns, tile.rows, column, count,
                    mid_panels_ + tile.first * mid_steps_);
  }

  void down(const ExpertTile& tile, int64_t block, float* sums) {
    const int64_t index = tile.expert * format_.num_blocks(a_.hidden_size) + block, column = block * format_.columns;
    const char* weights = static_cast<const char*>(a_.down) + index * format_.block_bytes(a_.width);
    format_.multiply(weights, mid_panels_ + tile.first * mid_steps_, mid_steps_, tile.rows, sums);
    finish_sums(format_, at(a_.down_scale, index * format_.columns), at(a_.down_bias, index * format_.columns),
                tile.rows, sums);
    const int64_t count = std::min<int64_t>(format_.columns, a_.hidden_size - column);
    for (int row = 0; row < tile.rows; ++row) {
      float* result = results_ + order_[tile.first + row] * a_.hidden_size + column;
      std::copy_n(sums + row * format_.columns, count, result);
    }
  }

  // The weighted sum of a token's results, in order of its choices.
  void combine(int64_t token) {
    constexpr int64_t kPart = 512;
    float sum[kPart];
    char* out = static_cast<char*>(a_.out) + (first_token_ + token) * a_.hidden_size * bytes_of(a_.dtype);
    for (int64_t first = 0; first < a_.hidden_size; first += kPart) {
      const int64_t count = std::min(kPart, a_.hidden_size - first);
      std::fill_n(sum, count, 0.0f);
      for (int64_t choice = token * a_.top_k; choice < (token + 1) * a_.top_k; ++choice) {
        if (expert_ids_[choice] < 0) continue;
        add_scaled(results_ + choice * a_.hidden_size + first, a_.weights[first_token_ * a_.top_k + choice], sum,
                   count);
      }
      store_row(sum, count, a_.dtype, out + first * bytes_of(a_.dtype));
    }
  }

  static void add_scaled(const float* values, float factor, float* sum, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sum[i] += factor * values[i];
  }

  static const float* at(const float* values, int64_t index) { return values == nullptr ? nullptr : values + index; }

  const FusedMoeArguments& a_;
  const TileFormat& format_;
  const int64_t first_token_, num_tokens_;
  const int64_t* expert_ids_;  // of the part
  const int64_t in_steps_, mid_steps_;
  int64_t num_rows_;
  std::vector<int64_t> order_;
  std::vector<ExpertTile> tiles_;
  std::vector<TileGroup> groups_;
  // In the workspace: the inputs and the inner values of the rows, and the result of every choice, [tokens, top_k,
  // hidden_size].
  Word *in_panels_, *mid_panels_;
  float* results_;
};

}  // namespace

void fused_moe(const FusedMoeArguments& arguments) {
  const TileFormat& format = tile_format(arguments.dtype, arguments.weight_dtype);
  const int64_t words = format.steps(arguments.hidden_size) + format.steps(arguments.width) + arguments.hidden_size;
  const int64_t bytes = arguments.top_k * words * static_cast<int64_t>(sizeof(Word));
  const int64_t part = std::max<int64_t>(1, kWorkspaceBytes / std::max<int64_t>(1, bytes));
  for (int64_t first = 0; first < arguments.num_tokens; first += part) {
    Part(arguments, first, std::min(part, arguments.num_tokens - first)).run();
  }
}

}  // namespace moeserve
