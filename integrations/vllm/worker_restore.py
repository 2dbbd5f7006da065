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

from cuvee.codec.codec import OpenBlob
from cuvee.codec.errors import CorruptError, CuveeError
from cuvee.codec.identity import store_key
from cuvee.integrations.vllm.grouped_pages import GroupedPages
from cuvee.integrations.vllm.messages import Entry, Load
from cuvee.integrations.vllm.worker_state import WorkerPools, WorkerState
from cuvee.kernels.devices import Mark, send

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FETCH_ENTRIES = 8  # asked of the store at a time, while the entries before them are decoded


class LateError(Exception):
    """The store has not answered in time."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The store's answer for one entry: the key, and the blob, or None where the store has none."""

    key: str
    blob: bytes | None


class SlicedBlend(Protocol):
    """A blend that is computed slice by slice. See `blending.executing.PageBlend`."""

    done: bool
    checked_from: float | None
    figures: dict[str, float]

    def advance(self, budget: float, /) -> float:
        """Compute a slice of at most so many tokens, or one unit; return the number of computed tokens."""
        ...


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
        bad: store key of an entry that is not sound.
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
    bad: str | None = None


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
            missing = [at for at in range(len(digests)) if at not in found or found[at].blob is None]
            if not missing:
                break
            keys = [store_key(tenant, digests[at], self._state.rank, key_id) for at in missing]
            blobs = self._state.store.get_many(keys)
            found.update((at, Fetched(key, blob)) for at, key, blob in zip(missing, keys, blobs, strict=True))
        return [found[at] for at in range(len(digests))]

    def restore(self, job: LoadJob, batch: Sequence[tuple[Entry, Fetched]]) -> None:
        """Decode some of a load's entries in order, as far as they are there and sound.

        Raises:
            CuveeError: why the first one failed that did.
        """
        count = self._state.recorder.count
        begun = time.monotonic()
        good, problem = self._decode(job.load, batch)
        kinds = [entry.kind for entry, _ in batch[:good]]
        for entry, _ in batch[:good]:
            if entry.kind != "segment":
                job.valid_until = max(job.valid_until, min(entry.end, job.load.exact))
        count("loaded_chunks", kinds.count("chunk"))
        count("loaded_tails", kinds.count("tail"))
        count("loaded_segments", kinds.count("segment"))
        count("decode_seconds", time.monotonic() - begun)
        if problem is None:
            return
        fetched = batch[good][1]
        if fetched.blob is not None and problem.blames_blob:
            job.bad = fetched.key
        raise problem

    def _decode(self, load: Load, batch: Sequence[tuple[Entry, Fetched]]) -> tuple[int, CuveeError | None]:
        """Decode entries of a load into their pages; return how many in a row succeeded, and the next one's error.

        Nothing writes to the pages any more on return.
        """
        state, cache = self._state, self._state.pages
        opening = []
        for entry, fetched in batch:
            if fetched.blob is None:
                break
            opening.append(partial(self._open, load.tenant, entry, fetched.blob))
        opened, problem = self._in_a_row(opening)
        if problem is None and len(opened) < len(batch):
            problem = CuveeError(f"{self._name(batch[len(opened)][0])} is no longer in the store")
        entries = [entry for entry, _ in batch[: len(opened)]]
        each_slots = [state.slots(entry, load.placed(entry)) for entry in entries]
        starts = [entry.start for entry in entries]

        def one(blob: OpenBlob, at: torch.Tensor, start: int) -> None:
            state.codec.decode_paged([blob], cache, [at], [start]).check()

        if state.grouped is not None:
            return self._decode_grouped(state.grouped, opened, each_slots, starts, problem)
        only_slots = [at for (at,) in each_slots]
        if not opened or not state.codec.on_device(cache.device):
            several = zip(opened, only_slots, starts, strict=True)
            done, damage = self._in_a_row(partial(one, *each) for each in several)
            return len(done), damage or problem
        slots = send(torch.cat(only_slots), cache.device).split([len(at) for at in only_slots])
        try:
            state.codec.decode_paged(opened, cache, slots, starts).check()
            return len(opened), problem
        except CuveeError:
            pass  # one entry is damaged; decoding them one by one, on this thread's stream, tells which
        for good, each in enumerate(zip(opened, slots, starts, strict=True)):
            try:
                one(*each)
            except CuveeError as error:
                return good, error
        return len(opened), problem

    def _decode_grouped(
        self,
        pages: GroupedPages,
        opened: Sequence[OpenBlob],
        each_slots: Sequence[Sequence[torch.Tensor]],
        starts: Sequence[int],
        problem: CuveeError | None,
    ) -> tuple[int, CuveeError | None]:
        """Decode entries one by one into dense tensors, and write these to the slots of each group of layers.

        Args:
            pages: of the engine.
            opened: the entries.
            each_slots: of each entry, in every group.
            starts: positions of the entries' first tokens.
            problem: why no more entries were opened.
        """
        device = self._state.pages.device

        def one(blob: OpenBlob, slots: Sequence[torch.Tensor], start: int) -> None:
            tokens = len(slots[0])
            dense = pages.empty(tokens)
            self._state.codec.decode_paged([blob], dense, [torch.arange(tokens, device=device)], [start]).check()
            pages.write(dense, [send(at, device) for at in slots])
            Mark(device).wait()  # the engine reads the pages on another stream once it hears that the load is over

        several = zip(opened, each_slots, starts, strict=True)
        if not self._state.codec.on_device(device):
            done, damage = self._in_a_row(partial(one, *each) for each in several)
            return len(done), damage or problem
        for good, each in enumerate(several):  # on this thread's stream
            try:
                one(*each)
            except CuveeError as error:
                return good, error
        return len(opened), problem

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

    def _open(self, tenant: str, entry: Entry, blob: bytes) -> OpenBlob:
        """Open an entry's blob if it is the one that was asked for; decoding verifies the rest.

        Raises:
            CuveeError: the blob belongs to another entry, is damaged, or has no valid tag.
        """
        try:
            return self._state.codec.open_expected(
                blob,
                tokens=entry.tokens,
                start=None if entry.kind == "segment" else entry.start,
                dtype=self._state.pages.layout.dtype,
                associated_data=self._state.bound_to(tenant, entry.digest),
            )
        except CorruptError as error:
            raise CorruptError(f"{self._name(entry)}: {error}") from error

    def discard(self, key: str) -> None:
        """Delete an entry that does not decode, because it never will."""
        try:
            self._state.store.delete(key)
        except Exception as error:
            logger.warning("cuvee: a bad entry could not be deleted: %s", error)

    def _name(self, entry: Entry) -> str:
        """Name an entry in messages."""
        if entry.kind == "segment":
            return f"the segment of tokens {entry.start} … {entry.end}"
        return f"chunk {entry.start // self._state.chunk}"
