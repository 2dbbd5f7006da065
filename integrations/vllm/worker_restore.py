"""Restores the entries of a load: store -> bytes -> codec -> pages. The next entries are fetched meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch

from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.codec.open_blob import Expected, OpenBlob
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.messages import Entry, Load
from cuvee.integrations.vllm.metric_table import PARTS
from cuvee.integrations.vllm.worker_state import WorkerPools, WorkerState
from cuvee.kernels.devices import Mark, send
from cuvee.naming.identity import store_key

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOADED: dict[str, str] = {"chunk": "loaded_chunks", "tail": "loaded_tails", "segment": "loaded_segments"}
_FETCH_ENTRIES = 8  # asked of the store at a time, while the entries before them are decoded


class LateError(Exception):
    """The store has not answered in time."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The store's answer for one entry: the key, and its blob or parts; none where the store has none."""

    key: str
    parts: tuple[bytes, ...]


class SlicedBlend(Protocol):
    """A blend that is computed slice by slice. See `blending.executing.PageBlend`."""

    done: bool
    checked_from: float | None
    figures: dict[str, float]

    def advance(self, budget: float, /) -> float:
        """Compute a slice of at most so many tokens, or one unit; return the number of computed tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """What a plan ends with.

    Attributes:
        lost: whether an entry had to be left out because the store does not have it, or it is damaged.
        poor: digests of entries that are left out although the store has some of their parts, because of the floor.
    """

    lost: bool
    poor: tuple[bytes, ...] = ()


@dataclass(slots=True)
class LoadJob:
    """A load under way.

    Attributes:
        load: what to restore.
        begun: when it was submitted.
        valid_until: tokens before this position are restored.
        lock: held while pages are written; only its holder may declare the load over.
        over: its outcome is booked.
        placed: everything is decoded, and its blend waits to be recomputed.
        blending: the blend, once it has begun.
        place_seconds: from submission until everything was placed.
        computed, compute_seconds: tokens that were recomputed, and the engine loop's seconds for them.
        bad: store keys of entries that are not sound, and the first part of each that is not.
        parts: of how many parts each of the prefix's entries was restored, in order.
        planned: what a plan expects of the restored entries, once it has decided that they will do.
    """

    load: Load
    begun: float
    valid_until: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    over: bool = False
    placed: bool = False
    blending: SlicedBlend | None = None
    place_seconds: float = 0.0
    computed: float = 0.0
    compute_seconds: float = 0.0
    bad: list[tuple[str, int]] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    planned: Planned | None = None

    @property
    def went_as_planned(self) -> bool:
        """Whether a plan was carried out, and everything that it found is sound."""
        return self.planned is not None and not self.planned.lost


class Restorer:
    """Fetches and decodes the entries of loads. Runs in the threads of the pools."""

    def __init__(self, state: WorkerState, pools: WorkerPools) -> None:
        self._state = state
        self._pools = pools

    def fetched(self, job: LoadJob) -> Iterator[list[tuple[Entry, Fetched]]]:
        """Yield a load's entries in order, some at a time, while the next ones are on their way.

        Raises:
            LateError: the load's time is up.
        """
        if job.over:  # given up before a thread was free for it
            return
        entries = job.load.entries

        def fetch(first: int) -> list[Fetched]:
            begun = time.monotonic()
            try:
                digests = [entry.digest for entry in entries[first : first + _FETCH_ENTRIES]]
                return self._get(job.load.tenant, digests)
            finally:
                self._state.recorder.count("fetch_seconds", time.monotonic() - begun)

        following = self._pools.fetchers.submit(fetch, 0)
        for first in range(0, len(entries), _FETCH_ENTRIES):
            if not wait([following], max(job.begun + self._state.timeout - time.monotonic(), 0)).done:
                raise LateError
            found = following.result()
            if first + _FETCH_ENTRIES < len(entries):
                following = self._pools.fetchers.submit(fetch, first + _FETCH_ENTRIES)
            yield list(zip(entries[first : first + _FETCH_ENTRIES], found, strict=True))

    def _get(self, tenant: str, digests: Sequence[bytes]) -> list[Fetched]:
        """Read entries; older secrets are tried only where the writing secret has no entry."""
        found: dict[int, Fetched] = {}
        for key_id in self._state.key_ids:
            missing = [at for at in range(len(digests)) if at not in found or not found[at].parts]
            if not missing:
                break
            keys = [store_key(tenant, digests[at], self._state.rank, key_id) for at in missing]
            answers = self._get_parts(keys)
            found.update((at, Fetched(key, parts)) for at, key, parts in zip(missing, keys, answers, strict=True))
        return [found[at] for at in range(len(digests))]

    def _get_parts(self, keys: Sequence[str]) -> list[tuple[bytes, ...]]:
        state = self._state
        if state.parts == 1:
            return [() if blob is None else (blob,) for blob in state.store.get_many(keys)]
        answers = state.store.get_parts(keys, state.parts)
        for number, name in enumerate(PARTS[: state.parts]):
            state.recorder.count("fetched_parts", sum(len(parts) > number for parts in answers), name)
        return answers

    def restore(self, job: LoadJob, batch: Sequence[tuple[Entry, Fetched]]) -> None:
        """Decode some of a load's entries in order, as far as they are there and sound.

        Raises:
            CuveeError: why the first one failed that did.
        """
        count = self._state.recorder.count
        begun = time.monotonic()
        decoded, problem = self._decode(job.load, batch)
        for (entry, fetched), parts in zip(batch, decoded, strict=False):
            self.count(entry)
            if entry.kind != "segment":
                job.valid_until = max(job.valid_until, min(entry.end, job.load.exact))
                job.parts.append(parts)
            if parts < min(len(fetched.parts), self._state.parts):
                job.bad.append((fetched.key, parts))
        count("decode_seconds", time.monotonic() - begun)
        if problem is None:
            return
        fetched = batch[len(decoded)][1]
        if fetched.parts and problem.blames_blob:
            job.bad.append((fetched.key, 0))
        raise problem

    def count(self, entry: Entry) -> None:
        """Count an entry that was restored."""
        self._state.recorder.count(_LOADED[entry.kind])

    def place(self, load: Load, entry: Entry, parts: Sequence[bytes]) -> int:
        """Decode one entry of a load from these parts, into its pages, on this thread and its stream.

        Returns:
            of how many parts it is: of all, if its base is a whole blob, which has no others.

        Raises:
            CuveeError: the bytes belong to another entry, are damaged, or have no valid tag.
        """
        slots = self._state.slots(entry, load.placed(entry))
        return self._place(self._open(load.tenant, entry, parts), slots, entry.start)

    def _decode(self, load: Load, batch: Sequence[tuple[Entry, Fetched]]) -> tuple[list[int], CuveeError | None]:
        """Decode entries of a load into their pages.

        A part that is damaged, or refines another base, is left out, with those behind it.

        Returns:
            of how many parts each entry up to the first that failed was decoded, and the error of that one. Nothing
            writes to the pages any more.
        """
        state, cache = self._state, self._state.pages
        present = []
        for entry, fetched in batch:
            if not fetched.parts:
                break
            present.append((entry, fetched.parts))
        opened, problem = self._in_a_row(partial(self._open_some, load.tenant, *each) for each in present)
        if problem is None and len(opened) < len(batch):
            problem = CuveeError(f"{self._name(batch[len(opened)][0])} is no longer in the store")
        each_slots = [state.slots(entry, load.placed(entry)) for entry, _ in present[: len(opened)]]

        def one(blob: OpenBlob, entry: Entry, parts: Sequence[bytes], slots: Sequence[torch.Tensor]) -> int:
            while True:
                try:
                    return self._place(blob, slots, entry.start)
                except CuveeError as error:
                    if not blob.refinements or not error.blames_blob:
                        raise
                    blob = self._open(load.tenant, entry, parts[: len(blob.refinements)])

        several = [
            partial(one, blob, *each, slots) for blob, each, slots in zip(opened, present, each_slots, strict=False)
        ]
        if not opened or not state.codec.on_device(cache.device):
            done, damage = self._in_a_row(several)
            return done, damage or problem
        if state.grouped is None:
            slots = send(torch.cat([at for (at,) in each_slots]), cache.device)
            sizes = [len(at) for (at,) in each_slots]
            starts = [entry.start for entry, _ in present[: len(opened)]]
            try:
                state.codec.decode_paged(opened, cache, slots.split(sizes), starts).check()
                return [self._parts_of(blob) for blob in opened], problem
            except CuveeError:
                pass  # one entry is damaged; decoding them one by one tells which
        done = []
        for work in several:  # on this thread's stream
            try:
                done.append(work())
            except CuveeError as error:
                return done, error
        return done, problem

    def _place(self, blob: OpenBlob, slots: Sequence[torch.Tensor], start: int) -> int:
        """Decode an entry into its slots of each group of layers; several groups need dense tensors in between.

        Returns:
            as `place`.

        Raises:
            CuveeError: the blob is damaged.
        """
        state, cache = self._state, self._state.pages
        pages, device = state.grouped, cache.device
        if pages is None:
            state.codec.decode_paged([blob], cache, [send(slots[0], device)], [start]).check()
            return self._parts_of(blob)
        pages.write(self._decode_apart(blob, start), [send(at, device) for at in slots])
        Mark(device).wait()  # the engine reads the pages on another stream once it hears that the load is over
        return self._parts_of(blob)

    def _decode_apart(self, blob: OpenBlob, start: int) -> PagedCache:
        cache = self._state.pages
        dense = PagedCache.empty(cache.layout, blob.tokens, range(cache.layout.num_layers), cache.device)
        slots = torch.arange(blob.tokens, device=cache.device)
        self._state.codec.decode_paged([blob], dense, [slots], [start]).check()
        return dense

    def _parts_of(self, blob: OpenBlob) -> int:
        """Return of how many parts an open entry is. A whole blob lacks nothing."""
        return self._state.parts if blob.header.lossless else 1 + len(blob.refinements)

    def _in_a_row(self, works: Iterable[Callable[[], T]]) -> tuple[list[T], CuveeError | None]:
        """Return the results up to the first work that failed, and its error. All works have ended on return, and also
        when another error is raised.
        """
        jobs: list[Future[T]] = []
        try:
            jobs.extend(self._pools.coders.submit(work) for work in works)
        finally:
            wait(jobs)
        results: list[T] = []
        for job in jobs:
            try:
                results.append(job.result())
            except CuveeError as error:
                return results, error
        return results, None

    def _open_some(self, tenant: str, entry: Entry, parts: Sequence[bytes]) -> OpenBlob:
        """Open an entry from as many of its parts as are sound.

        Raises:
            CuveeError: the base is not.
        """
        for count in range(len(parts), 1, -1):
            try:
                return self._open(tenant, entry, parts[:count])
            except CuveeError as error:
                logger.debug("cuvee: a part of an entry is left out: %s", error)
        return self._open(tenant, entry, parts[:1])

    def _open(self, tenant: str, entry: Entry, parts: Sequence[bytes]) -> OpenBlob:
        """Open an entry if its parts are those that were asked for; decoding verifies the rest.

        Raises:
            CuveeError: one of them belongs to another entry, is damaged, or has no valid tag.
        """
        try:
            return self._state.codec.open(
                parts[0],
                refinements=parts[1:],
                associated_data=self._state.bound_to(tenant, entry.digest),
                expected=Expected(
                    entry.tokens, None if entry.kind == "segment" else entry.start, self._state.pages.layout.dtype
                ),
            )
        except CorruptError as error:
            raise CorruptError(f"{self._name(entry)}: {error}") from error

    def discard(self, job: LoadJob) -> None:
        """Delete what does not decode of a load's entries, because it never will."""
        store = self._state.store
        bad = dict(job.bad)  # a plan leaves out one part after the other, the last one first
        refinements = sum(first > 0 for first in bad.values())
        if refinements:
            self._state.recorder.count("bad_refinements", refinements)
            logger.warning(
                "cuvee: request %s: %d chunks have refinements that are damaged or not theirs: these are deleted, and "
                "the chunks loaded without them", job.load.request, refinements,
            )  # fmt: skip
        try:
            for key, first in bad.items():
                if self._state.parts == 1:
                    store.delete(key)
                else:
                    store.delete_parts(key, first)
        except Exception as error:
            logger.warning("cuvee: a bad entry could not be deleted: %s", error)

    def _name(self, entry: Entry) -> str:
        """Name an entry in messages."""
        if entry.kind == "segment":
            return f"the segment of tokens {entry.start} … {entry.end}"
        return f"chunk {entry.start // self._state.chunk}"
