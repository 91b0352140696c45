"""Oracle of the collectives: every member's result from every member's input, one member after the other."""

import torch


def all_reduce_reference(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What every member gets: added in rank order, in float32 where the numbers are floats, rounded once."""
    total = _to_sum(inputs[0])
    for x in inputs[1:]:
        total = total + _to_sum(x)
    return total.to(inputs[0].dtype)


def all_to_all_reference(inputs: list[torch.Tensor], counts: list[list[int]]) -> list[torch.Tensor]:
    """counts[i][j]: rows of member i for member j."""
    pieces = [x.split(row) for x, row in zip(inputs, counts, strict=True)]
    return [torch.cat([piece[member] for piece in pieces]) for member in range(len(inputs))]


def reduce_scatter_reference(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """inputs: [size, ...] of each member."""
    return [all_reduce_reference([x[member] for x in inputs]) for member in range(len(inputs))]


def _to_sum(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.is_floating_point() else x
