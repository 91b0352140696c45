"""`moeserve bench serve`: sends a plan to a server, shows how it goes, and writes what came of it."""

import argparse
import asyncio
import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from moeserve.config import ConfigError
from moeserve.loadgen.event_loop import run
from moeserve.loadgen.goodput_search import MaxGoodput, Trial
from moeserve.loadgen.loops import LoadResult, OnOutcome, run_closed_loop, run_open_loop
from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.report import Report, check_report_path, write_report
from moeserve.loadgen.sender import Sender
from moeserve.loadgen.stream_client import Server, StreamClient
from moeserve.loadgen.summary import summarize
from moeserve.loadgen.traffic import PlannedRequest
from moeserve.loadgen.trials import find_max_goodput
from moeserve_launch.bench_plan import OpenPlan, Plan, SearchPlan, make_plan, make_prompts, make_style
from moeserve_launch.client import call_server

_NOT_SETTINGS = frozenset({"api_key", "run"})


def run_bench_serve(arguments: argparse.Namespace) -> int:
    """0 where any request came to its end, else 1. Raises ConfigError or ConnectionError for what the user can mend."""
    try:
        if arguments.report is not None:
            check_report_path(arguments.report)
        plan = make_plan(arguments)
        first = plan.first
        prompts = make_prompts(arguments)
        server = Server.from_url(arguments.url)
        headers = {"Authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
        client = StreamClient(server, timeout_s=arguments.timeout, headers=headers)
        model = arguments.model or _first_model(arguments)
        sender = Sender(client, make_style(arguments, model=model), prompts)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    _allow_many_connections()
    load, found = run(_run(sender, plan, first, arguments.url))
    if not load.outcomes:
        raise ConfigError("stopped before any request had ended")
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
        if name not in _NOT_SETTINGS
    }
    report = Report(settings=settings | {"model": model}, load=load, summary=summarize(load), found=found)
    _write(report, arguments)
    return int(report.summary.total.num_failed == report.summary.total.num_requests)


async def _run(sender: Sender, plan: Plan, first: PlannedRequest, url: str) -> tuple[LoadResult, MaxGoodput | None]:
    await _check_server(sender, first, url)
    stop = _stop_on_interrupt()
    with Progress() as progress:
        if isinstance(plan, SearchPlan):
            return await _search(sender, plan, progress, stop)
        if isinstance(plan, OpenPlan):
            on_outcome = progress.start("", len(plan.requests))
            load = await run_open_loop(
                sender, plan.requests, duration_s=plan.duration_s, on_outcome=on_outcome, stop=stop
            )
            return load, None
        load = await run_closed_loop(
            sender,
            plan.next_request,
            num_clients=plan.num_clients,
            duration_s=plan.duration_s,
            on_outcome=progress.start("", plan.num_requests),
            stop=stop,
        )
        return load, None


async def _search(
    sender: Sender, plan: SearchPlan, progress: "Progress", stop: asyncio.Event
) -> tuple[LoadResult, MaxGoodput | None]:
    try:
        search = await find_max_goodput(
            sender,
            plan.workload,
            plan.settings,
            start_rate=plan.start_rate,
            duration_s=plan.duration_s,
            seed=plan.seed,
            on_trial_start=lambda rate, count: progress.start(f"{rate:.3g} req/s", count),
            on_trial_end=progress.tell,
            stop=stop,
        )
    except ValueError as error:  # no arrivals in a trial
        raise ConfigError(str(error)) from error
    return (LoadResult(outcomes=(), seconds=0.0), None) if search is None else (search.load, search.found)


async def _check_server(sender: Sender, first: PlannedRequest, url: str) -> None:
    """One request before all others: a mistake shows at once, and what a server does only once is not measured."""
    outcome = await sender.send(sender.prepare(first), start_s=0.0, due_s=None)
    if outcome.error is not None:
        raise ConnectionError(f"{url}: the first request failed: {outcome.error}")


def _stop_on_interrupt() -> asyncio.Event:
    """Set by the first Ctrl-C: what was sent comes to its end and is reported. The second one ends at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    return stop


class Progress:
    """A bar on standard error: how many requests have ended, met their targets, failed."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def start(self, label: str, total: int | None) -> OnOutcome:
        """A new bar, to be called with each outcome."""
        self._close()
        bar = self._bar = tqdm(total=total, desc=label, unit=" requests", leave=False, disable=None)
        num_good = num_failed = 0

        def on_outcome(outcome: Outcome) -> None:
            nonlocal num_good, num_failed
            num_good += outcome.is_good
            num_failed += outcome.is_failed
            bar.set_postfix({"good": num_good, "failed": num_failed}, refresh=False)
            bar.update()

        return on_outcome

    def tell(self, trial: Trial) -> None:
        """One line of a search."""
        self._close()
        print(
            f"{trial.rate:8.3g} requests/s: {trial.attainment:6.1%} of {len(trial.is_good)} met their targets, "
            f"goodput {trial.goodput_rps:.3g} requests/s",
            file=sys.stderr,
        )

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _first_model(arguments: argparse.Namespace) -> str:
    with call_server(arguments.url, "/v1/models", key=arguments.api_key) as response:
        return str(json.load(response)["data"][0]["id"])


def _allow_many_connections() -> None:
    """An overloaded server has a connection for each waiting request: as many as the system lets one process have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _write(report: Report, arguments: argparse.Namespace) -> None:
    print(report.text(), file=sys.stderr if arguments.json == "-" else sys.stdout)
    try:
        if arguments.json is not None:
            text = json.dumps(report.to_dict(), indent=1) + "\n"
            if arguments.json == "-":
                sys.stdout.write(text)
            else:
                Path(arguments.json).write_text(text)
        if arguments.report is not None:
            write_report(report, arguments.report)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
