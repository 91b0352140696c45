"""Where in a rank's expert stores the experts of a placement lie, and where those of the next one go.

An expert that stays on the rank stays in its place, whatever its physical id becomes; one that comes takes a place in
which the placement in force has none. So what is in force is never written to, and a commit copies nothing.

Axes: L MoE layers, p physical experts of this rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moeserve.experts.migration.errors import StagingError
from moeserve_placement import ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """An expert that the rank lacks, and the place it gets."""

    layer: int
    logical_id: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPlaces:
    """One rank's part of a placement."""

    placement: ExpertPlacement
    rank: int
    place_of_local_Lp: npt.NDArray[np.int64]
    """-1 where the physical expert is an empty one."""

    @staticmethod
    def in_order(placement: ExpertPlacement, rank: int) -> "RankPlaces":
        """As expert stores are loaded."""
        logical_Lp = placement.physical_to_logical_LP[:, placement.rank_slice(rank)]
        places_Lp = np.where(logical_Lp < 0, -1, np.arange(logical_Lp.shape[1]))
        return RankPlaces(placement=placement, rank=rank, place_of_local_Lp=places_Lp)

    def held(self, layer: int) -> dict[int, int]:
        """The place of each logical expert that the rank holds."""
        logical_p = self.placement.physical_to_logical_LP[layer, self.placement.rank_slice(self.rank)]
        places_p = self.place_of_local_Lp[layer]
        return {int(logical): int(place) for logical, place in zip(logical_p, places_p, strict=True) if logical >= 0}

    def change_to(self, target: ExpertPlacement, num_places: int) -> tuple["RankPlaces", list[Arrival]]:
        """The places under another placement of the same shape, and what must be written before it can take force.

        num_places: of each layer's store. Raises StagingError where too few of them are free.
        """
        places_Lp = self.place_of_local_Lp.copy()
        arrivals: list[Arrival] = []
        held_slice = self.placement.rank_slice(self.rank)
        for layer, logical_p in enumerate(target.physical_to_logical_LP[:, held_slice].tolist()):
            held = self.held(layer)
            free = sorted(set(range(num_places)) - set(held.values()), reverse=True)
            coming = [logical for logical in logical_p if logical >= 0 and logical not in held]
            if len(coming) > len(free):
                raise StagingError(
                    f"no spare place: rank {self.rank} has {len(free)} in layer {layer}, the change needs {len(coming)}"
                )
            arrivals += (Arrival(layer=layer, logical_id=logical, place=free.pop()) for logical in coming)
            held |= {arrival.logical_id: arrival.place for arrival in arrivals if arrival.layer == layer}
            places_Lp[layer] = [held.get(logical, -1) for logical in logical_p]
        return RankPlaces(placement=target, rank=self.rank, place_of_local_Lp=places_Lp), arrivals
