"""Safetensors headers: which tensors lie in a checkpoint's files, checked against the files' sizes; no torch here.

A file is 8 bytes of header length (little endian), the header as JSON, then the tensors' bytes one after another.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_BITS = {
    "F4": 4,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
_SPEC_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; one line that names file, tensor, what was expected and what was found."""

    def __init__(self, message: str) -> None:
        # Names in a corrupt header may hold anything, line breaks too.
        super().__init__(" ".join(message.split()))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a stored tensor is and what it looks like."""

    file: Path
    dtype: str
    """As safetensors calls it: F32, BF16, F8_E4M3, ..."""
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint in `folder`: of the single file, of an index's shards, or of all files there.

    Raises CheckpointError for no files, a missing shard, a cut or corrupt file, and a tensor that is there twice.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in find_files(folder):
        for name, info in read_header(path).items():
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = info
    return tensors


def find_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the checkpoint."""
    if (folder / SINGLE_FILE).exists():
        return (folder / SINGLE_FILE,)
    if (folder / INDEX_FILE).exists():
        return _indexed_files(folder)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise CheckpointError(f"{folder}: no safetensors file; checkpoints of other formats must be converted first")
    return files


def find_dtype(folder: Path) -> str | None:
    """The type of the first floating-point tensor, None where no checkpoint can be read."""
    try:
        stored = read_headers(folder).values()
    except CheckpointError:
        return None
    return next((_SPEC_DTYPES[info.dtype] for info in stored if info.dtype in _SPEC_DTYPES), None)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file, whose bytes are there to the last.

    Raises CheckpointError for a file that cannot be read, that was cut, or whose header is no header.
    """
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if file_size < 8 or header_size > file_size - 8:
                raise CheckpointError(
                    f"{path}: cut or corrupt: the header should be {header_size} bytes long, the file has {file_size}"
                )
            raw = file.read(header_size)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    try:
        header = json.loads(raw)
        spans = [_parse_entry(path, name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt header: {_first_line(error)}") from error
    _check_spans(path, sorted((start, end, name) for name, start, end, _ in spans), file_size - 8 - header_size)
    return {name: info for name, _, _, info in spans}


def _indexed_files(folder: Path) -> tuple[Path, ...]:
    path = folder / INDEX_FILE
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: corrupt index: {_first_line(error)}") from error
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{path}: names {name}, which is not in the folder")
    return tuple(folder / name for name in names)


def _parse_entry(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[str, int, int, TensorInfo]:
    dtype, shape, (start, end) = entry["dtype"], tuple(map(int, entry["shape"])), entry["data_offsets"]
    if dtype not in _BITS:
        raise ValueError(f"tensor {name} has the unknown dtype {dtype!r}")
    num_bytes = math.prod(shape) * _BITS[dtype] // 8
    if min(shape, default=0) < 0 or end - start != num_bytes:
        raise ValueError(f"tensor {name} should be {num_bytes} bytes long, its offsets span {end - start}")
    return name, int(start), int(end), TensorInfo(path, dtype, shape)


def _check_spans(path: Path, spans: list[tuple[int, int, str]], num_bytes: int) -> None:
    """The tensors follow each other without gap or overlap, and fill the file."""
    position = 0
    for start, end, name in spans:
        if start != position:
            raise CheckpointError(f"{path}: corrupt header: tensor {name} starts at {start}, expected {position}")
        position = end
    if position > num_bytes:
        raise CheckpointError(f"{path}: cut: its tensors are {position} bytes long, the file has {num_bytes} of them")
    if position < num_bytes:
        raise CheckpointError(f"{path}: corrupt: {num_bytes - position} bytes behind the last tensor")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
