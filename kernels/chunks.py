"""Chunks of a batch: their place in the cache, the sections and tiles that they touch, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.sections import Section
from cuvee.kernels.jobs import I64, ChunkField, Status, TileField
from cuvee.kernels.ops.arguments import CacheView
from cuvee.kernels.ops.pages import contiguity, unit_row


class CacheMemory:
    """A `PagedCache` as the kernels address it.

    Its arrays travel to the device with every batch. They add kilobytes to a copy that is made anyway, and leave
    nothing on the device for two streams to share.

    Attributes:
        units: int64 `[2 * layers, len(UnitField)]`, on the host.
    """

    _instances: ClassVar[WeakKeyDictionary[PagedCache, CacheMemory]] = WeakKeyDictionary()

    def __init__(self, cache: PagedCache) -> None:
        units = [tensor for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair]
        scales = [scale for pair in zip(cache.key_scales, cache.value_scales, strict=True) for scale in pair]
        self.units = np.array([unit_row(*each) for each in zip(units, scales, strict=True)], np.int64)
        self.element = cache.dtype

    @classmethod
    def of(cls, cache: PagedCache) -> CacheMemory:
        """Return the description of a cache; it is made once."""
        if cache not in cls._instances:
            cls._instances[cache] = cls(cache)
        return cls._instances[cache]

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays to send to the device, by name."""
        return {"units": self.units}

    def view(self, sent: Mapping[str, torch.Tensor], slots: torch.Tensor, tiles: I64) -> CacheView:
        """Return the tokens at `slots` as a view for a launch over `tiles`, rows of `TileField` on the host.

        `sent` are the arrays of `arrays`, on the device.
        """
        unit_stride, aligned = contiguity(self.units, tiles, self.element)
        return CacheView(sent["units"], slots, self.element, unit_stride, aligned)


def chunk_table(tokens: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> I64:
    """Return the table `chunks` for runs of these lengths that follow each other in `slots`."""
    table = np.zeros((len(tokens), len(ChunkField)), np.int64)
    table[:, ChunkField.TOKENS] = tokens
    table[1:, ChunkField.FIRST] = np.cumsum(tokens[:-1])
    table[:, ChunkField.SOURCE] = sources
    table[:, ChunkField.TARGET] = targets
    return table


def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the slots of all chunks, or the status of all jobs."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def touched(sections: Sequence[Section], layers: range) -> range:
    """Return the range of sections that contain any of `layers`."""
    indices = [i for i, s in enumerate(sections) if s.first_layer < layers.stop and layers.start < s.end_layer]
    return range(indices[0], indices[-1] + 1)


def of_layers(tiles: I64, layers: range, sections: range) -> I64:
    """Return the tiles of these layers, whose sections count from the first of those that have any."""
    layer = tiles[:, TileField.UNIT] // 2
    chosen = np.ascontiguousarray(tiles[(layers.start <= layer) & (layer < layers.stop)])
    chosen[:, TileField.SECTION] -= sections.start
    return chosen


def raise_status(status: npt.NDArray[np.int32], sections: Sequence[Section], numbers: Sequence[int]) -> None:
    """Raise the first error that the kernels flagged, if any, in `[chunks * len(sections)]` sums of `Status`.

    Raises:
        CorruptError: damaged streams.
        InputError: a slot beyond the cache, or values that cannot be coded.
    """
    for job in np.flatnonzero(status):
        chunk, index = divmod(int(job), len(sections))
        flags, section = Status(int(status[job])), sections[index]
        layers = f"layers {section.first_layer} … {section.end_layer - 1}"
        where = f"chunk {numbers[chunk]}, {layers}"
        if flags & Status.SLOT:
            raise InputError(f"slots: must lie within the cache, got one beyond the cache for {where}")
        if flags & Status.NOT_FINITE:
            raise InputError(
                f"cache: must be finite, got NaN or infinite values in {layers}; encode it with quality='lossless'"
            )
        if flags & Status.TOO_LARGE:
            raise InputError(
                f"cache: must fit the quantizer, got values that are too many quantizer steps large in {layers}; "
                "encode it with quality='lossless'"
            )
        what = "its streams do not end where they must" if flags & Status.STREAMS else "its escapes do not match"
        raise CorruptError(f"{where}: {what}: the bytes are damaged")
