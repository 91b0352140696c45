"""The expert-placement planner against its targets, beside EPLB at equal places in the same run.

    python benchmarks/bench_placement.py --quick
    python benchmarks/bench_placement.py --json results.json --results benchmarks/results

Loads: the published expert loads of OLMoE (64 experts, 8 ranks, 72 places; every recorded layer of every domain), and
58 layers of 256 experts drawn from Dirichlet(1) (32 ranks, 288 places). The exit status is 1 where a target is missed.

Times are processor time of the one thread that plans, which other work on the machine disturbs least: the median of
several runs. What is compared runs in turn, so that a slower spell of the machine meets both. Wall time is beside it.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from moeserve_placement import Cluster, ExpertPlacement, PlanSettings, fresh_placement, plan
from moeserve_placement.arrays import FloatArray
from moeserve_placement.bound import balancedness_bound
from moeserve_placement.cost import balancedness, by_rank
from moeserve_placement.eplb import eplb_global, twins
from moeserve_placement.load import trace_from_routing_counts
from moeserve_placement.noise_floor import noise_floor
from moeserve_placement.split import even_tokens, tokens_in_force

DATA = Path(__file__).parent / "data"
MOST_MOVED = {0.1: 0.08, 0.3: 0.13}
"""Share of the places that may move after so much noise on the loads."""
SCALED = {None: "fresh plan", 0.03: "plan after ±3% noise", 0.1: "plan after ±10% noise", 0.3: "plan after ±30% noise"}
"""Plans timed on few ranks and on many, by the noise on the loads; after 3 % next to nothing has to move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Loads and the cluster they are placed on."""

    name: str
    load_LE: FloatArray
    cluster: Cluster

    def drifted(self, noise: float, seed: int) -> FloatArray:
        return self.load_LE * np.random.default_rng(seed).uniform(1 - noise, 1 + noise, self.load_LE.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One map under one set of loads; balancedness over the layers."""

    case: str
    loads: str
    planner: str
    worst: float
    mean: float
    moved: float | None = None
    """Share of the places whose expert changed, the most of all seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    what: str
    cpu_ms: float
    wall_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    target: str
    found: float
    limit: float
    at_least: bool

    @property
    def holds(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    rows: list[Row]
    timings: list[Timing]
    checks: list[Check]


def main() -> int:
    arguments = _arguments()
    report = Report(rows=[], timings=[], checks=[])
    seeds = range(2 if arguments.quick else 10)
    for case in _cases(arguments.loads):
        _bench_fresh(case, report)
        for noise in MOST_MOVED:
            _bench_drift(case, noise, seeds, report)
        _bench_arbitrary_start(case, report)
    _bench_time(5 if arguments.quick else 30, report)
    _bench_scale(5 if arguments.quick else 15, report)
    _bench_noise_floor(report)
    _write(report, arguments.json, arguments.results)
    return 0 if all(check.holds for check in report.checks) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 s on two cores")
    parser.add_argument("--json", metavar="FILE", help="write everything measured; - is standard output")
    parser.add_argument("--loads", metavar="DIR", type=Path, default=DATA, help="folder of olmoe_1b_7b.json")
    parser.add_argument("--results", metavar="DIR", type=Path, help="also write placement.md and placement.json there")
    return parser.parse_args()


def _cases(loads: Path) -> list[Case]:
    windows = trace_from_routing_counts(loads / "olmoe_1b_7b.json").windows
    olmoe_LE = np.concatenate([window.expert_load_LE for window in windows])
    return [
        Case(
            name="OLMoE, 64 experts, 8 ranks, 72 places",
            load_LE=olmoe_LE,
            cluster=Cluster.uniform(num_ranks=8, num_physical_experts=72),
        ),
        _dirichlet_case(num_experts=256, num_ranks=32, num_places=288),
    ]


def _dirichlet_case(*, num_experts: int, num_ranks: int, num_places: int) -> Case:
    return Case(
        name=f"Dirichlet(1), {num_experts} experts, {num_ranks} ranks, {num_places} places",
        load_LE=np.random.default_rng(0).dirichlet(np.ones(num_experts), 58) * 1e6,
        cluster=Cluster.uniform(num_ranks=num_ranks, num_physical_experts=num_places),
    )


def _bench_fresh(case: Case, report: Report) -> None:
    bound_L = balancedness_bound(case.load_LE, case.cluster)
    placement, split_LP = fresh_placement(case.load_LE, case.cluster, PlanSettings())
    ours_L = _reached(placement, split_LP, case.load_LE, case.cluster)
    even, even_split_LP = fresh_placement(case.load_LE, case.cluster, PlanSettings(split="even"))
    even_L = _reached(even, even_split_LP, case.load_LE, case.cluster)
    eplb_L = _eplb(case.load_LE, case.cluster)
    for planner, reached_L in (("bound", bound_L), ("ours", ours_L), ("ours, even split", even_L), ("EPLB", eplb_L)):
        report.rows.append(_row(case, "as planned", planner, reached_L))
    report.checks.extend(
        [
            _least(f"{case.name}: fresh plan over the bound, worst layer", float((ours_L / bound_L).min()), 0.995),
            _least(f"{case.name}: fresh plan over EPLB, worst layer", float((ours_L / eplb_L).min()), 1.0),
            _least(f"{case.name}: even split over EPLB, mean", float(even_L.mean() / eplb_L.mean()), 1.0),
        ]
    )


def _bench_drift(case: Case, noise: float, seeds: range, report: Report) -> None:
    current, split_LP = fresh_placement(case.load_LE, case.cluster, PlanSettings())
    num_places = current.physical_to_logical_LP.size
    loads = f"±{noise:.0%} noise"
    resplit, after, eplb, moved, eplb_moved = [], [], [], [], []
    for seed in seeds:
        load_LE = case.drifted(noise, seed)
        result = plan(load_LE, current, case.cluster, PlanSettings(), current_split_LP=split_LP)
        assert not twins(result.placement.physical_to_logical_LP, case.cluster, load_LE.shape[1]).any()
        resplit.append(result.balancedness_resplit_L)
        after.append(result.balancedness_after_L)
        moved.append(len(result.moves) / num_places)
        eplb.append(_eplb(load_LE, case.cluster))
        eplb_moved.append(
            len(plan(load_LE, current, case.cluster, PlanSettings(policy="eplb-global")).moves) / num_places
        )
    report.rows.extend(
        [
            _row(case, loads, "split re-solved only", np.concatenate(resplit), 0.0),
            _row(case, loads, "ours, incremental", np.concatenate(after), max(moved)),
            _row(case, loads, "EPLB, from scratch", np.concatenate(eplb), max(eplb_moved)),
        ]
    )
    least = min(float(ours_L.min() / eplb_L.min()) for ours_L, eplb_L in zip(after, eplb, strict=True))
    mean = min(float(ours_L.mean() / eplb_L.mean()) for ours_L, eplb_L in zip(after, eplb, strict=True))
    report.checks.extend(
        [
            _least(f"{case.name}, {loads}: worst layer", float(np.concatenate(after).min()), 0.99),
            _most(f"{case.name}, {loads}: places moved", max(moved), MOST_MOVED[noise]),
            _least(f"{case.name}, {loads}: worst layer over EPLB's", least, 1.0),
            _least(f"{case.name}, {loads}: mean over EPLB's", mean, 1.0),
        ]
    )


def _bench_arbitrary_start(case: Case, report: Report) -> None:
    """From experts in order, as a server without a saved placement starts."""
    num_layers, num_experts = case.load_LE.shape
    current = ExpertPlacement.identity(
        num_layers=num_layers,
        num_logical_experts=num_experts,
        num_ranks=case.cluster.num_ranks,
        num_redundant_experts=case.cluster.num_physical_experts - num_experts,
    )
    result = plan(case.load_LE, current, case.cluster, PlanSettings())
    moved = len(result.moves) / current.physical_to_logical_LP.size
    report.rows.extend(
        [
            _row(case, "experts in order", "before", result.balancedness_before_L),
            _row(case, "experts in order", "ours, incremental", result.balancedness_after_L, moved),
        ]
    )
    for limit in (1, 2):
        _bench_limited(case, current, limit, report)


def _bench_limited(case: Case, start: ExpertPlacement, limit: int, report: Report) -> None:
    """So few places of a rank at once: one plan after the other until none moves anything."""
    limited = PlanSettings(max_incoming_per_layer_rank=limit)
    result, num_plans, num_moves = plan(case.load_LE, start, case.cluster, limited), 0, 0
    while len(result.moves):
        num_plans, num_moves = num_plans + 1, num_moves + len(result.moves)
        result = plan(case.load_LE, result.placement, case.cluster, limited, current_split_LP=result.split_LP)
    planner = f"ours, {limit} of a rank at once, {num_plans} plans"
    moved = num_moves / start.physical_to_logical_LP.size
    report.rows.append(_row(case, "experts in order", planner, result.balancedness_after_L, moved))


def _bench_time(repeats: int, report: Report) -> None:
    case = _dirichlet_case(num_experts=256, num_ranks=32, num_places=288)
    current, split_LP = fresh_placement(case.load_LE, case.cluster, PlanSettings())

    def replan(noise: float) -> Callable[[], object]:
        load_LE = case.drifted(noise, seed=1)
        return lambda: plan(load_LE, current, case.cluster, PlanSettings(), current_split_LP=split_LP)

    limits_ms = {"fresh plan": 50.0, "plan after ±10% noise": 20.0, "plan after ±30% noise": 50.0}
    functions = (lambda: fresh_placement(case.load_LE, case.cluster, PlanSettings()), replan(0.1), replan(0.3))
    for (what, limit_ms), function in zip(limits_ms.items(), functions, strict=True):
        (timing,) = _timed({f"58 layers x 256 experts, 32 ranks: {what}": function}, repeats)
        report.timings.append(timing)
        report.checks.append(_most(f"{timing.what}, ms", timing.cpu_ms, limit_ms))


def _bench_scale(repeats: int, report: Report) -> None:
    """Sixteen times the ranks, nine places each: with the same 256 experts, and with sixteen times as many."""
    small = _dirichlet_case(num_experts=256, num_ranks=32, num_places=288)
    for num_experts in (256, 4096):
        large = _dirichlet_case(num_experts=num_experts, num_ranks=512, num_places=4608)
        for noise, what in SCALED.items():
            runs = {f"{case.name}: {what}": _scale_run(case, noise, repeats) for case in (small, large)}
            few, many = _timed(runs, repeats)
            report.timings.append(many)
            target = f"{num_experts} experts, {what}: time at 512 ranks over 32"
            report.checks.append(_most(target, many.cpu_ms / few.cpu_ms, 20.0))


def _scale_run(case: Case, noise: float | None, repeats: int) -> Callable[[], object]:
    if noise is None:
        return lambda: fresh_placement(case.load_LE, case.cluster, PlanSettings())
    current, split_LP = fresh_placement(case.load_LE, case.cluster, PlanSettings())
    # Noise that no layer has to be searched for costs a third of other noise, so every run draws its own.
    loads = iter([case.drifted(noise, seed) for seed in range(repeats)])
    return lambda: plan(next(loads), current, case.cluster, PlanSettings(), current_split_LP=split_LP)


def _bench_noise_floor(report: Report) -> None:
    for per_rank, expected in ((32, 0.80), (128, 0.89), (1024, 0.96)):
        off = abs(noise_floor(per_rank, 8) - expected)
        report.checks.append(
            _most(f"noise floor of 8 ranks at {per_rank} assignments a rank, off {expected}", off, 0.005)
        )


def _reached(placement: ExpertPlacement, split_LP: FloatArray, load_LE: FloatArray, cluster: Cluster) -> FloatArray:
    tokens_LP = tokens_in_force(placement.physical_to_logical_LP, load_LE, split_LP)
    return balancedness(by_rank(tokens_LP, cluster), cluster)


def _eplb(load_LE: FloatArray, cluster: Cluster) -> FloatArray:
    """As published: replicas share evenly, and two of them may lie on one rank."""
    table_LP = eplb_global(load_LE, num_physical=cluster.num_physical_experts, num_ranks=cluster.num_ranks)
    return balancedness(by_rank(even_tokens(table_LP, load_LE), cluster), cluster)


def _row(case: Case, loads: str, planner: str, reached_L: FloatArray, moved: float | None = None) -> Row:
    return Row(
        case=case.name,
        loads=loads,
        planner=planner,
        worst=float(reached_L.min()),
        mean=float(reached_L.mean()),
        moved=moved,
    )


def _least(target: str, found: float, limit: float) -> Check:
    return Check(target=target, found=found, limit=limit, at_least=True)


def _most(target: str, found: float, limit: float) -> Check:
    return Check(target=target, found=found, limit=limit, at_least=False)


def _timed(functions: dict[str, Callable[[], object]], repeats: int) -> list[Timing]:
    """The functions by what they do, run in turn."""
    seconds = np.zeros((repeats, len(functions), 2))
    for repeat in range(repeats):
        for index, function in enumerate(functions.values()):
            cpu_start, wall_start = time.process_time(), time.perf_counter()
            function()
            seconds[repeat, index] = time.process_time() - cpu_start, time.perf_counter() - wall_start
    median_ms = np.median(seconds, axis=0) * 1e3
    return [
        Timing(what=what, cpu_ms=float(cpu_ms), wall_ms=float(wall_ms))
        for what, (cpu_ms, wall_ms) in zip(functions, median_ms, strict=True)
    ]


def _write(report: Report, json_file: str | None, results: Path | None) -> None:
    text = _markdown(report)
    record = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}",
        "rows": [asdict(row) for row in report.rows],
        "timings": [asdict(timing) for timing in report.timings],
        "checks": [asdict(check) | {"holds": check.holds} for check in report.checks],
    }
    encoded = json.dumps(record, indent=1)
    print(text, file=sys.stderr if json_file == "-" else sys.stdout)
    if json_file == "-":
        print(encoded)
    elif json_file is not None:
        Path(json_file).write_text(encoded + "\n")
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / "placement.md").write_text(text + "\n")
        (results / "placement.json").write_text(encoded + "\n")


def _markdown(report: Report) -> str:
    lines = [
        "# Expert placement: balancedness, moves and time",
        "",
        "Written by `python benchmarks/bench_placement.py --results benchmarks/results`. Balancedness is mean over max",
        "of the rank loads of a layer, 1 is perfect; worst and mean are over layers (and seeds). Moved is the share of",
        "places whose expert changed. EPLB is our own implementation of the published global policy.",
        "",
        "| loads | | planner | worst layer | mean | moved |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in report.rows:
        moved = "" if row.moved is None else f"{row.moved:.1%}"
        lines.append(f"| {row.case} | {row.loads} | {row.planner} | {row.worst:.4f} | {row.mean:.4f} | {moved} |")
    lines += ["", "| time | processor ms | wall ms |", "| --- | --- | --- |"]
    lines += [f"| {timing.what} | {timing.cpu_ms:.1f} | {timing.wall_ms:.1f} |" for timing in report.timings]
    lines += ["", "| target | found | limit | |", "| --- | --- | --- | --- |"]
    for check in report.checks:
        sign = "≥" if check.at_least else "≤"
        lines.append(
            f"| {check.target} | {check.found:.4g} | {sign} {check.limit:g} | {'ok' if check.holds else 'MISSED'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
