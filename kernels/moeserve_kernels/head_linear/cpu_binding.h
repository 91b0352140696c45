#pragma once

#include "head_linear/cpu.h"
#include "native/binding.h"

namespace moeserve {

TORCH_LIBRARY_FRAGMENT(moeserve, m) {
  m.def("head_linear(Tensor x_THi, Tensor blocks, Tensor(a!) out_THo) -> ()",
        [](const at::Tensor& x, const at::Tensor& blocks, const at::Tensor& out) {
          check_dense(blocks, "blocks");
          TORCH_CHECK(x.dim() == 3 && out.dim() == 3 && x.stride(2) == 1 && out.stride(2) == 1, "heads are [T, H, D]");
          TORCH_CHECK(x.size(0) == out.size(0) && x.size(1) == out.size(1) && x.size(1) == blocks.size(0),
                      "x, blocks and out must have the same heads");
          TORCH_CHECK(x.scalar_type() == blocks.scalar_type() && x.scalar_type() == out.scalar_type(),
                      "x, blocks and out must have one dtype");
          const Dtype dtype = dtype_of(x);
          const TileFormat& format = tile_format(dtype, dtype);
          TORCH_CHECK(static_cast<int64_t>(blocks.nbytes()) ==
                          x.size(1) * format.num_blocks(out.size(2)) * format.block_bytes(x.size(2)),
                      "blocks must be packed for ", x.size(2), " inputs and ", out.size(2), " outputs");
          head_linear(HeadLinear{
              .dtype = dtype,
              .num_tokens = x.size(0),
              .num_heads = x.size(1),
              .width = x.size(2),
              .num_outputs = out.size(2),
              .x = x.const_data_ptr(),
              .x_token_stride = x.stride(0),
              .x_head_stride = x.stride(1),
              .blocks = blocks.const_data_ptr(),
              .out = const_cast<void*>(out.const_data_ptr()),
              .out_token_stride = out.stride(0),
              .out_head_stride = out.stride(1),
          });
        });
}

}  // namespace moeserve
