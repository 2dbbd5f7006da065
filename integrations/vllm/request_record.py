"""What the scheduler's side knows of each request: one record per request, in one table."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cuvee.integrations.adapters import AdapterFiles
from cuvee.integrations.vllm.blending.planning import Segmented
from cuvee.integrations.vllm.decision import Verdict
from cuvee.integrations.vllm.lookups import Lookup
from cuvee.integrations.vllm.messages import Blend
from cuvee.integrations.vllm.phases import UNDER_WAY, RequestPhase, following
from cuvee.naming.identity import Media, PrefixChain, Scope

_WITH_PLACE = UNDER_WAY | {RequestPhase.PROMISED}


@dataclass(frozen=True, slots=True)
class Found:
    """What the store has of a prompt, on every rank.

    Attributes:
        chunks: number of whole chunks in a row.
        tail: tokens of the longest tail after them; 0: there is none.
        digest: of that tail.
        absent: digests of the tails and states that were asked for and are not there.
        missing: digest of the chunk after the last one if the store said that it has none; empty otherwise.
        stated: tokens before the last state that can be used, if the model has recurrent layers; 0: there is none.
        state: digest of that state.
    """

    chunks: int = 0
    tail: int = 0
    digest: bytes = b""
    absent: tuple[bytes, ...] = ()
    missing: bytes = b""
    stated: int = 0
    state: bytes = b""


NOTHING = Found()


class Names(NamedTuple):
    """Names of a request's images, None for each that has none, and the files of its adapter."""

    media: list[Media | None]
    adapter: AdapterFiles | None


class Naming(NamedTuple):
    """The work of a thread that makes a request's names: since when, and `Adapters.changes` then."""

    begun: float
    changes: int
    names: Future[Names]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known of a request.

    Attributes:
        request: the engine's.
        phase: of its load; `RequestTable.enter` changes it.
        cached: whether it is loaded and stored at all. An error or an option may end that.
        naming: makes its names, until they are taken.
        scope: what its entries are shared within: its tenant, adapter and media. Unset before it is cached.
        chain: digests of its chunks and tails. Unset before it is cached.
        adapter: the files of its adapter; None: it has none.
        error: what is wrong with the options that its client has set; empty: nothing is.
        due: by when its first token has to come, on the clock of the scheduler's side; None: whenever it comes, or a
            step computes it.
        lookup: the question under way, or the last one.
        learned: the lookup that `found` and `end` are of; the engine may ask again.
        found: the last answer.
        end: number of the prompt's tokens that `found` can give.
        verdict: whether the load pays that the last lookup found; a load that was declined stays so.
        counted: the answer to the request was counted.
        queued: since when it waits because ranks have enough loads; None: it does not.
        first: number of tokens before those that the engine was told of.
        digests: of the prefix in its load.
        ranks: number of ranks that have not ended its load.
        placed: number of ranks that have placed the segments of its blend.
        segmented: the segments of it that may be blended.
        blend: the blend offered to the engine last.
        blend_end: position where that ends.
        computed: tokens that have KV in the blocks the request has now, once its last step is over.
        unstored: why nothing of it is stored, of `UNSTORED`; empty: it is stored.
        saved: number of chunks that need not be stored (again).
        stated: tokens before the last state that need not be stored (again).
    """

    request: Any
    phase: RequestPhase = RequestPhase.EARLY
    cached: bool = False
    naming: Naming | None = None
    scope: Scope = field(init=False, repr=False)
    chain: PrefixChain = field(init=False, repr=False)
    adapter: AdapterFiles | None = None
    error: str = ""
    due: float | None = None
    lookup: Lookup[Found] | None = None
    learned: Lookup[Found] | None = None
    found: Found = NOTHING
    end: int = 0
    verdict: Verdict | None = None
    counted: bool = False
    queued: float | None = None
    first: int = 0
    digests: list[bytes] = field(default_factory=list)
    ranks: int = 0
    placed: int = 0
    segmented: Segmented | None = None
    blend: Blend | None = None
    blend_end: int = 0
    computed: int = 0
    unstored: str = ""
    saved: int = 0
    stated: int = 0

    @property
    def id(self) -> str:
        """The engine's id of the request."""
        name: str = self.request.request_id
        return name

    @property
    def tenant(self) -> str:
        """Owner of its entries."""
        return self.scope.tenant

    def forget_lookups(self) -> None:
        """Cancel the request's lookups: no one waits for them any more."""
        if self.lookup is not None:
            self.lookup.answer.cancel()
        if self.segmented is not None:
            self.segmented.forget_lookup()


class RequestTable:
    """The records of all requests that the engine has, by id. Used in the engine's loop.

    Attributes:
        places: number of requests that ranks have a load of, or will have if the engine takes what it was told of.
    """

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}
        self.places = 0

    def __len__(self) -> int:
        return len(self._records)

    def cached(self) -> Iterator[RequestRecord]:
        """Yield the records of requests that are loaded or stored; they may be given up meanwhile."""
        return (record for record in list(self._records.values()) if record.cached)

    def get(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request; None: it has ended, or did not arrive."""
        return self._records.get(request_id)

    def of(self, request: Any) -> RequestRecord:
        """Return the record of a request, a new one if its id has none."""
        record = self._records.get(request.request_id)
        if record is None:
            record = self._records[request.request_id] = RequestRecord(request)
        return record

    def enter(self, record: RequestRecord, phase: RequestPhase) -> None:
        """Note that a request is in another phase.

        Raises:
            RuntimeError: that phase does not follow the request's.
        """
        after = following(record.phase, phase)
        self.places += (after in _WITH_PLACE) - (record.phase in _WITH_PLACE)
        record.phase = after

    def load_no_more(self, record: RequestRecord) -> None:
        """Load nothing for a request from here on. What ranks load already goes on to its end."""
        phase = RequestPhase.ENDING if record.phase in UNDER_WAY else RequestPhase.OVER
        if record.phase is not phase:
            self.enter(record, phase)

    def remove(self, record: RequestRecord) -> None:
        """Forget a request, which has ended, and cancel what threads do for it."""
        self._records.pop(record.id, None)
        self.load_no_more(record)
        if record.phase is RequestPhase.ENDING:
            self.enter(record, RequestPhase.OVER)
        record.forget_lookups()
        if record.naming is not None:
            record.naming.names.cancel()
