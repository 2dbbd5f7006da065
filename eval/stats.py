"""Sizes at equal loss, and how certain they are: what the report says beyond its measured points.

    KL (log)
     |  o                      a family with a dial: measured at some settings, linear between them in
     |    `-.                  (log bits, log KL)
     |       `o
     +- - - - - x- - - - - -A  an anchor: a method with one setting
     |           `-.
     |              `o         ratio at equal KL = bits of A / bits at x
     +------------------------ bits per value (log)

Between settings a curve is closer to a power law than to an exponential. This was tried on books-3m with presets and
whole octaves of the step, by leaving out each inner point and predicting the size at its KL from the others. The error
is 4.7% (one basis per layer) and 5.7% (one for all layers) in (log bits, log KL), against 10.1% and 9.9% in
(bits, log KL), which gives 6% and 5% too much on average.

Where points are closer than their noise, a measured curve may rise. Such neighbors are pooled: the closest decreasing
curve in log KL takes their place (isotonic regression), each pool at the mean of its logarithms. The lower envelope
would reward noise instead.

Intervals are bootstraps over sequences, expanded for small samples. Each draw takes the same sequences for all methods,
so what makes a sequence hard for all of them cancels. References: Efron and Tibshirani, An introduction to the
bootstrap, 1993; Barlow et al., Statistical inference under order restrictions, 1972.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from cuvee.codec.errors import InputError
from cuvee.codec.support.arrays import F64
from cuvee.codec.support.suggest import suggestion
from cuvee.learning.divergence import stderr

__all__ = [
    "DRAWS", "F64", "FamilyCurve", "Resamples", "bits_at_kl", "compare_at_equal_kl", "exceeds", "interval",
    "of_sequences", "paired_difference", "sizes_at_kl",
]  # fmt: skip

DRAWS = 1000
_EQUAL = 1e-9  # relative: what rounding may leave between a difference and its errors
_LEAST_KL = 1e-12  # nats; with float32 log-probabilities anything smaller cannot be told from zero


@dataclass(frozen=True, slots=True, eq=False)
class FamilyCurve:
    """The size and the KL of one family's settings on each sequence.

    Attributes:
        bits: bits per value, float64 `[settings, sequences]`, in any order of settings.
        kl: nats per token, of the same shape.

    Raises:
        InputError: the shapes differ, a size is not positive, or a number is not finite.
    """

    bits: F64
    kl: F64

    def __post_init__(self) -> None:
        if self.bits.ndim != 2 or self.bits.shape != self.kl.shape or 0 in self.bits.shape:
            raise InputError(f"kl: must be [settings, sequences] as bits, got {self.kl.shape} and {self.bits.shape}")
        if not (np.isfinite(self.bits).all() and np.isfinite(self.kl).all() and (self.bits > 0).all()):
            raise InputError("bits: must be positive and kl finite, got others")

    @classmethod
    def of(cls, entries: Sequence[Mapping[str, Any]]) -> FamilyCurve:
        """The curve through entries of a report's "quality"."""
        bits, kl = (
            np.array([entry["per_sequence"][name] for entry in entries], np.float64)
            for name in ("bits_per_value", "kl")
        )
        return cls(bits, kl)


def bits_at_kl(bits: Sequence[float] | F64, kl: Sequence[float] | F64, target: float) -> float | None:
    """Read off a measured curve at which size it has a given KL.

    The size is interpolated in (log bits, log KL) after neighbors that rise are pooled, as the docstring of this
    module says. Points with a KL of zero or below are left out, because that has no logarithm.

    Args:
        bits: bits per value of each point, positive, in any order.
        kl: nats per token of each point.
        target: the KL, nats per token.

    Returns:
        Bits per value; None if the curve does not reach `target`. Nothing is extrapolated.

    Raises:
        InputError: `bits` and `kl` differ in length, or hold numbers that a curve cannot have.

    Example:
        >>> from cuvee.eval.stats import bits_at_kl
        >>> round(bits_at_kl([4.0, 1.0], [0.001, 0.004], 0.002), 6)
        2.0
        >>> bits_at_kl([4.0, 1.0], [0.001, 0.004], 0.1) is None
        True
    """
    curve = FamilyCurve(np.array(bits, np.float64, ndmin=2).T, np.array(kl, np.float64, ndmin=2).T)
    measured = curve.kl[:, 0] > 0
    if target <= 0 or not measured.any():
        return None
    found = _size(curve.bits[measured].T, curve.kl[measured].T, np.array([target]))[0]
    return float(found) if 0 < found < np.inf else None


