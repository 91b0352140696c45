"""The step's tensors against plain loops, over random lives of requests."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moeserve.engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import BlockId, RequestId, StepId
from moeserve.worker.input_batch import InputBatch, StepInputs

BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
MAX_MODEL_LEN = 22  # not a multiple of the block size
CPU = torch.device("cpu")


@dataclass
class Sequence:
    """The oracle's request: lists, no tables."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    params: SamplingParams
    block_ids: list[BlockId] = field(default_factory=list)
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0


def scheduler_output(
    scheduled: list[tuple[Sequence, int]] | None = None, finished: list[RequestId] | None = None
) -> SchedulerOutput:
    new, cached = [], []
    for sequence, _ in scheduled or []:
        if sequence.num_sent_tokens == 0:
            new.append(
                NewRequestData(
                    request_id=sequence.request_id,
                    token_ids=list(sequence.token_ids),
                    num_prompt_tokens=sequence.num_prompt_tokens,
                    sampling_params=sequence.params,
                    block_ids=list(sequence.block_ids),
                    num_computed_tokens=sequence.num_computed_tokens,
                )
            )
        else:
            cached.append(
                CachedRequestData(
                    request_id=sequence.request_id,
                    new_token_ids=sequence.token_ids[sequence.num_sent_tokens :],
                    new_block_ids=sequence.block_ids[sequence.num_sent_blocks :],
                    num_computed_tokens=sequence.num_computed_tokens,
                )
            )
        sequence.num_sent_tokens = len(sequence.token_ids)
        sequence.num_sent_blocks = len(sequence.block_ids)
    return SchedulerOutput(
        step_id=StepId(0),
        new_requests=new,
        cached_requests=cached,
        num_scheduled_tokens={sequence.request_id: n for sequence, n in scheduled or []},
        finished_request_ids=finished or [],
    )


