"""Slices of a checkpoint's tensors under their canonical names, from memory-mapped files.

Nothing but the pages of the slices asked for is read; quantised tensors are decoded for those slices alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from moeserve.models.dequantize import as_slice, dequantize_fp8, dequantize_mxfp4
from moeserve.models.quantization import FP8_DTYPE, QuantizationConfig
from moeserve.models.safetensors_header import CheckpointError, TensorInfo
from moeserve.models.tensor_sources import StoredTensor, TensorSource
from moeserve_kernels import Quantization


class CheckpointReader:
    """A ParameterReader over a checked checkpoint; make it with `open_checkpoint`."""

    def __init__(
        self,
        sources: Mapping[str, TensorSource],
        stored: Mapping[str, TensorInfo],
        stored_quantization: QuantizationConfig,
        dtype: torch.dtype,
        quantization: Quantization | None,
    ) -> None:
        self.quantization = quantization
        self._sources = sources
        self._stored = stored
        self._stored_quantization = stored_quantization
        self._dtype = dtype
        self._files: dict[Path, Any] = {}

    def read(self, name: str, *index: slice | int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`full[index]` of the canonical tensor, contiguous and in memory of its own; slices go forward."""
        source = self._sources[name]
        assert len(index) <= len(source.shape), f"{name} has {len(source.shape)} axes, got {len(index)} indices"
        full = (*index, *(slice(None),) * (len(source.shape) - len(index)))
        ranges = tuple(_as_range(item, size) for item, size in zip(full, source.shape, strict=True))
        result = torch.empty([len(axis) for axis in ranges], dtype=dtype or self._dtype)
        for copy in source.copies(ranges):
            part = self._decode(copy.stored, copy.ranges)
            result[copy.into].copy_(part.transpose(-1, -2) if copy.transposed else part)
        return result[tuple(0 if isinstance(item, int) else slice(None) for item in full)]

    def _decode(self, tensor: StoredTensor, ranges: tuple[range, ...]) -> torch.Tensor:
        if tensor.encoding == "mxfp4":
            return dequantize_mxfp4(self._view(f"{tensor.name}_blocks"), self._view(f"{tensor.name}_scales"), ranges)
        weight = self._view(tensor.name)
        if self._stored[tensor.name].dtype == FP8_DTYPE:
            scale_inv = self._view(f"{tensor.name}_scale_inv")
            return dequantize_fp8(weight, scale_inv, ranges, self._stored_quantization.fp8_block)
        return weight[tuple(map(as_slice, ranges))]

    def _view(self, name: str) -> torch.Tensor:
        """The whole stored tensor as a view of the mapped file: no bytes are read before they are used."""
        path = self._stored[name].file
        if path not in self._files:
            self._files[path] = _map_file(path)
        tensor: torch.Tensor = self._files[path].get_tensor(name)
        return tensor


def _map_file(path: Path) -> Any:
    """Raises CheckpointError where the file has gone, or is too large to be mapped here."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _as_range(item: slice | int, size: int) -> range:
    if isinstance(item, int):
        assert -size <= item < size, f"index {item} is out of range for an axis of {size}"
        return range(item % size, item % size + 1)
    indices = range(*item.indices(size))
    assert indices.step > 0, f"slices go forward, got {item}"
    return indices
