"""Dispatch tokens to the ranks of their experts, and combine what the experts made of them.

Between the two stands a record of how the rows travelled; the experts in between see rows with local expert ids and
never learn which way they came.
"""

from typing import Any

from moeserve.experts.dispatcher.all_gather import AllGatherDispatcher
from moeserve.experts.dispatcher.all_to_all import AllToAllDispatcher
from moeserve.experts.dispatcher.choice import DispatcherByStep, goes_by_all_gather
from moeserve.experts.dispatcher.interface import ExpertDispatcher, ExpertInput
from moeserve.experts.dispatcher.replicated import ReplicatedDispatcher
from moeserve.parallel import ParallelContext

__all__ = [
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "DispatcherByStep",
    "ExpertDispatcher",
    "ExpertInput",
    "ReplicatedDispatcher",
    "build_dispatcher",
    "goes_by_all_gather",
]


def build_dispatcher(parallel: ParallelContext, *, top_k: int) -> ExpertDispatcher[Any]:
    """The dispatcher of a layout: tokens travel only where DP replicas hold different ones."""
    if parallel.layout.dp_size == 1:
        return ReplicatedDispatcher(parallel.tp)
    return DispatcherByStep(parallel, top_k=top_k)
