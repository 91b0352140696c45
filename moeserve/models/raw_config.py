"""A `config.json` with typed look-ups: a refusal names file, key, value and what is accepted."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.config import ConfigError


class RawConfig:
    """The values of a JSON object, and the family's defaults for those that are absent or null.

    Only the `*_or_none` look-ups tell null from absent: there an explicit null is None.
    """

    def __init__(
        self, values: Mapping[str, Any], path: Path, *, prefix: str = "", defaults: Mapping[str, Any] | None = None
    ) -> None:
        self._values = values
        self._path = path
        self._prefix = prefix
        self._defaults = defaults or {}

    @staticmethod
    def load(path: Path) -> "RawConfig":
        """Read a JSON object. Raises ConfigError where there is no such file, or it holds something else."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: not a JSON file: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold a JSON object, got {type(values).__name__}")
        return RawConfig(values, path)

    def with_defaults(self, defaults: Mapping[str, Any], aliases: Mapping[str, str]) -> "RawConfig":
        """The same values under their main names (`aliases` maps another name to it), with a family's defaults."""
        values = dict(self._values)
        for alias, name in aliases.items():
            if values.get(name) is None and values.get(alias) is not None:
                values[name] = values[alias]
        return RawConfig(values, self._path, prefix=self._prefix, defaults=defaults)

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def refuse(self, key: str, accepted: str) -> ConfigError:
        """The error for a value that cannot be served."""
        return ConfigError(f"{self._path}: {self._prefix}{key} must be {accepted}, got {self._find(key)!r}")

    def whole(self, key: str, *, at_least: int = 1) -> int:
        value = self._find(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.refuse(key, f"a whole number of at least {at_least}")
        return value

    def whole_or_none(self, key: str, *, at_least: int = 1) -> int | None:
        return None if self._is_none(key) else self.whole(key, at_least=at_least)

    def number(self, key: str) -> float:
        value = self._find(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(key, "a number")
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        return None if self._is_none(key) else self.number(key)

    def flag(self, key: str) -> bool:
        value = self._find(key)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._find(key)
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def choice(self, key: str, *accepted: str) -> str:
        value = self.text(key)
        if value not in accepted:
            raise self.refuse(key, " or ".join(map(repr, accepted)))
        return value

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers; one alone is a list of it, absent an empty one."""
        value = self._find(key)
        items = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.refuse(key, "a list of whole numbers")
        return tuple(items)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; absent an empty one."""
        value = self._find(key)
        items = [] if value is None else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self.refuse(key, "a list of strings")
        return tuple(items)

    def section(self, key: str) -> "RawConfig":
        """The object under `key`; absent an empty one."""
        value = self._find(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.refuse(key, "a JSON object")
        return RawConfig(value, self._path, prefix=f"{self._prefix}{key}.")

    def _find(self, key: str) -> Any:
        value = self._values.get(key)
        return self._defaults.get(key) if value is None else value

    def _is_none(self, key: str) -> bool:
        return (self._values[key] if key in self._values else self._defaults.get(key)) is None
