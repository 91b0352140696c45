"""A whole decode step through the Triton kernels, filled up and replayed: nothing in it waits for the host."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from moeserve.config import ParallelConfig
from moeserve.layers.attention import KVCache
from moeserve.models.decoder import Decoder
from moeserve.models.layout import starting_placement
from moeserve.models.parameters import DictReader
from moeserve.parallel import single_rank_context
from moeserve.testing.recorders import RepeatingRecorder, refuse_host_reads
from moeserve.testing.tiny_models import Style, forward_batch, random_parameters, tiny_kv_cache, tiny_spec
from moeserve.worker.decode_graphs import DecodeGraphs, DecodeLadder
from moeserve.worker.graph_recorder import graph_recorder_of

LADDER = DecodeLadder(num_tokens=(2, 5), max_seq_lens=(64,))
LENGTHS = [11, 1, 8]
"""Tokens in the cache: a window of 5 has left some of them behind."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2}
"""Of the norm of the error to the norm of the hidden states."""


class StrictRecorder(RepeatingRecorder):
    """Refuses at the capture what a captured step may not do."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with refuse_host_reads():
            return super().capture(step)


@contextmanager
def triton_everywhere() -> Iterator[None]:
    """Ops that have a Triton kernel run it on a CPU too; the interpreter itself may read what it likes."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def run_unwatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", run_unwatched)
        for name, module in list(sys.modules.items()):
            if name.startswith("moeserve_kernels.") and hasattr(module, "choose_backend"):
                patch.setattr(module, "choose_backend", lambda device, asked, *, has_native: asked or "triton")
        yield


def build(style: Style, dtype: torch.dtype, device: torch.device, *, is_narrow: bool) -> Decoder:
    spec = tiny_spec(style)
    placement = starting_placement(spec, ParallelConfig())
    reader = DictReader(random_parameters(spec), dtype, quantization="int8" if is_narrow else None)
    return Decoder.build(spec, reader, single_rank_context(device), placement, dtype=dtype)


def copy_cache(source: KVCache, target: KVCache) -> None:
    for ours, theirs in zip(target.layers, source.layers, strict=True):
        for name in ours.__slots__:
            if getattr(ours, name) is not None:
                getattr(ours, name).copy_(getattr(theirs, name))


def spoil_block_0(cache: KVCache) -> None:
    """Padding reads there whatever lies there, and so may compute with no numbers."""
    for layer in cache.layers:
        for tensor in (getattr(layer, name) for name in layer.__slots__):
            if tensor is not None and tensor.is_floating_point():
                tensor[0] = torch.nan


@pytest.mark.parametrize(
    ("style", "dtype", "is_narrow"),
    [
        ("qwen3", torch.float16, False),
        ("qwen2", torch.float32, False),
        ("deepseek", torch.float32, False),
        ("gpt_oss", torch.float16, False),
        pytest.param("qwen3", torch.float16, True, id="int8 weights and cache"),
    ],
)
@torch.inference_mode()
def test_hidden_states_are_those_of_the_step_on_a_cpu(
    style: Style, dtype: torch.dtype, is_narrow: bool, triton_device: torch.device
) -> None:
    """Three requests in a step of five, then one alone in a step of two; over caches that a CPU has filled."""
    expected = build(style, dtype, torch.device("cpu"), is_narrow=is_narrow)
    cache_dtype = torch.int8 if is_narrow else dtype
    expected_cache = tiny_kv_cache(expected, num_requests=len(LENGTHS), dtype=cache_dtype)
    prompts = [[(13 * request + 7 * i) % 90 for i in range(length)] for request, length in enumerate(LENGTHS)]
    expected.forward(forward_batch(prompts), expected_cache)
    steps = [[[4], [50], [71]], [[33], [8], [20]], [[], [], [66]]]

    with triton_everywhere():
        decoder = build(style, dtype, triton_device, is_narrow=is_narrow)
        cache = tiny_kv_cache(decoder, num_requests=len(LENGTHS), dtype=cache_dtype)
        recorder = graph_recorder_of(triton_device) or StrictRecorder()
        graphs = DecodeGraphs(decoder, cache, recorder, LADDER, progress=False)
        copy_cache(expected_cache, cache)
        computed, hidden = list(LENGTHS), []
        for tokens in steps:
            if not tokens[0]:
                spoil_block_0(cache)  # of the first request, which has left
            hidden.append(graphs.forward(forward_batch(tokens, num_computed=computed)).cpu().clone())
            computed = [n + len(one) for n, one in zip(computed, tokens, strict=True)]

    computed = list(LENGTHS)
    for tokens, hidden_TD in zip(steps, hidden, strict=True):
        expected_TD = expected.forward(forward_batch(tokens, num_computed=computed), expected_cache)
        computed = [n + len(one) for n, one in zip(computed, tokens, strict=True)]
        assert hidden_TD.shape == expected_TD.shape
        assert (hidden_TD - expected_TD).norm() <= TOLERANCE[dtype] * expected_TD.norm()


def test_what_reads_from_the_host_is_refused() -> None:
    """The check above can fail: each of these would stop a capture, or freeze a value in it."""
    x = torch.arange(4)
    readers: list[Callable[[], Any]] = [
        x.tolist, x.cpu, x[0].item, lambda: int(x[0]), lambda: bool(x[0]), lambda: x[x > 2], x.nonzero,
        lambda: torch.tensor([1]), lambda: torch.bincount(x),
    ]  # fmt: skip
    for read in readers:
        with pytest.raises(AssertionError), refuse_host_reads():
            read()
