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
    """Arrays to send to a device in one copy: laid out, packed into pinned memory, filled in there, and sent."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[memoryview | npt.NDArray[Any]] = []
        self._offsets: list[int] = []
        self._named: dict[str, int] = {}  # number of each part that has a name
        self._size = 0

    def add(self, part: memoryview | npt.NDArray[Any]) -> int:
        """Append an array or bytes. Return its future byte offset, a multiple of ALIGNMENT."""
        offset = self._size
        self._parts.append(part)
        self._offsets.append(offset)
        self._size = offset + -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    def add_named(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Append arrays that `host` and `send` return by name, with their dtypes and shapes."""
        for name, array in arrays.items():
            self._named[name] = len(self._parts)
            self.add(array)

    def pack(self) -> None:
        """Copy all parts into one buffer, pinned if the device is not the CPU; gaps are zero."""
        self._buffer = host_buffer((max(self._size, ALIGNMENT),), torch.uint8, self._device)
        raw = self._buffer.numpy()

        def copy(index: int) -> None:
            flat = np.frombuffer(self._parts[index], np.uint8)
            offset = self._offsets[index]
            raw[offset : offset + len(flat)] = flat
            raw[offset + len(flat) : ends[index]] = 0

        ends = [*self._offsets[1:], self._size]
        for_each(copy, range(len(self._parts)), self._size)

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The packed buffer on the host."""
        packed: npt.NDArray[np.uint8] = self._buffer.numpy()
        return packed

    def host(self, name: str) -> npt.NDArray[Any]:
        """Return a packed array by its name, to fill in before `send`."""
        offset, like = self._place(name)
        return self.bytes[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)

    def send(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Start the copy to the device. Return the buffer there, and its arrays by their names."""
        sent = self._buffer.to(self._device, non_blocking=True)
        arrays = {}
        for name in self._named:
            offset, like = self._place(name)
            dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
            arrays[name] = sent[offset : offset + like.nbytes].view(dtype).view(like.shape)
        return sent, arrays

    def _place(self, name: str) -> tuple[int, npt.NDArray[Any]]:
        """Return the offset of a named array, and what has its dtype and shape."""
        number = self._named[name]
        return self._offsets[number], np.asarray(self._parts[number])


def send_arrays(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Start copying arrays to the device in one copy. Return them by name, with their dtypes and shapes."""
    upload = Upload(device)
    upload.add_named(arrays)
    upload.pack()
    return upload.send()[1]
