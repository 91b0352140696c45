"""RMS norm with its weight."""

from dataclasses import dataclass

import torch

from moeserve.models.parameters import ParameterReader
from moeserve_kernels import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Norm over the last dimension."""

    weight: torch.Tensor
    eps: float

    @staticmethod
    def build(reader: ParameterReader, name: str, eps: float, device: torch.device) -> "RmsNorm":
        """Read `name.weight`."""
        return RmsNorm(reader.read(f"{name}.weight").to(device), eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """norm(x)."""
        return rms_norm(x, self.weight, self.eps)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return rms_norm(x, self.weight, self.eps, residual)
