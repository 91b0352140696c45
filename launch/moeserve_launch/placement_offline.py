"""`moeserve placement simulate | advise`: expert loads replayed without a server."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.config import ConfigError
from moeserve_launch.placement_plot import check_plot, plot
from moeserve_placement import Cluster, ExpertPlacement, PlanSettings
from moeserve_placement.advisor import advise
from moeserve_placement.controller import ControllerSettings
from moeserve_placement.load import LoadTrace, read_trace, trace_from_routing_counts
from moeserve_placement.scenario import Scenario
from moeserve_placement.simulator import comparison, simulate
from moeserve_placement.synthetic import dirichlet_popularity, domain_popularity, drifting_trace, switching_trace

NUM_WINDOWS, WINDOWS_PER_DOMAIN, TOKENS_PER_WINDOW = 240, 40, 65_536
"""Of synthetic loads, and of routing counts, whose domains take turns."""


def run_simulate(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for what the user can mend."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    try:
        trace = _load(arguments.trace)
        scenarios = [
            replace(scenario, replan_windows=arguments.replan_windows) for scenario in _scenarios(trace, arguments)
        ]
        simulations = [
            simulate(trace, scenario.with_policy(policy)) for scenario in scenarios for policy in arguments.policy
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(comparison(simulations))
    _write_json(arguments.json, [simulation.to_dict() for simulation in simulations])
    if arguments.plot is not None:
        plot(simulations, arguments.plot)
    return 0


def run_advise(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for what the user can mend."""
    try:
        trace = _load(arguments.trace)
        advice = [advise(trace, scenario) for scenario in _scenarios(trace, arguments)]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print("\n\n".join(each.table() for each in advice))
    _write_json(arguments.json, [each.to_dict() for each in advice])
    return 0


def _load(name: str) -> LoadTrace:
    """A trace by its name, or loads drawn at random: the same ones every time."""
    rng = np.random.default_rng(0)
    if name == "drift":
        popularity_LE = dirichlet_popularity(rng, num_layers=8, num_experts=256, concentration=1.0)
        return drifting_trace(
            popularity_LE, num_windows=NUM_WINDOWS, tokens_per_window=TOKENS_PER_WINDOW, top_k=8, drift=0.02, seed=0
        )
    path = Path(name)
    if name == "switch":
        model, top_k = "synthetic switch", 8
        popularity_GLE = np.stack(
            [dirichlet_popularity(rng, num_layers=8, num_experts=256, concentration=1.0) for _ in range(4)]
        )
    elif path.suffix == ".json":
        counts = trace_from_routing_counts(path)
        model, top_k, popularity_GLE = counts.model, counts.top_k, domain_popularity(counts)
    else:
        return read_trace(path)
    trace = switching_trace(
        popularity_GLE,
        num_windows=WINDOWS_PER_DOMAIN * max(len(popularity_GLE), NUM_WINDOWS // WINDOWS_PER_DOMAIN),
        windows_per_domain=WINDOWS_PER_DOMAIN,
        tokens_per_window=TOKENS_PER_WINDOW,
        top_k=top_k,
        seed=0,
    )
    return replace(trace, model=model)


def _scenarios(trace: LoadTrace, arguments: argparse.Namespace) -> Iterator[Scenario]:
    """One for each number of ranks, or the one of a saved placement."""
    if not trace.windows:
        raise ConfigError(f"{arguments.trace} holds no windows")
    num_layers, num_experts = trace.windows[0].expert_load_LE.shape
    settings = _controller_settings(arguments.set)
    plan_settings = PlanSettings(
        expert_bytes=arguments.expert_bytes, max_incoming_per_layer_rank=arguments.max_incoming
    )
    if arguments.placement_file is not None:
        start = ExpertPlacement.load(arguments.placement_file)
        cluster = Cluster.of(start, num_nodes=arguments.nodes)
        yield Scenario(start=start, cluster=cluster, plan_settings=plan_settings, controller=settings)
        return
    for num_ranks in arguments.ranks:
        scenario = Scenario.in_order(
            num_layers=num_layers,
            num_experts=num_experts,
            num_ranks=num_ranks,
            num_nodes=arguments.nodes,
            places_per_rank=arguments.places_per_rank,
        )
        yield replace(scenario, plan_settings=plan_settings, controller=settings)


def _controller_settings(words: Sequence[str]) -> ControllerSettings:
    """Settings of `name=value` words. Raises ConfigError for an unknown name or what is no number."""
    defaults = asdict(ControllerSettings())
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in defaults:
            raise ConfigError(f"--set takes a setting of the controller ({', '.join(defaults)}), got {name!r}")
        try:
            values[name] = type(defaults[name])(text)
        except ValueError as error:
            raise ConfigError(f"{name} must be a number, got {text!r}") from error
    return ControllerSettings(**values)


def _write_json(path: Path | None, record: list[dict[str, Any]]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
