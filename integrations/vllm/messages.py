"""What the scheduler's side and the workers' side of the connector tell each other at every engine step.

    scheduler --StepPlan: loads and stores of this step--> worker(s) --Report: what became of them--> scheduler

Both travel between processes, so they hold plain data. Keys are digests of prefixes; each rank makes its own store keys
of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cuvee.integrations.vllm.decision import BlendCost
from cuvee.integrations.vllm.metrics import Data, merge


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a prompt whose KV is in the store, computed somewhere else.

    Attributes:
        digest: of its tokens.
        start: position that its first token has in this prompt.
        tokens: how many it holds.
    """

    digest: bytes
    start: int
    tokens: int


@dataclass(slots=True)
class Blend:
    """What follows the chunks of a load: segments to place, and tokens to compute once they are there.

    Attributes:
        tokens: the prompt.
        start: tokens before this one are exact; those of the load's chunks that are before it are loaded.
        pieces: in order; the first may begin before `start`, and the last may end after the load.
        cost: share of the token-layers of what is reused to spend on recomputing it.
        blocks: the engine's blocks from the first token on, up to the load's end.
        check: compare the next token's distribution with that of the whole prompt computed.
    """

    tokens: list[int]
    start: int
    pieces: list[Piece]
    cost: float
    blocks: list[int]
    check: bool = False

    def reused(self, end: int) -> int:
        """Tokens of the pieces that lie between `start` and `end`."""
        return sum(max(min(piece.start + piece.tokens, end) - max(piece.start, self.start), 0) for piece in self.pieces)


@dataclass(slots=True)
class Load:
    """Chunks to restore for one request. The last may be a tail: a chunk of which only the first tokens are stored.

    Attributes:
        request: its id.
        tenant: whose chunks.
        digests: of the chunks, in order.
        first_chunk: index of the first of them in the sequence.
        start, end: tokens to restore; both may lie inside a chunk. The end is that of a block unless there is a blend.
        blocks: the engine's blocks from the first token of the first chunk on, up to `end`.
        tail: tokens that the last of the chunks holds, if it is a tail; 0: it is whole.
        blend: what follows the chunks, if they are not all.
    """

    request: str
    tenant: str
    digests: list[bytes]
    first_chunk: int
    start: int
    end: int
    blocks: list[int]
    tail: int = 0
    blend: Blend | None = None


@dataclass(slots=True)
class Save:
    """One chunk to store, or one segment.

    Attributes:
        tenant: whose it is.
        digest: of the chunk, of the tail, or of the segment's tokens.
        chunk: its index in the sequence.
        blocks: the engine's blocks that hold it.
        tail: how many of its tokens there are, if it is not finished; 0: it is a whole chunk.
        segment: position and number of the tokens of a segment, which begins in the first block; None: it is a chunk.
    """

    tenant: str
    digest: bytes
    chunk: int
    blocks: list[int]
    tail: int = 0
    segment: tuple[int, int] | None = None


@dataclass(slots=True)
class StepPlan:
    """Loads to start and chunks to store in step number `step`.

    Attributes:
        step: counts up from 1.
        loads: to start.
        saves: to make of what the step has computed.
        last_saves: to make before the step loads or computes anything, of requests that have ended. Their blocks are
            free, and this step may give them to others.
        blends: requests whose chunks and segments all ranks have placed: recompute, in this order. A request stays
            among them until a report says that its load is over.
        blend_tokens: that this step may compute of them, all together.
        drops: requests that are not blended after all, since a rank failed or the request ended.
        idle: the step computes no tokens, the engine has nothing to do but to wait for loads.
        voids: requests that wait for a load which cannot be begun, and the engine's blocks that it was to fill: these
            are reported as invalid, so the request is computed.
    """

    step: int
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    last_saves: list[Save] = field(default_factory=list)
    blends: list[str] = field(default_factory=list)
    blend_tokens: int = 0
    drops: list[str] = field(default_factory=list)
    idle: bool = False
    voids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """What happened on the workers since the last report.

    Attributes:
        steps: steps that were executed.
        ended: requests whose loads are over, well or not.
        loaded: tokens decoded, by `load_work`, and seconds of each load that succeeded.
        failed: requests a part of whose load failed.
        unsaved: digests of chunks that were to be stored and are not.
        metrics: as `Recorder.drain` gives them.
        placed: requests with a blend whose chunks and segments are in their places, once for each rank.
        blended: what each blend that succeeded did, and the seconds of its parts.
    """

    steps: list[int] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    loaded: list[tuple[int, float]] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    unsaved: set[bytes] = field(default_factory=set)
    metrics: Data | None = None
    placed: list[str] = field(default_factory=list)
    blended: list[BlendCost] = field(default_factory=list)

    def add(self, other: Report) -> None:
        """Take in the report of another rank."""
        self.steps += other.steps
        self.ended |= other.ended
        self.loaded += other.loaded
        self.placed += other.placed
        self.blended += other.blended
        self.failed |= other.failed
        self.unsaved |= other.unsaved
        if self.metrics is None or other.metrics is None:
            self.metrics = self.metrics or other.metrics
        else:
            self.metrics = merge(self.metrics, other.metrics)
