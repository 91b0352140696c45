"""Measures launch configurations of the Triton kernels on this GPU, and writes the fastest into each op's tuned.json.

    python benchmarks/tune_kernels.py
    python benchmarks/tune_kernels.py --ops fused_moe paged_attention --json timings.json
    pytest tests/kernels/test_aot.py

Needs a GPU. Only the family of this GPU is written; a configuration that does not fit is passed over. Afterwards the
test compiles what was chosen, and says which of it spills registers.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm
from triton.errors import TritonError

import moeserve_kernels
from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.tables import Cell, table
from benchmarks.kernels.timing import Call, Clock, Effort
from benchmarks.kernels.tunable import Table, Tunable, tunables
from moeserve_kernels.tuning import Config, Tuning, family, load_tuning


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest configuration of a class, beside the one it replaces."""

    op: str
    shape_class: str
    config: Config
    microseconds: float
    microseconds_before: float
    num_tried: int


def main() -> int:
    arguments = _arguments()
    device = torch.device("cuda")
    wanted_family = family(torch.cuda.get_device_capability(device))
    has_float8 = "gate_up/float8/decode" in load_tuning("fused_moe", wanted_family)
    effort = Effort(num_rounds=3, round_s=0.005) if arguments.quick else Effort(num_rounds=9, round_s=0.02)
    clock = Clock(device, effort)
    tables: dict[str, Tuning] = {}
    choices = []
    for tunable in tqdm(tunables(device, has_float8=has_float8), disable=None):
        if tunable.op in (arguments.ops or [tunable.op]):
            before = tables.get(tunable.op) or load_tuning(tunable.op, wanted_family)
            choice, tables[tunable.op] = choose(tunable, before, clock)
            choices.append(choice)
    for op, tuning in tables.items():
        path = Path(moeserve_kernels.__path__[0], op, "tuned.json")
        path.write_text(as_text(json.loads(path.read_text()) | {wanted_family: tuning}))
    print(_report(choices), file=sys.stderr if arguments.json == "-" else sys.stdout)
    about = {"machine": asdict(describe_machine()), "device": torch.cuda.get_device_name(device)}
    write_json(arguments.json, about | {"choices": [asdict(choice) for choice in choices]})
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", metavar="OP", help="only these")
    add_common_arguments(parser, quick="fewer and shorter rounds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tuning measures kernels on a CUDA GPU, and torch sees none here; tuned.json stays as it is")
    return arguments


def choose(tunable: Tunable, before: Tuning, clock: Clock) -> tuple[Choice, Table]:
    """The fastest candidate, or what stands in the table if nothing is faster; and the table with it."""
    current = before[tunable.shape_class]
    others = ({**current, **candidate} for candidate in tunable.candidates)
    configs = [current, *(config for config in others if config != current)]
    tried: list[tuple[float, Config]] = []
    for config in configs:
        call = partial(tunable.launch, tuning=tunable.table_with(config, before))
        if config is current or _fits(call):
            tried.append((statistics.median(clock.time({"": call})[""]), config))
    seconds, best = min(tried, key=lambda pair: pair[0])
    choice = Choice(
        op=tunable.op,
        shape_class=tunable.shape_class,
        config=best,
        microseconds=seconds * 1e6,
        microseconds_before=tried[0][0] * 1e6,
        num_tried=len(tried),
    )
    return choice, tunable.table_with(best, before)


def _fits(call: Call) -> bool:
    """Whether the GPU and the compiler take a configuration."""
    try:
        call()
    except TritonError:
        return False
    return True


def as_text(tables: dict[str, Tuning]) -> str:
    """A tuned.json with a line for each class."""
    families = []
    for name, tuning in tables.items():
        lines = [f"    {json.dumps(shape_class)}: {json.dumps(config)}" for shape_class, config in tuning.items()]
        families.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(families) + "\n}\n"


def _report(choices: Sequence[Choice]) -> str:
    header = ("op", "class", "tried", "us before", "us", "configuration")
    rows: list[list[Cell]] = [
        [c.op, c.shape_class, c.num_tried, c.microseconds_before, c.microseconds, json.dumps(c.config)] for c in choices
    ]
    return "\n".join([describe_machine().text, torch.cuda.get_device_name(), "", *table(header, rows)])


if __name__ == "__main__":
    sys.exit(main())
