"""Qualities: the presets, and the measured curve of a profile, which turns a request into a step."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, TypedDict

from cuvee.codec.dtypes import value_bits
from cuvee.codec.errors import FormatError, InputError, ProfileError
from cuvee.codec.format.container import MAX_STEP_INDEX
from cuvee.codec.support.steps import OCTAVE

_log = logging.getLogger(__name__)

_CURVE_LIMIT = 1e30  # larger values, and values below its inverse, are refused: interpolation would overflow

LOSSLESS = "lossless"
# The limits of the presets: on the KL (nats per token against the uncompressed cache) where the profile's curve
# measured it, else on the squared error (a share of the variance, in the profile's metric).
PRESET_KL = {"high": 1e-3, "balanced": 5e-3, "small": 2e-2}
PRESET_ERROR = {"high": 2e-3, "balanced": 1e-2, "small": 4e-2}
# The curve is measured on held-out sequences of the text that the profile was learned on. Calibrated on one novel and
# measured on another, books-3m lost 1.1 to 1.9 times the KL of the curve. SmolLM2-135M lost 1.1 times the mean of its
# curve's kinds on five other kinds of text, 1.6 times on the worst of them. A request for a KL aims this much lower.
KL_MARGIN = 1.3
# Steps for a profile without a curve, in its units. On SmolLM2-135M they kept PRESET_KL on the worst of the mixture's
# kinds. The loss of other models is unknown, so a codec warns.
PRESET_STEP_INDEX = {"high": -296, "balanced": -216, "small": -152}
PRESETS = (LOSSLESS, *PRESET_KL)
_FINER = ": for larger blobs use step=, or quality='lossless'"


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One measured point of a profile.

    Attributes:
        step_index: in units of 1/64 octave: the step is 2**(step_index / 64).
        bits_per_value: counts all bytes of the blobs, in chunks of 256 tokens.
        error: squared error over variance, in the profile's metric.
        kl: nats per token against the uncompressed cache; None, like the fields below, if it was not measured.
        kl_stderr: its standard error over sequences.
        delta_nll: nats per token lost on the real next tokens (paired), with `delta_nll_stderr`.
        top1: share of tokens whose most likely successor stays the same.
        kl_worst: KL of the worst sequence.
        kind: the kind of text it was measured on; None: all kinds.
        plain: the chunks had no token ids, although the profile predicts from tokens.
    """

    step_index: int
    bits_per_value: float
    error: float
    kl: float | None = None
    kl_stderr: float | None = None
    delta_nll: float | None = None
    delta_nll_stderr: float | None = None
    top1: float | None = None
    kl_worst: float | None = None
    kind: str | None = None
    plain: bool = False

    @property
    def ratio(self) -> float:
        """Size of a cache of 16 bits per value over this size, whatever dtype the profile was learned in."""
        return value_bits() / self.bits_per_value

    @property
    def finite(self) -> bool:
        """Whether every number is finite."""
        return all(math.isfinite(value) for value in asdict(self).values() if type(value) is float)

    def to_dict(self) -> dict[str, Any]:
        """Return the point as stored in a profile's file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CurvePoint:
        """Return the point of `to_dict` data. Raise FormatError for unknown, missing or ill-typed entries."""
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise FormatError(f"curve: has unknown fields {sorted(unknown)}")
        point = cls(**data)
        required = (point.step_index, point.bits_per_value, point.error)
        optional = (
            point.kl, point.kl_stderr, point.delta_nll, point.delta_nll_stderr, point.top1, point.kl_worst
        )  # fmt: skip
        numbers = [*required, *(value for value in optional if value is not None)]
        if (
            type(point.step_index) is not int
            or abs(point.step_index) > MAX_STEP_INDEX
            or not all(map(_is_measured, numbers))
        ):
            raise FormatError("curve: has a point that is not made of finite numbers")
        if point.bits_per_value <= 0:
            raise FormatError("curve: has a point without bits per value")
        if point.kind is not None and type(point.kind) is not str:
            raise FormatError("curve: has a point whose kind is not a name")
        if type(point.plain) is not bool:
            raise FormatError("curve: has a point that may have been measured with or without token ids")
        return point


class Limits(TypedDict, total=False):
    """What may be asked for in place of a preset, and how it is measured: see `Quality`."""

    kl: float | None
    bits: float | None
    ratio: float | None
    step: float | None
    worst: bool
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Quality:
    """What a codec is asked for: exactly one of a preset, a KL, a size and a step. Checked when it is made.

    But for a step, a codec takes the best step that keeps the request on the profile's curve. If every step of the
    curve does, that is an end of the curve. If no step keeps a KL, the codec is lossless. If no step keeps a size, an
    error names the range. If the profile predicts from tokens, chunks without token ids have a curve of their own, from
    which they get the step that keeps a KL; at the same step they are larger. With a profile without a curve a preset
    promises no KL, and a warning says so.

    Args:
        preset: `"lossless"`, `"high"`, `"balanced"` or `"small"`. The lossy ones stand for a KL on the worst kind of
            text: 0.001, 0.005 and 0.02.
        kl: the most nats per token by which the model's predictions may move, on average over the kinds of text that
            the profile was measured on.
        bits: bits per value, all bytes counted.
        ratio: the ratio of uncompressed to compressed size, for caches of `dtype`. Both sizes are those to expect of
            texts like those of the profile's curve, in chunks of 256 tokens. No single chunk is held to them: a chunk
            of 44 tokens takes up to a third more.
        step: the quantizer step, in the profile's units.
        worst: with kl=: the worst kind of text decides, as it does for presets. Kinds differ by a factor of three, and
            neither the mean nor the worst kind is a limit for single sequences.
        dtype: with ratio=: dtype of the caches, `"float32"` for example; by default a value counts as 16 bits, whatever
            the profile was learned in.

    Raises:
        InputError: none or several of the first five; a value of the wrong type or range; `worst` with something
            else than kl=, or `dtype` than ratio=; no cache has the dtype.

    Example:
        >>> from cuvee import Quality
        >>> str(Quality(kl=1e-3, worst=True)), Quality("lossless").lossless
        ('kl=0.001', True)
    """

    preset: str | None = None
    kl: float | None = None
    bits: float | None = None
    ratio: float | None = None
    step: float | None = None
    worst: bool = False
    dtype: str | None = None

    @classmethod
    def of(cls, quality: str | Quality | None, limits: Limits, default: str | None = None) -> Quality:
        """Return the quality of the arguments `quality, **limits`: by default the preset `default`.

        Raises:
            InputError: as `Quality`; limits beside a `Quality`.
        """
        if isinstance(quality, Quality):
            if limits:
                raise InputError(f"quality: must come alone if it is a Quality, got {', '.join(limits)}, too")
            return quality
        arguments = (quality, *(limits.get(name) for name in ("kl", "bits", "ratio", "step")))
        return cls(default if arguments == (None,) * 5 else quality, **limits)

    @property
    def _arguments(self) -> dict[str, str | float]:
        arguments = {"quality": self.preset, "kl": self.kl, "bits": self.bits, "ratio": self.ratio, "step": self.step}
        return {name: value for name, value in arguments.items() if value is not None}

    def __post_init__(self) -> None:
        arguments = self._arguments
        if len(arguments) != 1:
            got = ", ".join(arguments) or "none"
            raise InputError(f"quality: must be given as exactly one of quality=, kl=, bits=, ratio=, step=, got {got}")
        ((name, value),) = arguments.items()
        worst: object = self.worst
        if worst is not False and (worst is not True or name != "kl"):
            raise InputError(f"worst: must be True or False, and True only with kl=, got {self.worst!r} with {name}=")
        value_bits(self.dtype)
        if self.dtype is not None and name != "ratio":
            raise InputError(f"dtype: must come with ratio=, which it is for, got {self.dtype!r} with {name}=")
        if name == "quality":
            if value not in PRESETS:
                hint = ": a limit in nats per token is kl=" if isinstance(value, int | float) else ""
                raise InputError(f"quality: must be one of {', '.join(PRESETS)}, got {value!r}{hint}")
            return
        # An integer may be larger than every float.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            meant = f"; did you mean quality={value!r}?" if value in PRESETS else ""
            raise InputError(f"{name}: must be a positive number, got {value!r}{meant}")

    def __str__(self) -> str:
        return next(f"{name}={value}" for name, value in self._arguments.items())

    @property
    def lossless(self) -> bool:
        """Whether it asks for lossless coding, which needs no profile."""
        return self.preset == LOSSLESS

    @property
    def limits_kl(self) -> bool:
        """Whether it asks for a KL, of its own or a preset's."""
        return self.kl is not None or self.preset in PRESET_KL


