"""What a streamed token costs the load generator, and what that costs the server, beside a client made of httpx.

    python benchmarks/bench_loadgen.py --quick
    python benchmarks/bench_loadgen.py --clients 1 8 32 --json results.json

Both clients take turns with the demo model, whose rank has one thread. Read the ratios: medians over rounds of the
ratio within a round.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import httpx

from benchmarks.harness.command_line import add_common_arguments, write_json
from benchmarks.harness.load import Endpoint, Load, drive
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.tables import Cell, table
from moeserve.testing.server import running_server

_TARGET = 0.25
_TARGET_CLIENTS = 32
_VOCAB_SIZE = 4096

Client: TypeAlias = Callable[[Endpoint, Load, Sequence[Sequence[int]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """So many clients at once: medians over the rounds."""

    num_clients: int
    httpx_ms: float
    """Processor time a 1,000 tokens."""
    loadgen_ms: float
    cpu_ratio: float
    throughput_ratio: float
    """Of the server under our load to the server under the other."""


def main() -> int:
    arguments = _arguments()
    with running_server("demo", "--max-num-seqs", "32", environ={"OMP_NUM_THREADS": "1"}) as server:
        endpoint = Endpoint(
            url=server.url, model="demo", extra_body={"stream_options": {"continuous_usage_stats": True}}
        )
        counts = [_TARGET_CLIENTS] if arguments.quick else arguments.clients
        rows = [_measure(endpoint, num_clients, num_rounds=3 if arguments.quick else 7) for num_clients in counts]
    share = next((row.cpu_ratio for row in rows if row.num_clients == _TARGET_CLIENTS), None)
    lines = [describe_machine().text, "", *_table(rows)]
    if share is not None:
        verdict = "met" if share <= _TARGET else "missed"
        lines += [
            "",
            f"target: at most {_TARGET:g} of httpx's time with {_TARGET_CLIENTS} clients: {share:.2f}, {verdict}",
        ]
    print("\n".join(lines), file=sys.stderr if arguments.json == "-" else sys.stdout)
    write_json(arguments.json, {"machine": asdict(describe_machine()), "rows": [asdict(row) for row in rows]})
    return int(share is not None and share > _TARGET)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    add_common_arguments(parser)
    return parser.parse_args()


def _table(rows: Sequence[Row]) -> list[str]:
    header = ("clients", "httpx, ms a 1,000 tokens", "loadgen, ms a 1,000 tokens", "processor time, ours / httpx",
              "server's tokens/s, ours / httpx")  # fmt: skip
    cells: list[list[Cell]] = [
        [row.num_clients, row.httpx_ms, row.loadgen_ms, row.cpu_ratio, row.throughput_ratio] for row in rows
    ]
    return table(header, cells)


def _measure(endpoint: Endpoint, num_clients: int, *, num_rounds: int) -> Row:
    load = Load(
        name=f"{num_clients} clients",
        num_clients=num_clients,
        prompt_tokens=64,
        output_tokens=96,
        requests_per_client=max(2, 16 // num_clients),
    )
    clients: tuple[Client, Client] = (_by_loadgen, _by_httpx)
    cpu_s: dict[Client, list[float]] = {client: [] for client in clients}
    wall_s: dict[Client, list[float]] = {client: [] for client in clients}
    for round_index in range(num_rounds + 1):
        for turn, client in enumerate(clients):
            prompts = load.prompts(vocab_size=_VOCAB_SIZE, seed=2 * round_index + turn)
            cpu, wall = time.process_time(), time.perf_counter()
            client(endpoint, load, prompts)
            if round_index:  # the first one only warms up
                cpu_s[client].append(time.process_time() - cpu)
                wall_s[client].append(time.perf_counter() - wall)
    per_1000_ms = 1e6 / (load.num_requests * load.output_tokens)
    return Row(
        num_clients=num_clients,
        httpx_ms=statistics.median(cpu_s[_by_httpx]) * per_1000_ms,
        loadgen_ms=statistics.median(cpu_s[_by_loadgen]) * per_1000_ms,
        cpu_ratio=_median_ratio(cpu_s[_by_loadgen], cpu_s[_by_httpx]),
        throughput_ratio=_median_ratio(wall_s[_by_httpx], wall_s[_by_loadgen]),
    )


def _median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(above, below, strict=True))


def _by_loadgen(endpoint: Endpoint, load: Load, prompts: Sequence[Sequence[int]]) -> None:
    drive(endpoint, load, prompts)


def _by_httpx(endpoint: Endpoint, load: Load, prompts: Sequence[Sequence[int]]) -> None:
    """As many would write it: a stream by lines, each line read by `json`."""

    async def request(http: httpx.AsyncClient, prompt: Sequence[int]) -> None:
        times: list[float] = []
        body = {
            "model": endpoint.model,
            "prompt": prompt,
            "max_tokens": load.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, **endpoint.extra_body["stream_options"]},
        }
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    num_tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                    times += [time.perf_counter()] * (num_tokens - len(times))
        assert len(times) == load.output_tokens

    async def client(http: httpx.AsyncClient, own: Sequence[Sequence[int]]) -> None:
        for prompt in own:
            await request(http, prompt)

    async def run() -> None:
        limits = httpx.Limits(max_connections=load.num_clients, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=endpoint.url, timeout=600.0, limits=limits) as http:
            shares = [prompts[first :: load.num_clients] for first in range(load.num_clients)]
            await asyncio.gather(*(client(http, own) for own in shares))

    asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
