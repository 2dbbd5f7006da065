"""Upload of several arrays: pack them into pinned memory and send them in one copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.cpu.pool import Pool
from cuvee.kernels.devices import host_buffer

ALIGNMENT = 16  # bytes: the widest load of a thread

PARALLEL_BYTES = 1 << 20  # below this, handing work to threads takes longer than the copy
MAX_THREADS = 8

T = TypeVar("T")
S = TypeVar("S")


_pool = Pool(min(MAX_THREADS, os.cpu_count() or 1), "cuvee-upload")


def for_each(function: Callable[[S], T], items: Sequence[S], total_bytes: int) -> list[T]:
    """Apply a function to items of `total_bytes` in all, on several threads if that is faster.

    Hashing and copying release the interpreter's lock. One core does both at about 11 GB/s of blobs, a third of what a
    device decodes.
    """
    if len(items) < 2 or total_bytes < PARALLEL_BYTES:
        return [function(item) for item in items]
    return _pool.run([partial(function, item) for item in items], MAX_THREADS)


class Upload:
    """Arrays to send to a device in one copy: laid out, packed into pinned memory, and sent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[memoryview | npt.NDArray[Any]] = []
        self._offsets: list[int] = []
        self._arrays: dict[str, tuple[int, npt.NDArray[Any]]] = {}  # offset of each array that has a name
        self._size = 0

    def add(self, part: memoryview | npt.NDArray[Any]) -> int:
        """Append an array or bytes. Return its future byte offset, a multiple of ALIGNMENT."""
        offset = self._size
        self._parts.append(part)
        self._offsets.append(offset)
        self._size = offset + -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    def add_arrays(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Append arrays that `send` returns by name, with their dtypes and shapes."""
        for name, array in arrays.items():
            self._arrays[name] = self.add(array), array

    def send(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Pack all parts, with zeros in gaps, and start the copy. Return the buffer there, and its arrays by name."""
        buffer = host_buffer((max(self._size, ALIGNMENT),), torch.uint8, self._device)
        raw = buffer.numpy()

        def copy(index: int) -> None:
            flat = np.frombuffer(self._parts[index], np.uint8)
            offset = self._offsets[index]
            raw[offset : offset + len(flat)] = flat
            raw[offset + len(flat) : ends[index]] = 0

        ends = [*self._offsets[1:], self._size]
        for_each(copy, range(len(self._parts)), self._size)
        sent, arrays = buffer.to(self._device, non_blocking=True), {}
        for name, (at, like) in self._arrays.items():
            dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
            arrays[name] = sent[at : at + like.nbytes].view(dtype).view(like.shape)
        return sent, arrays


def send_arrays(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Start copying arrays to the device in one copy. Return them by name, with their dtypes and shapes."""
    upload = Upload(device)
    upload.add_arrays(arrays)
    return upload.send()[1]
