"""A worker's side: restores chunks into the engine's pages and stores what the engine computed.

    load:  store -> bytes -> codec -> pages            in a pool; the engine goes on, or waits for it (synchronous)
    save:  pages -> copy, inside the step -> codec -> store     in a pool; the copies have a budget

A page that is being restored belongs to a request that waits for it, so nobody else touches it. A page that is being
stored is copied before its step ends, so the engine may free or overwrite it at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, CuveeError, OutOfMemory
from cuvee.codec.identity import store_key, tenant_id
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import Crew
from cuvee.integrations.vllm.messages import Load, Report, Save
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

_FETCH_CHUNKS = 8  # asked of the store at a time, while those before them are decoded
_FETCHERS = 4
_FLUSH_SECONDS = 1.0  # that a store gets at least to write what it queued, when the engine stops


class _Late(Exception):
    """The store has not answered in time."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """What the store had of a chunk: under which key, and None where it had nothing."""

    key: str
    blob: bytes | None


@dataclass(slots=True)
class _Job:
    """A load under way. `lock` is held while pages are written; who holds it may declare the load dead."""

    load: Load
    begun: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    valid_until: int = 0  # tokens before this one are restored
    over: bool = False
    bad: str | None = None  # key of an entry that is not sound


class WorkerSide:
    """Executes the plans of the scheduler's side on one rank.

    Args:
        setup: of the engine.
        rank: tensor-parallel rank.
        codec: of this rank.
        store: read and written.
        recorder: figures, drained into the reports.
    """

    def __init__(self, setup: Setup, rank: int, codec: Codec, store: Store, recorder: Recorder) -> None:
        options = setup.options
        self._rank = rank
        self._chunk, self._block = options.chunk_tokens, setup.block_tokens
        self._timeout = options.load_timeout
        self._close_timeout = options.close_timeout
        self._budget = int(options.max_pending_mb * 1e6)
        self._codec = codec
        self._key_ids = codec.key_ids or (b"",)
        self._store = store
        self._recorder = recorder
        self._tenant_metrics = options.tenant_metrics
        # Those that wait for a store are replaced when it hangs.
        self._loaders = Crew(options.threads, "cuvee-load", self._timeout)
        self._savers = Crew(options.threads, "cuvee-save", self._timeout)
        self._fetchers = Crew(_FETCHERS, "cuvee-fetch", self._timeout)
        self._coders = ThreadPoolExecutor(options.threads, thread_name_prefix="cuvee-decode")
        self._lock = threading.Lock()  # of what follows
        self._ended = threading.Condition(self._lock)  # told of every load that is over
        self._jobs: dict[str, _Job] = {}
        self._arrived: set[str] = set()
        self._invalid: set[int] = set()
        self._report = Report()
        self._pending = 0  # bytes of copies
        self._saving: dict[bytes, Future[None]] = {}  # by digest
        self._closed = False
        self._cache: PagedCache | None = None

    def attach(self, cache: PagedCache) -> None:
        """The engine's pages; nothing can be loaded or stored before.

        Codes a chunk of zeros, so that no request waits for compilers.
        """
        self._cache = cache
        layout, tokens = cache.layout, (self._chunk,)
        zeros = partial(torch.zeros, dtype=layout.torch_dtype, device=cache.device)
        chunk = KVChunk(
            [zeros(*tokens, layer.kv_heads, layer.head_dim) for layer in layout.layers],
            [zeros(*tokens, layer.kv_heads, layer.value_dim) for layer in layout.layers],
            layout,
        )
        nowhere = torch.full(tokens, NOWHERE, device=cache.device)
        self._codec.decode_paged([self._codec.encode(chunk)], cache, [nowhere]).check()

    # Loads -----------------------------------------------------------------------------------------------------

    def start_loads(self, loads: Sequence[Load], synchronous: bool) -> None:
        """Begin to restore; if `synchronous`, all of it is restored, or marked invalid, on return.

        Either way the engine hears of it by `take_arrived`, and counts no block as cached before.
        """
        ready = self._event()
        jobs = []
        for load in loads:
            job = _Job(load, time.monotonic(), valid_until=load.start)
            with self._lock:
                self._jobs[load.request] = job
            jobs.append((job, self._loaders.submit(self._load, job, ready)))
        if not synchronous:
            return
        for job, future in jobs:
            remaining = job.begun + self._timeout - time.monotonic()
            try:
                future.result(max(remaining, 0))
            except TimeoutError:
                self._give_up(job, patient=True)

    def take_arrived(self, patience: float = 0.0) -> set[str]:
        """Requests whose loads are over, well or not, since the last call. Gives up those past their deadline.

        Args:
            patience: seconds to wait for the first, if any is under way.
        """
        if patience:
            with self._ended:
                self._ended.wait_for(lambda: self._arrived or not self._jobs, patience)
        now = time.monotonic()
        with self._lock:
            late = [job for job in self._jobs.values() if now - job.begun > self._timeout]
        for job in late:
            self._give_up(job, patient=False)
        with self._lock:
            arrived, self._arrived = self._arrived, set()
        return arrived

    def take_invalid_blocks(self) -> set[int]:
        """The engine's blocks that were to be restored and are not, since the last call."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
        return invalid

    def _load(self, job: _Job, ready: Any) -> None:
        load = job.load
        try:
            with self._stream(ready):
                for first, entries in self._fetched(job):
                    with job.lock:
                        if job.over:
                            return
                        self._restore(job, first, entries)
        except _Late:
            self._give_up(job, patient=True)
        except CuveeError as error:
            logger.warning(
                "cuvee: request %s: %s; its tokens from %d on are recomputed", load.request, error, job.valid_until
            )
        except Exception:
            if not job.over:  # given up, or the worker closes
                logger.exception(
                    "cuvee: request %s: its tokens from %d on are recomputed", load.request, job.valid_until
                )
        if job.bad is not None:  # without the lock: the store may hang, and before the end: then it is stored anew
            self._discard(job.bad)
        with job.lock:
            self._end(job)

    def _fetched(self, job: _Job) -> Iterator[tuple[int, list[_Entry]]]:
        """Entries in order, some at a time, the next ones on their way meanwhile: (index of the first, entries)."""
        if job.over:  # given up before a thread was free for it
            return
        tenant, digests = job.load.tenant, job.load.digests

        def fetch(first: int) -> list[_Entry]:
            begun = time.monotonic()
            try:
                return self._get(tenant, digests[first : first + _FETCH_CHUNKS])
            finally:
                self._recorder.count("fetch_seconds", time.monotonic() - begun)

        following = self._fetchers.submit(fetch, 0)
        for first in range(0, len(digests), _FETCH_CHUNKS):
            if not wait([following], max(job.begun + self._timeout - time.monotonic(), 0)).done:
                raise _Late
            entries = following.result()
            if first + _FETCH_CHUNKS < len(digests):
                following = self._fetchers.submit(fetch, first + _FETCH_CHUNKS)
            yield first, entries

    def _get(self, tenant: str, digests: Sequence[bytes]) -> list[_Entry]:
        """The entries of chunks: those of older secrets only where the one that writes has none."""
        found: dict[int, _Entry] = {}
        for key_id in self._key_ids:
            missing = [at for at in range(len(digests)) if at not in found or found[at].blob is None]
            if not missing:
                break
            keys = [store_key(tenant, digests[at], self._rank, key_id) for at in missing]
            blobs = self._store.get_many(keys)
            found.update((at, _Entry(key, blob)) for at, key, blob in zip(missing, keys, blobs, strict=True))
        return [found[at] for at in range(len(digests))]

    def _bound_to(self, tenant: str, digest: bytes) -> bytes:
        """What the tag of a chunk's blob covers besides the blob: tenant, prefix, model, adapter, quality, rank."""
        return store_key(tenant, digest, self._rank).encode() if self._codec.key_ids else b""

    def _restore(self, job: _Job, first: int, entries: list[_Entry]) -> None:
        """Decode some of a load's chunks, in order, as far as they are there and sound."""
        load = job.load
        begun = time.monotonic()
        whole: list[bytes] = []
        problem: CuveeError | None = None
        for index, entry in enumerate(entries, first):
            try:
                whole.append(self._check(entry.blob, load.first_chunk + index))
            except CuveeError as error:
                if entry.blob is not None:
                    job.bad = entry.key
                problem = error
                break
        good, damage = self._decode(load, first, whole)
        job.valid_until = max(job.valid_until, (load.first_chunk + first + good) * self._chunk)
        if good < len(whole) and not isinstance(damage, OutOfMemory):  # which says nothing about the entry
            job.bad = entries[good].key
        self._recorder.count("loaded_chunks", good)
        self._recorder.count("decode_seconds", time.monotonic() - begun)
        problem = damage or problem
        if problem is not None:
            raise problem

    def _decode(self, load: Load, first: int, blobs: list[bytes]) -> tuple[int, CuveeError | None]:
        """Chunks `first …` of a load into their pages: how many in a row succeeded, and why the next one did not."""
        cache = self._pages
        chunks = range(load.first_chunk + first, load.first_chunk + first + len(blobs))
        slots = [self._slots(load.blocks, load.first_chunk, chunk, load.start) for chunk in chunks]
        bound = [self._bound_to(load.tenant, load.digests[first + at]) for at in range(len(blobs))]
        if self._codec.on_device(cache.device):
            try:
                self._codec.decode_paged(blobs, cache, slots, associated=bound).check()
                return len(blobs), None
            except CuveeError:
                pass  # one of them is damaged; one after the other tells which

        def one(blob: bytes, at: torch.Tensor, to: bytes) -> None:
            self._codec.decode_paged([blob], cache, [at], associated=[to]).check()

        results = [self._coders.submit(one, *each) for each in zip(blobs, slots, bound, strict=True)]
        wait(results)
        for good, result in enumerate(results):
            try:
                result.result()
            except CuveeError as error:
                return good, error
        return len(blobs), None

    def _check(self, blob: bytes | None, chunk: int) -> bytes:
        """`blob`, if it says that it is what was asked for; decoding checks its tag and the rest."""
        if blob is None:
            raise CuveeError(f"chunk {chunk} is no longer in the store")
        try:
            self._codec.check_own(blob, self._chunk, chunk * self._chunk, self._pages.layout.dtype)
        except CorruptError as error:
            raise CorruptError(f"chunk {chunk}: {error}") from error
        return blob

    def _discard(self, key: str) -> None:
        """Delete an entry that does not decode: it never will."""
        try:
            self._store.delete(key)
        except Exception as error:
            logger.warning("cuvee: a bad entry could not be deleted: %s", error)

    def _give_up(self, job: _Job, patient: bool) -> None:
        """Declare a load dead. While its pages are being written it cannot be: wait if `patient`, else leave it."""
        if not job.lock.acquire(blocking=patient):
            return
        try:
            if not job.over:
                logger.warning(
                    "cuvee: request %s: no end of its load after load_timeout=%g s; tokens from %d on are recomputed",
                    job.load.request, self._timeout, job.valid_until,
                )  # fmt: skip
                self._end(job, "timeout")
        finally:
            job.lock.release()
        self._store.overdue("get_many", self._timeout)

    def _end(self, job: _Job, failure: str = "load") -> None:
        """Book the outcome; `job.lock` is held. The second call does nothing."""
        if job.over:
            return
        job.over = True
        load = job.load
        seconds = time.monotonic() - job.begun
        done = job.valid_until
        missing = load.blocks[(done - load.first_chunk * self._chunk) // self._block :]
        with self._lock:
            self._invalid.update(missing)
            self._arrived.add(load.request)
            self._jobs.pop(load.request, None)
            self._report.ended.add(load.request)
            if done == load.end:
                self._report.loaded.append((load.end - load.start, seconds))
            else:
                self._report.failed.add(load.request)
                self._report.unsaved.update(load.digests[done // self._chunk - load.first_chunk :])
            self._ended.notify()
        self._recorder.count("loads")
        self._recorder.count("load_seconds", seconds)
        self._recorder.count("loaded_tokens", done - load.start)
        if self._tenant_metrics:
            self._recorder.count_tenant("tenant_loaded_tokens", done - load.start, tenant_id(load.tenant))
        if done < load.end:
            self._recorder.count("failures", label=failure)
            self._recorder.count("recomputed_tokens", load.end - done)

    # Saves -----------------------------------------------------------------------------------------------------

    def save(self, saves: Sequence[Save]) -> None:
        """Copy the chunks out of the pages now, encode and store them later; over budget, they are left out."""
        for operation in ("contains", "put") if saves else ():
            self._store.overdue(operation, self._timeout)
        for save in saves:
            size = self._chunk * self._pages.layout.bytes_per_token
            with self._lock:
                if save.digest in self._saving:  # another request has the same prefix
                    continue
                fits = self._pending + size <= self._budget and not self._closed
                if fits:
                    self._pending += size
                else:
                    self._report.unsaved.add(save.digest)
            if not fits:
                self._recorder.count("stores_skipped")
                continue
            chunk = self._pages.read(self._slots(save.blocks, save.chunk, save.chunk, 0), save.chunk * self._chunk)
            future = self._savers.submit(self._save, save, chunk, size, self._event())
            with self._lock:
                self._saving[save.digest] = future
            future.add_done_callback(partial(self._saved, save.digest))

    def _save(self, save: Save, chunk: KVChunk, size: int, ready: Any) -> None:
        kept = False
        kind = "store"
        try:
            key = store_key(save.tenant, save.digest, self._rank, self._key_ids[0])
            if self._store.contains([key])[0]:
                kept = True
                return
            kind = "encode"
            begun = time.monotonic()
            with self._stream(ready):
                blob = self._codec.encode(chunk, associated=self._bound_to(save.tenant, save.digest))
            self._recorder.count("encode_seconds", time.monotonic() - begun)
            kind = "store"
            kept = self._store.put(key, blob)
            if kept:
                self._recorder.count("stored_chunks")
                self._recorder.count("raw_bytes", size)
                self._recorder.count("stored_bytes", len(blob))
                if self._tenant_metrics:
                    self._recorder.count_tenant("tenant_stored_bytes", len(blob), tenant_id(save.tenant))
        except CuveeError as error:
            logger.warning("cuvee: a chunk was not stored: %s", error)
            self._recorder.count("failures", label=kind)
        except Exception:
            logger.exception("cuvee: a chunk was not stored")
            self._recorder.count("failures", label=kind)
        finally:
            with self._lock:
                self._pending -= size
                if not kept:
                    self._report.unsaved.add(save.digest)

    def _saved(self, digest: bytes, future: Future[None]) -> None:
        with self._lock:
            # One that was cancelled is lost: what is left when the worker closes.
            if not future.cancelled():
                self._saving.pop(digest, None)

    # Both ------------------------------------------------------------------------------------------------------

    def report(self, step: int) -> Report:
        """What happened since the last report; `step` was executed."""
        with self._lock:
            report, self._report = self._report, Report()
            self._recorder.gauge("queue_depth", len(self._saving))
            self._recorder.gauge("pending_bytes", self._pending)
        self._recorder.record_store(self._store.counters())
        report.steps.append(step)
        report.metrics = self._recorder.drain()
        return report

    def close(self) -> None:
        """Finish what is being stored, for at most `close_timeout` seconds, then say what was done and what is lost."""
        deadline = time.monotonic() + self._close_timeout
        with self._lock:
            if self._closed:
                return
            self._closed = True
            jobs = list(self._jobs.values())
        self._fetchers.dismiss(0, cancel=True)
        for job in jobs:
            with job.lock:  # not while pages are written: the engine is about to free them
                job.over = True
        self._loaders.dismiss(0, cancel=True)
        self._coders.shutdown(wait=True)
        self._savers.dismiss(self._close_timeout)
        with self._lock:
            lost = {"encode": len(self._saving)}
        self._store.flush(max(deadline - time.monotonic(), _FLUSH_SECONDS))
        lost["store"] = sum(tier.queued for tier in self._store.counters().values())
        for where, chunks in lost.items():
            if chunks:
                self._recorder.count("lost", chunks, where)
        if any(lost.values()):
            logger.warning(
                "cuvee: rank %d: %d chunks waited to be compressed and %d to be written when the engine stopped, and "
                "were not within close_timeout=%g s: they are lost",
                self._rank, lost["encode"], lost["store"], self._close_timeout,
            )  # fmt: skip
        self._recorder.record_store(self._store.counters())
        rest = self._recorder.drain()
        if rest is not None:
            last = Recorder()
            last.absorb(rest)
            logger.info("cuvee: rank %d, after its last report: %s", self._rank, last.summary())

    @property
    def _pages(self) -> PagedCache:
        if self._cache is None:
            raise RuntimeError("attach was not called")
        return self._cache

    def _slots(self, blocks: Sequence[int], first_chunk: int, chunk: int, start: int) -> torch.Tensor:
        """Slots of a chunk's tokens; `blocks` begin with `first_chunk`; tokens before `start` get none."""
        tokens = torch.arange(chunk * self._chunk, (chunk + 1) * self._chunk)
        offset = tokens - first_chunk * self._chunk
        slots = torch.tensor(blocks)[offset // self._block] * self._block + offset % self._block
        slots[tokens < start] = NOWHERE
        return slots.to(self._pages.device)

    def _event(self) -> Any:
        """What pool threads must wait for on a GPU: the work queued on the engine's stream until now."""
        if self._pages.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._pages.device))
        return event

    @contextmanager
    def _stream(self, ready: Any) -> Iterator[None]:
        """A stream of the thread's own that begins after `ready`; nothing of the sort on a CPU."""
        if ready is None:
            yield
            return
        stream = torch.cuda.Stream(self._pages.device)
        with torch.cuda.device(self._pages.device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            yield
