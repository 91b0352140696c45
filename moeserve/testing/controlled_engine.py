"""A small engine under a placement controller: windows of one second, and ranks that answer at once or not at all."""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from moeserve_placement import Cluster, ExpertPlacement, PlanSettings, fresh_placement
from moeserve_placement.arrays import FloatArray
from moeserve_placement.controller import (
    Command,
    Commit,
    ControllerSettings,
    Decision,
    Measurements,
    PlacementController,
    Prepare,
    Stage,
    StepStatistics,
)
from moeserve_placement.load import LoadWindow, Phase

NUM_LAYERS, NUM_EXPERTS, NUM_RANKS, NUM_PLACES = 3, 16, 4, 20
CLUSTER = Cluster.uniform(num_ranks=NUM_RANKS, num_physical_experts=NUM_PLACES)
START = ExpertPlacement.identity(
    num_layers=NUM_LAYERS, num_logical_experts=NUM_EXPERTS, num_ranks=NUM_RANKS, num_redundant_experts=4
)
PLAN = PlanSettings(expert_bytes=2**20)
SKEWED_LE = np.random.default_rng(3).dirichlet(np.ones(NUM_EXPERTS), NUM_LAYERS)
OTHER_LE = SKEWED_LE[:, ::-1]
EVEN_LE = np.full((NUM_LAYERS, NUM_EXPERTS), 1.0 / NUM_EXPERTS)
PHASES: tuple[Phase, ...] = ("decode", "prefill")
Kind = TypeVar("Kind")


@dataclass
class ControlledEngine:
    """Serves loads drawn from a popularity; its ranks do what they are asked at once, unless they do not answer."""

    controller: PlacementController
    now_s: float = 0.0
    answers: bool = True
    measured: Measurements = field(default_factory=Measurements)
    commands: list[Command] = field(default_factory=list)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @staticmethod
    def started(
        settings: ControllerSettings | None = None, plan_settings: PlanSettings = PLAN, start: ExpertPlacement = START
    ) -> "ControlledEngine":
        """With experts in order, or another map in force."""
        return ControlledEngine(PlacementController(settings or ControllerSettings(), start, CLUSTER, plan_settings))

    @staticmethod
    def fitted(popularity_LE: FloatArray, settings: ControllerSettings | None = None) -> "ControlledEngine":
        """With the best map for a load in force."""
        fitted, split_LP = fresh_placement(popularity_LE, CLUSTER, PLAN)
        controller = PlacementController(settings or ControllerSettings(), fitted, CLUSTER, PLAN, split_LP=split_LP)
        return ControlledEngine(controller)

    def serve(self, popularity_LE: FloatArray, num_windows: int, *, tokens: int = 20_000, phases: int = 1) -> None:
        for _ in range(num_windows):
            windows = [
                LoadWindow(
                    expert_load_LE=self.rng.multinomial(tokens, popularity_LE).astype(np.float64),
                    start_s=self.now_s,
                    end_s=self.now_s + 1.0,
                    num_tokens=tokens,
                    num_steps=10,
                    phase=phase,
                )
                for phase in PHASES[:phases]
            ]
            self.now_s += 1.0
            steps = StepStatistics(num_steps=10, num_tokens=tokens * phases, step_s=0.8)
            self.obey(self.controller.observe(windows, steps, self.now_s))

    def obey(self, commands: list[Command]) -> None:
        self.commands += commands
        for command in commands:
            if self.answers and isinstance(command, Prepare | Commit):
                stage: Stage = "prepare" if isinstance(command, Prepare) else "commit"
                for rank in range(NUM_RANKS):
                    self.obey(self.controller.ack(rank, command.epoch, stage, self.now_s, self.measured))

    def prepared_by_all(self) -> Commit:
        """Every rank acks the one order to prepare, whatever `answers` says; returns the commit this leads to."""
        (prepare,) = self.ordered(Prepare)
        for rank in range(NUM_RANKS):
            commands = self.controller.ack(rank, prepare.epoch, "prepare", self.now_s)
        (commit,) = commands
        assert isinstance(commit, Commit)
        return commit

    def ordered(self, kind: type[Kind]) -> list[Kind]:
        """Commands of one kind so far."""
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def acts(self) -> list[Decision]:
        """Records of migrations and rollbacks."""
        return [each for each in self.controller.decisions if each.action in ("migrate", "roll back")]

    @property
    def table(self) -> list[list[int]]:
        """The map in force."""
        rows: list[list[int]] = self.controller.placement.physical_to_logical_LP.tolist()
        return rows
