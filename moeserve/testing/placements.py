"""Random valid placements, for tests of what must hold under every one of them."""

import numpy as np

from moeserve_placement import ExpertPlacement, PlacementError


def random_placement(
    *, num_layers: int, num_experts: int, num_ranks: int, num_redundant_experts: int = 0, seed: int = 0, epoch: int = 0
) -> ExpertPlacement:
    """Experts and replicas anywhere they may be, another place in every layer.

    num_redundant_experts is at most num_experts * (num_ranks - 1), and physical experts are at least num_ranks.
    """
    rng = np.random.default_rng(seed)
    layers = [_random_layer(rng, num_experts, num_ranks, num_redundant_experts) for _ in range(num_layers)]
    return ExpertPlacement(
        physical_to_logical_LP=np.stack(layers), num_logical_experts=num_experts, num_ranks=num_ranks, epoch=epoch
    )


def _random_layer(
    rng: np.random.Generator, num_experts: int, num_ranks: int, num_redundant_experts: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    # A copy on every rank but one is the most an expert can add: draw from those.
    extra = rng.permutation(np.repeat(np.arange(num_experts), num_ranks - 1))[:num_redundant_experts]
    num_replicas = 1 + np.bincount(extra, minlength=num_experts)
    num_physical = num_experts + num_redundant_experts
    room = np.array([num_physical // num_ranks + (r < num_physical % num_ranks) for r in range(num_ranks)])
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    shuffled = rng.permutation(num_experts)
    # Most replicas first, each to the ranks with most room left: the order in which a fit is always found.
    for expert in shuffled[np.argsort(-num_replicas[shuffled], kind="stable")]:
        ranks = np.lexsort((rng.random(num_ranks), -room))[: num_replicas[expert]]
        room[ranks] -= 1
        for rank in ranks:
            held[rank].append(int(expert))
    return np.concatenate([rng.permutation(np.array(experts, dtype=np.int64)) for experts in held])


def random_successor(placement: ExpertPlacement, *, seed: int) -> ExpertPlacement:
    """A next placement in which no rank gets more than one expert that it lacks in any layer.

    In each layer two physical experts change places, on one rank or between two, or a redundant one becomes another.
    """
    rng = np.random.default_rng(seed)
    table_LP = placement.physical_to_logical_LP.copy()
    for layer, row_P in enumerate(table_LP):
        while (row_P == placement.physical_to_logical_LP[layer]).all():
            one, other = rng.choice(row_P.size, 2, replace=False)
            changed_P = row_P.copy()
            changed_P[other] = row_P[one]
            if rng.random() < 0.5:
                changed_P[one] = row_P[other]
            if _is_valid(placement, changed_P):
                row_P[:] = changed_P
    return ExpertPlacement(
        physical_to_logical_LP=table_LP,
        num_logical_experts=placement.num_logical_experts,
        num_ranks=placement.num_ranks,
        epoch=placement.epoch + 1,
        num_physical_by_rank=placement.num_physical_by_rank,
    )


def _is_valid(placement: ExpertPlacement, row_P: np.ndarray[tuple[int], np.dtype[np.int64]]) -> bool:
    try:
        ExpertPlacement(
            physical_to_logical_LP=row_P[None],
            num_logical_experts=placement.num_logical_experts,
            num_ranks=placement.num_ranks,
            num_physical_by_rank=placement.num_physical_by_rank,
        )
    except PlacementError:
        return False
    return True
