"""Rope frequencies and angles: transformers is the oracle."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moeserve.layers.rope import RotaryEmbedding, rope_frequencies
from moeserve.models.spec import RopeSpec

CASES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 4096},
    "yarn not truncated": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn own range": {
        "factor": 8.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "beta_slow": 2.0,
    },
    "yarn range of no width": {"factor": 4.0, "original_max_position_embeddings": 4, "beta_fast": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("theta", [10_000.0, 150_000.0])
def test_scaled_frequencies(case: str, head_dim: int, theta: float) -> None:
    scaling, settings = case.split(maxsplit=1)[0], CASES[case]
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_type": scaling, "rope_theta": theta, **settings},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[scaling](config, "cpu")
    spec = RopeSpec(theta=theta, rotary_dim=head_dim, scaling=scaling, **settings)
    torch.testing.assert_close(rope_frequencies(spec), expected, rtol=1e-6, atol=0)


def test_plain_frequencies() -> None:
    expected = torch.tensor([1.0, 10.0**-1, 10.0**-2, 10.0**-3])
    torch.testing.assert_close(rope_frequencies(RopeSpec(theta=10_000.0, rotary_dim=8)), expected)


def test_angles_of_far_positions_and_the_attention_factor() -> None:
    spec = RopeSpec(theta=10_000.0, rotary_dim=64, attention_factor=1.25)
    rope = RotaryEmbedding.build(spec, torch.device("cpu"))
    positions = torch.tensor([0, 1, 131_071])
    cos, sin = rope.angles(positions)
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.square() + sin.square(), torch.full((3, 32), 1.25**2))
    torch.testing.assert_close(cos[0], torch.full((32,), 1.25))
    torch.testing.assert_close(sin, 1.25 * (positions.float().unsqueeze(1) * rope.frequencies_R).sin())
