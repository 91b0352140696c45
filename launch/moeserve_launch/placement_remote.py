"""`moeserve placement` against a running server: what an operator sees and orders from a terminal."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from moeserve_launch.client import call_server

_URL = "http://127.0.0.1:8000"
_NEWEST_DECISIONS = 5
_MOVES_SHOWN = 20

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_remote_commands(commands: Subparsers) -> None:
    """show, load, plan, apply, freeze, thaw and rollback."""
    _add(commands, "show", "where experts lie, what is under way, and the newest decisions", _show)
    load = _add(commands, "load", "how even the ranks are, and how even chance lets them be", _load)
    load.add_argument(
        "--phase", choices=("prefill", "decode", "mixed"), default="mixed", help="mixed is both (default)"
    )
    load.add_argument("--window", type=float, default=60.0, metavar="S", help="seconds back from now (60)")
    _add(commands, "plan", "what would be moved now, and whether it is worth it; nothing moves", _plan)
    apply = commands.add_parser("apply", help="order the newest plan")
    apply.add_argument("plan_id", type=int, help="as `plan` gave it")
    _add_server(apply, _apply)
    for word, text in (
        ("freeze", "move nothing by itself from now on"),
        ("thaw", "follow the load again"),
        ("rollback", "go back to the map before the last migration"),
    ):
        _add(commands, word, text, partial(_order, path=word))


def add_server_keys(parser: argparse.ArgumentParser) -> None:
    """The keys a server may ask for."""
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--admin-key", help="sent instead of the API key; orders need it")


def run_remote_advise(arguments: argparse.Namespace) -> int:
    """Advice from the loads that the server at the URL `arguments.trace` has seen."""
    arguments.url = arguments.trace
    print(_call(arguments, "/advice")["table"])
    return 0


def _add(
    commands: Subparsers, word: str, text: str, show: Callable[[argparse.Namespace], str]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(word, help=text)
    _add_server(parser, show)
    return parser


def _add_server(parser: argparse.ArgumentParser, show: Callable[[argparse.Namespace], str]) -> None:
    parser.add_argument("url", nargs="?", default=_URL, metavar="URL", help=f"the server ({_URL})")
    add_server_keys(parser)
    parser.add_argument("--json", action="store_true", help="print the server's answer as it is")

    def run(arguments: argparse.Namespace, _words: Sequence[str]) -> int:
        print(show(arguments))
        return 0

    parser.set_defaults(run=run)


def _call(arguments: argparse.Namespace, path: str, *, body: Any = None) -> dict[str, Any]:
    """The server's answer. Raises ConnectionError with what it said where it refuses."""
    key = arguments.admin_key or arguments.api_key
    with call_server(arguments.url, f"/v1/placement{path}", key=key, body=body) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _show(arguments: argparse.Namespace) -> str:
    shown = _call(arguments, "")
    if arguments.json:
        return json.dumps(shown)
    decisions = _call(arguments, f"/decisions?limit={_NEWEST_DECISIONS}")["decisions"]
    lines = [f"{_clock_time(each['time_s'])}  {each['action']}: {each['reason']}" for each in decisions]
    return "\n".join([_describe(shown), *(["", "newest decisions:", *lines] if lines else [])])


def _order(arguments: argparse.Namespace, *, path: str) -> str:
    answer = _call(arguments, f"/{path}", body={})
    return json.dumps(answer) if arguments.json else _describe(answer)


def _apply(arguments: argparse.Namespace) -> str:
    answer = _call(arguments, "/apply", body={"plan_id": arguments.plan_id})
    return json.dumps(answer) if arguments.json else _describe(answer)


def _describe(shown: dict[str, Any]) -> str:
    """The state in a few lines; layers are counted, not listed."""
    frozen = ", frozen" if shown["frozen"] else ""
    lines = [f"{shown['state']}{frozen}: {shown['reason']}" if shown["reason"] else f"{shown['state']}{frozen}"]
    if not shown["engine_is_ready"]:
        lines.append("the engine is not ready; what follows is the last that was heard")
    table = shown["map"]
    if table is not None:
        lines.append(
            f"epoch {table['epoch']}: {table['num_logical_experts']} experts on {table['num_physical_experts']} places "
            f"of {len(table['ranks'])} ranks, {len(table['layers'])} MoE layers"
        )
    controller, change = shown["controller"], shown["change"]
    if controller is not None and controller["plan_id"] is not None:
        lines.append(f"plan {controller['plan_id']}, {controller['plan_age_s']:.1f} s old")
    if change is not None:
        waiting = ", ".join(str(rank) for rank in change["waiting_for_ranks"])
        lines.append(
            f"change {change['change_id']} ({change['kind']}, {change['num_moves']} moves, {change['age_s']:.1f} s): "
            f"{change['stage']}, waiting for ranks {waiting}"
        )
    lines += [f"failed {count} times: {reason}" for reason, count in shown["failures"].items()]
    return "\n".join(lines)


def _load(arguments: argparse.Namespace) -> str:
    load = _call(arguments, f"/load?phase={arguments.phase}&window={arguments.window}")
    if arguments.json:
        return json.dumps(load)
    lines = [
        f"{load['phase']}, {load['num_windows']} windows, {load['duration_s']:.1f} s, {load['num_tokens']} tokens",
        f"balancedness {load['balancedness_mean']:.4f}, worst {load['balancedness_worst']:.4f} in layer "
        f"{load['worst_layer']}; chance alone leaves {load['floor']:.4f}",
        "",
        "| layer | balancedness | most loaded rank | hottest expert |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {layer['layer']} | {layer['balancedness']:.4f} | {_hottest(layer['rank_load'])} "
        f"| {_hottest(layer['expert_load'])} |"
        for layer in load["layers"]
    ]
    return "\n".join(lines)


def _plan(arguments: argparse.Namespace) -> str:
    plan = _call(arguments, "/plan", body={})
    if arguments.json:
        return json.dumps(plan)
    prediction, moves = plan["prediction"], plan["moves"]
    lines = [f"plan {plan['plan_id']}: {'worth it' if plan['worth'] else 'not worth it'}: {plan['reason']}"]
    if prediction is None:
        return lines[0]
    lines.append(
        f"{prediction['num_moves']} moves in {prediction['num_layers']} layers, "
        f"{prediction['num_bytes'] / 1e6:.1f} MB, "
        f"{prediction['copy_s']:.2f} s to copy; gains {prediction['gain_share']:.2%} of step time"
    )
    lines += [
        f"  layer {move['layer']}: expert {move['logical_expert_id']} from place {move['source_physical_id']} to place "
        f"{move['destination_physical_id']}"
        for move in moves[:_MOVES_SHOWN]
    ]
    if len(moves) > _MOVES_SHOWN:
        lines.append(f"  and {len(moves) - _MOVES_SHOWN} more (--json lists them)")
    lines.append(f"to order it: moeserve placement apply {plan['plan_id']} {arguments.url}")
    return "\n".join(lines)


def _hottest(loads: Sequence[float]) -> str:
    """Index of the highest, and how many times the mean it is."""
    index = max(range(len(loads)), key=lambda each: loads[each])
    total = sum(loads)
    return f"{index} ({loads[index] * len(loads) / total:.2f} x mean)" if total else "-"


def _clock_time(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
