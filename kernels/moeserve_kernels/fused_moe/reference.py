"""Oracle of fused_moe: one token and one choice at a time, in float64."""

import torch


def fused_moe_reference(
    hidden_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    gate_up_proj_p2FD: torch.Tensor,
    down_proj_pDF: torch.Tensor,
    *,
    activation: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    gate_up_bias_p2F: torch.Tensor | None = None,
    down_bias_pD: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `fused_moe`, float64."""
    out = torch.zeros_like(hidden_TD, dtype=torch.float64)
    width = down_proj_pDF.shape[2]
    for token, experts in enumerate(expert_ids_TK.tolist()):
        for choice, expert in enumerate(experts):
            if expert < 0:
                continue
            gate_up = gate_up_proj_p2FD[expert].double() @ hidden_TD[token].double()
            if gate_up_bias_p2F is not None:
                gate_up += gate_up_bias_p2F[expert].double()
            gate, up = gate_up[:width], gate_up[width:]
            if activation == "silu":
                inner = gate / (1 + torch.exp(-gate)) * up
            else:
                gate, up = torch.clamp(gate, max=limit), torch.clamp(up, -limit, limit)
                inner = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
            result = down_proj_pDF[expert].double() @ inner
            if down_bias_pD is not None:
                result += down_bias_pD[expert].double()
            out[token] += weights_TK[token, choice].double() * result
    return out
