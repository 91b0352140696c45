"""Throughput and latency of the real server for any checkpoint and layouts, beside transformers' `generate`.

    python benchmarks/bench_serve.py --quick
    python benchmarks/bench_serve.py --model FOLDER --layouts 1x1 2x1 1x2 --clients 1 8 32 --json results.json

A layout is tp x dp, and each of its ranks has a core. All systems take turns under one load generator, so read the
ratios; absolute figures belong to this machine at this moment.
"""

import argparse
import sys
from dataclasses import asdict

from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.load import Load
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.measurement import Results
from benchmarks.harness.tables import Cell, table
from benchmarks.peers.plan import OURS, Comparison, all_peers
from benchmarks.peers.runner import Checkpoint, Record, Runner
from benchmarks.peers.system import Variant
from moeserve.models.checkpoint import resolve_model_folder


def main() -> int:
    arguments = _arguments()
    checkpoint = Checkpoint.read(resolve_model_folder(arguments.model))
    comparison = _comparison(arguments)
    runner = Runner(all_peers(), checkpoint, num_rounds=1 if arguments.quick else arguments.rounds)
    runner.prepare([comparison])
    runner.run(comparison)
    lines = [f"{checkpoint.text}; {describe_machine().text}", "", *_table(comparison, runner.record)]
    print("\n".join(lines), file=sys.stderr if arguments.json == "-" else sys.stdout)
    rows = [asdict(row) for row in runner.record.measurements]
    record = {"machine": asdict(describe_machine()), "rows": rows, "failures": runner.record.failures}
    write_json(arguments.json, record)
    return int(bool(runner.record.failures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder, or `demo` (default)")
    parser.add_argument("--layouts", nargs="+", default=[(1, 1)], metavar="TPxDP", type=_layout)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    add_common_arguments(parser)
    return parser.parse_args()


def _layout(text: str) -> tuple[int, int]:
    tp, sign, dp = text.partition("x")
    if not (sign and tp.isdigit() and dp.isdigit() and int(tp) and int(dp)):
        raise argparse.ArgumentTypeError(f"must be TPxDP such as 2x1, got {text!r}")
    return int(tp), int(dp)


def _comparison(arguments: argparse.Namespace) -> Comparison:
    ours = tuple(
        Variant(name=f"moeserve tp{tp} dp{dp}", peer=OURS, num_cores=tp * dp, flags=("-tp", str(tp), "-dp", str(dp)))
        for tp, dp in arguments.layouts
    )
    cores = max(variant.num_cores for variant in ours)
    prompt_tokens, output_tokens = (64, 32) if arguments.quick else (128, 64)
    return Comparison(
        key="serve",
        name=f"{arguments.model} beside transformers",
        variants=(*ours, Variant(name="transformers", peer="transformers", num_cores=cores)),
        loads=tuple(
            Load(
                name="1 client" if n == 1 else f"{n} clients",
                num_clients=n,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
            )
            for n in ([1, 8] if arguments.quick else arguments.clients)
        ),
    )


def _table(comparison: Comparison, record: Record) -> list[str]:
    results = Results(record.measurements, comparison.loads)
    rows: list[list[Cell]] = []
    for load in comparison.loads:
        for variant in comparison.variants:
            latencies = results.latencies_ms(variant.name, load.name)
            ratio = results.ratio(variant.name, "transformers", load.name)
            rows.append([variant.name, load.name, results.rate(variant.name, load.name), ratio, *latencies])
    header = ("system", "load", "tokens/s", "over transformers", "TTFT p50, ms", "ITL p50, ms", "ITL p99, ms")
    return table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
