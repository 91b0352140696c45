"""How the decoder gets its tensors: by canonical name and slice, so that each rank reads only what is its own."""

from typing import Protocol

import torch

from moeserve_kernels import Quantization


class ParameterReader(Protocol):
    """Slices of the canonical tensors of `moeserve.models.spec.canonical_shapes`."""

    @property
    def quantization(self) -> Quantization | None:
        """How linear layers and experts keep the weights they read here; None: as they come.

        Embeddings, norms and the router's gate are kept as they come in any case.
        """
        ...

    def read(self, name: str, *index: slice | int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`full[index]` of the canonical tensor, on the CPU, without reading the rest of it where the format allows.

        dtype: of the result; None is the reader's default (the model's compute dtype).
        """
        ...


class DictReader:
    """Parameters that are already in memory, by canonical name (tests, LLM objects of one's own)."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        dtype: torch.dtype = torch.float32,
        *,
        quantization: Quantization | None = None,
    ) -> None:
        self.quantization = quantization
        self._tensors = tensors
        self._dtype = dtype

    def read(self, name: str, *index: slice | int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._tensors[name][index].to(dtype or self._dtype).clone()
