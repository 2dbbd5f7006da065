"""Saves on one rank: pages -> copy, inside the step -> codec -> store.

A page that is being stored is copied before its step ends, so the engine may free or overwrite it at once. A step's
entries are copied together and encoded as a batch, and each is written to the store alone: a write that hangs holds up
no other entry. The copies have a budget. On a device they lie in memory that vLLM does not know of, because it sizes
its cache before it makes connectors: they take at most half of what it leaves free, and the codec works in the rest.

Nothing is stored that a forward which raised may have left half computed, in this step or an earlier one:

- A step that raises on this rank is seen here: either the engine calls us in a `finally`, or it never ends the step.
  With asynchronous scheduling the engine runs the next step all the same, and a chunk of that may hold tokens of the
  failed one. So from there on nothing is copied any more.
- With several ranks, a peer that raises leaves this rank in a collective operation, which the peer's next step may
  match; and vLLM looks for a peer with experts that has failed only when it takes a step's output. This rank then
  computes nonsense and does not notice. So copies wait until the scheduler has the output of their step from all ranks
  (`StepPlan.confirmed`), usually for one step. What waits when the engine stops is lost.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, islice

import torch

from cuvee.codec.errors import CuveeError, OutOfMemoryError, allocations
from cuvee.codec.format.container import read_header
from cuvee.codec.paged import PagedCache
from cuvee.codec.states import States
from cuvee.codec.support.once import Once
from cuvee.codec.token_ids import NO_TOKEN
from cuvee.integrations.core.chunk_io import Chunk, ChunkIO, put_parts
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.identity.lora_files import AdapterFiles, AdapterFolders
from cuvee.integrations.vllm.messages import Entry, Save
from cuvee.integrations.vllm.pages.draft_layers import DraftPages
from cuvee.integrations.vllm.worker.state import WorkerPools, WorkerState
from cuvee.kernels.devices import Mark, memory_of, refuse_capture, send
from cuvee.naming.part_keys import part_key

logger = logging.getLogger(__name__)

_SHARE = 0.5  # of a device's free memory, for copies
# The states of recurrent layers; or tokens of the model's layers, and of a drafter's. No pages: the engine may sleep.
Copies = States | tuple[tuple[ChunkIO, PagedCache], tuple[DraftPages, PagedCache] | None]
DraftEntry = tuple[str, tuple[bytes, ...]]  # key and blob of a drafter's layers


class WorkerSaves:
    """The saves of one rank.

    Args:
        state: of the worker.
        pools: threads of the worker.
        guard: contains errors.
        budget: bytes of copies that may wait to be stored.
    """

    def __init__(self, state: WorkerState, pools: WorkerPools, guard: Guard, budget: int) -> None:
        self._state = state
        self._pools = pools
        self._guard = guard
        self._budget = budget
        self._measured = False  # whether the budget is one of the device
        self._once = Once(logger)
        self._ended = 0  # the last step that has ended well, as have all before it
        self._due = 0  # what that must be for the pages to hold what they should
        self._confirmed = 0
        self._handled: BaseException | None = None  # what the engine's caller was handling before the step
        self._unconfirmed: deque[tuple[int, Sequence[Save], Copies, Mark]] = deque()  # by step
        self._folders = AdapterFolders()
        # The state's lock guards these.
        self._pending = 0  # bytes of copies and blobs
        self._sizes: dict[bytes, int] = {}  # bytes of each copy, or of its blob once it is encoded, by digest
        self._void: set[bytes] = set()  # of these, what is not to be stored after all

    def queued(self) -> tuple[int, int]:
        """Return how many entries are being stored, and the bytes of their copies; the state's lock is held."""
        return len(self._sizes), self._pending

    def begin_step(self, step: int, confirmed: int) -> None:
        """Note that the engine begins a step. Nothing has been computed yet.

        Args:
            step: its number.
            confirmed: number of the last step that is known to have ended on all ranks, with all steps before it.
        """
        self._handled = sys.exception()
        self._due = step - 1  # more than has ended, if a step raised before we heard of it
        self._confirmed = confirmed
        self._submit_confirmed()

    @property
    def failing(self) -> bool:
        """Whether this step's forward has raised; only until `end_step`. An error that the engine's caller handles is
        none of the step's.
        """
        return sys.exception() is not self._handled

    def end_step(self) -> None:
        """Note that this step's forward is over. If it has raised, nothing is stored from here on."""
        if self._ended == self._due and not self.failing:
            self._ended += 1
        self._due += 1
        self._handled = None

    def save(self, saves: Sequence[Save]) -> None:
        """Copy the entries out of the pages now, encode and store them later; entries over budget are left out, and all
        of them if the store is known to be down, or the forward of this step or of an earlier one has raised.
        """
        if self._state.stale:
            with self._guard("save"):
                self._refuse(saves, self._state.stale)
            return
        if not saves or not self._state.stores:
            return
        if self._ended != self._due:
            with self._guard("save"):
                self._refuse(saves, "failed")
                self._once(
                    "failed", "cuvee: rank %d: step %d of the engine has failed, so nothing that it has computed since "
                    "is stored; start the engine anew", self._state.rank, self._ended + 1, level=logging.ERROR,
                )  # fmt: skip
            return
        with self._guard("save"):
            if not self._state.store.takes_puts():
                self._refuse(saves, "down")
                return
        # A batch is one thread's work: a device takes all entries in one go, the CPU's threads share them. They are
        # dealt like cards, so that the first chunks of a prefix are the first to be stored.
        batches = 1
        with self._guard("save"):
            for operation in ("contains", "put"):
                self._state.store.report_overdue(operation, self._state.timeout)
            on_device = self._state.codec.on_device(self._state.device)
            batches = 1 if on_device else self._pools.encoders.threads
        admitted = self._admit(saves)
        states = [[save] for save in admitted if save.entry.kind == "state"]
        chunks = [save for save in admitted if save.entry.kind != "state"]
        for batch in filter(None, (*states, *(chunks[first::batches] for first in range(batches)))):
            with self._guard("save", partial(self._release, batch)):
                try:
                    copy = self._copy(batch)
                except OutOfMemoryError as error:
                    self._fail(batch, "encode", error)
                else:
                    self._unconfirmed.append((self._ended, batch, copy, Mark(self._state.device)))
        self._submit_confirmed()

    def void(self) -> None:
        """Store nothing of what waits to be stored, because the weights have changed."""
        with self._state.lock:
            self._void |= self._sizes.keys()
        while self._unconfirmed:
            self._release(self._unconfirmed.popleft()[1])

    def _refuse(self, saves: Sequence[Save], reason: str) -> None:
        """Book entries as not stored. Those that are under way already stay so."""
        with self._state.lock:
            self._state.report.unsaved |= {save.entry.digest for save in saves} - self._sizes.keys()
        self._state.recorder.count("stores_skipped", len(saves), reason)

    def _submit_confirmed(self) -> None:
        """Have those copies encoded whose tokens all ranks have computed."""
        while self._unconfirmed and self._unconfirmed[0][0] <= (self._ended if self._state.alone else self._confirmed):
            _, batch, copy, ready = self._unconfirmed.popleft()
            with self._guard("save", partial(self._release, batch)):
                self._pools.encoders.submit(self._save, batch, copy, ready)

    def _stale_adapters(self, batch: Sequence[Save]) -> set[AdapterFiles | None]:
        """Return the adapters of a batch whose files are not those any more that named it. The engine has read their
        weights by now, which may have been after the request was named.
        """
        named = {save.adapter for save in batch if save.adapter is not None}
        stale: set[AdapterFiles | None] = {files for files in named if not self._folders.holds(files)}
        for path in {files.path for files in stale if files is not None}:
            self._once(path, "cuvee: KV of an adapter is not stored, because the files in %s have changed", path)
        if stale:
            self._state.recorder.count("stores_skipped", sum(save.adapter in stale for save in batch), "adapter")
        return stale

    def _admit(self, saves: Sequence[Save]) -> list[Save]:
        """Return the saves that are not under way already and fit the budget, and charge it; report the others."""
        admitted: list[Save] = []
        skipped = 0
        with self._guard("save"):
            self._measure()
        for save in saves:
            with self._guard("save", partial(self._release, [save])):
                size, digest = self._bytes(save.entry), save.entry.digest
                with self._state.lock:
                    if digest in self._sizes:  # another request has the same prefix
                        continue
                    if self._state.closed or self._pending + size > self._budget:
                        self._state.report.unsaved.add(digest)
                        skipped += 1
                        continue
                    self._pending += size
                    self._sizes[digest] = size
                    admitted.append(save)
        if skipped:
            with self._guard("save"):
                self._state.recorder.count("stores_skipped", skipped, "full")
            if not self._state.closed:
                self._once(
                    "full", "cuvee: rank %d: chunks are not stored, because those that wait to be stored fill "
                    "max_pending_gb; stores_skipped counts them", self._state.rank,
                )  # fmt: skip
        return admitted

    def _measure(self) -> None:
        """Limit the budget to what the engine leaves free on the device; once, when it has started."""
        memory = None if self._measured else memory_of(self._state.device)
        self._measured = True
        if memory is None:
            return
        free, total = memory
        room = round(_SHARE * min(free, self._state.left * total))
        if room < self._budget:
            logger.warning(
                "cuvee: rank %d: chunks that wait to be stored take at most %.2g GB, not max_pending_gb=%g, because "
                "the engine leaves %.2g GB of the device free: lower --gpu-memory-utilization to store more at a time",
                self._state.rank, room / 1e9, self._budget / 1e9, room / _SHARE / 1e9,
            )  # fmt: skip
            self._budget = room

    def _copy(self, batch: Sequence[Save]) -> Copies:
        """Copy the entries' tokens, one entry after the other, into a cache of one block; or a state, alone in its
        batch.

        A device copies them behind the engine's step, and the engine's thread does not wait for that. The copy belongs
        to the engine's stream: a reader on another stream must have waited for that before the copy is freed.

        Raises:
            OutOfMemoryError: there is no room for them.
            InputError: the engine's stream is being captured into a CUDA graph.
        """
        pages, drafts = self._state.pages, self._state.drafts
        refuse_capture(self._state.device)
        if batch[0].entry.kind == "state":
            with allocations("copying a state"):
                return self._state.state_pages.copy(batch[0].entry)
        each = zip(*(self._state.slots(save.entry) for save in batch), strict=True)
        slots = [send(torch.cat(parts), self._state.device) for parts in each]
        with allocations(f"copying {len(slots[0])} tokens"):
            return (pages.io, pages.copy(slots)), None if drafts is None else (drafts, drafts.copy(slots))

    def _save(self, batch: Sequence[Save], copies: Copies, ready: Mark) -> None:
        """Encode the entries of a batch that the store does not have, and hand them to the writers."""
        drafts = None if isinstance(copies, States) else copies[1]
        with self._guard("store", partial(self._release, batch)):
            try:
                stale = self._stale_adapters(batch)
                self._release([save for save in batch if save.adapter in stale])
                there = self._complete(batch, None if drafts is None else drafts[0])
                missing = [at for at, save in enumerate(batch) if not there[at] and save.adapter not in stale]
            except Exception as error:
                self._fail(batch, "store", error)
                return
            blobs: dict[int, tuple[bytes, ...]] = {}
            draft_entries: dict[int, DraftEntry] = {}
            if missing:
                begun = time.monotonic()
                with ready.followed():
                    if isinstance(copies, States):
                        blobs = self._encode_state(batch[0], copies)
                    else:
                        blobs = self._encode(batch, *copies[0], missing)
                    if drafts is not None:
                        draft_pages, copy = drafts
                        coded = self._encode(batch, draft_pages.io, copy, [*blobs], draft_pages)
                        draft_entries = {
                            at: (self._draft_key(batch[at], draft_pages), parts) for at, parts in coded.items()
                        }
                self._state.recorder.count("work_seconds", time.monotonic() - begun, "encode")
            for at, save in enumerate(batch):  # only now: until here the whole copy is charged to the budget
                if there[at] and save.adapter not in stale:
                    self._saved(save, kept=True)
            with self._state.lock:
                for at, parts in blobs.items():
                    drafted = () if at not in draft_entries else draft_entries[at][1]
                    self._charge(batch[at].entry.digest, sum(map(len, (*parts, *drafted))))
            for at, parts in blobs.items():
                try:
                    self._pools.writers.submit(self._write, batch[at], parts, draft_entries.get(at))
                except RuntimeError as error:  # no thread can be started, or the worker has closed: it counts as lost
                    if not self._state.closed:
                        self._fail([batch[at]], "store", error)

    def _charge(self, digest: bytes, size: int) -> None:
        """Charge these bytes for what waits of an entry from now on: its copy, then its blob; the state's lock is held.

        One that is booked already stays so.
        """
        if digest in self._sizes:
            self._pending += size - self._sizes[digest]
            self._sizes[digest] = size

    def _complete(self, batch: Sequence[Save], drafts: DraftPages | None) -> list[bool]:
        """Return whether the store has each entry, with all of its parts as far as the first and the last tell, and a
        drafter's layers beside it.
        """
        codec = self._state.codec
        keys, counts = [], []
        for save in batch:
            count = 1 if save.entry.kind == "state" else codec.settings.part_count(_has_all_ids(save))
            own = sorted({0, count - 1})
            keys += [part_key(self._key(save), number) for number in own]
            counts.append(len(own))
            if drafts is not None:
                keys.append(self._draft_key(save, drafts))
                counts[-1] += 1
        there = iter(self._state.store.contains(keys))
        return [all(list(islice(there, count))) for count in counts]

    def _encode_state(self, save: Save, states: States) -> dict[int, tuple[bytes, ...]]:
        """Return the only part of a state that is alone in its batch; book it as not stored if it cannot be encoded."""
        bound = self._state.keys.bound_to(save.tenant, save.entry.digest)
        try:
            return {0: (self._state.codec.encode_states(states, associated_data=bound),)}
        except Exception as error:
            self._fail([save], "encode", error)
            return {}

    def _encode(
        self, batch: Sequence[Save], io: ChunkIO, copy: PagedCache, which: Sequence[int],
        drafts: DraftPages | None = None,
    ) -> dict[int, tuple[bytes, ...]]:  # fmt: skip
        """Return the parts of those entries of a batch that can be encoded; their copy holds one after the other. Book
        the others as not stored, unless it is only a drafter's layers that are not.
        """
        ends, chunks = list(accumulate(save.entry.tokens for save in batch)), []
        for at in which:
            save, digest, ids = batch[at], batch[at].entry.digest, batch[at].token_ids
            if drafts is not None:
                digest, ids = drafts.digest(digest), None
            slots = torch.arange(ends[at] - save.entry.tokens, ends[at], device=copy.device)
            bound = self._state.keys.bound_to(save.tenant, digest)
            chunks.append(Chunk(slots, save.entry.start, ids, save.following, bound))
        blobs: dict[int, tuple[bytes, ...]] = {}
        for at, outcome in zip(which, io.encode(copy, chunks), strict=True):
            if not isinstance(outcome, Exception):
                blobs[at] = outcome
            elif drafts is None:
                self._fail([batch[at]], "encode", outcome)
            else:
                self._state.recorder.count("failures", label="drafts")
                logger.warning("cuvee: a drafter's layers were not stored beside a chunk: %s", outcome)
        return blobs

    def _write(self, save: Save, parts: tuple[bytes, ...], draft: DraftEntry | None = None) -> None:
        with self._guard("store", partial(self._release, [save])):
            store, key = self._state.store, self._key(save)
            if save.entry.digest in self._void:
                self._state.recorder.count("stores_skipped", 1, "weights")
                self._release([save])
                return
            try:
                kept = put_parts(store, key, parts)
                drafted = put_parts(store, *draft) if kept and draft is not None else 0
            except Exception as error:
                self._fail([save], "store", error)
                return
            recorder = self._state.recorder
            if kept:
                recorder.count("stored", label=save.entry.kind)
                recorder.count("raw_bytes", self._bytes(save.entry))
                if save.entry.kind != "state":
                    ids = save.token_ids is not None and _has_all_ids(save)
                    recorder.count("misfits", int(self._state.codec.settings.misfits(read_header(parts[0]), ids)))
                recorder.count("stored_bytes", sum(map(len, parts[:kept])))
                if draft is not None and drafted:
                    recorder.count("stored", label="drafts")
                    recorder.count("stored_bytes", len(draft[1][0]))
            self._saved(save, kept > 0)

    def _fail(self, saves: Sequence[Save], kind: str, error: Exception) -> None:
        """Count entries that are not stored, and log why."""
        if isinstance(error, CuveeError):
            logger.warning("cuvee: %d chunks were not stored: %s", len(saves), error)
        else:
            logger.error("cuvee: %d chunks were not stored", len(saves), exc_info=error)
        self._state.recorder.count("failures", len(saves), kind)
        self._release(saves)  # last: whoever waits for the end of a save finds it counted

    def _release(self, saves: Sequence[Save]) -> None:
        """Book these entries as not stored. Entries that are booked already stay as they are."""
        for save in saves:
            self._saved(save, kept=False)

    def _saved(self, save: Save, kept: bool) -> None:
        """Book an entry as stored or as never to be. One whose job was cancelled stays: it is lost at close."""
        with self._state.lock:
            self._pending -= self._sizes.pop(save.entry.digest, 0)
            self._void.discard(save.entry.digest)
            if not kept:
                self._state.report.unsaved.add(save.entry.digest)

    def _key(self, save: Save) -> str:
        return self._state.keys.written(save.tenant, save.entry.digest)

    def _draft_key(self, save: Save, drafts: DraftPages) -> str:
        return self._state.keys.written(save.tenant, drafts.digest(save.entry.digest))

    def _bytes(self, entry: Entry) -> int:
        """Return the size of an entry's tokens or state, uncompressed."""
        return self._state.bytes_per_state if entry.kind == "state" else entry.tokens * self._state.bytes_per_token


def _has_all_ids(save: Save) -> bool:
    """Return whether the codec knows the ids of all tokens, or needs none."""
    return save.token_ids is None or NO_TOKEN not in save.token_ids