def compare_at_equal_kl(
    quality: Sequence[Mapping[str, Any]], anchors: Sequence[str], seed: int, draws: int = DRAWS
) -> list[dict[str, Any]]:
    """Compare the sizes of all families at the KL of each anchor: the "comparison" of a report.

    A family is all entries with the same "family". Families with a single setting have no curve and are left out. If
    an end of an interval lies where a curve was not measured, it is None.

    Args:
        quality: the report's entries: key, family, bits_per_value, kl and per_sequence of each.
        anchors: keys of entries.
        seed: of the bootstrap.
        draws: bootstrap samples.

    Returns:
        For each anchor: its KL and bits per value; for each family its bits per value at that KL with `low` and
        `high`, or None and a `reason`; and the ratios of each of cuvee's families to the anchor and to each other
        curve.

    Raises:
        InputError: an anchor that is not among the entries, or entries of different sequences.
    """
    entries = {str(entry["key"]): entry for entry in quality}
    for anchor in anchors:
        if anchor not in entries:
            raise InputError(f"anchors: {anchor!r} was not measured; {suggestion(anchor, entries)}")
    if not anchors:
        return []
    members: dict[str, list[Mapping[str, Any]]] = {}
    for entry in quality:
        members.setdefault(str(entry["family"]), []).append(entry)
    curves = {family: FamilyCurve.of(found) for family, found in members.items() if len(found) > 1}
    sample = Resamples(len(entries[anchors[0]]["per_sequence"]["kl"]), draws, seed)
    return [_at_anchor(entries[anchor], curves, sample) for anchor in anchors]


def of_sequences(quality: Sequence[Mapping[str, Any]], chosen: Sequence[int]) -> list[dict[str, Any]]:
    """Entries of a report as if only some of its sequences had been measured.

    Args:
        quality: as in `compare_at_equal_kl`.
        chosen: indices of sequences.

    Returns:
        Entries with key, family, and the bits_per_value, kl and per_sequence of these sequences.

    Raises:
        InputError: no sequence is chosen, or a chosen sequence was not measured.
    """
    if not chosen:
        raise InputError("chosen: must name at least one sequence")
    found = []
    for entry in quality:
        lists = {name: entry["per_sequence"][name] for name in ("bits_per_value", "kl")}
        if max(chosen) >= len(lists["kl"]) or min(chosen) < 0:
            raise InputError(f"chosen: {entry['key']} has sequences 0 to {len(lists['kl']) - 1}, got {list(chosen)}")
        kept = {name: [values[index] for index in chosen] for name, values in lists.items()}
        means = {name: float(np.mean(values)) for name, values in kept.items()}
        found.append({"key": entry["key"], "family": entry["family"], **means, "per_sequence": kept})
    return found


def sizes_at_kl(quality: Sequence[Mapping[str, Any]], kls: Sequence[float]) -> list[dict[str, Any]]:
    """The size of each family that has a curve at given KLs.

    Args:
        quality: as in `compare_at_equal_kl`.
        kls: nats per token.

    Returns:
        For each family and KL, in this order: "family", "kl", and "bits_per_value", None where the curve was not
        measured.
    """
    members: dict[str, list[Mapping[str, Any]]] = {}
    for entry in quality:
        members.setdefault(str(entry["family"]), []).append(entry)
    found = []
    for family, entries in members.items():
        if len(entries) < 2:
            continue
        curve = FamilyCurve.of(entries)
        for kl in kls:
            size = bits_at_kl(curve.bits.mean(1), curve.kl.mean(1), kl)
            found.append({"family": family, "kl": kl, "bits_per_value": size})
    return found


def paired_difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None]:
    """The mean of `a - b`, entry by entry, and its standard error, which is None for a single entry.

    Raises:
        InputError: there are no entries, or not as many in `a` as in `b`.

    Example:
        >>> from cuvee.eval.stats import paired_difference
        >>> paired_difference([3.0, 5.0, 4.0], [1.0, 3.0, 2.0])
        (2.0, 0.0)
    """
    if not len(a) or len(a) != len(b):
        raise InputError(f"b: must have as many entries as a, at least one, got {len(a)} and {len(b)}")
    difference = np.subtract(a, b, dtype=np.float64)
    return float(difference.mean()), stderr(difference.tolist())


