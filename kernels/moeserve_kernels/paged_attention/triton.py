"""Attention over block tables on GPUs: one launch for prefills, two for decodes, for any mix of both.

No launch waits for the host, and its shape follows from shapes, max_query_len and max_seq_len: a step of decodes
captured in a CUDA graph with the largest max_seq_len serves all shorter ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from moeserve_kernels.paged_attention.triton_decode import decode_kernel, join_chunks_kernel
from moeserve_kernels.paged_attention.triton_prefill import prefill_kernel
from moeserve_kernels.tuning import Config, Tuning, tuning_for

_MAX_WORKSPACE_BYTES = 256 << 20
"""Of the chunks of decodes; more requests than it holds are computed one group after the other."""
_MIN_DOT = 16
"""Tensor cores multiply no narrower matrices."""
_MAX_COMMON_WIDTH = 128


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What all launches of one call have in common."""

    q_THD: torch.Tensor
    key_cache_NSGD: torch.Tensor
    value_cache_NSGV: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables_RB: torch.Tensor
    softmax_scale: float
    sliding_window: int | None
    sinks_H: torch.Tensor | None
    key_scale_NSG: torch.Tensor | None
    value_scale_NSG: torch.Tensor | None
    out_THV: torch.Tensor

    @property
    def value_is_key(self) -> bool:
        """Whether a value is the first columns of its key, a number of them that a tile can be cut at."""
        key, value = self.key_cache_NSGD, self.value_cache_NSGV
        is_view = value.data_ptr() == key.data_ptr() and value.stride() == key.stride()
        return is_view and value.shape[3] == _cut(key.shape[3])[0] >= _MIN_DOT

    @property
    def group_size(self) -> int:
        return self.q_THD.shape[1] // self.key_cache_NSGD.shape[2]

    def tensors(self) -> list[torch.Tensor]:
        """Queries, caches and scales, in the order of the kernels."""
        unused = self.key_cache_NSGD
        scales = (self.key_scale_NSG, self.value_scale_NSG)
        caches = (self.key_cache_NSGD, self.value_cache_NSGV)
        return [self.q_THD, *caches, *(unused if scale is None else scale for scale in scales)]

    def numbers(self) -> dict[str, Any]:
        """Scalars and strides by the names that the kernels give them."""
        key, value, scale = self.key_cache_NSGD, self.value_cache_NSGV, self.key_scale_NSG
        scale_strides = (0, 0, 0) if scale is None else scale.stride()
        return {
            "group_size": self.group_size,
            "window": self.sliding_window or 0,
            "softmax_scale": self.softmax_scale,
            "widths": (key.shape[3], value.shape[3]),
            "q_strides": self.q_THD.stride()[:2],
            "strides": (*key.stride()[:2], *value.stride()[:2], *scale_strides[:2]),
            "head_strides": (key.stride(2), value.stride(2), scale_strides[2]),
            "table_stride": self.block_tables_RB.stride(0),
        }

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments of the kernels, beside the tile sizes."""
        width, value_width = self.key_cache_NSGD.shape[3], self.value_cache_NSGV.shape[3]
        block_d, block_rest = _cut(width)
        block_v = max(triton.next_power_of_2(value_width), _MIN_DOT)
        return {
            "HAS_WINDOW": self.sliding_window is not None,
            "IS_NARROW": self.key_scale_NSG is not None,
            "VALUE_IS_KEY": self.value_is_key,
            "BLOCK_SIZE": self.key_cache_NSGD.shape[1],
            "BLOCK_D": block_d,
            "BLOCK_REST": block_rest,
            "BLOCK_V": block_v,
            "EXACT_D": width >= block_d,
            "EXACT_V": value_width == block_v,
        }


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
    tuning: Tuning | None = None,
) -> torch.Tensor:
    """As the op."""
    num_tokens, num_heads, _ = q_THD.shape
    tuning = tuning or tuning_for("paged_attention", q_THD.device)
    out = torch.empty(num_tokens, num_heads, value_cache_NSGV.shape[3], dtype=q_THD.dtype, device=q_THD.device)
    arguments = _Arguments(
        q_THD if q_THD.stride(2) == 1 else q_THD.contiguous(),
        key_cache_NSGD,
        value_cache_NSGV,
        query_start_loc,
        seq_lens_R,
        block_tables_RB,
        softmax_scale,
        sliding_window,
        sinks_H,
        key_scale_NSG,
        value_scale_NSG,
        out,
    )
    assert key_cache_NSGD.stride(3) == value_cache_NSGV.stride(3) == block_tables_RB.stride(1) == 1
    if num_tokens == 0:
        return out
    shape = _shape_class(arguments)
    if max_query_len > 1:
        _prefill(arguments, tuning[f"prefill/{shape}"])
    if max_query_len == 1 or num_tokens < len(seq_lens_R) * max_query_len:  # else all bring the same number, not one
        _decode(arguments, max_seq_len, tuning[f"decode/{shape}"], tuning["join"])
    return out


def _cut(width: int) -> tuple[int, int]:
    """A width as a power of two and the power of two that holds the rest; both fit tensor cores."""
    main = max(triton.next_power_of_2(width + 1) // 2, _MIN_DOT)
    rest = width - main
    return main, max(triton.next_power_of_2(rest), _MIN_DOT) if rest > 0 else 0


def _shape_class(arguments: _Arguments) -> str:
    if arguments.q_THD.dtype == torch.float32:
        return "float32"
    if max(arguments.key_cache_NSGD.shape[3], arguments.value_cache_NSGV.shape[3]) <= _MAX_COMMON_WIDTH:
        return "half"
    return "half/latent" if arguments.value_is_key else "half/wide"


def _prefill(arguments: _Arguments, config: Config) -> None:
    num_tokens, num_requests = len(arguments.q_THD), len(arguments.seq_lens_R)
    num_kv_heads, group_size = arguments.key_cache_NSGD.shape[2], arguments.group_size
    heads = min(triton.next_power_of_2(group_size), config["BLOCK_M"])
    max_tiles = num_tokens // (config["BLOCK_M"] // heads) + num_requests
    sinks = arguments.sinks_H
    prefill_kernel[(max_tiles, num_kv_heads * triton.cdiv(group_size, heads))](
        *arguments.tensors(),
        sinks=arguments.out_THV if sinks is None else sinks,
        out=arguments.out_THV,
        query_start_loc=arguments.query_start_loc,
        seq_lens=arguments.seq_lens_R,
        block_tables=arguments.block_tables_RB,
        num_requests=num_requests,
        out_strides=arguments.out_THV.stride()[:2],
        HAS_SINKS=sinks is not None,
        HEADS=heads,
        **arguments.numbers(),
        **arguments.constants(),
        **config,
    )


def _decode(arguments: _Arguments, max_seq_len: int, config: Config, join_config: Config) -> None:
    out, sinks = arguments.out_THV, arguments.sinks_H
    num_requests, (_, num_heads, value_width) = len(arguments.seq_lens_R), out.shape
    num_kv_heads, group_size = arguments.key_cache_NSGD.shape[2], arguments.group_size
    block_m = min(config["BLOCK_M"], max(triton.next_power_of_2(group_size), _MIN_DOT))
    num_chunks = triton.cdiv(max_seq_len, config["CHUNK"])
    request_bytes = num_heads * num_chunks * (value_width + 2) * 4
    at_once = min(num_requests, max(1, _MAX_WORKSPACE_BYTES // request_bytes))
    partial = torch.empty(at_once, num_heads, num_chunks, value_width, dtype=torch.float32, device=out.device)
    state = torch.empty(at_once, num_heads, num_chunks, 2, dtype=torch.float32, device=out.device)
    numbers, constants = arguments.numbers(), arguments.constants()
    lengths = {"query_start_loc": arguments.query_start_loc, "seq_lens": arguments.seq_lens_R}
    for first_request in range(0, num_requests, at_once):
        count = min(at_once, num_requests - first_request)
        decode_kernel[(count, num_kv_heads * triton.cdiv(group_size, block_m), num_chunks)](
            *arguments.tensors(),
            partial=partial,
            partial_state=state,
            block_tables=arguments.block_tables_RB,
            first_request=first_request,
            num_heads=num_heads,
            **lengths,
            **numbers,
            **constants,
            **{**config, "BLOCK_M": block_m},
        )
        join_chunks_kernel[(count, num_heads)](
            partial,
            state,
            out if sinks is None else sinks,
            out,
            first_request=first_request,
            num_chunks=num_chunks,
            window=numbers["window"],
            value_width=value_width,
            out_strides=out.stride()[:2],
            HAS_SINKS=sinks is not None,
            HAS_WINDOW=constants["HAS_WINDOW"],
            CHUNK=config["CHUNK"],
            BLOCK_V=constants["BLOCK_V"],
            **lengths,
            **join_config,
        )
