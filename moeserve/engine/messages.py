"""What frontend and DP replicas say to each other over ZeroMQ: tagged msgspec structs, encoded as msgpack.

The frontend binds a ROUTER socket; each replica connects a DEALER socket whose identity is `replica_identity(dp_rank)`.
Every message is one frame (besides the ROUTER's identity frame).
"""

import msgspec

from moeserve.engine.outputs import ReplicaStats, RequestOutput
from moeserve.engine.placement_messages import CommitChange, DropChange
from moeserve.engine.sampling_params import SamplingParams
from moeserve.ids import DpRank, RequestId, WaveId


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    request_id: RequestId
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    output_token_ids: list[int] = []
    """Output a dead replica had already sent: the request goes on behind it."""
    cache_salt: str = ""
    priority: int = 0
    """Lower runs earlier."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    request_ids: list[RequestId]


class StartWave(msgspec.Struct, frozen=True, kw_only=True, tag="start_wave"):
    """Leave idle wave `wave_id` and step with the others; ignored unless idle in this very wave."""

    wave_id: WaveId


class ReplicaReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """First message of a replica's life; a second one with another incarnation means that the ranks were restarted."""

    dp_rank: DpRank
    incarnation: str
    num_blocks: int
    block_size: int
    max_model_len: int


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    dp_rank: DpRank
    outputs: list[RequestOutput]
    stats: ReplicaStats


class WaveStarted(msgspec.Struct, frozen=True, kw_only=True, tag="wave_started"):
    """This replica left idle wave `wave_id` for work of its own; the frontend tells its peers by StartWave."""

    dp_rank: DpRank
    wave_id: WaveId


ToReplica = AddRequest | AbortRequests | StartWave | CommitChange | DropChange
ToFrontend = ReplicaReady | StepOutputs | WaveStarted


def replica_identity(dp_rank: DpRank) -> bytes:
    return b"replica-%d" % dp_rank
