"""`Profile`: what cuvee learns offline for one model, and its qualities.

A profile is to a blob what a zstd dictionary is to a frame: it has an id, which the blob names, and decoding with
another profile is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Unpack

from cuvee.codec.entropy.family import Family, default_family
from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatchError
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.known_layers import KnownLayers
from cuvee.codec.profiles.profile_file import profile_id, read_profile_file, write_profile_file
from cuvee.codec.profiles.quality import LOSSLESS, Curve, CurvePoint, Limits, Quality
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import Section, partition
from cuvee.codec.profiles.token_prediction import (
    CACHE_BYTES,
    COEFFICIENT_CACHE_BYTES,
    PredictionCache,
    TokenTable,
)
from cuvee.codec.support.lazy import lazy
from cuvee.codec.support.steps import OCTAVE, step_value

_ARGUMENTS = {
    "layout", "group", "source", "family", "learned", "min_step_index", "model", "token_table", "text_tokens", "lengths"
}  # fmt: skip


class Profile:
    """Bases, tables and measurements for one model, by `cuvee.calibrate` or `cuvee.fit`; or no more than its layout.

    Example:
        >>> from cuvee import LayerLayout
        >>> profile = Profile.unlearned(KVLayout("mine", (LayerLayout(2, 8, 8, None),), "float32", max_positions=None))
        >>> profile.group, profile.source
        ('unit', 'unlearned')

    Attributes:
        layout: the model's KV layout, with the dtype it was learned in; chunks of other dtypes may be coded.
        group: the layers or heads that share one basis (see `partition`).
        source: "calibrated", "fitted" or "unlearned".
        model: fingerprint of the weights that it was learned from, or that its curve was measured with; or None.
        curve: points measured over all kinds of text, by rising step.
        curves: points measured on each kind of text, by kind; empty if there was only one kind.
        plain_curve: points over all kinds of text without token ids; empty if the profile does not predict from tokens.
        family: entropy tables and quantizer.
        learned: one `SectionProfile` per section; empty for an unlearned profile.
        min_step_index: the smallest step index that the stored components serve.
        token_table: what it knows of the vocabulary, to predict from tokens; None if it does not.
        text_tokens: how many cached tokens its bases were learned from; None if it was not recorded.
        lengths: those of the sequences that the KL of its curve was measured on, in tokens, rising; empty if they were
            not recorded. A KL is promised up to the longest.
    """

    def __init__(
        self,
        layout: KVLayout,
        group: str,
        source: str,
        family: Family,
        learned: tuple[SectionProfile, ...] = (),
        *,
        min_step_index: int = -8 * OCTAVE,
        model: str | None = None,
        curve: Iterable[CurvePoint] = (),
        token_table: TokenTable | None = None,
        text_tokens: int | None = None,
        lengths: Iterable[int] = (),
    ) -> None:
        self.layout = layout
        self.group = group
        self.source = source
        self.family = family
        self.learned = learned
        self.min_step_index = min_step_index
        self.model = model
        self.token_table = token_table
        self.text_tokens = text_tokens
        self.lengths = tuple(sorted(set(lengths)))
        self._curve = Curve(curve)
        self.curve = self._curve.overall
        self.curves = self._curve.kinds
        self.plain_curve = () if self._curve.plain is None else self._curve.plain.overall
        self.sections: tuple[Section, ...] = partition(layout, group)
        self._accepted_layouts: set[bytes] = set()  # one per dtype
        if learned and len(learned) != len(self.sections):
            raise FormatError(
                f"learned: must have {len(self.sections)} sections for group {group!r}, got {len(learned)}"
            )
        maps = [section.token_map is not None and section.plain_scale is not None for section in learned]
        if any(has_map != (token_table is not None) for has_map in maps):
            raise FormatError("learned: must have a token map in every section, or in none if there is no token table")

    def __repr__(self) -> str:
        layout = self.layout
        model = f"{layout.model_type}, {layout.num_layers} layers, {layout.values_per_token} values per token"
        sizes = [f"{point.bits_per_value:.2f}" for point in self.curve[:: max(len(self.curve) - 1, 1)]]
        curve = f"{' to '.join(sizes)} bits per value" if sizes else "no curve"
        return f"Profile({model}; {self.source}, group {self.group!r}; {curve})"

    # Constructors ----------------------------------------------------------------------------------------------

    @classmethod
    def unlearned(cls, layout: KVLayout) -> Profile:
        """Return a profile that carries a layout and has learned nothing: a codec with it is lossless."""
        return cls(layout, "unit", "unlearned", default_family())

    def with_curve(self, curve: Iterable[CurvePoint], lengths: Iterable[int] = (), model: str | None = None) -> Profile:
        """Return a copy with another curve, measured on sequences of these lengths; none: they are not known.

        `model` is the fingerprint of the weights that it was measured with; None: those that the profile names.

        Raises:
            ProfileError: a point has numbers that are not finite.
        """
        curve = tuple(curve)
        for point in curve:
            if not point.finite:
                raise ProfileError(
                    f"curve: must have finite numbers, got {point}: make sure that the model computes finite logits"
                )
        return self._but(curve=curve, lengths=lengths, model=model or self.model)

    def _but(self, **changes: Any) -> Profile:
        """Return a copy with other arguments of `Profile`."""
        arguments = {name: value for name, value in self.__dict__.items() if name in _ARGUMENTS}
        return Profile(**{**arguments, "curve": self.points, **changes})

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """All measured points: `curve`, `curves`, and then the same for chunks without token ids, as `plain` points."""
        return self._curve.points

    def shard(self, rank: int, size: int) -> Profile:
        """Return the profile of one tensor-parallel rank, which holds `layout.shard_heads(rank, size)` of each layer.

        At one step, the shard codes its heads as this profile codes them: with the same maps, scales and tables, and
        therefore the same levels. The decoded bits are the same except where BLAS rounds a product differently at
        another alignment. This holds without a class predictor. The predictor of a rank sees only the rank's heads and
        may choose other classes.

        The curve is kept, so a quality means the same step on every rank. The curve's KL covers all ranks; its bits per
        value are the mean over the ranks, without the headers of each rank's blobs.

        The shard has its own id: ranks that hold the same heads share an id, as do all ranks of an unlearned profile.

        Args:
            rank: rank in the group, 0 … size - 1.
            size: ranks in the group; 1 returns this profile.

        Raises:
            InputError: see `KVLayout.shard_heads`.
            ProfileError: the bases mix heads of several ranks: any group but `"head"` and `"heads:n"`.
        """
        layout = self.layout.shard(rank, size)
        if layout == self.layout:  # every rank holds all heads
            return self
        by_head = self.sections[0].by_head
        if self.learned and self.group != "head" and not by_head:
            raise ProfileError(
                f"group: must be 'heads:n' or 'head' for tensor-parallel shards, got {self.group!r}, whose bases mix "
                f"heads of several of the {size} ranks; learn a profile with tensor_parallel=True (cuvee profile learn "
                "--tensor-parallel)"
            )
        heads, learned = self.layout.shard_heads(rank, size), []
        for section, full in zip(self.sections, self.learned, strict=False):  # an unlearned profile has none
            kept = heads[section.first_layer]
            every = self.layout.layers[section.first_layer].kv_heads
            learned.append(full.take(kept if by_head else [*kept, *(every + head for head in kept)]))
        return self._but(layout=layout, learned=tuple(learned))

    def of_layers(self, layers: Sequence[int]) -> Profile:
        """Return the profile of some of the layers, at least one, in order: it codes them as this one does.

        The curve is kept, so a quality means the same step; its KL and bits are those of all layers. A learned profile
        of some layers has its own id.

        Raises:
            ProfileError: bases mix some of these layers with others.
        """
        layout = replace(self.layout, layers=tuple(self.layout.layers[layer] for layer in layers))
        if list(layers) == list(range(self.layout.num_layers)):
            return self
        kept = [index for index, section in enumerate(self.sections) if section.first_layer in layers]
        sections = [self.sections[index] for index in kept]
        # By the layers themselves: other ones of the same sizes would be coded with these bases.
        whole = [layer for own in sections for layer in range(own.first_layer, own.end_layer)] == list(layers)
        cut = [own.blocks for own in partition(layout, self.group)]
        if self.learned and not (whole and cut == [own.blocks for own in sections]):
            raise ProfileError(
                f"group: must be 'layer', 'unit' or 'head' where windows have dropped tokens of some layers, got "
                f"{self.group!r}, whose bases mix them with others; learn a profile with group='layer' (cuvee profile "
                "learn --group layer)"
            )
        return self._but(layout=layout, learned=tuple(self.learned[index] for index in kept) if self.learned else ())

    # Prediction ------------------------------------------------------------------------------------------------

    def learned_for(self, predicted: bool) -> tuple[SectionProfile, ...]:
        """Return how the sections of a blob are coded, by whether it holds token ids."""
        return self.learned if predicted else tuple(section.plain for section in self.learned)

    @property
    def plain(self) -> Profile:
        """A profile without a token table, and without a curve, that codes all chunks as this one without token ids."""
        return self._but(learned=self.learned_for(False), curve=(), token_table=None, text_tokens=None, lengths=())

    @lazy
    def predictions(self) -> tuple[PredictionCache, ...]:
        """What the token table predicts in each section; empty without a table."""
        if self.token_table is None:
            return ()
        limit = CACHE_BYTES // sum(section.values for section in self.sections)  # per value
        return tuple(
            PredictionCache(
                self.token_table, section.token_map, len(section.basis.sinks), limit * len(section.basis.mean)
            )
            for section in self.learned
            if section.token_map is not None
        )

    @lazy
    def predicted_coefficients(self) -> tuple[PredictionCache | None, ...]:
        """What the token table predicts of each section's class predictor's coefficients; None without one, empty
        without table.
        """
        if self.token_table is None:
            return ()
        maps = [section.coefficient_map() for section in self.learned]
        limit = COEFFICIENT_CACHE_BYTES // max(sum(own.size for own in maps if own is not None), 1)  # per coefficient
        return tuple(
            None if own is None else PredictionCache(self.token_table, own, len(section.basis.sinks), limit * own.size)
            for section, own in zip(self.learned, maps, strict=True)
        )

    @lazy
    def known_layers(self) -> KnownLayers | None:
        """What tells whether ids and positions are those of a cache; None if nothing was learned."""
        return KnownLayers(self.layout, self.sections, self.learned, self.token_table) if self.learned else None

    def __getstate__(self) -> dict[str, object]:
        """Leave out what is made anew where the profile is unpickled."""
        caches = ("predictions", "predicted_coefficients", "known_layers")
        return {name: value for name, value in self.__dict__.items() if name not in caches}

    # Identity --------------------------------------------------------------------------------------------------

    @lazy
    def id(self) -> bytes:
        """16 bytes that identify everything decoding depends on: BLAKE2b over the tensors and the identity."""
        return profile_id(self)

    def check_layout(self, layout: KVLayout) -> None:
        """Raise ProfileMismatchError unless `layout` is this profile's; the dtypes may differ."""
        if layout.fingerprint in self._accepted_layouts:  # cached by the layout; that of another dtype is slow
            return
        if replace(layout, dtype=self.layout.dtype).fingerprint != self.layout.fingerprint:
            raise ProfileMismatchError(
                f"layout: the profile is for {_describe(self.layout)}, got {_describe(layout)}: heads, sizes, RoPE or "
                "position limit differ; use a profile of this model"
            )
        self._accepted_layouts.add(layout.fingerprint)

    # Quality ---------------------------------------------------------------------------------------------------

    def resolve(self, quality: str | Quality | None = None, *, plain: bool = False, **limits: Unpack[Limits]) -> int:
        """Return the step index of a quality, given as a preset, a `Quality` or its arguments; but not `"lossless"`.

        All qualities but a step are limits on the curve, and the result is the step closest to the limit: the coarsest
        step that keeps a KL, the finest that keeps a size. If all steps of the curve keep a KL, it is the coarsest; a
        size must be one of the curve's.

        Args:
            quality: a preset or a `Quality`.
            plain: for chunks without token ids: their own curve decides, if it was measured.
            limits: arguments of `Quality`.

        Raises:
            InputError: as `Quality`; the profile has learned nothing.
            ProfileError: no step of the curve keeps the limit, all are smaller than the size, or the curve does not
                measure it; the message gives the range.
        """
        wanted = Quality.of(quality, limits)
        if not self.learned:
            raise InputError(
                f"{str(wanted).partition('=')[0]}: must be quality='lossless' with an unlearned profile, got {wanted}: "
                "learn a profile with `cuvee profile learn` or cuvee.calibrate, or fit one to chunks with cuvee.fit"
            )
        return self.check_step_index(self.measured(plain=plain).resolve(wanted))

    def measured(self, *, plain: bool = False) -> Curve:
        """Return what was measured at each step; `plain`: of chunks without token ids, if it was measured."""
        return self._curve.plain if plain and self._curve.plain is not None else self._curve

    @property
    def default_quality(self) -> str:
        """The quality of a codec without one: `"balanced"`, or `"lossless"` for an unlearned profile."""
        return "balanced" if self.learned else LOSSLESS

    def check_step_index(self, step_index: int) -> int:
        """Return `step_index`. Raise ProfileError if this profile does not serve it."""
        if not self.min_step_index <= step_index <= 8 * OCTAVE:
            raise ProfileError(
                f"step: must lie in {step_value(self.min_step_index):.4g} … {step_value(8 * OCTAVE):.4g} for this "
                f"profile, got {step_value(step_index):.4g}"
            )
        return step_index

    # Files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, atomically: a reader never sees a partial file."""
        write_profile_file(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile and verify its id.

        Raises:
            FormatError: the file is not a profile, or it is damaged.
            VersionError: this build does not read the profile's version.
            OSError: the file cannot be read.
        """
        arguments, identity = read_profile_file(path)
        profile = cls(**arguments)
        if profile.id.hex() != identity:
            raise FormatError(f"{os.fspath(path)}: is damaged, its contents do not hash to its id")
        return profile


def _describe(layout: KVLayout) -> str:
    first = layout.layers[0]
    return f"{layout.model_type} with {layout.num_layers} layers of {first.kv_heads} x {first.head_dim}"
