"""The DP replicas as the frontend knows them: who is ready, in which life, with how much work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moeserve.engine.messages import ReplicaReady
from moeserve.engine.outputs import ReplicaStats
from moeserve.ids import DpRank
from moeserve.server.affinity import PrefixAffinity

_MAX_AFFINITY_TOKENS = 1024
"""How much more work a replica may have and still get a prompt whose beginning it knows."""


@dataclass(slots=True)
class _Replica:
    ready: ReplicaReady | None = None
    """None before its first life and between two."""
    stats: ReplicaStats | None = None
    heard_s: float = 0.0
    """When the statistics came."""
    outstanding_tokens: int = 0


class EngineRegistry:
    """All replicas of one engine. They share collectives, so they live and die together."""

    def __init__(self, dp_size: int) -> None:
        self._replicas = {DpRank(dp_rank): _Replica() for dp_rank in range(dp_size)}
        self._affinity = PrefixAffinity()

    @property
    def is_ready(self) -> bool:
        return all(replica.ready is not None for replica in self._replicas.values())

    @property
    def ready_dp_ranks(self) -> list[DpRank]:
        return [dp_rank for dp_rank, replica in self._replicas.items() if replica.ready is not None]

    @property
    def max_model_len(self) -> int | None:
        """The least of the replicas' limits, their KV caches among them; None while there is no replica."""
        alive = [replica.ready for replica in self._replicas.values() if replica.ready is not None]
        return min((min(r.max_model_len, r.num_blocks * r.block_size) for r in alive), default=None)

    def knows(self, dp_rank: DpRank) -> bool:
        return dp_rank in self._replicas

    def incarnation(self, dp_rank: DpRank) -> str | None:
        ready = self._replicas[dp_rank].ready
        return None if ready is None else ready.incarnation

    def register(self, ready: ReplicaReady) -> None:
        """A replica came to life. Where its former life was thought to go on, all its peers are new as well."""
        replica = self._replicas[ready.dp_rank]
        if replica.ready is not None and replica.ready.incarnation != ready.incarnation:
            self.lose_all()
        replica.ready = ready

    def lose_all(self) -> None:
        """The engine died: its replicas count again when they say that they are ready."""
        for dp_rank, replica in self._replicas.items():
            replica.ready = None
            replica.stats = None
            self._affinity.forget(dp_rank)

    def update_stats(self, dp_rank: DpRank, stats: ReplicaStats, now_s: float) -> None:
        replica = self._replicas[dp_rank]
        replica.stats, replica.heard_s = stats, now_s

    def stats_age_s(self, dp_rank: DpRank, now_s: float) -> float | None:
        """Since a replica's last step was heard of."""
        replica = self._replicas[dp_rank]
        return None if replica.stats is None else now_s - replica.heard_s

    def read_stats(self) -> Mapping[DpRank, ReplicaStats]:
        return {dp_rank: replica.stats for dp_rank, replica in self._replicas.items() if replica.stats is not None}

    def choose(self, prompt_token_ids: Sequence[int], cache_salt: str) -> DpRank:
        """The replica with the least outstanding tokens, less a bounded bonus for a prefix it knows; ties: lowest."""
        if len(self._replicas) == 1:
            return DpRank(0)

        def cost(dp_rank: DpRank) -> int:
            known = self._affinity.num_known_tokens(dp_rank, prompt_token_ids, cache_salt)
            return self._replicas[dp_rank].outstanding_tokens - min(known, _MAX_AFFINITY_TOKENS)

        chosen = min(self._replicas, key=cost)
        self._affinity.record(chosen, prompt_token_ids, cache_salt)
        return chosen

    def add_work(self, dp_rank: DpRank, num_tokens: int) -> None:
        """More outstanding tokens, or less where negative."""
        self._replicas[dp_rank].outstanding_tokens += num_tokens
        assert self._replicas[dp_rank].outstanding_tokens >= 0
