"""Loads with a deadline: how many of a prompt's chunks to load, and how many of these with their refinements.

    chunks   |b|b|b|b|b|b|b|b| -> loaded -> | computed ->          b: base, r: refinement
             |r|r|r|                        ^
             refined                        in time for the first token

The policy is that of CacheGen with parts in place of levels: after every answer of the store the choice is made anew
from one measured rate per tier. The bases of the leading chunks come first, in order; then refinements, as long as they
can be there before the last moment at which the model can start in time. What follows the loaded chunks is computed:
where loading would be late, and where there is time to compute chunks of which only the base could be loaded.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cuvee.integrations.costs import LinearCost, prefill_quantities

_HALF_LIFE = 0.2  # seconds of transfer after which a sample of a link's rate weighs half
_SIZES = 16  # of parts that the mean is of
_GIVEN_SECONDS = 0.1  # of transfer that the initial rate counts for
_HICCUP = 0.02  # seconds by which an answer may be late because another thread or process has the core
_REFINED = 0.15  # what a chunk of both parts loses, over what its base alone loses
_COMPUTED = 0.75  # what computing a chunk counts for, on the same scale: the engine's time has other uses
_CANDIDATES = 12  # numbers of chunks that are compared
_Z = 1.64  # standard deviations by which what must be in time may be slower than expected: 5% of cases


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

    def observe(self, nbytes: int, sent: float, before: float, now: float) -> None:
        """Note that a request sent at one time was answered `now`, with so many bytes, and the one `before` it then."""
        whole = max(now - max(sent, before), 1e-6)
        if before <= sent:  # the latency is at most half of the time: else a quick answer would be an endless rate
            self.latency += (max(whole - nbytes / self.rate, 0.0) - self.latency) / 8
        seconds = max(now - max(sent + self.latency, before), whole / 2)
        decay = 0.5 ** (seconds / _HALF_LIFE)
        error = math.log(max(nbytes, 1) / seconds / self.rate)
        self.spread = math.sqrt(decay * self.spread**2 + (1 - decay) * error**2)
        fresh = (1 - decay) * _HALF_LIFE / math.log(2)
        self._bytes = decay * self._bytes + fresh * nbytes / seconds
        self._seconds = decay * self._seconds + fresh

    def overdue(self, nbytes: int, passed: float) -> float:
        """Return how much the spread grows, because a request for so many bytes has taken so long: a link that stalls
        has no samples.
        """
        return math.log(max(passed / (nbytes / self.rate + self.latency + _HICCUP), 1.0))


class PartSizes:
    """The bytes per token that parts of entries take, by the last ones. May be used from several threads.

    Args:
        parts: of an entry at most.
        guess: bytes per token of each, initially.
    """

    def __init__(self, parts: int, guess: float) -> None:
        self._means = [(guess, 0)] * parts

    def observe(self, tokens: int, number: int, nbytes: int) -> None:
        """Note the size of a part of an entry."""
        mean, seen = self._means[number]
        seen = min(seen + 1, _SIZES)
        self._means[number] = mean + (nbytes / tokens - mean) / seen, seen

    def expected(self, tokens: int, number: int) -> int:
        """Return the bytes to expect of a part of an entry."""
        return max(round(tokens * self._means[number][0]), 1)


@dataclass(frozen=True, slots=True)
class Goal:
    """A prompt whose first token is due.

    Attributes:
        deadline: of the first token, in seconds on the clock of `choose`. It may have passed.
        tokens: of each chunk that could be loaded, in order.
        prefill: seconds to compute, of `prefill_quantities`.
        start, rest: tokens of the prompt before the first chunk, and behind the last one, which are computed.
        engine_free: when the engine can begin with this prompt.
    """

    deadline: float
    tokens: Sequence[int]
    prefill: LinearCost
    start: int = 0
    rest: int = 1
    engine_free: float = -math.inf


@dataclass(frozen=True, slots=True)
class Choice:
    """Load so many leading chunks, the first `refined` with their refinements; the first token comes at `end`."""

    chunks: int
    refined: int
    end: float


def choose(
    goal: Goal, now: float, ready: float, loaded: int, bases: Sequence[float], refinements: Sequence[float],
    spread: float,
) -> Choice:  # fmt: skip
    """Return the choice that loses least of those in time even if everything is slow, or else of those expected in
    time, or else the one with which the first token is expected earliest.

    Bases have to be in time. Refinements may be left out at any moment, so it is enough if they are expected in time.

    Args:
        goal: what is asked for.
        now: seconds, on any clock.
        ready: when all that is under way will be there.
        loaded: number of leading chunks whose bases are there, which are loaded in any case.
        bases: seconds that fetching and decoding the base of each chunk takes from now on; 0 where it is there or under
            way.
        refinements: the same for refinements; 0 also where there is none.
        spread: standard deviation of the logarithm of these seconds.
    """
    edges = list(accumulate(goal.tokens, initial=goal.start))
    to_bases, to_refinements = list(accumulate(bases, initial=0.0)), list(accumulate(refinements, initial=0.0))
    count = len(goal.tokens)

    def option(chunks: int, z: float, z_prefill: float) -> tuple[float, Choice]:
        """Return a choice if all is `z` deviations slower, and what it loses."""
        slow, compute = math.exp(z * spread), math.exp(z_prefill * goal.prefill.spread)
        compute *= goal.prefill(*prefill_quantities(edges[chunks], edges[-1] + goal.rest))
        there = now + slow * (ready - now + to_bases[chunks])
        last = max(goal.deadline - compute - _HICCUP, goal.engine_free)
        refined = min(bisect_right(to_refinements, (last - there) / slow) - 1, chunks) if there <= last else 0
        loss = _REFINED * (edges[refined] - edges[0]) + edges[chunks] - edges[refined]
        loss += _COMPUTED * (edges[-1] - edges[chunks])
        return loss, Choice(chunks, refined, max(there, goal.engine_free) + compute)

    numbers = dict.fromkeys((*range(count, loaded, -max((count - loaded) // _CANDIDATES, 1)), loaded))
    for z in (_Z, 0.0):
        found = [option(chunks, z, z) for chunks in numbers]
        in_time = [each for each in found if each[1].end <= goal.deadline]
        if in_time:
            return option(min(in_time, key=lambda each: each[0])[1].chunks, 0.0, z)[1]
    return min((each for _, each in found), key=lambda each: each.end)
