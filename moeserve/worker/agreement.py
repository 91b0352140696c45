"""What all replicas of an engine settle before each step: token counts, stop votes and the placement epoch.

Every rank takes part, in the group of ranks with its tp_rank; so all ranks of a replica, whose inputs are the same,
learn the same, and none can enter a collective of the forward pass that another one does not enter.
"""

from dataclasses import dataclass

import torch

from moeserve.ids import PlacementEpoch
from moeserve.parallel import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreedStep:
    num_tokens_by_dp_rank: tuple[int, ...]
    engine_stops: bool
    """A replica voted to stop: this step does not run, nor does any after it."""

    @property
    def engine_is_idle(self) -> bool:
        """Nobody has a token to compute."""
        return not any(self.num_tokens_by_dp_rank)


class StepAgreement:
    """One small all-gather a step over the DP replicas; none where there is only one."""

    def __init__(self, parallel: ParallelContext) -> None:
        self._parallel = parallel

    def agree(self, num_tokens: int, *, votes_stop: bool, placement_epoch: PlacementEpoch) -> AgreedStep:
        """Blocks until every replica has said its part."""
        group = self._parallel.dp
        if group.size == 1:
            return AgreedStep(num_tokens_by_dp_rank=(num_tokens,), engine_stops=votes_stop)
        mine = torch.tensor([num_tokens, votes_stop, placement_epoch], dtype=torch.int64, device=self._parallel.device)
        num_tokens_by_dp_rank, stop_votes, epochs = group.all_gather(mine).T.tolist()
        assert len(set(epochs)) == 1, f"the replicas stand in different placement epochs: {epochs}"
        return AgreedStep(num_tokens_by_dp_rank=tuple(num_tokens_by_dp_rank), engine_stops=any(stop_votes))
