"""Throughput and latency of the real server for one checkpoint, beside transformers' `generate` in the same run.

    python benchmarks/bench_serve.py --quick
    python benchmarks/bench_serve.py --model FOLDER --layouts 1x1 2x1 1x2 --clients 1 8 32 --json results.json

A layout is tp x dp. Each client sends one streamed request after another (closed loop): random prompt tokens, a fixed
number of output tokens. Machines are shared and noisy: read the ratios within one run, not the absolute figures.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tqdm import tqdm

from moeserve.models.checkpoint import resolve_model_folder
from moeserve.testing.server import running_server


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    num_clients: int
    requests_per_client: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians and tails over the requests of one load on one system."""

    system: str
    num_clients: int
    output_tokens_per_s: float
    ttft_p50_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None


def main() -> None:
    arguments = _arguments()
    folder = resolve_model_folder(arguments.model)
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    quick = arguments.quick
    rows: list[Row] = []
    loads = [
        Load(
            num_clients=n,
            requests_per_client=1 if quick else 4,
            prompt_tokens=64 if quick else 128,
            output_tokens=32 if quick else 64,
            vocab_size=vocab_size,
        )
        for n in ([1, 8] if quick else arguments.clients)
    ]
    for layout in arguments.layouts:
        rows += _bench_moeserve(arguments.model, layout, loads)
    rows += [_bench_transformers(folder, load) for load in tqdm(loads, desc="transformers", leave=False)]
    _report(rows, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--layouts", nargs="+", default=["1x1"], metavar="TPxDP")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--quick", action="store_true", help="under 50 s on two cores")
    parser.add_argument("--json", metavar="FILE", help="write the rows; - is standard output")
    return parser.parse_args()


def _bench_moeserve(model: str, layout: str, loads: list[Load]) -> list[Row]:
    tp, dp = layout.split("x")
    with running_server(model, "-tp", tp, "-dp", dp) as server:
        warm_up = Load(num_clients=1, requests_per_client=1, prompt_tokens=8, output_tokens=4, vocab_size=256)
        asyncio.run(_drive(server.url, warm_up))
        name = f"moeserve tp{tp} dp{dp}"
        return [
            _row(name, load, *asyncio.run(_drive(server.url, load))) for load in tqdm(loads, desc=name, leave=False)
        ]


async def _drive(url: str, load: Load) -> tuple[float, list[list[float]]]:
    """Seconds of the whole load, and for each request the times of its chunks since it was sent."""
    rng = random.Random(0)
    prompts = [
        [
            [rng.randrange(3, load.vocab_size) for _ in range(load.prompt_tokens)]
            for _ in range(load.requests_per_client)
        ]
        for _ in range(load.num_clients)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=300.0) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def client(own: list[list[int]]) -> list[list[float]]:
            return [await _stream(http, model, prompt, load.output_tokens) for prompt in own]

        start = time.perf_counter()
        times = await asyncio.gather(*(client(own) for own in prompts))
        return time.perf_counter() - start, [request for own in times for request in own]


async def _stream(http: httpx.AsyncClient, model: str, prompt: list[int], output_tokens: int) -> list[float]:
    body = {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "stream": True}
    body |= {"temperature": 0, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    start = time.perf_counter()
    times: list[float] = []
    seen = 0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            seen_now = json.loads(line[6:])["usage"]["completion_tokens"]
            times += [time.perf_counter() - start] * (seen_now - seen)
            seen = seen_now
    if seen != output_tokens:
        raise RuntimeError(f"asked for {output_tokens} tokens, got {seen}")
    return times


def _row(system: str, load: Load, seconds: float, requests: list[list[float]]) -> Row:
    gaps = sorted(b - a for times in requests for a, b in itertools.pairwise(times))
    return Row(
        system=system,
        num_clients=load.num_clients,
        output_tokens_per_s=sum(map(len, requests)) / seconds,
        ttft_p50_s=statistics.median(times[0] for times in requests),
        itl_p50_s=statistics.median(gaps),
        itl_p99_s=gaps[int(len(gaps) * 0.99)],
    )


def _bench_transformers(folder: Path, load: Load) -> Row:
    """One `generate` call with all clients' prompts as a batch: no arrivals, no streaming, its friendliest case."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.eval()
    generator = torch.Generator().manual_seed(0)
    shape = (load.num_clients, load.prompt_tokens)
    prompts = torch.randint(3, load.vocab_size, shape, generator=generator)
    settings = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompts)}
    model.generate(prompts, max_new_tokens=2, **settings)
    start = time.perf_counter()
    model.generate(prompts, min_new_tokens=load.output_tokens, max_new_tokens=load.output_tokens, **settings)
    rate = load.num_clients * load.output_tokens / (time.perf_counter() - start)
    return Row(
        system="transformers generate",
        num_clients=load.num_clients,
        output_tokens_per_s=rate,
        ttft_p50_s=None,
        itl_p50_s=None,
        itl_p99_s=None,
    )


def _report(rows: list[Row], json_path: str | None) -> None:
    base = {row.num_clients: row.output_tokens_per_s for row in rows if row.system.startswith("transformers")}
    print(f"\n{'system':24}{'clients':>8}{'tokens/s':>10}{'ratio':>7}{'TTFT p50':>10}{'ITL p50':>10}{'ITL p99':>10}")
    for row in rows:
        times = [f"{s * 1e3:.1f} ms" if s is not None else "-" for s in (row.ttft_p50_s, row.itl_p50_s, row.itl_p99_s)]
        ratio = row.output_tokens_per_s / base[row.num_clients]
        print(
            f"{row.system:24}{row.num_clients:8}{row.output_tokens_per_s:10.1f}{ratio:7.2f}"
            f"{times[0]:>10}{times[1]:>10}{times[2]:>10}"
        )
    if json_path is None:
        return
    record = json.dumps({"machine": _machine(), "rows": [asdict(row) for row in rows]}, indent=1)
    if json_path == "-":
        sys.stdout.write(record + "\n")
    else:
        Path(json_path).write_text(record + "\n")


def _machine() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    main()
