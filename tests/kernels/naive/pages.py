"""Plain references of `ops/pages.py`: same names with `_reference`, same signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from cuvee.codec.models.dtypes import saturated
from cuvee.kernels.jobs import PlaceField, Status, TileField


class _Memory:
    """Elements at an address, for numpy and torch."""

    def __init__(self, pointer: int, shape: Sequence[int], strides: Sequence[int], size: int) -> None:
        interface = {
            "data": (pointer, False),
            "shape": tuple(shape),
            "strides": tuple(stride * size for stride in strides),
            "typestr": {1: "|u1", 2: "<i2", 4: "<i4"}[size],
            "version": 3,
        }
        self.__array_interface__ = self.__cuda_array_interface__ = interface


def half_views(
    place: Sequence[int], tile: Sequence[int], element: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Views `[blocks, tokens per block, count]` of a tile's first and second dimensions."""
    views = []
    for first, count in (
        (tile[TileField.DIM0], tile[TileField.COUNT0]),
        (tile[TileField.DIM1], tile[TileField.COUNT1]),
    ):
        offset = tile[TileField.HEAD] * place[PlaceField.HEAD] + first * place[PlaceField.DIM]
        memory: Any = _Memory(
            place[PlaceField.POINTER] + offset * element.itemsize,
            (place[PlaceField.SLOTS] // place[PlaceField.BLOCK_TOKENS], place[PlaceField.BLOCK_TOKENS], count),
            (place[PlaceField.BLOCK], place[PlaceField.TOKEN], tile[TileField.STEP] * place[PlaceField.DIM]),
            element.itemsize,
        )
        raw = torch.as_tensor(memory, device=device) if device.type == "cuda" else torch.from_numpy(np.asarray(memory))
        views.append(raw.view(element))
    return views


def check_slots(slots: torch.Tensor, place: Sequence[int], status: torch.Tensor) -> torch.Tensor:
    """Which `slots` have a place; flags Status.SLOT in `status` (one element) for those beyond the cache."""
    total = place[PlaceField.SLOTS]
    if bool(((slots >= total) | (slots < -1)).any()):
        status |= int(Status.SLOT)
    return (slots >= 0) & (slots < total)


def load_pairs_reference(
    place: Sequence[int], scale: float, tile: Sequence[int], slots: torch.Tensor, exists: torch.Tensor,
    element: torch.dtype, pairs: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `load_pairs` reads: two `[tokens, pairs]` float32; `exists` is from `check_slots`."""
    found = []
    for view in half_views(place, tile, element, slots.device):
        values = torch.zeros(len(slots), pairs, device=slots.device)
        at = slots[exists]
        rows = view[at // view.shape[1], at % view.shape[1]].float()
        values[exists, : view.shape[2]] = rows * np.float32(scale).item() if element.itemsize == 1 else rows
        found.append(values)
    return found[0], found[1]


def store_pairs_reference(
    place: Sequence[int], scale: float, tile: Sequence[int], slots: torch.Tensor, exists: torch.Tensor,
    values: tuple[torch.Tensor, torch.Tensor], element: torch.dtype,
) -> None:  # fmt: skip
    """What `store_pairs` writes."""
    for view, source in zip(half_views(place, tile, element, slots.device), values, strict=True):
        at = slots[exists]
        rows = source[exists, : view.shape[2]]
        if element.itemsize == 1:
            rows = rows * float(np.float32(1) / np.float32(scale))
        # Advanced indexing does not exist for every FP8 type: bytes do.
        raw = rows
        if rows.dtype != element:
            raw = saturated(rows, element, None if element.itemsize == 1 else ~rows.isinf())
        whole = torch.uint8 if element.itemsize == 1 else element
        view.view(whole)[at // view.shape[1], at % view.shape[1]] = raw.view(whole)
