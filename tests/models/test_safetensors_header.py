"""Headers of safetensors files: what is whole is read, what was cut or corrupted is refused in one line."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from moeserve.models.safetensors_header import CheckpointError, TensorInfo, read_header, read_headers

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.zeros(5, dtype=torch.bfloat16),
    "c": torch.zeros(3, 1).to(torch.float8_e4m3fn),
    "d": torch.tensor(1.0),
    "e": torch.zeros(0, 4, dtype=torch.float16),
}
WHOLE = save(TENSORS, metadata={"format": "pt"})


def write(folder: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(start: int, end: int, *, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_every_tensor_of_a_whole_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(WHOLE)
    assert read_header(path) == {
        "a": TensorInfo(path, "F32", (2, 3)),
        "b": TensorInfo(path, "BF16", (5,)),
        "c": TensorInfo(path, "F8_E4M3", (3, 1)),
        "d": TensorInfo(path, "F32", ()),
        "e": TensorInfo(path, "F16", (0, 4)),
    }


@given(length=st.integers(0, len(WHOLE) - 1))
def test_a_file_cut_anywhere_is_refused(length: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.safetensors"
    path.write_bytes(WHOLE[:length])
    assert "cut" in refusal(path)


@given(position=st.integers(0, WHOLE.rindex(b"}")), value=st.integers(0, 255))
def test_a_changed_header_byte_never_ends_in_another_error(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A changed name or type of the same size cannot be told here; anything else is a CheckpointError."""
    path = tmp_path_factory.mktemp("changed") / "model.safetensors"
    path.write_bytes(WHOLE[:position] + bytes([value]) + WHOLE[position + 1 :])
    with contextlib.suppress(CheckpointError):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (b"{", b"", "corrupt header"),
        (b"\xff\xfe", b"", "corrupt header"),
        (b"[" * 100_000, b"", "corrupt header"),
        ([], b"", "corrupt header"),
        ({"a": {"dtype": "F32"}}, b"", "corrupt header"),
        ({"a": 5}, b"", "corrupt header"),
        ({"a": entry(0, 4, dtype="F33")}, b"1234", "unknown dtype 'F33'"),
        ({"a": entry(0, 4, shape=(2,))}, b"1234", "tensor a should be 8 bytes long, its offsets span 4"),
        ({"a": entry(0, 4, shape=(-1, -1))}, b"1234", "corrupt header"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, b"123456789012", "tensor b starts at 8, expected 4"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, b"1234", "tensor b starts at 0, expected 4"),
        ({"a": entry(-4, 0)}, b"", "tensor a starts at -4, expected 0"),
        ({"a": entry(0, 4)}, b"12345", "1 bytes behind the last tensor"),
        ({"a": entry(0, 4)}, b"123", "cut: its tensors are 4 bytes long, the file has 3"),
        ({"a\nb": entry(4, 8)}, b"12345678", "tensor a b starts at 4"),
    ],
)
def test_a_header_that_is_wrong(header: Any, data: bytes, expected: str, tmp_path: Path) -> None:
    assert expected in refusal(write(tmp_path, header, data))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "Is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "nothing")


def test_a_folder_without_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        read_headers(tmp_path)


def test_shards_are_those_of_the_index_and_the_single_file_comes_first(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert set(read_headers(tmp_path)) == {"a", "b", "c"}
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_headers(tmp_path)) == {"a", "b"}
    save_file({"d": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert set(read_headers(tmp_path)) == {"d"}


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: names model-00001-of-00002\.safetensors, which is not"):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": [1]}}'])
def test_a_corrupt_index(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json: corrupt index"):
        read_headers(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a is also in one\.safetensors"):
        read_headers(tmp_path)
