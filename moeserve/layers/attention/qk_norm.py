"""RMS norms of queries and keys before rope: of every head alone, or of all heads of all ranks together."""

from dataclasses import dataclass

import torch

from moeserve.layers.attention.kv_cache import local_num_kv_heads
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import GqaSpec
from moeserve.parallel import Group, ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """One norm for every query head, one for every key head (Qwen3); `attention_inputs` computes them."""

    q_weight_D: torch.Tensor
    k_weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FullNorms:
    """One norm over all query heads, one over all key heads (OLMoE); each rank holds some of the heads."""

    q_weight_HD: torch.Tensor
    k_weight_GD: torch.Tensor
    q_width: int
    """Of all heads of all ranks."""
    k_width: int
    num_k_copies: int
    """How many ranks hold the same key head."""
    eps: float
    group: Group

    def forward(self, q_THD: torch.Tensor, k_TGD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, normalised; one all-reduce of their mean squares."""
        q_wide, k_wide = q_THD.float(), k_TGD.float()
        q_mean_T = q_wide.square().sum(dim=(1, 2)) / self.q_width
        k_mean_T = k_wide.square().sum(dim=(1, 2)) / (self.k_width * self.num_k_copies)
        means_2T = self.group.all_reduce(torch.stack([q_mean_T, k_mean_T]))
        q_scale_T11, k_scale_T11 = torch.rsqrt(means_2T + self.eps)[:, :, None, None]
        q_out = q_wide * q_scale_T11 * self.q_weight_HD.float()
        return q_out.to(q_THD.dtype), (k_wide * k_scale_T11 * self.k_weight_GD.float()).to(k_TGD.dtype)


def build_qk_norm(
    spec: GqaSpec,
    eps: float,
    prefix: str,
    heads: tuple[slice, slice],
    *,
    reader: ParameterReader,
    parallel: ParallelContext,
) -> HeadNorms | FullNorms | None:
    """The norms of a layer, for this rank's `heads` of queries and of keys."""
    if spec.qk_norm == "none":
        return None
    names = (f"{prefix}.q_norm", f"{prefix}.k_norm")
    if spec.qk_norm == "head":
        q_weight, k_weight = (reader.read(f"{name}.weight").to(parallel.device) for name in names)
        return HeadNorms(q_weight_D=q_weight, k_weight_D=k_weight, eps=eps)
    q_weight, k_weight = (
        reader.read(f"{name}.weight", slice(part.start * spec.head_dim, part.stop * spec.head_dim)).to(parallel.device)
        for name, part in zip(names, heads, strict=True)
    )
    return FullNorms(
        q_weight_HD=q_weight.view(-1, spec.head_dim),
        k_weight_GD=k_weight.view(-1, spec.head_dim),
        q_width=spec.num_heads * spec.head_dim,
        k_width=spec.num_kv_heads * spec.head_dim,
        num_k_copies=parallel.tp.size * local_num_kv_heads(spec, parallel.tp.size) // spec.num_kv_heads,
        eps=eps,
        group=parallel.tp,
    )
