"""The scheduler's side of blending: find parts of a prompt in the store, at any position, and decide on the blend.

    prompt -> segments -> ask the store (in the background) -> pieces that are there -> a `Blend`, or none

**Approximate KV never has an exact name.** From the first block with a reused token on, the request's block hashes are
replaced by hashes of themselves and the recipe. The engine hashes every later block, answers included, from the block
before it, so all later blocks are kept apart as well: only a request for the same blend finds them again. A blended
request stores no chunks from that token on.

**Segments are stored as they were computed, behind any text.** Their names do not cover that text, and more of it is
better: on SmolLM2, segments from the middle of other prompts recover 73 to 85% of a blend's loss without recomputing
anything, while segments from the beginning of a prompt increase the loss. The text before a segment may itself have
been blended; otherwise a new document among known ones would never be stored. Reused segments are not stored again, so
errors do not add up in one segment.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from cuvee.blend.segmentation import LineBreaks, Span
from cuvee.codec.errors import InputError
from cuvee.codec.support.once import Once
from cuvee.integrations.vllm.blending.blend_options import BlendOptions, BlendRequest
from cuvee.integrations.vllm.decision import Pays, Verdict
from cuvee.integrations.vllm.messages import Blend, Entry
from cuvee.integrations.vllm.scheduler.block_names import set_apart
from cuvee.integrations.vllm.scheduler.lookups import Lookup
from cuvee.integrations.vllm.scheduler.state import SchedulerState
from cuvee.naming.identity import Identity, Scope, canonical, content_digest

if TYPE_CHECKING:  # it imports this module
    from cuvee.integrations.vllm.scheduler.request_record import RequestRecord

logger = logging.getLogger(__name__)

_LEAST_SHARE = 4  # a slice takes at least one of this many of a step's tokens
# Segments per prompt that are looked up and stored, the longest ones: clients choose the number, and the longest save
# most per lookup.
MOST_SEGMENTS = 1024


def least_slice(step_tokens: int) -> int:
    """Return the tokens of blends that a step computes even if the engine's own requests fill it."""
    return max(step_tokens // _LEAST_SHARE, 1)


@dataclass(slots=True)
class Segmented:
    """A request's segments and the store's answer about them."""

    spans: list[Span]  # their positions in the prompt
    digests: list[bytes]  # of their tokens
    cost: float  # share of the reused tokens' computation to spend on recomputing some of them
    blends: bool = True  # whether reuse is allowed at all; otherwise segments are only harvested
    min_context: int = 0  # tokens that must stand before a segment for it to be stored
    lookup: Lookup[list[bool | None]] | None = None  # asks whether each is there
    there: Sequence[bool | None] | None = None  # its answer, with None for those that it could not ask for in time
    verdict: Verdict | None = None  # whether the blend pays
    exact: int | None = None  # position before which tokens are exact, once a blend is decided on
    reused: frozenset[int] = frozenset()  # numbers of the reused segments
    reused_tokens: int = 0  # with cached KV
    harvested: int = 0  # number of segments for which it was decided whether to store them
    refused: str = ""  # why the request is not blended although it could have been
    reason: str = "unasked"  # why nothing is reused, unless it is refused or blended

    def forget_lookup(self) -> None:
        """Cancel the lookup."""
        if self.lookup is not None:
            self.lookup.cancel()

    def entry(self, at: int) -> Entry:
        """Return the entry of segment number `at`, without blocks."""
        start, end = self.spans[at]
        return Entry("segment", self.digests[at], start, end - start)

    @property
    def outcome(self) -> dict[str, Any]:
        """The part of the client's answer that describes the blend."""
        if self.refused:
            return {"blended": False, "refused": self.refused}
        if self.exact is None:
            return {"blended": False, "reused_tokens": 0, "reason": self.reason}
        return {"blended": True, "reused_tokens": self.reused_tokens, "cost": self.cost}


class BlendMatch(NamedTuple):
    """What a request can be blended of, or why it is not."""

    blend: Blend | None = None  # to offer to the engine
    end: int = 0  # position where that ends
    verdict: Verdict | None = None  # whether it pays
    reason: str = ""  # why nothing is reused
    refused: str = ""  # why the request is not blended although it could be


NO_BLEND = BlendMatch()


class BlendPlanner:
    """Finds what can be blended. Used by the scheduler's side alone, in the engine's loop.

    Args:
        state: of the scheduler's side.
        options: of blending; None: the engine does not blend.
        identity: of its blobs.
        pays: whether a blend pays; the caller measures.
        breaks: line breaks of the vocabulary, if they are known.
        renames_late: whether other connectors see the engine's requests. Then blocks are renamed only once the engine
            has taken a blend (`allocate`), and it does not find an equal blend that it has already.
    """

    def __init__(
        self,
        state: SchedulerState,
        options: BlendOptions | None,
        identity: Identity,
        pays: Pays,
        breaks: LineBreaks | None,
        renames_late: bool,
    ) -> None:
        self._state = state
        self._options = options
        self._renames_late = renames_late
        self.identity = identity
        self._chunker = (options or BlendOptions()).chunker(breaks)
        self._pays = pays
        self._once = Once(logger)

    def segment(self, record: RequestRecord) -> None:
        """Find a new request's segments. A load with a deadline is not blended."""
        if self._options is not None and record.due is None:
            record.segmented = self._segmented(self._options, record)

    def rename(self, record: RequestRecord) -> None:
        """Name a request's segments by a changed identity, forget the store's answer, and do not ask again."""
        segmented = record.segmented
        if segmented is not None:
            segmented.digests = self._digests(record.request, record.tenant, segmented.spans)
            segmented.forget_lookup()
            segmented.lookup, segmented.there, segmented.harvested = None, None, 0

    def ask(self, record: RequestRecord) -> None:
        """Ask the store in the background which of a request's segments are there."""
        segmented = record.segmented
        if segmented is not None and segmented.blends and segmented.lookup is None and segmented.digests:
            find = partial(self._find, list(segmented.digests), list(segmented.spans))
            nothing: list[bool | None] = [None] * len(segmented.digests)
            segmented.lookup = Lookup(self._state, record.tenant, find, nothing, segmented.spans[-1][1])

    def learn(self, record: RequestRecord) -> bool:
        """Take the store's answer about a request's segments; False: the engine is to ask again. A request whose answer
        does not come is not blended.
        """
        segmented = record.segmented
        if segmented is None or not segmented.blends or segmented.lookup is None or segmented.there is not None:
            return True
        try:
            segmented.there = segmented.lookup.in_time()
        except Exception:
            logger.exception("cuvee: a lookup of segments failed; its request is computed")
            self.refuse(segmented, "failed")
            return True
        if segmented.there is not None and segmented.lookup.timed_out and not any(segmented.there):
            self.refuse(segmented, "timeout")
        return segmented.there is not None

    def match(self, record: RequestRecord, base: int) -> BlendMatch:
        """Return what can be blended behind a request's first `base` tokens, which are exact. Changes nothing."""
        segmented, options = record.segmented, self._options
        if segmented is None or options is None or not segmented.blends or segmented.there is None or record.over:
            return NO_BLEND
        request, there = record.request, segmented.there
        last = request.num_prompt_tokens - 1
        # The engine may have dropped blocks since they were renamed, so that fewer tokens are exact now. Tokens before
        # the first renamed block must stay exact.
        first = 0 if segmented.exact is None or base >= segmented.exact else segmented.exact
        pieces = [
            segmented.entry(at)
            for at, ((start, end), found) in enumerate(zip(segmented.spans, there, strict=True))
            if found and end > max(base, options.min_position) and first <= start
        ]
        if not pieces:
            return BlendMatch(reason="exact" if any(there) else "absent")
        end: int = min(pieces[-1].end, last)
        blend = Blend(list(request.prompt_token_ids), base, pieces, segmented.cost, [], options.min_position)
        reused = blend.reused(end)
        if reused < options.min_reused:
            return BlendMatch(reason="few")
        verdict = segmented.verdict
        if segmented.exact is not None:
            return BlendMatch(blend, end, verdict)
        if verdict is None and self._state.options.decide != "always":
            to_compute = end - base - (1 - segmented.cost) * reused
            verdict = self._pays.judge("blend", base, end, (piece.tokens for piece in pieces), to_compute)
        if verdict is not None and not verdict.restores:
            return BlendMatch(verdict=verdict, refused="declined")
        if not self._are_named(request, blend):
            return BlendMatch(verdict=verdict, refused="hashes")
        return BlendMatch(blend, end, verdict)

    def promise(self, record: RequestRecord, segmented: Segmented, match: BlendMatch) -> bool:
        """Note what a match decides, by which the engine is answered: `record.blend`, or none. False: the engine is to
        ask again, because it may have this blend already, under the new names of its blocks.
        """
        record.blend = None
        if segmented.verdict is None and match.verdict is not None:
            self._pays.note("blend", match.verdict)
        segmented.verdict = match.verdict or segmented.verdict
        segmented.reason = match.reason or segmented.reason
        if match.refused:
            self.refuse(segmented, match.refused)
        if match.blend is None:
            return True
        if segmented.exact is None and not self._renames_late:
            self._decide(record.request, segmented, match.blend, match.end)
            return False
        record.blend, record.blend_end, segmented.reason = match.blend, match.end, "untaken"
        return True

    def allocate(self, record: RequestRecord, blocks: Sequence[int]) -> None:
        """Decide on the blend that the engine has taken, if there is one, and give it its blocks."""
        blend, segmented, block = record.blend, record.segmented, self._state.block
        if blend is not None and segmented is not None:
            if segmented.exact is None:
                self._decide(record.request, segmented, blend, record.blend_end)
            blend.blocks = list(blocks[: -(-record.blend_end // block)])
            blend.pieces = [piece.within([blend.blocks], [block]) for piece in blend.pieces]

    def harvest(self, segmented: Segmented, computed: int) -> list[int]:
        """Return the numbers of the segments that can be stored once `computed` tokens have KV, each only once."""
        found = []
        while segmented.harvested < len(segmented.spans) and segmented.spans[segmented.harvested][1] <= computed:
            at = segmented.harvested
            segmented.harvested += 1
            if at not in segmented.reused and segmented.spans[at][0] >= segmented.min_context:
                found.append(at)
        return found

    def _segmented(self, options: BlendOptions, record: RequestRecord) -> Segmented | None:
        """Return a request's segments; None: it has none, or is not cut."""
        request = record.request
        try:
            wants = BlendRequest.of(request.kv_transfer_params, request.num_prompt_tokens)
        except InputError as error:
            self._once("parameters", "cuvee: request %s is not blended: %s", request.request_id, error)
            record.error = record.error or str(error)
            return self._refused("parameters")
        if request.lora_request is not None:  # recomputing would have to run through the adapter
            return self._refused("adapter") if wants.segments else None
        if request.mm_features:
            return self._refused("media") if wants.segments else None
        if request.skip_reading_prefix_cache and wants.segments:  # such a request wants every token's output
            return self._refused("prompt_logprobs")
        if wants.segments is None:
            spans, min_context = self._chunker.cut(request.prompt_token_ids), options.min_context
        else:
            spans = [span for span in wants.segments if span[1] - span[0] >= options.least_tokens]
            min_context = 0
        spans = self._kept(request, spans)
        digests = self._digests(request, record.tenant, spans)
        cost = float(options.cost if wants.cost is None else wants.cost)
        reason = "parts" if not spans else "unasked" if wants.blend else "unwanted"
        return Segmented(spans, digests, cost, blends=wants.blend, min_context=min_context, reason=reason)

    def _decide(self, request: Any, segmented: Segmented, blend: Blend, end: int) -> None:
        """Decide on a blend that ends at `end`: rename the request's blocks from the first on that it changes."""
        segmented.exact, segmented.reused_tokens = blend.changed, blend.reused(end)
        parts = [piece.digest + piece.start.to_bytes(8, "little") for piece in blend.pieces]
        recipe = canonical(repr(segmented.cost).encode(), blend.changed.to_bytes(8, "little"), *parts)
        name = hashlib.blake2b(recipe, digest_size=32, person=b"cuvee-blend").digest()
        set_apart(request, blend.changed // self._state.block, name)
        starts = {piece.start for piece in blend.pieces}
        segmented.reused = frozenset(at for at, (start, _) in enumerate(segmented.spans) if start in starts)

    def refuse(self, segmented: Segmented, reason: str) -> None:
        """Do not blend a request; count the reason and tell the client. The first reason stands."""
        segmented.forget_lookup()
        segmented.reused = frozenset()  # everything is computed, so segments that were to be reused can be stored again
        if segmented.refused:
            return
        self._state.recorder.count("blends_refused", label=reason)
        segmented.refused = reason
        segmented.blends = False

    def _find(
        self, digests: Sequence[bytes], spans: Sequence[Span], lookup: Lookup[list[bool | None]]
    ) -> list[bool | None]:
        """Ask for each digest once, longest segments first: they are worth most if time runs out."""
        longest = sorted(range(len(digests)), key=lambda at: spans[at][0] - spans[at][1])
        wanted = list(dict.fromkeys(digests[at] for at in longest))
        there: dict[bytes, bool] = {}
        for first in range(0, len(wanted), lookup.batch):
            batch = wanted[first : first + lookup.batch]
            found = lookup.contains(batch, [there.get(digest) for digest in digests])
            there.update(zip(batch, found, strict=True))
        return [there[digest] for digest in digests]

    def _kept(self, request: Any, spans: list[Span]) -> list[Span]:
        """Return the segments within the model's positions, in order; if there are too many, the longest of them."""
        within = [span for span in spans if self._state.addressed(span[1]) == span[1]]
        # A stable sort: the first among equals.
        longest = sorted(within, key=lambda span: span[0] - span[1])[:MOST_SEGMENTS]
        for reason, left_out, limit in (
            ("positions", len(spans) - len(within), f"the model has {self._state.positions} positions"),
            ("number", len(within) - len(longest), f"a prompt has at most {MOST_SEGMENTS}; name longer ones"),
        ):
            if left_out:
                self._once(
                    reason, "cuvee: %d segments of request %s are left out: %s", left_out, request.request_id, limit
                )
        return sorted(longest)

    def _digests(self, request: Any, tenant: str, spans: Sequence[Span]) -> list[bytes]:
        ids = request.prompt_token_ids
        return [content_digest(self.identity, Scope(tenant), ids[start:end]) for start, end in spans]

    def _refused(self, reason: str) -> Segmented:
        segmented = Segmented([], [], 0.0)
        self.refuse(segmented, reason)
        return segmented

    def _are_named(self, request: Any, blend: Blend) -> bool:
        """Return whether all blocks that a blend changes have names.

        The last one has none yet if it is not full. It would get an exact one later.
        """
        named = len(request.block_hashes)
        return named == request.num_tokens // self._state.block and blend.changed // self._state.block < named
