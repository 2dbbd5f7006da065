"""Links whose bandwidth changes, as functions of time that repeat.

    constant   within 5 %
    bursty     full speed for .3 s, a tenth of it for .1 s, in the mean
    mobile     a logarithm that drifts (deviation .6, within a second), and an outage of .3 s every 8 s
    shared     equal shares with other loads, of which one begins every 2 s and takes 1.5 s
    stepping   between 1, 4, 16 and 64 MB/s, to a neighbor after a second

Each but the last is scaled to the link's mean. No published trace is used: these are models, with seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cuvee.codec.errors import InputError
from cuvee.codec.support.arrays import F64

__all__ = ["SPEEDS", "STEPPING", "TRACES", "Trace", "make_trace"]

SPEEDS = (1e6, 4e6, 16e6, 64e6)  # bytes per second
STEPPING = "stepping"
_STEP = 0.01  # seconds with one rate
_PERIOD = 60.0  # seconds
_COUNT = round(_PERIOD / _STEP)

Random = np.random.Generator


def _constant(random: Random) -> F64:
    return np.repeat(np.exp(0.05 * random.standard_normal(_COUNT // 10)), 10)


def _bursty(random: Random) -> F64:
    rates: list[F64] = []
    while sum(map(len, rates)) < _COUNT:
        rates.append(np.full(1 + int(random.exponential(0.3) / _STEP), 1.0))
        rates.append(np.full(1 + int(random.exponential(0.1) / _STEP), 0.1))
    return np.concatenate(rates)[:_COUNT]


def _mobile(random: Random) -> F64:
    keep = math.exp(-_STEP)
    noise = 0.6 * math.sqrt(1 - keep**2) * random.standard_normal(_COUNT)
    drift = np.empty(_COUNT)
    level = 0.6 * random.standard_normal()
    for at in range(_COUNT):
        level = keep * level + noise[at]
        drift[at] = level
    rates = np.exp(drift)
    begin = 0.0
    while (begin := begin + random.exponential(8.0)) < _PERIOD:
        rates[int(begin / _STEP) : int((begin + random.exponential(0.3)) / _STEP)] *= 0.02
    return rates


def _shared(random: Random) -> F64:
    others = np.zeros(_COUNT)
    begin = 0.0
    while (begin := begin + random.exponential(2.0)) < _PERIOD:
        others[int(begin / _STEP) : int((begin + random.exponential(1.5)) / _STEP)] += 1
    return 1 / (1 + others)


def _stepping(random: Random) -> F64:
    rates: list[F64] = []
    level = int(random.integers(len(SPEEDS)))
    while sum(map(len, rates)) < _COUNT:
        rates.append(np.full(1 + int(random.exponential(1.0) / _STEP), SPEEDS[level]))
        level = int(random.choice([each for each in (level - 1, level + 1) if 0 <= each < len(SPEEDS)]))
    return np.concatenate(rates)[:_COUNT]


TRACES: dict[str, Callable[[Random], F64]] = {
    "constant": _constant,
    "bursty": _bursty,
    "mobile": _mobile,
    "shared": _shared,
    STEPPING: _stepping,
}


class Trace:
    """A link's bandwidth.

    Args:
        rates: bytes per second in each hundredth of a second; they repeat.

    Raises:
        InputError: a rate is negative or not finite, or all are 0.
    """

    def __init__(self, rates: F64) -> None:
        if not (np.isfinite(rates).all() and (rates >= 0).all() and rates.any()):
            raise InputError("rates: must be finite and at least 0, and one of them above 0")
        self._sent = np.concatenate([[0.0], np.cumsum(rates * _STEP)])
        self._times = np.arange(len(self._sent)) * _STEP
        self._period = float(self._times[-1])
        self.mean = float(self._sent[-1] / self._period)

    def sent(self, time: float) -> float:
        """Return the bytes that the link can carry from time 0 to `time`, which may be negative."""
        periods, within = divmod(time, self._period)
        return float(periods * self._sent[-1] + np.interp(within, self._times, self._sent))

    def arrives(self, begin: float, nbytes: float) -> float:
        """Return when the last of `nbytes` arrives if the first may leave at `begin`."""
        periods, within = divmod(self.sent(begin) + nbytes, float(self._sent[-1]))
        after = int(np.searchsorted(self._sent, within))  # the first moment by which so much is sent
        time = self._times[after]
        if after:
            time -= _STEP * (self._sent[after] - within) / (self._sent[after] - self._sent[after - 1])
        return max(float(periods * self._period + time), begin)


def make_trace(kind: str, mean: float, seed: int) -> Trace:
    """Make the trace of a kind.

    Args:
        kind: one of `TRACES`.
        mean: bytes per second; "stepping" has its own.
        seed: of its random numbers.

    Raises:
        InputError: there is no such kind.
    """
    if kind not in TRACES:
        raise InputError(f"kind: must be one of {', '.join(TRACES)}, got {kind!r}")
    seeds: Any = [seed, list(TRACES).index(kind)]
    rates = TRACES[kind](np.random.default_rng(seeds))
    return Trace(rates if kind == STEPPING else rates * (mean / rates.mean()))
