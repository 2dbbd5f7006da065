"""What the three schemes share when they drive the kernels: where the cache lies, which chunks, what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.backends import CodedChunk
from cuvee.codec.container import read_sections
from cuvee.codec.errors import CorruptError, InputError
from cuvee.codec.paged import PagedCache
from cuvee.codec.transform import Section
from cuvee.kernels.jobs import Chunk, Job, Plan, Status, Tile
from cuvee.kernels.pages import place_row
from cuvee.kernels.staging import ALIGNMENT, Packed, Upload, for_each, read_coded

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stage:
    """One traced group of launches, between two events of the device."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


_trace: ContextVar[list[Stage] | None] = ContextVar("trace", default=None)


@contextmanager
def trace_stages() -> Iterator[list[Stage]]:
    """Collect the stages launched inside, with their events, for benchmarks. Costs two events a stage."""
    stages: list[Stage] = []
    token = _trace.set(stages)
    try:
        yield stages
    finally:
        _trace.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark the launches inside as one stage."""
    stages = _trace.get()
    if stages is None:
        yield
        return
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    yield
    end.record()
    stages.append(Stage(name, begin, end))


class Memory:
    """A `PagedCache` as the kernels address it.

    Attributes:
        table: int64 `[2 * layers, len(Place)]` on the host; `places` on the device.
        scales: float32 `[2 * layers]`.
        element: dtype of the cache.
    """

    _known: ClassVar[WeakKeyDictionary[PagedCache, Memory]] = WeakKeyDictionary()

    def __init__(self, cache: PagedCache) -> None:
        units = [tensor for pair in zip(cache.keys, cache.values, strict=True) for tensor in pair]
        scales = [scale for pair in zip(cache.key_scales, cache.value_scales, strict=True) for scale in pair]
        self.table = np.array([place_row(tensor) for tensor in units], np.int64)
        self.places = torch.from_numpy(self.table).to(cache.device)
        self.scales = torch.tensor(scales, dtype=torch.float32).to(cache.device)
        self.element = cache.dtype

    @classmethod
    def of(cls, cache: PagedCache) -> Memory:
        """The description of a cache, made once."""
        if cache not in cls._known:
            cls._known[cache] = cls(cache)
        return cls._known[cache]


def chunk_table(tokens: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> I64:
    """`chunks` for runs of so many tokens that lie one after the other in `slots`."""
    table = np.zeros((len(tokens), len(Chunk)), np.int64)
    table[:, Chunk.TOKENS] = tokens
    table[1:, Chunk.FIRST] = np.cumsum(tokens[:-1])
    table[:, Chunk.SOURCE] = sources
    table[:, Chunk.TARGET] = targets
    return table


def join(slots: Sequence[torch.Tensor]) -> torch.Tensor:
    """The slots of all chunks in a row."""
    return slots[0] if len(slots) == 1 else torch.cat(list(slots))


def touched(sections: Sequence[Section], layers: range) -> range:
    """The sections that hold some of `layers`."""
    found = [i for i, s in enumerate(sections) if s.first_layer < layers.stop and layers.start < s.end_layer]
    return range(found[0], found[-1] + 1)


def of_layers(tiles: I64, layers: range) -> I64:
    """The tiles of these layers alone."""
    layer = tiles[:, Tile.UNIT] // 2
    return np.ascontiguousarray(tiles[(layers.start <= layer) & (layer < layers.stop)])


class Incoming:
    """Blobs of a batch on their way to the device: verified, put side by side, their jobs described.

    Args:
        chunks: the blobs.
        sections: which of their sections are wanted.

    Attributes:
        upload: what travels; add to it before `pack`.
        jobs: int64 `[chunks * sections, len(Job)]`, chunk-major.
        chunks: int64 `[chunks, len(Chunk)]`.
        views: bytes of the section of each job.

    Raises:
        CorruptError: a checksum does not match.
    """

    def __init__(self, chunks: Sequence[CodedChunk], sections: range) -> None:
        headers = [chunk.header for chunk in chunks]
        self.chunks = chunk_table(
            [h.tokens for h in headers], [h.start for h in headers], [chunk.start for chunk in chunks]
        )
        self.jobs = np.zeros((len(chunks) * len(sections), len(Job)), np.int64)
        self.jobs[:, Job.CHUNK] = np.repeat(np.arange(len(chunks)), len(sections))
        self.jobs[:, Job.TOKENS] = np.repeat(self.chunks[:, Chunk.TOKENS], len(sections))
        self.slots = join([chunk.slots for chunk in chunks])
        self.upload = Upload()
        self.at_jobs, self.at_chunks = self.upload.add(self.jobs), self.upload.add(self.chunks)
        self.views: list[memoryview] = []
        self._begin: list[int] = []
        self._names: list[str] = []
        verified = for_each(
            lambda chunk: read_sections(chunk.blob, chunk.header, sections),
            chunks,
            sum(len(chunk.blob) for chunk in chunks),
        )
        for chunk, views in zip(chunks, verified, strict=True):
            size = sum(map(len, views))
            offset = chunk.header.section_offset(sections.start)
            at = self.upload.add(memoryview(chunk.blob)[offset : offset + size])
            for index, view in zip(sections, views, strict=True):
                self.views.append(view)
                self._begin.append(at)
                self._names.append(f"section {index} of blob {chunk.number}")
                at += len(view)

    def offset(self, job: int) -> int:
        """Where the section of a job begins in the upload."""
        return self._begin[job]

    def name(self, job: int) -> str:
        """Of a job's section, for messages."""
        return self._names[job]

    def pack(
        self, device: torch.device, plans: I64, coded: Sequence[int] | None = None, which: I64 | None = None
    ) -> tuple[Packed, int, int]:
        """Describe the jobs and put everything into one buffer, where tokens have no classes.

        Args:
            device: where it will go.
            plans: `[Q, len(Plan)]`, which the jobs' PLAN names already.
            coded: where in the section of each job its coded part begins; default: at once.
            which: the jobs that have a coded part; default: all.

        Returns:
            the buffer, and the sizes of the byte planes (bytes) and of the coefficients (elements).

        Raises:
            FormatError: parts that do not fill their section.
        """
        packed, _ = self.read(device, plans[self.jobs[:, Job.PLAN], Plan.PLANES], coded, which)
        return packed, *self.place(packed, plans)

    def read(
        self,
        device: torch.device,
        planes: I64,
        coded: Sequence[int] | None = None,
        which: I64 | None = None,
        class_planes: I64 | None = None,
    ) -> tuple[Packed, npt.NDArray[np.bool_]]:
        """Put everything into one buffer and fill in what the coded parts say; `place` is to follow.

        Args:
            device: as for `pack`, as are `coded` and `which`.
            planes: of each job, if its tokens have no classes.
            coded: see there.
            which: see there.
            class_planes: of the finest class of each job; None: the scheme has no classes.

        Returns:
            the buffer, and which of the jobs `which` have tokens with classes.
        """
        packed = self.upload.pack(device)
        which = np.arange(len(self.jobs)) if which is None else which
        begin = np.array(self._begin, np.int64)
        end = begin + np.array([len(view) for view in self.views], np.int64)
        if coded is not None:
            begin += np.array(coded, np.int64)
        jobs = self.jobs[which]
        classed = read_coded(
            packed.bytes.numpy(), begin[which], end[which], jobs[:, Job.TOKENS], planes[which], jobs,
            [self._names[job] for job in which], None if class_planes is None else class_planes[which],
        )  # fmt: skip
        self.jobs[which] = jobs
        return packed, classed

    def place(self, packed: Packed, plans: I64) -> tuple[int, int]:
        """Give the jobs their places, see `place_jobs`, and put them into the buffer."""
        sizes = place_jobs(self.jobs, plans)
        packed.host(self.at_jobs, self.jobs)[:] = self.jobs
        return sizes


