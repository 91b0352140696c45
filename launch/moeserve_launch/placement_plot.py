"""Replays as a picture: balancedness over time, and what was copied for it."""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from moeserve.config import ConfigError
from moeserve_placement.simulator import Simulation, comparison

ENDINGS = (".html", ".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise ConfigError where no plot can be written, before anything is replayed for it."""
    if path.suffix not in ENDINGS:
        raise ConfigError(f"--plot must end in {', '.join(ENDINGS)}, got {path}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'moeserve[dev]'") from error


def plot(simulations: Sequence[Simulation], path: Path) -> None:
    """Write a picture, or a page with the picture and the table. Raises ConfigError where the file cannot be."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for simulation in simulations:
        label = f"{simulation.policy}, {simulation.num_ranks} ranks"
        above.plot(simulation.time_W, simulation.balancedness_WL.mean(axis=1), label=label)
        below.plot(simulation.time_W, simulation.moves_W.cumsum() * simulation.expert_bytes / 1e9, label=label)
    above.set_ylabel("balancedness, mean over layers")
    above.legend()
    below.set_ylabel("GB copied so far")
    below.set_xlabel("seconds")
    try:
        if path.suffix == ".html":
            drawing = StringIO()
            figure.savefig(drawing, format="svg")
            path.write_text(_page(drawing.getvalue(), comparison(simulations)))
        else:
            figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path}: {error.strerror}") from error


def _page(svg: str, table: str) -> str:
    drawing = svg[svg.index("<svg") :]
    return f"<!doctype html>\n<meta charset=utf-8>\n<title>Placement replay</title>\n{drawing}\n<pre>{table}</pre>\n"
