"""Checks that need no rank and no torch: every mistake they find is told in one line before anything is started."""

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import Config, ConfigError, ServerConfig
from moeserve.models.checkpoint import resolve_model_folder, validate_checkpoint
from moeserve.models.context_length import resolve_max_model_len
from moeserve.models.hf_config import read_model_spec
from moeserve.models.layout import check_layout
from moeserve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServableModel:
    """A checkpoint that can be served with the given config."""

    folder: Path
    spec: ModelSpec
    max_model_len: int


def check_model(config: Config) -> ServableModel:
    """Config against checkpoint: architecture, layout, context, tensors.

    Raises ConfigError or CheckpointError (both ValueError) with one line that names the thing.
    """
    folder = resolve_model_folder(config.model.model)
    spec = read_model_spec(folder)
    check_layout(spec, config.parallel)
    validate_checkpoint(folder, spec)
    return ServableModel(folder=folder, spec=spec, max_model_len=resolve_max_model_len(config, spec))


def check_ports(config: ServerConfig) -> None:
    """Raises ConfigError when one of the frontend's ports is taken or may not be used."""
    if config.replica_port > 65535 or config.replica_port == config.port:
        raise ConfigError(
            f"server.engine_port must be a port other than server.port, at most 65535, got {config.replica_port}"
        )
    _check_port(config.host, config.port, "choose another with --port")
    _check_port(
        "127.0.0.1", config.replica_port, "it is port + 1 unless set: choose another with --set server.engine_port=N"
    )


def _check_port(host: str, port: int, advice: str) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is already in use: {advice}") from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
