"""What a model family is: how its config is read and what it calls its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moeserve.models.raw_config import RawConfig
from moeserve.models.spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """A family's names for the canonical tensors of a layer."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Start of a canonical name in the layer to its start in the checkpoint, beyond those all families share."""
    moe_blocks: tuple[str, ...] = ("mlp",)
    """The module a layer's MoE is in; where there are several, whichever the checkpoint has, else the first."""
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down of a single expert, where each expert has tensors of its own."""
    interleaved_experts: bool = False
    """All experts in one tensor, as [E, D, 2F] whose columns alternate gate and up (gpt-oss)."""
    has_draft_layers: bool = False
    """Published checkpoints have layers behind the last one that predict further tokens; they are not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of Hugging Face's."""

    names: CheckpointNames
    defaults: Mapping[str, Any]
    """Of `config.json`, as transformers has them."""
    read_layers: Callable[[RawConfig], tuple[LayerSpec, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a key in `config.json` to its main one."""
