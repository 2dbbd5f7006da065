"""`Profile`: what is learned offline for one model, and how quality is asked for.

A profile is to a blob what a zstd dictionary is to a frame: it has an id, a blob names it, and decoding with another
one is an error that says so. It is a safetensors file whose metadata is one JSON string; nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cuvee.codec.chunk import KVChunk
from cuvee.codec.classes import (
    CLASS_UNITS,
    CLASSES,
    ClassedPlan,
    class_step,
    class_table,
    default_class_frequencies,
)
from cuvee.codec.container import MAX_SECTIONS, MAX_STEP
from cuvee.codec.errors import FormatError, InputError, ProfileError, ProfileMismatch, VersionError
from cuvee.codec.family import (
    OCTAVE,
    TABLES,
    Family,
    coding_plan,
    default_family,
    make_family,
    scale_codes,
    step_value,
)
from cuvee.codec.importance import Predictor, read_predictor
from cuvee.codec.layout import KVLayout
from cuvee.codec.symbols import I16, U16, CodingPlan, Prediction, Quantizer
from cuvee.codec.transform import Section, SectionBasis, partition

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT = "cuvee-profile"
VERSION = 2
ID_BYTES = 16
# Of a token, in a file: 128 layers of 128 heads of 512 have as many. Bounds what a file of a few bytes can ask for.
MAX_VALUES = 1 << 24
_CURVE_LIMIT = 1e30  # beyond it, and below its inverse, a measurement is none, and interpolation would overflow

LOSSLESS = "lossless"
# What the presets promise where a profile's curve knows the KL (nats per token against the uncompressed cache), and
# where it only knows the squared error (a share of the variance, in the profile's metric).
PRESET_KL = {"high": 1e-3, "balanced": 5e-3, "small": 2e-2}
PRESET_ERROR = {"high": 2e-3, "balanced": 1e-2, "small": 4e-2}
# The curve comes from sequences kept apart, but of the text the profile was learned on. Calibrated on one novel,
# measured on another, books-3m lost 1.1 to 1.9 times what the curve says: a request for a KL aims this much lower.
KL_MARGIN = 1.3
# Without any curve: steps in units of a unit's deviation, for the generic profile.
PRESET_STEP = {"high": -160, "balanced": -80, "small": -16}
PRESETS = (LOSSLESS, *PRESET_KL)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One measured point of a profile.

    Attributes:
        step: step index, 1/64 octave.
        bits_per_value: all bytes of the blobs, chunks of 256 tokens.
        error: squared error over variance, in the profile's metric.
        kl: nats per token against the uncompressed cache, or None where it was not measured (as all below).
        kl_stderr: its standard error over sequences.
        delta_nll: nats per token lost on the real next tokens (paired), with `delta_nll_stderr`.
        top1: share of tokens whose most likely successor stays the same.
        kl_worst: KL of the worst sequence.
        kind: of the text it was measured on; None: all kinds together.
    """

    step: int
    bits_per_value: float
    error: float
    kl: float | None = None
    kl_stderr: float | None = None
    delta_nll: float | None = None
    delta_nll_stderr: float | None = None
    top1: float | None = None
    kl_worst: float | None = None
    kind: str | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CurvePoint:
        """Inverse of `dataclasses.asdict`. Raises FormatError for unknown, missing or ill-typed entries."""
        known = {field.name for field in fields(cls)}
        if data.keys() - known:
            raise FormatError(f"unknown fields in the curve: {sorted(data.keys() - known)}")
        point = cls(**data)
        required = (point.step, point.bits_per_value, point.error)
        optional = (
            point.kl, point.kl_stderr, point.delta_nll, point.delta_nll_stderr, point.top1, point.kl_worst
        )  # fmt: skip
        numbers = [*required, *(value for value in optional if value is not None)]
        if type(point.step) is not int or abs(point.step) > MAX_STEP or not all(map(_is_measured, numbers)):
            raise FormatError("a point of the curve is not made of finite numbers")
        if point.kind is not None and type(point.kind) is not str:
            raise FormatError("the kind of a point of the curve is not a name")
        return point


