"""`Profile`: what cuvee learns offline for one model, its file, and its qualities.

A profile is to a blob what a zstd dictionary is to a frame: it has an id, which the blob names, and decoding with
another profile is an error. It is a safetensors file whose metadata is one JSON string; nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cuvee.codec.entropy.coding_plan import Quantizer
from cuvee.codec.entropy.family import TABLES, Family, default_family, deviation_of, make_family
from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatchError, VersionError
from cuvee.codec.format.container import MAX_SECTIONS, MAX_STEP_INDEX
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.quality import LOSSLESS, PRESET_KL, Curve, CurvePoint, Limits, Quality
from cuvee.codec.profiles.section_profile import SectionProfile, read_section_profile
from cuvee.codec.profiles.sections import Section, partition
from cuvee.codec.profiles.token_prediction import (
    CACHE_BYTES,
    COEFFICIENT_CACHE_BYTES,
    PredictionCache,
    TokenTable,
    read_token_table,
)
from cuvee.codec.support.files import replacing
from cuvee.codec.support.lazy import lazy
from cuvee.codec.support.plain_json import parse_json
from cuvee.codec.support.steps import OCTAVE, step_value

FORMAT = "cuvee-profile"
VERSION = 4
ID_BYTES = 16
# Values per token: 128 layers of 128 heads of 512 have this many. The limit bounds what a small file can claim.
MAX_VALUES = 1 << 24


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
        model: fingerprint of the weights it was calibrated on (hex), or None.
        curve: points measured over all kinds of text, by rising step.
        curves: points measured on each kind of text, by kind; empty if there was only one kind.
        plain_curve: points over all kinds of text without token ids; empty if the profile does not predict from tokens.
        family: entropy tables and quantizer.
        learned: one `SectionProfile` per section; empty for an unlearned profile.
        min_step_index: the smallest step index that the stored components serve.
        token_table: what it knows of the vocabulary, to predict from tokens; None if it does not.
        text_tokens: how many cached tokens its bases were learned from; None if it was not recorded.
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
        self._curve = Curve(curve)
        self.curve = self._curve.overall
        self.curves = self._curve.kinds
        self.plain_curve = () if self._curve.plain is None else self._curve.plain.overall
        self.sections: tuple[Section, ...] = partition(layout, group)
        self._known_layouts: set[bytes] = set()  # one per dtype
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
        known = "".join(f"{fact}; " for fact in self.knowledge().values())
        return f"Profile({model}; {known}{self.source}, group {self.group!r}; {self._presets()})"

    def knowledge(self) -> dict[str, str]:
        """Return for people how much a learned profile knows: its text, what ids predict, and where its curve ends."""
        if not self.learned:
            return {}
        facts = {"text": "text not recorded" if self.text_tokens is None else f"learned from {self.text_tokens} tokens"}
        share = self.predicted_share
        facts["ids"] = "ids predict nothing" if share is None else f"ids predict {100 * share:.0f} % of the energy"
        if self.curve:
            finest, coarsest = self.curve[0], self.curve[-1]
            facts["curve"] = f"curve from {finest.bits_per_value:.2f} to {coarsest.bits_per_value:.2f} bits per value"
            if finest.kl is not None and coarsest.kl is not None:
                facts["curve"] += f", KL {finest.kl:.2g} to {coarsest.kl:.2g}"
        return facts

    @property
    def predicted_share(self) -> float | None:
        """Share of the coefficients' energy, as the loss weighs it, that token ids predict; None without a table."""
        if self.token_table is None:
            return None
        left, whole = (
            sum(float(np.square(deviation_of(section.scale)).sum()) for section in self.learned_for(predicted))
            for predicted in (True, False)
        )
        return max(1 - left / whole, 0.0) if whole else 0.0

    def _presets(self) -> str:
        """Return the bits per value of each preset that the curve reaches."""
        sizes = []
        for quality in PRESET_KL if self.curve else ():
            try:
                bits = self.bits_at(self._curve.preset(quality))
            except ProfileError:  # the preset is lossless here
                continue
            if bits is not None:
                sizes.append(f"{quality} {bits:.2f}")
        return f"{', '.join(sizes)} bits per value" if sizes else "no curve" if not self.curve else "no presets"

    # Constructors ----------------------------------------------------------------------------------------------

    @classmethod
    def unlearned(cls, layout: KVLayout) -> Profile:
        """Return a profile that carries a layout and has learned nothing: a codec with it is lossless."""
        return cls(layout, "unit", "unlearned", default_family())

    def with_curve(self, curve: Iterable[CurvePoint]) -> Profile:
        """Return a copy with another curve.

        Raises:
            ProfileError: a point has numbers that are not finite.
        """
        curve = tuple(curve)
        for point in curve:
            if not point.finite:
                raise ProfileError(
                    f"curve: must have finite numbers, got {point}: make sure that the model computes finite logits"
                )
        return Profile(
            self.layout, self.group, self.source, self.family, self.learned,
            min_step_index=self.min_step_index, model=self.model, curve=curve, token_table=self.token_table,
            text_tokens=self.text_tokens,
        )  # fmt: skip

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
        return Profile(
            layout, self.group, self.source, self.family, tuple(learned),
            min_step_index=self.min_step_index, model=self.model, curve=self.points, token_table=self.token_table,
            text_tokens=self.text_tokens,
        )  # fmt: skip

    # Prediction ------------------------------------------------------------------------------------------------

    def learned_for(self, predicted: bool) -> tuple[SectionProfile, ...]:
        """Return how the sections of a blob are coded, by whether it holds token ids."""
        return self.learned if predicted else tuple(section.plain for section in self.learned)

    @property
    def plain(self) -> Profile:
        """A profile without a token table, and without a curve, that codes all chunks as this one without token ids."""
        return Profile(
            self.layout, self.group, self.source, self.family, self.learned_for(False),
            min_step_index=self.min_step_index, model=self.model,
        )  # fmt: skip

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
        """What the token table predicts of the coefficients that each section's class predictor reads.

        None for a section without a class predictor; empty without a table.
        """
        if self.token_table is None:
            return ()
        maps = [section.coefficient_map() for section in self.learned]
        limit = COEFFICIENT_CACHE_BYTES // max(sum(own.size for own in maps if own is not None), 1)  # per coefficient
        return tuple(
            None if own is None else PredictionCache(self.token_table, own, len(section.basis.sinks), limit * own.size)
            for section, own in zip(self.learned, maps, strict=True)
        )

    def __getstate__(self) -> dict[str, object]:
        """Leave out the caches of predictions, which are made anew where the profile is unpickled."""
        caches = ("predictions", "predicted_coefficients")
        return {name: value for name, value in self.__dict__.items() if name not in caches}

    # Identity --------------------------------------------------------------------------------------------------

    @lazy
    def id(self) -> bytes:
        """16 bytes that identify everything decoding depends on: BLAKE2b over the tensors and the identity."""
        digest = hashlib.blake2b(digest_size=ID_BYTES, person=b"cuvee-profile")
        layout = replace(self.layout, dtype="bfloat16")  # chunks of any dtype may be coded
        identity = {**self._metadata(), "layout": layout.fingerprint.hex(), "curve": None, "id": None}
        identity.pop("text_tokens", None)  # which decoding does not depend on, and older files lack
        digest.update(_canonical(identity).encode())
        for name, array in sorted(self._arrays().items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.digest()

    def check_layout(self, layout: KVLayout) -> None:
        """Raise ProfileMismatchError unless `layout` is this profile's; the dtypes may differ."""
        if layout.fingerprint in self._known_layouts:  # cached by the layout; that of another dtype is slow
            return
        if replace(layout, dtype=self.layout.dtype).fingerprint != self.layout.fingerprint:
            raise ProfileMismatchError(
                f"layout: the profile is for {_describe(self.layout)}, the chunk comes from {_describe(layout)}: "
                "heads, sizes, RoPE or position limit differ"
            )
        self._known_layouts.add(layout.fingerprint)

    # Quality ---------------------------------------------------------------------------------------------------

    def resolve(self, quality: str | Quality | None = None, *, plain: bool = False, **limits: Unpack[Limits]) -> int:
        """Return the step index of a quality, given as a preset, a `Quality` or its arguments; but not `"lossless"`.

        All qualities but a step are limits on the curve, and the result is the step closest to the limit: the coarsest
        step that keeps a KL, the finest that keeps a size. If all steps of the curve keep the limit, it is an end of
        the curve; if none does, an error.

        Args:
            quality: a preset or a `Quality`.
            plain: for chunks without token ids: their own curve decides, if it was measured.
            limits: arguments of `Quality`.

        Raises:
            InputError: as `Quality`; the profile has learned nothing.
            ProfileError: no step of the curve keeps the limit, or the curve does not measure it; the message gives the
                range.
        """
        asked = Quality.of(quality, limits)
        if not self.learned:
            raise InputError(
                f"{str(asked).partition('=')[0]}: must be quality='lossless' with an unlearned profile, got {asked}: "
                "learn a profile with `cuvee profile learn` or cuvee.calibrate, or fit one to chunks with cuvee.fit"
            )
        return self.check_step_index(self._curve_for(plain).resolve(asked))

    def least_promise(self, quality: Quality, *, plain: bool = False) -> tuple[str, float, float] | None:
        """Return a limit that only lossless coding keeps: see `Curve.least_promise`."""
        return self._curve_for(plain).least_promise(quality)

    def _curve_for(self, plain: bool) -> Curve:
        return self._curve.plain if plain and self._curve.plain is not None else self._curve

    def bits_at(self, step_index: int) -> float | None:
        """Return the bits per value at a step, read off the curve; None outside the curve."""
        return self._curve.bits_at(step_index)

    def kl_at(self, step_index: int, worst: bool = False) -> float | None:
        """Return the KL to expect at a step, in nats per token, read off the curve: see `Curve.kl_at`."""
        return self._curve.kl_at(step_index, worst)

    @property
    def promises_kl(self) -> bool:
        """Whether presets keep their KL: it was measured, as by `calibrate` or `measure`."""
        return self._curve.knows_kl

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

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "layout": self.layout.to_dict(),
            "group": self.group,
            "source": self.source,
            "min_step": self.min_step_index,
            "model": self.model,
            "features": 0 if self.token_table is None else self.token_table.features,
            "curve": [point.to_dict() for point in self.points],
            **({} if self.text_tokens is None else {"text_tokens": self.text_tokens}),
        }

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        quantizer = self.family.quantizer
        arrays: dict[str, npt.NDArray[Any]] = {
            "family.freq": self.family.tables.freq[:TABLES],
            "family.dead_zone": quantizer.dead_zone,
            "family.rounding": quantizer.rounding,
            "family.shrink": quantizer.shrink,
        }
        if self.token_table is not None:
            arrays["tokens.embedding"] = self.token_table.packed()
            arrays["tokens.row_scale"] = self.token_table.row_scale.numpy()
        for i, section in enumerate(self.learned):
            arrays |= section.arrays(f"section.{i}")
        return arrays

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, atomically: a reader never sees a partial file."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        metadata = {"cuvee": sealed({**self._metadata(), "id": self.id.hex()})}
        with replacing(path) as temporary:
            save_file(arrays, temporary, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile and verify its id.

        Raises:
            FormatError: the file is not a profile, or it is damaged.
            VersionError: this build does not read the profile's version.
            OSError: the file cannot be read.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no profile at {os.fspath(path)}")
        try:
            with safe_open(path, "np") as file:
                text = (file.metadata() or {}).get("cuvee")
                if text is None:
                    raise FormatError(f"{os.fspath(path)}: is a safetensors file but not a cuvee profile")
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise FormatError(f"{os.fspath(path)}: is not a safetensors file: {error}") from error
        except TypeError as error:
            raise FormatError(f"{os.fspath(path)}: holds tensors of a dtype that no profile has: {error}") from error
        try:
            profile, identity = cls._from_parts(unsealed(text), arrays)
        except FormatError:
            raise
        except (
            InputError,
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            ArithmeticError,
        ) as error:
            raise FormatError(f"{os.fspath(path)}: is not a well-formed profile: {error!r:.500}") from error
        if profile.id.hex() != identity:
            raise FormatError(f"{os.fspath(path)}: is damaged, its contents do not hash to its id")
        return profile

    @classmethod
    def _from_parts(cls, data: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> tuple[Profile, str]:
        layout = KVLayout.from_dict(data["layout"])
        is_learned = any(name.startswith("section.") for name in arrays)
        _check_size(layout, arrays if is_learned else None)
        freq = arrays["family.freq"]
        if freq.dtype != np.uint16:
            raise FormatError("family.freq: has the wrong dtype")
        quantizer = Quantizer(arrays["family.dead_zone"], arrays["family.rounding"], arrays["family.shrink"])
        family = make_family(freq, quantizer)
        features = data["features"]
        table = None if features == 0 else read_token_table(features, arrays)
        sections = partition(layout, data["group"]) if is_learned else ()
        learned = tuple(
            read_section_profile(f"section.{i}", section, arrays, features) for i, section in enumerate(sections)
        )
        curve = [CurvePoint.from_dict(point) for point in data["curve"]]
        min_step, text_tokens = data["min_step"], data.get("text_tokens")
        if type(min_step) is not int or not -MAX_STEP_INDEX <= min_step <= 8 * OCTAVE:
            raise FormatError(f"min_step: must be a step index, {-MAX_STEP_INDEX} … {8 * OCTAVE}")
        if text_tokens is not None and (type(text_tokens) is not int or text_tokens < 0):
            raise FormatError("text_tokens: must be a number of tokens")
        if not isinstance(data["source"], str) or not isinstance(data["model"], str | None):
            raise FormatError("source, model: must be names")
        if not learned and data["group"] != "unit":
            raise FormatError(f"group: must be 'unit' in a profile without learned sections, got {data['group']!r}")
        profile = cls(
            layout, data["group"], data["source"], family, learned,
            min_step_index=min_step, model=data["model"], curve=curve, token_table=table,
            text_tokens=text_tokens,
        )  # fmt: skip
        return profile, data["id"]


def _check_size(layout: KVLayout, arrays: Mapping[str, npt.NDArray[Any]] | None) -> None:
    """Refuse a layout that does not fit the file, before allocating anything of its size.

    Args:
        layout: the layout in the file's metadata.
        arrays: the file's arrays, if it has learned sections: they hold at least the mean of every value of a token.
    """
    values = layout.values_per_token
    if layout.num_layers > MAX_SECTIONS or values > MAX_VALUES:
        raise FormatError(
            f"layout: must have at most {MAX_SECTIONS} layers and {MAX_VALUES} values per token, got "
            f"{layout.num_layers} and {values}"
        )
    if arrays is not None and values > sum(array.size for array in arrays.values()):
        raise FormatError(f"layout: has {values} values per token, more than the profile's arrays hold")


def sealed(data: dict[str, Any]) -> str:
    """Return canonical JSON that contains its own BLAKE2b digest: the id does not cover all of the metadata."""
    digest = hashlib.blake2b(_canonical(data).encode(), digest_size=ID_BYTES).hexdigest()
    return _canonical({**data, "digest": digest})


def unsealed(text: str) -> dict[str, Any]:
    """Return the data of `sealed` text.

    Raises:
        FormatError: the text is not that of a profile, or the digest does not match.
        VersionError: this build does not read the profile's version, whose digest may differ.
        ValueError: the text is not JSON.
    """
    data = parse_json(text)
    if not isinstance(data, dict):
        raise FormatError("metadata: must be an object")
    if data.get("format") != FORMAT:
        raise FormatError(f"format: must be {FORMAT!r}, got {data.get('format')!r}")
    if data.get("version") != VERSION:
        raise VersionError(
            f"version: must be {VERSION} for this build, got {data.get('version')}: learn the profile anew "
            "(cuvee profile learn)"
        )
    digest = data.pop("digest", None)
    if json.loads(sealed(data))["digest"] != digest:
        raise FormatError("metadata: are damaged, they do not hash to their digest")
    return data


def _canonical(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _describe(layout: KVLayout) -> str:
    first = layout.layers[0]
    return f"{layout.model_type} with {layout.num_layers} layers of {first.kv_heads} x {first.head_dim}"
