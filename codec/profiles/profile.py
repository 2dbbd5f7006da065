"""`Profile`: what is learned offline for one model, and how quality is asked for.

A profile is to a blob what a zstd dictionary is to a frame: it has an id, a blob names it, and decoding with another
one is an error that says so. It is a safetensors file whose metadata is one JSON string; nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cuvee.codec.entropy.family import (
    OCTAVE,
    TABLES,
    Family,
    default_family,
    make_family,
    step_value,
)
from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatchError, VersionError
from cuvee.codec.format.container import MAX_SECTIONS, MAX_STEP_INDEX
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.quality import LOSSLESS, Curve, CurvePoint, one_request
from cuvee.codec.profiles.section_profile import SectionProfile, read_section_profile
from cuvee.codec.stages.reference.symbols import Prediction, Quantizer
from cuvee.codec.stages.reference.transform import Section, partition
from cuvee.codec.support.files import replacing
from cuvee.codec.support.lazy import lazy
from cuvee.codec.support.plain_json import parse_json

FORMAT = "cuvee-profile"
VERSION = 2
ID_BYTES = 16
# Of a token, in a file: 128 layers of 128 heads of 512 have as many. Bounds what a file of a few bytes can ask for.
MAX_VALUES = 1 << 24


class Profile:
    """Bases, tables and measurements for one model. Make one with `cuvee.calibrate`, `cuvee.fit` or `Profile.generic`.

    Example:
        >>> from cuvee.codec.data.bundled import load_bundled_model
        >>> model, tokenizer = load_bundled_model()
        >>> profile = Profile.generic(KVLayout.from_config(model.config, model.dtype))
        >>> profile.group, profile.source
        ('unit', 'generic')

    Attributes:
        layout: the model's KV layout. Its dtype is the one seen in training; chunks of another dtype may be coded.
        group: what one basis spans (see `partition`).
        source: "calibrated", "fitted" or "generic".
        model: fingerprint of the weights it was calibrated on (hex), or None.
        curve: measured points, by rising step, of all kinds of text together.
        curves: by kind of text, the points measured on that kind alone; empty where there was one kind.
        family: entropy tables and quantizer.
        learned: one `SectionProfile` a section; empty for a generic profile.
        min_step_index: the smallest step index the stored components serve.
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
    ) -> None:
        self.layout = layout
        self.group = group
        self.source = source
        self.family = family
        self.learned = learned
        self.min_step_index = min_step_index
        self.model = model
        self._curve = Curve(curve)
        self.curve = self._curve.overall
        self.curves = self._curve.kinds
        self.sections: tuple[Section, ...] = partition(layout, group)
        self._known_layouts: set[bytes] = set()  # one for each dtype
        if learned and len(learned) != len(self.sections):
            raise FormatError(f"the profile has {len(learned)} sections, group {group!r} needs {len(self.sections)}")

    def __repr__(self) -> str:
        layout = self.layout
        model = f"{layout.model_type}, {layout.num_layers} layers, {layout.values_per_token} values per token"
        kinds = f", of {len(self.curves)} kinds of text" if self.curves else ""
        return f"Profile({model}; {self.source}, group {self.group!r}; {len(self.curve)} points{kinds})"

    # Making one ------------------------------------------------------------------------------------------------

    @classmethod
    def generic(cls, layout: KVLayout) -> Profile:
        """A profile that knows nothing: per-chunk means and scales, three bytes per channel. Works on any model."""
        return cls(layout, "unit", "generic", default_family())

    def with_curve(self, curve: Iterable[CurvePoint]) -> Profile:
        """A copy with another curve."""
        return Profile(
            self.layout, self.group, self.source, self.family, self.learned,
            min_step_index=self.min_step_index, model=self.model, curve=curve,
        )  # fmt: skip

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """All measured points: those of `curve`, then those of `curves`."""
        return self.curve + tuple(point for points in self.curves.values() for point in points)

    def shard(self, rank: int, size: int) -> Profile:
        """The profile of one tensor-parallel rank, which holds `layout.shard_heads(rank, size)` of each layer.

        At one step its codec codes those heads as this profile's codes them among all: same maps, scales and tables,
        so the same levels, and the same decoded bits but where BLAS rounds a product otherwise at another alignment.
        That holds where tokens have no classes, or those of `importance=`. A rank's own predictor sees its own heads
        alone, so that it may choose a class that the whole would not.
        A generic profile has nothing to cut: its steps are relative to the deviation of the rank's own heads.

        The curve is kept, so that a quality means the same step on every rank. Its KL is that of all ranks together;
        its bits per value are the mean over them, without the headers that each rank's blobs have of their own.

        The id is the shard's own: ranks that hold the same heads share one, as do all ranks of a generic profile.

        Args:
            rank: of the group, 0 … size - 1.
            size: ranks in the group; 1 gives this profile itself.

        Raises:
            InputError: see `KVLayout.shard_heads`.
            ProfileError: bases that mix heads of several ranks: any group but `"head"`.
        """
        layout = self.layout.shard(rank, size)
        if layout == self.layout:  # every rank holds all heads
            return self
        if self.learned and self.group != "head":
            raise ProfileError(
                f"group {self.group!r} crosses tensor-parallel shards: its bases mix heads of several of the {size} "
                "ranks. Learn a profile with group='head', or one for each rank with cuvee.fit on its own heads"
            )
        heads = self.layout.shard_heads(rank, size)
        parts = zip(self.learned, self.layout.layers, heads, strict=True) if self.learned else ()
        learned = tuple(known.take([*own, *(layer.kv_heads + head for head in own)]) for known, layer, own in parts)
        return Profile(
            layout, self.group, self.source, self.family, learned,
            min_step_index=self.min_step_index, model=self.model, curve=self.points,
        )  # fmt: skip

    # Identity --------------------------------------------------------------------------------------------------

    @lazy
    def id(self) -> bytes:
        """16 bytes that name everything decoding depends on: BLAKE2b over the tensors and the identity."""
        digest = hashlib.blake2b(digest_size=ID_BYTES, person=b"cuvee-profile")
        layout = replace(self.layout, dtype="bfloat16")  # chunks of any dtype may be coded
        identity = {**self._metadata(), "layout": layout.fingerprint.hex(), "curve": None, "id": None}
        digest.update(_canonical(identity).encode())
        for name, array in sorted(self._arrays().items()):
            digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.digest()

    def check_layout(self, layout: KVLayout) -> None:
        """Raise ProfileMismatchError unless chunks of `layout` are this profile's (the dtype apart)."""
        if layout.fingerprint in self._known_layouts:  # a layout knows its own; that of another dtype takes a while
            return
        if replace(layout, dtype=self.layout.dtype).fingerprint != self.layout.fingerprint:
            raise ProfileMismatchError(
                f"the profile is for {_describe(self.layout)}, the chunk comes from {_describe(layout)}: "
                "heads, sizes, RoPE or position limit differ"
            )
        self._known_layouts.add(layout.fingerprint)

    # Quality ---------------------------------------------------------------------------------------------------

    def resolve(
        self,
        quality: str | None = None,
        *,
        kl: float | None = None,
        bits: float | None = None,
        ratio: float | None = None,
        step: float | None = None,
        kind: str | None = None,
        dtype: str | None = None,
    ) -> int:
        """The step index for a request; exactly one argument besides `kind` and `dtype`, none of them `"lossless"`.

        A ratio counts against caches of `dtype`; by default against 16 bits per value, whatever the profile was
        learned in.

        Each request but `step` is a limit, and the step that comes closest to it is taken: the coarsest that keeps a
        KL, the finest that keeps a size. Where all of the curve keeps it, that is an end of the curve; where none does,
        an error. A KL, and the KL that a preset stands for, holds for every kind of text on the curve: the worst kind
        decides, or the one called `kind`.

        Raises:
            InputError: no request, several, one that is not a positive number, a kind that was not measured, or a dtype
                that no cache has.
            ProfileError: no step of the curve keeps what was asked, or the curve does not know it; the message says the
                range.
        """
        name, value = one_request(quality=quality, kl=kl, bits=bits, ratio=ratio, step=step)
        self._curve.check_kind(kind)
        if isinstance(value, str):
            index = self._curve.preset(value, kind)
        elif name == "step":
            index = round(math.log2(value) * OCTAVE)
        elif name == "kl":
            index = self._curve.index_of_kl(value, kind)
        elif name == "ratio":
            index = self._curve.index_of_ratio(value, dtype)
        else:
            index = self._curve.index_of_bits(value)
        return self.check_step_index(index)

    def least_kl(self, kind: str | None = None) -> float | None:
        """The smallest KL that the curve can promise, nats per token; None where it does not know any.

        Raises:
            InputError: a kind that was not measured.
        """
        return self._curve.least_kl(kind)

    def least_promise(self, name: str, value: str | float, kind: str | None) -> tuple[str, float, float] | None:
        """What no step of the curve keeps and lossless coding does: see `Curve.least_promise`."""
        return self._curve.least_promise(name, value, kind)

    def bits_at(self, step_index: int) -> float | None:
        """Bits per value at a step, read off the curve; None where it was not measured."""
        return self._curve.bits_at(step_index)

    @property
    def promises_kl(self) -> bool:
        """Whether presets keep the KL they stand for: the curve knows KL, as after `calibrate` or `measure`."""
        return self._curve.knows_kl

    @property
    def default_quality(self) -> str:
        """The quality of a codec that none is asked of: `"balanced"`; `"lossless"` if nothing is known of the model."""
        return "balanced" if self.learned or self.curve else LOSSLESS

    def check_step_index(self, step_index: int) -> int:
        """`step_index`, if it is an index this profile serves; else raises ProfileError."""
        if not self.min_step_index <= step_index <= 8 * OCTAVE:
            raise ProfileError(
                f"step={step_value(step_index):.4g} is outside what this profile serves, "
                f"{step_value(self.min_step_index):.4g} … {step_value(8 * OCTAVE):.4g}"
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
            "prediction": [int(s.prediction) for s in self.learned],
            "curve": [point.to_dict() for point in self.points],
        }

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        quantizer = self.family.quantizer
        arrays: dict[str, npt.NDArray[Any]] = {
            "family.freq": self.family.tables.freq[:TABLES],
            "family.dead_zone": quantizer.dead_zone,
            "family.rounding": quantizer.rounding,
            "family.shrink": quantizer.shrink,
        }
        for i, section in enumerate(self.learned):
            arrays |= section.arrays(f"section.{i}")
        return arrays

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, atomically: a reader never sees half a file."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        metadata = {"cuvee": sealed({**self._metadata(), "id": self.id.hex()})}
        with replacing(path) as temporary:
            save_file(arrays, temporary, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile and verify its id.

        Raises:
            FormatError: not a profile, or a damaged one.
            VersionError: a profile of a version this build does not read.
            OSError: the file cannot be read.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no profile at {os.fspath(path)}")
        try:
            with safe_open(path, "np") as file:
                text = (file.metadata() or {}).get("cuvee")
                if text is None:
                    raise FormatError(f"{os.fspath(path)} is a safetensors file but not a cuvee profile")
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise FormatError(f"{os.fspath(path)} is not a safetensors file: {error}") from error
        except TypeError as error:
            raise FormatError(f"{os.fspath(path)} holds tensors of a dtype that no profile has: {error}") from error
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
            raise FormatError(f"{os.fspath(path)} is not a well-formed profile: {error!r:.500}") from error
        if profile.id.hex() != identity:
            raise FormatError(f"{os.fspath(path)} is damaged: its contents do not hash to its id")
        return profile

    @classmethod
    def _from_parts(cls, data: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> tuple[Profile, str]:
        layout = KVLayout.from_dict(data["layout"])
        _check_size(layout, arrays if data["prediction"] else None)
        freq = arrays["family.freq"]
        if freq.dtype != np.uint16:
            raise FormatError("family.freq has the wrong dtype")
        quantizer = Quantizer(arrays["family.dead_zone"], arrays["family.rounding"], arrays["family.shrink"])
        family = make_family(freq, quantizer)
        learned = []
        sections = partition(layout, data["group"]) if data["prediction"] else ()
        for i, (section, prediction) in enumerate(zip(sections, data["prediction"], strict=True)):
            learned.append(read_section_profile(f"section.{i}", section, Prediction(prediction), arrays))
        curve = [CurvePoint.from_dict(point) for point in data["curve"]]
        min_step = data["min_step"]
        if type(min_step) is not int or not -MAX_STEP_INDEX <= min_step <= 8 * OCTAVE:
            raise FormatError(f"min_step must be a step index, {-MAX_STEP_INDEX} … {8 * OCTAVE}")
        if not isinstance(data["source"], str) or not isinstance(data["model"], str | None):
            raise FormatError("source and model of a profile must be names")
        if not learned and data["group"] != "unit":
            raise FormatError("a profile that learned nothing must have the group 'unit'")
        profile = cls(
            layout, data["group"], data["source"], family, tuple(learned),
            min_step_index=min_step, model=data["model"], curve=curve,
        )  # fmt: skip
        return profile, data["id"]


def _check_size(layout: KVLayout, arrays: Mapping[str, npt.NDArray[Any]] | None) -> None:
    """Refuse a layout that the file cannot be of, before anything is made in its size.

    Args:
        layout: as the file's metadata say.
        arrays: of the file, if it learned something: it then holds at least a mean of every value of a token.
    """
    values = layout.values_per_token
    if layout.num_layers > MAX_SECTIONS or values > MAX_VALUES:
        raise FormatError(f"the profile is for {layout.num_layers} layers and more values of a token than there are")
    if arrays is not None and values > sum(array.size for array in arrays.values()):
        raise FormatError("the profile's arrays are too small for the values of its layout")


def sealed(data: dict[str, Any]) -> str:
    """Canonical JSON with its own BLAKE2b in it: the id does not cover all of a profile's metadata."""
    digest = hashlib.blake2b(_canonical(data).encode(), digest_size=ID_BYTES).hexdigest()
    return _canonical({**data, "digest": digest})


def unsealed(text: str) -> dict[str, Any]:
    """The inverse of `sealed`.

    Raises:
        FormatError: not a profile, or the digest does not match.
        VersionError: a profile of another version, whose digest may be another.
        ValueError: no JSON.
    """
    data = parse_json(text)
    if not isinstance(data, dict):
        raise FormatError("the metadata of a profile must be an object")
    if data.get("format") != FORMAT:
        raise FormatError(f"not a cuvee profile but {data.get('format')!r}")
    if data.get("version") != VERSION:
        raise VersionError(f"profile version {data.get('version')}; this build reads version {VERSION}")
    digest = data.pop("digest", None)
    if json.loads(sealed(data))["digest"] != digest:
        raise FormatError("the metadata of the profile are damaged: they do not hash to their digest")
    return data


def _canonical(data: dict[str, Any]) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _describe(layout: KVLayout) -> str:
    first = layout.layers[0]
    return f"{layout.model_type} with {layout.num_layers} layers of {first.kv_heads} x {first.head_dim}"
