"""`moeserve placement` against a running server: what an operator sees and orders from a terminal."""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from moeserve.config import ConfigError
from moeserve_launch.client import call_server

_URL = "http://127.0.0.1:8000"
_NEWEST_DECISIONS = 5
_MOVES_SHOWN = 20

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_remote_commands(commands: Subparsers) -> None:
    """show, load, decisions, plan, apply, freeze, thaw, rollback, pins and export."""
    _add(commands, "show", "where experts lie, what is under way, and the newest decisions", _show)
    load = _add(commands, "load", "how even the ranks are, and how even chance lets them be", _load)
    load.add_argument(
        "--phase", choices=("prefill", "decode", "mixed"), default="mixed", help="mixed is both (default)"
    )
    load.add_argument("--window", type=float, default=60.0, metavar="S", help="seconds back from now (60)")
    decisions = _add(commands, "decisions", "what the controller decided and what came of it, newest last", _decisions)
    decisions.add_argument("--limit", type=int, default=20, metavar="N", help="how many of the newest (20)")
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
    _add_pins(_add(commands, "pins", "which experts must lie where; with --pin or --clear: replace that", _pins))
    _add_files(
        _add(commands, "export", "the map in force, and the loads seen, as files; without any: the map", _export)
    )


def _add_pins(parser: argparse.ArgumentParser) -> None:
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument(
        "--pin",
        type=_parse_pin,
        action="append",
        metavar="EXPERT:RANK[:LAYER]",
        help="a replica of the expert on the rank; without layer: in every MoE layer; may be repeated",
    )
    wanted.add_argument("--clear", action="store_true", help="no pins from now on")


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--map", type=Path, metavar="FILE", help="write the map for --placement-file")
    parser.add_argument(
        "--loads", type=Path, metavar="FILE", help="write the loads for simulate and advise (.npz, .jsonl)"
    )


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


def _open(arguments: argparse.Namespace, path: str, *, body: Any = None, method: str | None = None) -> Any:
    """The server's answer, to be read. Raises ConnectionError with what it said where it refuses."""
    key = arguments.admin_key or arguments.api_key
    return call_server(arguments.url, f"/v1/placement{path}", key=key, body=body, method=method)


def _call(arguments: argparse.Namespace, path: str, *, body: Any = None, method: str | None = None) -> dict[str, Any]:
    """The server's answer, read."""
    with _open(arguments, path, body=body, method=method) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _show(arguments: argparse.Namespace) -> str:
    shown = _call(arguments, "")
    if arguments.json:
        return json.dumps(shown)
    decisions = _call(arguments, f"/decisions?limit={_NEWEST_DECISIONS}")["decisions"]
    lines = [_describe_decision(each) for each in decisions]
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


def _decisions(arguments: argparse.Namespace) -> str:
    answer = _call(arguments, f"/decisions?limit={arguments.limit}")
    if arguments.json:
        return json.dumps(answer)
    return "\n".join(_describe_decision(each) for each in reversed(answer["decisions"])) or "nothing was decided yet"


def _describe_decision(decision: dict[str, Any]) -> str:
    text = f"{_clock_time(decision['time_s'])}  epoch {decision['epoch']}  {decision['action']}: {decision['reason']}"
    outcome = decision["outcome"]
    if outcome is None:
        return text
    return f"{text}; {outcome['state']}: {outcome['reason']}" if outcome["reason"] else f"{text}; {outcome['state']}"


def _pins(arguments: argparse.Namespace) -> str:
    wanted = [] if arguments.clear else arguments.pin
    answer = _call(arguments, "") if wanted is None else _call(arguments, "/pins", body={"pins": wanted}, method="PUT")
    if arguments.json:
        return json.dumps(answer["pins"])
    lines = [
        f"expert {pin['logical_expert_id']} on rank {pin['rank']} in "
        f"{'every MoE layer' if pin['layer'] is None else 'layer ' + str(pin['layer'])}"
        for pin in answer["pins"]
    ]
    return "\n".join(lines) or "no pins"


def _export(arguments: argparse.Namespace) -> str:
    """Raises ConfigError for a file that cannot be written, and loads of another ending, before anything is asked."""
    loads, map_file = arguments.loads, arguments.map
    if loads is not None and loads.suffix not in (".npz", ".jsonl"):
        raise ConfigError(f"--loads must end in .npz or .jsonl, got {loads}")
    if loads is None and map_file is None:
        return json.dumps(_call(arguments, "/export"))
    said = []
    try:
        if map_file is not None:
            map_file.write_text(json.dumps(_call(arguments, "/export")) + "\n")
            said.append(f"{map_file}: the map in force; moeserve serve --placement-file {map_file} starts with it")
        if loads is not None:
            num_windows = _write_loads(arguments, loads)
            said.append(f"{loads}: {num_windows} load windows; moeserve placement simulate {loads} replays them")
    except OSError as error:
        if isinstance(error, ConnectionError):
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return "\n".join(said)


def _write_loads(arguments: argparse.Namespace, path: Path) -> int:
    """Returns how many windows there are; prefill and decode of one time are one."""
    from moeserve_placement.load import read_trace, write_trace

    with tempfile.TemporaryDirectory() as folder, _open(arguments, "/load/trace") as response:
        received = Path(folder) / "received.jsonl"
        with received.open("wb") as file:
            shutil.copyfileobj(response, file)
        trace = read_trace(received)
    write_trace(path, trace)
    return len({window.start_s for window in trace.windows})


def _parse_pin(text: str) -> dict[str, int]:
    numbers = text.split(":")
    if len(numbers) not in (2, 3) or not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"must be EXPERT:RANK or EXPERT:RANK:LAYER, got {text!r}")
    return dict(zip(("logical_expert_id", "rank", "layer"), map(int, numbers), strict=False))


def _hottest(loads: Sequence[float]) -> str:
    """Index of the highest, and how many times the mean it is."""
    index = max(range(len(loads)), key=lambda each: loads[each])
    total = sum(loads)
    return f"{index} ({loads[index] * len(loads) / total:.2f} x mean)" if total else "-"


def _clock_time(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))
