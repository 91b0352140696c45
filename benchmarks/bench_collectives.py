"""Collectives between ranks of one host, beside gloo over loopback; and the ways to bring tokens to experts.

    python benchmarks/bench_collectives.py --quick
    python benchmarks/bench_collectives.py --json results.json --results benchmarks/results

Contenders take turns within a round, and a ratio is the median of the rounds' ratios: a machine that slows down slows
both. Of a round counts the median call, so that what the system does beside it (a rank that loses its core for
milliseconds) shows in the means only. A rank is a process with one thread, as in a served engine. Exits with 1 when a
target is missed.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.tables import Cell, table
from moeserve.experts.dispatcher import AllGatherDispatcher, AllToAllDispatcher, ExpertDispatcher, build_dispatcher
from moeserve.experts.placement_tables import PlacementTables
from moeserve.parallel import Group, ParallelContext, ParallelLayout, init_parallel
from moeserve.parallel.process_group import ProcessGroupTransport
from moeserve.testing.multiprocess import run_ranks
from moeserve_kernels import native
from moeserve_placement import ExpertPlacement

WIDTH = 1024
NUM_EXPERTS = 64
TOP_K = 8
SHARED_MEMORY = "shared memory"
GLOO = "gloo"
ALL_GATHER = "all-gather"
ALL_TO_ALL = "all-to-all"
EXCHANGE_CASE = f"all_to_all 64 x {WIDTH}, there and back"
LAYER_CASE = "dispatch and combine of 64 tokens"
MOST_OF_GLOO = 0.2
"""Target of both, as a part of the time that gloo's all_to_all_single takes for the same."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender in one case: microseconds of a call, for each round."""

    case: str
    contender: str
    medians: tuple[float, ...]
    means: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    num_rounds: int
    round_s: float
    """How long a contender runs in a round, about."""


def main() -> int:
    arguments = _arguments()
    effort = Effort(num_rounds=5, round_s=0.02) if arguments.quick else Effort(num_rounds=15, round_s=0.1)
    native.build()
    load = os.getloadavg()[0]
    timings: list[Timing] = run_ranks(time_collectives, 2, effort, timeout_s=600.0)[0]
    with _busy_process():
        beside: list[Timing] = run_ranks(time_collectives, 2, effort, timeout_s=600.0)[0]
    timings += [replace(timing, case=f"{timing.case}, a third process busy") for timing in beside]
    ways = [timing for size in (2, 4) for timing in run_ranks(time_dispatchers, size, effort, timeout_s=600.0)[0]]
    report, is_met = _report(timings, ways, load)
    print(report, file=sys.stderr if arguments.json == "-" else sys.stdout)
    record = {
        "machine": asdict(describe_machine()),
        "load": load,
        "timings": [asdict(timing) for timing in timings + ways],
    }
    write_json(arguments.json, record)
    if arguments.results is not None:
        (arguments.results / "collectives_cpu.md").write_text(report + "\n")
    return int(not is_met)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", metavar="DIR", type=Path, help="also write collectives_cpu.md there")
    add_common_arguments(parser)
    return parser.parse_args()


@contextmanager
def _busy_process() -> Iterator[None]:
    """Something else that wants a core all the time."""
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        sum(range(100_000))