def _is_measured(value: object) -> bool:
    """Whether a number of a curve is one that can be calculated with."""
    # Compared as they are: an integer of a thousand digits cannot be converted.
    return type(value) in (int, float) and (
        value == 0 or 1 / _CURVE_LIMIT <= abs(value) <= _CURVE_LIMIT  # type: ignore[arg-type]
    )


@dataclass(frozen=True, slots=True)
class SectionProfile:
    """What a profile knows of one section: its maps, and of each component (all blocks in a row, `[R]`) its scale,
    the scale of its prediction error, and the predictor's gain.

    Attributes:
        predictor: tells the class of a token; None: the tokens of this section have none unless a caller says so.
        class_freq: `[16]` uint16 frequencies that code the classes.
        class_scale: `[16]` int16, 1/64 octaves: how much wider the components of a class's tokens are than `scale`.
    """

    basis: SectionBasis
    scale: I16
    prediction: Prediction
    rest_scale: I16
    rho: I16
    predictor: Predictor | None = None
    class_freq: U16 = field(default_factory=default_class_frequencies)
    class_scale: I16 = field(default_factory=lambda: np.zeros(CLASSES, np.int16))

    def select(self, step: int) -> tuple[tuple[int, ...], npt.NDArray[np.intp]]:
        """The components coded at a step: how many of each block, and their indices."""
        codes = scale_codes(self.scale, step)
        ranks, chosen, at = [], [], 0
        for size in self.basis.block_ranks:
            rank = int((codes[at : at + size] >= 0).sum())  # scales fall, so these come first
            ranks.append(rank)
            chosen.append(np.arange(at, at + rank))
            at += size
        return tuple(ranks), np.concatenate(chosen)

    def plan(self, step: int) -> tuple[tuple[int, ...], CodingPlan]:
        """Ranks of the blocks and the coding plan at a step."""
        ranks, chosen = self.select(step)
        codes = scale_codes(self.scale[chosen], step)
        if self.prediction is Prediction.NONE:
            return ranks, coding_plan(codes)
        rest = scale_codes(self.rest_scale[chosen], step)
        return ranks, coding_plan(codes, rest, self.prediction, self.rho[chosen])

    def class_ranks(self, step: int, token_class: int) -> tuple[int, ...]:
        """The components of each block that tokens of a class code in a blob of step index `step`."""
        codes = self._class_codes(step, token_class)
        ranks, at = [], 0
        for size in self.basis.block_ranks:
            ranks.append(int((codes[at : at + size] >= 0).sum()))
            at += size
        return tuple(ranks)

    def classed_plan(self, step: int) -> ClassedPlan:
        """How tokens of each class are coded in a blob of step index `step`.

        Raises:
            ProfileError: the step is too fine for all classes.
        """
        plans: list[CodingPlan | None] = []
        for k in range(CLASSES):
            codes = self._class_codes(step, k)
            try:
                plans.append(coding_plan(codes[codes >= 0]))
            except ProfileError:
                plans.append(None)
        return ClassedPlan(plans, step)

    def _class_codes(self, step: int, token_class: int) -> npt.NDArray[np.int32]:
        return scale_codes(self.scale, class_step(step, token_class) - int(self.class_scale[token_class]))

    def take(self, blocks: Sequence[int]) -> SectionProfile:
        """What is known of some blocks of the section, in this order: each is coded as it is among the others."""
        basis = self.basis
        columns = torch.from_numpy(_members([matrix.shape[1] for matrix in basis.forward], blocks))
        rows = _members(basis.block_ranks, blocks)
        taken = SectionBasis(
            basis.mean[columns],
            basis.sinks.index_select(1, columns),
            tuple(basis.forward[block] for block in blocks),
            tuple(basis.inverse[block] for block in blocks),
        )
        predictor = None if self.predictor is None else self.predictor.take(rows)
        return SectionProfile(
            taken, self.scale[rows], self.prediction, self.rest_scale[rows], self.rho[rows], predictor,
            self.class_freq, self.class_scale,
        )  # fmt: skip


def _members(sizes: Sequence[int], blocks: Sequence[int]) -> npt.NDArray[np.intp]:
    """The places that some of adjacent blocks of these sizes take up."""
    ends = np.cumsum(sizes)
    return np.concatenate([np.arange(ends[block] - sizes[block], ends[block]) for block in blocks])


