"""The command line of `serve`: what flags mean, and that their number does not grow."""

import argparse

import pytest

from moeserve.config import Config, ConfigError
from moeserve_launch.arguments import add_serve_arguments, config_from_arguments

ALLOWED_FLAGS = {
    "--tensor-parallel-size", "--data-parallel-size", "--dtype", "--quantization", "--num-redundant-experts",
    "--placement-file", "--kv-cache-memory", "--max-model-len", "--max-num-seqs",
    "--max-num-batched-tokens", "--served-model-name", "--api-key", "--host", "--port", "--config",
    "--set", "--help",
}  # fmt: skip


def parse(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    return config_from_arguments(parser.parse_args(words))


def test_no_new_flags() -> None:
    """A new setting goes into the typed config, where --config and --set reach it."""
    parser = argparse.ArgumentParser()
    add_serve_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    assert flags == ALLOWED_FLAGS


def test_without_words_the_defaults_hold() -> None:
    assert parse() == Config()


def test_flags_win_over_set() -> None:
    config = parse(
        *("/models/m", "-tp", "2", "-dp", "3", "--set", "server.port=1", "--port", "9", "--kv-cache-memory", "2G"),
        *("--set", "model.quantization=none", "--quantization", "int8"),
    )
    assert config.model.model == "/models/m"
    assert config.parallel.world_size == 6
    assert config.server.port == 9
    assert config.model.quantization == "int8"
    assert config.cache.kv_cache_memory == 2 * 2**30


@pytest.mark.parametrize("text", ["2X", "G", "-1", "1.5G", ""])
def test_sizes_that_are_not_bytes_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(f"--kv-cache-memory={text}")
    assert caught.value.code == 2
    assert "512M" in capsys.readouterr().err or not text


def test_values_are_checked_like_the_files() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor_parallel_size must be at least 1, got 0"):
        parse("-tp", "0")