def _is_measured(value: object) -> bool:
    """Return whether a value of a curve is a number within the limits."""
    # Compared without conversion: an integer of a thousand digits has no float.
    return type(value) in (int, float) and (
        value == 0 or 1 / _CURVE_LIMIT <= abs(value) <= _CURVE_LIMIT  # type: ignore[arg-type]
    )


def _positive(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Return the points that have a logarithm."""
    return [(step_index, value) for step_index, value in points if value is not None and value > 0]


def _value_at(curve: Mapping[int, float | None], step_index: int) -> float | None:
    """Return a curve's value at a step: measured, or with a linear logarithm between the measured ones beside it."""
    if step_index in curve:
        return curve[step_index]
    for (low, first), (high, last) in pairwise(_positive(curve.items())):
        if low < step_index < high:
            share = (step_index - low) / (high - low)
            return math.exp((1 - share) * math.log(first) + share * math.log(last))
    return None


class Curve:
    """The measured points of a profile: of all kinds of text, with and without token ids.

    Attributes:
        overall: the points over all kinds, by step.
        kinds: the points of each kind, by step.
        plain: the curve of chunks without token ids, apart from `overall` and `kinds`; None if there is none.
    """

    def __init__(self, points: Iterable[CurvePoint]) -> None:
        every = sorted(points, key=lambda point: point.step_index)
        ordered = [point for point in every if not point.plain]
        plain = [replace(point, plain=False) for point in every if point.plain]
        self.plain = Curve(plain) if plain else None
        kinds = dict.fromkeys(point.kind for point in ordered if point.kind is not None)
        self.overall = tuple(point for point in ordered if point.kind is None)
        self.kinds = {kind: tuple(point for point in ordered if point.kind == kind) for kind in kinds}

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """All points: over all kinds, of each kind, and the same without token ids."""
        with_ids = self.overall + tuple(point for points in self.kinds.values() for point in points)
        return with_ids + tuple(replace(point, plain=True) for point in (self.plain.points if self.plain else ()))

    @property
    def knows_kl(self) -> bool:
        """Whether KL was measured; presets promise a KL only then."""
        return any(point.kl is not None for point in self.overall)

    def _limit(self, quality: Quality) -> tuple[str, float, list[tuple[int, float | None]]] | None:
        """Return what a quality limits, the limit, and the curve's values by step; None if the curve has no part in it.

        For a preset, the KL decides, else the error. The worst kind of text decides, because a mean over tokens hides
        what answers lose that look something up: on SmolLM2-135M, XQuAD loses 0.38 nats per word at a mean KL of 0.005.
        """
        if quality.kl is not None:
            return "kl", quality.kl, self.expected_kl(quality.worst)
        if quality.preset in PRESET_KL and self.knows_kl:
            return "kl", PRESET_KL[quality.preset], self.expected_kl(worst=True)
        if quality.preset in PRESET_KL and self.overall:
            return "error", PRESET_ERROR[quality.preset], [(p.step_index, p.error) for p in self.overall]
        return None

    def least_promise(self, quality: Quality) -> tuple[str, float, float] | None:
        """Return the limit of a quality that no step of the curve keeps, and only lossless coding does.

        Returns:
            `("kl" or "error", the limit, the smallest value on the curve)`; None for all other qualities.
        """
        if (limit := self._limit(quality)) is None:
            return None
        what, most, points = limit
        least = min((value for _, value in _positive(points)), default=most)
        return (what, most, least) if most < least else None

    def resolve(self, quality: Quality) -> int:
        """Return the step index of a quality that is not lossless; for a preset without a curve, a fixed one.

        Raises:
            InputError, ProfileError: as `Profile.resolve`.
        """
        if (limit := self._limit(quality)) is not None:
            return self.index_within(*limit)
        if quality.step is not None:
            return round(math.log2(quality.step) * OCTAVE)
        if quality.ratio is not None:
            return self._index_of_ratio(quality.ratio, quality.dtype)
        if quality.bits is not None:
            return self._index_of_bits(quality.bits)
        if quality.preset not in PRESET_STEP_INDEX:
            raise InputError(f"quality: must be one of {', '.join(PRESET_KL)} for a step, got {quality.preset!r}")
        return PRESET_STEP_INDEX[quality.preset]

    def expected_kl(self, worst: bool = False) -> list[tuple[int, float | None]]:
        """Return the KL to expect of each step on other text: the mean over kinds, or that of the worst.

        A kind has two to a dozen sequences, so the worst one is taken with its standard error: of several kinds, the
        largest is also one whose sequences happened to lose much, or stands for one whose sequences happened not to.

        On SmolLM2-135M, the KL of thirteen kinds at one step differs by a factor of three. A chunk's classes, size,
        coefficients and tokens do not predict it: with each kind left out in turn, R² is at most 0.1. A step chosen
        chunk by chunk would therefore be no better.
        """

        def expected_of(point: CurvePoint) -> float | None:
            return point.kl + (point.kl_stderr or 0.0) if worst and point.kl is not None else point.kl

        curves = [{p.step_index: expected_of(p) for p in points} for points in self.kinds.values() or [self.overall]]
        combine = max if worst else fmean
        expected: list[tuple[int, float | None]] = []
        for step_index in sorted({step_index for curve in curves for step_index in curve}):
            values = [_value_at(curve, step_index) for curve in curves]
            measured = [KL_MARGIN * value for value in values if value is not None]
            expected.append((step_index, combine(measured) if measured else None))
        return expected

    def _index_of_bits(self, bits: float) -> int:
        """Return the finest step at which blobs of the curve's texts take at most `bits` bits per value."""
        return self.index_within("bits", bits, [(p.step_index, p.bits_per_value) for p in self.overall])

    def _index_of_ratio(self, ratio: float, dtype: str | None) -> int:
        """Return the finest step at which blobs are at least `ratio` times smaller than a cache of `dtype`."""
        width = value_bits(dtype)
        try:
            return self._index_of_bits(width / ratio)
        except ProfileError as error:
            cache = f"{dtype} cache" if dtype else "cache in bfloat16 or float16"
            sizes = [p.bits_per_value for p in self.overall if p.bits_per_value > 0]
            if len(sizes) < 2:
                raise ProfileError(f"ratio={ratio:.4g} of a {cache} means {error}") from error
            raise ProfileError(
                f"ratio: must lie in {width / max(sizes):.4g} … {width / min(sizes):.4g} for this profile and a "
                f"{cache}, got {ratio:.4g}" + (_FINER if width / ratio > max(sizes) else "")
            ) from error

    def index_within(self, what: str, most: float, points: Sequence[tuple[int, float | None]]) -> int:
        """Return the step that keeps a limit and is closest to it: the coarsest one if all steps keep a loss.

        Between measured points, the value's logarithm is linear.

        Raises:
            ProfileError: no step keeps the limit, the curve has no step of this size, or it was not measured.
        """
        measured = _positive(points)
        if len(measured) < 2:
            raise ProfileError(
                f"{what}={most:.4g}: this profile has no curve for {what}. `cuvee profile learn`, cuvee.calibrate "
                "or cuvee.measure(profile, model, token_ids) measures one; quality='lossless' needs none"
            )
        low, high = min(value for _, value in measured), max(value for _, value in measured)
        if most > high and what != "bits":
            _log.info("%s=%.3g is above the curve's maximum, %.3g: its coarsest step is used", what, most, high)
            return measured[-1][0]
        if what == "bits" and 0.999 * low < most < 1.001 * high:
            most = min(max(most, low), high)  # an end as messages round it
        if not low <= most <= high:
            remedy = ": use quality='lossless'" if what == "kl" else _FINER if most > high else ""
            raise ProfileError(
                f"{what}: must lie in {low:.4g} … {high:.4g}, the measured range of this profile, got {most:.4g}"
                + remedy
            )
        for (step0, value0), (step1, value1) in pairwise(measured):
            if min(value0, value1) <= most <= max(value0, value1) and value0 != value1:
                share = math.log(most / value0) / math.log(value1 / value0)
                return round(step0 + share * (step1 - step0))
        raise ProfileError(f"{what}: must be a value of this profile's curve, got {most:.4g}")

    def bits_at(self, step_index: int) -> float | None:
        """Return the bits per value at a step, linear between measured points; None outside the curve."""
        for low, high in pairwise(self.overall):
            if low.step_index <= step_index <= high.step_index:
                share = (step_index - low.step_index) / (high.step_index - low.step_index)
                return (1 - share) * low.bits_per_value + share * high.bits_per_value
        return None

    def kl_at(self, step_index: int) -> float | None:
        """Return the mean KL over kinds of text to expect at a step, in nats per token.

        Its logarithm is linear between measured points, and goes on outside them as between the last two. None if KL
        was not measured at two points.
        """
        measured = _positive(self.expected_kl())
        if len(measured) < 2:
            return None
        pairs = list(pairwise(measured))
        (low, low_kl), (high, high_kl) = next((pair for pair in pairs if step_index <= pair[1][0]), pairs[-1])
        share = (step_index - low) / (high - low)
        return math.exp((1 - share) * math.log(low_kl) + share * math.log(high_kl))
