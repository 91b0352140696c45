"""The sampler against an oracle in float64 and plain Python, one sequence at a time."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.engine.outputs import SampledToken
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import RequestId
from moeserve.worker.input_batch import SequenceView
from moeserve.worker.sampler import Sampler
from moeserve_kernels.sampling.reference import gumbel_reference, kept_tokens_reference, penalties_reference

VOCAB_SIZE = 29
EOS = (3, 28)


def view(params: SamplingParams, prompt: Sequence[int] = (1,), output: Sequence[int] = ()) -> SequenceView:
    return SequenceView(
        request_id=RequestId(f"seed-{params.seed}"),
        params=params,
        token_ids=np.array([*prompt, *output], dtype=np.int32),
        num_prompt_tokens=len(prompt),
    )


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def oracle(logits: list[float], sequence: SequenceView) -> int:
    params = sequence.params
    output = sequence.output_token_ids.tolist()
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if len(output) < params.min_tokens:
        for token_id in {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}:
            logits[token_id] = -math.inf
    logits = penalties_reference(
        logits,
        prompt=sequence.token_ids[: sequence.num_prompt_tokens].tolist(),
        output=output,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
    )
    if params.temperature == 0.0:
        return max(range(VOCAB_SIZE), key=lambda token_id: (logits[token_id], -token_id))
    scaled = [logit / params.temperature for logit in logits]
    kept = kept_tokens_reference(scaled, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    assert params.seed is not None
    seed, position = params.seed, len(sequence.token_ids)
    return max(kept, key=lambda token_id: scaled[token_id] + gumbel_reference(seed, position, token_id))


token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)


@st.composite
def sequences(draw: st.DrawFn) -> SequenceView:
    params = SamplingParams(
        max_tokens=8,
        min_tokens=draw(st.integers(0, 4)),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.31])),
        top_k=draw(st.sampled_from([0, 1, 5, 100])),
        min_p=draw(st.sampled_from([0.0, 0.04, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.3, -0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.9, -0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.7, 0.6])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.5, 2.5]), max_size=4)
        ),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))),
        ignore_eos=draw(st.booleans()),
    )
    return view(params, draw(token_lists.filter(bool)), draw(token_lists))


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(sequences(), min_size=1, max_size=5), logits_seed=st.integers(0, 2**31))
def test_every_row_is_the_oracles_whatever_stands_beside_it(batch: list[SequenceView], logits_seed: int) -> None:
    logits_RV = random_logits(len(batch), logits_seed)
    before = logits_RV.clone()
    sampled = Sampler(eos_token_ids=EOS).sample(logits_RV, batch)
    torch.testing.assert_close(logits_RV, before, rtol=0, atol=0)  # the log-probabilities need them as they were
    assert [token.request_id for token in sampled] == [sequence.request_id for sequence in batch]
    expected = [oracle(row.tolist(), sequence) for row, sequence in zip(logits_RV, batch, strict=True)]
    assert [token.token_id for token in sampled] == expected


def test_a_sequence_draws_the_same_tokens_alone_and_in_a_batch() -> None:
    batch = [
        view(SamplingParams(seed=seed, top_p=0.8, presence_penalty=0.5), [1, 2, 3][: seed + 1]) for seed in range(3)
    ]
    logits_RV = random_logits(3)
    sampler = Sampler(eos_token_ids=EOS)
    together = sampler.sample(logits_RV, batch)
    alone: list[SampledToken] = []
    for row, sequence in enumerate(batch):
        alone += sampler.sample(logits_RV[row : row + 1], [sequence])
    reversed_order = sampler.sample(logits_RV.flip(0), batch[::-1])
    assert together == alone == reversed_order[::-1]


def test_settings_follow_the_batch_when_it_changes_and_when_it_does_not() -> None:
    """The tensors of the settings are kept between steps: their rows must never be another sequence's."""
    sampler = Sampler(eos_token_ids=EOS)
    first, second = SamplingParams(seed=1), SamplingParams(seed=2, temperature=0.0, logit_bias={7: 50.0})
    for params in ([first], [first], [first, second], [second, first], [second], [second]):
        for num_output in (0, 1):
            batch = [view(p, output=[5] * num_output) for p in params]
            logits_RV = random_logits(len(batch), seed=num_output)
            expected = [oracle(row.tolist(), sequence) for row, sequence in zip(logits_RV, batch, strict=True)]
            assert [token.token_id for token in sampler.sample(logits_RV, batch)] == expected


def test_draws_follow_the_distribution() -> None:
    """5,000 seeds at one position: every frequency within five standard deviations of its probability."""
    num_draws = 5000
    logits_V = random_logits(1)[0]
    batch = [view(SamplingParams(seed=seed, temperature=1.5)) for seed in range(num_draws)]
    sampled = Sampler(eos_token_ids=EOS).sample(logits_V.expand(num_draws, -1), batch)
    counts = np.bincount([token.token_id for token in sampled], minlength=VOCAB_SIZE)
    probabilities = torch.softmax(logits_V.double() / 1.5, dim=0).numpy()
    deviations = np.sqrt(probabilities * (1 - probabilities) / num_draws)
    assert (np.abs(counts / num_draws - probabilities) < 5 * deviations + 1e-9).all()


def test_logprobs_are_the_models_own_and_only_of_those_who_asked() -> None:
    logits_RV = random_logits(4)
    batch = [
        view(SamplingParams(seed=0, temperature=0.0, logit_bias={9: 100.0}, logprobs=3)),
        view(SamplingParams(seed=1)),
        view(SamplingParams(seed=2, top_k=1, logprobs=0)),
        view(SamplingParams(seed=3, temperature=2.0, logprobs=20)),
    ]
    sampled = Sampler(eos_token_ids=EOS).sample(logits_RV, batch)
    assert sampled[0].token_id == 9
    assert sampled[1].logprobs is None
    for row, num_top in ((0, 3), (2, 0), (3, 20)):
        record = sampled[row].logprobs
        assert record is not None
        logprobs_V = torch.log_softmax(logits_RV[row].double(), dim=0)
        order = logprobs_V.argsort(descending=True).tolist()
        assert record.token_id == sampled[row].token_id
        assert record.logprob == pytest.approx(logprobs_V[record.token_id].item(), abs=1e-5)
        assert record.rank == order.index(record.token_id) + 1
        assert record.top_token_ids == order[:num_top]
        assert record.top_logprobs == pytest.approx(logprobs_V[order[:num_top]].tolist(), abs=1e-5)


def test_more_logprobs_than_tokens_are_all_tokens() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 2.0]])
    (token,) = Sampler(eos_token_ids=()).sample(logits_RV, [view(SamplingParams(seed=0, top_k=1, logprobs=20))])
    assert token.logprobs is not None
    assert token.logprobs.top_token_ids == [1, 2, 0]
