"""Expert loads: counts of a window, traces of windows, and the files they are kept in.

A trace file holds everything needed to replay planning. Two formats hold the same, chosen by the file's ending:

`.npz` (compact): `header`, a JSON string {"format": "moeserve-load-1", "model", "top_k", "moe_layer_ids"}; and arrays
whose first axis is the W windows: `expert_load` [W, L, E], `start_s`, `end_s`, `num_steps`, `num_tokens`, `phase`
(strings) and `slo_shares` (JSON strings).

`.jsonl` (readable, can be appended to while serving): the header object on the first line, then one object a window:
{"phase", "start_s", "end_s", "num_steps", "num_tokens", "slo_shares", "expert_load": [[...], ...]}.

Axes: W windows, L MoE layers, E logical experts.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args
from zipfile import BadZipFile

import numpy as np

from moeserve_placement.arrays import FloatArray

FORMAT = "moeserve-load-1"
Phase = Literal["prefill", "decode", "mixed"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class LoadError(ValueError):
    """Loads or a trace file that cannot be: names what is wrong, the value and what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadWindow:
    """What the routers of all ranks counted between two times of one clock. Raises LoadError where it cannot be."""

    expert_load_LE: FloatArray
    """Routed (token, choice) pairs; real tokens only, no padding."""
    start_s: float
    end_s: float
    num_tokens: int
    """Tokens that passed the MoE layers; each adds top-k pairs to every layer."""
    num_steps: int = 1
    phase: Phase = "mixed"
    slo_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the tokens by SLO class, where known."""

    def __post_init__(self) -> None:
        if (
            self.expert_load_LE.ndim != 2
            or not np.isfinite(self.expert_load_LE).all()
            or (self.expert_load_LE < 0).any()
        ):
            raise LoadError("expert_load must be a layers x experts table of finite counts of at least 0")
        if self.end_s < self.start_s or self.num_tokens < 0 or self.num_steps < 0:
            raise LoadError(
                f"a window must end after it starts and count at least 0 tokens and steps, got {self.start_s} to "
                f"{self.end_s} s, {self.num_tokens} tokens, {self.num_steps} steps"
            )
        if self.phase not in PHASES:
            raise LoadError(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def assignments_per_layer(self) -> float:
        """Routed pairs of a layer, the mean over the layers: what the noise floor depends on."""
        return float(self.expert_load_LE.sum(axis=1).mean()) if self.expert_load_LE.size else 0.0


def merge_windows(windows: Sequence[LoadWindow]) -> LoadWindow:
    """One window over all of them; the phase is theirs, or `mixed` where they differ. At least one is needed."""
    assert windows
    num_tokens = sum(window.num_tokens for window in windows)
    phases = {window.phase for window in windows}
    shares: dict[str, float] = {}
    for window in windows:
        for slo_class, share in window.slo_shares.items():
            shares[slo_class] = shares.get(slo_class, 0.0) + share * window.num_tokens / max(num_tokens, 1)
    return LoadWindow(
        expert_load_LE=np.sum([window.expert_load_LE for window in windows], axis=0, dtype=np.float64),
        start_s=min(window.start_s for window in windows),
        end_s=max(window.end_s for window in windows),
        num_tokens=num_tokens,
        num_steps=sum(window.num_steps for window in windows),
        phase=phases.pop() if len(phases) == 1 else "mixed",
        slo_shares=shares,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadTrace:
    """Windows of one model in order of time."""

    model: str
    top_k: int
    moe_layer_ids: tuple[int, ...]
    """Layer of the model for each row of the tables."""
    windows: tuple[LoadWindow, ...]

    def __post_init__(self) -> None:
        shapes = {window.expert_load_LE.shape for window in self.windows}
        if len(shapes) > 1 or any(shape[0] != len(self.moe_layer_ids) for shape in shapes):
            raise LoadError(
                f"all windows of a trace must have the same {len(self.moe_layer_ids)} layers and experts, got "
                f"{sorted(shapes)}"
            )


def trace_lines(trace: LoadTrace) -> Iterator[str]:
    """The lines of a `.jsonl` file, each with its end."""
    yield json.dumps(_header(trace)) + "\n"
    for window in trace.windows:
        yield json.dumps(window_record(window)) + "\n"


def _header(trace: LoadTrace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "model": trace.model,
        "top_k": trace.top_k,
        "moe_layer_ids": list(trace.moe_layer_ids),
    }


def write_trace(path: Path, trace: LoadTrace) -> None:
    """Write `.npz` or `.jsonl`, by the path's ending. Raises LoadError for another ending."""
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(trace_lines(trace))
    elif path.suffix == ".npz":
        loads = [_compact(window.expert_load_LE) for window in trace.windows]
        np.savez_compressed(
            path,
            header=np.array(json.dumps(_header(trace))),
            expert_load=np.stack(loads) if loads else np.zeros((0, len(trace.moe_layer_ids), 0)),
            start_s=np.array([window.start_s for window in trace.windows]),
            end_s=np.array([window.end_s for window in trace.windows]),
            num_steps=np.array([window.num_steps for window in trace.windows], dtype=np.int64),
            num_tokens=np.array([window.num_tokens for window in trace.windows], dtype=np.int64),
            phase=np.array([window.phase for window in trace.windows], dtype=np.str_),
            slo_shares=np.array([json.dumps(dict(window.slo_shares)) for window in trace.windows], dtype=np.str_),
        )
    else:
        raise LoadError(f"a trace file must end in .npz or .jsonl, got {path}")


