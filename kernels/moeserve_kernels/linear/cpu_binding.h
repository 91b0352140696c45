// torch.ops.moeserve.linear, and the layout of the weights it takes.
#pragma once

#include "linear/cpu.h"
#include "native/binding.h"

namespace moeserve {

// (inputs side by side, the output at each position of a step, are int8 kept as sign and magnitude): how a block is made.
inline std::tuple<int64_t, std::vector<int64_t>, bool> tile_layout_binding(at::ScalarType input, at::ScalarType weight) {
  const TileFormat& format = tile_format(dtype_of(input), dtype_of(weight));
  std::vector<int64_t> order(format.columns);
  for (int column = 0; column < format.columns; ++column) {
    order[column] = format.column_order ? format.column_order[column] : column;
  }
  return {format.group, order, format.sign_magnitude};
}

inline at::Tensor linear_binding(const at::Tensor& x, const at::Tensor& blocks, int64_t num_outputs,
                                 const std::optional<at::Tensor>& scale, const std::optional<at::Tensor>& bias) {
  const at::Tensor dense = x.contiguous();
  check_dense(dense, "x");
  check_dense(blocks, "blocks");
  auto shape = dense.sizes().vec();
  TORCH_CHECK(!shape.empty(), "x must have an axis of inputs");
  const int64_t width = shape.back();
  shape.back() = num_outputs;
  at::Tensor out = at::empty(shape, dense.options());
  const Dtype dtype = dtype_of(dense), weight_dtype = dtype_of(blocks);
  const TileFormat& format = tile_format(dtype, weight_dtype);
  const int64_t padded = format.num_blocks(num_outputs) * format.columns;
  TORCH_CHECK(weight_dtype == Dtype::kInt8 || weight_dtype == dtype, "x and weight must have one dtype");
  TORCH_CHECK(static_cast<int64_t>(blocks.nbytes()) == format.num_blocks(num_outputs) * format.block_bytes(width),
              "blocks must be packed for ", width, " inputs and ", num_outputs, " outputs");
  TORCH_CHECK(!scale || scale->numel() == padded, "scale must be padded to whole blocks");
  TORCH_CHECK(!bias || bias->numel() == padded, "bias must be padded to whole blocks");
  linear({.x = dense.const_data_ptr(),
          .dtype = dtype,
          .num_rows = num_outputs == 0 ? 0 : out.numel() / num_outputs,
          .width = width,
          .num_outputs = num_outputs,
          .blocks = blocks.const_data_ptr(),
          .weight_dtype = weight_dtype,
          .scale = data_or_null<float>(scale, "scale"),
          .bias = data_or_null<float>(bias, "bias"),
          .out = out.mutable_data_ptr()});
  return out;
}

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("tile_layout(ScalarType input, ScalarType weight) -> (int, int[], bool)", &tile_layout_binding);
  m.def("linear(Tensor x, Tensor blocks, int num_outputs, Tensor? scale, Tensor? bias) -> Tensor", &linear_binding);
}

}  // namespace moeserve
