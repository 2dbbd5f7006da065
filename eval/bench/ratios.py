"""Summaries of repeated measurements: spreads, ratios within a turn, and where a ratio crosses 1."""

from __future__ import annotations

from collections.abc import Sequence

from cuvee.eval.timing import Timing

__all__ = ["crossing", "paired", "spread"]


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


def crossing(lengths: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return the length from which loading is faster: where the ratio of loading to recomputing falls below 1 for good.

    Between two lengths the ratio is taken to be linear in the logarithm of the length.

    Returns:
        Tokens; 0.0 if loading is faster at every length measured, None if it is not at the last one.
    """
    if ratios[-1] >= 1:
        return None
    slower = [index for index, ratio in enumerate(ratios) if ratio >= 1]
    if not slower:
        return 0.0
    at = slower[-1]
    share = (ratios[at] - 1) / (ratios[at] - ratios[at + 1])
    return float(lengths[at] * (lengths[at + 1] / lengths[at]) ** share)
