"""Placement as JSON: the objects that the API answers with.

Layers are the model's own numbers, ranks and places count from 0, times are seconds since 1970, gains are shares of
step time.
"""

from typing import Any

from moeserve.server.placement.analysis import LoadAnalysis
from moeserve.server.placement.ranks import Life
from moeserve.server.placement.view import Known, PlacementView
from moeserve_placement.controller import Decision, Proposal


def placement_record(view: PlacementView, *, engine_is_ready: bool) -> dict[str, Any]:
    """Everything about the placement in force, and about what is under way."""
    state, reason = describe_state(view, engine_is_ready=engine_is_ready)
    record = {
        "state": state,
        "reason": reason,
        "engine_is_ready": engine_is_ready,
        "frozen": view.frozen,
        "is_planning": view.is_planning,
        "pins": [
            {"layer": _layer_id(view.known, pin.layer), "logical_expert_id": pin.logical_expert_id, "rank": pin.rank}
            for pin in view.pins
        ],
        "failures": view.failures,
        "num_windows_seen": view.num_windows_seen,
        "controller": None if view.status is None else view.status.to_dict(),
        "change": view.change,
    }
    return record | {"map": None if view.known is None else _map_record(view.known)}


def describe_state(view: PlacementView, *, engine_is_ready: bool) -> tuple[str, str]:
    """State and reason as operators see them: ranks that are ready without having reported experts never will."""
    if view.state == "starting" and engine_is_ready:
        return "static", "the ranks report no experts that could move"
    return view.state, view.reason


def _map_record(known: Known) -> dict[str, Any]:
    life, placement = known.life, known.placement
    shape = life.shape
    table_LP = placement.physical_to_logical_LP
    return {
        "epoch": placement.epoch,
        "num_logical_experts": placement.num_logical_experts,
        "num_physical_experts": placement.num_physical_experts,
        "top_k": shape.top_k,
        "expert_bytes": shape.expert_bytes,
        "num_spare_places": shape.num_spare_places,
        "ranks": [
            {
                "rank": rank,
                "node": life.cluster.node_of_rank[rank],
                "first_place": placement.rank_slice(rank).start,
                "num_places": int(placement.num_physical_R[rank]),
            }
            for rank in range(life.num_ranks)
        ],
        "layers": [
            {
                "layer": layer_id,
                "physical_to_logical": table_LP[row].tolist(),
                "num_replicas": placement.num_replicas_LE[row].tolist(),
                "split": [round(float(share), 4) for share in known.split_LP[row]],
            }
            for row, layer_id in enumerate(life.layer_ids)
        ],
    }


def load_record(analysis: LoadAnalysis, life: Life, epoch: int) -> dict[str, Any]:
    """A load under the map and split in force, by layer, rank and expert."""
    balancedness_L = analysis.balancedness_L
    return {
        "phase": analysis.phase,
        "epoch": epoch,
        "num_windows": analysis.num_windows,
        "duration_s": analysis.duration_s,
        "num_steps": analysis.num_steps,
        "num_tokens": analysis.num_tokens,
        "assignments_per_rank": analysis.assignments_per_rank,
        "floor": analysis.floor,
        "balancedness_mean": float(balancedness_L.mean()),
        "balancedness_worst": float(balancedness_L.min()),
        "worst_layer": life.layer_ids[int(balancedness_L.argmin())],
        "rank_load": analysis.relative_load_R.tolist(),
        "layers": [
            {
                "layer": layer_id,
                "balancedness": float(balancedness_L[row]),
                "rank_load": analysis.rank_load_LR[row].tolist(),
                "expert_load": analysis.load_LE[row].tolist(),
            }
            for row, layer_id in enumerate(life.layer_ids)
        ],
    }


def plan_record(proposal: Proposal, life: Life, *, unix_offset_s: float) -> dict[str, Any]:
    """A plan shown before it is ordered."""
    record = proposal.to_dict()
    record["time_s"] += unix_offset_s
    record["load"]["worst_layer"] = life.layer_ids[record["load"]["worst_layer"]]
    for move in record["moves"]:
        move["layer"] = life.layer_ids[move["layer"]]
    return record


def decision_record(decision: Decision, life: Life, *, unix_offset_s: float) -> dict[str, Any]:
    """What was decided, why, and what came of it."""
    record = decision.to_dict()
    record["time_s"] += unix_offset_s
    if record["load"] is not None:
        record["load"]["worst_layer"] = life.layer_ids[record["load"]["worst_layer"]]
    if record["outcome"] is not None:
        record["outcome"]["time_s"] += unix_offset_s
    return record


def _layer_id(known: Known | None, row: int | None) -> int | None:
    return row if row is None or known is None else known.life.layer_ids[row]
