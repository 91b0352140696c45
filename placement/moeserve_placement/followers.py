"""What follows the loads in a replay: the controller with ranks that answer it, or a plan every so many windows."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moeserve_placement.cluster import Cluster
from moeserve_placement.controller.assess import InForce
from moeserve_placement.controller.commands import Command, Commit, Prepare
from moeserve_placement.controller.controller import PlacementController
from moeserve_placement.controller.evidence import Evidence, Interval
from moeserve_placement.controller.price import MigrationPrice
from moeserve_placement.moves import Moves
from moeserve_placement.planner import plan
from moeserve_placement.scenario import Scenario
from moeserve_placement.split import even_tokens


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What a follower ordered, and what that cost."""

    cluster: Cluster
    price: MigrationPrice
    num_orders: int = 0
    num_rollbacks: int = 0
    copy_s: float = 0.0
    lost_s: float = 0.0
    new_moves: int = 0

    def order(self, moves: Moves) -> float:
        """Book the moves; returns the seconds their copies take."""
        copy_s = self.price.copy_s(moves, self.cluster)
        self.num_orders += 1
        self.copy_s += copy_s
        self.lost_s += self.price.cost_s(moves, self.cluster)
        self.new_moves += len(moves)
        return copy_s

    def take_moves(self) -> int:
        taken, self.new_moves = self.new_moves, 0
        return taken


class Follower(Protocol):
    """Is told what was served, and keeps a placement for what comes."""

    ledger: Ledger

    @property
    def in_force(self) -> InForce: ...

    def observe(self, interval: Interval) -> None: ...


def follower_of(scenario: Scenario, now_s: float) -> Follower:
    """The one that the scenario's policy asks for."""
    policy = scenario.plan_settings.policy
    return Controlled(scenario, now_s) if policy in ("incremental", "frozen") else Periodic(scenario)


class Controlled:
    """The controller, and ranks that answer it."""

    def __init__(self, scenario: Scenario, now_s: float) -> None:
        self.ledger = Ledger(cluster=scenario.cluster, price=MigrationPrice.assumed(scenario.controller))
        self._controller = PlacementController(
            scenario.controller, scenario.start, scenario.cluster, scenario.plan_settings, now_s=now_s
        )
        self._copied: tuple[float, int] | None = None
        """When the copies under way are done, and their epoch."""

    @property
    def in_force(self) -> InForce:
        return InForce(placement=self._controller.placement, split_LP=self._controller.split_LP)

    def observe(self, interval: Interval) -> None:
        now_s = interval.start_s + interval.duration_s
        self._answer(now_s)
        self._obey(self._controller.observe(interval.windows, interval.steps, now_s), now_s)
        self._answer(now_s)
        self.ledger.num_rollbacks = self._controller.status(now_s).num_rollbacks

    def _answer(self, now_s: float) -> None:
        """Ranks ack copies that are done by now."""
        if self._copied is None or self._copied[0] > now_s:
            return
        (done_s, epoch), self._copied = self._copied, None
        for rank in range(self._controller.placement.num_ranks):
            self._obey(self._controller.ack(rank, epoch, "prepare", done_s), done_s)

    def _obey(self, commands: list[Command], now_s: float) -> None:
        for command in commands:
            if isinstance(command, Prepare):
                self._copied = (now_s + self.ledger.order(command.moves), command.epoch)
            elif isinstance(command, Commit):
                for rank in range(self._controller.placement.num_ranks):
                    self._controller.ack(rank, command.epoch, "commit", now_s)


class Periodic:
    """A plan from the last windows every so many, whatever it gains."""

    def __init__(self, scenario: Scenario) -> None:
        self.ledger = Ledger(cluster=scenario.cluster, price=MigrationPrice.assumed(scenario.controller))
        self._scenario = scenario
        self._evidence = Evidence(scenario.controller.num_windows)
        self._num_seen = 0
        ones_LE = np.ones((scenario.start.num_layers, scenario.start.num_logical_experts))
        split_LP = even_tokens(scenario.start.physical_to_logical_LP, ones_LE)
        self._in_force = InForce(placement=scenario.start, split_LP=split_LP)
        self._coming: tuple[float, InForce] | None = None

    @property
    def in_force(self) -> InForce:
        return self._in_force

    def observe(self, interval: Interval) -> None:
        now_s = interval.start_s + interval.duration_s
        self._evidence.add(interval)
        self._num_seen += 1
        newest = self._evidence.newest()
        if self._coming is None and newest is not None and self._num_seen % self._scenario.replan_windows == 0:
            scenario = self._scenario
            result = plan(newest.load_LE, self._in_force.placement, scenario.cluster, scenario.plan_settings)
            copy_s = self.ledger.order(result.moves)
            self._coming = now_s + copy_s, InForce(placement=result.placement, split_LP=result.split_LP)
        if self._coming is not None and self._coming[0] <= now_s:
            self._in_force, self._coming = self._coming[1], None
