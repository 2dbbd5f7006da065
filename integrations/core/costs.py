"""What computing, loading and decoding cost: a constant and two quantities, measured while serving.

computing  seconds = c + a * tokens + b * (stop ** 2 - start ** 2)     a step, and attention to all that is before
loading    seconds = c + a * tokens                                    a store's latency, and its bandwidth
decoding   seconds = c + a * tokens                                    calls, and entropy decoding
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

HALF_LIFE = 8  # samples after which a sample weighs half
_DECAY = 0.5 ** (1 / HALF_LIFE)
_SWEEPS = 4  # over the equations for each sample
# The weight of the initial coefficients, in samples. It has to be little: two quantities that grow together leave one
# combination of the coefficients nearly free, and that one goes where it is pulled.
_PULL = 0.01
_CONSTANT_PULL = 0.05  # more, because what samples of one size take is proportional rather than constant


class LinearCost:
    """Seconds as `constant + first * x + second * y`, fitted by least squares of relative errors. A sample weighs
    half after `HALF_LIFE` others.

    The initial coefficients hold until something is measured, and where samples do not tell one quantity from the
    other. No coefficient is ever negative. A sample that took a hundred times too long, because a kernel was compiled,
    counts little: its relative error is at most 1. Not thread-safe.

    Args:
        first: seconds per unit of `x`, initially.
        second: seconds per unit of `y`, initially.
        constant: seconds whatever the quantities, initially.

    Attributes:
        samples: number of samples so far.

    Example:
        >>> cost = LinearCost(1e-3, 0.0)
        >>> for tokens in (128, 512, 1024, 2048):
        ...     cost.observe(tokens, 0.0, 2e-3 * tokens)
        >>> round(cost(1000, 0.0), 2)
        2.0
    """

    def __init__(self, first: float, second: float, constant: float = 0.0) -> None:
        self.first, self.second, self.constant = first, second, constant
        self.samples = 0
        self._given = self.learned
        self._moments = [0.0] * 10  # of 1, x, y and seconds over the seconds of each sample, each of its weight

    def __call__(self, x: float, y: float) -> float:
        """Return the expected seconds."""
        return self.constant + self.marginal(x, y)

    def marginal(self, x: float, y: float) -> float:
        """Return the expected seconds by which this much more takes longer."""
        return self.first * x + self.second * y

    @property
    def learned(self) -> tuple[float, float, float]:
        """What `LinearCost(*learned)` expects as this one does."""
        return self.first, self.second, self.constant

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Note that `x` and `y` took `seconds`; what is no work, or took no time, tells nothing."""
        if not (0 <= x < math.inf and 0 <= y < math.inf and x + y > 0 and 0 < seconds < math.inf):
            return
        self.samples += 1
        products = combinations_with_replacement((1 / seconds, x / seconds, y / seconds, 1.0), 2)  # of `row`
        self._moments = [_DECAY * moment + of * by for moment, (of, by) in zip(self._moments, products, strict=True)]
        # The normal equations of `constant * row[0] + first * row[1] + second * row[2] = 1` for each row, solved one
        # after the other from the last solution on. No coefficient gets below 0.
        cc, ca, cb, c, aa, ab, a, bb, b, whole = self._moments
        first, second, constant = self.learned
        given_first, given_second, given_constant = self._given
        for_c, for_a, for_b = _CONSTANT_PULL * cc / whole, _PULL * aa / whole, _PULL * bb / whole  # whatever the units
        cc, aa, bb = cc + for_c, aa + for_a or 1.0, bb + for_b or 1.0  # 1: nothing was seen of a quantity
        c, a, b = c + for_c * given_constant, a + for_a * given_first, b + for_b * given_second
        for _ in range(_SWEEPS):
            first = best if (best := (a - ca * constant - ab * second) / aa) > 0 else 0.0  # in less time than by `max`
            second = best if (best := (b - cb * constant - ab * first) / bb) > 0 else 0.0
            constant = best if (best := (c - ca * first - cb * second) / cc) > 0 else 0.0
        self.first, self.second, self.constant = first, second, constant


def prefill_quantities(start: int, stop: int) -> tuple[float, float]:
    """Return the quantities of computing tokens `start … stop - 1` of a prompt: tokens, and what they look at."""
    return float(stop - start), float(stop**2 - start**2)
