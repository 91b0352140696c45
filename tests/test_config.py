"""The typed config: order of sources, and that every mistake names the setting, the value and what is accepted."""

import dataclasses
from pathlib import Path

import pytest

from moeserve.config import Config, ConfigError, config_from_dict, load_config, parse_override


def test_file_wins_over_defaults_and_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('[model]\nmodel = "/models/a"\ndtype = "float32"\n[server]\nport = 9000\n')
    config = load_config(file, {"server.port": 9001})
    assert config.model.model == "/models/a"
    assert config.model.dtype == "float32"
    assert config.server.port == 9001
    assert config.server.replica_port == 9002
    assert config.cache == Config().cache


def test_config_survives_a_round_trip_through_plain_values() -> None:
    config = load_config(overrides={"model.served_model_name": ["a", "b"], "cache.kv_cache_memory": 10**9})
    assert config_from_dict(dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("server.port=9000", ("server.port", 9000)),
        ("cache.memory_fraction=0.25", ("cache.memory_fraction", 0.25)),
        ("cache.enable_prefix_caching=false", ("cache.enable_prefix_caching", False)),
        ("model.dtype=float32", ("model.dtype", "float32")),
        ('model.served_model_name=["a", "b"]', ("model.served_model_name", ["a", "b"])),
        ("server.api_key=a=b", ("server.api_key", "a=b")),
    ],
)
def test_set_reads_toml_values_and_bare_strings(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"nowhere.port": 1}, ["[nowhere]", "server"]),
        ({"server.prt": 1}, ["server.prt", "port"]),
        ({"server.port": "high"}, ["server.port", "'high'", "whole number"]),
        ({"server.port": True}, ["server.port", "True", "whole number"]),
        ({"server.port": 70000}, ["server.port", "70000", "65535"]),
        ({"cache.memory_fraction": 1.5}, ["cache.memory_fraction", "1.5", "0.95"]),
        ({"model.dtype": "int3"}, ["model.dtype", "'int3'", "bfloat16"]),
        ({"model.quantization": "int4"}, ["model.quantization", "'int4'", "none, int8"]),
        ({"cache.kv_cache_dtype": "fp4"}, ["cache.kv_cache_dtype", "'fp4'", "fp8, int8"]),
        ({"model.served_model_name": "x"}, ["model.served_model_name", "'x'", "list of strings"]),
        ({"parallel.tensor_parallel_size": 0}, ["parallel.tensor_parallel_size", "0", "at least 1"]),
        ({"port": 1}, ["'port'", "section.key"]),
    ],
)
def test_a_mistake_names_setting_value_and_what_is_accepted(overrides: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("text", ["port", "port=1", "server.port"])
def test_set_without_section_key_and_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(text)


@pytest.mark.parametrize("content", ["[model\n", "model = 1\n", "\x00"])
def test_bad_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        load_config(file)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file"):
        load_config(tmp_path / "gone.toml")
