"""`LoadPlanner`: what to fetch, decode and start next, decided anew after every event of a load.

    arrived, failed, decoded, decode_failed, time passes --> LoadPlanner.next --> Step: fetch, decode, cancel, start

All times are seconds on one clock of the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import lt
from statistics import NormalDist

from cuvee.codec.errors import InputError
from cuvee.integrations.loading.costs import LinearCost
from cuvee.integrations.loading.links import HICCUP, LinkRate
from cuvee.integrations.loading.plan import Plan, make_plan
from cuvee.integrations.loading.request import LoadRequest
from cuvee.integrations.loading.state import Fetch, LoadState

CONFIDENCE = 0.95
# A request asks for what takes so long: a longer one brings nothing for the decoder until it is answered as a whole.
_BATCH_SECONDS = 0.01
# Requests under way last for so many latencies, so that the link is never idle until the next one is answered.
_LATENCIES = 2.0
_LEAST_DEPTH = 2  # requests under way
_LEAST_WAKE = 0.002  # seconds between two looks at a link that is silent
_CHOOSE_SHARE = 0.05  # of the time that is left passes before another number of chunks is considered without need
_WAKE_SHARE = 0.1  # of the time that is left passes at most without a look
_WAKE_OVERDUE = 0.25  # of the time that a request should take, or has taken, passes at most until it counts as late


@dataclass(frozen=True, slots=True)
class Decode:
    """A chunk to decode from its first `parts` parts. A later one of the same chunk replaces what this one wrote."""

    chunk: int
    parts: int


@dataclass(frozen=True, slots=True)
class Start:
    """Start the model: the first `chunks` chunks are in place, and everything behind them is to be computed.

    Attributes:
        chunks: number of loaded chunks.
        parts: of how many parts each of them is.
        kl: nats per token that the chunks of the prompt are expected to lose, in the mean over their tokens.
        in_time: whether the first token is expected by the deadline.
    """

    chunks: int
    parts: tuple[int, ...]
    kl: float
    in_time: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What to do now. After `start`, there are no more steps.

    Attributes:
        cancel: requests whose answers are of no use any more. Report nothing about them.
        fetch: requests to send.
        decode: what to give to the decoder, which has nothing else to do.
        start: the model, unless it has to wait.
        wake: call `next` again at this time if nothing has happened.
    """

    cancel: tuple[Fetch, ...]
    fetch: tuple[Fetch, ...]
    decode: Decode | None
    start: Start | None
    wake: float


