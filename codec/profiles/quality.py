"""Qualities: what the presets promise, and how a profile's measured curve turns a wish into a step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from cuvee.codec.errors import FormatError, InputError, ProfileError
from cuvee.codec.format.container import MAX_STEP_INDEX
from cuvee.codec.models.dtypes import value_bits

_log = logging.getLogger(__name__)

_CURVE_LIMIT = 1e30  # beyond it, and below its inverse, a measurement is none, and interpolation would overflow

LOSSLESS = "lossless"
# What the presets promise where a profile's curve knows the KL (nats per token against the uncompressed cache), and
# where it only knows the squared error (a share of the variance, in the profile's metric).
PRESET_KL = {"high": 1e-3, "balanced": 5e-3, "small": 2e-2}
PRESET_ERROR = {"high": 2e-3, "balanced": 1e-2, "small": 4e-2}
# The curve comes from sequences kept apart, but of the text the profile was learned on. Calibrated on one novel,
# measured on another, books-3m lost 1.1 to 1.9 times what the curve says: a request for a KL aims this much lower.
KL_MARGIN = 1.3
# Without any curve: steps in units of a unit's deviation, for the generic profile. On SmolLM2-135M they keep PRESET_KL
# on the worst of the mixture's kinds, at 6.8, 5.5 and 4.4 bits per value. The bundled model loses up to five times as
# much on text foreign to it: what another model loses nobody knows, and a codec warns of that.
PRESET_STEP_INDEX = {"high": -296, "balanced": -216, "small": -152}
PRESETS = (LOSSLESS, *PRESET_KL)
_IN_FILES = {"step_index": "step"}  # names of a point's fields that differ in files


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One measured point of a profile.

    Attributes:
        step_index: in units of 1/64 octave: the step is 2**(step_index / 64).
        bits_per_value: all bytes of the blobs, chunks of 256 tokens.
        error: squared error over variance, in the profile's metric.
        kl: nats per token against the uncompressed cache, or None where it was not measured (as all below).
        kl_stderr: its standard error over sequences.
        delta_nll: nats per token lost on the real next tokens (paired), with `delta_nll_stderr`.
        top1: share of tokens whose most likely successor stays the same.
        kl_worst: KL of the worst sequence.
        kind: of the text it was measured on; None: all kinds together.
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

    @property
    def ratio(self) -> float:
        """How many times smaller than a cache of 16 bits per value, whatever dtype the profile was learned in."""
        return value_bits() / self.bits_per_value

    def to_dict(self) -> dict[str, Any]:
        """The point as a profile's file holds it."""
        return {_IN_FILES.get(name, name): value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CurvePoint:
        """Inverse of `to_dict`. Raises FormatError for unknown, missing or ill-typed entries."""
        known = {_IN_FILES.get(field.name, field.name): field.name for field in fields(cls)}
        if data.keys() - known.keys():
            raise FormatError(f"unknown fields in the curve: {sorted(data.keys() - known.keys())}")
        point = cls(**{known[name]: value for name, value in data.items()})
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
            raise FormatError("a point of the curve is not made of finite numbers")
        if point.bits_per_value <= 0:
            raise FormatError("a point of the curve takes no bits per value")
        if point.kind is not None and type(point.kind) is not str:
            raise FormatError("the kind of a point of the curve is not a name")
        return point


def one_request(*, quality: object, kl: object, bits: object, ratio: object, step: object) -> tuple[str, str | float]:
    """The one quality that is asked for: its name and its value.

    Raises:
        InputError: none, several, or a value of the wrong kind.
    """
    asked = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) != 1:
        raise InputError(f"give exactly one of quality=, kl=, bits=, ratio=, step=; got {', '.join(given) or 'none'}")
    ((name, value),) = given.items()
    if name == "quality":
        if value not in PRESETS:
            raise InputError(f"quality must be one of {', '.join(PRESETS)}, got {value!r}")
        return name, str(value)
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and number > 0):
        meant = f"; did you mean quality={value!r}?" if value in PRESETS else ""
        raise InputError(f"{name} must be a positive number, got {value!r}{meant}")
    return name, number


