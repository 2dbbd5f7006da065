"""`LinkRate`: how fast a tier of a store delivers, how far that can be relied on, and for how long.

A forecast is for a span of time: a link that is on and off ten times a second is unpredictable for a tenth of a second
and steady for three, and one that changes with the hour is the other way round. So the spread is not that of samples,
it is the error of the forecasts themselves, measured per span:

    busy time  ---[ s ][ s ][  s  ][ s ]---    samples: bytes, seconds
                  |<---- span ---->|           ln(rate over the span / forecast at its beginning)  -> spread of the span

Several means with different memory run side by side. For each span the one that forecast best speaks: a short memory
follows a link that steps, a long one rides out bursts. Only time spent on transfers counts, so pauses change nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from cuvee.integrations.loading.costs import check_number

HALF_LIVES = 0.1, 0.4, 1.6, 6.4  # seconds of transfer after which a sample weighs half
SPANS = 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4  # seconds that forecasts are held to
_GIVEN_SECONDS = 0.1  # of transfer that the rate given counts for
_LEAST_WEIGHT = 1 / 16  # of the last error in the mean square: spreads follow a change within some ten spans
_LATENCY_WEIGHT = 1 / 8
# Of a request's time, latency is at most this share when its rate is measured: otherwise a latency that is estimated
# too high would make a rate without bound of a quick answer.
_MOST_LATENCY = 0.5
# A transfer that is overdue is taken to need this much more of the time that it has taken already.
_OVERDUE = 0.25
# Seconds by which an answer may be late for reasons that say nothing about the link: another thread has the
# interpreter, or another process the core. A transfer of a millisecond would otherwise seem to have stalled.
HICCUP = 0.02
_LEAST_SECONDS = 0.01  # that a transfer is taken to need, when it is asked how many times too late it is


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes per second, and the standard deviation of their logarithm."""

    rate: float
    spread: float

    def at(self, z: float) -> float:
        """Return the rate that is reached unless things are `z` standard deviations worse than expected."""
        return self.rate * math.exp(-z * self.spread)


