"""Weights in the blocks of the native tile product (`tile_product.h`), made from and back to [out, in].

A block is [steps, columns, group]: for each step of `group` inputs, the weights of `columns` outputs.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

_INTEGER_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The blocks of one pair of types on this machine; what outputs and inputs lack to whole blocks is zero."""

    group: int
    column_order: tuple[int, ...]
    """The output at each position of a step."""
    sign_magnitude: bool
    """Whether int8 weights are kept as sign and magnitude."""

    @staticmethod
    def of(dtype: torch.dtype, weight_dtype: torch.dtype) -> "BlockLayout":
        """For inputs of `dtype`; the native kernels are loaded."""
        group, order, sign_magnitude = torch.ops.moeserve.tile_layout(dtype, weight_dtype)
        return BlockLayout(group=group, column_order=tuple(order), sign_magnitude=sign_magnitude)

    @property
    def columns(self) -> int:
        return len(self.column_order)

    def num_blocks(self, num_outputs: int) -> int:
        return -(-num_outputs // self.columns)

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int, int, int]:
        """[blocks, steps, columns, group] of a weight."""
        return self.num_blocks(num_outputs), -(-num_inputs // self.group), self.columns, self.group

    def pack(self, weight_FD: torch.Tensor, out: torch.Tensor) -> None:
        """Write a weight to `out`, which has its `shape` and may be a view of something larger."""
        num_blocks, steps, columns, group = self.shape(*weight_FD.shape)
        if out.numel() == 0:
            return
        missing = (0, steps * group - weight_FD.shape[1], 0, num_blocks * columns - weight_FD.shape[0])
        padded = functional.pad(weight_FD, missing) if any(missing) else weight_FD.contiguous()
        if self.sign_magnitude:
            padded = torch.where(padded < 0, -padded | -128, padded)
        words = _as_words(padded, group).view(num_blocks, columns, steps)
        if not self._is_ordered:
            words = words[:, list(self.column_order)]
        _as_words(out, group).squeeze(-1).copy_(words.transpose(1, 2))

    def unpack(self, blocks: torch.Tensor, num_outputs: int, num_inputs: int) -> torch.Tensor:
        """The weight [out, in] that was packed into `blocks`, to the bit."""
        num_blocks, steps, columns, group = blocks.shape
        if blocks.numel() == 0:
            return blocks.new_empty(num_outputs, num_inputs)
        words = torch.empty(num_blocks, columns, steps, dtype=_INTEGER_OF[group * blocks.element_size()])
        packed = _as_words(blocks, group).squeeze(-1).transpose(1, 2)
        if self._is_ordered:
            words.copy_(packed)
        else:
            words[:, list(self.column_order)] = packed
        weight = words.view(blocks.dtype).view(num_blocks * columns, steps * group)[:num_outputs, :num_inputs]
        if self.sign_magnitude:
            weight = torch.where(weight < 0, -(weight & 127), weight)
        return weight.contiguous()

    def pad(self, values_F: torch.Tensor) -> torch.Tensor:
        """A float32 of each output, zeros up to whole blocks: scales and biases."""
        missing = self.num_blocks(len(values_F)) * self.columns - len(values_F)
        return functional.pad(values_F.float(), (0, missing))

    @property
    def _is_ordered(self) -> bool:
        return self.column_order == tuple(range(self.columns))


def _as_words(x: torch.Tensor, group: int) -> torch.Tensor:
    """The `group` numbers of a step as one integer: they move together."""
    return x.view(_INTEGER_OF[group * x.element_size()])
