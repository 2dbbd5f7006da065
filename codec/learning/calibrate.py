"""Learning a profile: moments, bases, tables, prediction, and the measured curve.

Only second moments and a bounded sample of tokens are kept, whatever the length of the calibration text.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from cuvee.codec.chunk import KVChunk
from cuvee.codec.classes import class_step
from cuvee.codec.codec import Codec
from cuvee.codec.coefficients import PREDICTED_TOKENS
from cuvee.codec.divergence import compare, stderr
from cuvee.codec.errors import InputError, ProfileError, ProfileMismatch
from cuvee.codec.family import OCTAVE, Family, finest_step, fit_family, scale_codes, scale_index, step_value
from cuvee.codec.fingerprint import model_fingerprint
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.gradients import CacheSample, sample_gradients
from cuvee.codec.learning.importance import TokenSample, learn_classes, learn_predictors
from cuvee.codec.learning.together import Together, same_everywhere
from cuvee.codec.model import check_tokens, frozen, prefill, score
from cuvee.codec.profile import CurvePoint, Profile, SectionProfile
from cuvee.codec.symbols import F32, I16, I32, RHO_BITS, CodingPlan, Prediction, pack, predict, quantize
from cuvee.codec.transform import (
    WEIGHT_RANGE,
    Rotation,
    Section,
    SectionBasis,
    eigenbasis,
    gather,
    partition,
    require_finite,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

_log = logging.getLogger(__name__)

SINKS = 4  # leading positions that may have means of their own
SINK_EXCESS = 1.0  # … where the deviation of their mean outweighs an ordinary token's whole energy
# Of the metric towards each unit's mean sensitivity. 0.003 to 0.03 need 4 % fewer bits at KL 0.0065, but then rare
# directions that matter get none, single tokens cost much, and the KL on other text outruns the curve.
SHRINKAGE = 0.1
TOKENS_PER_VALUE = 4  # tokens needed for each value in the largest block: below, the covariance is noise
USUAL_SHARE = 0.99  # of the tokens, whose gradients say how much a section counts
NORMALIZED_POWER = 0.5  # of a token's size, by which its gradient is divided in the metric
NORMALIZED_FLOOR = 1e-3  # tokens far below the mean gradient count less in the metric
# Of the components, coded at `balanced`, mean over tokens: SmolLM2-135M 0.58 in group layer, 0.46 in layers:3.
CODED_SHARE = 0.5
CPU_FLOPS, GPU_FLOPS = 1536.0, 4096.0  # per decoded value: what `group="auto"` may take where the model runs
CARRIED_TOKENS = 8  # for each value, that `group="auto"` wants: the least possible makes bases that fit no other text
SAMPLE_BYTES = 1 << 30  # kept for the tables and the predictors, of values; half as much again of gradients
SAMPLE_TOKENS = 16384
FAMILY_VALUES = 2_000_000  # coefficients a step that the tables are fitted on
FAMILY_STEPS = tuple(range(-7 * OCTAVE, OCTAVE + 1, OCTAVE))
CURVE_STEPS = tuple(range(-7 * OCTAVE, OCTAVE + 1, OCTAVE // 2))
PROGRESS_LINES = 10  # of a log file, for each piece of long work
CURVE_CHUNK = 256  # tokens per blob on the curve
MEASURE_BATCH = 8  # sequences per forward pass
MIN_STEP = -8 * OCTAVE
PREDICTION_STEPS = (-2 * OCTAVE, 0)
PREDICTION_GAIN = 0.99  # a predictor must save this much, or the section does without


class Moments:
    """Sums over tokens for one section: means, covariances and metrics of its blocks, and a sample of tokens."""

    def __init__(self, section: Section, layout: KVLayout, limit: int, device: torch.device | str = "cpu") -> None:
        self.section = section
        self.count = 0
        # Everything is summed relative to the mean of the first run: a channel's mean may be far larger than its
        # deviation (the key biases of Qwen2), and the covariance would drown in the rounding of their squares.
        exact: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.origin = torch.zeros(section.values, device=device)
        self.total = torch.zeros(section.values, **exact)
        self.products = [torch.zeros(size, size, **exact) for size in section.blocks]
        self.metrics = [torch.zeros(size, size, **exact) for size in section.blocks]
        self.sink_total = torch.zeros(SINKS, section.values, **exact)
        self.sink_count = torch.zeros(SINKS, **exact)
        # (position of the first token, [t, N], gradients [t, N] or None), on the CPU
        self.sample: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
        self._limit = limit
        self._stride, self._seen = 1, 0
        self._units = [s for x in section.layers(layout) for s in (x.key_values, x.value_values)]
        # The metric of several layers is gathered layer by layer: block-diagonal measured as good as the full one
        # (0.74 against 0.73 bits per value on books-3m) and needs far fewer samples.
        self._metric_runs = [x.key_values + x.value_values for x in section.layers(layout)]

    def add(self, x: torch.Tensor, start: int, gradient: torch.Tensor | None = None) -> None:
        """Add a run of tokens `[t, N]` float32 that begins at position `start`, and the gradients on them."""
        for position in range(start, min(SINKS, start + len(x))):
            self.sink_total[position] += x[position - start]
            self.sink_count[position] += 1
        ordinary = x[max(0, SINKS - start) :]
        if not self.count and len(ordinary):
            self.origin = ordinary.mean(0)
        ordinary = ordinary - self.origin
        weighted = None if gradient is None else normalized(gradient)
        self.count += len(ordinary)
        self.total += ordinary.sum(0, dtype=torch.float64)
        column = 0
        for index, size in enumerate(self.section.blocks):
            at = slice(column, column + size)
            self.products[index] += ordinary[:, at].T @ ordinary[:, at]
            if weighted is not None:
                low = 0
                for run in self._metric_runs if len(self._metric_runs) > 1 else [size]:
                    part = weighted[:, column + low : column + low + run]
                    self.metrics[index][low : low + run, low : low + run] += part.T @ part
                    low += run
            column += size
        self._keep(x, start, gradient)

    def _keep(self, x: torch.Tensor, start: int, gradient: torch.Tensor | None) -> None:
        """Keep an even selection of runs within the limit: whenever it is full, every second one goes."""
        if self._seen % self._stride == 0:
            own = None if gradient is None else gradient[: self._limit].bfloat16().cpu()
            self.sample.append((start, x[: self._limit].clone().cpu(), own))
            while sum(len(run) for _, run, _ in self.sample) > self._limit:
                del self.sample[1::2]
                self._stride *= 2
        self._seen += 1

    def move_origin(self, origin: torch.Tensor) -> None:
        """Make the sums those of deviations from another origin `[N]`."""
        offset = self.origin.double() - origin.double()
        column = 0
        for products in self.products:
            at = slice(column, column + len(products))
            cross = torch.outer(self.total[at], offset[at])
            products.add_(cross + cross.T + self.count * torch.outer(offset[at], offset[at]))
            column += len(products)
        self.total += self.count * offset
        self.origin = origin.to(self.origin)

    def to_cpu(self) -> None:
        """What is left to do is done there; the second moments have served."""
        self.products, self.metrics = [], []
        self.origin, self.total = self.origin.cpu(), self.total.cpu()
        self.sink_total, self.sink_count = self.sink_total.cpu(), self.sink_count.cpu()

    def mean(self) -> torch.Tensor:
        """`[N]` float64."""
        return self.origin + self.total / self.count

    def covariances(self) -> list[torch.Tensor]:
        """Covariance of each block, float64."""
        out, column, offset = [], 0, self.total / self.count
        for products in self.products:
            part = offset[column : column + len(products)]
            out.append(products / self.count - torch.outer(part, part))
            column += len(products)
        return out

    def loss_metrics(self) -> list[torch.Tensor]:
        """Metric of each block from the gradients, shrunk towards each unit's mean sensitivity."""
        out, column = [], 0
        for metric in self.metrics:
            size = len(metric)
            ridge = torch.zeros_like(metric[0])
            for low, high in self._unit_runs(column, size):
                ridge[low:high] = metric.diagonal()[low:high].mean()
            ridge = ridge.clamp_min(max(float(ridge.max()) * 1e-9, 1e-300))
            out.append((1 - SHRINKAGE) * metric + SHRINKAGE * ridge.diag())
            column += size
        return out

    def variance_metrics(self) -> list[torch.Tensor]:
        """Metric of each block that counts every unit's variance alike."""
        out, column = [], 0
        for covariance in self.covariances():
            size = len(covariance)
            weight = torch.ones_like(covariance[0])
            power = self.mean()[column : column + size].square()
            # A unit that does not vary has nothing but rounding to its variance, which must not count as the others'.
            most = float(covariance.diagonal().max()) * WEIGHT_RANGE
            for low, high in self._unit_runs(column, size):
                floor = max(float(power[low:high].mean()) * 1e-12, most, 1e-30)
                weight[low:high] = 1 / covariance.diagonal()[low:high].mean().clamp_min(floor)
            out.append(weight.diag())
            column += size
        return out

    def _unit_runs(self, column: int, size: int) -> list[tuple[int, int]]:
        """The parts of the block at `column` that belong to different units, numbered within the block."""
        runs, edge = [], 0
        for unit in self._units:
            low, high = max(edge, column), min(edge + unit, column + size)
            if low < high:
                runs.append((low - column, high - column))
            edge += unit
        return runs


