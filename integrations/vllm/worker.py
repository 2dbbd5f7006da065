"""A worker's side: restores chunks into the engine's pages and stores what the engine computed.

    load:  store -> bytes -> codec -> pages            in a pool; the engine goes on, or waits for it (synchronous)
    save:  pages -> copy, inside the step -> codec -> store     in two pools; the copies have a budget

A page that is being restored belongs to a request that waits for it, so nobody else touches it. A page that is being
stored is copied before its step ends, so the engine may free or overwrite it at once. A step's chunks are copied
together and encoded as a batch, and each is written to the store alone: a write that hangs holds up no other chunk.
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
from itertools import accumulate
from typing import Any, TypeVar

import torch

from cuvee.codec.codec import Codec, OpenBlob
from cuvee.codec.errors import CorruptError, CuveeError, OutOfMemory, allocations
from cuvee.codec.identity import store_key, tenant_id
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import Crew
from cuvee.integrations.vllm.cores import free_cores, move_to
from cuvee.integrations.vllm.decision import load_work
from cuvee.integrations.vllm.messages import Load, Report, Save
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup

logger = logging.getLogger(__name__)

T = TypeVar("T")

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
        self._cores: frozenset[int] = frozenset()
        self._loaders = Crew(options.threads, "cuvee-load", self._timeout, begin=self._begin_thread)
        self._encoders = Crew(options.threads, "cuvee-encode", self._timeout, begin=self._begin_thread)
        self._writers = Crew(options.threads, "cuvee-write", self._timeout, begin=self._begin_thread)
        self._fetchers = Crew(_FETCHERS, "cuvee-fetch", self._timeout, begin=self._begin_thread)
        self._coders = ThreadPoolExecutor(options.threads, "cuvee-decode", self._begin_thread)
        self._lock = threading.Lock()  # of what follows
        self._ended = threading.Condition(self._lock)  # told of every load that is over
        self._jobs: dict[str, _Job] = {}
        self._arrived: set[str] = set()
        self._invalid: set[int] = set()
        self._report = Report()
        self._pending = 0  # bytes of copies
        self._saving: set[bytes] = set()  # digests
        self._closed = False
        self._cache: PagedCache | None = None

    def attach(self, cache: PagedCache) -> None:
        """The engine's pages; nothing can be loaded or stored before.

        Codes a chunk of zeros, so that no request waits for compilers.
        """
        self._cache = cache
        self._cores = free_cores()
        if cache.device.type == "cpu":  # threads of the codec run on the cores of the thread that first needs them
            self._coders.submit(self._warm_up, cache).result()
        else:
            self._warm_up(cache)

    def _begin_thread(self) -> None:
        move_to(self._cores)

    def _warm_up(self, cache: PagedCache) -> None:
        layout = cache.layout
        sizes = [(self._chunk, layer.kv_heads, layer.head_dim, layer.value_dim) for layer in layout.layers]
        zeros = partial(torch.zeros, dtype=layout.torch_dtype, device=cache.device)
        chunk = PagedCache.dense(
            layout,
            [zeros(tokens, heads, dim) for tokens, heads, dim, _ in sizes],
            [zeros(tokens, heads, dim) for tokens, heads, _, dim in sizes],
        )
        blobs = self._codec.encode_paged(chunk, [torch.arange(self._chunk, device=cache.device)], [0])
        nowhere = torch.full((self._chunk,), NOWHERE, device=cache.device)
        self._codec.decode_paged(blobs, cache, [nowhere]).check()

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
        good, problem = self._decode(load, first, entries)
        valid_until = min((load.first_chunk + first + good) * self._chunk, load.end)
        job.valid_until = max(job.valid_until, valid_until)
        tails = int(bool(load.tail) and first + good == len(load.digests))
        self._recorder.count("loaded_chunks", good - tails)
        self._recorder.count("loaded_tails", tails)
        self._recorder.count("decode_seconds", time.monotonic() - begun)
        if problem is None:
            return
        if entries[good].blob is not None and not isinstance(problem, OutOfMemory):  # which says nothing of the entry
            job.bad = entries[good].key
        raise problem

    def _decode(self, load: Load, first: int, entries: list[_Entry]) -> tuple[int, CuveeError | None]:
        """Chunks `first …` of a load into their pages: how many in a row succeeded, and why the next one did not."""
        cache = self._pages
        opening = []
        for at, entry in enumerate(entries, first):
            if entry.blob is None:
                break
            opening.append(self._coders.submit(self._open, load, at, entry.blob))
        opened, problem = _in_a_row(opening)
        if problem is None and len(opened) < len(entries):
            problem = CuveeError(f"chunk {load.first_chunk + first + len(opened)} is no longer in the store")
        slots = [self._slots_of_entry(load, at).to(cache.device) for at in range(first, first + len(opened))]
        if opened and self._codec.on_device(cache.device):
            try:
                self._codec.decode_paged(opened, cache, slots).check()
                return len(opened), problem
            except CuveeError:
                pass  # one of them is damaged; one after the other tells which

        def one(blob: OpenBlob, at: torch.Tensor) -> None:
            self._codec.decode_paged([blob], cache, [at]).check()

        done, damage = _in_a_row([self._coders.submit(one, *each) for each in zip(opened, slots, strict=True)])
        return len(done), damage or problem

    def _open(self, load: Load, at: int, blob: bytes) -> OpenBlob:
        """Chunk `at` of a load, if its blob is what was asked for; decoding verifies the rest.

        Raises:
            CuveeError: it is another chunk's, damaged, or without a valid tag.
        """
        chunk = load.first_chunk + at
        try:
            return self._codec.open_own(
                blob,
                tokens=self._tokens_of_entry(load, at),
                start=chunk * self._chunk,
                dtype=self._pages.layout.dtype,
                associated=self._bound_to(load.tenant, load.digests[at]),
            )
        except CorruptError as error:
            raise CorruptError(f"chunk {chunk}: {error}") from error

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
                work = load_work(len(load.digests) - bool(load.tail), load.tail, self._chunk)
                self._report.loaded.append((work, seconds))
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
        admitted = self._admit(saves)
        # A batch is one thread's work: a device takes all chunks in one go, the CPU's threads share them out. Dealt
        # like cards, so that the first chunks of a prefix are the first to be stored.
        batches = 1 if self._codec.on_device(self._pages.device) else self._encoders.threads
        for batch in filter(None, (admitted[first::batches] for first in range(batches))):
            try:
                copy = self._copy(batch)
            except OutOfMemory as error:
                self._fail(batch, "encode", error)
            else:
                self._encoders.submit(self._save, batch, copy, self._event())

    def _admit(self, saves: Sequence[Save]) -> list[Save]:
        """Those that are not being stored already and fit the budget, which they take; the others are reported."""
        admitted, skipped = [], 0
        with self._lock:
            for save in saves:
                if save.digest in self._saving:  # another request has the same prefix
                    continue
                if self._closed or self._pending + self._bytes(save) > self._budget:
                    self._report.unsaved.add(save.digest)
                    skipped += 1
                    continue
                self._pending += self._bytes(save)
                self._saving.add(save.digest)
                admitted.append(save)
        if skipped:
            self._recorder.count("stores_skipped", skipped)
        return admitted

    def _copy(self, batch: Sequence[Save]) -> PagedCache:
        """The chunks' tokens as the one block of a cache, one chunk after the other.

        Raises:
            OutOfMemory: there is no room for them.
        """
        pages = self._pages
        slots = torch.cat([self._slots(save.blocks, 0, self._tokens(save)) for save in batch]).to(pages.device)
        with allocations(f"copying {len(slots)} tokens"):
            return pages.copy(slots)

    def _save(self, batch: Sequence[Save], copy: PagedCache, ready: Any) -> None:
        """Encode those of a batch that the store does not have, and hand them to the writers."""
        try:
            there = self._store.contains([self._key(save) for save in batch])
            missing = [at for at, (_, known) in enumerate(zip(batch, there, strict=True)) if not known]
        except Exception as error:
            self._fail(batch, "store", error)
            return
        blobs: dict[int, bytes] = {}
        if missing:
            with self._stream(ready):
                blobs = self._encode(batch, copy, missing)
        for at, save in enumerate(batch):  # at the end: until now the whole copy took its part of the budget
            if at not in missing:
                self._saved(save, kept=True)
        for at, blob in blobs.items():
            try:
                self._writers.submit(self._write, batch[at], blob)
            except RuntimeError as error:  # no thread can be started, or the worker has closed and counted it as lost
                if not self._closed:
                    self._fail([batch[at]], "store", error)

    def _encode(self, batch: Sequence[Save], copy: PagedCache, which: Sequence[int]) -> dict[int, bytes]:
        """Blobs of some of a batch's chunks, by their place in it; of those that can be encoded."""
        begun = time.monotonic()
        ends = list(accumulate(map(self._tokens, batch)))
        try:
            blobs = self._codec.encode_paged(
                copy,
                [torch.arange(ends[at] - self._tokens(batch[at]), ends[at], device=copy.device) for at in which],
                [batch[at].chunk * self._chunk for at in which],
                associated=[self._bound_to(batch[at].tenant, batch[at].digest) for at in which],
            )
        except Exception as error:
            if len(which) == 1:
                self._fail([batch[which[0]]], "encode", error)
                return {}
        else:
            self._recorder.count("encode_seconds", time.monotonic() - begun)
            return dict(zip(which, blobs, strict=True))
        # One of them cannot be encoded; one after the other tells which.
        return {at: blob for each in which for at, blob in self._encode(batch, copy, [each]).items()}

    def _write(self, save: Save, blob: bytes) -> None:
        try:
            kept = self._store.put(self._key(save), blob)
        except Exception as error:
            self._fail([save], "store", error)
            return
        if kept:
            self._recorder.count("stored_tails" if save.tail else "stored_chunks")
            self._recorder.count("raw_bytes", self._bytes(save))
            self._recorder.count("stored_bytes", len(blob))
            if self._tenant_metrics:
                self._recorder.count_tenant("tenant_stored_bytes", len(blob), tenant_id(save.tenant))
        self._saved(save, kept)

    def _fail(self, saves: Sequence[Save], kind: str, error: Exception) -> None:
        """Count chunks that are not stored, and say why."""
        if isinstance(error, CuveeError):
            logger.warning("cuvee: %d chunks were not stored: %s", len(saves), error)
        else:
            logger.error("cuvee: %d chunks were not stored", len(saves), exc_info=error)
        self._recorder.count("failures", len(saves), kind)
        for save in saves:
            self._saved(save, kept=False)

    def _saved(self, save: Save, kept: bool) -> None:
        """A chunk is stored, or never will be. One whose job was cancelled stays: it is lost when the worker closes."""
        with self._lock:
            self._pending -= self._bytes(save)
            self._saving.discard(save.digest)
            if not kept:
                self._report.unsaved.add(save.digest)

    def _key(self, save: Save) -> str:
        """Under which a chunk is stored: with the id of the secret that writes, if there is one."""
        return store_key(save.tenant, save.digest, self._rank, self._key_ids[0])

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
        self._encoders.dismiss(self._close_timeout)
        self._writers.dismiss(max(deadline - time.monotonic(), 0))
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

    def _tokens(self, save: Save) -> int:
        """Of a chunk or a tail that is stored."""
        return save.tail or self._chunk

    def _bytes(self, save: Save) -> int:
        """Of its tokens, uncompressed."""
        return self._tokens(save) * self._pages.layout.bytes_per_token

    def _tokens_of_entry(self, load: Load, at: int) -> int:
        """Tokens that entry `at` of a load holds."""
        return load.tail if load.tail and at == len(load.digests) - 1 else self._chunk

    def _slots_of_entry(self, load: Load, at: int) -> torch.Tensor:
        """Where the tokens of entry `at` of a load go; those before its start and from its end on go nowhere."""
        begin = at * self._chunk
        first = min(max(load.start - load.first_chunk * self._chunk - begin, 0), self._chunk)
        last = min(load.end - load.first_chunk * self._chunk - begin, self._chunk)
        slots = torch.full((self._tokens_of_entry(load, at),), NOWHERE)
        slots[first:last] = self._slots(load.blocks, begin + first, begin + last)
        return slots

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Slots of the tokens `start … end`, counted from the first of `blocks`."""
        offset = torch.arange(start, end)
        return torch.tensor(blocks)[offset // self._block] * self._block + offset % self._block

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


def _in_a_row(jobs: Sequence[Future[T]]) -> tuple[list[T], CuveeError | None]:
    """Results up to the first job that failed, and its error; all jobs have ended."""
    wait(jobs)
    results: list[T] = []
    for job in jobs:
        try:
            results.append(job.result())
        except CuveeError as error:
            return results, error
    return results, None
