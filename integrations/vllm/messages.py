"""The messages between the connector's scheduler side and its workers, sent at every engine step.

    scheduler --StepPlan: loads and stores of this step--> worker(s) --Report: their outcomes--> scheduler

Both travel between processes, so they hold plain data. Entries are named by digests; each rank derives its own store
keys from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

from cuvee.integrations.vllm.decision import Restored
from cuvee.integrations.vllm.metrics import Data, merge

if TYPE_CHECKING:  # the connector imports this module before whatever imports Numba may be
    from cuvee.integrations.identity.lora_files import AdapterFiles

LOADERS = 8
"""Loads that a rank restores at a time; others queue."""

Kind = Literal["chunk", "tail", "segment", "state"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A run of a prompt's tokens whose KV is one entry of the store, to be loaded or saved.

    Attributes:
        kind: "chunk", a whole chunk of the sequence; "tail", the first tokens of a chunk that is not finished;
            "segment", tokens that may stand anywhere in a prompt; "state", what recurrent layers hold after its last
            token, which is the last one of a block.
        digest: of the sequence up to the entry's end (chunk, tail, state), or of the entry's tokens (segment).
        start: position of the first token in the prompt.
        tokens: number of tokens.
        tables: the engine's blocks of these tokens in each group of layers (`layer_groups`), from the block of the
            first token on. In a load they end with the load; empty before the engine has allocated blocks.
    """

    kind: Kind
    digest: bytes
    start: int
    tokens: int
    tables: tuple[tuple[int, ...], ...] = ()

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.tokens

    def within(self, tables: Sequence[Sequence[int]], sizes: Sequence[int]) -> Entry:
        """Return the entry with its blocks, out of a request's blocks from the first token on.

        Args:
            tables: the request's blocks in each group of layers.
            sizes: tokens per block of each group.
        """
        own = (table[self.start // size : -(-self.end // size)] for table, size in zip(tables, sizes, strict=True))
        return replace(self, tables=tuple(map(tuple, own)))


@dataclass(slots=True)
class Blend:
    """The part of a load behind its exact prefix: segments to place, and tokens to compute once they are placed.

    Attributes:
        tokens: the prompt.
        start: tokens before this position are exact; the load's prefix is loaded up to here.
        pieces: segments in order; the first may begin before `start`, and the last may end after the load.
        cost: share of the reused tokens' computation to spend on recomputing some of them.
        blocks: the engine's blocks from the first token to the load's end.
        first: tokens before this position are computed even where a piece holds them.
    """

    tokens: list[int]
    start: int
    pieces: list[Entry]
    cost: float
    blocks: list[int]
    first: int = 0

    @property
    def changed(self) -> int:
        """The first token whose KV may differ from that of the exact prompt."""
        return max(self.start, self.pieces[0].start)

    def reused(self, end: int) -> int:
        """Count the tokens of the pieces that are reused, up to `end`."""
        first = max(self.start, self.first)
        return sum(max(min(piece.end, end) - max(piece.start, first), 0) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a load with a deadline aims at.

    Attributes:
        seconds: from now until the first token is due; negative: it is late already.
        rest: tokens of the prompt behind the load, which are computed in any case.
        prefill: what computing costs: `LinearCost.learned`.
    """

    seconds: float
    rest: int
    prefill: tuple[float, float, float]


@dataclass(slots=True)
class Load:
    """Entries to restore for one request.

    Attributes:
        request: id of the request.
        tenant: owner of the entries.
        prefix: consecutive chunks, the last of which may be a tail; without the first ones if no layer needs them. A
            load that cannot begin has none, and nothing else, so it fails.
        start, end: positions of the tokens to restore; both may lie inside an entry. The end is a block's end unless
            there is a blend.
        blocks: the engine's blocks of the tokens `start … end`, in the first group of layers.
        blend: what follows the prefix, if anything does.
        aim: by when it has to be done; None: everything is loaded. There is no blend with an aim.
        state: what recurrent layers hold at the end; None: the model has none. There is neither a blend nor an aim
            with it.
    """

    request: str
    tenant: str
    prefix: list[Entry]
    start: int
    end: int
    blocks: list[int]
    blend: Blend | None = None
    aim: Aim | None = None
    state: Entry | None = None

    @property
    def entries(self) -> list[Entry]:
        """The state, without which the rest is of no use; the prefix, then the segments of the blend."""
        first = [] if self.state is None else [self.state]
        return [*first, *self.prefix, *(() if self.blend is None else self.blend.pieces)]

    @property
    def exact(self) -> int:
        """Position at which the exact prefix ends."""
        return self.end if self.blend is None else self.blend.start

    def placed(self, entry: Entry) -> range:
        """Return the positions of an entry's tokens that are restored; its other tokens are decoded and dropped."""
        low, high = (self.exact, self.end) if entry.kind == "segment" else (self.start, self.exact)
        first = min(max(low, entry.start), entry.end)
        return range(first, max(min(high, entry.end), first))


@dataclass(frozen=True, slots=True)
class Save:
    """One entry to store.

    Attributes:
        tenant: owner of the entry.
        entry: what to store; all of its tokens are in its blocks.
        token_ids: ids of its tokens, NO_TOKEN for a part of an image or another medium; None if the codec predicts
            nothing from them.
        following: number of tokens after them in the prompt, whose cache is likely to be restored with theirs.
        adapter: the files of its adapter, without which it is not stored; None: it has none.
    """

    tenant: str
    entry: Entry
    token_ids: list[int] | None = None
    following: int = 0
    adapter: AdapterFiles | None = None


@dataclass(slots=True)
class StepPlan:
    """Loads to start and entries to store in step number `step`.

    Attributes:
        step: counts up from 1.
        loads: to start.
        saves: entries that the step completes.
        last_saves: entries of requests that have ended, to be copied before the step loads or computes anything: their
            blocks are free, and this step may give them to other requests.
        blends: requests whose prefix and segments all ranks have placed: recompute, in this order. A request stays in
            the list until a report says that its load is over.
        blend_tokens: number of tokens that this step may compute for all blends.
        drops: requests that are not blended after all, because a rank failed or the request ended.
        idle: the step computes no tokens; the engine only waits for loads.
        confirmed: all ranks have ended this step and all steps before it.
        names: whether ranks are to report their weights (`Seen`), because these may be others than before.
        coding: profile, quality and secrets that the names of entries stand for (`Setup.coding`); empty: any.
    """

    step: int
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    last_saves: list[Save] = field(default_factory=list)
    blends: list[str] = field(default_factory=list)
    blend_tokens: int = 0
    drops: list[str] = field(default_factory=list)
    idle: bool = False
    confirmed: int = 0
    names: bool = False
    coding: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a rank restored for a request whose entries have parts, or whose load had a deadline.

    Attributes:
        request: its id.
        start: position of the load's first token.
        tokens: restored of each entry of the load's prefix, in order; those behind them are computed.
        parts: of how many parts each of these entries was decoded.
        complete: whether all of the load is restored.
    """

    request: str
    start: int
    tokens: tuple[int, ...]
    parts: tuple[int, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class Seen:
    """The weights of a rank, which it has read at a step that asked for them.

    Attributes:
        step: that asked.
        rank: number of the rank.
        first: digest of the weights that the engine began with; None: unknown.
        now: digest of those that it has; None: unknown.
    """

    step: int
    rank: int
    first: bytes | None
    now: bytes | None


@dataclass(slots=True)
class Report:
    """What happened on the workers since the last report.

    Attributes:
        steps: numbers of the executed steps.
        ended: requests whose loads are over, successfully or not, once per rank.
        restored: what each successful load and blend took.
        failed: requests whose load failed in part or as a whole.
        causes: why, for their clients, who must not learn of other entries or of the store.
        unsaved: digests of entries that were to be stored and are not.
        metrics: as `Recorder.drain` returns them.
        delivered: what was restored of which quality, once per rank and load.
        placed: requests with a blend whose prefix and segments are placed, once per rank.
        seen: what ranks say of their weights.
        changed: ranks that have found other weights than they had, and neither load nor store until a step asks.
        step_seconds: what steps took on the slowest rank, by their numbers, once they are over.
    """

    steps: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    restored: list[Restored] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    unsaved: set[bytes] = field(default_factory=set)
    metrics: Data | None = None
    delivered: list[Delivery] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    changed: set[int] = field(default_factory=set)
    step_seconds: dict[int, float] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        """Merge the report of another rank into this one."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, list):
                mine.extend(theirs)
            elif isinstance(mine, set):
                mine.update(theirs)
        self.causes.update(other.causes)
        for step, seconds in other.step_seconds.items():
            self.step_seconds[step] = max(seconds, self.step_seconds.get(step, 0.0))
        if other.metrics is not None:
            self.metrics = merge(self.metrics or {}, other.metrics)
