"""Distinct types for the ids that travel between the rooms."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One sequence in the engine. A request with n > 1 is n of them."""

BlockId = NewType("BlockId", int)
"""A KV-cache block of one DP replica, 0 <= id < num_blocks."""

StepId = NewType("StepId", int)
"""One scheduler decision and one forward pass of a DP replica."""

WaveId = NewType("WaveId", int)
"""One run of steps between two idle times of an engine."""

DpRank = NewType("DpRank", int)
"""One attention replica of an engine: its own scheduler and KV cache."""

PlacementEpoch = NewType("PlacementEpoch", int)
"""Counter of committed expert placements."""
