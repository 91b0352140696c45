"""What a scrape of the metrics sees of placement."""

from collections.abc import Callable

from moeserve.observability.placement_metrics import PlacementSample
from moeserve.server.placement.analysis import LoadAnalysis, analyse
from moeserve.server.placement.loads import LoadHistory
from moeserve.server.placement.view import PlacementView


class SampleReader:
    """Analyses the newest windows again only when there are new ones, or another map or split."""

    def __init__(
        self, view: Callable[[], PlacementView], history: Callable[[], LoadHistory | None], *, num_windows: int
    ) -> None:
        self._view = view
        self._history = history
        self._num_windows = num_windows
        self._analysed: tuple[int, object, LoadAnalysis] | None = None

    def __call__(self) -> PlacementSample:
        view = self._view()
        analysis = self._analysis(view)
        layer_ids = [] if view.known is None else view.known.life.layer_ids
        return PlacementSample(
            state=view.state,
            epoch=None if view.known is None else view.known.placement.epoch,
            frozen=view.frozen,
            plan_age_s=None if view.status is None else view.status.plan_age_s,
            failures=view.failures,
            layers={} if analysis is None else analysis.layer_samples(layer_ids),
            rank_load=[] if analysis is None else analysis.relative_load_R.tolist(),
            expert_load=[]
            if analysis is None
            else [(layer_ids[row], expert, load) for row, expert, load in analysis.top_experts],
        )

    def _analysis(self, view: PlacementView) -> LoadAnalysis | None:
        history, known = self._history(), view.known
        if history is None or not len(history) or known is None:
            return None
        analysed = self._analysed
        if analysed is None or analysed[0] != history.num_added or analysed[1] is not known.split_LP:
            newest = history.newest(num_windows=self._num_windows)
            analysis = analyse(newest, "mixed", known.placement, known.split_LP, known.life.cluster)
            analysed = self._analysed = (history.num_added, known.split_LP, analysis)
        return analysed[2]