def exceeds(difference: float, errors: float) -> bool:
    """Return whether a difference is larger than some of its standard errors, and not merely so by rounding.

    What a single document changes is exactly one standard error.

    Args:
        difference: of either sign.
        errors: the standard error, times the number of them.

    Example:
        >>> from cuvee.eval.stats import exceeds
        >>> 0.1 + 0.2 > 2 * 0.15, exceeds(0.1 + 0.2, 2 * 0.15)
        (True, False)
    """
    return abs(difference) > (1 + _EQUAL) * errors


class Resamples:
    """Sequences drawn with replacement, the same ones for every method.

    Args:
        sequences: how many there are, and how many each draw takes.
        draws: how many draws.
        seed: of the draws.

    Raises:
        InputError: `draws` is below 1.
    """

    def __init__(self, sequences: int, draws: int, seed: int) -> None:
        if draws < 1:
            raise InputError(f"draws: must be at least 1, got {draws}")
        self.sequences = sequences
        generator = np.random.Generator(np.random.PCG64(seed))
        even = np.full(sequences, 1 / sequences)
        # How often each sequence is in each draw: [draws, sequences].
        self.weights: F64 = generator.multinomial(sequences, even, size=draws) / sequences

    def mean(self, per_sequence: Sequence[float] | F64) -> F64:
        """The mean over each draw: `[..., sequences]` -> `[draws, ...]`."""
        values = np.asarray(per_sequence, np.float64)
        if values.shape[-1] != self.weights.shape[1]:
            raise InputError(
                f"sequences: methods must be measured on the same, got {values.shape[-1]} and {self.weights.shape[1]}"
            )
        means: F64 = self.weights @ values.T
        return means

    def size(self, curve: FamilyCurve, target: F64) -> F64:
        """Bits per value at `target [draws]`, where each draw has a curve of its own. See `_size`."""
        measured = curve.kl.mean(1) > 0
        if not measured.any():
            return np.full(len(target), np.nan)
        return _size(self.mean(curve.bits[measured]), self.mean(curve.kl[measured]), target)


def _at_anchor(anchor: Mapping[str, Any], curves: Mapping[str, FamilyCurve], sample: Resamples) -> dict[str, Any]:
    key, kl, bits = str(anchor["key"]), float(anchor["kl"]), float(anchor["bits_per_value"])
    target = sample.mean(anchor["per_sequence"]["kl"])
    estimates: dict[str, float | None] = {key: bits}
    sizes: dict[str, F64] = {key: sample.mean(anchor["per_sequence"]["bits_per_value"])}
    reasons: dict[str, str] = {}
    families: list[dict[str, Any]] = []
    for family, curve in curves.items():
        means = curve.bits.mean(1), curve.kl.mean(1)
        estimates[family], sizes[family] = bits_at_kl(*means, kl), sample.size(curve, target)
        entry = {"family": family, "bits_per_value": estimates[family], "low": None, "high": None}
        if estimates[family] is None:
            reasons[family] = entry["reason"] = _reason(*means, kl)
        else:
            entry["low"], entry["high"] = interval(sizes[family], sample.sequences)
        families.append(entry)
    ratios = []
    others = [key, *(family for family in curves if not _is_ours(family))]
    for family in filter(_is_ours, curves):
        for other in others:
            above, below = estimates[other], estimates[family]
            entry = {"of": family, "against": other, "ratio": None, "low": None, "high": None}
            if above is None or below is None:
                entry["reason"] = "; ".join(f"{name}: {reasons[name]}" for name in (family, other) if name in reasons)
            else:
                entry["ratio"] = above / below
                entry["low"], entry["high"] = interval(_over(sizes[other], sizes[family]), sample.sequences)
            ratios.append(entry)
    return {"anchor": key, "kl": kl, "bits_per_value": bits, "families": families, "ratios": ratios}


def _is_ours(family: str) -> bool:
    return family.startswith("cuvee/")


def _reason(bits: F64, kl: F64, target: float) -> str:
    """Explain why a curve does not reach a KL."""
    if target <= 0:
        return f"a KL of {target:.3g} has no place on a logarithmic axis"
    measured = kl > 0
    if not measured.any():
        return "no setting has a KL above zero"
    most, least = np.exp(_curve(bits[None, measured], kl[None, measured])[1][0, [0, -1]])
    end, value = ("above", least) if target < least else ("below", most)
    return f"its curve ends {end}, at a KL of {value:.3g}"


