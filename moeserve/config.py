"""The typed configuration of a server: frozen dataclasses, read once; defaults < TOML file < --set < flags.

Nothing here touches a model or a device. "auto" values (None) are resolved by their owner into values of their own,
never written back.
"""

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8")
KV_CACHE_DTYPES = (*DTYPES, "fp8", "int8")
PLACEMENT_POLICIES = ("incremental", "frozen")


class ConfigError(ValueError):
    """A setting that cannot be: names the setting, the value and what is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = "demo"
    """Folder of a Hugging Face checkpoint, or `demo` for the model that comes with moeserve."""
    served_model_name: tuple[str, ...] = ()
    """Names the API answers to; default: the model as it was given."""
    dtype: str = "auto"
    """auto = the checkpoint's."""
    quantization: str = "none"
    """How linear layers and experts keep their weights: as `dtype`, or int8 with a scale for each output channel."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; default: the model's own context."""
    device: str = "auto"
    """auto = cuda where there is one, else cpu."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"model.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.quantization not in QUANTIZATIONS:
            accepted = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"model.quantization must be one of {accepted}, got {self.quantization!r}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"model.device must be auto, cpu or cuda, got {self.device!r}")
        if self.max_model_len is not None:
            _at_least("model.max_model_len", self.max_model_len, 1)

    @property
    def served_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    num_redundant_experts: int | Literal["auto"] = 0
    """Physical minus logical experts of each MoE layer; auto: as many as help and the KV cache can spare memory for."""
    placement_file: str | None = None
    """A saved expert placement to start with; default: experts in order, spread evenly."""
    threads_per_rank: int | None = None
    """CPU threads of each rank; default: cores / local ranks."""

    def __post_init__(self) -> None:
        _at_least("parallel.tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("parallel.data_parallel_size", self.data_parallel_size, 1)
        if self.num_redundant_experts != "auto":
            _at_least("parallel.num_redundant_experts", self.num_redundant_experts, 0)
        if self.threads_per_rank is not None:
            _at_least("parallel.threads_per_rank", self.threads_per_rank, 1)

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    kv_cache_dtype: str = "auto"
    """auto = the type the model computes in; fp8 (e4m3) and int8 keep a float32 scale for each token and head."""
    block_size: int = 16
    kv_cache_memory: int | None = None
    """Bytes of KV cache of each rank; default: `memory_fraction` of the memory free after loading."""
    memory_fraction: float = 0.5
    """Of the free memory, shared by the ranks of a host; used when `kv_cache_memory` is not given."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            accepted = ", ".join(KV_CACHE_DTYPES)
            raise ConfigError(f"cache.kv_cache_dtype must be one of {accepted}, got {self.kv_cache_dtype!r}")
        _at_least("cache.block_size", self.block_size, 1)
        if self.kv_cache_memory is not None:
            _at_least("cache.kv_cache_memory", self.kv_cache_memory, 1)
        if not 0.0 < self.memory_fraction <= 0.95:
            raise ConfigError(f"cache.memory_fraction must be above 0 and at most 0.95, got {self.memory_fraction}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    """Most requests of one DP replica that run at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one DP replica in one step; longer prompts are computed in chunks."""

    def __post_init__(self) -> None:
        _at_least("scheduler.max_num_seqs", self.max_num_seqs, 1)
        _at_least("scheduler.max_num_batched_tokens", self.max_num_batched_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """How experts move while the server runs."""

    policy: str = "incremental"
    """incremental: follow the load; frozen: nothing moves but what an operator orders."""
    window_s: float = 5.0
    """Seconds of steps in one load report."""
    num_windows: int = 4
    """Load windows that a plan is made on, that confirm it, and that its gain is measured over."""
    spare_places: int = 1
    """Room in each layer of each rank for experts that come; 0: only the split between replicas follows the load."""
    copy_bytes_per_s: float = 2.0**30
    """Most that one rank may send or receive a second while a migration runs."""
    budget_bytes_per_s: float = 2.0**28
    """Bytes a second that migrations may copy in the long run, all ranks together."""
    horizon_s: float = 600.0
    """How long a load is expected to last: the time over which a gain must pay for its migration."""
    hysteresis: float = 2.0
    """A migration's gain over the horizon must be this many times its cost."""
    least_gain: float = 0.01
    """Share of step time that a migration must save."""
    hold_off_s: float = 300.0
    """Pause after a rollback or a failure; it doubles each time until a migration keeps its promise."""

    def __post_init__(self) -> None:
        if self.policy not in PLACEMENT_POLICIES:
            accepted = ", ".join(PLACEMENT_POLICIES)
            raise ConfigError(f"placement.policy must be one of {accepted}, got {self.policy!r}")
        _at_least("placement.num_windows", self.num_windows, 1)
        _at_least("placement.spare_places", self.spare_places, 0)
        for name in ("hysteresis", "least_gain", "hold_off_s"):
            _finite(f"placement.{name}", getattr(self, name), above_zero=name == "hysteresis")
        for name in ("window_s", "copy_bytes_per_s", "budget_bytes_per_s", "horizon_s"):
            _finite(f"placement.{name}", getattr(self, name), above_zero=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str = "127.0.0.1"
    port: int = 8000
    engine_port: int | None = None
    """Port where the replicas reach the frontend; default: port + 1."""
    api_key: str | None = None
    admin_key: str | None = None
    """Bearer token of operators: where one is set, nobody else may change how the server runs."""
    max_num_waiting: int = 1024
    """Most unfinished requests in the whole server; more are refused with 429."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_restarts: int = 3
    """How often the ranks are started again after one of them died; the frontend and its clients stay."""

    def __post_init__(self) -> None:
        _between("server.port", self.port, 1, 65535)
        if self.engine_port is not None:
            _between("server.engine_port", self.engine_port, 1, 65535)
        _at_least("server.max_num_waiting", self.max_num_waiting, 1)
        _at_least("server.max_body_bytes", self.max_body_bytes, 1024)
        _at_least("server.max_restarts", self.max_restarts, 0)

    @property
    def replica_port(self) -> int:
        return self.engine_port if self.engine_port is not None else self.port + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a server is started with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Defaults, then the TOML file, then `overrides`.

    `overrides` maps `section.key` to a value, or to a string that is read as TOML where it can be (`--set`).
    Raises ConfigError for a missing file, bad TOML, an unknown section or key, a wrong type or a value out of range.
    """
    sections: dict[str, dict[str, Any]] = {}
    for section, values in _read_toml(path).items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section!r} must be a section, like [model]")
        sections[section] = dict(values)
    for dotted, value in (overrides or {}).items():
        section, _, key = dotted.partition(".")
        if not key:
            raise ConfigError(f"setting {dotted!r} must look like section.key")
        sections.setdefault(section, {})[key] = value
    return config_from_dict(sections)


def config_from_dict(sections: Mapping[str, Mapping[str, Any]]) -> Config:
    """The inverse of `dataclasses.asdict(config)`; checks names, types and ranges."""
    owners = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    for section in sections:
        if section not in owners:
            raise ConfigError(f"unknown config section [{section}]; there are {', '.join(owners)}")
    return Config(**{name: _build(owner, name, sections.get(name, {})) for name, owner in owners.items()})


def parse_override(text: str) -> tuple[str, Any]:
    """`section.key=value` of --set; the value is TOML, or a bare string."""
    dotted, equals, raw = text.partition("=")
    if not equals or "." not in dotted:
        raise ConfigError(f"--set takes section.key=value, got {text!r}")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    return dotted.strip(), value


def _read_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error


def _build(owner: Any, section: str, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(owner)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"unknown setting {section}.{key}; [{section}] has {', '.join(hints)}")
        if not _fits(value, hints[key]):
            raise ConfigError(f"{section}.{key} must be {_describe(hints[key])}, got {value!r}")
    return owner(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def _fits(value: Any, hint: Any) -> bool:
    if _is_union(hint):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint is types.NoneType else isinstance(value, hint)


def _is_union(hint: Any) -> bool:
    """Of types alone, or with a Literal among them."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


def _describe(hint: Any) -> str:
    if _is_union(hint):
        return " or ".join(_describe(option) for option in typing.get_args(hint) if option is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    if typing.get_origin(hint) is Literal:
        return " or ".join(typing.get_args(hint))
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}[hint]


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}, got {value}")


def _finite(name: str, value: float, *, above_zero: bool) -> None:
    if not math.isfinite(value) or value < 0 or (above_zero and value == 0):
        raise ConfigError(f"{name} must be {'above' if above_zero else 'at least'} 0, got {value}")


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {value}")
