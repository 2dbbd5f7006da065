"""A worker's side: restores chunks into the engine's pages and stores what the engine computed.

    load:  store -> bytes -> codec -> pages            in a pool; the engine goes on, or waits for it (synchronous)
    save:  pages -> copy, inside the step -> codec -> store     in two pools; the copies have a budget

A page that is being restored belongs to a request that waits for it, so nobody else touches it. A page that is being
stored is copied before its step ends, so the engine may free or overwrite it at once. A step's chunks are copied
together and encoded as a batch, and each is written to the store alone: a write that hangs holds up no other chunk.

No error gets out of here once the engine runs. What one is about is not stored, or its blocks are invalid and its load
is over: the engine never waits for what will not come.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from cuvee.codec.codec import Codec, OpenBlob
from cuvee.codec.errors import CorruptError, CuveeError, OutOfMemoryError, allocations
from cuvee.codec.identity import store_key, tenant_id
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.stores import Store
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.cores import free_cores, move_to
from cuvee.integrations.vllm.decision import BlendCost, load_work
from cuvee.integrations.vllm.guard import Guard
from cuvee.integrations.vllm.messages import Blend, Load, Piece, Report, Save
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.setup import Setup
from cuvee.kernels.devices import Mark, refuse_capture, send

if TYPE_CHECKING:
    from cuvee.integrations.vllm.blending.executing import PageBlend, PageBlender

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
    placed: bool = False  # all is decoded, and waits for its tokens to be recomputed
    blending: PageBlend | None = None  # once that has begun
    place_seconds: float = 0.0  # until it was placed
    computed: float = 0.0  # tokens that recomputing came to, and how long the engine's loop took for them
    compute_seconds: float = 0.0
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
        self._guard = Guard(recorder)
        self._tenant_metrics = options.tenant_metrics
        # Those that wait for a store are replaced when it hangs.
        self._cores: frozenset[int] = frozenset()
        self._loaders = ThreadPool(options.threads, "cuvee-load", self._timeout, begin=self._begin_thread)
        self._encoders = ThreadPool(options.threads, "cuvee-encode", self._timeout, begin=self._begin_thread)
        self._writers = ThreadPool(options.threads, "cuvee-write", self._timeout, begin=self._begin_thread)
        self._fetchers = ThreadPool(_FETCHERS, "cuvee-fetch", self._timeout, begin=self._begin_thread)
        # No pool of `concurrent.futures`: where the system refuses a thread, its `submit` raises and the job runs later
        # all the same, when its pages may be those of another request.
        self._coders = ThreadPool(options.threads, "cuvee-decode", self._timeout, begin=self._begin_thread)
        self._lock = threading.Lock()  # of what follows
        self._ended = threading.Condition(self._lock)  # told of every load that is over
        self._jobs: dict[str, _Job] = {}
        self._arrived: set[str] = set()
        self._invalid: set[int] = set()
        self._report = Report()
        self._pending = 0  # bytes of copies
        self._saving: dict[bytes, int] = {}  # digests, and the bytes of each copy
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
        ready: Mark | None = None
        jobs = []
        for load in loads:
            job = _Job(load, time.monotonic(), valid_until=load.start)
            with self._lock:
                self._jobs[load.request] = job
            with self._guard("start_loads", partial(self._abandon, job)):
                ready = ready or Mark(self._pages.device)
                loading = self._loaders.submit(self._load, job, ready)
                if load.blend is None:  # a blend takes more than one step in any case
                    jobs.append((job, loading))
        if not synchronous:
            return
        for job, future in jobs:
            remaining = job.begun + self._timeout - time.monotonic()
            with self._guard("start_loads", partial(self._abandon, job)):
                try:
                    future.result(max(remaining, 0))
                except TimeoutError:
                    self._give_up(job, patient=True)

    def void(self, loads: Mapping[str, Sequence[int]]) -> None:
        """Report loads that cannot be begun as over: requests, and the blocks that are invalid."""
        with self._lock:
            for request, blocks in loads.items():
                self._invalid.update(blocks)
                self._arrived.add(request)
                self._report.ended.add(request)
                self._report.failed.add(request)
            self._ended.notify()

    def take_arrived(self, patience: float = 0.0) -> set[str]:
        """Requests whose loads are over, well or not, since the last call. Gives up those past their deadline.

        Args:
            patience: seconds to wait for the first, if any is under way.
        """
        if patience:
            with self._ended:
                self._ended.wait_for(lambda: self._arrived or self._report.placed or not self._jobs, patience)
        now = time.monotonic()
        with self._lock:
            late = [job for job in self._jobs.values() if not job.placed and now - job.begun > self._timeout]
        for job in late:
            with self._guard("take_arrived"):
                self._give_up(job, patient=False)
        with self._lock:
            arrived, self._arrived = self._arrived, set()
        return arrived

    def take_invalid_blocks(self) -> set[int]:
        """The engine's blocks that were to be restored and are not, since the last call."""
        with self._lock:
            invalid, self._invalid = self._invalid, set()
        return invalid

    def _load(self, job: _Job, ready: Mark) -> None:
        with self._guard("load", partial(self._abandon, job)):
            self._try_to_load(job, ready)

    def _try_to_load(self, job: _Job, ready: Mark) -> None:
        load = job.load
        try:
            with ready.followed():
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
        else:
            if load.blend is not None:
                self._place(job)
                return
        if job.bad is not None:  # without the lock: the store may hang, and before the end: then it is stored anew
            self._discard(job.bad)
        with job.lock:
            self._end(job)

    def _place(self, job: _Job) -> None:
        """Everything that a blend reuses is in its place: the scheduler's side says when the rest is computed."""
        with job.lock, self._lock:
            if not job.over:
                job.placed = True
                job.place_seconds = time.monotonic() - job.begun
                self._report.placed.append(job.load.request)
                self._ended.notify()

    # Blends ----------------------------------------------------------------------------------------------------

    def blend(self, requests: Sequence[str], tokens: int, blender: PageBlender) -> None:
        """Compute this step's slice of what these requests' blends leave to be computed: one blend after the other.

        Runs in the engine's thread, between its own passes. All ranks do the same in the same order, because their
        layers wait for each other. So they agree first that all of them can.

        Args:
            requests: in order; the engine names a request again until its blend is reported as over.
            tokens: to compute, at most.
            blender: of this rank.
        """
        left = float(tokens)
        for request in requests:
            if left <= 0:
                break
            with self._lock:
                job = self._jobs.get(request)
            before, left = left, 0.0  # so it stays after an error, since the ranks may not have computed alike
            with self._guard("blend", None if job is None else partial(self._abandon, job)):
                left = before - self._blend_slice(job, before, blender)

    def _blend_slice(self, job: _Job | None, tokens: float, blender: PageBlender) -> float:
        """Compute a slice of one blend; the tokens it took, the same number on all ranks."""
        blend = None if job is None else job.load.blend
        if job is None or blend is None:
            blender.agree(False)  # the others may have it, and must not wait
            return 0
        with job.lock:
            if not blender.agree(job.placed and not job.over):
                self._end(job, "blend")
                return 0
            begun = time.monotonic()
            try:
                with allocations(f"blending {job.load.end - blend.start} tokens"):
                    if job.blending is None:
                        job.blending = blender.begin(blend, job.load.end)
                    spent = job.blending.advance(tokens)
            except CuveeError as error:
                logger.warning("cuvee: request %s is not blended but computed: %s", job.load.request, error)
                self._end(job, "blend")
                return tokens  # the ranks have not computed alike
            except Exception:
                logger.exception("cuvee: request %s is not blended but computed", job.load.request)
                self._end(job, "blend")
                return tokens
            job.compute_seconds += time.monotonic() - begun
            self._recorder.count("blend_slices")
            if job.blending.done:
                self._blended(job, blend, job.blending.figures)
            return spent

    def _blended(self, job: _Job, blend: Blend, figures: Mapping[str, float]) -> None:
        """Book a blend of which everything is computed; `job.lock` is held."""
        for name, value in figures.items():
            self._recorder.count(name, value)
        self._recorder.count("blend_seconds", job.compute_seconds)
        again = figures.get("blend_token_layers", 0) / self._pages.layout.num_layers
        job.computed = figures["blended_tokens"] - figures["blend_reused_tokens"] + again
        if blend.check:  # a whole prefill more, which says nothing of the blend
            job.compute_seconds = 0.0
        job.valid_until = job.load.end
        self._end(job)

    def drop(self, requests: Sequence[str]) -> None:
        """Give up blends whose segments are in their places, because another rank failed or the request has ended."""
        for request in requests:
            with self._lock:
                job = self._jobs.get(request)
            if job is not None:
                with self._guard("drop"):
                    self._abandon(job)

    # Parts of loads --------------------------------------------------------------------------------------------

    def _fetched(self, job: _Job) -> Iterator[tuple[int, list[_Entry]]]:
        """Entries in order, some at a time, the next ones on their way meanwhile: (index of the first, entries)."""
        if job.over:  # given up before a thread was free for it
            return
        tenant, digests = job.load.tenant, _digests(job.load)

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
        chunks = max(min(first + good, len(load.digests)) - first, 0)
        exact = load.end if load.blend is None else load.blend.start
        valid_until = min((load.first_chunk + first + chunks) * self._chunk, exact)
        job.valid_until = max(job.valid_until, valid_until)
        tails = int(bool(load.tail) and chunks > 0 and first + chunks == len(load.digests))
        self._recorder.count("loaded_chunks", chunks - tails)
        self._recorder.count("loaded_tails", tails)
        self._recorder.count("loaded_segments", good - chunks)
        self._recorder.count("decode_seconds", time.monotonic() - begun)
        if problem is None:
            return
        if entries[good].blob is not None and problem.blames_blob:
            job.bad = entries[good].key
        raise problem

    def _decode(self, load: Load, first: int, entries: list[_Entry]) -> tuple[int, CuveeError | None]:
        """Chunks `first …` of a load into their pages: how many in a row succeeded, and why the next one did not.

        Nothing writes to the pages any more when this returns.
        """
        cache = self._pages
        opening = []
        for at, entry in enumerate(entries, first):
            if entry.blob is None:
                break
            opening.append(partial(self._open, load, at, entry.blob))
        opened, problem = self._in_a_row(opening)
        if problem is None and len(opened) < len(entries):
            problem = CuveeError(f"{_name(load, first + len(opened))} is no longer in the store")
        entries_at = range(first, first + len(opened))
        each_slots = [self._slots_of_entry(load, at) for at in entries_at]
        starts = [self._start_of_entry(load, at) for at in entries_at]

        def one(blob: OpenBlob, at: torch.Tensor, start: int) -> None:
            self._codec.decode_paged([blob], cache, [at], [start]).check()

        if not opened or not self._codec.on_device(cache.device):
            several = zip(opened, each_slots, starts, strict=True)
            done, damage = self._in_a_row(partial(one, *each) for each in several)
            return len(done), damage or problem
        slots = send(torch.cat(each_slots), cache.device).split([len(at) for at in each_slots])
        try:
            self._codec.decode_paged(opened, cache, slots, starts).check()
            return len(opened), problem
        except CuveeError:
            pass  # one of them is damaged; one after the other tells which, on this thread's stream
        for good, each in enumerate(zip(opened, slots, starts, strict=True)):
            try:
                one(*each)
            except CuveeError as error:
                return good, error
        return len(opened), problem

    def _in_a_row(self, works: Iterable[Callable[[], T]]) -> tuple[list[T], CuveeError | None]:
        """Results up to the first work that failed, and its error. On return, or on another error, all have ended."""
        jobs: list[Future[T]] = []
        try:
            jobs.extend(self._coders.submit(work) for work in works)
        finally:
            wait(jobs)
        results: list[T] = []
        for job in jobs:
            try:
                results.append(job.result())
            except CuveeError as error:
                return results, error
        return results, None

    def _open(self, load: Load, at: int, blob: bytes) -> OpenBlob:
        """Entry `at` of a load, if its blob is what was asked for; decoding verifies the rest.

        Raises:
            CuveeError: it is another one's, damaged, or without a valid tag.
        """
        try:
            return self._codec.open_expected(
                blob,
                tokens=self._tokens_of_entry(load, at),
                start=self._start_of_entry(load, at) if at < len(load.digests) else None,
                dtype=self._pages.layout.dtype,
                associated_data=self._bound_to(load.tenant, _digest(load, at)),
            )
        except CorruptError as error:
            raise CorruptError(f"{_name(load, at)}: {error}") from error

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

    def _abandon(self, job: _Job) -> None:
        """A load or a blend failed in an unforeseen place: it is over, with what is valid by now."""
        with job.lock:
            self._end(job)

    def _end(self, job: _Job, failure: str = "load") -> None:
        """Book the outcome; `job.lock` is held. The second call does nothing."""
        if job.over:
            return
        job.over = True
        with self._guard("load", partial(self._book_as_failed, job)):
            self._book(job)
        with self._guard("load"):
            self._count_load(job, failure)

    def _book(self, job: _Job) -> None:
        load, done = job.load, job.valid_until
        seconds = time.monotonic() - job.begun
        first = (done - load.first_chunk * self._chunk) // self._block
        missing = load.blocks[first:] if done < load.end else []
        work = load_work(len(load.digests) - bool(load.tail), load.tail, self._chunk)
        unsaved = _digests(load)[done // self._chunk - load.first_chunk :] if done < load.end else []
        with self._lock:
            self._invalid.update(missing)
            self._is_over(job)
            if done < load.end:
                self._report.failed.add(load.request)
                self._report.unsaved.update(unsaved)
            elif load.blend is None:
                self._report.loaded.append((work, seconds))
            else:
                self._report.blended.append(
                    BlendCost(
                        len(load.blend.pieces), sum(piece.tokens for piece in load.blend.pieces), job.computed,
                        load.end, work, job.place_seconds, job.compute_seconds,
                    )
                )  # fmt: skip

    def _book_as_failed(self, job: _Job) -> None:
        """Of a load about which nothing is certain: all that it was to fill is invalid."""
        load = job.load
        with self._lock:
            if self._jobs.get(load.request) is not job:  # the engine may have heard of its end
                return
            self._invalid.update(load.blocks[max(load.start - load.first_chunk * self._chunk, 0) // self._block :])
            self._is_over(job)
            self._report.failed.add(load.request)

    def _is_over(self, job: _Job) -> None:
        """The engine shall hear of the end of a load; `_lock` is held."""
        request = job.load.request
        self._arrived.add(request)
        self._report.ended.add(request)
        if self._jobs.get(request) is job:
            del self._jobs[request]
        self._ended.notify()

    def _count_load(self, job: _Job, failure: str) -> None:
        load, done = job.load, job.valid_until
        self._recorder.count("loads")
        self._recorder.count("load_seconds", time.monotonic() - job.begun)
        self._recorder.count("loaded_tokens", done - load.start)
        if self._tenant_metrics:
            self._recorder.count_tenant("tenant_loaded_tokens", done - load.start, tenant_id(load.tenant))
        if done < load.end:
            self._recorder.count("failures", label=failure)
            self._recorder.count("recomputed_tokens", load.end - done)

    # Saves -----------------------------------------------------------------------------------------------------

    def save(self, saves: Sequence[Save]) -> None:
        """Copy the chunks out of the pages now, encode and store them later; over budget, they are left out."""
        if not saves:
            return
        # A batch is one thread's work: a device takes all chunks in one go, the CPU's threads share them out. Dealt
        # like cards, so that the first chunks of a prefix are the first to be stored.
        batches = 1
        with self._guard("save"):
            for operation in ("contains", "put"):
                self._store.overdue(operation, self._timeout)
            batches = 1 if self._codec.on_device(self._pages.device) else self._encoders.threads
        admitted = self._admit(saves)
        for batch in filter(None, (admitted[first::batches] for first in range(batches))):
            with self._guard("save", partial(self._release, batch)):
                try:
                    copy = self._copy(batch)
                except OutOfMemoryError as error:
                    self._fail(batch, "encode", error)
                else:
                    self._encoders.submit(self._save, batch, copy, Mark(copy.device))

    def _admit(self, saves: Sequence[Save]) -> list[Save]:
        """Those that are not being stored already and fit the budget, which they take; the others are reported."""
        admitted, skipped = [], 0
        for save in saves:
            with self._guard("save", partial(self._release, [save])):
                size = self._bytes(save)
                with self._lock:
                    if save.digest in self._saving:  # another request has the same prefix
                        continue
                    if self._closed or self._pending + size > self._budget:
                        self._report.unsaved.add(save.digest)
                        skipped += 1
                        continue
                    self._pending += size
                    self._saving[save.digest] = size
                    admitted.append(save)
        with self._guard("save"):
            if skipped:
                self._recorder.count("stores_skipped", skipped)
        return admitted

    def _copy(self, batch: Sequence[Save]) -> PagedCache:
        """The chunks' tokens as the one block of a cache, one chunk after the other.

        A device copies them behind the engine's step, and the engine's thread does not wait for that. The copy belongs
        to the engine's stream: whoever reads it on another must have waited for that before the copy is freed.

        Raises:
            OutOfMemoryError: there is no room for them.
            InputError: the engine's stream is being captured into a CUDA graph.
        """
        pages = self._pages
        refuse_capture(pages.device)
        slots = torch.cat([self._slots_of_save(save) for save in batch])
        with allocations(f"copying {len(slots)} tokens"):
            return pages.copy(send(slots, pages.device))

    def _save(self, batch: Sequence[Save], copy: PagedCache, ready: Mark) -> None:
        with self._guard("store", partial(self._release, batch)):
            self._try_to_save(batch, copy, ready)

    def _try_to_save(self, batch: Sequence[Save], copy: PagedCache, ready: Mark) -> None:
        """Encode those of a batch that the store does not have, and hand them to the writers."""
        try:
            there = self._store.contains([self._key(save) for save in batch])
            missing = [at for at, (_, known) in enumerate(zip(batch, there, strict=True)) if not known]
        except Exception as error:
            self._fail(batch, "store", error)
            return
        blobs: dict[int, bytes] = {}
        if missing:
            with ready.followed():
                blobs = self._encode(batch, copy, missing)
        for at, save in enumerate(batch):  # at the end: until now the whole copy took its part of the budget
            if there[at]:
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
        sizes = [self._tokens(save) for save in batch]
        try:
            rows = torch.arange(sum(sizes), device=copy.device).split(sizes)
            blobs = self._codec.encode_paged(
                copy,
                [rows[at] for at in which],
                [self._start(batch[at]) for at in which],
                importance=[self._importance(batch[at]) for at in which],
                associated_data=[self._bound_to(batch[at].tenant, batch[at].digest) for at in which],
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
        with self._guard("store", partial(self._release, [save])):
            self._try_to_write(save, blob)

    def _try_to_write(self, save: Save, blob: bytes) -> None:
        try:
            kept = self._store.put(self._key(save), blob)
        except Exception as error:
            self._fail([save], "store", error)
            return
        if kept:
            self._recorder.count(
                "stored_segments" if save.segment else ("stored_tails" if save.tail else "stored_chunks")
            )
            self._recorder.count("raw_bytes", self._bytes(save))
            self._recorder.count("stored_bytes", len(blob))
            if self._tenant_metrics:
                self._recorder.count_tenant("tenant_stored_bytes", len(blob), tenant_id(save.tenant))
        self._saved(save, kept)

    def _fail(self, saves: Sequence[Save], kind: str, error: Exception) -> None:
        """Count chunks that are not stored, and say why."""
        self._release(saves)
        if isinstance(error, CuveeError):
            logger.warning("cuvee: %d chunks were not stored: %s", len(saves), error)
        else:
            logger.error("cuvee: %d chunks were not stored", len(saves), exc_info=error)
        self._recorder.count("failures", len(saves), kind)

    def _release(self, saves: Sequence[Save]) -> None:
        """None of these chunks is stored. Those that are over already stay as they are."""
        for save in saves:
            self._saved(save, kept=False)

    def _saved(self, save: Save, kept: bool) -> None:
        """A chunk is stored, or never will be. One whose job was cancelled stays: it is lost when the worker closes."""
        with self._lock:
            self._pending -= self._saving.pop(save.digest, 0)
            if not kept:
                self._report.unsaved.add(save.digest)

    def _key(self, save: Save) -> str:
        """Under which a chunk is stored: with the id of the secret that writes, if there is one."""
        return store_key(save.tenant, save.digest, self._rank, self._key_ids[0])

    # Both ------------------------------------------------------------------------------------------------------

    def report(self, step: int) -> Report:
        """What happened since the last report; `step` was executed. What a store says of itself costs no more than the
        figures.
        """
        with self._lock:
            report, self._report = self._report, Report()
            queued, pending = len(self._saving), self._pending
        report.steps.append(step)
        with self._guard("report"):
            self._recorder.gauge("queue_depth", queued)
            self._recorder.gauge("pending_bytes", pending)
        with self._guard("report"):
            self._recorder.record_store(self._store.counters())
        with self._guard("report"):
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
        with self._guard("close"):
            self._fetchers.dismiss(0, cancel=True)
        for job in jobs:
            with job.lock:  # not while pages are written: the engine is about to free them
                job.over = True
        with self._guard("close"):
            self._loaders.dismiss(0, cancel=True)
        with self._guard("close"):
            self._coders.dismiss()
        with self._guard("close"):
            self._encoders.dismiss(self._close_timeout)
        with self._guard("close"):
            self._writers.dismiss(max(deadline - time.monotonic(), 0))
        lost = {"encode": len(self._saving), "store": 0}
        with self._guard("close"):
            self._store.flush(max(deadline - time.monotonic(), _FLUSH_SECONDS))
        with self._guard("close"):
            lost["store"] = sum(tier.queued for tier in self._store.counters().values())
        with self._guard("close"):
            self._say_last(lost)

    def _say_last(self, lost: Mapping[str, int]) -> None:
        """Log and count what the engine has not heard of."""
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

    def _start(self, save: Save) -> int:
        """Position of the first token that is stored."""
        return save.chunk * self._chunk if save.segment is None else save.segment[0]

    def _tokens(self, save: Save) -> int:
        """Of a chunk, a tail or a segment that is stored."""
        return (save.tail or self._chunk) if save.segment is None else save.segment[1]

    def _slots_of_save(self, save: Save) -> torch.Tensor:
        first = 0 if save.segment is None else save.segment[0] % self._block
        return self._slots(save.blocks, first, first + self._tokens(save))

    def _importance(self, save: Save) -> torch.Tensor | None:
        """A profile predicts which tokens matter from how caches are usually read. A segment is read behind other text,
        so all its tokens count alike, as in `cuvee.blend.ChunkCache`.
        """
        alike = save.segment is not None and bool(self._codec.profile.learned)
        return torch.ones(self._tokens(save)) if alike else None

    def _bytes(self, save: Save) -> int:
        """Of its tokens, uncompressed."""
        return self._tokens(save) * self._pages.layout.bytes_per_token

    def _tokens_of_entry(self, load: Load, at: int) -> int:
        """Tokens that entry `at` of a load holds."""
        if at >= len(load.digests):
            return _piece(load, at).tokens
        return load.tail if load.tail and at == len(load.digests) - 1 else self._chunk

    def _start_of_entry(self, load: Load, at: int) -> int:
        """Position that the first token of entry `at` of a load has in the request."""
        return (load.first_chunk + at) * self._chunk if at < len(load.digests) else _piece(load, at).start

    def _slots_of_entry(self, load: Load, at: int) -> torch.Tensor:
        """Where the tokens of entry `at` of a load go; those before its start and from its end on go nowhere."""
        origin = load.first_chunk * self._chunk
        tokens, begin = self._tokens_of_entry(load, at), self._start_of_entry(load, at)
        low, high = load.start, load.end
        if load.blend is not None:
            low, high = (low, load.blend.start) if at < len(load.digests) else (load.blend.start, high)
        first = min(max(low - begin, 0), tokens)
        last = max(min(high - begin, tokens), first)
        slots = torch.full((tokens,), NOWHERE)
        slots[first:last] = self._slots(load.blocks, begin + first - origin, begin + last - origin)
        return slots

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Slots of the tokens `start … end`, counted from the first of `blocks`."""
        first = start // self._block
        offset = torch.arange(start, end)
        # Only those that hold the tokens: a client decides how many pieces a prompt of many blocks has.
        held = torch.tensor(blocks[first : -(-end // self._block)], dtype=torch.int64)
        return held[offset // self._block - first] * self._block + offset % self._block


def _digests(load: Load) -> list[bytes]:
    """Of all entries of a load: of its chunks, then of the segments behind them."""
    return load.digests if load.blend is None else [*load.digests, *(piece.digest for piece in load.blend.pieces)]


def _digest(load: Load, at: int) -> bytes:
    """Of entry `at` of a load, without a list of all."""
    return load.digests[at] if at < len(load.digests) else _piece(load, at).digest


def _piece(load: Load, at: int) -> Piece:
    """Entry `at` of a load, which is behind its chunks."""
    if load.blend is None:
        raise IndexError(f"entry {at} of a load of {len(load.digests)} chunks")
    return load.blend.pieces[at - len(load.digests)]


def _name(load: Load, at: int) -> str:
    """What messages call entry `at` of a load."""
    if at < len(load.digests):
        return f"chunk {load.first_chunk + at}"
    piece = _piece(load, at)
    return f"the segment of tokens {piece.start} … {piece.start + piece.tokens}"
