"""Sampling: exact noise, its distribution and independence, filters and penalties against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moeserve_kernels import apply_penalties, filter_logits, gumbel_noise, sample
from moeserve_kernels.sampling.reference import gumbel_reference, kept_tokens_reference, penalties_reference

INT64 = st.integers(-(2**63), 2**63 - 1)


def _sample(logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, **settings: float) -> torch.Tensor:
    num_rows = len(logits)
    return sample(
        logits,
        temperature_R=torch.full((num_rows,), settings.get("temperature", 1.0)),
        top_k_R=torch.full((num_rows,), int(settings.get("top_k", 0))),
        top_p_R=torch.full((num_rows,), settings.get("top_p", 1.0)),
        min_p_R=torch.full((num_rows,), settings.get("min_p", 0.0)),
        seed_R=seeds,
        position_R=positions,
    )


@settings(deadline=None, max_examples=50)
@given(INT64, st.integers(0, 2**40), st.integers(0, 30))
def test_noise_is_the_hash_of_seed_position_and_token(seed: int, position: int, token_id: int) -> None:
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 31)
    assert noise[0, token_id].item() == pytest.approx(gumbel_reference(seed, position, token_id), rel=1e-6, abs=1e-6)


def test_noise_of_a_row_does_not_depend_on_the_batch_or_the_vocabulary() -> None:
    seeds, positions = torch.tensor([5, -1, 2**62]), torch.tensor([0, 7, 7])
    together = gumbel_noise(seeds, positions, 1001)
    for row in range(3):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 1001)
        assert torch.equal(together[row], alone[0])
    assert torch.equal(gumbel_noise(seeds, positions, 7), together[:, :7])


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(torch.arange(100), torch.arange(100), 1000).flatten()
    assert torch.isfinite(noise).all()
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("axis", ["seed", "position", "token", "seed_and_position"])
def test_neighbours_are_uncorrelated(axis: str) -> None:
    """Including (seed + 1, position) against (seed, position + 1), which a sum of both would confuse."""
    seeds = torch.arange(200)
    noise = gumbel_noise(seeds, torch.zeros_like(seeds), 501)
    other = {
        "seed": lambda: gumbel_noise(seeds + 1, torch.zeros_like(seeds), 501),
        "position": lambda: gumbel_noise(seeds, torch.ones_like(seeds), 501),
        "token": lambda: noise.roll(1, dims=1),
        "seed_and_position": lambda: gumbel_noise(seeds - 1, torch.ones_like(seeds), 501),
    }[axis]()
    correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
    assert abs(correlation) < 5 / noise.numel() ** 0.5


@pytest.mark.parametrize("varied", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(varied: str, temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    draws = 20_000
    counter = torch.arange(draws)
    constant = torch.full_like(counter, 1234)
    seeds, positions = (counter, constant) if varied == "seed" else (constant, counter)
    tokens = _sample(logits.expand(draws, -1), seeds, positions, temperature=temperature)
    expected = (logits.double() / temperature).softmax(dim=0) * draws
    assert stats.chisquare(torch.bincount(tokens, minlength=5).numpy(), expected.numpy()).pvalue > 1e-3


def test_tokens_of_a_row_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 50, generator=generator)
    rows = {
        "temperature_R": torch.tensor([0.0, 1.0, 0.7, 0.0, 2.0, 1.0, 1.0, 0.3]),
        "top_k_R": torch.tensor([0, 5, 0, 3, 0, 50, 99, 1]),
        "top_p_R": torch.tensor([1.0, 1.0, 0.6, 0.1, 1.0, 0.9, 1.0, 1.0]),
        "min_p_R": torch.tensor([0.0, 0.0, 0.0, 0.5, 0.2, 0.0, 1.0, 0.0]),
        "seed_R": torch.arange(8),
        "position_R": torch.arange(8) * 3,
    }
    together = sample(logits, **rows)
    for row in range(8):
        alone = sample(logits[row : row + 1], **{name: x[row : row + 1] for name, x in rows.items()})
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()
    assert together[7] == logits[7].argmax()  # top_k 1


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]]).repeat(1, 40)
    assert _sample(logits, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), temperature=0.0) == 1


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 4)
    logits[:, [0, 2]] = -torch.inf
    tokens = _sample(logits, torch.arange(500), torch.zeros(500, dtype=torch.int64))
    assert set(tokens.tolist()) == {1, 3}


def test_no_rows() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert _sample(torch.empty(0, 9), empty, empty, top_k=2).shape == (0,)


@settings(deadline=None, max_examples=150)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_filters(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    """Few distinct logits, so that ties at the edges are common."""
    row = torch.tensor([logits])
    kept = filter_logits(
        row, top_k_R=torch.tensor([top_k]), top_p_R=torch.tensor([top_p]).double(), min_p_R=torch.tensor([min_p])
    )
    stayed = torch.isfinite(kept[0]).nonzero().squeeze(1).tolist()
    expected = kept_tokens_reference(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    assert stayed
    assert torch.equal(kept[0, stayed], row[0, stayed])
    near_edge = kept_tokens_reference(logits, top_k=top_k, top_p=min(1.0, top_p + 1e-6), min_p=min_p * (1 - 1e-6))
    assert set(stayed) in (expected, near_edge)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.9), (0, 0.05), (300, 1.0), (300, 0.9), (20, 0.52), (256, 1.0), (257, 1.0), (999, 0.999)]
)
@pytest.mark.parametrize("spread", [0.1, 5.0], ids=["flat", "peaked"])
def test_filters_of_a_large_vocabulary(top_k: int, top_p: float, spread: float) -> None:
    """Flat rows need more tokens than the best few, peaked ones do not; ties are common."""
    logits = (torch.randn(1000, generator=torch.Generator().manual_seed(4)) * spread * 8).round() / 8
    kept = filter_logits(
        logits.unsqueeze(0),
        top_k_R=torch.tensor([top_k]),
        top_p_R=torch.tensor([top_p]).double(),
        min_p_R=torch.tensor([0.0]),
    )
    stayed = set(torch.isfinite(kept[0]).nonzero().squeeze(1).tolist())
    assert stayed == kept_tokens_reference(logits.tolist(), top_k=top_k, top_p=top_p, min_p=0.0)


def test_rows_without_filters_keep_their_logits() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    kept = filter_logits(
        logits,
        top_k_R=torch.tensor([0, 2, 0]),
        top_p_R=torch.tensor([1.0, 1.0, 1.0]),
        min_p_R=torch.tensor([0, 0, 1.0]),
    )
    assert torch.equal(kept[0], logits[0])
    assert torch.isfinite(kept[1:]).sum(dim=1).tolist() == [2, 1]


def test_top_p_takes_the_mass_of_what_top_k_left() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    kept = filter_logits(
        logits, top_k_R=torch.tensor([2]), top_p_R=torch.tensor([0.6]), min_p_R=torch.tensor([0.0])
    )  # 0.5 / 0.8 is at least 0.6
    assert torch.isfinite(kept).tolist() == [[True, False, False, False]]


@settings(deadline=None, max_examples=80)
@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    output=st.lists(st.integers(0, 5), max_size=6),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.1, 5),
)
def test_penalties(prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float) -> None:
    logits = [1.5, -0.5, 0.0, 2.0, -3.0, 0.25]
    in_prompt, counts = torch.zeros(1, 6, dtype=torch.bool), torch.zeros(1, 6, dtype=torch.int64)
    in_prompt[0, prompt] = True
    for token_id in output:
        counts[0, token_id] += 1
    actual = apply_penalties(
        torch.tensor([logits]),
        output_counts_RV=counts,
        in_prompt_RV=in_prompt,
        presence_penalty_R=torch.tensor([presence]),
        frequency_penalty_R=torch.tensor([frequency]),
        repetition_penalty_R=torch.tensor([repetition]),
    )
    expected = penalties_reference(
        logits, prompt=prompt, output=output, presence=presence, frequency=frequency, repetition=repetition
    )
    assert actual[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_neutral_penalties_change_no_bit() -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    actual = apply_penalties(
        logits,
        output_counts_RV=torch.ones(2, 6, dtype=torch.int64),
        in_prompt_RV=torch.ones(2, 6, dtype=torch.bool),
        presence_penalty_R=torch.zeros(2),
        frequency_penalty_R=torch.zeros(2),
        repetition_penalty_R=torch.ones(2),
    )
    assert torch.equal(actual, logits)
