"""Attention over block tables in plain torch.

Requests with one token (decodes) are computed together, in groups of similar length; the others one by one, in tiles of
queries. Positions that only fill up a group read the request's own last token, so that no request ever touches the
numbers of another.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

MAX_QUERIES_PER_TILE = 128
MAX_SCORES_PER_TILE = 1 << 24
MIN_GROUP_LENGTH_BITS = 7
"""Decodes of less than 2 ** 7 tokens share one group: for those, padding is cheaper than another round of small ops."""
MAX_POSITIONS_PER_GROUP = 1 << 16
"""Bounds the memory of gathered keys and values."""


def paged_attention(
    q_THD: torch.Tensor,
    key_cache_NSGD: torch.Tensor,
    value_cache_NSGV: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_tables_RB: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
    sinks_H: torch.Tensor | None,
    key_scale_NSG: torch.Tensor | None,
    value_scale_NSG: torch.Tensor | None,
) -> torch.Tensor:
    """As the op."""
    num_heads, width = q_THD.shape[1:]
    num_kv_heads = key_cache_NSGD.shape[2]
    starts, seq_lens = query_start_loc.tolist(), seq_lens_R.tolist()
    query_lens = [stop - start for start, stop in pairwise(starts)]
    cache = _Cache(key_cache_NSGD, value_cache_NSGV, key_scale_NSG, value_scale_NSG)
    group_size = num_heads // num_kv_heads
    masking = _Masking(sliding_window, None if sinks_H is None else sinks_H.float().view(num_kv_heads, group_size))
    q_TGQD = q_THD.float().view(len(q_THD), num_kv_heads, group_size, width) * softmax_scale
    out_THV = q_THD.new_empty(len(q_THD), num_heads, value_cache_NSGV.shape[3])
    for request, (start, query_len) in enumerate(zip(starts, query_lens, strict=False)):
        if query_len > 1:
            queries = slice(start, start + query_len)
            out_THV[queries] = _attend_prefill(
                q_TGQD[queries], cache, block_tables_RB[request], seq_lens[request], masking
            ).to(out_THV.dtype)
    for group in _decodes_of_similar_length(query_lens, seq_lens):
        requests = torch.tensor(group, device=q_THD.device)
        tokens = torch.tensor([starts[request] for request in group], device=q_THD.device)
        lens = [seq_lens[request] for request in group]
        out_RHV = _attend_decodes(q_TGQD[tokens], cache, block_tables_RB[requests], lens, masking)
        out_THV[tokens] = out_RHV.to(out_THV.dtype)
    return out_THV


@dataclass(frozen=True, slots=True)
class _Masking:
    """What a query may see, beside causality."""

    window: int | None
    sinks_GQ: torch.Tensor | None


class _Cache:
    """Keys and values by position instead of by block."""

    def __init__(
        self,
        key_cache_NSGD: torch.Tensor,
        value_cache_NSGV: torch.Tensor,
        key_scale_NSG: torch.Tensor | None,
        value_scale_NSG: torch.Tensor | None,
    ) -> None:
        self._block_size = key_cache_NSGD.shape[1]
        self._keys = _Rows(key_cache_NSGD, key_scale_NSG)
        self._values = _Rows(value_cache_NSGV, value_scale_NSG)
        self._value_is_key = value_cache_NSGV.data_ptr() == key_cache_NSGD.data_ptr()
        self.value_width = value_cache_NSGV.shape[3]

    def gather(self, block_tables_RB: torch.Tensor, positions_RL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys [R, G, L, D], values [R, G, L, V]), float32, of the tokens at the positions.

        Where values are part of the keys, the keys stand for both: attention takes equal widths at full speed only.
        """
        blocks_RL = block_tables_RB.gather(1, positions_RL // self._block_size)
        slots_RL = blocks_RL * self._block_size + positions_RL % self._block_size
        keys = self._keys.gather(slots_RL)
        return keys, keys if self._value_is_key else self._values.gather(slots_RL)


class _Rows:
    """The rows of one cache by slot, widened to float32."""

    def __init__(self, cache_NSGD: torch.Tensor, scale_NSG: torch.Tensor | None) -> None:
        self._dtype = cache_NSGD.dtype
        # torch cannot gather float8 everywhere; its bytes it can.
        is_float8 = self._dtype == torch.float8_e4m3fn
        self._rows_CGD = (cache_NSGD.view(torch.uint8) if is_float8 else cache_NSGD).flatten(0, 1)
        self._scale_CG = None if scale_NSG is None else scale_NSG.flatten(0, 1)

    def gather(self, slots_RL: torch.Tensor) -> torch.Tensor:
        """[R, G, L, D]."""
        slots = slots_RL.flatten()
        rows = self._rows_CGD.index_select(0, slots).view(self._dtype).float()
        if self._scale_CG is not None:
            rows = rows * self._scale_CG.index_select(0, slots).unsqueeze(-1)
        return rows.view(*slots_RL.shape, *rows.shape[1:]).transpose(1, 2)


def _decodes_of_similar_length(query_lens: list[int], seq_lens: list[int]) -> list[list[int]]:
    """Requests of one query, in groups of bounded size where the longest is less than twice the shortest."""
    by_bits: dict[int, list[int]] = {}
    for request, query_len in enumerate(query_lens):
        if query_len == 1:
            by_bits.setdefault(max(seq_lens[request].bit_length(), MIN_GROUP_LENGTH_BITS), []).append(request)
    groups = []
    for bits, requests in by_bits.items():
        size = max(1, MAX_POSITIONS_PER_GROUP >> bits)
        groups += [requests[start : start + size] for start in range(0, len(requests), size)]
    return groups


def _attend_decodes(
    q_RGQD: torch.Tensor,
    cache: _Cache,
    block_tables_RB: torch.Tensor,
    seq_lens: list[int],
    masking: _Masking,
) -> torch.Tensor:
    """[R, H, V] of one query a request, which reads at most its last `window` positions."""
    device, window, sinks_GQ = q_RGQD.device, masking.window, masking.sinks_GQ
    length = max(seq_lens) if window is None else min(max(seq_lens), window)
    ends_R1 = torch.tensor(seq_lens, device=device).unsqueeze(1)
    starts_R1 = torch.zeros_like(ends_R1) if window is None else (ends_R1 - window).clamp(min=0)
    positions_RL = starts_R1 + torch.arange(length, device=device)
    keys_RGLD, values_RGLV = cache.gather(block_tables_RB, torch.minimum(positions_RL, ends_R1 - 1))
    # The query heads of a key-value head stand in the place of queries: its keys are read once for all of them.
    visible_R11L = (positions_RL < ends_R1)[:, None, None, :]
    sinks = None if sinks_GQ is None else sinks_GQ.unsqueeze(-1)
    return _attend(q_RGQD, keys_RGLD, values_RGLV, visible_R11L, sinks)[..., : cache.value_width].flatten(1, 2)


def _attend_prefill(
    q_TGQD: torch.Tensor,
    cache: _Cache,
    block_table_B: torch.Tensor,
    seq_len: int,
    masking: _Masking,
) -> torch.Tensor:
    """[T, H, V] of one request; a tile of queries reads only the keys that one of them can see."""
    q_HTD = q_TGQD.flatten(1, 2).transpose(0, 1)
    num_heads, num_queries, _ = q_HTD.shape
    sinks_H11 = None if masking.sinks_GQ is None else masking.sinks_GQ.view(num_heads, 1, 1)
    window = masking.window or seq_len
    first_query = seq_len - num_queries
    first_key = max(0, first_query - window + 1)
    positions_L = torch.arange(first_key, seq_len, device=q_HTD.device)
    keys_1GLD, values_1GLV = cache.gather(block_table_B.unsqueeze(0), positions_L.unsqueeze(0))
    tile = max(1, min(MAX_QUERIES_PER_TILE, MAX_SCORES_PER_TILE // (num_heads * len(positions_L))))
    outputs = []
    for start in range(first_query, seq_len, tile):
        stop = min(start + tile, seq_len)
        keys = slice(max(first_key, start - window + 1) - first_key, stop - first_key)
        distance_tL = torch.arange(start, stop, device=q_HTD.device).unsqueeze(1) - positions_L[keys]
        out_1HtV = _attend(
            q_HTD[None, :, start - first_query : stop - first_query],
            keys_1GLD[:, :, keys],
            values_1GLV[:, :, keys],
            (distance_tL >= 0) & (distance_tL < window),
            sinks_H11,
        )
        outputs.append(out_1HtV.squeeze(0))
    return torch.cat(outputs, dim=1)[..., : cache.value_width].transpose(0, 1)


def _attend(
    q_BHMD: torch.Tensor,
    keys_BGLD: torch.Tensor,
    values_BGLV: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, M, V]; visible broadcasts to [B, H, M, L], sinks to [B, H, M, 1]. Queries are scaled already.

    A sink is the score of one more key, whose value is zero.
    """
    mask = visible
    if sinks is not None:
        keys_BGLD, values_BGLV = (functional.pad(x, (0, 0, 0, 1)) for x in (keys_BGLD, values_BGLV))
        shape = q_BHMD.shape[:3]
        scores = torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, -torch.inf)
        mask = torch.cat([scores.expand(*shape, -1), sinks.expand(*shape, 1)], dim=-1)
    return functional.scaled_dot_product_attention(
        q_BHMD, keys_BGLD, values_BGLV, attn_mask=mask, scale=1.0, enable_gqa=True
    )
