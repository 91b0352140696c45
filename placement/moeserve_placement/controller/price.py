"""What a migration costs, in seconds of step time: assumed at first, learned from those that were made.

Axes: M moves, R ranks.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from moeserve_placement.cluster import Cluster
from moeserve_placement.controller.commands import Measurements
from moeserve_placement.controller.settings import ControllerSettings
from moeserve_placement.moves import Moves

NEWEST = 0.5
"""Weight of the newest measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPrice:
    """Step time lost = seconds of copying x the share lost meanwhile + the pause of the commit."""

    bytes_per_s: float
    """What the slowest rank copies a second."""
    lost_share: float
    """Share of step time lost while copying."""
    pause_s: float

    @staticmethod
    def assumed(settings: ControllerSettings) -> "MigrationPrice":
        return MigrationPrice(
            bytes_per_s=settings.copy_bytes_per_s, lost_share=settings.interference, pause_s=settings.pause_s
        )

    def copy_s(self, moves: Moves, cluster: Cluster) -> float:
        """Seconds until the rank that sends or receives most is done."""
        return busiest_rank_bytes(moves, cluster) / self.bytes_per_s

    def cost_s(self, moves: Moves, cluster: Cluster) -> float:
        return self.copy_s(moves, cluster) * self.lost_share + self.pause_s

    def after_copies(self, answers: Collection[Measurements]) -> "MigrationPrice":
        """With what the ranks measured while they copied; those that copied nothing tell nothing."""
        copied = [answer for answer in answers if answer.num_bytes > 0 and answer.copy_s > 0]
        if not copied:
            return self
        slowest = min(answer.num_bytes / answer.copy_s for answer in copied)
        lost_share = max(answer.lost_s / answer.copy_s for answer in copied)
        return replace(
            self,
            bytes_per_s=self.bytes_per_s + NEWEST * (slowest - self.bytes_per_s),
            lost_share=self.lost_share + NEWEST * (lost_share - self.lost_share),
        )

    def after_commit(self, answers: Collection[Measurements]) -> "MigrationPrice":
        """With the pauses the ranks measured."""
        pause_s = max((answer.lost_s for answer in answers), default=self.pause_s)
        return replace(self, pause_s=self.pause_s + NEWEST * (pause_s - self.pause_s))


def busiest_rank_bytes(moves: Moves, cluster: Cluster) -> int:
    """The most bytes that any rank sends or receives."""
    if not len(moves):
        return 0
    received_R = np.bincount(cluster.rank_of_place_P[moves.destination_M], minlength=cluster.num_ranks)
    sent_R = np.bincount(cluster.rank_of_place_P[moves.source_M], minlength=cluster.num_ranks)
    return int(max(received_R.max(), sent_R.max())) * moves.expert_bytes