def outgoing(slots: Sequence[torch.Tensor], starts: Sequence[int], sections: int) -> tuple[I64, I64]:
    """`chunks` and `jobs` of chunks that are to be encoded: each job has its plan, chunk and tokens.

    Plans are numbered like the sections of a chunk.
    """
    tokens = [len(at) for at in slots]
    jobs = np.zeros((len(slots) * sections, len(Job)), np.int64)
    jobs[:, Job.PLAN] = np.tile(np.arange(sections), len(slots))
    jobs[:, Job.CHUNK] = np.repeat(np.arange(len(slots)), sections)
    jobs[:, Job.TOKENS] = np.repeat(tokens, sections)
    return chunk_table(tokens, starts, starts), jobs


def place_jobs(jobs: I64, plans: I64) -> tuple[int, int]:
    """Give every job its place among the byte planes and the coefficients.

    Args:
        jobs: `[J, len(Job)]` with PLAN and TOKENS; PLANES, LEVELS and STRIDE are written.
        plans: `[Q, len(Plan)]`.

    Returns:
        the sizes of the planes (bytes) and of the coefficients (elements).
    """
    plan = plans[jobs[:, Job.PLAN]]
    tokens = jobs[:, Job.TOKENS]
    stride = -(-tokens // ALIGNMENT) * ALIGNMENT
    jobs[:, Job.STRIDE] = stride
    jobs[:, Job.PLANES], planes = running_offsets(plan[:, Plan.PLANES] * tokens, ALIGNMENT)
    jobs[:, Job.LEVELS], coefficients = running_offsets(plan[:, Plan.EXTENT] * stride, ALIGNMENT)
    return planes, coefficients


def zeros(count: int, size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Several int32 arrays of zeros, cleared at once, each as well aligned as an allocation of its own."""
    padded = -(-size // ALIGNMENT) * ALIGNMENT
    return torch.zeros(count, padded, dtype=torch.int32, device=device)[:, :size].unbind(0)


def batches(weights: Sequence[int], limit: int, most: int) -> Iterator[slice]:
    """Runs of at most `most` items that together weigh at most `limit`, or of one item."""
    start = total = 0
    for index, weight in enumerate(weights):
        if index > start and (total + weight > limit or index - start == most):
            yield slice(start, index)
            start, total = index, 0
        total += weight
    if len(weights) > start:
        yield slice(start, len(weights))


def running_offsets(sizes: npt.NDArray[np.integer], alignment: int = 1) -> tuple[I64, int]:
    """Where pieces of these sizes begin if they lie in a row, each rounded up to `alignment`; and their total."""
    rounded = -(-sizes.astype(np.int64) // alignment) * alignment
    ends = np.cumsum(rounded)
    return ends - rounded, int(ends[-1]) if len(ends) else 0


def raise_status(status: npt.NDArray[np.int32], sections: Sequence[Section], numbers: Sequence[int]) -> None:
    """Raise what the kernels found, if anything.

    Args:
        status: `[chunks * len(sections)]` sums of `Status`.
        sections: of each chunk.
        numbers: of the chunks, for the message.

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
            raise InputError(f"slots of {where}: a slot lies beyond the cache")
        if flags & Status.NOT_FINITE:
            raise InputError(
                f"the KV cache holds NaN or infinite values in {layers}: encode it with quality='lossless'"
            )
        if flags & Status.TOO_LARGE:
            raise InputError(
                f"the KV cache holds values that are too many quantizer steps large in {layers}: "
                "encode it with quality='lossless'"
            )
        what = "its streams do not end where they must" if flags & Status.STREAMS else "its escapes do not match"
        raise CorruptError(f"{where}: {what}: the bytes are damaged")
