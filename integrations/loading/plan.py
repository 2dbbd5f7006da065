"""Which chunks of a prompt to load, which parts of each, and what to compute, as things are now.

An engine's prefix cache loads a prefix and computes the rest: a token can be computed only once everything before it is
in place, and engines do not compute between loads. So a plan is a number of leading chunks to load, and how many parts
of each; what follows is computed.

    |  chunk 0  |  chunk 1  | ...  |  chunk m-1  ||  chunk m   ...   |  rest  |
    |  base, refinement, …: fetched and decoded  ||  computed, at no loss     |
    now ----------------- loaded -------------------------- first token <= deadline

The bases of all m chunks come first, in order: whatever happens then, a prefix is there to go on from. Refinements
follow in the order of the nats that they save per second of link and decoder. Those that the floor needs are as
necessary as bases; the others are added as long as all is expected to be decoded in time, and given up when it is late.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cuvee.codec.support.arrays import F64, I64
from cuvee.integrations.loading.request import Compute
from cuvee.integrations.loading.state import LoadState, Timeline

_MOST_CANDIDATES = 24  # numbers of chunks to load that a plan compares
# Plans are to meet the deadline if things are so many times as bad as may be: the first of these that can be had. A
# plan that meets it only by good luck is better than one that never does.
_FACTORS = 1.0, 0.5, 0.0, -0.5
_WORTH_CHANGING = 0.95  # another number of chunks is worth it if the KL falls below this share
# Where decoding is slower than fetching, chunks should get all of their parts early: refinements come chunk by chunk,
# even before bases if these are safe with so much of the time to spare. Such an order is chosen if it brings the KL
# below this share: the order by nats is the better one to be interrupted in.
_WORTH_SETTLING = 0.97
_AHEAD = 0.15


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a prompt.

    Attributes:
        chunks: leading chunks to load.
        levels: int64 `[chunks]`, parts to decode each of them from.
        order: parts to decode that are not decoded yet, by their numbers in `LoadState`, in the order of fetching; also
            those under way or there.
        first_token: when the first token is expected.
        kl: nats per token that the prompt is expected to lose.
        in_time: whether the deadline is expected to be met with the confidence asked for.
    """

    chunks: int
    levels: I64
    order: I64
    first_token: float
    kl: float
    in_time: bool


def make_plan(state: LoadState, now: float, z: float, before: int | None = None, keep: bool = False) -> Plan:
    """Plan a load.

    Args:
        state: what is there and under way.
        now: the time.
        z: standard deviations by which rates and costs may be worse than expected without breaking the deadline.
        before: chunks that the last plan loads; it is changed only where it pays.
        keep: change it only where the deadline demands it, which saves most of the time that planning takes.
    """
    return _Planning(state, now, z).plan(before, keep)


