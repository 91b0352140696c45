"""A load as files: everything as JSON, and a picture or a page for people."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeserve.loadgen.goodput_search import MaxGoodput
from moeserve.loadgen.loops import LoadResult
from moeserve.loadgen.outcomes import Outcome
from moeserve.loadgen.summary import LoadSummary
from moeserve.loadgen.traffic import TrafficClass

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".html", ".png", ".svg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What there is to tell. `load` is the one at the found rate where a rate was looked for."""

    settings: Mapping[str, Any]
    load: LoadResult
    summary: LoadSummary
    found: MaxGoodput | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "summary": asdict(self.summary),
            "max_goodput": None if self.found is None else asdict(self.found),
            "requests": [_record(outcome) for outcome in self.load.outcomes],
        }

    def text(self) -> str:
        """For a terminal."""
        return self.summary.text() if self.found is None else f"{self.summary.text()}\n{self.found.text}"


def check_report_path(path: Path) -> None:
    """Raise ValueError where no such report can be written, before anything is measured for it."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"a report must be a file ending in {', '.join(ENDINGS)}, got {path}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError("a report needs matplotlib: pip install 'moeserve[bench]'") from error


def write_report(report: Report, path: Path) -> None:
    """A picture, or a page of it with the tables. Raises OSError."""
    figure = _draw(report)
    if path.suffix != ".html":
        figure.savefig(path)
        return
    drawing = StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    settings = "\n".join(f"{name}: {value}" for name, value in report.settings.items() if value is not None)
    path.write_text(
        "<!doctype html>\n<meta charset=utf-8>\n<title>moeserve bench serve</title>\n"
        f"{svg[svg.index('<svg') :]}\n<pre>{escape(report.text())}</pre>\n<pre>{escape(settings)}</pre>\n",
        encoding="utf-8",
    )


def _record(outcome: Outcome) -> dict[str, Any]:
    return {
        "class": outcome.traffic_class.name,
        "tenant": outcome.traffic_class.tenant,
        "request_id": outcome.request_id,
        "served_class": outcome.served_class,
        "sent_s": outcome.sent_s,
        "prompt_tokens": outcome.prompt_tokens,
        "output_tokens_wanted": outcome.output_tokens_wanted,
        "token_times_s": outcome.token_times_s,
        "is_good": outcome.is_good,
        "error": outcome.error,
    }


def _draw(report: Report) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 9), layout="constrained")
    above, middle, below = figure.subplots(3, 1)
    if report.found is None:
        _draw_over_time(above, report.load)
    else:
        _draw_search(above, report.found)
    classes = {outcome.traffic_class.name: outcome.traffic_class for outcome in report.load.outcomes}
    for index, (name, traffic_class) in enumerate(sorted(classes.items())):
        own = [each for each in report.load.outcomes if each.traffic_class.name == name and not each.is_failed]
        ttfts = sorted(each.ttft_s for each in own if each.ttft_s is not None)
        tpots = sorted(each.tpot_s for each in own if each.tpot_s is not None)
        _draw_shares(middle, ttfts, traffic_class, traffic_class.ttft_s, f"C{index}")
        _draw_shares(below, tpots, traffic_class, traffic_class.tpot_s, f"C{index}")
    middle.set_xlabel("TTFT, ms (dashed: target)")
    below.set_xlabel("TPOT, ms (dashed: target)")
    for axes in (middle, below):
        axes.set_ylabel("share of requests")
        axes.set_ylim(0.0, 1.02)
        axes.legend(*axes.get_legend_handles_labels(), loc="lower right")
    return figure


def _draw_shares(
    axes: "Axes", ordered_s: list[float], traffic_class: TrafficClass, target_s: float | None, color: str
) -> None:
    if ordered_s:
        shares = [(index + 1) / len(ordered_s) for index in range(len(ordered_s))]
        axes.step([value * 1e3 for value in ordered_s], shares, where="post", color=color, label=traffic_class.name)
    if target_s is not None:
        axes.axvline(target_s * 1e3, color=color, linestyle="--")


def _draw_over_time(axes: "Axes", load: LoadResult) -> None:
    for is_good, marker, label in ((True, "o", "met its targets"), (False, "x", "did not")):
        points = [(each.sent_s, each.ttft_s) for each in load.outcomes if each.is_good == is_good and each.ttft_s]
        if points:
            times, ttfts = zip(*points, strict=True)
            axes.scatter(times, [ttft * 1e3 for ttft in ttfts], s=12, marker=marker, label=label)
    failed = [each.sent_s for each in load.outcomes if each.is_failed]
    if failed:
        axes.plot(failed, [0.0] * len(failed), "k|", label="failed")
    axes.set_xlabel("sent at, s")
    axes.set_ylabel("TTFT, ms")
    axes.legend()


def _draw_search(axes: "Axes", found: MaxGoodput) -> None:
    axes.plot([each.rate for each in found.trials], [each.attainment for each in found.trials], "o")
    axes.axvspan(found.low, found.high, alpha=0.2, label="95 % interval")
    if found.rate is not None:
        axes.axvline(found.rate, linestyle="--", label="highest rate that passed")
    axes.set_xscale("log")
    axes.set_xlabel("rate, requests/s")
    axes.set_ylabel("attainment")
    axes.legend()
