"""Checkpoints with no parameter at its initial value, and the transformers model they hold: the oracle of a loader.

Biases, norms, sinks and correction biases start as zeros or ones; a test of untouched ones cannot tell them apart.
"""

import math
import re
from typing import Any

import torch


def random_hf_model(config: Any, *, seed: int = 0) -> Any:
    """A transformers causal LM of `config` in float32, every parameter and saved buffer drawn anew.

    The scales keep hidden states near 1, routing decisive and the best logits apart.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(_scaled(name, noise))
    return model


def _scaled(name: str, noise: torch.Tensor) -> torch.Tensor:
    if re.search(r"norm\.weight$", name):
        return 1.0 + 0.3 * noise
    if re.search(r"bias$|sinks$|embed_tokens", name):
        return 0.5 * noise
    # The expert tensors of gpt-oss are [E, in, out], all other matrices [..., out, in]: take the larger of both.
    return noise * math.sqrt(2.0 / max(noise.shape[-2:]))