def time_collectives(rank: int, effort: Effort) -> list[Timing]:
    """What a layer of an engine with two ranks costs in collectives."""
    layout = ParallelLayout(dp_size=2, rank=rank)
    native.load()
    parallel = init_parallel(layout, torch.device("cpu"))
    assert parallel.ep.transport_name == SHARED_MEMORY
    assert dist.group.WORLD is not None
    gloo = Group(ProcessGroupTransport(dist.group.WORLD), size=2, rank=rank)
    timings = []
    for num_rows in (1, 64):
        x = torch.zeros(num_rows, WIDTH, dtype=torch.bfloat16)
        calls: dict[str, Call] = {
            SHARED_MEMORY: partial(parallel.ep.all_reduce, x),
            GLOO: partial(gloo.all_reduce, x),
        }
        timings += _time(f"all_reduce {num_rows} x {WIDTH}", calls, effort)
    rows = torch.zeros(64, WIDTH, dtype=torch.bfloat16)
    there_and_back: dict[str, Call] = {
        SHARED_MEMORY: partial(_there_and_back, parallel.ep, rows),
        GLOO: partial(_there_and_back, gloo, rows),
    }
    timings += _time(EXCHANGE_CASE, there_and_back, effort)
    layer = _Layer(parallel, num_tokens_by_dp_rank=(64, 64))
    run_ours = partial(layer.run, build_dispatcher(parallel, top_k=TOP_K))
    over_gloo = AllToAllDispatcher(replace(parallel, dp=gloo, ep=gloo))
    timings += _time(LAYER_CASE, {SHARED_MEMORY: run_ours, GLOO: partial(layer.run, over_gloo)}, effort)
    rows_for_both = torch.zeros(2 * 64, WIDTH, dtype=torch.bfloat16)
    rows_alone: dict[str, Call] = {SHARED_MEMORY: run_ours, GLOO: partial(_there_and_back, gloo, rows_for_both)}
    return timings + _time(f"{LAYER_CASE}, gloo: rows alone", rows_alone, effort)


