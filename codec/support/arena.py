"""Memory that a thread reuses from tile to tile, instead of fresh pages for each."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MAX_CACHED = 64 << 20  # bytes; a larger buffer is made anew for each request, or one long chunk would hold it for good


class Arena(threading.local):
    """Named buffers, one set per thread. A buffer grows to the largest requested size up to `MAX_CACHED`, and keeps it.

    A buffer's contents are valid until the thread requests the same name again.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str, size: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Return `[size]` values of `dtype`, not cleared."""
        buffer = self._arrays.get(name)
        wanted = size * np.dtype(dtype).itemsize
        if wanted > MAX_CACHED:
            return np.empty(size, dtype)
        if buffer is None or len(buffer) < wanted:
            buffer = self._arrays[name] = np.empty(wanted, np.uint8)
        return buffer[:wanted].view(dtype)

    def tensor(self, name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `[size]` values of a floating dtype, not cleared."""
        plain = torch.from_numpy(self.array(name, size * dtype.itemsize, np.uint8))
        return plain.view(dtype)


# Ping-pong buffers of the stages that encode a tile, so that it stays in the second-level cache: a stage reads one and
# writes the other, or parts of the same that it has read. With three buffers, a tile took a twentieth longer.
tile_arena = Arena()
FIRST, SECOND = "first", "second"
