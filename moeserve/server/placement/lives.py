"""From one life of the ranks to the next: what begins with them, what ends with them, and what stays.

The ranks begin with the map they started with, and a change that was under way is over. All else stays: operators'
wishes (frozen, pins), counts, loads, and the controller with its records, which plans anew from the loads it has seen.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable

from moeserve.config import Config
from moeserve.engine.placement_messages import LoadReport, MigratorReady
from moeserve.server.placement.changes import ChangeQueue, ChangeWatch, RankSender
from moeserve.server.placement.live import LivePlacement
from moeserve.server.placement.loads import LoadHistory, ReportMerger
from moeserve.server.placement.ranks import Life, RankRoll
from moeserve.server.placement.settings import controller_settings, plan_settings
from moeserve.server.placement.view import Known
from moeserve_placement import Pin, PlacementError
from moeserve_placement.controller import ControllerSettings, PlacementController
from moeserve_placement.controller.evidence import Interval

logger = logging.getLogger(__name__)

LATE_WINDOWS = 1.0
"""How long the first report of a window waits for the other replicas', in windows."""


class Lives:
    """`live` is None while no controller is at work; `state` and `reason` say why then."""

    def __init__(self, config: Config, watch: ChangeWatch, clock: Callable[[], float]) -> None:
        self._life: Life | None = None
        self.live: LivePlacement | None = None
        self.history: LoadHistory | None = None
        self.frozen = config.placement.policy == "frozen"
        self.pins: tuple[Pin, ...] = ()
        self.state, self.reason = "starting", "the ranks have yet to say what they hold"
        self._resting: Known | None = None
        """What they hold while no controller is at work."""
        self._config = config
        self._watch = watch
        self._clock = clock
        self._roll = RankRoll(config.parallel.world_size)
        self._merger: ReportMerger | None = None
        self._change_ids = itertools.count(1)
        self._controller: PlacementController | None = None
        """Kept between lives, but for one that an error has stopped."""
        self._past_failures: Counter[str] = Counter()
        if config.parallel.world_size == 1:
            self.state, self.reason = "static", "there is one rank: experts have nowhere to move to"

    def knows(self, rank: int) -> bool:
        """Whether this server has such a rank."""
        return self._roll.knows(rank)

    @property
    def failures(self) -> dict[str, int]:
        """By reason, of all lives."""
        return dict(self._past_failures + self._controller_failures() + self._split_failures())

    @property
    def known(self) -> Known | None:
        """What the ranks hold; None while that is not known."""
        if self._life is None or self.live is None:
            return self._resting
        controller = self.live.controller
        return Known(life=self._life, placement=controller.placement, split_LP=controller.split_LP)

    def register(self, ready: MigratorReady, sender: RankSender) -> None:
        """A rank came to life; with the last one begins the life of all."""
        if self._roll.register(ready):
            logger.info("the ranks were started again: placement begins anew")
            self.end("starting", "the ranks were started again, and have yet to say what they hold")
        if self._roll.num_missing:
            return
        if not ready.shape.num_layers:
            self.end("static", "the model has no MoE layers")
            return
        try:
            self._begin(self._roll.life(), sender)
        except PlacementError as error:
            logger.error("placement stays as it is: %s", error)
            self.end("static", str(error))

    def end(self, state: str, reason: str) -> None:
        """No controller at work from here on; a change that no rank has committed is dropped."""
        self._past_failures += self._split_failures()
        self._resting = None if state == "starting" else self.known
        if self.live is not None:
            self.live.changes.drop_all(reason)
        if state == "stopped":
            self._past_failures += self._controller_failures()
            self._controller = None
        self.live = self._merger = None
        self.state, self.reason = state, reason

    def add_report(self, report: LoadReport) -> Interval | None:
        """Count a report; returns the window that it completes."""
        if self._merger is None:
            return None
        try:
            return self._kept(self._merger.add(report, self._clock()))
        except ValueError as error:
            logger.error("dropped a load report: %s", error)
            return None

    def tick(self) -> Interval | None:
        """The window whose time to wait for late replicas is over."""
        return None if self._merger is None else self._kept(self._merger.tick(self._clock()))

    def _begin(self, life: Life, sender: RankSender) -> None:
        shape, parallel = life.shape, self._config.parallel
        if self.history is None or not self.history.fits(shape):
            self.history, self._controller = LoadHistory(shape), None
        self._life = life
        self._resting = Known(life=life, placement=life.placement, split_LP=life.even_split_LP)
        self._merger = ReportMerger(
            shape, dp_size=parallel.data_parallel_size, patience_s=LATE_WINDOWS * self._config.placement.window_s
        )
        if life.num_ranks == 1:
            return
        settings = controller_settings(self._config.placement, can_move=shape.num_spare_places > 0)
        changes = ChangeQueue(
            life=life,
            sender=sender,
            settings=settings,
            watch=self._watch,
            next_id=lambda: next(self._change_ids),
        )
        self.live = LivePlacement(self._controller_for(life, settings), changes, self._clock)
        self.state, self.reason = "observing", ""

    def _controller_for(self, life: Life, settings: ControllerSettings) -> PlacementController:
        """The one of the life before, where there was one: loads and what was learned outlive the ranks."""
        if self._controller is None:
            wishes = plan_settings(life.shape, frozen=self.frozen, pins=self.pins)
            self._controller = PlacementController(settings, life.placement, life.cluster, wishes, now_s=self._clock())
        else:
            self._controller.restart(life.placement, life.cluster, self._clock())
        return self._controller

    def _kept(self, interval: Interval | None) -> Interval | None:
        if interval is not None:
            assert self.history is not None
            self.history.add(interval)
        return interval

    def _controller_failures(self) -> Counter[str]:
        return Counter() if self._controller is None else Counter(self._controller.status(self._clock()).failures)

    def _split_failures(self) -> Counter[str]:
        return Counter() if self.live is None else self.live.changes.split_failures
