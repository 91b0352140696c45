"""A virtual environment for one peer, built step by step with its progress shown, and kept for later runs."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from benchmarks.peers.system import PeerUnavailableError

_STEP_TIMEOUT_S = 3 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a recipe; `python` in it stands for the environment's own interpreter."""

    what: str
    command: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


def pip_install(*requirements: str, environ: Mapping[str, str] | None = None) -> Step:
    command = ("python", "-m", "pip", "install", "--progress-bar", "off", *requirements)
    return Step(what=f"install {' '.join(requirements)}", command=command, environ=environ or {})


class Environment:
    """The folder of a virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def ensure(self, steps: Sequence[Step]) -> None:
        """Run the recipe unless this very recipe has been run to its end; raises PeerUnavailableError."""
        recipe = hashlib.sha256(repr([(step.command, dict(step.environ)) for step in steps]).encode()).hexdigest()
        done = self.folder / "recipe.sha256"
        if done.exists() and done.read_text() == recipe:
            return
        create = Step(what="create the environment", command=(sys.executable, "-m", "venv", str(self.folder)))
        missing = [] if (self.folder / "bin" / "pip").exists() else [create]
        with tqdm([*missing, *steps], desc=f"Setting up {self.folder.name}", unit="step") as bar:
            for step in bar:
                bar.set_postfix_str(step.what)
                self._run(step)
        done.write_text(recipe)

    def _run(self, step: Step) -> None:
        """Output goes to a log beside the environment."""
        command = [str(self.python) if word == "python" else word for word in step.command]
        log = self.folder.with_name(f"{self.folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            try:
                result = subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | dict(step.environ),
                    timeout=_STEP_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as error:
                raise PeerUnavailableError(f"{step.what}: not done after {_STEP_TIMEOUT_S:.0f} s, see {log}") from error
        if result.returncode != 0:
            raise PeerUnavailableError(f"{step.what}: exit code {result.returncode}, see {log}")