def normalized(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients `[t, N]` of one section and sequence, each divided by the root of its token's size.

    A few tokens hold nearly all of the squared gradient (the first position of a sequence up to 95 %), and would be
    the metric: its directions are to be those of all tokens, and what a token is worth goes into its class. Dividing
    by the whole size instead takes 1 % more bits on SmolLM2-135M and 12 % on books-3m, whose heavy tokens are those
    that it copies from; not dividing at all takes 3 % more on books-3m and, in a prototype, an eighth more on
    SmolLM2-135M.

    How much the section counts among others stays: the mean square, without the largest hundredth, so that a sink
    does not decide it.
    """
    energy = gradient.square().sum(1, keepdim=True)
    usual = energy.clamp_max(torch.quantile(energy, USUAL_SHARE)).mean()
    return gradient * (energy / usual.clamp_min(1e-30) + NORMALIZED_FLOOR).pow(-NORMALIZED_POWER / 2)


def calibrate(
    model: PreTrainedModel,
    token_ids: torch.Tensor | Mapping[str, torch.Tensor],
    group: str,
    *,
    prefix: int | None,
    batch_size: int,
    seed: int,
    flops: float | None,
    progress: bool,
    together: Together,
) -> Profile:
    """See `Profile.calibrate`."""
    fingerprint = model_fingerprint(model)
    arguments = {
        "the model's fingerprint": fingerprint, "group": group, "prefix": prefix,
        "batch_size": batch_size, "seed": seed, "flops": flops,
    }  # fmt: skip
    same_everywhere(together, arguments)
    token_ids = together.from_first(token_ids)
    progress = progress and together.rank == 0
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    learning, testing = [], {}
    for name, (tokens, cached) in _by_kind(model, token_ids, prefix).items():
        held_out = held_out_count(len(tokens))
        if len(tokens) <= held_out:
            what = "token_ids" if name is None else f"token_ids of kind {name!r}"
            raise InputError(f"{what} must hold at least three sequences: two are kept apart to measure the curve")
        learning += [(batch, cached) for batch in tokens[: len(tokens) - held_out].split(batch_size)]
        testing[name] = tokens[len(tokens) - held_out :]
    seen = sum(len(batch) * max(cached - SINKS, 0) for batch, cached in learning)
    if group == "auto":
        budget = flops or (CPU_FLOPS if model.device.type == "cpu" else GPU_FLOPS)
        group, why = choose_group(layout, seen, budget)
        _log.info("group=%r: %s", group, why)
    _need_tokens(layout, group, seen)
    moments = _new_moments(layout, group, together.size, _device_of_moments(model, layout, group))
    generator = torch.Generator().manual_seed(seed + together.rank)
    with frozen(model):
        for batch, cached in tracked(learning[together.rank :: together.size], "calibrating", progress):
            sample = sample_gradients(model, batch.to(model.device), cached, generator)
            _add_sample(moments, layout, sample, cached)
    together.add_up(moments)
    # All build the same; where their arithmetic differs in the last bit, the first one's counts.
    profile = together.from_first(_build(layout, group, "calibrated", moments, Moments.loss_metrics, fingerprint))
    measured = {name: tokens for name, tokens in testing.items() if name is not None} or testing[None]
    return profile.with_curve(
        measure_curve(
            profile, model, measured, prefix=prefix, steps=None, batch_size=MEASURE_BATCH, progress=progress,
            together=together,
        )
    )  # fmt: skip


def _device_of_moments(model: PreTrainedModel, layout: KVLayout, group: str) -> torch.device:
    """Where sums are kept: with the model, if they take at most half of what is free there; else on the CPU."""
    device = model.device
    if device.type != "cuda":
        return torch.device("cpu")
    sizes = [size for section in partition(layout, group) for size in section.blocks]
    # Two matrices of float64 for each block, and as much again while the largest is worked on.
    needed = 16 * sum(size * size for size in sizes) + 64 * max(sizes) ** 2
    free, _ = torch.cuda.mem_get_info(device)
    if 2 * needed <= free:
        return device
    _log.warning("second moments take %.1f GB, %s has %.1f GB free: they are kept on the CPU, which is slower",
              needed / 1e9, device, free / 1e9)  # fmt: skip
    return torch.device("cpu")


def _by_kind(
    model: PreTrainedModel, token_ids: torch.Tensor | Mapping[str, torch.Tensor], prefix: int | None
) -> dict[str | None, tuple[torch.Tensor, int]]:
    """Calibration text by kind (one without a name: None), checked, with the length of its prefix."""
    if isinstance(token_ids, torch.Tensor):
        return {None: (token_ids, check_tokens(model, token_ids, prefix))}
    if not token_ids:
        raise InputError("token_ids names no kind of text")
    return {kind: (tokens, check_tokens(model, tokens, prefix)) for kind, tokens in token_ids.items()}


def choose_group(layout: KVLayout, tokens: int, flops: float) -> tuple[str, str]:
    """The largest group of layers that decodes within a budget and that a calibration text can carry.

    A decoded value takes two operations for each coded component of its group; at `balanced`, about half of the
    components are coded (CODED_SHARE).

    Args:
        layout: of the model.
        tokens: cached tokens of the calibration text.
        flops: floating-point operations per decoded value.

    Returns:
        the group, and why not a larger one, in words. At least `"layer"`.
    """
    best, why = "layer", "a larger one"
    sizes: dict[int, str] = {}
    for count in range(1, layout.num_layers + 1):
        name = "layer" if count == 1 else "all" if count == layout.num_layers else f"layers:{count}"
        sizes[max(section.values for section in partition(layout, name))] = name
    for values, name in sorted(sizes.items()):
        cost = 2 * CODED_SHARE * values
        if cost > flops and name != "layer":
            why = f"{name} would take about {cost:.0f} operations per value to decode, the budget is {flops:.0f}"
            break
        if tokens < CARRIED_TOKENS * values and name != "layer":
            why = f"{name} wants {CARRIED_TOKENS * values} cached tokens to learn from, the text has {tokens}"
            break
        best = name
    else:
        why = "it spans all layers"
    return best, why


def held_out_count(sequences: int) -> int:
    """How many of them, at the end, `calibrate` keeps apart to measure the curve."""
    return min(max(sequences // 8, 2), 32)


def fit(layout: KVLayout, chunks: Iterable[KVChunk], group: str) -> Profile:
    """See `Profile.fit`."""
    moments = _new_moments(layout, group)
    held_out: list[KVChunk] = []
    for number, chunk in enumerate(chunks):
        if replace(chunk.layout, dtype=layout.dtype).fingerprint != layout.fingerprint:
            raise ProfileMismatch(f"chunk {number} has another layout than the one given")
        if number % 8 == 7 and len(held_out) < 16:
            held_out.append(chunk)
            continue
        rotation = Rotation(chunk.layout, chunk.start, chunk.tokens, chunk.device, inverse=True)
        for section in moments:
            x = gather(chunk, section.section, rotation, slice(0, chunk.tokens)).cpu()
            require_finite(x, section.section)
            section.add(x, chunk.start)
    _need_tokens(layout, group, moments[0].count)
    profile = _build(layout, group, "fitted", moments, Moments.variance_metrics, None)
    if not held_out:
        return profile
    points = []
    for step in _default_steps(profile):
        coded = _round_trip(Codec(profile, step=step_value(step)), held_out)
        points.append(CurvePoint(step, coded.bits_per_value, coded.error))
    return profile.with_curve(points)


def measure_curve(
    profile: Profile,
    model: PreTrainedModel,
    token_ids: torch.Tensor | Mapping[str, torch.Tensor],
    *,
    prefix: int | None,
    steps: Iterable[int] | None,
    batch_size: int,
    progress: bool,
    together: Together,
) -> list[CurvePoint]:
    """See `Profile.measure`."""
    kinds = _by_kind(model, token_ids, prefix)
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    profile.check_layout(layout)
    codecs = {step: Codec(profile, step=step_value(step)) for step in steps or _default_steps(profile)}
    tallies: dict[str | None, dict[int, _Tally]] = {None: {step: _Tally() for step in codecs}}
    tallies |= {kind: {step: _Tally() for step in codecs} for kind in kinds}
    work = [(kind, batch, cached) for kind, (ids, cached) in kinds.items() for batch in ids.split(batch_size)]
    with frozen(model), torch.no_grad():
        for kind, batch, cached in tracked(work[together.rank :: together.size], "measuring", progress):
            tokens = batch.to(model.device)
            chunks, rest = prefill(model, tokens[:, :cached], layout), tokens[:, cached:]
            exact = score(model, chunks, rest)
            for step, codec in codecs.items():
                coded = _round_trip(codec, chunks)
                other = score(model, coded.chunks, rest)
                for name in dict.fromkeys((None, kind)):
                    tallies[name][step].add(coded, exact, other, rest[:, 1:])
    return [
        _Tally.joined(together.gather(tally)).point(step, kind)
        for kind, own in tallies.items()
        for step, tally in own.items()
    ]


def _default_steps(profile: Profile) -> Sequence[int]:
    """The steps of a curve, those left out that the widest components are too many steps large for."""
    if not profile.learned:
        return tuple(s for s in CURVE_STEPS if s >= -5 * OCTAVE)
    finest = max((finest_step(section.scale) for section in profile.learned), default=MIN_STEP)
    return tuple(s for s in CURVE_STEPS if s >= finest)


@dataclass(frozen=True, slots=True)
class Coded:
    """Chunks after a round trip, and what it cost."""

    chunks: list[KVChunk]
    bits_per_value: float
    error: float


def _round_trip(codec: Codec, chunks: list[KVChunk]) -> Coded:
    back, size, values = [], 0, 0
    for chunk in chunks:
        pieces = []
        for start in range(0, chunk.tokens, CURVE_CHUNK):
            blob = codec.encode(chunk.slice(start, min(start + CURVE_CHUNK, chunk.tokens)))
            size += len(blob)
            pieces.append(codec.decode(blob))
        values += chunk.tokens * chunk.layout.values_per_token
        back.append(KVChunk.concat(pieces))
    return Coded(back, 8 * size / values, _relative_error(chunks, back))


def _relative_error(chunks: list[KVChunk], back: list[KVChunk]) -> float:
    """Squared error over variance, mean over the units (K or V of a layer)."""
    ratios = []
    for index in range(chunks[0].layout.num_layers):
        for name in ("keys", "values"):
            exact = torch.cat([getattr(chunk, name)[index] for chunk in chunks]).float()
            coded = torch.cat([getattr(chunk, name)[index] for chunk in back]).float()
            variance = (exact - exact.mean(0)).square().mean()
            ratios.append(float((exact - coded).square().mean() / variance.clamp_min(1e-30)))
    return sum(ratios) / len(ratios)


@dataclass(slots=True)
class _Tally:
    """Figures of one point of the curve: of each sequence, then of each batch."""

    kl: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)

    def add(self, coded: Coded, exact: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> None:
        """Add a batch: log-probabilities `[B, T, V]` without and with the codec, the true tokens `[B, T]`."""
        self.tokens.append(sum(chunk.tokens for chunk in coded.chunks))
        self.bits.append(coded.bits_per_value)
        self.error.append(coded.error)
        for kept, new in zip((self.kl, self.loss, self.same), compare(exact, other, targets), strict=True):
            kept.extend(new)

    @classmethod
    def joined(cls, tallies: Iterable[_Tally]) -> _Tally:
        """Those of several processes as one."""
        whole = cls()
        for tally in tallies:
            for name in cls.__slots__:
                getattr(whole, name).extend(getattr(tally, name))
        return whole

    def point(self, step: int, kind: str | None) -> CurvePoint:
        return CurvePoint(
            step,
            bits_per_value=float(np.average(self.bits, weights=self.tokens)),
            error=float(np.average(self.error, weights=self.tokens)),
            kl=float(np.mean(self.kl)),
            kl_stderr=stderr(self.kl),
            delta_nll=float(np.mean(self.loss)),
            delta_nll_stderr=stderr(self.loss),
            top1=float(np.mean(self.same)),
            kl_worst=float(np.max(self.kl)),
            kind=kind,
        )


def tracked(batches: Sequence[T], what: str, progress: bool) -> Iterator[T]:
    """Show how far the work has come: a bar on a terminal, a line for every tenth elsewhere (a log file)."""
    console = Console(file=sys.stderr)
    if progress and console.is_terminal:
        yield from track(batches, what, console=console, transient=True)
        return
    began, lines = time.monotonic(), 0
    for number, batch in enumerate(batches):
        yield batch
        done = (number + 1) / len(batches)
        if progress and int(done * PROGRESS_LINES) > lines:
            lines = int(done * PROGRESS_LINES)
            left = (time.monotonic() - began) * (1 / done - 1)
            console.print(f"{what}: {number + 1} of {len(batches)}, {left:.0f} s left", highlight=False)


def _new_moments(layout: KVLayout, group: str, processes: int = 1, device: torch.device | str = "cpu") -> list[Moments]:
    limit = min(SAMPLE_TOKENS, SAMPLE_BYTES // (4 * layout.values_per_token)) // processes
    return [Moments(section, layout, limit, device) for section in partition(layout, group)]


def _need_tokens(layout: KVLayout, group: str, tokens: int) -> None:
    largest = max(size for section in partition(layout, group) for size in section.blocks)
    need = TOKENS_PER_VALUE * largest
    if tokens < need:
        raise ProfileError(
            f"group={group!r} spans {largest} values here and needs at least {need} cached tokens to learn from, "
            f"got {tokens}: give more text, or a smaller group"
        )


def _add_sample(moments: list[Moments], layout: KVLayout, sample: CacheSample, prefix: int) -> None:
    device = moments[0].total.device
    for row in range(len(sample.keys[0])):
        x, gradients = (
            KVChunk(
                [key[row].transpose(0, 1).to(device) for key in keys],
                [value[row].transpose(0, 1).to(device) for value in values],
                layout,
            )
            for keys, values in (
                (sample.keys, sample.values),
                (sample.key_gradients, sample.value_gradients),
            )
        )
        everything = slice(0, prefix)
        unrotation = Rotation(layout, 0, prefix, x.device, inverse=True)
        # With k' = s R k the gradient on k is s R^T k'-gradient: the transposed map, not the inverse one.
        transposed = _Transposed(layout, prefix, x.device)
        for section in moments:
            section.add(
                gather(x, section.section, unrotation, everything),
                0,
                gather(gradients, section.section, transposed, everything),
            )


class _Transposed(Rotation):
    """Takes gradients on cached keys back to gradients on position-free keys."""

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device) -> None:
        super().__init__(layout, 0, tokens, device)
        self._tables = {rope: (cos, -sin) for rope, (cos, sin) in self._tables.items()}


def _build(
    layout: KVLayout,
    group: str,
    source: str,
    moments: list[Moments],
    metrics_of: Callable[[Moments], list[torch.Tensor]],
    model: str | None,
) -> Profile:
    """Bases, scales, sinks, tables and prediction from the sums."""
    bases, deviations = [], []
    for section in moments:
        pairs = zip(section.covariances(), metrics_of(section), strict=True)
        maps = []
        for covariance, metric in pairs:
            forward, inverse, deviation = eigenbasis(covariance, metric)
            maps.append((forward.cpu(), inverse.cpu(), deviation.cpu()))
        section.to_cpu()
        bases.append(maps)
        deviations.append([deviation for _, _, deviation in maps])
    # Step 1 is the root mean square of a coefficient, so that steps mean the same in every profile.
    everything = torch.cat([d for section in deviations for d in section])
    unit = float(everything.square().mean().sqrt())
    if not 0 < unit < float("inf"):
        raise ProfileError("the samples do not vary, or the loss does not depend on them: there is nothing to learn")
    built = [_section(m, maps, unit) for m, maps in zip(moments, bases, strict=True)]
    if all(gradient is not None for m in moments for _, _, gradient in m.sample):
        built, samples = _with_classes(moments, built, layout)
        learned = tuple(built)
        family = fit_family(samples, FAMILY_STEPS)
    else:
        family = fit_family(_family_samples(moments, built), FAMILY_STEPS)
        learned = tuple(_with_prediction(m, section, family) for m, section in zip(moments, built, strict=True))
    return Profile(layout, group, source, family, learned, min_step=MIN_STEP, model=model)


def _section(
    moments: Moments, maps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], unit: float
) -> SectionProfile:
    forward, inverse, scales = [], [], []
    for analysis, synthesis, deviation in maps:
        scale = scale_index(deviation.numpy() / unit)
        rank = int((scale_codes(scale, MIN_STEP) >= 0).sum())
        forward.append((analysis[:rank] / unit).float().contiguous())
        inverse.append((synthesis[:, :rank] * unit).float().contiguous())
        scales.append(scale[:rank])
    mean = moments.mean().float()
    scale = np.concatenate(scales)
    none = np.zeros(len(scale), np.int16)
    basis = SectionBasis(mean, mean.new_zeros(0, len(mean)), tuple(forward), tuple(inverse))
    # A leading position gets a mean of its own where that mean lies further out than ordinary tokens scatter.
    usable = 0 if not len(scale) else int((moments.sink_count >= 2).cumprod(0).sum())
    sink_means = (moments.sink_total[:usable] / moments.sink_count[:usable, None]).float()
    everything = slice(0, usable)
    if usable:
        energy = np.square(2.0 ** (scale.astype(np.float64) / OCTAVE)).sum()
        excess = basis.analyze(sink_means, 1 << 30, everything, basis.block_ranks).square().sum(0).numpy() / energy
        sinks = 1 + int(np.flatnonzero(excess > SINK_EXCESS)[-1]) if (excess > SINK_EXCESS).any() else 0
        basis = SectionBasis(mean, sink_means[:sinks].contiguous(), tuple(forward), tuple(inverse))
    return SectionProfile(basis, scale, Prediction.NONE, scale, none)


def _with_classes(
    moments: list[Moments], sections: list[SectionProfile], layout: KVLayout
) -> tuple[list[SectionProfile], list[tuple[F32, I16]]]:
    """The sections with predictors and class tables, and what the family is fitted on: one pair a section and class."""
    # A section that the loss does not see has no components, and nothing that a predictor could read.
    coded = [i for i, section in enumerate(sections) if len(section.scale)]
    samples = [_token_sample(moments[i], sections[i]) for i in coded]
    scales = [sections[i].scale for i in coded]
    predictors = learn_predictors(samples, scales, [len(moments[i].section.layers(layout)) for i in coded])
    wanted = max(FAMILY_VALUES // max(sum(map(len, scales)), 1), 64)
    out, pairs = list(sections), []
    for i, sample, predictor in zip(coded, samples, predictors, strict=True):
        section = sections[i]
        classes, frequencies, class_scale = learn_classes(sample, predictor, section.scale)
        out[i] = replace(section, predictor=predictor, class_freq=frequencies, class_scale=class_scale)
        stride = max(len(classes) // wanted, 1)
        y, classes = sample.y[:, ::stride], classes[::stride]
        for k in np.unique(classes):
            # The family sees what the quantizer does: coefficients over their class's step.
            units = class_step(0, int(k))
            scale = (section.scale.astype(np.int32) + int(class_scale[k]) - units).astype(np.int16)
            pairs.append((y[:, classes == k] / np.float32(step_value(units)), scale))
    return out, pairs


def _token_sample(moments: Moments, section: SectionProfile) -> TokenSample:
    """Coefficients of the sampled tokens and what errors on them cost."""
    sinks = len(section.basis.sinks)
    ys, energies = [], []
    sink_energy, sink_count = np.zeros(sinks, np.float32), np.zeros(sinks, np.float32)
    for start, x, gradient in moments.sample:
        y, z = _coefficients(section, start, x), _pulled_back(section, gradient)
        energy = z.square().sum(1).numpy()
        own = max(min(sinks - start, len(x)), 0)
        sink_energy[start : start + own] += energy[:own]
        sink_count[start : start + own] += 1
        ys.append(y[:, own:])
        energies.append(energy[own:])
    joined = np.concatenate(ys, axis=1)
    means: F32 = (sink_energy / np.maximum(sink_count, 1)).astype(np.float32)
    return TokenSample(joined, np.concatenate(energies), means, sink_count)


def _pulled_back(section: SectionProfile, gradient: torch.Tensor | None) -> torch.Tensor:
    """Gradients `[t, N]` in the section's coordinates, leading ones alone: `[t, K]`."""
    if gradient is None:
        raise ProfileError("the samples have no gradients")
    parts, column = [], 0
    for inverse in section.basis.inverse:
        size, rank = inverse.shape
        # What lies below the quantizer's usual steps is never coded, and its errors are no quantizer's.
        parts.append(gradient[:, column : column + size].float() @ inverse[:, : max(rank // 4, min(rank, 1))])
        column += size
    return torch.cat(parts, dim=1)


def _coefficients(section: SectionProfile, start: int, x: torch.Tensor) -> F32:
    y: F32 = section.basis.analyze(x, start, slice(0, len(x)), section.basis.block_ranks).numpy()
    return y


def _family_samples(moments: list[Moments], sections: list[SectionProfile]) -> list[tuple[F32, I16]]:
    rows = sum(len(section.scale) for section in sections)
    wanted = max(FAMILY_VALUES // rows, 64)
    out = []
    for sums, section in zip(moments, sections, strict=True):
        available = sum(len(x) for _, x, _ in sums.sample)
        stride = max(available // wanted, 1)
        y = np.concatenate([_coefficients(section, start, x)[:, ::stride] for start, x, _ in sums.sample], axis=1)
        out.append((y, section.scale))
    return out


def _with_prediction(moments: Moments, section: SectionProfile, family: Family) -> SectionProfile:
    """Choose the section's prediction by measured size."""
    runs = [_coefficients(section, start, x) for start, x, _ in moments.sample if len(x) >= 2 * PREDICTED_TOKENS]
    runs = [y[:, : y.shape[1] - y.shape[1] % PREDICTED_TOKENS] for y in runs]
    if not runs or not len(section.scale):
        return section
    joined = np.concatenate(runs, axis=1)
    joined = joined[:, : max(FAMILY_VALUES // len(joined) // PREDICTED_TOKENS, 4) * PREDICTED_TOKENS]
    blocks = joined.reshape(len(joined), -1, PREDICTED_TOKENS)
    best, best_size = section, _coded_bits(section, joined, family) * PREDICTION_GAIN
    for kind in (Prediction.LAG1, Prediction.ANCHOR):
        source = blocks[:, :, :-1] if kind is Prediction.LAG1 else blocks[:, :, :1]
        target = blocks[:, :, 1:]
        gain = (source * target).mean((1, 2)) / np.maximum(np.square(source).mean((1, 2)), 1e-30)
        rho = np.clip(np.rint(gain * (1 << RHO_BITS)), -256, 256).astype(np.int16)
        rest = target - source * (rho / float(1 << RHO_BITS))[:, None, None]
        rest_scale = scale_index(np.sqrt(np.square(rest).mean((1, 2))))
        candidate = replace(section, prediction=kind, rho=rho, rest_scale=rest_scale)
        size = _coded_bits(candidate, joined, family)
        if size < best_size:
            best, best_size = candidate, size
    return best


def _coded_bits(section: SectionProfile, y: F32, family: Family) -> float:
    """Ideal size of `y` at the steps that decide about prediction."""
    total = 0.0
    for step in PREDICTION_STEPS:
        _, chosen = section.select(step)
        _, plan = section.plan(step)
        levels = quantize(y[chosen], step_value(step), plan, family.quantizer)
        differences = predict(levels, plan, PREDICTED_TOKENS)
        total += _ideal_bits(differences, plan, family)
    return total


def _ideal_bits(differences: I32, plan: CodingPlan, family: Family) -> float:
    planes, escapes = pack(differences, plan, family.tables, PREDICTED_TOKENS)
    first = np.arange(planes.shape[1]) % PREDICTED_TOKENS == 0
    bits = 0.0
    for columns, tables in ((first, plan.first), (~first, plan.rest)):
        bits += float(family.tables.bits[tables[:, None], planes[:, columns]].sum())
    return bits + 64.0 * len(escapes.index)
