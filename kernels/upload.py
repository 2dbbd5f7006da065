"""Arrays that travel to the device together: packed into pinned memory, sent in one copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.cpu.pool import Pool
from cuvee.kernels.devices import host_buffer

ALIGNMENT = 16  # bytes: the widest load of a thread

PARALLEL_BYTES = 1 << 20  # fewer are moved faster than they are handed to threads
MAX_THREADS = 8

T = TypeVar("T")
S = TypeVar("S")


_pool = Pool(min(MAX_THREADS, os.cpu_count() or 1), "cuvee-upload")


def for_each(function: Callable[[S], T], items: Sequence[S], total_bytes: int) -> list[T]:
    """Apply a function that reads or copies this many bytes in all, on several threads if that pays.

    Hashing and copying let go of the interpreter's lock. One core does both at about 11 GB/s of blobs, a third of
    what a device decodes.
    """
    if len(items) < 2 or total_bytes < PARALLEL_BYTES:
        return [function(item) for item in items]
    return _pool.run([partial(function, item) for item in items], MAX_THREADS)


class Upload:
    """Arrays that travel to the device together: laid out first, packed into pinned memory, sent in one copy."""

    def __init__(self) -> None:
        self._parts: list[memoryview | npt.NDArray[Any]] = []
        self._offsets: list[int] = []
        self._size = 0

    def add(self, part: memoryview | npt.NDArray[Any]) -> int:
        """Append an array or bytes; returns the byte offset it will have, a multiple of ALIGNMENT."""
        offset = self._size
        self._parts.append(part)
        self._offsets.append(offset)
        self._size = offset + -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    def pack(self, device: torch.device) -> Packed:
        """Copy all parts into one buffer, pinned if `device` is not the CPU; gaps are zero."""
        buffer = host_buffer((max(self._size, ALIGNMENT),), torch.uint8, device)
        raw = buffer.numpy()

        def copy(index: int) -> None:
            flat = np.frombuffer(self._parts[index], np.uint8)
            offset = self._offsets[index]
            raw[offset : offset + len(flat)] = flat
            raw[offset + len(flat) : ends[index]] = 0

        ends = [*self._offsets[1:], self._size]
        for_each(copy, range(len(self._parts)), self._size)
        return Packed(buffer)


def send_arrays(arrays: Mapping[str, npt.NDArray[Any]], device: torch.device) -> dict[str, torch.Tensor]:
    """Start one copy of some arrays to the device; they are there by name, with their dtypes and shapes."""
    upload = Upload()
    at = {name: upload.add(array) for name, array in arrays.items()}
    sent = upload.pack(device).send(device)
    return {name: sent.view(at[name], array) for name, array in arrays.items()}


@dataclass(frozen=True, slots=True)
class Packed:
    """The buffer of an `Upload`, on the host or on the device."""

    bytes: torch.Tensor

    def host(self, offset: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The part at `offset` with the dtype and shape of `like`, to be read or filled in before `send`."""
        raw: npt.NDArray[Any] = self.bytes.numpy()[offset : offset + like.nbytes]
        return raw.view(like.dtype).reshape(like.shape)

    def send(self, device: torch.device) -> Packed:
        """Start the copy to the device."""
        return Packed(self.bytes.to(device, non_blocking=True))

    def view(self, offset: int, like: npt.NDArray[Any]) -> torch.Tensor:
        """The part at `offset` as a tensor with the dtype and shape of `like`."""
        dtype = torch.from_numpy(np.empty(0, like.dtype)).dtype
        return self.bytes[offset : offset + like.nbytes].view(dtype).view(like.shape)
