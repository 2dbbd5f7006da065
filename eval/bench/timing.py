"""Timings: medians with the 20th and 80th percentiles, and ratios within a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Effort", "Timing", "paired", "spread"]


@dataclass(frozen=True, slots=True)
class Timing:
    """The quantiles of several runs, in seconds unless stated otherwise.

    Example:
        >>> Timing.of([3.0, 1.0, 2.0])
        Timing(median=2.0, p20=1.4, p80=2.6, runs=3)
    """

    median: float
    p20: float
    p80: float
    runs: int

    @classmethod
    def of(cls, runs: Sequence[float]) -> Timing:
        """The median and the 20th and 80th percentiles of at least one run."""
        p20, median, p80 = np.quantile(runs, [0.2, 0.5, 0.8]).tolist()
        return cls(median, p20, p80, len(runs))

    def per_second(self, amount: float) -> dict[str, float]:
        """The throughput of a call that handles `amount`. Its 20th percentile is the slower one."""
        return {"median": amount / self.median, "p20": amount / self.p80, "p80": amount / self.p20, "runs": self.runs}

    def to_dict(self) -> dict[str, float]:
        """A dict for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits on the time of a measurement.

    Attributes:
        seconds: a call is repeated for this long.
        least, most: but at least and at most this often.
    """

    seconds: float
    least: int
    most: int

    def is_enough(self, runs: Sequence[float]) -> bool:
        """Return whether these runs, in seconds, are enough."""
        return len(runs) >= self.least and (sum(runs) >= self.seconds or len(runs) >= self.most)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 20th and 80th percentiles, and the number of values."""
    return Timing.of(values).to_dict()


def paired(these: Sequence[Sequence[float]], others: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of values to another value of the same turn.

    Args:
        these: several values per turn.
        others: one value per turn.
    """
    return spread([value / other for values, other in zip(these, others, strict=True) for value in values])