class _Planning:
    """The comparison of plans at one moment."""

    def __init__(self, state: LoadState, now: float, z: float) -> None:
        self._state, self._now, self._z = state, now, z
        self._ahead = ahead = max(state.request.deadline - now, 0.05)
        self._expected = Timeline(state, now, ahead, 0.0)
        self._slow: dict[float, Timeline] = {}
        self._orders: dict[int, tuple[I64, int] | None] = {}
        number = np.arange(len(state.nbytes))
        chunk, part = number // state.most, number % state.most
        coming = state.there | np.isfinite(self._expected.arrival) | (part < state.decoded[chunk])
        # Nothing comes before what it refines, in the order of fetching either.
        coming = part < state.levels(coming)[chunk]
        # A part that is there need not be used: to decode a chunk once more takes time.
        open_ = (part >= state.decoded[chunk]) & (part < state.stored[chunk])
        self._bases = number[open_ & (part == 0)]
        refinements = number[open_ & (part > 0)]
        chunk, part = chunk[refinements], part[refinements]
        gain = state.tokens[chunk] * (state.kl[chunk, part] - state.kl[chunk, part + 1])
        worth = gain / np.maximum(self._seconds(refinements, chunk), 1e-12)
        for index in np.flatnonzero(part > 1):  # in the order of parts
            same = np.flatnonzero((chunk == chunk[index]) & (part == part[index] - 1))
            if len(same):
                worth[index] = min(worth[index], worth[same[0]])
        best = np.lexsort((part, -worth, ~coming[refinements]))
        self._refinements, self._gain = refinements[best], gain[best]

    def _seconds(self, refinements: I64, chunk: I64) -> F64:
        """Return what each refinement takes of the link and the decoder."""
        state = self._state
        per_byte = np.array([1 / lane.rate.forecast(self._ahead).rate for lane in state.lanes.values()] or [0.0])
        fetching = np.where(
            state.there[refinements], 0.0, state.nbytes[refinements] * per_byte[state.tier[refinements]]
        )
        # With a chunk that is decoded already, all of it has to be decoded again.
        again = (
            state.decode.first * state.tokens[chunk]
            + state.decode.second * state.bytes_up_to[chunk, state.decoded[chunk]]
        )
        seconds: F64 = fetching + state.decode.second * state.nbytes[refinements] + again * (state.decoded[chunk] > 0)
        return seconds

    def plan(self, before: int | None, keep: bool) -> Plan:
        """Choose the best plan."""
        state = self._state
        if keep and before is not None and before <= state.loadable and self._needed(before) is not None:
            if self._fits(before, 1.0):
                return self._refined(before, in_time=True)
            if self._now > state.request.deadline:  # it is late in any case
                return self._refined(before, in_time=False)
        candidates = [m for m in self._candidates(before) if self._needed(m) is not None]
        for factor in _FACTORS:
            if state.request.compute is Compute.NEEDED:
                fits = [next((m for m in candidates if self._fits(m, factor)), -1)]
            else:
                fits = [m for m in candidates if self._fits(m, factor)] or [-1]
            if fits[0] >= 0:
                return self._refined(self._choose(fits, before), in_time=factor == 1.0)
        return self._refined(min(candidates, key=lambda m: self._first_token(m, 0.0)), in_time=False)

    def _candidates(self, before: int | None) -> list[int]:
        """Return numbers of chunks to load, most first. 0 is among them: computing everything keeps every floor."""
        most = self._state.loadable
        numbers = set(np.linspace(0, most, min(most + 1, _MOST_CANDIDATES)).astype(int).tolist())
        missing = np.flatnonzero(self._state.have == 0)
        numbers.add(min(int(missing[0]) if len(missing) else most, most))  # without waiting for any other base
        if before is not None:
            numbers.add(min(before, most))
        return sorted(numbers, reverse=True)

    def _choose(self, fits: list[int], before: int | None) -> int:
        if len(fits) == 1:
            return fits[0]
        plans = {m: self._refined(m, in_time=True).kl for m in fits}
        best = min(fits, key=lambda m: (plans[m], -m))
        return before if before in plans and plans[best] >= _WORTH_CHANGING * plans[before] else best

    def _fits(self, m: int, factor: float, spare: float = 0.0) -> bool:
        """Return whether what is needed of `m` chunks is in time, with some seconds to spare; see `_first_token`."""
        return self._needed(m) is not None and self._first_token(m, factor) + spare <= self._state.request.deadline

    def _parts(self, m: int) -> tuple[I64, I64, F64]:
        """Return the bases and the refinements of the first chunks that are to be had, and what the latter save."""
        most = self._state.most
        own = self._refinements // most < m
        return self._bases[self._bases // most < m], self._refinements[own], self._gain[own]

    def _needed(self, m: int) -> tuple[I64, int] | None:
        """Return the order of fetching for `m` chunks, and how many parts of it the floor needs; None: out of reach."""
        if m not in self._orders:
            self._orders[m] = self._order(m)
        return self._orders[m]

    def _order(self, m: int) -> tuple[I64, int] | None:
        state = self._state
        bases, refinements, gain = self._parts(m)
        least = float(state.tokens[:m] @ state.kl[np.arange(m), np.maximum(state.decoded[:m], 1)])
        # Sums of the same numbers differ in their last digits.
        over = least * (1 - 1e-9) - state.request.kl_max * float(state.tokens.sum())
        more = int(np.searchsorted(np.cumsum(gain), over)) + 1 if over > 0 else 0
        return (np.concatenate([bases, refinements]), len(bases) + more) if more <= len(refinements) else None

    def _first_token(self, m: int, factor: float) -> float:
        """Return when the first token comes with only what is needed of `m` chunks.

        Args:
            m: number of chunks to load.
            factor: how many times as bad as may be things are; below 0: how much better than expected.

        Links, decoder and model are independent, so what each of them may lose adds up in squares.
        """
        state, request = self._state, self._state.request
        order, needed = self._needed(m) or (self._bases[:0], 0)
        parts = order[:needed]
        expected = self._expected.arrivals(parts)
        loaded, _ = self._expected.loaded(m, parts, expected)
        first = max(loaded, request.engine_free) + state.compute_seconds(m)
        if factor == 0 or (factor > 0) is (first > request.deadline):
            return first  # and what follows would not change on which side of the deadline that is
        z = factor * self._z
        if factor not in self._slow:
            self._slow[factor] = Timeline(state, self._now, self._ahead, z)
        slow_link, _ = self._slow[factor].loaded(m, parts, self._slow[factor].arrivals(parts))
        slow_decoder, _ = self._expected.loaded(m, parts, expected, math.exp(z * state.decode.spread))
        late = [max(each, request.engine_free) - max(loaded, request.engine_free) for each in (slow_link, slow_decoder)]
        risk = math.hypot(*late, state.compute_seconds(m) * (math.exp(z * state.prefill.spread) - 1))
        return first + math.copysign(risk, factor)

    def _refined(self, m: int, in_time: bool) -> Plan:
        """Add as many refinements as there is time for."""
        state, timeline, request = self._state, self._expected, self._state.request
        order, needed = self._needed(m) or (self._bases[:0], 0)
        compute = state.compute_seconds(m)
        at_risk = compute * (math.exp(self._z * state.prefill.spread) - 1)
        slower = math.exp(self._z * state.decode.spread)

        def of(sequence: I64) -> tuple[bool, Plan, bool]:
            """Return whether a sequence is in time, the plan that it makes, and whether it waits for the decoder.

            Links need no caution: what they do not bring in time is given up. What is being decoded or computed is not.
            """
            arrival = timeline.arrivals(sequence)
            loaded, levels = timeline.loaded(m, sequence, arrival)
            start = max(loaded, request.engine_free)
            plan = Plan(m, levels, sequence, start + compute, state.mean_kl(levels), in_time)
            one = float(state.decode_seconds(levels).max()) if m else 0.0
            waits = len(arrival) == 0 or loaded > float(arrival.max()) + 1.5 * one
            if loaded <= request.engine_free:
                return True, plan, waits
            late = timeline.loaded(m, sequence, arrival, slower)[0] - loaded
            return start + compute + math.hypot(late, at_risk) <= request.deadline, plan, waits

        def most_of(arrange: Callable[[I64], I64]) -> tuple[bool, Plan, bool]:
            low, high = needed, len(order)
            best = of(arrange(order[:needed]))
            while low < high:
                middle = (low + high + 1) // 2
                tried = of(arrange(order[:middle]))
                if tried[0]:
                    low, best = middle, tried
                else:
                    high = middle - 1
            return best

        _, plan, decoder_bound = most_of(lambda parts: parts)
        if not decoder_bound or len(plan.order) == len(order):
            return plan
        best = most_of(lambda parts: np.concatenate([parts[:needed], np.sort(parts[needed:])]))[1]
        if self._fits(m, 1.0, _AHEAD * (request.deadline - self._now)):
            best = min(best, most_of(np.sort)[1], key=lambda each: each.kl)
        return best if best.kl < _WORTH_SETTLING * plan.kl else plan
