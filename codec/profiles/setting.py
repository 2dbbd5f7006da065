"""How a codec codes chunks: without loss or at a step, as one blob or as a base and its refinement."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from cuvee.codec.entropy.residuals import FINER, MAX_REFINEMENTS
from cuvee.codec.errors import InputError
from cuvee.codec.format.container import Header, Scheme
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import LOSSLESS, PRESET_KL, Quality
from cuvee.codec.support.once import Once
from cuvee.codec.support.steps import OCTAVE, step_value

_log = logging.getLogger(__name__)

_once = Once(_log)


@dataclass(frozen=True, slots=True)
class ExpectedPart:
    """What to expect of a chunk that is decoded from its parts up to one of them, by the profile's curve.

    Attributes:
        kl: nats per token; None if the curve does not measure it.
        bits: bits per value of these parts together; None outside the curve.
    """

    kl: float | None
    bits: float | None


@dataclass(frozen=True, slots=True)
class Setting:
    """How chunks are coded.

    Attributes:
        step_index: of the blob, or of the base; 0 without loss.
        refinements: 1 if a refinement follows the base.
    """

    scheme: Scheme
    step_index: int = 0
    refinements: int = 0

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost."""
        return self.scheme is Scheme.LOSSLESS

    @property
    def name(self) -> str:
        """The setting in the keys of a store."""
        return LOSSLESS if self.lossless else f"step:{self.step_index}"

    @property
    def described(self) -> str:
        """The setting as people read it."""
        return LOSSLESS if self.lossless else f"step={step_value(self.step_index):.4g}"

    @classmethod
    def choose(cls, profile: Profile, quality: Quality, refinements: int = 0, *, plain: bool = False) -> Setting:
        """Return the setting that keeps a quality, with all parts together; `plain`: of chunks without token ids.

        Raises:
            InputError, ProfileError: as `Profile.resolve`.
        """
        if quality.lossless:
            return cls(Scheme.LOSSLESS)
        if finer := profile.measured(plain=plain).least_promise(quality):
            of = " of chunks without token ids" if plain else ""
            reached = "the least that the profile's curve%s reaches: lossless instead"
            _log.info(f"%s=%.3g is below %.3g, {reached}", *finer, of)
            return cls(Scheme.LOSSLESS)
        index = profile.resolve(quality, plain=plain)
        # A base and its refinement have the error of one blob at the refinement's step.
        return cls(Scheme.TRANSFORM, min(index + FINER * refinements, 8 * OCTAVE), refinements)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a codec codes chunks with token ids, and without.

    Attributes:
        predicted: of chunks with token ids, and of all chunks if the profile predicts nothing from them.
        plain: of chunks without.
        limits_kl: whether a KL was asked for.
    """

    profile: Profile
    predicted: Setting
    plain: Setting
    limits_kl: bool

    @classmethod
    def choose(cls, profile: Profile, quality: Quality, refinements: int) -> Settings:
        """Return the settings that keep a quality.

        Raises:
            InputError, ProfileError: as `Setting.choose`; InputError for refinements of a lossless codec.
        """
        setting = Setting.choose(profile, quality, refinements)
        if refinements and setting.lossless:
            raise InputError(
                f"refinements: must be 0 without loss, got {refinements}, and a quality that is lossless with this "
                "profile"
            )
        if setting.lossless or not profile.plain_curve or not quality.limits_kl:
            return cls(profile, setting, setting, quality.limits_kl)
        return cls(profile, setting, Setting.choose(profile, quality, refinements, plain=True), limits_kl=True)

    def of(self, ids: bool) -> Setting:
        """Return how chunks with or without token ids are coded."""
        return self.predicted if ids or self.profile.token_table is None else self.plain

    def misfits(self, header: Header, ids: bool) -> bool:
        """Return whether a chunk with or without token ids was coded in a safer way than such chunks are."""
        setting = self.of(ids)
        predicted = ids and self.profile.token_table is not None and not setting.lossless
        return header.lossless != setting.lossless or (header.token_id_bytes > 0) != predicted

    def part_count(self, ids: bool) -> int:
        """Return how many parts chunks have, with or without token ids: without loss, there is only one."""
        return 1 + self.of(ids).refinements

    @property
    def name(self) -> str:
        """See `Codec.quality_name`."""
        parts = f",parts:{self.predicted.refinements + 1}" if self.predicted.refinements else ""
        if self.plain == self.predicted or self.profile.token_table is None:
            return self.predicted.name + parts
        return f"{self.predicted.name},plain:{self.plain.name.removeprefix('step:')}{parts}"

    @property
    def described(self) -> str:
        """The settings as people read them."""
        parts = f" in {self.predicted.refinements + 1} parts" if self.predicted.refinements else ""
        if self.plain == self.predicted or self.profile.token_table is None:
            return self.predicted.described + parts
        return f"{self.predicted.described}{parts} ({self.plain.described} without token ids)"

    def expected_parts(self) -> tuple[ExpectedPart, ...]:
        """Return what to expect of chunks with token ids from their base, and from the base with its refinement.

        One entry per part, with the mean KL over kinds of text. One entry, without loss, for a codec that is lossless.
        """
        setting = self.predicted
        if setting.lossless:
            return (ExpectedPart(0.0, None),)
        steps = [setting.step_index - FINER * part for part in range(setting.refinements + 1)]
        curve = self.profile.measured()
        return tuple(ExpectedPart(curve.kl_at(step), curve.bits_at(step)) for step in steps)

    @property
    def promised_tokens(self) -> int | None:
        """The longest context for which the KL that was asked for is promised; None if no length limits a promise.

        Nothing does if no KL was asked for or is lost, or if the profile does not say what its curve was measured on.
        """
        lossless = self.predicted.lossless and self.plain.lossless
        return None if lossless or not self.limits_kl else max(self.profile.lengths, default=None)


def check_refinements(refinements: object, profile: Profile) -> None:
    """Raise InputError unless a codec may have this many refinements."""
    if type(refinements) is not int or not 0 <= refinements <= MAX_REFINEMENTS:
        raise InputError(f"refinements: must be 0 … {MAX_REFINEMENTS}, got {refinements!r}")
    if refinements and not profile.learned:
        raise InputError(
            f"refinements: must be 0 with an unlearned profile, got {refinements}: learn a profile to use them"
        )


def check_profile(profile: object) -> None:
    """Raise InputError unless it is a profile."""
    if isinstance(profile, Profile):
        return
    if isinstance(profile, str | os.PathLike):
        hint = f"cuvee.Profile.load({str(profile)!r}) reads one from a file"
    else:
        hint = "cuvee.calibrate(model, token_ids) learns one, and Codec.without_profile(model) needs none"
    raise InputError(f"profile: must be a Profile, got {type(profile).__name__}: {hint}")


def warn_of_no_promise(quality: str, source: str) -> None:
    """Warn once per process, because an engine makes several codecs of one quality."""
    _once(
        (quality, source),
        "quality=%r stands for a KL of %g nats per token, which a %s profile without a measured curve cannot promise: "
        "another model may lose many times that. `cuvee profile learn` learns a profile that keeps it; "
        "quality='lossless' needs none",
        quality, PRESET_KL[quality], source,
    )  # fmt: skip


def warn_of_length(profile: bytes, promised: int) -> None:
    """Warn once per process and profile that a context is longer than those of the profile's curve."""
    _once(
        profile,
        "profile %s: its KL was measured on contexts of up to %d tokens, and is not promised for longer ones, such as "
        "those that are encoded now: learn or measure a profile on longer sequences (cuvee profile learn --length, "
        "cuvee.measure); quality='lossless' loses nothing at any length",
        profile.hex(), promised,
    )  # fmt: skip
