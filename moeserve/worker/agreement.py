"""What all replicas of an engine settle before each step: token counts, phase, stops, placement epoch and commits.

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
    is_decode: bool
    """No request of any replica has more than one token in the step."""
    engine_stops: bool
    """A replica voted to stop: this step does not run, nor does any after it."""
    committed_change: int = 0
    """The change of the placement that every replica voted for: all commit it now, before the step; 0: none."""

    @property
    def engine_is_idle(self) -> bool:
        """Nobody has a token to compute."""
        return not any(self.num_tokens_by_dp_rank)


class StepAgreement:
    """One small all-gather a step over the DP replicas; none where there is only one."""

    def __init__(self, parallel: ParallelContext) -> None:
        self._parallel = parallel

    def agree(
        self,
        num_tokens: int,
        *,
        is_decode: bool,
        votes_stop: bool,
        placement_epoch: PlacementEpoch,
        commit_vote: int = 0,
    ) -> AgreedStep:
        """Blocks until every replica has said its part.

        is_decode: whether no request of this replica has more than one token. commit_vote: the change that this
        replica would commit; 0: none.
        """
        group = self._parallel.dp
        if group.size == 1:
            return AgreedStep(
                num_tokens_by_dp_rank=(num_tokens,),
                is_decode=is_decode,
                engine_stops=votes_stop,
                committed_change=commit_vote,
            )
        said = [num_tokens, is_decode, votes_stop, placement_epoch, commit_vote]
        mine = torch.tensor(said, dtype=torch.int64, device=self._parallel.device)
        num_tokens_by_dp_rank, decodes, stop_votes, epochs, commit_votes = group.all_gather(mine).T.tolist()
        assert len(set(epochs)) == 1, f"the replicas stand in different placement epochs: {epochs}"
        return AgreedStep(
            num_tokens_by_dp_rank=tuple(num_tokens_by_dp_rank),
            is_decode=all(decodes),
            engine_stops=any(stop_votes),
            committed_change=commit_vote if len(set(commit_votes)) == 1 else 0,
        )
