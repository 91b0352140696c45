"""Oracle of attention_inputs: those of the norm and of the rotation, one after the other."""

import torch

from moeserve_kernels.rms_norm.reference import rms_norm_reference
from moeserve_kernels.rotary.reference import rotary_reference


def attention_inputs_reference(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    *,
    interleaved: bool,
    norm_weights: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries, keys as the cache gets them), float64; values are written as they are."""

    def prepare(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = rms_norm_reference(x.flatten(0, 1), weight, eps).view(x.shape)
        return rotary_reference(x, *angles, interleaved)

    return prepare(q_THD, norm_weights[0]), prepare(k_TGD, norm_weights[1])
