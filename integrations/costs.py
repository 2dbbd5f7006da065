"""What computing, loading and decoding cost: lines in two quantities, measured while serving.

computing  seconds = a * tokens + b * (stop ** 2 - start ** 2)     attention looks at everything before a token
loading    seconds = a * 1      + b * tokens                       a store's latency, and its bandwidth
decoding   seconds = a * tokens + b * bytes                        transform, and entropy decoding
"""

from __future__ import annotations

import math
from collections import deque

from cuvee.codec.errors import InputError

WINDOW = 32  # samples that are remembered
_HALF_LIFE = 8  # samples after which a sample weighs half
# The weight of the initial coefficients, in samples. It has to be little: two quantities that grow together leave one
# combination of the coefficients nearly free, and that one goes where it is pulled.
_PULL = 0.01


class LinearCost:
    """Seconds as `first * x + second * y`, fitted to the last samples by weighted least squares of relative errors.

    The initial coefficients hold until something is measured, and where samples do not tell one quantity from the
    other. Neither coefficient is ever negative. A sample that took a hundred times too long, because a kernel was
    compiled, counts little: its relative error is at most 1. Not thread-safe.

    Args:
        first: seconds per unit of `x`, initially.
        second: seconds per unit of `y`, initially.
        spread: standard deviation of a cost's logarithm, initially.

    Attributes:
        samples: number of samples so far.

    Example:
        >>> cost = LinearCost(1e-3, 0.0)
        >>> for tokens in (128, 512, 1024, 2048):
        ...     cost.observe(tokens, 0.0, 2e-3 * tokens)
        >>> round(cost(1000, 0.0), 2)
        2.0
    """

    def __init__(self, first: float, second: float, spread: float = 0.2) -> None:
        self.first, self.second, self.spread = first, second, spread
        self.samples = 0
        self._given = first, second, spread
        self._window: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def __call__(self, x: float, y: float) -> float:
        """Return the expected seconds."""
        return self.first * x + self.second * y

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Note that `x` and `y` took `seconds`.

        Raises:
            InputError: a quantity is negative or not finite, both are 0, or `seconds` is not positive and finite.
        """
        if not (0 <= x < math.inf and 0 <= y < math.inf and x + y > 0 and 0 < seconds < math.inf):
            raise InputError(f"seconds: must be above 0 for some finite work, got {seconds} for {x} and {y}")
        self.samples += 1
        self._window.append((x / seconds, y / seconds))
        self._fit()

    def _fit(self) -> None:
        # Plain Python: for so few samples, arrays take ten times as long, and a load fits after every chunk.
        weights = [0.5 ** (age / _HALF_LIFE) for age in reversed(range(len(self._window)))]
        uu = uv = vv = u_sum = v_sum = 0.0
        for weight, (u, v) in zip(weights, self._window, strict=True):  # of a right line, first * u + second * v = 1
            uu, uv, vv = uu + weight * u * u, uv + weight * u * v, vv + weight * v * v
            u_sum, v_sum = u_sum + weight * u, v_sum + weight * v
        whole = sum(weights)
        pulls = _PULL * uu / whole, _PULL * vv / whole  # whatever the units
        first, second, spread = self._given
        self.first, self.second = _not_negative(
            (uu + pulls[0], uv, vv + pulls[1]), (u_sum + pulls[0] * first, v_sum + pulls[1] * second)
        )
        square = sum(
            weight * math.log(max(self.first * u + self.second * v, 1e-9)) ** 2
            for weight, (u, v) in zip(weights, self._window, strict=True)
        )
        given = 0.5 ** (len(weights) / _HALF_LIFE)  # the initial spread counts as the oldest sample
        self.spread = math.sqrt((square + given * spread**2) / (whole + given))


def prefill_quantities(start: int, stop: int) -> tuple[float, float]:
    """Return the quantities of computing tokens `start … stop - 1` of a prompt: tokens, and what they look at."""
    return float(stop - start), float(stop**2 - start**2)


def _not_negative(normal: tuple[float, float, float], right: tuple[float, float]) -> tuple[float, float]:
    """Solve two normal equations, `[[a, b], [b, c]]` as `a, b, c`, so that no coefficient is negative."""
    a, b, c = normal
    determinant = a * c - b * b
    if determinant > 1e-12 * a * c:
        first, second = (c * right[0] - b * right[1]) / determinant, (a * right[1] - b * right[0]) / determinant
        if first >= 0 and second >= 0:
            return first, second
    # The optimum lies on an edge: one coefficient is 0. Of both edges, take the better.
    edges = [max(r / n, 0.0) if n > 0 else 0.0 for r, n in zip(right, (a, c), strict=True)]
    return (edges[0], 0.0) if edges[0] * right[0] >= edges[1] * right[1] else (0.0, edges[1])
