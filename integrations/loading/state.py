"""What is known while a prompt is loaded: which parts are there, under way or decoded, and when more would be."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cuvee.codec.errors import InputError
from cuvee.codec.support.arrays import F64, I64
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
    answered: float = -np.inf


class LoadState:
    """The parts of a prompt's chunks as arrays, in which a part has the number `chunk * most + part`.

    Attributes:
        most: parts of the chunk that has most.
        tokens: int64 `[chunks]`.
        nbytes: int64 `[chunks * most]`, 0 where there is no part.
        kl: float64 `[chunks, most + 1]`, by the number of parts a chunk is decoded from; infinite where there are not
            so many.
        tier: int64 `[chunks * most]`, index into `lanes`.
        stored: int64 `[chunks]`, parts that a store has.
        there: bool `[chunks * most]`, which parts have arrived.
        have: int64 `[chunks]`, parts that have arrived and can be used: all before them have arrived, too.
        decoded: int64 `[chunks]`, of how many parts the cache in the engine's memory is, or is about to be.
        decoder_free: when the decoder is expected to be done with what it was given.
        lanes: the transfers by tier.
    """

    def __init__(
        self, request: LoadRequest, links: Mapping[str, LinkRate], prefill: LinearCost, decode: LinearCost
    ) -> None:
        self.request, self.prefill, self.decode = request, prefill, decode
        chunks = request.chunks
        self.most = max(1, *(len(chunk.parts) for chunk in chunks))
        used = sorted({part.tier for chunk in chunks for part in chunk.parts})
        if unknown := [name for name in used if name not in links]:
            raise InputError(f"links: must have the rate of every tier, got none for {unknown[0]!r}")
        self.lanes = {name: Lane(links[name]) for name in used}
        self.tokens = np.array([chunk.tokens for chunk in chunks], dtype=np.int64)
        self.stored = np.array([len(chunk.parts) for chunk in chunks], dtype=np.int64)
        self.nbytes = np.zeros(len(chunks) * self.most, dtype=np.int64)
        self.tier = np.zeros(len(chunks) * self.most, dtype=np.int64)
        self.kl = np.full((len(chunks), self.most + 1), np.inf)
        for number, chunk in enumerate(chunks):
            for level, part in enumerate(chunk.parts):
                self.nbytes[number * self.most + level] = part.nbytes
                self.tier[number * self.most + level] = used.index(part.tier)
                self.kl[number, level + 1] = part.kl
        self.there = np.zeros(len(chunks) * self.most, dtype=np.bool_)
        self.have = np.zeros(len(chunks), dtype=np.int64)
        self.decoded = np.zeros(len(chunks), dtype=np.int64)
        self.decoder_free = -np.inf
        whole = np.cumsum(self.nbytes.reshape(len(chunks), self.most), axis=1)
        self.bytes_up_to = np.hstack([np.zeros((len(chunks), 1), dtype=np.int64), whole])
        self._edges = request.start + np.concatenate([[0], np.cumsum(self.tokens)])

    @property
    def loadable(self) -> int:
        """The number of leading chunks of which a store has at least the base."""
        missing = np.flatnonzero(self.stored == 0)
        return int(missing[0]) if len(missing) else len(self.stored)

    def take(self, chunk: int, part: int) -> None:
        """Note that a part has arrived."""
        self.there[chunk * self.most + part] = True
        self.have[chunk] = self.levels(self.there)[chunk]

    def levels(self, there: NDArray[np.bool_]) -> I64:
        """Return how many parts of each chunk can be used of these; int64 `[chunks]`."""
        leading: I64 = np.cumprod(there.reshape(-1, self.most), axis=1, dtype=np.int64).sum(axis=1)
        return leading

    def lose(self, chunk: int, part: int) -> None:
        """Note that a part, and those that refine it, are not to be had."""
        self.there[chunk * self.most + part : (chunk + 1) * self.most] = False
        self.have[chunk] = min(self.have[chunk], part)
        self.stored[chunk] = min(self.stored[chunk], part)

    def compute_seconds(self, chunks: int) -> float:
        """Return the expected seconds to compute everything behind so many loaded chunks, up to the first token."""
        stop = int(self._edges[-1]) + self.request.rest
        return self.prefill(*prefill_quantities(int(self._edges[chunks]), stop))

    def decode_seconds(self, levels: I64) -> F64:
        """Return the expected seconds to decode each of the first chunks from so many of its parts."""
        count = len(levels)
        coded = self.bytes_up_to[np.arange(count), levels]
        seconds: F64 = self.decode.first * self.tokens[:count] + self.decode.second * coded
        return seconds

    def mean_kl(self, levels: I64) -> float:
        """Return the expected nats per token of the prompt if its first chunks have so many parts each."""
        count = len(levels)
        return float((self.tokens[:count] * self.kl[np.arange(count), levels]).sum() / self.tokens.sum())


class Timeline:
    """When parts would arrive and be decoded, at rates that are `z` standard deviations worse than expected.

    Args:
        state: what is there and under way.
        now: the time.
        ahead: seconds that the rates are forecast for.
        z: pessimism.
    """

    def __init__(self, state: LoadState, now: float, ahead: float, z: float) -> None:
        self._state, self._now = state, now
        self.arrival = np.full(len(state.nbytes), np.inf)  # of parts under way
        self._free, self._per_byte = [], []
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
            self._free.append(at)
            self._per_byte.append(1 / rate)

    def arrivals(self, order: I64) -> F64:
        """Return when each part arrives if those that are not there, nor under way, are requested in this order."""
        state, arrival = self._state, self.arrival[order]
        arrival[state.there[order]] = self._now
        for index, (free, per_byte) in enumerate(zip(self._free, self._per_byte, strict=True)):
            own = np.isinf(arrival) & (state.tier[order] == index)
            arrival[own] = free + per_byte * np.cumsum(state.nbytes[order[own]])
        return arrival

    def loaded(self, chunks: int, order: I64, arrival: F64, slower: float = 1.0) -> tuple[float, I64]:
        """Return when the first chunks are decoded from these parts and what is decoded, and from how many parts each.

        The decoder takes one chunk after the other, as soon as the last of its parts is there.

        Args:
            chunks: how many are to be in place.
            order: parts that are to be decoded.
            arrival: when each of them arrives.
            slower: factor on the time to decode.
        """
        state = self._state
        used = np.arange(state.most) < state.decoded[:, None]
        used.reshape(-1)[order] = True
        levels = state.levels(used)[:chunks]
        ready = np.full(chunks, self._now)
        np.maximum.at(ready, order // state.most, arrival)
        work = np.where(levels > state.decoded[:chunks], slower * state.decode_seconds(levels), 0.0)
        sequence = np.argsort(ready, kind="stable")
        work, ready = work[sequence], ready[sequence]
        # Each chunk ends no sooner than all work that was ready after it began: a maximum of sums from the back.
        rest = np.cumsum(work[::-1])[::-1]
        busy = work > 0
        end = max(state.decoder_free, self._now) + float(rest[0]) if chunks else self._now
        if busy.any():
            end = max(end, float((ready + rest)[busy].max()))
        return end, levels
