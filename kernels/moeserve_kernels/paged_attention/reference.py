"""Oracle of paged_attention: one query and one head at a time, in float64."""

import torch


def paged_attention_reference(
    q_THD: torch.Tensor,
    key_cache_NSGD: torch.Tensor,
    value_cache_NSGV: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_tables_RB: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    key_scale_NSG: torch.Tensor | None = None,
    value_scale_NSG: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_attention`, float64."""
    num_tokens, num_heads, _ = q_THD.shape
    block_size, num_kv_heads, value_width = value_cache_NSGV.shape[1:]
    key_cache_NSGD = _dequantize(key_cache_NSGD, key_scale_NSG)
    value_cache_NSGV = _dequantize(value_cache_NSGV, value_scale_NSG)
    out = torch.zeros(num_tokens, num_heads, value_width, dtype=torch.float64)
    query_lens = query_start_loc.diff().tolist()
    token = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens_R.tolist(), strict=True)):
        for position in range(seq_len - query_len, seq_len):
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            visible = range(first, position + 1)
            places = [(int(block_tables_RB[request, p // block_size]), p % block_size) for p in visible]
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                keys = torch.stack([key_cache_NSGD[block, offset, kv_head] for block, offset in places])
                values = torch.stack([value_cache_NSGV[block, offset, kv_head] for block, offset in places])
                powers = torch.exp(keys @ q_THD[token, head].double() * softmax_scale)
                total = powers.sum() if sinks_H is None else powers.sum() + torch.exp(sinks_H[head].double())
                out[token, head] = (powers / total) @ values
            token += 1
    return out


def _dequantize(cache_NSGD: torch.Tensor, scale_NSG: torch.Tensor | None) -> torch.Tensor:
    wide = cache_NSGD.double()
    return wide if scale_NSG is None else wide * scale_NSG.double().unsqueeze(-1)