def _is_measured(value: object) -> bool:
    """Whether a number of a curve is one that can be calculated with."""
    # Compared as they are: an integer of a thousand digits cannot be converted.
    return type(value) in (int, float) and (
        value == 0 or 1 / _CURVE_LIMIT <= abs(value) <= _CURVE_LIMIT  # type: ignore[arg-type]
    )


def _positive(points: Iterable[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """The points of a curve that have a logarithm."""
    return [(step_index, value) for step_index, value in points if value is not None and value > 0]


class Curve:
    """The measured points of a profile.

    Args:
        points: in any order, of all kinds of text.

    Attributes:
        overall: the points over all kinds together, by step.
        kinds: the points of each kind, by step.
    """

    def __init__(self, points: Iterable[CurvePoint]) -> None:
        ordered = sorted(points, key=lambda point: point.step_index)
        kinds = dict.fromkeys(point.kind for point in ordered if point.kind is not None)
        self.overall = tuple(point for point in ordered if point.kind is None)
        self.kinds = {kind: tuple(point for point in ordered if point.kind == kind) for kind in kinds}

    @property
    def knows_kl(self) -> bool:
        """Whether KL was measured, without which no preset can promise any."""
        return any(point.kl is not None for point in self.overall)

    def least_kl(self, kind: str | None = None) -> float | None:
        """The smallest KL that the curve can promise, nats per token; None where it does not know any.

        Raises:
            InputError: a kind that was not measured.
        """
        self.check_kind(kind)
        return min((kl for _, kl in self.expected_kl(kind) if kl is not None), default=None)

    def least_promise(self, name: str, value: str | float, kind: str | None) -> tuple[str, float, float] | None:
        """What a request comes to that no step of the curve keeps and lossless coding does.

        Returns:
            `("kl" or "error", what is asked for, the least that a step reaches)`; None for every other request.

        Raises:
            InputError: a kind that was not measured.
        """
        self.check_kind(kind)
        if name == "quality" and value != LOSSLESS:
            what, most = ("kl", PRESET_KL[str(value)]) if self.knows_kl else ("error", PRESET_ERROR[str(value)])
        elif name == "kl":
            what, most = "kl", float(value)
        else:
            return None
        errors = (point.error for point in self.overall if point.error > 0)
        least = self.least_kl(kind) if what == "kl" else min(errors, default=None)
        return (what, most, least) if least and most < least else None

    def check_kind(self, kind: str | None) -> None:
        """Raise InputError unless text of this kind was measured; None stands for all kinds."""
        if kind is not None and kind not in self.kinds:
            known = ", ".join(self.kinds) or "none: it was measured on one kind of text"
            raise InputError(f"kind={kind!r} is not on the profile's curve; its kinds are {known}")

    def preset(self, quality: str, kind: str | None) -> int:
        """The step index of a preset: by KL, by error where KL was not measured, fixed where nothing was.

        Raises:
            InputError: no such preset.
            ProfileError: the curve does not reach it.
        """
        if quality not in PRESET_KL:
            raise InputError(f"quality={quality!r} is not known; choose one of {', '.join(PRESETS)}")
        if self.knows_kl:
            return self.index_of_kl(PRESET_KL[quality], kind)
        if self.overall:
            return self.index_within("error", PRESET_ERROR[quality], [(p.step_index, p.error) for p in self.overall])
        return PRESET_STEP_INDEX[quality]

    def expected_kl(self, kind: str | None = None) -> list[tuple[int, float | None]]:
        """Steps, and the KL that each may be expected to cost on other text: of the worst kind, or of one kind."""
        curves = [self.kinds[kind]] if kind is not None else list(self.kinds.values()) or [self.overall]
        worst: dict[int, float | None] = {}
        for point in (point for curve in curves for point in curve):
            known = worst.get(point.step_index)
            own = None if point.kl is None else KL_MARGIN * point.kl
            worst[point.step_index] = own if known is None else known if own is None else max(known, own)
        return sorted(worst.items())

    def index_of_kl(self, most: float, kind: str | None = None) -> int:
        """The coarsest step that may be expected to cost at most a KL, in nats per token.

        Raises:
            InputError: a kind that was not measured.
            ProfileError: every step costs more, or the KL was not measured.
        """
        self.check_kind(kind)
        return self.index_within("kl", most, self.expected_kl(kind))

    def index_of_bits(self, bits: float) -> int:
        """The finest step at which blobs take at most so many bits per value.

        Raises:
            ProfileError: every step takes more, or the size was not measured.
        """
        return self.index_within("bits", bits, [(p.step_index, p.bits_per_value) for p in self.overall])

    def index_of_ratio(self, ratio: float, dtype: str | None = None) -> int:
        """The finest step at which blobs are at least so many times smaller than a cache of `dtype`.

        Raises:
            InputError: no dtype that a cache may have.
            ProfileError: the curve does not reach it, or was not measured; the message names the range.
        """
        width = value_bits(dtype)
        try:
            return self.index_of_bits(width / ratio)
        except ProfileError as error:
            cache = f"{dtype} cache" if dtype else "cache in bfloat16 or float16"
            sizes = [p.bits_per_value for p in self.overall if p.bits_per_value > 0]
            reached = f"; ratio= reaches {width / max(sizes):.4g} … {width / min(sizes):.4g}" if len(sizes) > 1 else ""
            raise ProfileError(
                f"ratio={ratio:.4g} is {width / ratio:.4g} of the {width} bits per value of a {cache}, but "
                f"{error}{reached}"
            ) from error

    def index_within(self, what: str, most: float, points: Sequence[tuple[int, float | None]]) -> int:
        """The step that keeps a limit and comes closest to it: an end of the curve where all of the curve keeps it.

        Raises:
            ProfileError: no step keeps it, or the curve was not measured.
        """
        known = _positive(points)
        if len(known) < 2 or most <= (reached := max(value for _, value in known)):
            return self.index_at(what, most, points)
        end, (index, _) = ("finest", known[0]) if what == "bits" else ("coarsest", known[-1])
        _log.info("%s=%.3g is above %.3g, the most that the curve reaches: its %s step", what, most, reached, end)
        return index

    def bits_at(self, step_index: int) -> float | None:
        """Bits per value at a step, linear between measured points; None outside of the curve."""
        for low, high in pairwise(self.overall):
            if low.step_index <= step_index <= high.step_index:
                share = (step_index - low.step_index) / (high.step_index - low.step_index)
                return (1 - share) * low.bits_per_value + share * high.bits_per_value
        return None

    def index_at(self, what: str, target: float, points: Sequence[tuple[int, float | None]]) -> int:
        """The step at which the curve takes the value `target`: linear in the logarithm between measured points.

        Raises:
            ProfileError: it does not take it, or was not measured.
        """
        known = _positive(points)
        if len(known) < 2:
            raise ProfileError(
                f"{what}={target:.4g}: this profile has no curve for {what}. `cuvee profile learn`, cuvee.calibrate "
                "or cuvee.measure(profile, model, token_ids) measures one; quality='lossless' needs none"
            )
        low, high = min(v for _, v in known), max(v for _, v in known)
        if not low <= target <= high:
            raise ProfileError(
                f"{what}={target:.4g} is outside the measured range {low:.4g} … {high:.4g} of this profile"
                + (": use quality='lossless'" if what == "kl" and target < low else "")
            )
        for (step0, value0), (step1, value1) in pairwise(known):
            if min(value0, value1) <= target <= max(value0, value1) and value0 != value1:
                share = math.log(target / value0) / math.log(value1 / value0)
                return round(step0 + share * (step1 - step0))
        raise ProfileError(f"the curve of this profile does not pass {what}={target:.4g}")
