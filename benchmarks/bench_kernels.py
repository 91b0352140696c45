"""Every kernel beside plain torch, against what memory and products of the same machine reach in the same run.

    python benchmarks/bench_kernels.py --quick
    python benchmarks/bench_kernels.py --json results.json
    python benchmarks/bench_kernels.py --device cuda

On a CPU the backends cpu and torch compete, on a GPU triton and torch; for experts `grouped_mm`, for attention SDPA
over keys and values that lie in one piece. Contenders take turns in rounds; times are medians over the rounds, `vs
torch` is the median of the ratio within a round. Absolute figures belong to this machine at this moment.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, dataclass

import torch
from tqdm import tqdm

from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.tables import Cell, table
from benchmarks.kernels.cases import Case, Cases, Shape
from benchmarks.kernels.timing import Ceilings, Clock, Effort, measure_ceilings
from moeserve_kernels import native
from moeserve_kernels.backend import Backend

OLMOE = Shape(hidden_size=2048, width=1024, num_experts=64, top_k=8)
SMALL = Shape(hidden_size=1024, width=512, num_experts=32, top_k=4, context=512)
"""Of `--quick`: the same layer, a twelfth of its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One contender in one case."""

    op: str
    shape: str
    contender: str
    num_bytes: float
    flops: float
    seconds: tuple[float, ...]
    """Of one call, for each round."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def speed_over(self, other: "Timing") -> float:
        return statistics.median(theirs / ours for ours, theirs in zip(self.seconds, other.seconds, strict=True))


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    effort = Effort(num_rounds=3, round_s=0.03) if arguments.quick else Effort(num_rounds=9, round_s=0.2)
    clock = Clock(device, effort)
    backends: list[Backend] = ["triton", "torch"] if device.type == "cuda" else ["torch"]
    if device.type == "cpu":
        try:
            native.load()
            backends.insert(0, "cpu")
        except native.NativeUnavailable as reason:
            print(f"without the backend cpu: {reason}", file=sys.stderr)
    ceilings = measure_ceilings(device, clock)
    timings = [
        timing
        for case in tqdm(Cases(SMALL if arguments.quick else OLMOE, device, backends), leave=False, disable=None)
        for timing in _time(case, clock)
    ]
    print(_report(timings, ceilings, device), file=sys.stderr if arguments.json == "-" else sys.stdout)
    record = {"machine": asdict(describe_machine()), "device": _name(device), "ceilings": asdict(ceilings)}
    write_json(arguments.json, record | {"timings": [asdict(timing) for timing in timings]})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA GPU here")
    return arguments


def _time(case: Case, clock: Clock) -> list[Timing]:
    return [
        Timing(
            op=case.op,
            shape=case.shape,
            contender=contender,
            num_bytes=case.num_bytes,
            flops=case.flops,
            seconds=seconds,
        )
        for contender, seconds in clock.time(case.calls).items()
    ]


def _report(timings: list[Timing], ceilings: Ceilings, device: torch.device) -> str:
    in_torch = {(timing.op, timing.shape): timing for timing in timings if timing.contender == "torch"}
    rows: list[list[Cell]] = []
    for timing in timings:
        gb_per_s, gflops = (amount / timing.median / 1e9 for amount in (timing.num_bytes, timing.flops))
        rows.append(
            [
                timing.op,
                timing.shape,
                timing.contender,
                timing.median * 1e6,
                gb_per_s,
                gb_per_s / ceilings.copy_gb_per_s * 100,
                gflops or None,
                gflops / ceilings.matmul_gflops * 100 or None,
                timing.speed_over(in_torch[timing.op, timing.shape]),
            ]
        )
    header = ("op", "shape", "contender", "us", "GB/s", "% of copy", "GFLOP/s", "% of matmul", "vs torch")
    about = f"{describe_machine().text}; {_name(device)}"
    reached = f"copy {ceilings.copy_gb_per_s:.1f} GB/s, matmul {ceilings.matmul_gflops:,.0f} GFLOP/s"
    return "\n".join([about, reached, "", *table(header, rows)])


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())
