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
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

HICCUP = 0.025  # seconds by which anything may be late because another thread or process has the core
_REFINED = 0.15  # what a chunk of both parts loses, over what its base alone loses
_COMPUTED = 0.75  # what computing a chunk counts for, on the same scale: the engine's time has other uses
_CANDIDATES = 12  # numbers of chunks that are compared
_HALF_LIFE, _HALF_AGE = 0.2, 0.5  # seconds of transfer, and of the clock, after which a rate's sample weighs half
_GIVEN = 0.1  # seconds for which the initial rate counts
_STALE = 60.0  # seconds without a sample after which a rate is forgotten
# Times that transfers and computing may take longer than expected where something must be in time.
_SLOW = 1.64, 1.28


class RecentRates:
    """Amounts per second, such as bytes of tiers, by the last samples; without any, those of `initial`, or `otherwise`.
    May be used from several threads.
    """

    def __init__(self, initial: Mapping[str, float], otherwise: float) -> None:
        self._initial, self._otherwise = initial, otherwise
        self._sums: dict[str, tuple[float, float, float]] = {}  # decayed amount and seconds, and the time of the last
        self._due: dict[str, float] = {}  # when a sample was due

    def __call__(self, name: str) -> float:
        """Return the amount per second to expect."""
        amount, seconds, _ = self._current(name)
        return amount / seconds

    def is_due(self, name: str, seconds: float) -> bool:
        """Return whether the caller is to get a sample: there was none for so long, nor was anybody told to get one."""
        now = time.monotonic()
        due = now - max(self._current(name)[2], self._due.get(name, -math.inf)) > seconds
        if due:
            self._due[name] = now
        return due

    def observe(self, name: str, amount: float, seconds: float) -> None:
        """Note what came in so many seconds."""
        (before, counted, last), now = self._current(name), time.monotonic()
        decay = 0.5 ** (seconds / _HALF_LIFE + (now - last if last > 0 else 0.0) / _HALF_AGE)
        self._sums[name] = decay * before + amount, decay * counted + max(seconds, 1e-6), now

    def _current(self, name: str) -> tuple[float, float, float]:
        amount, seconds, last = self._sums.get(name, (0.0, 0.0, -math.inf))
        if time.monotonic() - last > _STALE:
            return _GIVEN * self._initial.get(name, self._otherwise), _GIVEN, -math.inf
        return amount, seconds, last


class Choice(NamedTuple):
    """Load this many leading chunks, the first `refined` with their refinements."""

    chunks: int
    refined: int


def choose(
    left: float, edges: Sequence[int], compute: Callable[[int], float], under_way: float, loaded: int,
    bases: Sequence[float], refinements: Sequence[float],
) -> Choice:  # fmt: skip
    """Return the choice that loses least of those in time even if everything is slow, or else of those expected in
    time, or else the one with which the first token is expected earliest.

    Bases have to be in time. Refinements may be left out at any moment, so it is enough if they are expected in time.

    Args:
        left: seconds until the first token is due; negative: it is late.
        edges: of the chunks that could be loaded, in order: the first position of each, and the last one's end.
        compute: seconds to compute what follows so many of them.
        under_way: seconds until all that is under way is there.
        loaded: number of leading chunks whose bases are there, which are loaded in any case.
        bases: seconds that fetching and decoding the base of each chunk takes from now on; 0 where it is there or under
            way.
        refinements: the same for refinements; 0 also where there is none.
    """
    to_bases, to_refinements = list(accumulate(bases, initial=0.0)), list(accumulate(refinements, initial=0.0))
    count = len(bases)

    def judged(chunks: int) -> tuple[tuple[int, float], Choice]:
        """Return how bad a choice is: how often it is late of slow and expected, then what it loses, or its end."""
        waits = under_way if chunks > loaded or loaded == count else 0.0  # for no base that is not wanted
        there, computing = waits + to_bases[chunks], compute(chunks)
        late = sum(slow * there + slow_engine * computing > left for slow, slow_engine in (_SLOW, (1.0, 1.0)))
        slow, slow_engine = (1.0, 1.0) if late else _SLOW

        def refined(slow: float) -> int:
            spare = left - slow_engine * computing - HICCUP - slow * there
            return min(bisect_right(to_refinements, spare / slow) - 1, chunks) if spare >= 0 else 0

        end = edges[refined(slow)]
        loss = _REFINED * (end - edges[0]) + edges[chunks] - end + _COMPUTED * (edges[-1] - edges[chunks])
        return (late, there + computing if late > 1 else loss), Choice(chunks, refined(1.0))

    numbers = dict.fromkeys((*range(count, loaded, -max((count - loaded) // _CANDIDATES, 1)), loaded))
    return min(map(judged, numbers), key=lambda each: each[0])[1]
