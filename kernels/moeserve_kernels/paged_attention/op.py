"""Attention of the tokens of a step over block tables: prefill, chunked prefill and decode in one batch."""

from typing import Any

import torch

from moeserve_kernels.backend import Backend, choose_backend
from moeserve_kernels.kv_cache_write.quantize import LARGEST
from moeserve_kernels.native import is_loaded
from moeserve_kernels.paged_attention import torch_impl


def paged_attention(
    q_THD: torch.Tensor,
    key_cache_NSGD: torch.Tensor,
    value_cache_NSGV: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_tables_RB: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    softmax_scale: float,
    sliding_window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    key_scale_NSG: torch.Tensor | None = None,
    value_scale_NSG: torch.Tensor | None = None,
    backend: Backend | None = None,
) -> torch.Tensor:
    """Returns [T, H, V] in q's dtype, computed in float32 (products of bfloat16 where q and cache are).

    The queries of request r are rows query_start_loc[r] to query_start_loc[r + 1] of q, the last of its seq_lens[r]
    tokens, whose keys and values are in the cache already. query_start_loc, seq_lens_R and block_tables_RB are int64;
    max_query_len and max_seq_len, the largest of each, are for backends that must know them on the host.

    Query head h reads key-value head h // (H / G). A token sees itself and everything before it, or with a sliding
    window itself and the sliding_window - 1 tokens before it. sinks_H: one more logit per head, which carries no value.
    value_cache_NSGV may be a view of the first columns of the key cache (latents). Caches of int8 or float8 come with
    the scales that kv_cache_write stored.
    """
    num_heads, width = q_THD.shape[1:]
    num_requests = len(seq_lens_R)
    assert query_start_loc.shape == (num_requests + 1,)
    assert len(block_tables_RB) == num_requests
    assert key_cache_NSGD.shape[3] == width
    assert num_heads % key_cache_NSGD.shape[2] == 0
    assert value_cache_NSGV.shape[:3] == key_cache_NSGD.shape[:3]
    assert value_cache_NSGV.dtype == key_cache_NSGD.dtype
    assert (key_scale_NSG is not None) == (value_scale_NSG is not None) == (key_cache_NSGD.dtype in LARGEST)
    assert 0 <= max_query_len <= max_seq_len
    chosen = choose_backend(q_THD.device, backend, has_native=is_loaded())
    options: dict[str, Any] = {
        "query_start_loc": query_start_loc,
        "seq_lens_R": seq_lens_R,
        "block_tables_RB": block_tables_RB,
        "softmax_scale": softmax_scale,
        "sliding_window": sliding_window,
        "sinks_H": sinks_H,
        "key_scale_NSG": key_scale_NSG,
        "value_scale_NSG": value_scale_NSG,
    }
    if chosen == "cpu":
        return torch.ops.moeserve.paged_attention.default(q_THD, key_cache_NSGD, value_cache_NSGV, *options.values())
    if chosen == "triton":
        from moeserve_kernels.paged_attention import triton as triton_impl

        options |= {"max_query_len": max_query_len, "max_seq_len": max_seq_len}
        return triton_impl.paged_attention(q_THD, key_cache_NSGD, value_cache_NSGV, **options)
    return torch_impl.paged_attention(q_THD, key_cache_NSGD, value_cache_NSGV, **options)
