"""Rotary embeddings in `config.json`: `rope_scaling` beside `rope_theta`, or `rope_parameters`, also by layer type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import RopeSpec

_LAYER_TYPES = ("full_attention", "sliding_attention")
_DEFAULTS: Mapping[str, Any] = {
    "rope_type": "default",
    "partial_rotary_factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "mscale": 0.0,
    "mscale_all_dim": 0.0,
}


@dataclass(frozen=True, slots=True)
class RopeReading:
    """The embedding, and what a yarn variant multiplies attention logits by (DeepSeek's `mscale_all_dim`)."""

    rope: RopeSpec
    logit_factor: float


def read_rope(
    config: RawConfig, *, rotary_dim: int, layer_type: str = "full_attention", interleaved: bool = False
) -> RopeReading:
    """The rope of the layers of `layer_type`; `rope_theta`'s default is the family's.

    Raises ConfigError for a kind of scaling that is not served, and for a rotation of a part of the head.
    """
    section = _section(config, layer_type)
    kind = _kind(section)
    theta = section.number("rope_theta") if "rope_theta" in section else config.number("rope_theta")
    if section.number("partial_rotary_factor") != 1.0:
        raise section.refuse("partial_rotary_factor", "1")
    plain = RopeSpec(theta=theta, rotary_dim=rotary_dim, interleaved=interleaved)
    if kind == "none":
        return RopeReading(plain, logit_factor=1.0)
    original = _original_length(config, section)
    factor = _factor(config, section, kind, original)
    rope = RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=kind,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(section, factor) if kind == "yarn" else 1.0,
        beta_fast=section.number("beta_fast"),
        beta_slow=section.number("beta_slow"),
        truncate=section.flag("truncate"),
        low_freq_factor=section.number("low_freq_factor") if kind == "llama3" else plain.low_freq_factor,
        high_freq_factor=section.number("high_freq_factor") if kind == "llama3" else plain.high_freq_factor,
    )
    return RopeReading(rope, logit_factor=_mscale(factor, section.number("mscale_all_dim")) ** 2)


def _section(config: RawConfig, layer_type: str) -> RawConfig:
    """The parameters of one layer type; the older key wins where both are there, as in transformers."""
    key = "rope_scaling" if "rope_scaling" in config else "rope_parameters"
    section = config.section(key)
    if any(name in section for name in _LAYER_TYPES):
        if layer_type not in section:
            raise section.refuse(layer_type, "the rope parameters of the layers of this type")
        section = section.section(layer_type)
    return section.with_defaults(_DEFAULTS, {"type": "rope_type"})


def _kind(section: RawConfig) -> Literal["none", "linear", "yarn", "llama3"]:
    match section.text("rope_type"):
        case "default":
            return "none"
        case "linear":
            return "linear"
        case "yarn":
            return "yarn"
        case "llama3":
            return "llama3"
    raise section.refuse("rope_type", "'default', 'linear', 'yarn' or 'llama3'")


def _original_length(config: RawConfig, section: RawConfig) -> int:
    key = "original_max_position_embeddings"
    return section.whole(key) if key in section else config.whole("max_position_embeddings")


def _factor(config: RawConfig, section: RawConfig, kind: str, original: int) -> float:
    if "factor" not in section and kind == "yarn":
        return config.whole("max_position_embeddings") / original
    return section.number("factor")


def _attention_factor(section: RawConfig, factor: float) -> float:
    """What cosines and sines are multiplied by: given, or from DeepSeek's two mscales, or yarn's own 0.1 ln(s) + 1."""
    if "attention_factor" in section:
        return section.number("attention_factor")
    mscale, all_dims = section.number("mscale"), section.number("mscale_all_dim")
    if mscale and all_dims:
        return _mscale(factor, mscale) / _mscale(factor, all_dims)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
