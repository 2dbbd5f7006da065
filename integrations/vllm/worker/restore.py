"""Restores the entries of a load: store -> bytes -> codec -> pages. The next entries are fetched meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CuveeError
from cuvee.integrations.core.chunk_io import Stored, delete_parts, fetch_ahead, fetched_together, get_parts
from cuvee.integrations.vllm.messages import Entry, Load
from cuvee.integrations.vllm.pages.draft_layers import DraftPages
from cuvee.integrations.vllm.phases import LoadPhase, following
from cuvee.integrations.vllm.worker.state import WorkerPools, WorkerState
from cuvee.kernels.devices import Mark
from cuvee.naming.part_keys import part_key

if TYPE_CHECKING:
    from cuvee.integrations.vllm.blending.executing import PageBlend

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """The store's answer for one entry: the key, and its blob or parts; none where the store has none.

    `drafts` are those of a drafter's layers beside it.
    """

    key: str
    parts: tuple[bytes, ...]
    drafts: Fetched | None = None


class Answer(NamedTuple):
    """What the store has of some entries, and when it was asked and had answered."""

    found: list[Fetched]
    asked: float
    at: float


@dataclass(slots=True)
class LoadJob:
    """A load under way."""

    load: Load
    begun: float  # when it was submitted
    valid_until: int  # tokens before this position are restored
    goal: int  # tokens before this position are to be; a deadline lowers it
    lock: threading.Lock = field(default_factory=threading.Lock)  # for pages and phase: held while either is written
    phase: LoadPhase = LoadPhase.RESTORING
    started: float = 0.0  # when a thread began with it; 0: it queues
    answered: float = 0.0  # when the store last answered
    bad: list[tuple[str, int]] = field(default_factory=list)  # keys of unsound entries; of each the first unsound part
    cause: str = "an error, which the log tells"  # why it fails, if it does
    failed: bool = False  # the engine is to compute all its tokens; otherwise invalid blocks say which
    parts: dict[int, int] = field(default_factory=dict)  # of how many an entry of the prefix was restored, by position
    blend: PageBlend | None = None  # what computes its blend, once that has begun
    place_seconds: float = 0.0  # from submission until everything was placed
    computed: float = 0.0  # tokens of the blend
    compute_seconds: float = 0.0  # of the engine's loop for them

    @property
    def over(self) -> bool:
        """Whether its outcome is booked."""
        return self.phase is LoadPhase.OVER

    def enter(self, phase: LoadPhase) -> None:
        """Note that the load is in another phase; `lock` is held.

        Raises:
            RuntimeError: that phase does not follow the load's.
        """
        self.phase = following(self.phase, phase)


class Restorer:
    """Fetches and decodes the entries of loads. Runs in the threads of the pools."""

    def __init__(self, state: WorkerState, pools: WorkerPools) -> None:
        self._state = state
        self._pools = pools

    def fetched(self, job: LoadJob) -> Iterator[list[tuple[Entry, Fetched]]]:
        """Yield a load's entries in order, some at a time, while the next ones are on their way."""
        if job.over:  # given up before a thread was free for it
            return
        load, state = job.load, self._state
        tiers = set(self.tiers(load)) if state.parts > 1 else set()  # a load with a deadline wants to know their rates

        def fetch(entries: Sequence[Entry]) -> Answer:
            return self.get(load.tenant, [entry.digest for entry in entries], state.parts)

        together = fetched_together(sum(state.sizes) * max((entry.tokens for entry in load.entries), default=1))
        for entries, answer in fetch_ahead(self._pools.fetchers, fetch, load.entries, Future.result, together):
            batch = list(zip(entries, answer.found, strict=True))
            if len(tiers) == 1:
                nbytes = sum(state.nbytes(entry, part) for entry, each in batch for part in range(len(each.parts)))
                self.learn(job, next(iter(tiers)), nbytes, answer)
            yield batch

    def tiers(self, load: Load) -> list[str]:
        """Return the tier of each part of a load's prefix."""
        state = self._state
        keys = [state.keys.written(load.tenant, entry.digest) for entry in load.prefix]
        return state.store.locate([part_key(key, number) for key in keys for number in range(state.parts)])

    def learn(self, job: LoadJob, tier: str, nbytes: float, answer: Answer) -> None:
        """Note how fast a tier is. What a load asked for before its last answer came, came after that."""
        if nbytes:
            self._state.rates.observe(tier, nbytes, answer.at - max(answer.asked, job.answered))
        job.answered = answer.at

    def get(self, tenant: str, digests: Sequence[bytes], parts: int) -> Answer:
        """Read entries, of so many parts at most."""
        state = self._state

        def find(digests: Sequence[bytes], parts: int) -> list[Fetched]:
            answers = state.keys.find(tenant, digests, lambda keys: get_parts(state.store, keys, parts))
            return [Fetched(*answer) for answer in answers]

        def ask() -> list[Fetched]:
            entries, drafts = find(digests, parts), state.drafts
            if drafts is None:
                return entries
            beside = find([drafts.digest(digest) for digest in digests], 1)
            return [replace(entry, drafts=each) for entry, each in zip(entries, beside, strict=True)]

        return self._timed(ask)

    def refine(self, bases: Sequence[Fetched]) -> Answer:
        """Read the refinements of entries; where there is none, the base alone is returned."""

        def ask() -> list[Fetched]:
            found = self._state.store.get_many([part_key(base.key, 1) for base in bases])
            return [
                base if more is None else replace(base, parts=(base.parts[0], more))
                for base, more in zip(bases, found, strict=True)
            ]

        return self._timed(ask)

    def _timed(self, ask: Callable[[], list[Fetched]]) -> Answer:
        asked = time.monotonic()
        try:
            return Answer(ask(), asked, time.monotonic())
        finally:
            self._state.recorder.count("work_seconds", time.monotonic() - asked, "fetch")

    def restore(self, job: LoadJob, batch: Sequence[tuple[Entry, Fetched]]) -> None:
        """Decode some of a load's entries in order, as far as they are there and sound.

        Raises:
            CuveeError: why the first one failed that did.
        """
        count = self._state.recorder.count
        if batch[0][0].kind == "state":
            self._restore_state(job, *batch[0])
            batch = batch[1:]
        state, load = self._state, job.load
        with self._pools.decoding:
            begun = time.monotonic()
            present = list(takewhile(lambda each: each[1].parts, batch))
            entries = [self._stored(load.tenant, entry, fetched.parts) for entry, fetched in present]
            slots = [state.slots(entry, load.placed(entry)) for entry, _ in present]
            blobs, problem = state.pages.restore(entries, slots, [entry.start for entry, _ in present])
            if problem is None and len(blobs) < len(batch):
                problem = self.missing(load.tenant, batch[len(blobs)][0])
            if state.drafts is not None:
                self._restore_drafts(job, state.drafts, batch[: len(blobs)])
        for (entry, fetched), blob in zip(batch, blobs, strict=False):
            # A whole blob lacks nothing. A part that is damaged, or refines another base, is left out.
            parts = state.parts if blob.header.lossless else 1 + len(blob.refinements)
            if entry.kind == "segment" or entry.start not in job.parts:
                count("loaded", label=entry.kind)
            if entry.kind != "segment":
                job.parts[entry.start] = parts
            if parts < min(len(fetched.parts), state.parts):
                job.bad.append((fetched.key, parts))
        for entry in takewhile(lambda each: each.start in job.parts, load.prefix):
            job.valid_until = max(job.valid_until, min(entry.end, load.exact))
        count("work_seconds", time.monotonic() - begun, "decode")
        if problem is None:
            return
        fetched = batch[len(blobs)][1]
        if fetched.parts and problem.blames_blob:
            job.bad.append((fetched.key, 0))
        raise problem

    def _restore_state(self, job: LoadJob, entry: Entry, fetched: Fetched) -> None:
        """Put what recurrent layers hold at a load's end into the engine's blocks.

        Raises:
            CuveeError: it is not in the store, or not sound.
        """
        state = self._state
        if not fetched.parts:
            raise self.missing(job.load.tenant, entry)
        with self._pools.decoding:
            begun = time.monotonic()
            bound = state.keys.bound_to(job.load.tenant, entry.digest)
            try:
                states = state.codec.decode_states(fetched.parts[0], associated_data=bound)
                state.state_pages.write(entry, states)
            except CuveeError as error:
                if error.blames_blob:
                    job.bad.append((fetched.key, 0))
                raise
            Mark(state.device).wait()  # the engine reads it on another stream
        state.recorder.count("loaded", label=entry.kind)
        state.recorder.count("work_seconds", time.monotonic() - begun, "decode")

    def _restore_drafts(self, job: LoadJob, drafts: DraftPages, batch: Sequence[tuple[Entry, Fetched]]) -> None:
        """Decode what is there and sound of a drafter's layers."""
        load, state = job.load, self._state
        left = [(entry, each.drafts) for entry, each in batch if each.drafts is not None and each.drafts.parts]
        while left:
            bound = state.keys.bound_to
            entries = [
                Stored(
                    found.parts, bound(load.tenant, drafts.digest(entry.digest)),
                    Expected(entry.tokens, entry.start, drafts.layout.dtype), f"drafts of {self.name(entry)}",
                )
                for entry, found in left
            ]  # fmt: skip
            placed, problem = drafts.restore(entries, [state.slots(entry, load.placed(entry)) for entry, _ in left])
            state.recorder.count("loaded", len(placed), "drafts")
            if problem is None:
                return
            logger.warning("cuvee: request %s: drafts are worse: %s", load.request, problem)
            state.recorder.count("failures", label="drafts")
            if problem.blames_blob:
                job.bad.append((left[len(placed)][1].key, 0))
            left = left[len(placed) + 1 :]

    def _stored(self, tenant: str, entry: Entry, parts: Sequence[bytes]) -> Stored:
        start = None if entry.kind == "segment" else entry.start
        expected = Expected(entry.tokens, start, self._state.pages.layout.dtype)
        return Stored(parts, self._state.keys.bound_to(tenant, entry.digest), expected, self.name(entry))

    def discard(self, job: LoadJob) -> None:
        """Delete what does not decode of a load's entries, because it never will."""
        bad = dict(job.bad)
        refinements = sum(first > 0 for first in bad.values())
        if refinements:
            self._state.recorder.count("failures", refinements, "refinement")
            logger.warning(
                "cuvee: request %s: %d chunks have refinements that are damaged or not theirs: these are deleted, and "
                "the chunks loaded without them", job.load.request, refinements,
            )  # fmt: skip
        try:
            for key, first in bad.items():
                delete_parts(self._state.store, key, first)
        except Exception as error:
            logger.warning("cuvee: a bad entry could not be deleted: %s", error)

    def missing(self, tenant: str, entry: Entry) -> CuveeError:
        """Return the error that says why the store did not give an entry which the lookup has found."""
        reasons = map(self._state.store.why_missing, self._state.keys.all(tenant, entry.digest))
        return CuveeError(f"{self.name(entry)} {next(filter(None, reasons), 'is no longer in the store')}")

    def name(self, entry: Entry) -> str:
        """Name an entry in messages."""
        if entry.kind == "segment":
            return f"the segment of tokens {entry.start} … {entry.end}"
        if entry.kind == "state":
            return f"the state after {entry.end} tokens"
        return f"chunk {entry.start // self._state.chunk}"
