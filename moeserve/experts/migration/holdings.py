"""What a rank's expert stores hold under the placement in force, for those who read and who change it."""

import threading
from collections.abc import Sequence

import torch

from moeserve.experts.migration.places import RankPlaces
from moeserve.experts.migration.record_format import pack_record
from moeserve.experts.store import ExpertStore


class NotHeldError(LookupError):
    """The rank does not hold the expert that it was asked for."""


class Holdings:
    """Replaced by the thread that steps, read by all. No lock is held while an expert is read."""

    def __init__(self, places: RankPlaces, stores: Sequence[ExpertStore]) -> None:
        self.stores = stores
        """Of each MoE layer."""
        self._places = places
        self._changed = threading.Condition()

    @property
    def places(self) -> RankPlaces:
        return self._places

    @property
    def num_places(self) -> int:
        return self.stores[0].num_places

    def replace(self, places: RankPlaces) -> None:
        """A change is committed: what only the old placement holds may be overwritten from now on."""
        with self._changed:
            self._places = places
            self._changed.notify_all()

    @torch.inference_mode()
    def read(self, layer: int, logical_id: int, *, epoch: int, timeout_s: float) -> torch.Tensor:
        """The packed record of an expert, on the host.

        epoch: of the placement that the reader goes by: ranks commit at one step, but not at one time, so this one may
        have to catch up first. Raises NotHeldError.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._places.placement.epoch >= epoch, timeout_s)
        while True:
            places = self._places
            place = places.held(layer).get(logical_id) if 0 <= layer < len(self.stores) else None
            if place is None:
                raise NotHeldError(
                    f"rank {places.rank} does not hold expert {logical_id} of layer {layer} in epoch "
                    f"{places.placement.epoch}"
                )
            record = pack_record(self.stores[layer].read_expert(place))
            # Places are overwritten only after a commit has freed them: without one in between the record is whole.
            if self._places is places:
                return record
