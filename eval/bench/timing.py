"""Medians with the 20th and 80th percentiles, and ratios within a turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["paired", "rates", "spread"]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the 20th and 80th percentiles, and the number of values.

    Example:
        >>> spread([3.0, 1.0, 2.0])
        {'median': 2.0, 'p20': 1.4, 'p80': 2.6, 'runs': 3}
    """
    p20, median, p80 = np.quantile(values, [0.2, 0.5, 0.8]).tolist()
    return {"median": median, "p20": p20, "p80": p80, "runs": len(values)}


def rates(seconds: Sequence[float], amount: float) -> dict[str, float]:
    """Return the spread of the throughputs of runs that handle `amount` each."""
    return spread([amount / each for each in seconds])


def paired(these: Sequence[Sequence[float]], others: Sequence[float]) -> dict[str, float]:
    """Return the spread of the ratios of values to another value of the same turn.

    Args:
        these: several values per turn.
        others: one value per turn.
    """
    return spread([value / other for values, other in zip(these, others, strict=True) for value in values])
