#include "head_linear/cpu.h"

#include <algorithm>
#include <vector>

#include "native/parallel.h"

namespace moeserve {
namespace {

// Rows whose inputs are interleaved at once: a block of the weight is read once for them.
constexpr int64_t kMaxRows = 256;

void multiply_head(const HeadLinear& p, int64_t head, std::vector<Word>& panels) {
  const TileFormat& format = tile_format(p.dtype, p.dtype);
  const int64_t steps = format.steps(p.width), block_bytes = format.block_bytes(p.width), bytes = bytes_of(p.dtype);
  const int64_t num_blocks = format.num_blocks(p.num_outputs);
  const char* blocks = static_cast<const char*>(p.blocks) + head * num_blocks * block_bytes;
  const char* x = static_cast<const char*>(p.x) + head * p.x_head_stride * bytes;
  char* out = static_cast<char*>(p.out) + head * p.out_head_stride * bytes;
  alignas(64) float sums[32 * kMaxColumns];
  for (int64_t start = 0; start < p.num_tokens; start += kMaxRows) {
    const Tiles tiles(std::min(kMaxRows, p.num_tokens - start));
    panels.resize(tiles.num_rows * steps);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      const void* inputs[32];
      const int64_t first = start + tiles.first_row(tile);
      for (int row = 0; row < tiles.rows(tile); ++row) inputs[row] = x + (first + row) * p.x_token_stride * bytes;
      Word* panel = panels.data() + tiles.first_row(tile) * steps;
      pack_panel(format, inputs, p.dtype, tiles.rows(tile), p.width, panel);
    }
    for (int64_t block = 0; block < num_blocks; ++block) {
      const int64_t column = block * format.columns;
      const int64_t count = std::min<int64_t>(format.columns, p.num_outputs - column);
      for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const Word* panel = panels.data() + tiles.first_row(tile) * steps;
        format.multiply(blocks + block * block_bytes, panel, steps, tiles.rows(tile), sums);
        for (int row = 0; row < tiles.rows(tile); ++row) {
          const int64_t token = start + tiles.first_row(tile) + row;
          store_row(sums + row * format.columns, count, p.dtype, out + (token * p.out_token_stride + column) * bytes);
        }
      }
    }
  }
}

}  // namespace

void head_linear(const HeadLinear& p) {
  const int64_t grain = 1 + (1 << 18) / (p.num_tokens * p.width * p.num_outputs + 1);
  parallel_for(0, p.num_heads, grain, [&](int64_t begin, int64_t end) {
    std::vector<Word> panels;
    for (int64_t head = begin; head < end; ++head) multiply_head(p, head, panels);
  });
}

}  // namespace moeserve
