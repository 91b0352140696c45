"""One picture of a run: rates of the systems of each comparison, by load."""

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.load import Load
from benchmarks.peers.plan import Comparison
from benchmarks.peers.report import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OURS, _OTHERS = "#c2410c", "#64748b"


def draw_chart(run: Run, target: Path) -> None:
    """Bars of medians, one row a comparison and one column a load; whiskers from the lowest to the highest round."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    num_columns = max(len(comparison.loads) for comparison in run.comparisons)
    figure, axes = plt.subplots(
        len(run.comparisons), num_columns, figsize=(3.4 * num_columns, 1.9 * len(run.comparisons)), squeeze=False
    )
    for row, comparison in zip(axes, run.comparisons, strict=True):
        for panel, load in zip(row, comparison.loads, strict=False):
            _draw_panel(panel, run, comparison, load)
        for panel in row[len(comparison.loads) :]:
            panel.set_axis_off()
    figure.suptitle(f"tokens per second, medians; {run.machine.cpu}", fontsize=9)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _draw_panel(panel: "Axes", run: Run, comparison: Comparison, load: Load) -> None:
    results = run.results
    for position, variant in enumerate(reversed(comparison.variants)):
        rates = [*results.rates(variant.name, load.name).values()]
        median = results.rate(variant.name, load.name)
        if median is not None:
            spread = [[median - min(rates)], [max(rates) - median]]
            colour = _OURS if variant.peer == comparison.ours.peer else _OTHERS
            panel.barh(position, median, xerr=spread, color=colour, error_kw={"linewidth": 0.8})
    names = [variant.name.partition(",")[0] for variant in reversed(comparison.variants)]
    panel.set_yticks(range(len(names)), names if load == comparison.loads[0] else [""] * len(names), fontsize=8)
    panel.tick_params(axis="x", labelsize=7)
    panel.set_title(f"{comparison.name}: {load.name}", fontsize=8)
