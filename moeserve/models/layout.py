"""Whether a model fits a parallel layout, and the expert placement a server starts with; no torch here.

Every refusal is a ConfigError that names the setting to change and the values it accepts.
"""

from pathlib import Path

from moeserve.config import ConfigError, ParallelConfig
from moeserve.models.spec import GqaSpec, ModelSpec
from moeserve_placement import ExpertPlacement, PlacementError


def check_layout(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Refuse sizes the model cannot be split into.

    Query heads and KV heads divide evenly over a replica's ranks; where KV heads are fewer than ranks they are
    replicated, each for the same number of ranks.
    """
    tp_size = parallel.tensor_parallel_size
    accepted = [size for size in range(1, _most_ranks(spec) + 1) if _splits(spec, size)]
    if tp_size not in accepted:
        raise ConfigError(
            f"parallel.tensor_parallel_size must be one of {', '.join(map(str, accepted))} for the "
            f"{_describe_heads(spec)} of this model, got {tp_size}"
        )
    if spec.moe_layer_ids:
        starting_placement(spec, parallel)


def evenly_redundant(num_experts: int, num_ranks: int, num_more: int = 0) -> int:
    """Redundant experts where all ranks have as many places: what an even spread needs, and `num_more` beyond.

    No rank holds two copies of an expert.
    """
    num_places = min(-(-num_experts // num_ranks) + num_more, num_experts)
    return num_places * num_ranks - num_experts


def starting_placement(
    spec: ModelSpec, parallel: ParallelConfig, *, auto_redundant_experts: int | None = None
) -> ExpertPlacement:
    """The placement of `parallel.placement_file`, else experts in order; for a model with MoE layers.

    auto_redundant_experts: what `auto` came to; by default the fewest it can come to. Raises ConfigError where the file
    or the number of redundant experts does not fit the model and the ranks.
    """
    if parallel.placement_file is not None:
        return _placement_from_file(spec, parallel, Path(parallel.placement_file))
    num_redundant = parallel.num_redundant_experts
    if num_redundant == "auto":
        fewest = evenly_redundant(spec.num_experts, parallel.world_size)
        num_redundant = fewest if auto_redundant_experts is None else auto_redundant_experts
    num_physical = spec.num_experts + num_redundant
    if num_physical < parallel.world_size:
        raise ConfigError(
            f"{spec.num_experts} experts and {num_redundant} redundant ones are too few for "
            f"{parallel.world_size} ranks: use at most {num_physical} ranks (tensor_parallel_size x "
            f"data_parallel_size), or set parallel.num_redundant_experts to at least "
            f"{parallel.world_size - spec.num_experts}"
        )
    try:
        return ExpertPlacement.identity(
            num_layers=len(spec.moe_layer_ids),
            num_logical_experts=spec.num_experts,
            num_ranks=parallel.world_size,
            num_redundant_experts=num_redundant,
        )
    except PlacementError as error:
        raise ConfigError(f"parallel.num_redundant_experts: {error}") from error


def _placement_from_file(spec: ModelSpec, parallel: ParallelConfig, path: Path) -> ExpertPlacement:
    try:
        placement = ExpertPlacement.load(path)
    except PlacementError as error:
        raise ConfigError(f"parallel.placement_file: {error}") from error
    expected = {
        "layers": (placement.num_layers, len(spec.moe_layer_ids), "the model has"),
        "logical experts": (placement.num_logical_experts, spec.num_experts, "the model has"),
        "ranks": (placement.num_ranks, parallel.world_size, "tensor_parallel_size x data_parallel_size is"),
    }
    for what, (found, needed, source) in expected.items():
        if found != needed:
            raise ConfigError(f"parallel.placement_file {path} is for {found} {what}, but {source} {needed}")
    if (placement.physical_to_logical_LP < 0).any():
        raise ConfigError(f"parallel.placement_file {path} leaves places empty: ranks load an expert into each")
    if parallel.num_redundant_experts not in ("auto", 0, placement.num_redundant_experts):
        raise ConfigError(
            f"parallel.num_redundant_experts must be auto, 0 or {placement.num_redundant_experts} with the placement "
            f"file {path}, got {parallel.num_redundant_experts}"
        )
    return placement


def _splits(spec: ModelSpec, tp_size: int) -> bool:
    for layer in spec.layers:
        attention = layer.attention
        if attention.num_heads % tp_size:
            return False
        if isinstance(attention, GqaSpec) and attention.num_kv_heads % tp_size and tp_size % attention.num_kv_heads:
            return False
    return True


def _most_ranks(spec: ModelSpec) -> int:
    return min(layer.attention.num_heads for layer in spec.layers)


def _describe_heads(spec: ModelSpec) -> str:
    attentions = [layer.attention for layer in spec.layers]
    heads = "/".join(str(n) for n in sorted({a.num_heads for a in attentions}))
    kv_heads = "/".join(str(n) for n in sorted({a.num_kv_heads for a in attentions if isinstance(a, GqaSpec)}))
    return f"{heads} attention heads" + (f" and {kv_heads} KV heads" if kv_heads else "")
