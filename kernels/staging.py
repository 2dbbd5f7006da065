"""Blobs on their way to the device: verified, put side by side, uploaded in one copy; and what their parts are.

The host checks what it can without touching every byte twice: checksums, and that the parts of each coded section
fill it exactly (`FORMAT.md`). What it takes the streams themselves to know, the kernels flag in `Status`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.container import MAX_TOKENS_PER_STREAM_LOG2
from cuvee.codec.errors import FormatError
from cuvee.kernels.jobs import Job

ALIGNMENT = 16  # bytes: the widest load of a thread
STREAM_HEADER = 12  # bytes of W, E, log2 n, the mode and what is reserved
CLASS_HEADER = 8  # bytes of C and the state, after that

PARALLEL_BYTES = 1 << 20  # fewer are moved faster than they are handed to threads
MAX_THREADS = 8

I64 = npt.NDArray[np.int64]
T = TypeVar("T")
S = TypeVar("S")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "cuvee-staging")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork


def for_each(function: Callable[[S], T], items: Sequence[S], total_bytes: int) -> list[T]:
    """Apply a function that reads or copies so many bytes in all; on several threads if they are many.

    Hashing and copying let go of the interpreter's lock. One core does both at about 11 GB/s of blobs, a third of
    what a device decodes.
    """
    if len(items) < 2 or total_bytes < PARALLEL_BYTES:
        return [function(item) for item in items]
    return list(_threads().map(function, items))


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
        buffer = torch.empty(max(self._size, ALIGNMENT), dtype=torch.uint8, pin_memory=device.type != "cpu")
        raw = buffer.numpy()

        def copy(index: int) -> None:
            flat = np.frombuffer(self._parts[index], np.uint8)
            offset = self._offsets[index]
            raw[offset : offset + len(flat)] = flat
            raw[offset + len(flat) : ends[index]] = 0

        ends = [*self._offsets[1:], self._size]
        for_each(copy, range(len(self._parts)), self._size)
        return Packed(buffer)


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


def read_coded(
    data: npt.NDArray[np.uint8],
    begin: I64,
    end: I64,
    tokens: I64,
    planes: I64,
    jobs: I64,
    names: list[str],
    class_planes: I64 | None = None,
) -> npt.NDArray[np.bool_]:
    """Find the parts of coded sections and fill in what `jobs` `[J, len(Job)]` says of them.

    Args:
        data: bytes that hold the coded parts.
        begin: `[J]` where each coded part begins, a multiple of four.
        end: `[J]` where it must end.
        tokens: `[J]` tokens of each job.
        planes: `[J]` byte planes of each job, if its tokens have no classes.
        jobs: the table; the columns STATES … PER_STREAM, LONG_LENGTHS and CLASS_WORDS … CLASS_STATE are written.
        names: of each job, for messages.
        class_planes: `[J]` byte planes of the finest class; None: the scheme has no classes.

    Returns:
        `[J]` whose tokens have classes.

    Raises:
        FormatError: parts that do not fill their section.
    """

    def require(good: npt.NDArray[np.bool_], what: str) -> None:
        if not good.all():
            raise FormatError(f"{names[int(np.argmin(good))]} {what}")

    require(end - begin >= STREAM_HEADER, "ends before its stream header does")
    words32, words16 = data.view(np.uint32), data.view(np.uint16)
    at = begin // 4
    words, escapes = words32[at].astype(np.int64), words32[at + 1].astype(np.int64)
    packed = words32[at + 2].astype(np.int64)
    classed: npt.NDArray[np.bool_] = packed >> 8 == 1
    require((packed & 0xFF <= MAX_TOKENS_PER_STREAM_LOG2) & (packed >> 9 == 0), "has a stream header out of range")
    require(~classed | (class_planes is not None), "has token classes, which its scheme does not")
    states = begin + STREAM_HEADER + np.where(classed, CLASS_HEADER, 0)
    require(end >= states, "ends before its stream header does")
    class_words, class_state = (
        np.where(classed, words32[np.where(classed, at + place, 0)], 0).astype(np.int64) for place in (3, 4)
    )
    per_stream = np.left_shift(np.int64(1), packed & 0xFF)
    streams = -(-tokens // per_stream)
    long = np.where(classed, planes if class_planes is None else class_planes, planes) * per_stream > 0xFFFF
    lengths = states + 4 * streams
    first_class = lengths + streams * np.where(long, 4, 2)
    first_word = first_class + 2 * class_words
    last_word = first_word + 2 * words
    listed = last_word + (begin - last_word) % 4
    require(listed + 8 * escapes == end, "is not filled exactly by its streams and escapes")
    padded = listed != last_word
    zero = words16[np.where(padded, last_word // 2, 0)] == 0
    require(zero | ~padded, "has padding that is not zero")
    for field, value in (
        (Job.STATES, states // 4),
        (Job.LENGTHS, lengths // 2),
        (Job.WORDS, first_word // 2),
        (Job.ESCAPES, listed // 4),
        (Job.WORD_COUNT, words),
        (Job.ESCAPE_COUNT, escapes),
        (Job.STREAMS, streams),
        (Job.TOKENS, tokens),
        (Job.PER_STREAM, per_stream),
        (Job.LONG_LENGTHS, long),
        (Job.CLASS_WORDS, first_class // 2),
        (Job.CLASS_WORD_COUNT, class_words),
        (Job.CLASS_STATE, class_state),
    ):
        jobs[:, field] = value
    return classed
