"""From hidden states to expert choices: the gate gives logits, the router top-k experts and their weights.

Axes: T tokens, D model width, E logical experts, K top-k.
"""

import torch

from moeserve.layers.linear import Linear
from moeserve.models.parameters import ParameterReader
from moeserve.models.spec import RouterSpec
from moeserve_kernels import topk_routing


class Router:
    """Gate and top-k choice of one layer; whole on every rank, in float32 whatever the model's dtype.

    All tp ranks of a replica compute the same choice from the same hidden states. Low-precision logits would make ties
    out of near ties, and experts out of rounding.
    """

    def __init__(
        self,
        spec: RouterSpec,
        gate: Linear,
        correction_bias_E: torch.Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.gate = gate
        self.correction_bias_E = correction_bias_E

    @staticmethod
    def load(spec: RouterSpec, reader: ParameterReader, prefix: str, device: torch.device) -> "Router":
        """Read the gate named `prefix` (`layers.3.moe.gate`)."""

        def read(name: str) -> torch.Tensor:
            return reader.read(f"{prefix}.{name}", dtype=torch.float32).to(device)

        return Router(
            spec,
            Linear.build(read("weight"), read("bias") if spec.gate_bias else None),
            correction_bias_E=read("correction_bias") if spec.correction_bias else None,
        )

    def forward(
        self,
        hidden_TD: torch.Tensor,
        *,
        load_E: torch.Tensor | None = None,
        num_counted_tokens: int | None = None,
        num_real_tokens_1: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (float32) and logical expert ids (int64), both [T, K].

        load_E (int64): the choices of the first num_counted_tokens tokens are added to it. num_real_tokens_1: as in the
        ForwardBatch; what fills up the step chooses expert -1 and is not counted.
        """
        logits_TE = self.gate.forward(hidden_TD.float())
        spec = self.spec
        return topk_routing(
            logits_TE,
            top_k=spec.top_k,
            scoring=spec.scoring,
            renormalize=spec.renormalize,
            scaling_factor=spec.scaling_factor,
            num_groups=spec.num_groups,
            num_selected_groups=spec.num_selected_groups,
            group_score=spec.group_score,
            correction_bias_E=self.correction_bias_E,
            load_E=load_E,
            num_counted_tokens=num_counted_tokens,
            num_real_tokens_1=num_real_tokens_1,
        )
