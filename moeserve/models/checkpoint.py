"""A checkpoint folder: found, checked by its headers, and opened. Only opening it needs torch.

`validate_checkpoint` compares what the model needs with what the files hold before a rank is started; a checkpoint that
passes can be read to the last tensor.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.config import ConfigError
from moeserve.models.quantization import FP8_DTYPE, QuantizationConfig, mxfp4_shapes, read_quantization
from moeserve.models.raw_config import RawConfig
from moeserve.models.registry import FAMILIES
from moeserve.models.safetensors_header import CheckpointError, TensorInfo, read_headers
from moeserve.models.spec import ModelSpec
from moeserve.models.tensor_map import map_tensors
from moeserve.models.tensor_sources import StoredTensor, TensorSource

if TYPE_CHECKING:
    import torch

    from moeserve.models.checkpoint_reader import CheckpointReader
    from moeserve_kernels import Quantization

__all__ = ["CheckpointError", "open_checkpoint", "resolve_model_folder", "validate_checkpoint"]

_FLOATS = ("F32", "BF16", "F16", "F64")
_SCALES = (*_FLOATS, "F8_E8M0")


def resolve_model_folder(model: str) -> Path:
    """The folder of a model as the user names it: `demo` for the one that comes with moeserve, or a folder's path."""
    folder = Path(__file__).resolve().parents[1] / "demo_model" if model == "demo" else Path(model).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model must be `demo` or the folder of a Hugging Face checkpoint, got {model!r}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model must be a folder with a config.json, got {model!r}")
    return folder


def validate_checkpoint(folder: Path, spec: ModelSpec) -> None:
    """Check that the files hold every tensor of the model, in its shape, whole, and nothing unknown beside them.

    Raises CheckpointError in one line.
    """
    _checked_sources(folder, spec)


def open_checkpoint(
    folder: Path, spec: ModelSpec, dtype: "torch.dtype", *, quantization: "Quantization | None" = None
) -> "CheckpointReader":
    """A reader of the canonical tensors, which come in `dtype` unless asked otherwise. Raises CheckpointError.

    quantization: how linear layers and experts will keep their weights, whatever the files hold.
    """
    from moeserve.models.checkpoint_reader import CheckpointReader

    sources, stored, stored_quantization = _checked_sources(folder, spec)
    return CheckpointReader(sources, stored, stored_quantization, dtype, quantization)


def _checked_sources(
    folder: Path, spec: ModelSpec
) -> tuple[Mapping[str, TensorSource], Mapping[str, TensorInfo], QuantizationConfig]:
    quantization = read_quantization(RawConfig.load(folder / "config.json"))
    stored = read_headers(folder)
    names = FAMILIES[spec.architecture].names
    sources = map_tensors(spec, names, stored)
    expected: set[str] = set()
    missing: list[str] = []
    for source in sources.values():
        for tensor in source.stored_tensors:
            for name, shape, dtypes in _needed(tensor, stored, quantization):
                expected.add(name)
                if name not in stored:
                    missing.append(name)
                else:
                    _check_tensor(name, stored[name], shape, dtypes)
    if missing:
        raise CheckpointError(f"{folder}: tensor {missing[0]} is missing{_and_more(missing)}")
    num_layers = len(spec.layers) if names.has_draft_layers else None
    extra = [name for name in stored if name not in expected and not _is_harmless(name, spec, num_layers)]
    if extra:
        file = stored[extra[0]].file
        raise CheckpointError(f"{file}: tensor {extra[0]} is not one of {spec.architecture}'s{_and_more(extra)}")
    return sources, stored, quantization


def _needed(
    tensor: StoredTensor, stored: Mapping[str, TensorInfo], quantization: QuantizationConfig
) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...]]]:
    """The stored tensors that make up `tensor`: name, shape and accepted types."""
    if tensor.encoding == "mxfp4":
        blocks, scales = mxfp4_shapes(tensor.shape)
        yield f"{tensor.name}_blocks", blocks, ("U8",)
        yield f"{tensor.name}_scales", scales, ("U8", "F8_E8M0")
        return
    if len(tensor.shape) < 2:
        yield tensor.name, tensor.shape, _FLOATS
        return
    yield tensor.name, tensor.shape, (*_FLOATS, FP8_DTYPE)
    info = stored.get(tensor.name)
    if info is not None and info.dtype == FP8_DTYPE:
        yield f"{tensor.name}_scale_inv", quantization.fp8_scale_shape(tensor.shape), _SCALES


def _check_tensor(name: str, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if info.shape != shape:
        raise CheckpointError(
            f"{info.file}: tensor {name} should have the shape {list(shape)}, found {list(info.shape)}"
        )
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{info.file}: tensor {name} should have one of the types {', '.join(dtypes)}, found {info.dtype}"
        )


def _is_harmless(name: str, spec: ModelSpec, num_layers: int | None) -> bool:
    """Tensors that checkpoints carry and no decoder needs: rope tables, a tied output matrix, draft layers."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    if spec.tie_word_embeddings and name in ("lm_head.weight", "lm_head.weight_scale_inv"):
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return num_layers is not None and layer is not None and int(layer[1]) >= num_layers


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
