"""Rotary position embedding: frequencies of a RopeSpec, and the angles of the positions of a step.

Frequencies are computed in float32 on the CPU, so they are the same on every rank. Cosines and sines are computed once
a step for all its layers rather than looked up: that needs no table for the whole context (tens of megabytes for long
ones).
"""

import math
from dataclasses import dataclass

import torch

from moeserve.models.spec import RopeSpec

Angles = tuple[torch.Tensor, torch.Tensor]
"""(cos_TR, sin_TR) of the tokens of a step, float32, with the attention factor in them."""


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """The angles by which heads of queries and keys are turned; layers with the same spec share one."""

    frequencies_R: torch.Tensor
    """Radians per position of each pair of dimensions, float32."""
    attention_factor: float

    @staticmethod
    def build(spec: RopeSpec, device: torch.device) -> "RotaryEmbedding":
        """The embedding of a spec, with its scaling applied."""
        return RotaryEmbedding(rope_frequencies(spec).to(device), spec.attention_factor)

    def angles(self, positions_T: torch.Tensor) -> Angles:
        """The angles of the tokens at the positions."""
        angles_TR = positions_T.float().unsqueeze(1) * self.frequencies_R
        return angles_TR.cos() * self.attention_factor, angles_TR.sin() * self.attention_factor


def rope_frequencies(spec: RopeSpec) -> torch.Tensor:
    """[rotary_dim / 2], float32, one scaling or none applied."""
    exponents_R = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies_R = 1.0 / spec.theta**exponents_R
    if spec.scaling == "linear":
        return frequencies_R / spec.factor
    if spec.scaling == "yarn":
        return _yarn(spec, frequencies_R)
    if spec.scaling == "llama3":
        return _llama3(spec, frequencies_R)
    return frequencies_R


def _yarn(spec: RopeSpec, frequencies_R: torch.Tensor) -> torch.Tensor:
    """Slow pairs are interpolated, fast ones stay, a ramp lies between (arXiv 2309.00071, section 3.2)."""
    low, high = _pair_of_rotations(spec, spec.beta_fast), _pair_of_rotations(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp_R = ((torch.arange(spec.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return frequencies_R / spec.factor * ramp_R + frequencies_R * (1.0 - ramp_R)


def _pair_of_rotations(spec: RopeSpec, num_rotations: float) -> float:
    """The (fractional) pair of dimensions that turns this often over the original context."""
    wavelength_ratio = spec.original_max_position_embeddings / (num_rotations * 2.0 * math.pi)
    return spec.rotary_dim * math.log(wavelength_ratio) / (2.0 * math.log(spec.theta))


def _llama3(spec: RopeSpec, frequencies_R: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones stay, a ramp in between."""
    rotations_R = spec.original_max_position_embeddings * frequencies_R / (2.0 * math.pi)
    kept_R = ((rotations_R - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies_R / spec.factor * (1.0 - kept_R) + frequencies_R * kept_R
