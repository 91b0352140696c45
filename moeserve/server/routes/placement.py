"""/v1/placement: where experts lie and why, for everyone with the API key; what changes it, for operators only."""

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict
from starlette.responses import StreamingResponse

from moeserve.server.context import ServerContext
from moeserve.server.errors import ApiError, invalid
from moeserve.server.middleware import admin_check
from moeserve.server.placement.advice import ADVICE_WINDOWS, advise_apart
from moeserve.server.placement.analysis import analyse
from moeserve.server.placement.loads import MAX_HISTORY_WINDOWS, LoadHistory, trace_of
from moeserve.server.placement.records import decision_record, load_record, placement_record, plan_record
from moeserve.server.placement.view import Known
from moeserve.server.streaming import JsonResponse
from moeserve_placement import Pin, PlacementError
from moeserve_placement.controller import ControlError
from moeserve_placement.load import Phase, trace_lines

T = TypeVar("T")
_DEFAULT_WINDOW_S = 60.0


class PlanQuestion(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    policy: Literal["incremental", "eplb-global", "eplb-hierarchical"] = "incremental"


class PlanOrder(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    plan_id: int


class PinOrder(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    logical_expert_id: int
    rank: int
    layer: int | None = None
    """Of the model; null is every MoE layer."""


class PinsOrder(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    pins: list[PinOrder]


def build_router(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1/placement", tags=["placement"])
    _add_views(router, context)
    _add_advice(router, context)
    _add_orders(router, context)
    return router


def _add_views(router: APIRouter, context: ServerContext) -> None:
    service = context.placement

    @router.get("")
    async def show() -> Response:
        """The map and split in force, and what is under way."""
        return _state(context)

    @router.get("/load")
    async def load(
        phase: Phase = "mixed", window: Annotated[float, Query(gt=0, allow_inf_nan=False)] = _DEFAULT_WINDOW_S
    ) -> Response:
        """Expert and rank loads of the newest windows that cover `window` seconds; mixed is both phases."""
        known, history = _known(context), _history(context)
        analysis = analyse(history.covering(window), phase, known.placement, known.split_LP, known.life.cluster)
        return JsonResponse(load_record(analysis, known.life, known.placement.epoch))

    @router.get("/load/trace")
    async def trace(windows: Annotated[int, Query(ge=1)] = MAX_HISTORY_WINDOWS) -> Response:
        """The newest load windows, as many as are kept, as a trace file (.jsonl) that can be replayed."""
        shape, kept = _known(context).life.shape, _history(context).as_kept(num_windows=windows)
        model, offset_s = context.config.model.served_names[0], service.unix_offset_s
        found = await asyncio.to_thread(trace_of, kept, shape, model=model, offset_s=offset_s)
        # Sent line by line: the text is many times as large as the tables.
        return StreamingResponse(trace_lines(found), media_type="application/jsonl")

    @router.get("/decisions")
    async def decisions(limit: Annotated[int, Query(ge=1)] = 50) -> Response:
        """What the controller decided, newest first, with what came of it."""
        view = service.view
        newest = view.decisions[: -limit - 1 : -1]
        offset_s = service.unix_offset_s
        records = [] if view.known is None else [
            decision_record(decision, view.known.life, unix_offset_s=offset_s) for decision in newest
        ]  # fmt: skip
        return JsonResponse({"state": view.state, "decisions": records})

    @router.get("/export")
    async def export() -> Response:
        """The map in force as a file that --placement-file loads."""
        return JsonResponse(_known(context).placement.to_dict())


def _add_advice(router: APIRouter, context: ServerContext) -> None:
    advising = asyncio.Lock()

    @router.get("/advice")
    async def advice() -> Response:
        """What following the load would bring, and how much memory it takes; computed for some seconds."""
        known, history = _known(context), _history(context)
        if advising.locked():
            raise ApiError(409, "advice is being computed for somebody else: ask again", code="busy")
        async with advising:
            found = await _or_conflict(
                asyncio.to_thread(
                    advise_apart, history.newest(num_windows=ADVICE_WINDOWS), known, context.config.placement,
                    model=context.config.model.served_names[0],
                )
            )  # fmt: skip
        return JsonResponse(found.to_dict() | {"table": found.table()})


def _add_orders(router: APIRouter, context: ServerContext) -> None:
    service = context.placement
    admin = [Depends(admin_check(context.config.server.admin_key))]

    @router.post("/plan", dependencies=admin)
    async def plan(question: PlanQuestion | None = None) -> Response:
        """What would be moved now, and whether it is worth it; nothing moves."""
        proposal = await _or_conflict(service.plan((question or PlanQuestion()).policy))
        life = _known(context).life
        return JsonResponse(plan_record(proposal, life, unix_offset_s=service.unix_offset_s))

    @router.post("/apply", dependencies=admin)
    async def apply(order: PlanOrder) -> Response:
        """Order the newest plan, worth it or not."""
        await _or_conflict(service.apply(order.plan_id))
        return _state(context)

    @router.post("/freeze", dependencies=admin)
    async def freeze() -> Response:
        """Start nothing by itself from now on; copies under way are dropped."""
        await _or_conflict(service.set_frozen(True))
        return _state(context)

    @router.post("/thaw", dependencies=admin)
    async def thaw() -> Response:
        """Follow the load again."""
        await _or_conflict(service.set_frozen(False))
        return _state(context)

    @router.post("/rollback", dependencies=admin)
    async def rollback() -> Response:
        """Go back to the map before the last migration."""
        await _or_conflict(service.rollback())
        return _state(context)

    @router.put("/pins", dependencies=admin)
    async def pins(order: PinsOrder) -> Response:
        """Replace all pins; replicas that are not where they must be move with the next window."""
        wanted = _pins(order, _known(context))
        try:
            await _or_conflict(service.set_pins(wanted))
        except PlacementError as error:
            raise ApiError(400, f"pins cannot hold: {error}", param="pins", code="invalid_value") from error
        return _state(context)


def _state(context: ServerContext) -> Response:
    return JsonResponse(placement_record(context.placement.view, engine_is_ready=context.engine.is_ready))


def _known(context: ServerContext) -> Known:
    """The map in force; 409 while it is not known."""
    view = context.placement.view
    if view.known is None:
        raise ApiError(409, f"placement is {view.state}: {view.reason}", code="placement_conflict")
    return view.known


def _history(context: ServerContext) -> LoadHistory:
    """409 before the first window."""
    history = context.placement.history
    if history is None or not len(history):
        raise ApiError(409, "no load has been seen yet", code="placement_conflict")
    return history


async def _or_conflict(work: Awaitable[T]) -> T:
    """409 for what cannot be done now."""
    try:
        return await work
    except ControlError as error:
        raise ApiError(409, str(error), code="placement_conflict") from error


def _pins(order: PinsOrder, known: Known) -> list[Pin]:
    """With rows for layers. Raises ApiError naming the field that names what is not there."""
    life, pins = known.life, []
    for index, pin in enumerate(order.pins):
        if pin.layer is not None and pin.layer not in life.layer_ids:
            raise invalid(f"pins[{index}].layer", f"null or one of the MoE layers {life.layer_ids}", pin.layer)
        limits: dict[str, Any] = {"rank": life.num_ranks, "logical_expert_id": life.shape.num_logical_experts}
        for name, end in limits.items():
            if not 0 <= getattr(pin, name) < end:
                raise invalid(f"pins[{index}].{name}", f"in [0, {end})", getattr(pin, name))
        row = None if pin.layer is None else life.layer_ids.index(pin.layer)
        pins.append(Pin(logical_expert_id=pin.logical_expert_id, rank=pin.rank, layer=row))
    return pins
