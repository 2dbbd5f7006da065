"""Loads with a deadline: which parts of a prompt's chunks to fetch, what to compute, and when to start the model.

    LoadRequest: chunks, parts, deadline, floor --+
    LinkRate per tier, LinearCost of computing ---+--> LoadPlanner.next --> Step: fetch, decode, start
    and decoding ---------------------------------+          ^                |
                                                             +-- what happens-+

The policy is that of CacheGen with parts in place of levels: after every event the plan is made anew from one measured
rate per tier. The bases of the leading chunks come first, in order; then refinements, as long as they can be decoded
before the last moment at which the model can start in time. What follows the loaded chunks is computed: where loading
would be late or break the floor, and where there is time to compute chunks of which only the base could be loaded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cuvee.codec.errors import InputError
from cuvee.integrations.costs import LinearCost, prefill_quantities

_HALF_LIFE = 0.2  # seconds of transfer after which a sample of a link's rate weighs half
_GIVEN_SECONDS = 0.1  # of transfer that the initial rate counts for
_HICCUP = 0.02  # seconds by which an answer may be late because another thread or process has the core
_REQUEST_SECONDS = 0.015  # of transfer that one request is for
_UNDER_WAY = 2  # requests to a tier at a time, so that the link is never idle
_WAKE_SECONDS = 0.02  # until the plan is made anew if nothing happens
_COMPUTED = 0.75  # what computing a chunk counts for, over what its base loses: the engine's time has other uses
_CANDIDATES = 12  # numbers of chunks that are compared when a plan is made
_Z = 1.64  # standard deviations by which what must be in time may be slower than expected: 5% of cases

_Where = tuple[int, int]  # chunk and part


class LinkRate:
    """How fast a tier delivers, by its last transfers. Keep it as long as the tier is used. Not thread-safe.

    Args:
        rate: bytes per second, initially.
        latency: seconds from a request until its first byte, initially.
        spread: standard deviation of the logarithm of a transfer's rate, initially.
    """

    def __init__(self, rate: float, latency: float, spread: float = 0.7) -> None:
        self.latency, self.spread = latency, spread
        self._bytes, self._seconds = rate * _GIVEN_SECONDS, _GIVEN_SECONDS

    @property
    def rate(self) -> float:
        """Expected bytes per second."""
        return self._bytes / self._seconds

    def observe(self, nbytes: float, seconds: float) -> None:
        """Note that `nbytes` took `seconds` of transfer, without latency."""
        decay = 0.5 ** (seconds / _HALF_LIFE)
        error = math.log(nbytes / seconds / self.rate)
        self.spread = math.sqrt(decay * self.spread**2 + (1 - decay) * error**2)
        fresh = (1 - decay) * _HALF_LIFE / math.log(2)
        self._bytes = decay * self._bytes + fresh * nbytes / seconds
        self._seconds = decay * self._seconds + fresh

    def observe_request(self, nbytes: int, sent: float, begun: float, now: float) -> None:
        """Note that a request was answered.

        Args:
            nbytes: that it brought.
            sent: when it was sent.
            begun: when the request before it was answered; earlier than `sent` if the link was idle.
            now: when it was answered. All times are seconds on one clock.
        """
        whole = max(now - max(sent, begun), 1e-6)
        if begun <= sent:  # the latency is at most half of the time: else a quick answer would be an endless rate
            self.latency += (max(whole - nbytes / self.rate, 0.0) - self.latency) / 8
        self.observe(nbytes, max(now - max(sent + self.latency, begun), whole / 2))


@dataclass(frozen=True, slots=True)
class Part:
    """A base or a refinement in a store: its bytes, the nats per token to expect of a chunk that is decoded from the
    parts up to this one, and the name of the tier that has it.
    """

    nbytes: int
    kl: float
    tier: str


@dataclass(frozen=True, slots=True)
class ChunkParts:
    """A chunk of a prompt, and its parts that a store has: the base, then refinements in order. No parts: no cache."""

    tokens: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt whose cache is to be in place, and its first token there, by a deadline.

    Attributes:
        chunks: those that follow the tokens whose cache the engine holds, in order.
        deadline: of the first token, in seconds on the planner's clock. It may have passed.
        kl_max: nats per token that the chunks may lose in the mean over their tokens, computed ones counting as 0.
        start: tokens of the prompt before the first chunk.
        rest: tokens behind the last chunk, which are computed in any case.
        engine_free: when the engine can begin with this prompt.
    """

    chunks: tuple[ChunkParts, ...]
    deadline: float
    kl_max: float
    start: int = 0
    rest: int = 1
    engine_free: float = -math.inf


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parts to request from a tier in one call: chunk and part of each, from 0, and the bytes of all of them."""

    tier: str
    parts: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Decode a chunk from its first `parts` parts."""

    chunk: int
    parts: int


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now; call `next` again after an event, or at `wake`.

    Attributes:
        fetch: requests to send.
        decode: a chunk to decode.
        start: start the model behind as many chunks as there are numbers, each decoded from so many parts. Nothing more
            is to be done then.
        wake: when to call `next` at the latest.
    """

    fetch: tuple[Fetch, ...] = ()
    decode: Decode | None = None
    start: tuple[int, ...] | None = None
    wake: float = math.inf


@dataclass(slots=True)
class _Lane:
    """A tier's requests under way, in the order of their answers, and when the last one was answered."""

    rate: LinkRate
    requests: deque[tuple[Fetch, float]] = field(default_factory=deque)
    answered: float = -math.inf

    def per_byte(self, now: float, z: float) -> float:
        """Return the seconds per byte if the link is `z` deviations slower. A transfer that is overdue is evidence of
        forecasts that are wrong: a link that stalls has no samples.
        """
        spread = self.rate.spread
        if self.requests:
            expected = self.requests[0][0].nbytes / self.rate.rate + _HICCUP
            spread = math.hypot(spread, math.log(max(self._passed(now) / expected, 1.0)))
        return _slow(spread, z) / self.rate.rate

    def free(self, now: float, per_byte: float) -> float:
        """Return when everything under way will be there; what is overdue takes as long again."""
        if not self.requests:
            return now + self.rate.latency
        expected, passed = per_byte * sum(fetch.nbytes for fetch, _ in self.requests), self._passed(now)
        return now + max(expected - passed, passed if passed > expected else 0.0)

    def _passed(self, now: float) -> float:
        return max(now - max(self.requests[0][1] + self.rate.latency, self.answered), 0.0)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Load these parts of so many leading chunks: when the first token would come, and the nats that are lost, with the
    price of computing (`_COMPUTED`).
    """

    chunks: int
    parts: list[_Where]
    end: float
    loss: float


class LoadPlanner:
    """Decides what to do next of one load. Used by one thread at a time.

    Args:
        request: what is to be loaded.
        links: the rate of every tier, by name. They go on learning, and outlive the planner.
        prefill: seconds to compute, of `prefill_quantities`.
        decode: seconds to decode, of tokens and bytes. It goes on learning, too.

    Raises:
        InputError: there are no chunks, or `links` lacks a tier.
    """

    def __init__(
        self, request: LoadRequest, links: Mapping[str, LinkRate], prefill: LinearCost, decode: LinearCost
    ) -> None:
        chunks = self._chunks = request.chunks
        tiers = sorted({part.tier for chunk in chunks for part in chunk.parts})
        if not chunks or not set(tiers) <= links.keys():
            raise InputError(f"chunks, links: must hold chunks, and the rates of {tiers}, got {sorted(links)}")
        self._request, self._prefill, self._decode = request, prefill, decode
        self._lanes = {name: _Lane(links[name]) for name in tiers}
        self._stored = [len(chunk.parts) for chunk in chunks]
        self._there: set[_Where] = set()
        self._have = [0] * len(chunks)  # parts of each chunk that are there, as are all before them
        self._decoded = [0] * len(chunks)
        self._asked: set[_Where] = set()
        self._decoding: tuple[Decode, float] | None = None
        edges = list(accumulate((chunk.tokens for chunk in chunks), initial=request.start))
        self._compute = [prefill_quantities(edge, edges[-1] + request.rest) for edge in edges]
        self._whole = edges[-1] - request.start

    # What has happened -------------------------------------------------------------------------------------------

    def arrived(self, fetch: Fetch, now: float, missing: Collection[_Where] = ()) -> None:
        """Note that a request was answered; the store does not have the `missing` parts of it."""
        lane = self._lanes[fetch.tier]
        own = next(entry for entry in lane.requests if entry[0] is fetch)
        lane.requests.remove(own)
        if not missing:
            lane.rate.observe_request(fetch.nbytes, own[1], lane.answered, now)
        lane.answered = now
        self._there.update(part for part in fetch.parts if part not in missing)
        for chunk, part in missing:
            self._lose(chunk, part)
        for chunk, _ in fetch.parts:
            while self._have[chunk] < self._stored[chunk] and (chunk, self._have[chunk]) in self._there:
                self._have[chunk] += 1

    def decoded(self, now: float) -> None:
        """Note that the chunk that was to be decoded is."""
        what, begun = self._take_decoding()
        self._decoded[what.chunk] = what.parts
        self._decode.observe(*self._work(what), max(now - begun, 1e-6))

    def decode_failed(self, part: int) -> None:
        """Note that the chunk could not be decoded because of this part, which is not to be had."""
        what, _ = self._take_decoding()
        self._decoded[what.chunk] = 0  # nobody knows what was written
        self._lose(what.chunk, part)

    def _take_decoding(self) -> tuple[Decode, float]:
        if self._decoding is None:
            raise InputError("decoded: must follow a step that says what to decode")
        decoding, self._decoding = self._decoding, None
        return decoding

    def _lose(self, chunk: int, part: int) -> None:
        self._stored[chunk] = min(self._stored[chunk], part)
        self._have[chunk] = min(self._have[chunk], part)

    # What to do ----------------------------------------------------------------------------------------------------

    def next(self, now: float) -> Step:
        """Return what to do now."""
        plan = self._best(now)
        if self._decoding is None and all(self._decoded[chunk] > part for chunk, part in plan.parts):
            return Step(start=tuple(self._decoded[: plan.chunks]))
        decode = None if self._decoding else self._next_decode(plan)
        if decode is not None:
            self._decoding = decode, now
        return Step(tuple(self._fetches(plan.parts, now)), decode, wake=now + _WAKE_SECONDS)

    def _best(self, now: float) -> _Plan:
        """Return the plan that loses least of those in time even if everything is slow, or else of those expected in
        time, or else the one with which the first token is expected earliest.
        """
        loadable = self._stored.index(0) if 0 in self._stored else len(self._stored)
        for z in (_Z, 0.0):
            plans: list[_Plan] = []
            for chunks in range(loadable, -1, -max(loadable // _CANDIDATES, 1)):
                plan = self._plan(chunks, now, z)
                if plan is not None:
                    plans.append(plan)
                    if plan.end <= self._request.deadline and len(plan.parts) >= 2 * chunks:
                        break  # all chunks get better than their bases, so computing some counts for more
            plans += [plan for plan in [self._plan(0, now, z)] if plan is not None]
            in_time = [plan for plan in plans if plan.end <= self._request.deadline]
            if in_time:
                best = min(in_time, key=lambda plan: plan.loss)
                return best if z == 0 else self._plan(best.chunks, now, 0.0) or best
        return min(plans, key=lambda plan: plan.end)

    def _plan(self, chunks: int, now: float, z: float) -> _Plan | None:
        """Return the plan to load so many chunks if all is `z` deviations slower; None if the floor cannot be kept."""
        compute = _slow(self._prefill.spread) * self._prefill(*self._compute[chunks])
        last = max(self._request.deadline - compute, self._request.engine_free)
        slow = _slow(self._decode.spread, max(z, _Z))
        per_byte = {name: lane.per_byte(now, z) for name, lane in self._lanes.items()}
        free = {name: lane.free(now, per_byte[name]) for name, lane in self._lanes.items()}
        under_way = dict(free)
        decoder = now
        if self._decoding is not None:
            decoder = max(self._decoding[1] + self._decode(*self._work(self._decoding[0])), now)
        lost, floor = 0.0, (self._request.kl_max + 1e-9) * self._whole
        parts: list[_Where] = []
        for level in range(max(self._stored[:chunks], default=0)):
            for chunk in range(chunks):
                if self._stored[chunk] <= level:
                    continue
                own, part = self._chunks[chunk], (chunk, level)
                gain = own.tokens * (own.parts[level - 1].kl - own.parts[level].kl if level else -own.parts[0].kl)
                if self._decoded[chunk] <= level:
                    tier = own.parts[level].tier
                    arrival = now if part in self._there else under_way[tier]
                    if part not in self._asked:
                        free[tier] += per_byte[tier] * own.parts[level].nbytes
                        arrival = free[tier]
                    work = self._decode(*self._work(Decode(chunk, level + 1)))
                    if level and self._decoded[chunk] < level:  # it waits, and is decoded once, with all of its parts
                        work -= self._decode(*self._work(Decode(chunk, level)))
                    end = max(decoder, arrival) + slow * work
                    if level and end > last and lost <= floor:
                        return self._planned(chunks, parts, decoder, compute, lost)
                    decoder = end
                parts.append(part)
                lost -= gain
        return self._planned(chunks, parts, decoder, compute, lost) if lost <= floor else None

    def _planned(self, chunks: int, parts: list[_Where], loaded: float, compute: float, lost: float) -> _Plan:
        end = max(loaded, self._request.engine_free) + compute
        return _Plan(chunks, parts, end, lost + sum(map(self._price, range(chunks, len(self._chunks)))))

    def _price(self, chunk: int) -> float:
        """Return the nats that computing a chunk counts for: once its base is there, as many as that loses."""
        own = self._chunks[chunk]
        if not self._stored[chunk]:
            return 0.0
        refinable = self._stored[chunk] > 1 and not self._have[chunk]
        return own.tokens * max(
            (_COMPUTED if refinable else 1.0) * own.parts[0].kl, own.parts[self._stored[chunk] - 1].kl
        )

    def _fetches(self, planned: Sequence[_Where], now: float) -> Iterator[Fetch]:
        """Yield requests for the first parts that were not asked for, so that every tier is busy. No base waits for
        a refinement in the same request, which a store may not answer.
        """
        for name, lane in self._lanes.items():
            left = deque(
                (chunk, part) for chunk, part in planned
                if (chunk, part) not in self._asked and self._chunks[chunk].parts[part].tier == name
            )  # fmt: skip
            while left and len(lane.requests) < _UNDER_WAY:
                own: list[_Where] = []
                nbytes = 0
                while left and (not own or (left[0][1] == own[0][1] and nbytes < _REQUEST_SECONDS * lane.rate.rate)):
                    chunk, part = left.popleft()
                    own.append((chunk, part))
                    nbytes += self._chunks[chunk].parts[part].nbytes
                self._asked.update(own)
                lane.requests.append((Fetch(name, tuple(own), nbytes), now))
                yield lane.requests[-1][0]

    def _next_decode(self, plan: _Plan) -> Decode | None:
        """Return the next chunk to decode: of those without anything in place, one whose parts are complete, else one
        whose next part is not under way; if there is none, one to be improved.
        """
        levels = [0] * plan.chunks
        for chunk, part in plan.parts:
            levels[chunk] = max(levels[chunk], part + 1)
        ready = [
            (self._decoded[chunk] > 0, have < level, chunk, min(have, level))
            for chunk, (have, level) in enumerate(zip(self._have, levels, strict=False))
            if self._decoded[chunk] < min(have, level) and (have >= level or (chunk, have) not in self._asked)
        ]
        return Decode(*min(ready)[2:]) if ready else None

    def _work(self, what: Decode) -> tuple[float, float]:
        """Return the tokens and bytes of decoding, as `decode` counts."""
        own = self._chunks[what.chunk]
        return own.tokens, sum(part.nbytes for part in own.parts[: what.parts])


def _slow(spread: float, z: float = _Z) -> float:
    """Return the factor on a time that is exceeded in few cases."""
    return math.exp(z * spread)