class LinkRate:
    """Measures the rate of one link. Keep it as long as the link is used: a load begins with what the last ones saw.

    Loads at the same time each measure their share. Not thread-safe.

    Args:
        rate: bytes per second, to begin with.
        latency: seconds from a request until its first byte, to begin with.
        spread: standard deviation of the rate's logarithm, to begin with; .7: it may be half or twice as much.

    Raises:
        InputError: the rate is not positive, the latency or the spread is negative, or one is not finite. Leave the
            parts on a tier that does not answer out of a request instead of giving it a rate of 0.

    Example:
        >>> link = LinkRate(1e6, 0.0)
        >>> for _ in range(40):
        ...     link.observe(100_000, 0.05)  # twice as fast
        >>> round(link.forecast(1.0).rate / 1e6, 1)
        2.0
    """

    def __init__(self, rate: float, latency: float, spread: float = 0.7) -> None:
        check_number("rate", rate)
        check_number("latency", latency, positive=False)
        check_number("spread", spread, positive=False)
        self.latency = latency
        self._means = [(rate * _GIVEN_SECONDS, _GIVEN_SECONDS)] * len(HALF_LIVES)  # bytes, seconds
        self._spans = [_Span(seconds, rate, spread) for seconds in SPANS]

    def observe(self, nbytes: float, seconds: float) -> None:
        """Note that `nbytes` took `seconds` of transfer, without latency.

        Raises:
            InputError: a number is not positive and finite.
        """
        check_number("nbytes", nbytes)
        check_number("seconds", seconds)
        self._means = [_with(mean, half, nbytes, seconds) for mean, half in zip(self._means, HALF_LIVES, strict=True)]
        for span in self._spans:
            span.observe(nbytes, seconds, self._means)

    def observe_request(self, nbytes: int, sent: float, begun: float, now: float) -> None:
        """Note that a request was answered.

        Args:
            nbytes: that it brought.
            sent: when it was sent.
            begun: when the request before it was answered; earlier than `sent` if the link was idle.
            now: when it was answered. All times are seconds on one clock.
        """
        start = max(sent, begun)
        whole = max(now - start, 1e-6)
        first_byte = max(sent + self.latency, begun)
        self.observe(nbytes, max(now - first_byte, (1 - _MOST_LATENCY) * whole))
        if begun <= sent:
            latency = max(whole - nbytes / self.forecast(whole).rate, 0.0)
            self.latency += _LATENCY_WEIGHT * (latency - self.latency)

    def observe_canceled(self, nbytes: int, seconds: float) -> None:
        """Note that a request was given up after so many seconds of transfer. It says something only if it was overdue:
        then, what made it late must not be forgotten with it.
        """
        if seconds > HICCUP + nbytes / self.forecast(seconds).rate:
            self.observe(nbytes, seconds * (1 + _OVERDUE))

    def forecast(self, seconds: float, waiting: tuple[float, float] | None = None) -> Forecast:
        """Return the rate to expect over the next `seconds` of transfer.

        Args:
            seconds: how far to look ahead.
            waiting: bytes of a transfer that is under way, and the seconds since it began. Once it is overdue, it
                counts as evidence of a rate that is lower, and of forecasts that are wrong: a link that stalls has no
                samples.
        """
        span = self._spans[min(bisect_left(SPANS, seconds / math.sqrt(2)), len(SPANS) - 1)]
        best = span.squares.index(min(span.squares))
        mean, spread = self._means[best], math.sqrt(span.squares[best])
        if waiting is not None and waiting[1] > 0:
            nbytes, passed = waiting
            late = (passed - HICCUP) / max(nbytes * mean[1] / mean[0], _LEAST_SECONDS)
            if late > 1:
                mean = _with(mean, HALF_LIVES[best], nbytes, passed * (1 + _OVERDUE))
                spread = math.hypot(spread, math.log(late))
        return Forecast(mean[0] / mean[1], spread)


class _Span:
    """The errors of forecasts for one length of time, by the mean that made them.

    Attributes:
        squares: mean square of the error of each mean's logarithm.
    """

    __slots__ = ("_begun", "_bytes", "_errors", "_length", "_seconds", "squares")

    def __init__(self, length: float, rate: float, spread: float) -> None:
        self._length = length
        self.squares = [spread**2] * len(HALF_LIVES)
        self._errors = 0
        self._begun = [rate] * len(HALF_LIVES)  # what was forecast when the span began
        self._bytes = self._seconds = 0.0  # since then

    def observe(self, nbytes: float, seconds: float, means: list[tuple[float, float]]) -> None:
        """Add a transfer, and judge the forecasts if the span is over."""
        self._bytes += nbytes
        self._seconds += seconds
        if self._seconds < self._length:
            return
        rate = self._bytes / self._seconds
        weight = max(1 / (self._errors + 2), _LEAST_WEIGHT)
        self.squares = [
            square + weight * (math.log(rate / begun) ** 2 - square)
            for square, begun in zip(self.squares, self._begun, strict=True)
        ]
        self._errors += 1
        self._begun = [total / time for total, time in means]
        self._bytes = self._seconds = 0.0


def _with(mean: tuple[float, float], half_life: float, nbytes: float, seconds: float) -> tuple[float, float]:
    """Return the bytes and seconds of a mean after one more sample, each moment of which weighs by its age."""
    decay = 0.5 ** (seconds / half_life)
    fresh = half_life / math.log(2) * (1 - decay)
    return mean[0] * decay + nbytes / seconds * fresh, mean[1] * decay + fresh


def seconds_left(nbytes: float, passed: float, rate: float) -> float:
    """Return how long a transfer of `nbytes` still takes after `passed` seconds; it is never taken for done."""
    return max(nbytes / rate - passed, _OVERDUE * passed)
