// The matrix product under `linear` and `fused_moe`: a tile of rows times a block of weight columns.
//
// A weight [out, in] is packed in blocks of `columns` outputs. A block holds, step after step, the weights of its
// outputs for the next `group` inputs, so that a product streams it once, from the first byte to the last. The rows of
// a tile are interleaved in the same way into a panel: per step one 32-bit word a row (a float, or `group` = 2 bf16).
// Every sum of a tile is one float32 accumulator that takes its products in order of the inputs, however many rows the
// tile has: a row's result depends on no other row.
#pragma once

#include <cstdint>

#include "native/dtype.h"

namespace moeserve {

using Word = uint32_t;

// Most rows of a tile: their sums fit the registers.
extern const int kMaxTileRows;
// Most outputs of a block, of any format.
inline constexpr int kMaxColumns = 32;

struct TileFormat {
  int columns;
  int group;
  int weight_bytes;
  // The output at each position of a step, or null where they lie in order.
  const int64_t* column_order;
  // Whether int8 weights are kept as sign and magnitude, not as two's complement.
  bool sign_magnitude;
  // sums[rows][columns] = panel[steps][rows] times block[steps][columns].
  void (*multiply)(const void* block, const Word* panel, int64_t steps, int rows, float* sums);

  int64_t steps(int64_t width) const { return (width + group - 1) / group; }
  int64_t num_blocks(int64_t outputs) const { return (outputs + columns - 1) / columns; }
  int64_t block_bytes(int64_t width) const { return steps(width) * columns * group * weight_bytes; }
};

// The format for inputs of one type and weights of another (int8, or the inputs' own) on this machine.
const TileFormat& tile_format(Dtype input, Dtype weight);

// The tiles of `num_rows` rows: as few as fit, of nearly equal sizes.
struct Tiles {
  int64_t num_rows;
  int64_t count;

  explicit Tiles(int64_t rows) : num_rows(rows), count((rows + kMaxTileRows - 1) / kMaxTileRows) {}
  int64_t first_row(int64_t tile) const { return num_rows * tile / count; }
  int rows(int64_t tile) const { return static_cast<int>(first_row(tile + 1) - first_row(tile)); }
};

// Interleave `rows` rows of `width` inputs into panel[steps][rows]; what a step lacks at the end is zero.
void pack_panel(const TileFormat& format, const void* const* inputs, Dtype dtype, int rows, int64_t width, Word* panel);

// The same for a part of a panel: inputs [first, first + count) of each row, given in float32 (`stride` numbers a row).
// `first` is a multiple of the group; the panel is rounded to the format's type.
void pack_panel_part(const TileFormat& format, const float* values, int64_t stride, int rows, int64_t first,
                     int64_t count, Word* panel);

// out[i] = values[i] in the type of `out`.
void store_row(const float* values, int64_t count, Dtype dtype, void* out);

inline int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kInt8 ? 1 : 2; }

}  // namespace moeserve
