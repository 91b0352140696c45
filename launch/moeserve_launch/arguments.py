"""Flags of `moeserve serve`: the common ones, named as in vLLM. All else is in the typed config (--set, --config).

A test holds the list of flags: new settings go into `moeserve.config`, not here.
"""

import argparse
from pathlib import Path
from typing import Any

from moeserve.config import Config, load_config, parse_override

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags default to None: what is not given leaves the config file's or the default value."""
    parser.add_argument("model", nargs="?", help="checkpoint folder, or `demo` (default)")
    option = parser.add_argument
    option("-tp", "--tensor-parallel-size", type=int, metavar="N", help="ranks that share one DP replica")
    option("-dp", "--data-parallel-size", type=int, metavar="M", help="attention replicas of the engine")
    option("--dtype", help="auto (the checkpoint's), float32, bfloat16 or float16")
    option("--quantization", help="none, or int8: 8-bit weights, quantized while loading")
    option("--num-redundant-experts", type=_parse_redundant, metavar="N", help="physical minus logical experts of "
           "each layer; auto: as many as help and the KV cache can spare memory for")  # fmt: skip
    option("--placement-file", metavar="FILE", help="saved expert placement to start with")
    option("--kv-cache-memory", type=parse_bytes, metavar="BYTES", help="KV cache of each rank, such as 512M or 2G")
    option("--max-model-len", type=int, metavar="N", help="most tokens of prompt and output together")
    option("--max-num-seqs", type=int, metavar="N", help="most requests of a DP replica that run at once")
    option("--max-num-batched-tokens", type=int, metavar="N", help="most tokens of a DP replica in one step")
    option("--served-model-name", nargs="+", metavar="NAME", help="names the API answers to")
    option("--api-key", metavar="KEY", help="clients must send it as a bearer token")
    option("--host", help="address to listen on (127.0.0.1)")
    option("--port", type=int, help="port to listen on (8000)")
    option("--config", type=Path, metavar="FILE.toml", help="settings by section; flags win over the file")
    option("--set", action="append", default=[], metavar="section.key=value", help="any setting of the config")


_SETTING_OF_FLAG = {
    "model": "model.model",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "max_model_len": "model.max_model_len",
    "served_model_name": "model.served_model_name",
    "tensor_parallel_size": "parallel.tensor_parallel_size",
    "data_parallel_size": "parallel.data_parallel_size",
    "num_redundant_experts": "parallel.num_redundant_experts",
    "placement_file": "parallel.placement_file",
    "kv_cache_memory": "cache.kv_cache_memory",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "api_key": "server.api_key",
    "host": "server.host",
    "port": "server.port",
}


def config_from_arguments(arguments: argparse.Namespace) -> Config:
    """Defaults, then --config, then --set, then flags. Raises ConfigError."""
    overrides: dict[str, Any] = dict(parse_override(text) for text in arguments.set)
    for flag, setting in _SETTING_OF_FLAG.items():
        value = getattr(arguments, flag)
        if value is not None:
            overrides[setting] = value
    return load_config(arguments.config, overrides)


def _parse_redundant(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {text!r}") from error


def parse_bytes(text: str) -> int:
    """Bytes of `536870912`, `512M` or `2G`: an argparse type."""
    digits, unit = (text[:-1], _UNITS.get(text[-1:].upper(), 0)) if not text.isdigit() else (text, 1)
    if not digits.isdigit() or not unit:
        raise argparse.ArgumentTypeError(f"must be bytes such as 536870912, 512M or 2G, got {text!r}")
    return int(digits) * unit
