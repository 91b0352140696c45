"""The command line of `moeserve placement`; what its commands do is imported when one runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from moeserve_launch.arguments import parse_bytes
from moeserve_launch.placement_remote import add_remote_commands, add_server_keys, run_remote_advise


def add_placement_commands(parser: argparse.ArgumentParser) -> None:
    """Commands that replay a trace, and those that talk to a running server."""
    commands = parser.add_subparsers(required=True, metavar="action")
    add_remote_commands(commands)
    simulate = commands.add_parser("simulate", help="replay expert loads over policies and cluster sizes")
    _add_scenario(simulate)
    option = simulate.add_argument
    option("--policy", nargs="+", default=["frozen", "incremental", "eplb-global"], metavar="NAME",
           help="frozen, incremental, eplb-global, eplb-hierarchical (the first three)")  # fmt: skip
    option("--replan-windows", type=int, default=8, metavar="N", help="load windows between two EPLB plans (8)")
    option(
        "--plot",
        type=Path,
        metavar="FILE",
        help="balancedness and bytes over time, .html, .png or .svg; needs matplotlib",
    )
    simulate.set_defaults(run=_run_simulate)

    advise = commands.add_parser("advise", help="what following the load would bring, and the memory it takes")
    _add_scenario(advise)
    add_server_keys(advise)
    advise.set_defaults(run=_run_advise)


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("trace", help="load trace (.npz, .jsonl), routing counts by text domain (.json: domains take turns), or "
                         "`drift` or `switch` for synthetic loads; for advise also a server's URL")  # fmt: skip
    option("--ranks", type=int, nargs="+", default=[32], metavar="R", help="EP ranks, one size or several (32)")
    option("--nodes", type=int, default=1, metavar="N", help="equal nodes that the ranks are on (1)")
    option("--places-per-rank", type=int, metavar="S", help="physical experts of a rank (one more than needed)")
    option("--placement-file", type=Path, metavar="FILE", help="start from a saved placement, on its ranks")
    option("--expert-bytes", type=parse_bytes, default=2**24, metavar="BYTES", help="one expert record (16M)")
    option("--max-incoming", type=int, metavar="N", help="places of a rank that a plan may change in a layer (any)")
    option("--set", action="append", default=[], metavar="name=value", help="a setting of the controller")
    option("--json", type=Path, metavar="FILE", help="write everything found")


def _run_simulate(arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    from moeserve_launch.placement_offline import run_simulate

    return run_simulate(arguments)


def _run_advise(arguments: argparse.Namespace, _words: Sequence[str]) -> int:
    if arguments.trace.startswith(("http://", "https://")):
        return run_remote_advise(arguments)
    from moeserve_launch.placement_offline import run_advise

    return run_advise(arguments)
