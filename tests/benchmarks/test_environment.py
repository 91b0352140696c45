"""A peer's environment: its recipe run once, continued after a failure, run again when it changes."""

import sys
from pathlib import Path
from venv import EnvBuilder

import pytest

from benchmarks.peers.environment import Environment, Step
from benchmarks.peers.system import PeerUnavailableError


def _note(word: str, journal: Path, *, only_with: Path | None = None) -> Step:
    """A step that adds a word and the interpreter's prefix to the journal, and fails where `only_with` is missing."""
    code = f"import sys; open({str(journal)!r}, 'a').write('{word} ' + sys.prefix + chr(10))"
    if only_with is not None:
        code = f"open({str(only_with)!r}); {code}"
    return Step(what=word, command=("python", "-c", code))


def _empty_environment(folder: Path) -> Environment:
    """One that looks finished: installing a pip that no step uses would take most of this test's time."""
    EnvBuilder().create(folder)
    (folder / "bin" / "pip").touch()
    return Environment(folder)


def test_a_failed_recipe_is_told_and_continued_and_a_finished_one_left_alone(tmp_path: Path) -> None:
    environment = _empty_environment(tmp_path / "peer")
    journal, compiler = tmp_path / "journal", tmp_path / "compiler"
    recipe = [_note("first", journal), _note("second", journal, only_with=compiler)]
    with pytest.raises(PeerUnavailableError, match=r"second: exit code 1, see .*peer\.log"):
        environment.ensure(recipe)
    assert "FileNotFoundError" in (tmp_path / "peer.log").read_text()
    compiler.touch()
    environment.ensure(recipe)
    words = journal.read_text().split()
    assert words[0::2] == ["first", "first", "second"]
    assert set(words[1::2]) == {str(environment.folder)} != {sys.prefix}
    environment.ensure(recipe)
    assert len(journal.read_text().split()) == 6
    environment.ensure([*recipe, _note("third", journal)])
    assert journal.read_text().split()[-2] == "third"
