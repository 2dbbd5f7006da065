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
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cuvee.integrations.loading.request import Compute, LoadRequest
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
        levels: parts to decode each of them from.
        order: parts to decode that are not decoded yet, by their numbers in `LoadState`, in the order of fetching; also
            those under way or there.
        first_token: when the first token is expected.
        kl: nats per token that the prompt is expected to lose.
        in_time: whether the deadline is expected to be met with the confidence asked for.
    """

    chunks: int
    levels: tuple[int, ...]
    order: tuple[int, ...]
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
        self._ahead = max(state.request.deadline - now, 0.05)
        self._expected = Timeline(state, now, self._ahead, 0.0)
        # What several comparisons need is made once.
        self._timelines: dict[float, Timeline] = {0.0: self._expected}
        self._bases_loaded: dict[tuple[float, float], list[float]] = {}
        self._orders: dict[int, tuple[list[int], list[float]]] = {}
        self._more: dict[int, int | None] = {}
        self._most = state.loadable
        self._bases = [chunk * state.most for chunk in range(self._most) if not state.decoded[chunk]]
        self._refinements = self._sorted_refinements()
        least = (
            tokens * kl[max(have, 1)] for tokens, kl, have in zip(state.tokens, state.kl, state.decoded, strict=True)
        )
        self._least = list(accumulate(least, initial=0.0))

    def _sorted_refinements(self) -> list[tuple[int, float]]:
        """Return the refinements that can be had, in the order of fetching, and the token-nats that each saves."""
        state, found = self._state, []
        per_byte = [1 / lane.rate.forecast(self._ahead).rate for lane in state.lanes.values()]
        for chunk in range(self._most):
            first, decoded, tokens, kl = chunk * state.most, state.decoded[chunk], state.tokens[chunk], state.kl[chunk]
            # With a chunk that is decoded already, all of it has to be decoded again.
            again = state.decode_seconds(chunk, decoded) if decoded else 0.0
            coming, before = True, math.inf
            for part in range(1, state.stored[chunk]):
                number = first + part
                # Nothing comes before what it refines, in the order of fetching either.
                if part == 1:
                    coming = decoded > 0 or state.there[first] or first in self._expected.arrival
                coming = coming and (part < decoded or state.there[number] or number in self._expected.arrival)
                if part < decoded:
                    continue
                # A part that is there need not be used: to decode a chunk once more takes time.
                fetching = 0.0 if state.there[number] else state.nbytes[number] * per_byte[state.tier[number]]
                gain = tokens * (kl[part] - kl[part + 1])
                seconds = fetching + state.decode.second * state.nbytes[number] + again
                before = min(before, gain / max(seconds, 1e-12))
                found.append((not coming, -before, part, number, gain))
        return [(number, gain) for *_, number, gain in sorted(found)]

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
                return self._choose(fits, before, in_time=factor == 1.0)
        return self._refined(min(candidates, key=lambda m: self._first_token(m, 0.0)), in_time=False)

    def _candidates(self, before: int | None) -> list[int]:
        """Return numbers of chunks to load, most first. 0 is among them: computing everything keeps every floor."""
        most, have = self._most, self._state.have
        steps = min(most, _MOST_CANDIDATES - 1)
        numbers = {int(most / steps * step) for step in range(steps)} | {most} if steps else {0}
        numbers.add(min(have.index(0) if 0 in have else most, most))  # without waiting for any other base
        if before is not None:
            numbers.add(min(before, most))
        return sorted(numbers, reverse=True)

    def _choose(self, fits: list[int], before: int | None, in_time: bool) -> Plan:
        if len(fits) == 1:
            return self._refined(fits[0], in_time)
        state = self._state
        # No plan for so many chunks loses less than with all of their parts.
        best_kl = list(
            accumulate(
                (tokens * kl[stored] for tokens, kl, stored in zip(state.tokens, state.kl, state.stored, strict=True)),
                initial=0.0,
            )
        )
        plans = {before: self._refined(before, in_time)} if before in fits else {}
        best = math.inf
        for m in sorted(fits, key=lambda m: best_kl[m]):
            if best_kl[m] * (1 - 1e-9) > best * state.whole:
                break
            plans[m] = plans.get(m) or self._refined(m, in_time)
            best = min(best, plans[m].kl)
        least = min(plans, key=lambda m: (plans[m].kl, -m))
        return plans[before if before in plans and best >= _WORTH_CHANGING * plans[before].kl else least]

    def _fits(self, m: int, factor: float, spare: float = 0.0) -> bool:
        """Return whether what is needed of `m` chunks is in time, with some seconds to spare; see `_first_token`."""
        return self._needed(m) is not None and self._first_token(m, factor) + spare <= self._state.request.deadline

    def _bases_of(self, m: int) -> list[int]:
        """Return the bases that the first `m` chunks lack."""
        return self._bases[: bisect_left(self._bases, m * self._state.most)]

    def _refinements_of(self, m: int) -> tuple[list[int], list[float]]:
        """Return the refinements of the first `m` chunks, and what each saves."""
        if m not in self._orders:
            own = [each for each in self._refinements if each[0] < m * self._state.most]
            self._orders[m] = [number for number, _ in own], [gain for _, gain in own]
        return self._orders[m]

    def _needed(self, m: int) -> int | None:
        """Return how many refinements of the first `m` chunks the floor needs, in their order; None: out of reach."""
        if m not in self._more:
            # Sums of the same numbers differ in their last digits.
            over = self._least[m] * (1 - 1e-9) - self._state.request.kl_max * self._state.whole
            more = 0
            if over > 0:
                saved = list(accumulate(self._refinements_of(m)[1]))
                more = bisect_left(saved, over) + 1
            self._more[m] = more if over <= 0 or more <= len(saved) else None
        return self._more[m]

    def _first_token(self, m: int, factor: float) -> float:
        """Return when the first token comes with only what is needed of `m` chunks.

        Args:
            m: number of chunks to load, for which the floor can be reached.
            factor: how many times as bad as may be things are; below 0: how much better than expected.

        Links, decoder and model are independent, so what each of them may lose adds up in squares.
        """
        state, request = self._state, self._state.request
        compute = state.compute_seconds(m)
        loaded = self._loaded(m, 0.0)
        first = max(loaded, request.engine_free) + compute
        if factor == 0 or (factor > 0) is (first > request.deadline):
            return first  # and what follows would not change on which side of the deadline that is
        z = factor * self._z
        slow = self._loaded(m, z), self._loaded(m, 0.0, math.exp(z * state.decode.spread))
        late = [max(each, request.engine_free) - max(loaded, request.engine_free) for each in slow]
        risk = math.hypot(*late, compute * (math.exp(z * state.prefill.spread) - 1))
        return first + math.copysign(risk, factor)

    def _loaded(self, m: int, z: float, slower: float = 1.0) -> float:
        """Return when what is needed of `m` chunks is decoded, by the links' pessimism and the decoder's factor."""
        more = self._needed(m) or 0
        if z not in self._timelines:
            self._timelines[z] = Timeline(self._state, self._now, self._ahead, z)
        timeline = self._timelines[z]
        if more:
            parts = self._bases_of(m) + self._refinements_of(m)[0][:more]
            return timeline.loaded(m, parts, timeline.arrivals(parts), slower)[1]
        if (z, slower) not in self._bases_loaded:
            self._bases_loaded[z, slower] = timeline.loaded_bases(self._bases, self._most, slower)
        return self._bases_loaded[z, slower][m]

    def _refined(self, m: int, in_time: bool) -> Plan:
        """Add as many refinements as there is time for."""
        state, request = self._state, self._state.request
        bases, refinements = self._bases_of(m), self._refinements_of(m)[0]
        order, needed = bases + refinements, len(bases) + (self._needed(m) or 0)
        compute = state.compute_seconds(m)
        at_risk = compute * (math.exp(self._z * state.prefill.spread) - 1)
        tries = _Tries(self._expected, m, math.exp(self._z * state.decode.spread), compute, at_risk, request)
        # A part arrives at the same time whatever follows it, so what is late by itself need not be tried.
        arrival = self._expected.arrivals(order)
        latest = max(request.engine_free, request.deadline - compute - at_risk)
        most = next((n for n in range(needed, len(order)) if arrival[n] > latest), len(order))
        count, found = tries.most(needed, most, most, lambda n: (order[:n], arrival[:n]))
        plan = self._made(m, found, compute, in_time)
        one = max((state.decode_seconds(chunk, level) for chunk, level in enumerate(found.levels)), default=0.0)
        decoder_bound = not count or found.loaded > max(arrival[:count]) + 1.5 * one
        if not decoder_bound or count == len(order):
            return plan
        best = self._settled(tries, order, needed, needed, count)
        if self._fits(m, 1.0, _AHEAD * (request.deadline - self._now)):
            best = min(best, self._settled(tries, order, 0, needed, count), key=lambda each: state.mean_kl(each.levels))
        made = self._made(m, best, compute, in_time)
        return made if made.kl < _WORTH_SETTLING * plan.kl else plan

    def _settled(self, tries: _Tries, order: list[int], fixed: int, least: int, guess: int) -> _Try:
        """Return the last try in time, parts behind the `fixed` first ones sorted by chunk."""

        def arranged(n: int) -> tuple[list[int], list[float]]:
            parts = order[:fixed] + sorted(order[fixed:n])
            return parts, self._expected.arrivals(parts)

        return tries.most(least, len(order), guess, arranged)[1]

    def _made(self, m: int, found: _Try, compute: float, in_time: bool) -> Plan:
        first_token = max(found.loaded, self._state.request.engine_free) + compute
        kl = self._state.mean_kl(found.levels)
        return Plan(m, tuple(found.levels), tuple(found.parts), first_token, kl, in_time)


@dataclass(frozen=True, slots=True)
class _Try:
    """Parts in an order of fetching, whether all is in time with them, when they are decoded, and parts per chunk."""

    parts: Sequence[int]
    in_time: bool
    loaded: float
    levels: Sequence[int]


class _Tries:
    """Tries how many of a plan's parts are in time.

    Links need no caution: what they do not bring in time is given up. What is being decoded or computed is not.

    Args:
        timeline: when parts arrive.
        m: chunks to load.
        slower: how many times as long decoding may take.
        compute: expected seconds from then to the first token.
        at_risk: how many seconds more these may be.
        request: with the deadline, and the time when the engine is free.
    """

    def __init__(
        self, timeline: Timeline, m: int, slower: float, compute: float, at_risk: float, request: LoadRequest
    ) -> None:
        self._timeline, self._m, self._slower, self._request = timeline, m, slower, request
        self._compute, self._at_risk = compute, at_risk

    def most(
        self, least: int, most: int, guess: int, arranged: Callable[[int], tuple[list[int], list[float]]]
    ) -> tuple[int, _Try]:
        """Return the largest number of parts that are in time, and the try: `least` if fewer would be, too.

        More parts never come earlier. The search goes from a guess, which is nearly right, in steps that double, and
        then halves what is left.

        Args:
            least: parts that are needed in any case.
            most: parts to try at most.
            guess: number to begin with.
            arranged: returns so many parts, in the order of fetching, and their arrivals.
        """
        tried: dict[int, _Try] = {}

        def in_time(n: int) -> bool:
            if n not in tried:
                tried[n] = self._try(*arranged(n))
            return tried[n].in_time

        low, high, step = least, most, 1
        middle = min(max(guess, low + 1), high)
        while low < high:
            if in_time(middle):
                low = middle
                middle = min(low + step, (low + high + 1) // 2)
            else:
                high = middle - 1
                middle = max(high - step + 1, (low + high + 1) // 2)
            step *= 2
        if low not in tried:
            tried[low] = self._try(*arranged(low))
        return low, tried[low]

    def _try(self, parts: list[int], arrival: list[float]) -> _Try:
        loaded, late, levels = self._timeline.loaded(self._m, parts, arrival, self._slower)
        request = self._request
        first = max(loaded, request.engine_free) + self._compute
        in_time = loaded <= request.engine_free or (
            first + math.hypot(late - loaded, self._at_risk) <= request.deadline
        )
        return _Try(parts, in_time, loaded, levels)
