"""How a canonical tensor is put together from tensors of a checkpoint, slice by slice; no torch here.

A source answers `copies(ranges)`: which parts of which stored tensors make up `full[ranges]`. Axes of an expert
tensor: E experts, rows, columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint under its own name, in the shape it has once it is decoded."""

    name: str
    shape: tuple[int, ...]
    encoding: Literal["plain", "mxfp4"] = "plain"
    """plain covers FP8, which shows in the stored type."""


@dataclass(frozen=True, slots=True)
class Copy:
    """`result[into] = stored[ranges]`, its last two axes swapped on the way where `transposed`."""

    stored: StoredTensor
    ranges: tuple[range, ...]
    into: tuple[int | slice, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class WholeSource:
    """One stored tensor holds it all."""

    shape: tuple[int, ...]
    stored: StoredTensor
    transposed: bool = False
    """The checkpoint has the last two axes the other way round."""
    interleaved: bool = False
    """The checkpoint alternates gate and up rows (axis 1); the canonical tensor has all gate rows first."""

    @property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        return (self.stored,)

    def copies(self, ranges: tuple[range, ...]) -> Iterator[Copy]:
        if not self.interleaved:
            yield self._copy(ranges, (slice(None),))
            return
        half = self.shape[1] // 2
        for offset, rows, into in split_range(ranges[1], (half, half)):
            stored_rows = range(2 * rows.start + offset, 2 * rows.stop + offset, 2 * rows.step)
            yield self._copy((ranges[0], stored_rows, *ranges[2:]), (slice(None), into))

    def _copy(self, ranges: tuple[range, ...], into: tuple[int | slice, ...]) -> Copy:
        if self.transposed:
            ranges = (*ranges[:-2], ranges[-1], ranges[-2])
        return Copy(self.stored, ranges, into, self.transposed)


@dataclass(frozen=True, slots=True)
class PerExpertSource:
    """Each expert has tensors of its own, whose rows follow each other in the canonical tensor."""

    shape: tuple[int, ...]
    experts: tuple[tuple[StoredTensor, ...], ...]

    @property
    def stored_tensors(self) -> tuple[StoredTensor, ...]:
        return tuple(stored for parts in self.experts for stored in parts)

    def copies(self, ranges: tuple[range, ...]) -> Iterator[Copy]:
        experts, rows, columns = ranges
        heights = tuple(part.shape[0] for part in self.experts[0])
        for place, expert in enumerate(experts):
            for part, part_rows, into in split_range(rows, heights):
                yield Copy(self.experts[expert][part], (part_rows, columns), (place, into))


TensorSource = WholeSource | PerExpertSource


def split_range(indices: range, sizes: tuple[int, ...]) -> Iterator[tuple[int, range, slice]]:
    """The parts of `indices` (step > 0) that fall into each of the consecutive sections of `sizes`.

    Yields the section's number, the indices counted from its start, and their places in `indices`.
    """
    start = 0
    for section, size in enumerate(sizes):
        first = _count_below(indices, start)
        last = _count_below(indices, start + size)
        if last > first:
            part = indices[first:last]
            yield section, range(part.start - start, part.stop - start, part.step), slice(first, last)
        start += size


def _count_below(indices: range, bound: int) -> int:
    """How many of `indices` are less than `bound`."""
    return min(max(-(-(bound - indices.start) // indices.step), 0), len(indices))
