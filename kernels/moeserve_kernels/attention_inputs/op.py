"""Queries and keys normalised and rotated, keys and values written to the KV cache: one pass where that is native."""

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.kv_cache_write import kv_cache_write
from moeserve_kernels.native import is_loaded
from moeserve_kernels.rms_norm import rms_norm
from moeserve_kernels.rotary import rotary


def attention_inputs(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    *,
    cos_TR: torch.Tensor,
    sin_TR: torch.Tensor,
    interleaved: bool,
    slot_mapping_T: torch.Tensor,
    key_cache_NSGD: torch.Tensor,
    value_cache_NSGD: torch.Tensor,
    key_scale_NSG: torch.Tensor | None = None,
    value_scale_NSG: torch.Tensor | None = None,
    q_norm_weight_D: torch.Tensor | None = None,
    k_norm_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
    backend: Backend | None = None,
) -> torch.Tensor:
    """The queries [T, H, D] that attention takes; the cache holds the keys and values of the tokens afterwards.

    The same as `rms_norm` of every head of q and k (where it has a weight), `rotary` of both and `kv_cache_write` of
    keys and values, whose arguments these are; cpu rounds once, at the end. q, k and v may be views of one projection
    in which a head lies in one piece.
    """
    assert k_TGD.shape == v_TGD.shape
    chosen = choose_backend(q_THD.device, backend, has_native=is_loaded())
    if chosen == "cpu":
        return torch.ops.moeserve.attention_inputs.default(
            q_THD,
            k_TGD,
            v_TGD,
            cos_TR,
            sin_TR,
            interleaved,
            slot_mapping_T,
            key_cache_NSGD,
            value_cache_NSGD,
            key_scale_NSG,
            value_scale_NSG,
            q_norm_weight_D,
            k_norm_weight_D,
            eps,
        )
    if q_norm_weight_D is not None:
        q_THD = rms_norm(q_THD, q_norm_weight_D, eps, backend=chosen)
    if k_norm_weight_D is not None:
        k_TGD = rms_norm(k_TGD, k_norm_weight_D, eps, backend=chosen)
    k_TGD = rotary(k_TGD, cos_TR, sin_TR, interleaved, backend=chosen)
    kv_cache_write(k_TGD, key_cache_NSGD, slot_mapping_T, key_scale_NSG, backend=chosen)
    kv_cache_write(v_TGD, value_cache_NSGD, slot_mapping_T, value_scale_NSG, backend=chosen)
    return rotary(q_THD, cos_TR, sin_TR, interleaved, backend=chosen)