class Profile:
    """Bases, tables and measurements for one model. Make one with `calibrate`, `fit` or `generic`, or `load` it.

    Attributes:
        layout: the model's KV layout. Its dtype is the one seen in training; chunks of another dtype may be coded.
        group: what one basis spans (see `partition`).
        source: "calibrated", "fitted" or "generic".
        model: fingerprint of the weights it was calibrated on (hex), or None.
        curve: measured points, by rising step, of all kinds of text together.
        curves: by kind of text, the points measured on that kind alone; empty where there was one kind.
        family: entropy tables and quantizer.
        learned: one `SectionProfile` a section; empty for a generic profile.
        min_step: the smallest step index the stored components serve.
    """

    def __init__(
        self,
        layout: KVLayout,
        group: str,
        source: str,
        family: Family,
        learned: tuple[SectionProfile, ...] = (),
        *,
        min_step: int = -8 * OCTAVE,
        model: str | None = None,
        curve: Iterable[CurvePoint] = (),
    ) -> None:
        self.layout = layout
        self.group = group
        self.source = source
        self.family = family
        self.learned = learned
        self.min_step = min_step
        self.model = model
        points = sorted(curve, key=lambda point: point.step)
        kinds = dict.fromkeys(point.kind for point in points if point.kind is not None)
        self.curve = tuple(point for point in points if point.kind is None)
        self.curves = {kind: tuple(point for point in points if point.kind == kind) for kind in kinds}
        self.sections: tuple[Section, ...] = partition(layout, group)
        if learned and len(learned) != len(self.sections):
            raise FormatError(f"the profile has {len(learned)} sections, group {group!r} needs {len(self.sections)}")

    # Making one ------------------------------------------------------------------------------------------------

    @classmethod
    def calibrate(
        cls,
        model: PreTrainedModel,
        token_ids: torch.Tensor | Mapping[str, torch.Tensor],
        group: str = "auto",
        *,
        prefix: int | None = None,
        batch_size: int = 4,
        seed: int = 0,
        flops: float | None = None,
        progress: bool = True,
        distributed: bool = False,
    ) -> Profile:
        """Learn a profile in the loss metric: the Fisher information of the cache. Needs a backward pass.

        Args:
            model: a transformers causal language model, in eval mode, on any device, or spread over several by
                `device_map=`.
            token_ids: `[N, T]` int64: N sequences as the model will see them; or several kinds of text by name, each
                with lengths of its own (`cuvee.eval.mixture.mixture` makes such a dict). An eighth of each (2 to 32)
                is kept apart to measure the curve, kind by kind.
            group: what one basis spans: `"head"`, `"unit"`, `"layer"`, `"layers:n"`, `"all"`, or `"auto"`: as many
                layers as `flops` and the number of tokens allow (`choose_group`).
            prefix: how many leading tokens of a sequence count as cached; the loss of those after it is what the
                metric measures. Default: three quarters of T.
            flops: with `"auto"`, floating-point operations per decoded value that the inverse transform may take;
                default 1536 where the model is on a CPU, 4096 elsewhere.
            batch_size: sequences per forward pass.
            seed: of the sampled targets; the same arguments give the same profile on the same machine.
            progress: show a progress bar on standard error.
            distributed: all processes of PyTorch's default group (`torchrun`) call this, each with the whole model and
                the same arguments, and share the work; the sequences are those of rank 0. All get the same profile.

        Raises:
            InputError: `token_ids` of another shape, dtype or range; `distributed` without a process group, or with
                processes that were given other models or arguments.
            ProfileError: too few tokens for the group; the message says how many it needs.
            UnsupportedModel: see `KVLayout.from_config`.
        """
        from cuvee.codec.learning.calibrate import calibrate
        from cuvee.codec.learning.together import Alone, Processes

        return calibrate(
            model, token_ids, group, prefix=prefix, batch_size=batch_size, seed=seed, flops=flops, progress=progress,
            together=Processes() if distributed else Alone(),
        )  # fmt: skip

    @classmethod
    def fit(cls, layout: KVLayout, chunks: Iterable[KVChunk], group: str = "layer") -> Profile:
        """Learn a profile from KV samples alone: principal components, each unit's variance counted alike.

        Args:
            layout: the layout of all chunks.
            chunks: samples; read once, in order, so a generator will do. Chunks should begin at different positions
                of different sequences, as those to be coded will.
            group: as in `calibrate`.

        Raises:
            ProfileError: too few tokens for the group; the message says how many it needs.
            ProfileMismatch: a chunk of another layout.
        """
        from cuvee.codec.learning.calibrate import fit

        return fit(layout, chunks, group)

    @classmethod
    def generic(cls, layout: KVLayout) -> Profile:
        """A profile that knows nothing: per-chunk means and scales, three bytes per channel. Works on any model."""
        return cls(layout, "unit", "generic", default_family())

    def measure(
        self,
        model: PreTrainedModel,
        token_ids: torch.Tensor | Mapping[str, torch.Tensor],
        *,
        prefix: int | None = None,
        steps: Iterable[int] | None = None,
        batch_size: int = 8,
        progress: bool = True,
    ) -> Profile:
        """This profile with a curve measured on `token_ids` `[N, T]` or on several kinds; arguments as in `calibrate`.

        The id stays: blobs written with either decode with both.
        """
        from cuvee.codec.learning.calibrate import measure_curve
        from cuvee.codec.learning.together import Alone

        return self.with_curve(
            measure_curve(
                self, model, token_ids, prefix=prefix, steps=steps, batch_size=batch_size, progress=progress,
                together=Alone(),
            )
        )  # fmt: skip

    def with_curve(self, curve: Iterable[CurvePoint]) -> Profile:
        """A copy with another curve."""
        return Profile(
            self.layout, self.group, self.source, self.family, self.learned,
            min_step=self.min_step, model=self.model, curve=curve,
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
                "ranks. Learn a profile with group='head', or one for each rank with Profile.fit on its own heads"
            )
        heads = self.layout.shard_heads(rank, size)
        parts = zip(self.learned, self.layout.layers, heads, strict=True) if self.learned else ()
        learned = tuple(known.take([*own, *(layer.kv_heads + head for head in own)]) for known, layer, own in parts)
        return Profile(
            layout, self.group, self.source, self.family, learned,
            min_step=self.min_step, model=self.model, curve=self.points,
        )  # fmt: skip

    # Identity --------------------------------------------------------------------------------------------------

    @cached_property
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
        """Raise ProfileMismatch unless chunks of `layout` are this profile's (the dtype apart)."""
        if replace(layout, dtype=self.layout.dtype).fingerprint != self.layout.fingerprint:
            raise ProfileMismatch(
                f"the profile is for {_describe(self.layout)}, the chunk comes from {_describe(layout)}: "
                "heads, sizes, RoPE or position limit differ"
            )

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
    ) -> int:
        """The step index for a request; exactly one argument besides `kind`, none of them `"lossless"`.

        A KL, and the KL that a preset stands for, holds for every kind of text on the curve: the worst kind decides,
        or the one called `kind`.

        Raises:
            InputError: no request, several, one that is not a positive number, or a kind that was not measured.
            ProfileError: the curve does not reach what was asked, or does not know it; the message says the range.
        """
        asked = {"quality": quality, "kl": kl, "bits": bits, "ratio": ratio, "step": step}
        given = [name for name, value in asked.items() if value is not None]
        if len(given) != 1:
            raise InputError(f"give exactly one of quality=, kl=, bits=, ratio=, step=; got {given or 'none'}")
        self._check_kind(kind)
        if quality is not None:
            return self._preset(quality, kind)
        value = next(float(v) for v in (kl, bits, ratio, step) if v is not None)
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{given[0]}={value} must be a positive number")
        if step is not None:
            return self.check_step(round(math.log2(value) * OCTAVE))
        if kl is not None:
            return self._interpolate("kl", value, self._expected_kl(kind))
        sizes: list[tuple[int, float | None]] = [(p.step, p.bits_per_value) for p in self.curve]
        if bits is not None:
            return self._interpolate("bits", value, sizes)
        width = 8 * self.layout.torch_dtype.itemsize
        try:
            return self._interpolate("bits", width / value, sizes)
        except ProfileError as error:
            raise ProfileError(
                f"ratio={value:.4g} is {width / value:.4g} of the {width} bits a value of a "
                f"{self.layout.dtype} cache, but {error}"
            ) from error

    def least_kl(self, kind: str | None = None) -> float | None:
        """The smallest KL that the curve can promise, nats per token; None where it does not know any.

        Raises:
            InputError: a kind that was not measured.
        """
        self._check_kind(kind)
        return min((kl for _, kl in self._expected_kl(kind) if kl is not None), default=None)

    def _check_kind(self, kind: str | None) -> None:
        if kind is not None and kind not in self.curves:
            known = ", ".join(self.curves) or "none: it was measured on one kind of text"
            raise InputError(f"kind={kind!r} is not on the profile's curve; its kinds are {known}")

    def _preset(self, quality: str, kind: str | None) -> int:
        if quality not in PRESET_KL:
            raise InputError(f"quality={quality!r} is not known; choose one of {', '.join(PRESETS)}")
        if any(p.kl is not None for p in self.curve):
            return self._interpolate("kl", PRESET_KL[quality], self._expected_kl(kind))
        if self.curve:
            return self._interpolate("error", PRESET_ERROR[quality], [(p.step, p.error) for p in self.curve])
        return self.check_step(PRESET_STEP[quality])

    def _expected_kl(self, kind: str | None = None) -> list[tuple[int, float | None]]:
        curves = [self.curves[kind]] if kind is not None else list(self.curves.values()) or [self.curve]
        worst: dict[int, float | None] = {}
        for point in (point for curve in curves for point in curve):
            known = worst.get(point.step)
            own = None if point.kl is None else KL_MARGIN * point.kl
            worst[point.step] = own if known is None else known if own is None else max(known, own)
        return sorted(worst.items())

    def check_step(self, step: int) -> int:
        """`step`, if it is an index this profile serves; else raises ProfileError."""
        if not self.min_step <= step <= 8 * OCTAVE:
            raise ProfileError(
                f"step={step_value(step):.4g} is outside what this profile serves, "
                f"{step_value(self.min_step):.4g} … {step_value(8 * OCTAVE):.4g}"
            )
        return step

    def _interpolate(self, what: str, target: float, points: list[tuple[int, float | None]]) -> int:
        """The step at which the curve takes the value `target`: linear in the logarithm between measured points."""
        known = [(step, value) for step, value in points if value is not None and value > 0]
        if len(known) < 2:
            remedy = "Profile.calibrate or profile.measure(model, token_ids) measures one"
            raise ProfileError(f"this profile has no curve for {what}: {remedy}; or ask by step= or quality=")
        low, high = min(v for _, v in known), max(v for _, v in known)
        if not low <= target <= high:
            raise ProfileError(
                f"{what}={target:.4g} is outside the measured range {low:.4g} … {high:.4g} of this profile"
                + (": use quality='lossless'" if what == "kl" and target < low else "")
            )
        for (step0, value0), (step1, value1) in pairwise(known):
            if min(value0, value1) <= target <= max(value0, value1) and value0 != value1:
                share = math.log(target / value0) / math.log(value1 / value0)
                return self.check_step(round(step0 + share * (step1 - step0)))
        raise ProfileError(f"the curve of this profile does not pass {what}={target:.4g}")

    # Files -----------------------------------------------------------------------------------------------------

    def _metadata(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "layout": self.layout.to_dict(),
            "group": self.group,
            "source": self.source,
            "min_step": self.min_step,
            "model": self.model,
            "prediction": [int(s.prediction) for s in self.learned],
            "curve": [asdict(point) for point in self.points],
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
            basis = section.basis
            arrays |= {
                f"section.{i}.mean": basis.mean.numpy(),
                f"section.{i}.sinks": basis.sinks.numpy(),
                f"section.{i}.scale": section.scale,
                f"section.{i}.rest_scale": section.rest_scale,
                f"section.{i}.rho": section.rho,
            }
            arrays |= {f"section.{i}.class_freq": section.class_freq, f"section.{i}.class_scale": section.class_scale}
            if section.predictor is not None:
                arrays |= {f"section.{i}.predictor.{name}": a for name, a in section.predictor.arrays().items()}
            for b, (forward, inverse) in enumerate(zip(basis.forward, basis.inverse, strict=True)):
                arrays[f"section.{i}.forward.{b}"] = forward.numpy()
                arrays[f"section.{i}.inverse.{b}"] = inverse.numpy()
        return arrays

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile, atomically: a reader never sees half a file."""
        target = Path(path)
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        metadata = {"cuvee": sealed({**self._metadata(), "id": self.id.hex()})}
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with open(temporary, "xb"):
                mode = temporary.stat().st_mode
            save_file(arrays, temporary, metadata)
            temporary.chmod(mode)  # safetensors leaves its files to their owner alone
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

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
            RecursionError,
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
            learned.append(_read_section(i, section, Prediction(prediction), arrays))
        curve = [CurvePoint.from_dict(point) for point in data["curve"]]
        min_step = data["min_step"]
        if type(min_step) is not int or not -MAX_STEP <= min_step <= 8 * OCTAVE:
            raise FormatError(f"min_step must be a step index, {-MAX_STEP} … {8 * OCTAVE}")
        if not isinstance(data["source"], str) or not isinstance(data["model"], str | None):
            raise FormatError("source and model of a profile must be names")
        if not learned and data["group"] != "unit":
            raise FormatError("a profile that learned nothing must have the group 'unit'")
        profile = cls(
            layout, data["group"], data["source"], family, tuple(learned),
            min_step=min_step, model=data["model"], curve=curve,
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


def _read_section(
    i: int, section: Section, prediction: Prediction, arrays: dict[str, npt.NDArray[Any]]
) -> SectionProfile:
    def tensor(name: str, *shape: int | None) -> torch.Tensor:
        array = arrays[f"section.{i}.{name}"]
        expected = tuple(have if want is None else want for have, want in zip(array.shape, shape, strict=True))
        if array.dtype != np.float32 or array.shape != expected or not np.isfinite(array).all():
            raise FormatError(f"section.{i}.{name} has the wrong shape or dtype or is not finite")
        return torch.from_numpy(array)

    forward = tuple(tensor(f"forward.{b}", None, size) for b, size in enumerate(section.blocks))
    inverse = tuple(
        tensor(f"inverse.{b}", size, len(f)) for (b, size), f in zip(enumerate(section.blocks), forward, strict=True)
    )
    basis = SectionBasis(tensor("mean", section.values), tensor("sinks", None, section.values), forward, inverse)
    components = []
    for name in ("scale", "rest_scale", "rho"):
        array = arrays[f"section.{i}.{name}"]
        if array.dtype != np.int16 or array.shape != (sum(basis.block_ranks),):
            raise FormatError(f"section.{i}.{name} has the wrong shape or dtype")
        components.append(array)
    at = 0
    for rank in basis.block_ranks:
        if np.any(np.diff(components[0][at : at + rank].astype(np.int32)) > 0):
            raise FormatError(f"section.{i}.scale does not fall within a block")
        at += rank
    class_freq = _class_array(i, "class_freq", np.uint16, arrays)
    class_scale = _class_array(i, "class_scale", np.int16, arrays)
    class_table(class_freq)
    if class_freq.min() < 1:
        raise FormatError(f"section.{i}.class_freq has a class that cannot be coded")
    if np.any(np.diff(class_scale.astype(np.int32)) > CLASS_UNITS):
        raise FormatError(f"section.{i}.class_scale lets a coarser class code more than a finer one")
    predictor = None
    if f"section.{i}.predictor.components" in arrays:
        predictor = read_predictor(f"section.{i}.predictor", arrays, sum(basis.block_ranks))
    return SectionProfile(
        basis, components[0], prediction, components[1], components[2], predictor, class_freq, class_scale
    )


def _class_array(i: int, name: str, dtype: type[np.generic], arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    array = arrays[f"section.{i}.{name}"]
    if array.dtype != dtype or array.shape != (CLASSES,):
        raise FormatError(f"section.{i}.{name} has the wrong shape or dtype")
    return array


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
    data = json.loads(text)
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
