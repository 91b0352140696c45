"""Triton sampling: the token that the oracle's noise and filters give, seed by seed, over several tiles."""

from typing import Any

import pytest
import torch

from moeserve_kernels.sampling.reference import gumbel_reference, kept_tokens_reference
from moeserve_kernels.sampling.triton import sample

TUNING = {"any": {"BLOCK_V": 8, "BLOCK_SEARCH": 16}}
VOCAB = 19
NUM_ROWS = 6
FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 30.0},
    "top_k": {"top_k": 5, "temperature": 9.0},
    "top_k_of_one": {"top_k": 1},
    "top_k_of_more_than_the_vocabulary": {"top_k": VOCAB + 1},
    "top_p": {"top_p": 0.7, "temperature": 2.0},
    "top_p_of_nothing": {"top_p": 0.0},
    "min_p": {"min_p": 0.2},
    "all": {"top_k": 9, "top_p": 0.8, "min_p": 0.15, "temperature": 1.7},
}


def _logits(kind: str) -> torch.Tensor:
    """smooth: no two alike. steps: many ties, zeros of both signs. forbidden: most tokens at -inf."""
    values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)) * 1.5
    if kind == "steps":
        return torch.where(torch.arange(VOCAB) % 2 == 0, values.round(), -(-values).round()) + 0.0 * values.sign()
    return values if kind == "smooth" else values.masked_fill(torch.arange(VOCAB) % 6 > 0, -torch.inf)


def _settings(device: torch.device, num_rows: int = NUM_ROWS, **given: float) -> dict[str, torch.Tensor]:
    return {
        "temperature_R": torch.full((num_rows,), given.get("temperature", 1.0), device=device),
        "top_k_R": torch.full((num_rows,), int(given.get("top_k", 0)), device=device),
        "top_p_R": torch.full((num_rows,), given.get("top_p", 1.0), device=device),
        "min_p_R": torch.full((num_rows,), given.get("min_p", 0.0), device=device),
        "seed_R": torch.arange(num_rows, device=device) * 2**40 - 7,
        "position_R": torch.arange(num_rows, device=device) % 5,
    }


def _expected(logits: torch.Tensor, settings: dict[str, torch.Tensor], row: int) -> int:
    scaled = (logits / settings["temperature_R"][row].cpu()).tolist()
    kept = kept_tokens_reference(
        scaled,
        top_k=int(settings["top_k_R"][row]),
        top_p=float(settings["top_p_R"][row]),
        min_p=float(settings["min_p_R"][row]),
    )
    seed, position = int(settings["seed_R"][row]), int(settings["position_R"][row])
    return max(sorted(kept), key=lambda token: scaled[token] + gumbel_reference(seed, position, token))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("kind", ["smooth", "steps", "forbidden"])
def test_against_reference(kind: str, filters: str, triton_device: torch.device) -> None:
    logits = _logits(kind)
    settings = _settings(triton_device, **FILTERS[filters])
    drawn = sample(logits.to(triton_device).expand(NUM_ROWS, VOCAB), **settings, tuning=TUNING)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == [_expected(logits, settings, row) for row in range(NUM_ROWS)]


@pytest.mark.parametrize("kind", ["smooth", "steps", "forbidden"])
def test_greedy_takes_the_lowest_of_the_best(kind: str, triton_device: torch.device) -> None:
    logits = _logits(kind).repeat(2, 1)
    best = logits[0].max()
    logits[1, [5, 9, 18]] = best  # in three tiles
    drawn = sample(logits.to(triton_device), **_settings(triton_device, 2, temperature=0.0), tuning=TUNING)
    assert drawn.tolist() == [row.tolist().index(best) for row in logits]


def test_greedy_and_filtered_rows_share_a_batch(triton_device: torch.device) -> None:
    """Every row has the token it has alone, and alone is a view of a wider tensor."""
    logits = torch.randn(len(FILTERS), VOCAB + 3, generator=torch.Generator().manual_seed(0)).to(triton_device)
    rows = [_settings(triton_device, 1, **given) for given in FILTERS.values()]
    rows[3]["temperature_R"] = torch.zeros(1, device=triton_device)
    settings = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    together = sample(logits[:, 2:-1], **settings, tuning=TUNING)
    alone = [sample(logits[i : i + 1, 2:-1], **row, tuning=TUNING) for i, row in enumerate(rows)]
    assert together.tolist() == [int(token) for token in alone]


def test_of_tokens_equal_at_the_edge_the_lower_ids_stay(triton_device: torch.device) -> None:
    """All logits equal: top_k of 18 leaves the ids 0 to 17, the last ones in another tile, top_p the first three."""
    logits = torch.zeros(VOCAB, device=triton_device).expand(20, VOCAB)
    settings = _settings(triton_device, 20, top_k=18, top_p=2.5 / 18)
    assert set(sample(logits, **settings, tuning=TUNING).tolist()) == {0, 1, 2}


def test_no_rows_and_no_numbers(triton_device: torch.device) -> None:
    logits = torch.full((2, VOCAB), torch.nan, device=triton_device)
    assert sample(logits[:0], **_settings(triton_device, 0), tuning=TUNING).shape == (0,)
    assert sample(logits, **_settings(triton_device, 2), tuning=TUNING).tolist() == [0, 0]
