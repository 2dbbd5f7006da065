"""What is known while a prompt is loaded: which parts are there, under way or decoded, and when more would be.

Everything is in plain lists: a prompt has tens of chunks, for which one operation on an array takes as long as a loop,
and a plan compares many orders of them after every event, in the engine's process.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from cuvee.codec.errors import InputError
from cuvee.integrations.loading.costs import LinearCost, prefill_quantities
from cuvee.integrations.loading.links import LinkRate, seconds_left
from cuvee.integrations.loading.request import LoadRequest


@dataclass(frozen=True, slots=True)
class Fetch:
    """Parts to request from a tier in one call.

    Attributes:
        tier: its name.
        parts: chunk and part of each, from 0; part 0 is the base.
        nbytes: of all of them.
    """

    tier: str
    parts: tuple[tuple[int, int], ...]
    nbytes: int


@dataclass(slots=True)
class Lane:
    """The transfers of one tier: its requests in order, with the times at which they were sent.

    Attributes:
        rate: its measurements.
        requests: under way; they are answered in this order.
        answered: when the last one was answered.
    """

    rate: LinkRate
    requests: deque[tuple[Fetch, float]] = field(default_factory=deque)
    answered: float = -math.inf


class LoadState:
    """The parts of a prompt's chunks, in which a part has the number `chunk * most + part`.

    Attributes:
        most: parts of the chunk that has most.
        tokens: of each chunk.
        whole: tokens of all chunks.
        nbytes: of each part, 0 where there is none.
        bytes_up_to: by chunk and number of parts, bytes of so many.
        kl: by chunk and number of parts, nats per token of a chunk that is decoded from so many; infinite where there
            are not so many.
        tier: of each part, index into `lanes`.
        stored: parts of each chunk that a store has.
        there: which parts have arrived.
        have: parts of each chunk that have arrived and can be used: all before them have arrived, too.
        decoded: of how many parts each chunk's cache in the engine's memory is, or is about to be.
        decoder_free: when the decoder is expected to be done with what it was given.
        lanes: the transfers by tier.
    """

    def __init__(
        self, request: LoadRequest, links: Mapping[str, LinkRate], prefill: LinearCost, decode: LinearCost
    ) -> None:
        self.request, self.prefill, self.decode = request, prefill, decode
        chunks = request.chunks
        self.most = most = max(1, *(len(chunk.parts) for chunk in chunks))
        used = sorted({part.tier for chunk in chunks for part in chunk.parts})
        if unknown := [name for name in used if name not in links]:
            raise InputError(f"links: must have the rate of every tier, got none for {unknown[0]!r}")
        self.lanes = {name: Lane(links[name]) for name in used}
        self.tokens = [chunk.tokens for chunk in chunks]
        self.whole = sum(self.tokens)
        self.stored = [len(chunk.parts) for chunk in chunks]
        self.nbytes = [0] * (len(chunks) * most)
        self.tier = [0] * (len(chunks) * most)
        self.kl = [[math.inf] * (most + 1) for _ in chunks]
        for number, chunk in enumerate(chunks):
            for level, part in enumerate(chunk.parts):
                self.nbytes[number * most + level] = part.nbytes
                self.tier[number * most + level] = used.index(part.tier)
                self.kl[number][level + 1] = part.kl
        self.bytes_up_to = [
            list(accumulate(self.nbytes[chunk * most : (chunk + 1) * most], initial=0)) for chunk in range(len(chunks))
        ]
        self.there = [False] * (len(chunks) * most)
        self.have = [0] * len(chunks)
        self.decoded = [0] * len(chunks)
        self.decoder_free = -math.inf
        self._edges = [request.start + before for before in accumulate(self.tokens, initial=0)]

    @property
    def loadable(self) -> int:
        """The number of leading chunks of which a store has at least the base."""
        return self.stored.index(0) if 0 in self.stored else len(self.stored)

    def take(self, chunk: int, part: int) -> None:
        """Note that a part has arrived."""
        first = chunk * self.most
        self.there[first + part] = True
        own = self.there[first : first + self.most]
        self.have[chunk] = own.index(False) if False in own else self.most

    def lose(self, chunk: int, part: int) -> None:
        """Note that a part, and those that refine it, are not to be had."""
        for number in range(chunk * self.most + part, (chunk + 1) * self.most):
            self.there[number] = False
        self.have[chunk] = min(self.have[chunk], part)
        self.stored[chunk] = min(self.stored[chunk], part)

    def compute_seconds(self, chunks: int) -> float:
        """Return the expected seconds to compute everything behind so many loaded chunks, up to the first token."""
        return self.prefill(*prefill_quantities(self._edges[chunks], self._edges[-1] + self.request.rest))

    def decode_seconds(self, chunk: int, level: int) -> float:
        """Return the expected seconds to decode a chunk from so many of its parts."""
        return self.decode(self.tokens[chunk], self.bytes_up_to[chunk][level])

    def mean_kl(self, levels: Sequence[int]) -> float:
        """Return the expected nats per token of the prompt if its first chunks have so many parts each."""
        return sum(
            tokens * kl[level] for tokens, kl, level in zip(self.tokens, self.kl, levels, strict=False)
        ) / self.whole  # fmt: skip


class Timeline:
    """When parts would arrive and be decoded, at rates that are `z` standard deviations worse than expected.

    Args:
        state: what is there and under way.
        now: the time.
        ahead: seconds that the rates are forecast for.
        z: pessimism.

    Attributes:
        arrival: of each part that is under way.
    """

    def __init__(self, state: LoadState, now: float, ahead: float, z: float) -> None:
        self._state, self._now = state, now
        self.arrival: dict[int, float] = {}
        self._links: list[tuple[float, float]] = []  # when each is free, and its seconds per byte
        for lane in state.lanes.values():
            waiting, at = None, now + lane.rate.latency
            if lane.requests:
                fetch, sent = lane.requests[0]
                passed = now - max(sent + lane.rate.latency, lane.answered)
                waiting = fetch.nbytes, passed
            rate = lane.rate.forecast(ahead, waiting).at(z)
            for number, (fetch, _) in enumerate(lane.requests):
                if number == 0:
                    at = now + seconds_left(fetch.nbytes, passed, rate)
                else:
                    at += fetch.nbytes / rate
                for chunk, part in fetch.parts:
                    self.arrival[chunk * state.most + part] = at
            self._links.append((at, 1 / rate))

    def arrivals(self, order: Sequence[int]) -> list[float]:
        """Return when each part arrives if those that are not there, nor under way, are requested in this order."""
        there, tier, nbytes, under_way = self._state.there, self._state.tier, self._state.nbytes, self.arrival
        asked, arrival = [0] * len(self._links), []
        for number in order:
            if there[number]:
                arrival.append(self._now)
            elif number in under_way:
                arrival.append(under_way[number])
            else:
                link = tier[number]
                asked[link] += nbytes[number]
                free, per_byte = self._links[link]
                arrival.append(free + per_byte * asked[link])
        return arrival

    def loaded(
        self, chunks: int, order: Sequence[int], arrival: Sequence[float], slower: float = 1.0
    ) -> tuple[float, float, list[int]]:
        """Return when the first chunks are decoded from these parts, the same if decoding takes `slower` times as long,
        and of how many parts each chunk is then.

        The decoder takes one chunk after the other, as soon as the last of its parts is there.

        Args:
            chunks: how many are to be in place.
            order: parts that are to be decoded, none without those that it refines unless these are decoded.
            arrival: when each of them arrives.
            slower: factor on the time to decode.
        """
        state, most = self._state, self._state.most
        levels, ready = state.decoded[:chunks], [self._now] * chunks
        for number, at in zip(order, arrival, strict=True):
            chunk = number // most
            levels[chunk] += 1
            ready[chunk] = max(ready[chunk], at)
        if not chunks:
            return self._now, self._now, levels
        end = late = max(state.decoder_free, self._now)
        for at, chunk in sorted(zip(ready, range(chunks), strict=True)):
            if levels[chunk] > state.decoded[chunk]:
                work = state.decode_seconds(chunk, levels[chunk])
                end = (end if end > at else at) + work
                late = (late if late > at else at) + slower * work
        return end, late, levels

    def loaded_bases(self, bases: Sequence[int], most: int, slower: float = 1.0) -> list[float]:
        """Return for 0 to `most` chunks when so many are decoded if nothing but the bases they lack is fetched.

        Args:
            bases: parts that are bases, in order, of the chunks that are not decoded.
            most: chunks, at least those of the bases.
            slower: factor on the time to decode.
        """
        state = self._state
        arrival = {number // state.most: at for number, at in zip(bases, self.arrivals(bases), strict=True)}
        begin = end = max(state.decoder_free, self._now)
        ends = [self._now]
        queue: list[tuple[float, float]] = []
        for chunk in range(most):
            if chunk in arrival:
                job = max(arrival[chunk], self._now), slower * state.decode_seconds(chunk, 1)
                if not queue or job[0] >= queue[-1][0]:
                    queue.append(job)
                    end = max(end, job[0]) + job[1]
                else:  # from another tier, or asked for before
                    insort(queue, job)
                    end = begin
                    for at, work in queue:
                        end = max(end, at) + work
            ends.append(end)
        return ends
