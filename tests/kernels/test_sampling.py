"""Sampling: exact noise, its distribution and independence, filters and penalties against plain Python."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from moeserve_kernels import apply_penalties, filter_logits, gumbel_noise, native, sample
from moeserve_kernels.backend import Backend
from moeserve_kernels.sampling.reference import gumbel_reference, kept_tokens_reference, penalties_reference

INT64 = st.integers(-(2**63), 2**63 - 1)


def _sample(
    logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, backend: Backend, **settings: float
) -> torch.Tensor:
    num_rows = len(logits)
    return sample(
        logits,
        temperature_R=torch.full((num_rows,), settings.get("temperature", 1.0)),
        top_k_R=torch.full((num_rows,), int(settings.get("top_k", 0))),
        top_p_R=torch.full((num_rows,), settings.get("top_p", 1.0)),
        min_p_R=torch.full((num_rows,), settings.get("min_p", 0.0)),
        seed_R=seeds,
        position_R=positions,
        backend=backend,
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
def test_draws_follow_the_softmax(varied: str, temperature: float, backend: Backend) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    draws = 20_000
    counter = torch.arange(draws)
    constant = torch.full_like(counter, 1234)
    seeds, positions = (counter, constant) if varied == "seed" else (constant, counter)
    tokens = _sample(logits.expand(draws, -1), seeds, positions, backend, temperature=temperature)
    expected = (logits.double() / temperature).softmax(dim=0) * draws
    assert stats.chisquare(torch.bincount(tokens, minlength=5).numpy(), expected.numpy()).pvalue > 1e-3


def test_tokens_of_a_row_do_not_depend_on_the_batch(backend: Backend, generator: torch.Generator) -> None:
    logits = torch.randn(8, 50, generator=generator)
    rows = {
        "temperature_R": torch.tensor([0.0, 1.0, 0.7, 0.0, 2.0, 1.0, 1.0, 0.3]),
        "top_k_R": torch.tensor([0, 5, 0, 3, 0, 50, 99, 1]),
        "top_p_R": torch.tensor([1.0, 1.0, 0.6, 0.1, 1.0, 0.9, 1.0, 1.0]),
        "min_p_R": torch.tensor([0.0, 0.0, 0.0, 0.5, 0.2, 0.0, 1.0, 0.0]),
        "seed_R": torch.arange(8),
        "position_R": torch.arange(8) * 3,
    }
    together = sample(logits, **rows, backend=backend)
    for row in range(8):
        alone = sample(logits[row : row + 1], **{name: x[row : row + 1] for name, x in rows.items()}, backend=backend)
        assert alone[0] == together[row]
    assert together[0] == logits[0].argmax()
    assert together[7] == logits[7].argmax()  # top_k 1


def test_ties_go_to_the_lowest_id(backend: Backend) -> None:
    logits, zero = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0]]).repeat(1, 40), torch.zeros(1, dtype=torch.int64)
    assert _sample(logits, zero, zero, backend, temperature=0.0) == 1


def test_forbidden_tokens_are_never_drawn(backend: Backend) -> None:
    logits = torch.zeros(500, 4)
    logits[:, [0, 2]] = -torch.inf
    tokens = _sample(logits, torch.arange(500), torch.zeros(500, dtype=torch.int64), backend)
    assert set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_rows_without_a_number_give_a_token(bad: float, temperature: float, backend: Backend) -> None:
    """What a broken model says must not become an id outside the vocabulary."""
    counter = torch.arange(2)
    tokens = _sample(torch.full((2, 7), bad), counter, counter, backend, temperature=temperature, top_k=3, top_p=0.5)
    assert all(0 <= token < 7 for token in tokens.tolist())


def test_no_rows(backend: Backend) -> None:
    empty = torch.empty(0, dtype=torch.int64)
    assert _sample(torch.empty(0, 9), empty, empty, backend, top_k=2).shape == (0,)


@pytest.mark.parametrize("vocab_size", [1, 17, 1001, 4099])
@pytest.mark.parametrize("spread", [0.1, 5.0], ids=["flat", "peaked"])
def test_draws_are_the_most_likely_after_filters_and_noise(
    vocab_size: int, spread: float, backend: Backend, generator: torch.Generator
) -> None:
    """Against filter_logits and gumbel_noise, which have oracles of their own; all kinds of settings in one batch."""
    num_rows = 24
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread

    def pick(choices: list[float]) -> torch.Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), (num_rows,), generator=generator)]

    temperature, top_k = pick([0.3, 1.0, 1.7]), pick([0, 1, 5, 300]).long()
    top_p, min_p = pick([1.0, 0.9, 0.3]), pick([0.0, 0.05, 0.6])
    seeds, positions = torch.arange(num_rows) * 7919, torch.arange(num_rows)
    filters = {"top_k_R": top_k, "top_p_R": top_p, "min_p_R": min_p}
    scaled = logits / temperature.unsqueeze(1)
    scores = filter_logits(scaled, **{**filters, "top_p_R": top_p.double()}) + gumbel_noise(
        seeds, positions, vocab_size
    )
    drawn = sample(logits, temperature_R=temperature, **filters, seed_R=seeds, position_R=positions, backend=backend)
    lost = scores.amax(dim=1) - scores.gather(1, drawn.unsqueeze(1)).squeeze(1)
    assert (lost <= 1e-4).all(), "another token had a clearly higher score"


def test_backends_draw_the_same_tokens(generator: torch.Generator) -> None:
    if not native.is_loaded():
        pytest.skip("no native kernels")
    rows = {
        "temperature_R": torch.rand(500, generator=generator) * 2,
        "top_k_R": torch.randint(0, 900, (500,), generator=generator),
        "top_p_R": torch.rand(500, generator=generator) * 0.5 + 0.5,
        "min_p_R": torch.rand(500, generator=generator) * 0.01,
        "seed_R": torch.randint(-(2**62), 2**62, (500,), generator=generator),
        "position_R": torch.arange(500),
    }
    logits = torch.randn(500, 777, generator=generator) * 2
    differ = sample(logits, **rows, backend="cpu") != sample(logits, **rows, backend="torch")
    assert differ.sum() <= 1  # rounding may decide a draw about once in 10 ** 5


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


def _penalise(
    logits_RV: torch.Tensor, seen: dict[int, tuple[list[int], list[int]]], penalties: dict[str, float], backend: Backend
) -> torch.Tensor:
    """Logits after the penalties; seen: row -> (prompt, output) of the rows that have penalties."""
    lengths = [len(prompt) + len(output) for prompt, output in seen.values()]
    penalised = logits_RV.clone()
    apply_penalties(
        penalised,
        rows_r=torch.tensor(list(seen), dtype=torch.int64),
        token_ids=torch.tensor(
            [token for prompt, output in seen.values() for token in prompt + output], dtype=torch.int64
        ),
        start_loc=torch.tensor([0, *lengths]).cumsum(0),
        num_prompt_tokens_r=torch.tensor([len(prompt) for prompt, _ in seen.values()], dtype=torch.int64),
        **{f"{name}_penalty_r": torch.full((len(seen),), value) for name, value in penalties.items()},
        backend=backend,
    )
    return penalised


TOKENS = st.lists(st.integers(0, 5), max_size=6)


@settings(deadline=None, max_examples=80)
@given(
    seen=st.dictionaries(st.integers(0, 2), st.tuples(TOKENS, TOKENS)),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0.1, 5),
)
def test_penalties(
    backend: Backend, seen: dict[int, tuple[list[int], list[int]]], presence: float, frequency: float, repetition: float
) -> None:
    logits = [1.5, -0.5, 0.0, 2.0, -3.0, 0.25]
    penalties = {"presence": presence, "frequency": frequency, "repetition": repetition}
    actual = _penalise(torch.tensor([logits] * 3), seen, penalties, backend)
    for row in range(3):
        prompt, output = seen.get(row, ([], []))
        expected = penalties_reference(logits, prompt=prompt, output=output, **penalties)
        assert actual[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_neutral_penalties_change_no_bit(backend: Backend) -> None:
    logits = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    neutral = {"presence": 0.0, "frequency": 0.0, "repetition": 1.0}
    assert torch.equal(_penalise(logits, {0: ([1, 2], [3, 3]), 1: ([0], [5])}, neutral, backend), logits)
