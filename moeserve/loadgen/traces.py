"""Recorded traffic: the CSV files of the Azure LLM inference traces, and the JSONL files of the Mooncake traces."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded request."""

    arrival_s: float
    """Since the first request of the trace."""
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    """One for each block of the prompt; equal leading ids are a shared prefix. Empty where none were recorded."""


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Requests by time of arrival. Raises ValueError that names the file, the line and what is wrong."""
    readers = {".csv": _read_azure, ".jsonl": _read_mooncake}
    if path.suffix not in readers:
        raise ValueError(f"a trace must be a file ending in {' or '.join(readers)}, got {path}")
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            rows = sorted(readers[path.suffix](lines), key=lambda row: row.arrival_s)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if not rows:
        raise ValueError(f"{path} holds no requests")
    start_s = rows[0].arrival_s
    return tuple(
        TraceRow(
            arrival_s=row.arrival_s - start_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            hash_ids=row.hash_ids,
        )
        for row in rows
    )


def _read_azure(lines: Iterator[str]) -> Iterator[TraceRow]:
    """Columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # Seven digits of a second: one more than datetime reads.
            yield TraceRow(
                arrival_s=datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp(),
                prompt_tokens=int(row["ContextTokens"]),
                output_tokens=int(row["GeneratedTokens"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} must have TIMESTAMP, ContextTokens and GeneratedTokens, got {row}"
            ) from error


def _read_mooncake(lines: Iterator[str]) -> Iterator[TraceRow]:
    """Objects with timestamp (ms), input_length, output_length and hash_ids."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield TraceRow(
                arrival_s=float(row["timestamp"]) / 1e3,
                prompt_tokens=int(row["input_length"]),
                output_tokens=int(row["output_length"]),
                hash_ids=tuple(int(each) for each in row.get("hash_ids", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"line {number} must have timestamp, input_length and output_length, got {line.strip()[:120]}"
            ) from error
