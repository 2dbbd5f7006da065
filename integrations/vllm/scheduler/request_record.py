"""What the scheduler's side knows of each request: one record per request, in one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cuvee.integrations.identity.lora_files import AdapterFiles
from cuvee.integrations.vllm.blending.planning import Segmented
from cuvee.integrations.vllm.decision import Verdict
from cuvee.integrations.vllm.messages import Blend
from cuvee.integrations.vllm.phases import UNDER_WAY, RequestPhase, following
from cuvee.integrations.vllm.scheduler.lookups import Lookup
from cuvee.naming.identity import Media, PrefixChain, Scope

_ADMITTED = (*UNDER_WAY, RequestPhase.PROMISED)


@dataclass(frozen=True, slots=True)
class Found:
    """What the store has of a prompt, on every rank."""

    chunks: int = 0  # number of whole chunks in a row
    tail: int = 0  # tokens of the longest tail after them; 0: there is none
    digest: bytes = b""  # of that tail
    absent: tuple[bytes, ...] = ()  # digests of the tails and states that were asked for and are not there
    stated: int = 0  # tokens before the last state that can be used, if the model has recurrent layers
    state: bytes = b""  # digest of that state


NOTHING = Found()


Names = tuple[list[Media | None], AdapterFiles | None]
"""Names of a request's images, None for each that has none, and the files of its adapter."""


class Naming(NamedTuple):
    """The work of a thread that makes a request's names."""

    begun: float  # on the clock of the scheduler's side
    changes: int  # `Adapters.changes` then
    names: Future[Names]


@dataclass(slots=True, eq=False)
class RequestRecord:
    """What is known of a request."""

    request: Any  # the engine's
    phase: RequestPhase = RequestPhase.EARLY  # `RequestTable.enter` changes it
    cached: bool = False  # whether it is loaded and stored at all; an option or an error may say no
    # Its names. What has no default is set once it is cached.
    naming: Naming | None = None  # until the names are taken
    scope: Scope = field(init=False, repr=False)  # what its entries are shared within: its tenant, adapter and media
    chain: PrefixChain = field(init=False, repr=False)  # digests of its chunks and tails
    adapter: AdapterFiles | None = None
    error: str = ""  # what is wrong with the options that its client has set
    refused: str = ""  # why it is not cached, of the metric `uncached`
    arrived: float = 0.0  # on the clock of the scheduler's side
    # What the store has of it.
    lookup: Lookup[Found] | None = None  # the question under way, or the last one
    learned: Lookup[Found] | None = None  # the one that `found` and `end` are of; the engine may ask again
    found: Found = NOTHING
    end: int = 0  # number of the prompt's tokens that `found` can give
    awaited: bool = False  # whether the first entry that is not there was to be stored a moment ago
    segmented: Segmented | None = None  # the segments of it that may be blended
    # What the engine is told.
    verdict: Verdict | None = None  # whether what was found last pays; a load that was declined stays so
    counted: bool = False  # in the metric `lookups`
    queued: float | None = None  # since when it waits because ranks have enough loads
    due: float | None = None  # by when its first token has to come, until a step computes that; on the same clock
    first: int = 0  # number of tokens before those that the engine was told of last
    blend: Blend | None = None  # offered to the engine last
    blend_end: int = 0  # position where that ends
    # Its load.
    digests: Sequence[bytes] = ()  # of its prefix
    ranks: int = 0  # that have not ended it
    given: int = 0  # number of tokens that loads have restored, or will
    cut: str = ""  # why they restored less than they should: "failed" or "deadline"
    cause: str = ""  # why one failed, for its client
    started: bool = False  # whether its first token was timed
    placed: int = 0  # ranks that have placed the segments of its blend
    # What is stored of it.
    computed: int = 0  # tokens that have KV in the blocks the request has now, once its last step is over
    unstored: str = ""  # why nothing is, of `UNSTORED`
    saved: int = 0  # number of chunks that need not be stored (again)
    stated: int = 0  # tokens before the last state that need not be stored (again)

    @property
    def id(self) -> str:
        """The engine's id of the request."""
        name: str = self.request.request_id
        return name

    @property
    def over(self) -> bool:
        """Whether nothing is loaded for it any more."""
        return self.phase is RequestPhase.OVER

    @property
    def tenant(self) -> str:
        """Owner of its entries."""
        return self.scope.tenant

    def forget_lookups(self) -> None:
        """Cancel the request's lookups: no one waits for them any more."""
        if self.lookup is not None:
            self.lookup.cancel()
        if self.segmented is not None:
            self.segmented.forget_lookup()


class RequestTable:
    """The records of all requests that the engine has, by id. Used in the engine's loop.

    Attributes:
        admitted: number of requests that ranks have a load of, or will have if the engine takes what it was told of.
        loading: the request in whose load each digest is.
    """

    def __init__(self) -> None:
        self._records: dict[str, RequestRecord] = {}
        self.admitted = 0
        self.loading: dict[bytes, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def cached(self) -> Iterator[RequestRecord]:
        """Yield the records of requests that are loaded or stored; they may be given up meanwhile."""
        return (record for record in list(self._records.values()) if record.cached)

    def get(self, request_id: str) -> RequestRecord | None:
        """Return the record of a request; None: it has ended, or did not arrive."""
        return self._records.get(request_id)

    def present(self, request_ids: Iterable[str]) -> Iterator[RequestRecord]:
        """Yield the records of those requests that have not ended."""
        return (record for request_id in request_ids if (record := self._records.get(request_id)) is not None)

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
        self.admitted += (after in _ADMITTED) - (record.phase in _ADMITTED)
        record.phase = after

    def release(self, record: RequestRecord) -> None:
        """Have no request wait for this one's load."""
        for digest in record.digests:
            if self.loading.get(digest) is record:
                del self.loading[digest]
        record.digests = ()

    def load_no_more(self, record: RequestRecord) -> None:
        """Load nothing for a request from here on. What ranks load already goes on to its end."""
        phase = RequestPhase.ENDING if record.phase in UNDER_WAY else RequestPhase.OVER
        if record.phase is not phase:
            self.enter(record, phase)

    def remove(self, record: RequestRecord) -> None:
        """Forget a request, which has ended, and cancel what threads do for it."""
        self._records.pop(record.id, None)
        self.release(record)
        self.load_no_more(record)
        if record.phase is RequestPhase.ENDING:
            self.enter(record, RequestPhase.OVER)
        record.forget_lookups()
        if record.naming is not None:
            record.naming.names.cancel()