def read_trace(path: Path) -> LoadTrace:
    """Read a trace file. Raises LoadError naming the file and what is wrong with it."""
    readers = {".npz": _read_npz, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise LoadError(f"a trace file must end in .npz or .jsonl, got {path}")
    try:
        header, records = readers[path.suffix](path)
        if header.get("format") != FORMAT:
            raise LoadError(f"format must be {FORMAT!r}, got {header.get('format')!r}")
        return LoadTrace(
            model=str(header["model"]),
            top_k=int(header["top_k"]),
            moe_layer_ids=tuple(int(layer) for layer in header["moe_layer_ids"]),
            windows=tuple(window_from_record(record) for record in records),
        )
    except OSError as error:
        raise LoadError(f"trace file {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError, BadZipFile) as error:
        raise LoadError(f"trace file {path}: {error}") from error


def trace_from_routing_counts(path: Path) -> LoadTrace:
    """A trace from a file of routing counts by text domain, one window of one second a domain in the file's order.

    The file is an object with `model`, `num_experts`, `top_k`, `layers` (or null) and `counts`, a table of layers x
    experts for each domain. Raises LoadError naming the file.
    """
    try:
        record = json.loads(path.read_text())
        counts = {domain: np.asarray(table, dtype=np.float64) for domain, table in record["counts"].items()}
        num_layers = len(next(iter(counts.values())))
        windows = tuple(
            LoadWindow(
                expert_load_LE=table,
                start_s=float(index),
                end_s=float(index + 1),
                num_tokens=round(float(table[0].sum()) / record["top_k"]),
            )
            for index, table in enumerate(counts.values())
        )
        layer_ids = range(num_layers) if record["layers"] is None else record["layers"]
        return LoadTrace(model=record["model"], top_k=record["top_k"], moe_layer_ids=tuple(layer_ids), windows=windows)
    except OSError as error:
        raise LoadError(f"routing counts {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, IndexError) as error:
        raise LoadError(f"routing counts {path}: {error}") from error


def window_record(window: LoadWindow) -> dict[str, Any]:
    """The JSON object of a window."""
    return {
        "phase": window.phase,
        "start_s": window.start_s,
        "end_s": window.end_s,
        "num_steps": window.num_steps,
        "num_tokens": window.num_tokens,
        "slo_shares": dict(window.slo_shares),
        "expert_load": _compact(window.expert_load_LE).tolist(),
    }


def window_from_record(record: Mapping[str, Any]) -> LoadWindow:
    """The window of a JSON object. Raises LoadError, KeyError or TypeError where it is none."""
    return LoadWindow(
        phase=record["phase"],
        start_s=float(record["start_s"]),
        end_s=float(record["end_s"]),
        num_steps=int(record["num_steps"]),
        num_tokens=int(record["num_tokens"]),
        slo_shares={str(name): float(share) for name, share in record["slo_shares"].items()},
        expert_load_LE=np.asarray(record["expert_load"], dtype=np.float64),
    )


def _compact(load_LE: FloatArray) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
    """Counts as integers where they are whole, which is how they come from the routers."""
    whole = load_LE.astype(np.int64)
    return whole if (whole == load_LE).all() else load_LE


def _read_jsonl(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return lines[0], lines[1:]


def _read_npz(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with np.load(path) as arrays:
        header = json.loads(str(arrays["header"]))
        names = ("phase", "start_s", "end_s", "num_steps", "num_tokens", "expert_load")
        columns = {name: arrays[name] for name in names}
        shares = [json.loads(str(text)) for text in arrays["slo_shares"]]
    return header, [
        {name: column[index] for name, column in columns.items()}
        | {"slo_shares": share, "phase": str(columns["phase"][index])}
        for index, share in enumerate(shares)
    ]
