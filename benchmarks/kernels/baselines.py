"""What torch offers for the same work: grouped products for experts, dense attention for the paged one."""

from typing import Any

import torch
from torch.nn import functional

from benchmarks.kernels.timing import Call

_GROUPED_MM: Any = getattr(functional, "grouped_mm", None) or torch._grouped_mm


def grouped_mm_moe(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    gate_up_proj_p2FD: torch.Tensor,
    down_proj_pDF: torch.Tensor,
) -> torch.Tensor:
    """The experts with `torch.nn.functional.grouped_mm`: sort, two grouped products, weighted sum."""
    num_experts, top_k = len(down_proj_pDF), expert_ids_TK.shape[1]
    ids_R = expert_ids_TK.flatten()
    order_R = ids_R.argsort()
    ends_p = torch.bincount(ids_R, minlength=num_experts).cumsum(0).to(torch.int32)
    tokens_R = order_R // top_k
    gate_up = _GROUPED_MM(hidden_TD[tokens_R], gate_up_proj_p2FD.transpose(1, 2), offs=ends_p)
    gate, up = gate_up.chunk(2, dim=1)
    rows_RD = _GROUPED_MM(functional.silu(gate) * up, down_proj_pDF.transpose(1, 2), offs=ends_p)
    weighted_RD = rows_RD.float() * weights_TK.flatten()[order_R].unsqueeze(1)
    out_TD = torch.zeros(hidden_TD.shape, dtype=torch.float32, device=hidden_TD.device)
    return out_TD.index_add_(0, tokens_R, weighted_RD).to(hidden_TD.dtype)


def sdpa(q_THD: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, tables_RB: torch.Tensor) -> Call:
    """Attention over keys and values that lie in one piece already: no block tables, every request equally long."""
    num_requests = len(tables_RB)
    queries = q_THD.unflatten(0, (num_requests, -1)).transpose(1, 2).contiguous()
    keys, values = (cache[tables_RB].flatten(1, 2).transpose(1, 2).contiguous() for cache in (key_cache, value_cache))
    is_prefill = queries.shape[2] > 1
    return lambda: functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_prefill, enable_gqa=True)
