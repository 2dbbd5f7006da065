"""Chunks in a cache on the device, and the arguments of launches over their tiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.sections import partition
from cuvee.kernels.chunks import chunk_table
from cuvee.kernels.ops.arguments import CacheView, ChunkBatch, TileTable
from cuvee.kernels.ops.pages import contiguity, unit_row
from cuvee.kernels.tiles import lay_out_tiles

POISON = 0xAB
HOLE = 5
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
SCALES = (0.25, 0.1, 3.0, 1.0)  # of FP8, in turns


@dataclass(frozen=True)
class Cache:
    """Units in memory, poisoned: `[blocks, tokens per block, heads, dimensions]` views of `raw`."""

    layout: KVLayout
    raw: list[torch.Tensor]
    units: list[torch.Tensor]
    slots: torch.Tensor

    @property
    def element(self) -> torch.dtype:
        return self.units[0].dtype

    @property
    def scales(self) -> list[float]:
        """Not numbers where they must not be read."""
        fp8 = self.element.itemsize == 1
        return [SCALES[unit % 4] if fp8 else float("nan") for unit in range(len(self.units))]

    def bytes(self) -> list[torch.Tensor]:
        return [raw.view(torch.uint8).cpu() for raw in self.raw]

    def rows(self, unit: int, at: slice) -> torch.Tensor:
        """The values of some tokens, `[t, H, D]`."""
        view, slot = self.units[unit], self.slots[at]
        bits = view.view(BITS[view.element_size()])
        return bits[slot // view.shape[1], slot % view.shape[1]].view(view.dtype)

    def fill(self, unit: int, at: slice, rows: torch.Tensor) -> None:
        view, slot = self.units[unit], self.slots[at]
        whole = BITS[view.element_size()]
        view.view(whole)[slot // view.shape[1], slot % view.shape[1]] = rows.to(view.dtype).to(slot.device).view(whole)

    def copy(self) -> Cache:
        """The same cache in other memory, poisoned."""
        raw = [torch.full_like(memory, POISON) for memory in self.raw]
        units = [
            memory.view(unit.dtype).as_strided(unit.shape, unit.stride(), unit.storage_offset())
            for memory, unit in zip(raw, self.units, strict=True)
        ]
        return replace(self, raw=raw, units=units)

    def holds_only(self, at: torch.Tensor) -> bool:
        """Whether nothing but the values of these tokens was written. Poisons them."""
        slot = self.slots[at.to(self.slots.device)]
        for unit in self.units:
            poison = int.from_bytes(bytes([POISON] * unit.element_size()), "little", signed=unit.element_size() > 1)
            unit.view(BITS[unit.element_size()])[slot // unit.shape[1], slot % unit.shape[1]] = poison
        return all(bool((memory == POISON).all()) for memory in self.bytes())

    def paged(self) -> PagedCache:
        scales = self.scales if self.element.itemsize == 1 else [1.0] * len(self.units)
        return PagedCache(self.layout, self.units[::2], self.units[1::2], scales[::2], scales[1::2])


def make_cache(layout: KVLayout, tokens: int, kind: str, element: torch.dtype, device: torch.device) -> Cache:
    """A cache of a kind: `dense`, one block; or pages, of 16 tokens or `single` ones.

    These are named by their axes in memory (blocks, tokens, heads, dimensions), with a 2 if keys and values are packed,
    and a + if 8 bytes follow each head: of two heads, the second does not begin at a multiple of 16 bytes.
    """
    block = {"dense": tokens + 3, "single": 1}.get(kind, 16)
    blocks = 1 if kind == "dense" else -(-tokens // block) + 2
    axes = "bthd" if kind in ("dense", "single") else kind[:4]
    raw, units = [], []
    for layer in layout.layers:
        for size in (layer.head_dim, layer.value_dim):
            sizes = {"b": blocks, "t": block, "h": layer.kv_heads, "d": size * (2 if "2" in kind else 1)}
            shape = [sizes[axis] for axis in axes]
            head = block * sizes["d"] + 8 // element.itemsize if "+" in kind else int(np.prod(shape[2:]))
            memory = torch.full(
                (shape[0] * shape[1] * head * element.itemsize,), POISON, dtype=torch.uint8, device=device
            )
            raw.append(memory)
            strides = [shape[1] * head, head, shape[3], 1]
            view = memory.view(element).as_strided(shape, strides).permute([axes.index(axis) for axis in "bthd"])
            units.append(view[..., size:] if "2" in kind else view)
    order = torch.randperm(blocks * block, generator=torch.Generator().manual_seed(5))
    slots = torch.arange(2, 2 + tokens) if kind == "dense" else order[:tokens]
    return Cache(layout, raw, units, slots.to(device))


@dataclass(frozen=True)
class Batch:
    """Chunks of a layout, and what all launches over them share."""

    layout: KVLayout
    tokens: tuple[int, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    device: torch.device

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def at(self, chunk: int) -> slice:
        """The tokens of a chunk."""
        first = sum(self.tokens[:chunk])
        return slice(first, first + self.tokens[chunk])

    def arguments(self, cache: Cache) -> tuple[TileTable, ChunkBatch, CacheView]:
        """What launches over all tiles take."""
        ropes = {layer.rope: 0 for layer in self.layout.layers if layer.rope}
        tiles = lay_out_tiles(self.layout, partition(self.layout, "unit"), ropes)
        chunks = torch.from_numpy(chunk_table(self.tokens, self.sources, self.targets)).to(self.device)
        status = torch.zeros(len(self.tokens) * self.layout.num_layers, dtype=torch.int32, device=self.device)
        places = np.array([unit_row(*each) for each in zip(cache.units, cache.scales, strict=True)], np.int64)
        return (
            TileTable(torch.from_numpy(tiles.tiles).to(self.device), tiles.pairs),
            ChunkBatch(chunks, status, self.layout.num_layers, max(self.tokens)),
            CacheView(torch.from_numpy(places).to(self.device), cache.slots, cache.element,
                      *contiguity(places, tiles.tiles, cache.element)),
        )  # fmt: skip


def random_units(layout: KVLayout, tokens: int, generator: torch.Generator, noise: bool = False) -> list[torch.Tensor]:
    """Values `[T, H, D]` of each unit: what a cache may hold, or all bit patterns."""
    units, dtype = [], layout.torch_dtype
    for layer in layout.layers:
        for size in (layer.head_dim, layer.value_dim):
            shape = (tokens, layer.kv_heads, size)
            if noise:
                bits = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator)
                units.append(bits.to(BITS[dtype.itemsize]).view(dtype))
            else:
                units.append((4 * torch.randn(shape, generator=generator)).to(dtype))
    return units


def fill(cache: Cache, batch: Batch, values: Sequence[Sequence[torch.Tensor]]) -> Cache:
    """The cache with these values `[chunk][unit]` at the slots of their tokens."""
    for chunk, units in enumerate(values):
        for unit, rows in enumerate(units):
            cache.fill(unit, batch.at(chunk), rows)
    return cache


def round_trips(
    codecs: Sequence[Codec], caches: Sequence[Cache], batches: Sequence[Batch], to: tuple[int, ...]
) -> tuple[list[list[bytes]], list[Cache]]:
    """What each codec writes of its cache; and caches, poisoned before, into which each decodes the first one's blobs.

    Token `HOLE` of the first chunk has no slot there.
    """
    blobs, written = [], []
    for codec, cache, batch in zip(codecs, caches, batches, strict=True):
        slots = [cache.slots[batch.at(chunk)] for chunk in range(len(batch.tokens))]
        blobs.append(codec.encode(PagedChunks(cache.paged(), slots, batch.sources)))
    for codec, cache, batch in zip(codecs, caches, batches, strict=True):
        slots = [cache.slots[batch.at(chunk)].clone() for chunk in range(len(batch.tokens))]
        slots[0][HOLE] = -1
        written.append(cache.copy())
        codec.decode_paged(blobs[0], written[-1].paged(), slots, to).check()
    return blobs, written