def _size(bits: F64, kl: F64, target: F64) -> F64:
    """Bits at `target [draws]` on the curves `bits, kl [draws, points]`; 0 left of a curve, infinity right of it."""
    x, y = _curve(bits, kl)
    wanted = np.log(np.maximum(target, _LEAST_KL))[:, None]
    below = y <= wanted
    right = below.argmax(1)[:, None]  # the first point that is good enough, if there is one
    left = np.maximum(right - 1, 0)
    x0, x1, y0, y1 = (np.take_along_axis(a, i, 1) for a in (x, y) for i in (left, right))
    share = np.divide(y0 - wanted, y0 - y1, out=np.ones_like(y0), where=y0 > y1)
    found = np.exp(x0 + share * (x1 - x0))
    found = np.where(y[:, :1] < wanted, 0.0, found)
    out: F64 = np.where(below.any(1, keepdims=True), found, np.inf)[:, 0]
    return out


def _curve(bits: F64, kl: F64) -> tuple[F64, F64]:
    """Log bits, in rising order, and log KL, made to fall, of curves `[draws, points]`."""
    order = bits.argsort(1, kind="stable")
    x = np.log(np.take_along_axis(bits, order, 1))
    y = np.log(np.maximum(np.take_along_axis(kl, order, 1), _LEAST_KL))
    rising = (np.diff(y, axis=1) >= 0).any(1)
    x[rising], y[rising] = _pooled(x[rising], y[rising])
    return x, y


def _pooled(x: F64, y: F64) -> tuple[F64, F64]:
    """The closest decreasing `y [draws, points]`, by least squares; points that share a value share their mean `x`."""
    points = y.shape[1]
    sums = np.concatenate([np.zeros((len(y), 1)), y.cumsum(1)], 1)
    first, last = np.indices((points, points))
    means = (sums[:, None, 1:] - sums[:, :-1, None]) / np.maximum(last - first + 1, 1)  # of first … last
    diagonal = np.arange(points)
    means[:, diagonal, diagonal] = y  # exact, as the differences of sums are not
    # Min-max formula: min over first <= i of max over last >= i.
    largest = np.maximum.accumulate(means[:, :, ::-1], 2)[:, :, ::-1]
    largest[:, first > last] = np.inf
    level: F64 = largest.min(1)
    same = level[:, :, None] == level[:, None, :]
    return np.where(same, x[:, None, :], 0.0).sum(2) / same.sum(2), level


def _over(above: F64, below: F64) -> F64:
    """A ratio of sizes, which is NaN if both lie beyond the same end of their curves."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return above / below


def interval(drawn: F64, sequences: int) -> tuple[float | None, float | None]:
    """Ends of the 95% interval of what was found in each draw; None for an end outside what was measured.

    The 2.5% and 97.5% percentiles cover only 88% at ten sequences: draws of n vary less than samples do, by
    sqrt((n - 1) / n), and know nothing of the uncertainty of that variance, nor of skew. Percentiles further out (the
    normal tail at Student's quantile times n / (n - 1)) cover 93% or more. Reference: Hesterberg, What teachers should
    know about the bootstrap, 2015; his factor is the square root of this one, and covers one point less.

    Args:
        drawn: one number per draw: 0 below all that was measured, infinity above, NaN where it could be anything: that
            widens both ends.
        sequences: in each draw.
    """
    tail = _expanded_tail(sequences)
    unknown = np.isnan(drawn)
    # No interpolation: a quantile between a finite and an infinite draw would be infinite.
    low = np.quantile(np.where(unknown, 0.0, drawn), tail, method="lower")
    high = np.quantile(np.where(unknown, np.inf, drawn), 1 - tail, method="higher")
    return (float(low) if 0 < low < np.inf else None), (float(high) if high < np.inf else None)


def _expanded_tail(sequences: int) -> float:
    """The share of draws beyond either end of a 95% interval."""
    freedom = max(sequences - 1, 1)
    z = NormalDist().inv_cdf(0.975)
    student = z + sum(  # Cornish and Fisher's series
        polynomial / freedom**power
        for power, polynomial in (
            (1, (z**3 + z) / 4),
            (2, (5 * z**5 + 16 * z**3 + 3 * z) / 96),
            (3, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384),
        )
    )
    return NormalDist().cdf(-student * (freedom + 1) / freedom)
