"""What computing and decoding cost: lines through the origin in two quantities, measured, with their spread.

prefill   seconds = a * tokens + b * (stop ** 2 - start ** 2)     attention looks at everything before a token
decoding  seconds = a * tokens + b * bytes                        transform, and entropy decoding
"""

from __future__ import annotations

import math
from collections import deque

from cuvee.codec.errors import InputError

WINDOW = 32  # samples that are remembered
_HALF_LIFE = 8  # samples after which a sample weighs half
# What was given weighs so many samples. It has to be little: two quantities that grow together leave one combination of
# the coefficients nearly free, and that one goes where it is pulled.
_PULL = 0.01


class LinearCost:
    """Seconds as `first * x + second * y`, from measurements.

    What was given rules until something is measured, and where samples do not tell one quantity from the other. Old
    samples are forgotten. Neither coefficient is ever negative. Not thread-safe.

    Args:
        first: seconds per unit of `x`, to begin with.
        second: seconds per unit of `y`, to begin with.
        spread: standard deviation of a cost's logarithm, to begin with.

    Raises:
        InputError: a number is negative or not finite, or both coefficients are 0.
    """

    def __init__(self, first: float, second: float, spread: float = 0.2) -> None:
        for name, value in (("first", first), ("second", second), ("spread", spread)):
            check_number(name, value, positive=False)
        if first == 0 and second == 0:
            raise InputError("first, second: must be seconds, and one of them above 0, got 0 and 0")
        self.first, self.second, self.spread = first, second, spread
        self._given = first, second, spread
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)

    def __call__(self, x: float, y: float) -> float:
        """Return the expected seconds."""
        return self.first * x + self.second * y

    def observe(self, x: float, y: float, seconds: float) -> None:
        """Note that `x` and `y` took `seconds`.

        Raises:
            InputError: a quantity is negative, both are 0, or `seconds` is not positive and finite.
        """
        check_number("x", x, positive=False)
        check_number("y", y, positive=False)
        check_number("seconds", seconds)
        if x == 0 and y == 0:
            raise InputError("x, y: must not both be 0, since no work says nothing about its cost")
        self._samples.append((x, y, seconds))
        self._fit()

    def _fit(self) -> None:
        """Minimize the weighted squares of relative errors, with what was given as a weak pull on each coefficient."""
        # Plain Python: for so few samples, arrays take ten times as long, and a load fits after every chunk.
        weights = [0.5 ** (age / _HALF_LIFE) for age in reversed(range(len(self._samples)))]
        scaled = [(x / seconds, y / seconds) for x, y, seconds in self._samples]  # of a right line, a * u + b * v = 1
        uu = uv = vv = u_sum = v_sum = 0.0
        for weight, (u, v) in zip(weights, scaled, strict=True):
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
            for weight, (u, v) in zip(weights, scaled, strict=True)
        )
        given = 0.5 ** (len(weights) / _HALF_LIFE)  # the spread that was given counts as the oldest sample
        self.spread = math.sqrt((square + given * spread**2) / (whole + given))


def prefill_quantities(start: int, stop: int) -> tuple[float, float]:
    """Return the quantities of computing tokens `start … stop - 1` of a prompt: tokens, and what they look at."""
    return float(stop - start), float(stop**2 - start**2)


def check_number(name: str, value: float, positive: bool = True) -> None:
    """Refuse a number that is negative, not finite, or 0 where it must be positive.

    Raises:
        InputError: it is.
    """
    if not (0 < value < math.inf or (value == 0 and not positive)):
        raise InputError(f"{name}: must be finite and {'above' if positive else 'at least'} 0, got {value}")


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
