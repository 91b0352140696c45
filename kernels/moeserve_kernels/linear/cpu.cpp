// Every block of the weight is read from memory once for up to kMaxRows rows.
#include "linear/cpu.h"

#include <algorithm>
#include <memory>

#include "native/parallel.h"
#include "native/simd.h"

namespace moeserve {
namespace {

// Bounds the panels in memory.
constexpr int64_t kMaxRows = 1536;
// Tiles that one task takes with a block: enough to keep many threads busy with few blocks.
constexpr int64_t kTilesPerTask = 8;
// Below this many multiplications a second thread costs more than it gains.
constexpr int64_t kMinWork = 1 << 19;

void multiply_rows(const LinearArguments& arguments, int64_t first_row, int64_t num_rows) {
  const TileFormat& format = tile_format(arguments.dtype, arguments.weight_dtype);
  const int64_t steps = format.steps(arguments.width), block_bytes = format.block_bytes(arguments.width);
  const int64_t item_bytes = bytes_of(arguments.dtype);
  const Tiles tiles(num_rows);
  const std::unique_ptr<Word[]> panels(new Word[num_rows * steps]);
  parallel_for(0, tiles.count, std::max<int64_t>(1, (1 << 14) / (kMaxTileRows * steps + 1)), [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tiles.first_row(tile);
      const void* inputs[32];
      for (int row = 0; row < tiles.rows(tile); ++row) {
        const int64_t offset = (first_row + first + row) * arguments.width * item_bytes;
        inputs[row] = static_cast<const char*>(arguments.x) + offset;
      }
      pack_panel(format, inputs, arguments.dtype, tiles.rows(tile), arguments.width, panels.get() + first * steps);
    }
  });

  const int64_t num_groups = (tiles.count + kTilesPerTask - 1) / kTilesPerTask;
  const int64_t work = std::min(num_rows, kTilesPerTask * kMaxTileRows) * format.columns * (arguments.width + 1);
  const int64_t num_tasks = format.num_blocks(arguments.num_outputs) * num_groups;
  parallel_for(0, num_tasks, std::max<int64_t>(1, kMinWork / work), [&](int64_t begin, int64_t end) {
    alignas(64) float sums[32 * kMaxColumns];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / num_groups, column = block * format.columns;
      const void* weights = static_cast<const char*>(arguments.blocks) + block * block_bytes;
      const int64_t count = std::min<int64_t>(format.columns, arguments.num_outputs - column);
      const int64_t first_tile = task % num_groups * kTilesPerTask;
      for (int64_t tile = first_tile; tile < std::min(first_tile + kTilesPerTask, tiles.count); ++tile) {
        const int64_t first = tiles.first_row(tile);
        const int rows = tiles.rows(tile);
        format.multiply(weights, panels.get() + first * steps, steps, rows, sums);
        finish_sums(format, arguments.scale ? arguments.scale + column : nullptr,
                    arguments.bias ? arguments.bias + column : nullptr, rows, sums);
        for (int row = 0; row < rows; ++row) {
          const int64_t offset = ((first_row + first + row) * arguments.num_outputs + column) * item_bytes;
          store_row(sums + row * format.columns, count, arguments.dtype, static_cast<char*>(arguments.out) + offset);
        }
      }
    }
  });
}

}  // namespace

void finish_sums(const TileFormat& format, const float* scale, const float* bias, int rows, float* sums) {
  if (scale == nullptr && bias == nullptr) return;
  for (int column = 0; column < format.columns; column += Vec::kWidth) {
    const Vec factor = scale ? Vec::load(scale + column) : Vec(1.0f);
    const Vec addend = bias ? Vec::load(bias + column) : Vec(0.0f);
    for (int row = 0; row < rows; ++row) {
      float* sum = sums + row * format.columns + column;
      fma(Vec::load(sum), factor, addend).store(sum);
    }
  }
}

void linear(const LinearArguments& arguments) {
  for (int64_t first = 0; first < arguments.num_rows; first += kMaxRows) {
    multiply_rows(arguments, first, std::min(kMaxRows, arguments.num_rows - first));
  }
}

}  // namespace moeserve