def _there_and_back(group: Group, rows: torch.Tensor) -> None:
    counts = [rows.shape[0] // group.size] * group.size
    group.all_to_all(group.all_to_all(rows, counts, counts), counts, counts)


class _Layer:
    """Tokens with their routing, and an expert that gives back what it gets: what remains is dispatch and combine."""

    def __init__(self, parallel: ParallelContext, *, num_tokens_by_dp_rank: tuple[int, ...]) -> None:
        rank = parallel.layout.rank
        num_tokens = num_tokens_by_dp_rank[rank]
        generator = torch.Generator().manual_seed(rank)
        placement = ExpertPlacement.identity(
            num_layers=1, num_logical_experts=NUM_EXPERTS, num_ranks=parallel.layout.world_size
        )
        self._tables = PlacementTables.build(placement, 0, rank=rank, device=parallel.device)
        self._hidden_TD = torch.randn(num_tokens, WIDTH, generator=generator).bfloat16()
        self._expert_ids_TK = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
        self._weights_TK = torch.full((num_tokens, TOP_K), 1 / TOP_K)
        self._num_tokens_by_dp_rank = num_tokens_by_dp_rank

    def run(self, dispatcher: ExpertDispatcher[Any]) -> torch.Tensor:
        rows, record = dispatcher.dispatch(
            self._hidden_TD, self._weights_TK, self._expert_ids_TK, self._tables, self._num_tokens_by_dp_rank
        )
        return dispatcher.combine(rows.hidden_RD, record, None)


def time_dispatchers(rank: int, effort: Effort) -> list[Timing]:
    """All-gather beside all-to-all, each over shared memory, for steps of decode and of prefill."""
    size = dist.get_world_size()
    native.load()
    parallel = init_parallel(ParallelLayout(dp_size=size, rank=rank), torch.device("cpu"))
    ways: dict[str, ExpertDispatcher[Any]] = {
        ALL_GATHER: AllGatherDispatcher(parallel),
        ALL_TO_ALL: AllToAllDispatcher(parallel),
    }
    cases = {
        "1 token each": (1,) * size,
        "8 tokens each": (8,) * size,
        "64 tokens each": (64,) * size,
        "512 tokens each": (512,) * size,
        "512 tokens on one, 8 on the others": (512, *(8,) * (size - 1)),
        "512 tokens on one, none on the others": (512, *(0,) * (size - 1)),
    }
    timings = []
    for name, lengths in cases.items():
        layer = _Layer(parallel, num_tokens_by_dp_rank=lengths)
        calls: dict[str, Call] = {way: partial(layer.run, dispatcher) for way, dispatcher in ways.items()}
        timings += _time(f"{size} ranks, {name}", calls, effort)
    return timings


def _time(case: str, calls: Mapping[str, Call], effort: Effort) -> list[Timing]:
    """Times on this rank; every rank makes the same calls."""
    repeats = {name: _agreed_repeats(call, effort.round_s) for name, call in calls.items()}
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(effort.num_rounds):
        for name, call in calls.items():
            dist.barrier()
            rounds[name].append(_microseconds(call, repeats[name]))
    return [
        Timing(
            case=case,
            contender=name,
            medians=tuple(statistics.median(times) for times in of_rounds),
            means=tuple(statistics.fmean(times) for times in of_rounds),
        )
        for name, of_rounds in rounds.items()
    ]


def _agreed_repeats(call: Call, round_s: float) -> int:
    """Calls that fill a round on rank 0."""
    _microseconds(call, 2)
    repeats = torch.tensor(max(3, int(round_s * 1e6 / statistics.median(_microseconds(call, 5)))))
    dist.broadcast(repeats, 0)
    return int(repeats)


def _microseconds(call: Call, repeats: int) -> list[float]:
    """Of each call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _report(timings: Sequence[Timing], ways: Sequence[Timing], load: float) -> tuple[str, bool]:
    """The report, and whether the targets are met."""
    found = {ours.case: _ratio(ours, gloo) for ours, gloo in _pairs(timings)}
    targets = [
        f"- {case} in at most {MOST_OF_GLOO} of gloo's time: {found[case]:.3f}, {_verdict(found[case])}"
        for case in (EXCHANGE_CASE, LAYER_CASE)
    ]
    lines = [
        "# Collectives between ranks of one host",
        "",
        "Written by `python benchmarks/bench_collectives.py --results benchmarks/results`.",
        f"{describe_machine().text}.",
        f"Load average before the run: {load:.1f}.",
        "",
        f"Two ranks, {WIDTH} wide, bfloat16; microseconds of a call, median over rounds. Dispatch and combine are",
        f"those of a layer with {NUM_EXPERTS} experts, {TOP_K} for each token: all tensor work, no experts. Over gloo",
        "they go by all_to_all_single, a row for each token and expert; `rows alone` is what all_to_all_single takes",
        "to carry each token to both ranks and back, which is less work than ours.",
        "",
        *_table(timings, (SHARED_MEMORY, GLOO)),
        "",
        "Targets:",
        "",
        *targets,
        "",
        f"The ways to bring tokens to experts, over shared memory ({NUM_EXPERTS} experts, {TOP_K} for each token):",
        "",
        *_table(ways, (ALL_GATHER, ALL_TO_ALL)),
    ]
    return "\n".join(lines), all(found[case] <= MOST_OF_GLOO for case in (EXCHANGE_CASE, LAYER_CASE))


def _verdict(ratio: float) -> str:
    return "met" if ratio <= MOST_OF_GLOO else "MISSED"


def _table(timings: Sequence[Timing], contenders: tuple[str, str]) -> list[str]:
    rows: list[list[Cell]] = []
    for one, other in _pairs(timings):
        assert one.case == other.case
        medians = [statistics.median(timing.medians) for timing in (one, other)]
        means = [statistics.median(timing.means) for timing in (one, other)]
        rows.append([one.case, *medians, f"{_ratio(one, other):.3f}", *means])
    return table(["case", *contenders, "ratio", *(f"{contender}, mean" for contender in contenders)], rows)


def _pairs(timings: Sequence[Timing]) -> Iterator[tuple[Timing, Timing]]:
    """The two contenders of a case stand one after the other."""
    return zip(timings[::2], timings[1::2], strict=True)


def _ratio(one: Timing, other: Timing) -> float:
    return statistics.median(a / b for a, b in zip(one.medians, other.medians, strict=True))


if __name__ == "__main__":
    sys.exit(main())