def check_against_loops(step: StepInputs, scheduled: list[tuple[Sequence, int]]) -> None:
    token_ids, positions, slots, tables, sampled, hidden_rows = [], [], [], [], [], []
    for sequence, num_tokens in scheduled:
        for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens):
            token_ids.append(sequence.token_ids[position])
            positions.append(position)
            slots.append(sequence.block_ids[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        end = sequence.num_computed_tokens + num_tokens
        tables.append(sequence.block_ids[: -(-end // BLOCK_SIZE)])
        if end == len(sequence.token_ids):
            sampled.append(sequence)
            hidden_rows.append(len(token_ids) - 1)
    forward = step.forward
    assert forward.token_ids_T.tolist() == token_ids
    assert forward.positions_T.tolist() == positions
    assert forward.slot_mapping_T.tolist() == slots
    assert forward.query_lens == tuple(n for _, n in scheduled)
    assert forward.query_start_loc.tolist() == [sum(forward.query_lens[:i]) for i in range(len(scheduled) + 1)]
    seq_lens = [sequence.num_computed_tokens + n for sequence, n in scheduled]
    assert forward.seq_lens_R.tolist() == seq_lens
    assert forward.max_seq_len == max(seq_lens, default=0)
    width = max(map(len, tables), default=0)
    assert forward.block_tables_RB.tolist() == [table + [0] * (width - len(table)) for table in tables]
    assert step.sampled_hidden_rows.tolist() == hidden_rows
    assert [view.request_id for view in step.sampled] == [sequence.request_id for sequence in sampled]
    for view, sequence in zip(step.sampled, sampled, strict=True):
        assert view.token_ids.tolist() == sequence.token_ids
        assert view.output_token_ids.tolist() == sequence.token_ids[sequence.num_prompt_tokens :]
        assert view.params == sequence.params


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_lives_give_the_tensors_of_plain_loops(data: st.DataObject) -> None:
    batch = InputBatch(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    alive: list[Sequence] = []
    finished: list[RequestId] = []
    free_blocks = list(range(MAX_NUM_SEQS * -(-MAX_MODEL_LEN // BLOCK_SIZE)))
    for number in range(data.draw(st.integers(1, 12), label="steps")):
        for sequence in [s for s in alive if data.draw(st.sampled_from([False, False, True]), label="ends")]:
            alive.remove(sequence)
            free_blocks += sequence.block_ids
            # A request that never ran was never announced; telling of its end all the same must not hurt.
            finished.append(sequence.request_id)
        if len(alive) < MAX_NUM_SEQS and data.draw(st.booleans(), label="arrives"):
            num_tokens = data.draw(st.integers(1, MAX_MODEL_LEN), label="prompt")
            alive.append(
                Sequence(
                    request_id=RequestId(f"r{number}"),
                    token_ids=data.draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens)),
                    num_prompt_tokens=data.draw(st.integers(1, num_tokens)),
                    num_computed_tokens=data.draw(st.integers(0, num_tokens - 1), label="cached"),
                    params=SamplingParams(seed=number),
                )
            )
        scheduled = []
        for sequence in data.draw(st.permutations(alive)):
            missing = len(sequence.token_ids) - sequence.num_computed_tokens
            if missing and data.draw(st.booleans(), label="runs"):
                count = data.draw(st.integers(1, missing), label="chunk")
                while len(sequence.block_ids) * BLOCK_SIZE < sequence.num_computed_tokens + count:
                    sequence.block_ids.append(BlockId(free_blocks.pop()))
                scheduled.append((sequence, count))
        output = scheduler_output(scheduled, finished)
        finished = []
        batch.update(output)
        check_against_loops(batch.build(output, (output.total_num_scheduled_tokens,), CPU), scheduled)
        for sequence, count in scheduled:
            sequence.num_computed_tokens += count
            if sequence.num_computed_tokens == len(sequence.token_ids) < MAX_MODEL_LEN:
                sequence.token_ids.append(data.draw(st.integers(0, 99), label="sampled"))


def test_an_empty_step_has_tensors_of_length_zero() -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=8, block_size=BLOCK_SIZE)
    output = scheduler_output()
    batch.update(output)
    step = batch.build(output, (0, 5), CPU)
    assert step.forward.token_ids_T.shape == step.forward.slot_mapping_T.shape == (0,)
    assert step.forward.block_tables_RB.shape == (0, 0)
    assert step.forward.query_start_loc.tolist() == [0]
    assert step.forward.num_tokens_by_dp_rank == (0, 5)
    assert not step.sampled
    assert not step.prompt_chunks
    assert step.forward.token_ids_T.dtype == step.forward.block_tables_RB.dtype == torch.int64


def test_what_ends_is_forgotten_before_what_comes_is_read() -> None:
    """One row only, and a preempted request that comes back in the very step that says it was preempted."""
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=BLOCK_SIZE)
    for token_ids in ([1, 2], [1, 2, 3], [7]):
        sequence = Sequence(RequestId("same"), token_ids, 1, 0, SamplingParams(seed=0), [BlockId(5)])
        scheduled = [(sequence, len(token_ids))]
        output = scheduler_output(scheduled, [RequestId("same")])
        batch.update(output)
        check_against_loops(batch.build(output, (len(token_ids),), CPU), scheduled)
        assert batch.num_requests == 1


@pytest.mark.parametrize(
    ("num_computed_tokens", "num_scheduled", "start", "targets"),
    [
        pytest.param(0, 5, 1, [11, 12, 13, 14], id="whole prompt: position 0 has no predecessor"),
        pytest.param(0, 3, 1, [11, 12, 13], id="first chunk judges the next chunk's first token"),
        pytest.param(3, 2, 4, [14], id="last chunk"),
        pytest.param(4, 1, None, [], id="only the last prompt token: its successor is output"),
        pytest.param(3, 4, 4, [14], id="resumed: output tokens are not judged"),
        pytest.param(5, 2, None, [], id="beyond the prompt"),
    ],
)
def test_prompt_chunks(num_computed_tokens: int, num_scheduled: int, start: int | None, targets: list[int]) -> None:
    batch = InputBatch(max_num_seqs=2, max_model_len=8, block_size=BLOCK_SIZE)
    other = Sequence(RequestId("other"), [1, 2], 2, 0, SamplingParams(seed=0), [BlockId(3)])
    token_ids = [10, 11, 12, 13, 14, 95, 96]
    params = SamplingParams(seed=0, prompt_logprobs=2)
    judged = Sequence(RequestId("judged"), token_ids, 5, num_computed_tokens, params, [BlockId(0), BlockId(1)])
    output = scheduler_output([(other, 2), (judged, num_scheduled)])
    batch.update(output)
    chunks = batch.build(output, (2 + num_scheduled,), CPU).prompt_chunks
    if start is None:
        assert chunks == ()
        return
    (chunk,) = chunks
    assert chunk.request_id == "judged"
    assert (chunk.start, chunk.num_logprobs) == (start, 2)
    assert chunk.hidden_start == 2  # behind the other request's tokens
    np.testing.assert_array_equal(chunk.targets, targets)


def test_tokens_without_blocks_are_refused() -> None:
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=BLOCK_SIZE)
    sequence = Sequence(RequestId("a"), [1] * 5, 5, 0, SamplingParams(seed=0), [BlockId(0)])
    output = scheduler_output([(sequence, 5)])
    batch.update(output)
    with pytest.raises(AssertionError, match="without a block"):
        batch.build(output, (5,), CPU)
