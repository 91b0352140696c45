"""moeserve beside vLLM, llama.cpp and transformers: the same checkpoint, load and cores, in one run.

    python -m benchmarks.peers             # everything; writes peers_cpu.md, .json and .png in benchmarks/results
    python -m benchmarks.peers --prepare   # only sets up what a run needs
    python -m benchmarks.peers --only llama.cpp --compare one-core int8
    python -m benchmarks.peers --quick
    python -m benchmarks.peers --list      # the plan, as JSON

The first run sets up the peers' environments in the cache folder (vLLM: 3.4 GB; llama.cpp: built from source, many
minutes) and writes the checkpoint (1.7 GB, and as much for llama.cpp). Run it on a machine with nothing else to do.
A peer that cannot be set up is told in the report, with the reason. The exit status is 1 where a target is missed or a
system of ours has no figures.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.make_checkpoint import SHAPES, ensure_checkpoint
from benchmarks.peers.chart import draw_chart
from benchmarks.peers.overhead import Overhead, Profiler
from benchmarks.peers.plan import MANY_CLIENTS, ONE_CORE, OURS, PLAN, QUICK, Comparison, all_peers
from benchmarks.peers.report import Run, as_json, as_markdown
from benchmarks.peers.runner import Checkpoint, Record, Runner
from benchmarks.peers.system import Peer
from benchmarks.peers.targets import judge

RESULTS = Path(__file__).parent / "results"
QUICK_SHAPE, SHAPE = "small", "mid"


def main() -> int:
    peers = all_peers()
    arguments = _arguments(peers)
    comparisons = _chosen(arguments)
    if arguments.list:
        print(json.dumps([asdict(comparison) for comparison in comparisons], indent=1))
        return 0
    checkpoint = _checkpoint(arguments)
    runner = Runner(peers, checkpoint, num_rounds=1 if arguments.quick else arguments.rounds)
    runner.prepare(comparisons)
    if arguments.prepare:
        return int(bool(runner.record.failures))
    run = _describe(peers, checkpoint, comparisons, runner.record)
    for comparison in comparisons:
        runner.run(comparison)
        _save(run, arguments.results)
    if any(comparison.key == ONE_CORE.key for comparison in comparisons):
        run = replace(run, overhead=_overhead(runner, checkpoint))
    if not arguments.quick:
        share = run.overhead.share if run.overhead else None
        run = replace(run, verdicts=judge(run.results, runner.record.ready_s, share))
    _save(run, arguments.results)
    print(as_markdown(run), file=sys.stderr if arguments.json == "-" else sys.stdout)
    write_json(arguments.json, as_json(run))
    return int(any(verdict.word == "MISSED" for verdict in run.verdicts) or _ours_failed(comparisons, runner.record))


def _arguments(peers: Mapping[str, Peer]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    others = [name for name in peers if name != OURS]
    parser.add_argument("--only", nargs="+", choices=others, default=others, help="peers beside moeserve")
    parser.add_argument(
        "--compare", nargs="+", choices=[comparison.key for comparison in PLAN], help="comparisons; default: all"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="serve this one instead of the random one")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default for a whole run: benchmarks/results")
    parser.add_argument("--prepare", action="store_true", help="set up what the comparisons need, and stop")
    parser.add_argument("--list", action="store_true", help="print what would be compared, and stop")
    add_common_arguments(parser, quick="a small checkpoint, moeserve and transformers only: under 50 s on two cores")
    arguments = parser.parse_args()
    is_whole = not arguments.quick and arguments.compare is None and len(arguments.only) == len(others)
    if arguments.results is None and is_whole:
        arguments.results = RESULTS
    return arguments


def _chosen(arguments: argparse.Namespace) -> list[Comparison]:
    if arguments.quick:
        return [QUICK]
    wanted = [comparison for comparison in PLAN if arguments.compare is None or comparison.key in arguments.compare]
    return [comparison.only({OURS, *arguments.only}) for comparison in wanted]


def _checkpoint(arguments: argparse.Namespace) -> Checkpoint:
    shape = QUICK_SHAPE if arguments.quick else SHAPE
    folder = arguments.checkpoint or cache_folder() / "checkpoints" / shape
    if arguments.checkpoint is None:
        ensure_checkpoint(folder, SHAPES[shape])
    return Checkpoint.read(folder)


def _overhead(runner: Runner, checkpoint: Checkpoint) -> Overhead | None:
    """On the one-core server with many clients, in a run of its own: the profiler takes time too."""
    profiler = Profiler()
    prompts = MANY_CLIENTS.prompts(vocab_size=checkpoint.vocab_size, seed=runner.record.next_round)
    try:
        profiler.prepare()
        with runner.running(ONE_CORE.ours) as system, tqdm(total=1, desc="Profiling", unit="run") as bar:
            result = profiler.measure(system, MANY_CLIENTS, prompts)
            bar.update()
    except (RuntimeError, OSError) as error:
        runner.record.failures["share of scheduler and frontend"] = str(error)
        return None
    return result


def _describe(
    peers: Mapping[str, Peer], checkpoint: Checkpoint, comparisons: Sequence[Comparison], record: Record
) -> Run:
    used = {variant.peer for comparison in comparisons for variant in comparison.variants}
    return Run(
        command=shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        machine=describe_machine(),
        checkpoint=checkpoint.text,
        versions={name: peer.version for name, peer in peers.items() if name in used},
        comparisons=comparisons,
        record=record,
    )


def _save(run: Run, folder: Path | None) -> None:
    """After every comparison, so that a run which is cut off leaves what it had found."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers_cpu.md").write_text(f"{as_markdown(run)}\n![rates](peers_cpu.png)\n")
    write_json(str(folder / "peers_cpu.json"), as_json(run))
    draw_chart(run, folder / "peers_cpu.png")


def _ours_failed(comparisons: Sequence[Comparison], record: Record) -> bool:
    ours = {variant.name for comparison in comparisons for variant in comparison.variants if variant.peer == OURS}
    return not ours.isdisjoint(record.failures)


if __name__ == "__main__":
    sys.exit(main())