class LoadPlanner:
    """Plans one load. Not thread-safe: call it from one thread.

    Equal events give equal decisions. A model is never started with a prompt that is expected to lose more than
    `kl_max`, however late it is; everything else gives way to the deadline.

    Attributes:
        canceled: parts that were requested and then given up.
        failed_parts: parts that were missing or damaged.

    Args:
        request: what to load.
        links: the rate of every tier, by name. They go on learning, and outlive the planner.
        prefill: seconds to compute tokens, of `prefill_quantities`.
        decode: seconds to decode, of tokens and bytes. It goes on learning, too.
        now: the time, in seconds, on the clock of `request.deadline`.
        confidence: share of deadlines to meet as far as it depends on the spread of rates; .5 or more, below 1.

    Raises:
        InputError: a tier has no rate, or `confidence` is out of range.

    Example:
        >>> from cuvee.integrations.loading import ChunkParts, LinearCost, LinkRate, LoadRequest, Part
        >>> chunks = [ChunkParts(256, (Part(90_000, 0.02, "redis"), Part(120_000, 0.005, "redis")))] * 2
        >>> links = {"redis": LinkRate(rate=4e6, latency=0.001)}
        >>> planner = LoadPlanner(
        ...     LoadRequest(tuple(chunks), deadline=0.5, kl_max=0.02),
        ...     links, LinearCost(1e-3, 0.0), LinearCost(1e-5, 1e-8), now=0.0,
        ... )  # fmt: skip
        >>> [fetch.parts for fetch in planner.next(0.0).fetch]
        [((0, 0),), ((1, 0),)]
    """

    def __init__(
        self,
        request: LoadRequest,
        links: Mapping[str, LinkRate],
        prefill: LinearCost,
        decode: LinearCost,
        now: float,
        confidence: float = CONFIDENCE,
    ) -> None:
        if not 0.5 <= confidence < 1:
            raise InputError(f"confidence: must be at least 0.5 and below 1, got {confidence}")
        self._state = LoadState(request, links, prefill, decode)
        self._z = NormalDist().inv_cdf(confidence)
        self._now = now
        self._plan: Plan | None = None
        self._chosen = -math.inf  # when the number of chunks was chosen
        self._decoding: tuple[Decode, float] | None = None  # and when it was given to the decoder
        self._started = False
        self.canceled = self.failed_parts = 0

    @property
    def plan(self) -> Plan | None:
        """The plan behind the last step."""
        return self._plan

    def next(self, now: float) -> Step:
        """Decide what to do now.

        Raises:
            InputError: the time runs backwards, or the model was started.
        """
        self._at(now)
        state = self._state
        before = None if self._plan is None else self._plan.chunks
        until = state.request.deadline if self._plan is None else max(state.request.deadline, self._plan.first_token)
        keep = now < self._chosen + _CHOOSE_SHARE * (until - self._chosen)
        plan = self._plan = make_plan(state, now, self._z, before, keep)
        if not keep or plan.chunks != before:
            self._chosen = now
        cancel = self._cancel(plan, now)
        fetch = self._fetch(plan, now)
        decode = self._decode(plan, now)
        start = None
        if not (plan.order or self._decoding or any(map(lt, state.decoded, plan.levels))):
            self._started = True
            start = Start(plan.chunks, plan.levels, plan.kl, plan.first_token <= state.request.deadline)
        return Step(cancel, fetch, decode, start, self._wake(plan, now))

    def arrived(self, fetch: Fetch, now: float) -> None:
        """Note that a request was answered, with all of its parts.

        Raises:
            InputError: it is not under way, or the time runs backwards.
        """
        self._answered(fetch, now, fetch.parts)

    def failed(self, fetch: Fetch, now: float, missing: tuple[tuple[int, int], ...]) -> None:
        """Note that a request was answered, but some of its parts are missing, damaged, or refine another base.

        Args:
            fetch: the request.
            now: the time.
            missing: these parts; what refines them is of no use either.

        Raises:
            InputError: it is not under way, does not contain such a part, or the time runs backwards.
        """
        if strange := [part for part in missing if part not in fetch.parts]:
            raise InputError(f"missing: must be parts of the request, got {strange[0]}")
        self._answered(fetch, now, tuple(part for part in fetch.parts if part not in missing))
        for chunk, part in missing:
            self.failed_parts += 1
            self._state.lose(chunk, part)

    def decoded(self, now: float) -> None:
        """Note that the decoder has finished what it was given.

        Raises:
            InputError: it was given nothing, or the time runs backwards.
        """
        self._at(now)
        if self._decoding is None:
            raise InputError("decoded: must follow a step that decodes, got no such step")
        state, (what, since) = self._state, self._decoding
        nbytes = state.bytes_up_to[what.chunk][what.parts]
        state.decode.observe(state.tokens[what.chunk], nbytes, max(now - since, 1e-6))
        self._decoding = None
        state.decoder_free = now

    def decode_failed(self, part: int, now: float) -> None:
        """Note that the decoder has given up on what it was given, because a part is damaged or refines another base.

        The chunk counts as not decoded at all: what was in its place may be overwritten.

        Args:
            part: which one of the chunk's; 0 is the base.
            now: the time.

        Raises:
            InputError: the decoder was given nothing, or not this part, or the time runs backwards.
        """
        self._at(now)
        if self._decoding is None or not 0 <= part < self._decoding[0].parts:
            raise InputError(f"part: must be one that is being decoded, got {part}")
        chunk = self._decoding[0].chunk
        self._decoding = None
        self._state.decoder_free = now
        self._state.decoded[chunk] = 0
        self._state.lose(chunk, part)
        self.failed_parts += 1

    def _at(self, now: float) -> None:
        if not now >= self._now:
            raise InputError(f"now: must not run backwards, got {now} after {self._now}")
        if self._started:
            raise InputError("planner: must not be used after the model was started: make one for each load")
        self._now = now

    def _answered(self, fetch: Fetch, now: float, parts: tuple[tuple[int, int], ...]) -> None:
        self._at(now)
        lane = self._state.lanes[fetch.tier]
        found = next(((each, sent) for each, sent in lane.requests if each is fetch), None)
        if found is None:
            raise InputError(f"fetch: must be under way, got {fetch}")
        lane.requests.remove(found)
        nbytes = sum(self._state.request.chunks[chunk].parts[part].nbytes for chunk, part in parts)
        if nbytes:  # an answer that brings nothing says nothing about the rate
            lane.rate.observe_request(nbytes, found[1], lane.answered, now)
        lane.answered = now
        for chunk, part in parts:
            self._state.take(chunk, part)

    def _cancel(self, plan: Plan, now: float) -> tuple[Fetch, ...]:
        """Give up the requests none of whose parts is in the plan."""
        wanted = set(plan.order)
        given_up = []
        for lane in self._state.lanes.values():
            for each, sent in list(lane.requests):
                if not any(chunk * self._state.most + part in wanted for chunk, part in each.parts):
                    if lane.requests[0][0] is each:
                        lane.rate.observe_canceled(each.nbytes, now - max(sent + lane.rate.latency, lane.answered))
                        lane.answered = now
                    lane.requests.remove((each, sent))
                    given_up.append(each)
                    self.canceled += len(each.parts)
        return tuple(given_up)

    def _fetch(self, plan: Plan, now: float) -> tuple[Fetch, ...]:
        state, fetches = self._state, []
        under_way = {
            chunk * state.most + part
            for lane in state.lanes.values()
            for each, _ in lane.requests
            for chunk, part in each.parts
        }
        for index, (name, lane) in enumerate(state.lanes.items()):
            ahead = [p for p in plan.order if state.tier[p] == index and not state.there[p] and p not in under_way]
            rate = lane.rate.forecast(max(state.request.deadline - now, 0.05)).rate
            enough = rate * (_LATENCIES * lane.rate.latency + _BATCH_SECONDS)
            waiting = sum(each.nbytes for each, _ in lane.requests)
            while ahead and (len(lane.requests) < _LEAST_DEPTH or waiting < enough):
                count, nbytes, is_base = 0, 0, ahead[0] % state.most == 0
                # Bases and refinements go apart: what is canceled must hold up nothing that is needed.
                while count < len(ahead) and (ahead[count] % state.most == 0) is is_base:
                    if count and nbytes >= rate * _BATCH_SECONDS:
                        break
                    nbytes += state.nbytes[ahead[count]]
                    count += 1
                batch, ahead = ahead[:count], ahead[count:]
                parts = tuple(divmod(number, state.most) for number in batch)
                fetches.append(Fetch(name, parts, nbytes))
                lane.requests.append((fetches[-1], now))
                waiting += fetches[-1].nbytes
        return tuple(fetches)

    def _decode(self, plan: Plan, now: float) -> Decode | None:
        """Give the decoder the first chunk that has all the parts that are planned for it."""
        state = self._state
        if self._decoding is not None:
            return None
        parts = zip(state.decoded, plan.levels, state.have, strict=False)
        chunk = next((chunk for chunk, (old, new, have) in enumerate(parts) if old < new <= have), None)
        if chunk is None:
            return None
        what = Decode(chunk, plan.levels[chunk])
        self._decoding = what, now
        state.decoded[chunk] = what.parts
        state.decoder_free = now + state.decode_seconds(chunk, what.parts)
        return what

    def _wake(self, plan: Plan, now: float) -> float:
        """Return when to look again although nothing has happened: links that are silent change plans, too."""
        start = max(self._state.request.deadline, plan.first_token) - self._state.compute_seconds(plan.chunks)
        waiting = any(lane.requests for lane in self._state.lanes.values())
        soon = (_WAKE_SHARE if waiting else 1.0) * (start - now)
        for lane in self._state.lanes.values():
            if lane.requests:
                fetch, sent = lane.requests[0]
                passed = now - max(sent + lane.rate.latency, lane.answered)
                due = fetch.nbytes / lane.rate.forecast(max(start - now, 0.05)).rate + HICCUP
                # Once overdue, every further quarter of the wait is evidence of a link that stalls.
                soon = min(soon, (1 + _WAKE_OVERDUE) * max(due, passed) - passed)
        return now + max(soon, _LEAST_WAKE)
