"""Sums over the tokens of a calibration text: means, covariances, and metrics of the loss.

Only second moments and a bounded sample of tokens are kept, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import ProfileError
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.profiles.section_basis import WEIGHT_RANGE
from cuvee.codec.profiles.sections import Section, partition
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.transform import gather, require_finite

SINKS = 4  # leading positions that may have separate means
SINK_EXCESS = 1.0  # energy of the deviation of such a mean, over that of an ordinary token, from which it is kept
# Shrinkage of the metric towards each unit's mean sensitivity. 0.003 to 0.03 need 4% fewer bits at KL 0.0065, but then
# rare directions that matter get none, single tokens cost much, and the KL on other text exceeds the curve.
SHRINKAGE = 0.1
TOKENS_PER_VALUE = 4  # tokens needed per value of the largest block; with fewer, the covariance is noise
CLIPPED_QUANTILE = 0.99  # share of the tokens whose gradients determine the weight of a section
NORMALIZED_POWER = 0.75  # power of a token's gradient norm that its gradient is divided by in the metric
NORMALIZED_FLOOR = 1e-3  # tokens far below the mean gradient count less in the metric
SAMPLE_BYTES = 1 << 30  # values kept for the tables and the predictors; gradients take half as much again
SAMPLE_TOKENS = 16384

# What a state of `Moments` holds beside its sample.
_SUMS = ("count", "origin", "total", "products", "metrics", "sink_total", "sink_count", "_stride", "_seen")

# (section, ids [t]) -> predicted values [t, N] float32
Predicted = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class SampledRun:
    """The first tokens of a run of `length` tokens that are kept, on the CPU: values `[t, N]` float32, and gradients.

    `token_ids` are `[t]` if predictions were subtracted from x, which begins at position 0; else None.
    """

    start: int
    length: int
    x: torch.Tensor
    gradient: torch.Tensor | None
    token_ids: torch.Tensor | None


class Moments:
    """Sums over tokens for one section: means, covariances and metrics of its blocks, and a sample of tokens."""

    def __init__(
        self,
        section: Section,
        layout: KVLayout,
        limit: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.section = section
        self.count = 0
        # All sums are relative to the mean of the first run: a channel's mean may be far larger than its deviation (the
        # key biases of Qwen2), and the rounding of its square would exceed the covariance.
        exact: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.origin = torch.zeros(section.values, device=device, dtype=torch.float32)
        self.total = torch.zeros(section.values, **exact)
        self.products = [torch.zeros(size, size, **exact) for size in section.blocks]
        self.metrics = [torch.zeros(size, size, **exact) for size in section.blocks]
        self.sink_total = torch.zeros(SINKS, section.values, **exact)
        self.sink_count = torch.zeros(SINKS, **exact)
        self.sample: list[SampledRun] = []
        self._limit = limit
        self._stride, self._seen = 1, 0
        units = [(unit.size, unit.size * unit.heads) for unit in section.units(layout)]
        self._units = [size for size, _ in units] * len(section.blocks) if section.by_head else [n for _, n in units]
        # The metric of several layers is gathered layer by layer: block-diagonal measured as good as the full one
        # (0.74 against 0.73 bits per value on books-3m) and needs far fewer samples.
        self._metric_runs = [
            x.head_dim + x.value_dim if section.by_head else x.key_values + x.value_values
            for x in section.layers(layout)
        ]

    def add(
        self,
        x: torch.Tensor,
        start: int,
        gradient: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        sampled: bool = True,
    ) -> None:
        """Add a run of tokens `[t, N]` float32 from position `start` on, the gradients on them, and their ids.

        The run ends where its sequence's cache ends, if there are gradients. `sampled`: its tokens may be kept.
        """
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
        if sampled:
            self._keep(x, start, gradient, token_ids)

    def _keep(self, x: torch.Tensor, start: int, gradient: torch.Tensor | None, token_ids: torch.Tensor | None) -> None:
        """Keep evenly spaced runs within the limit: whenever it is exceeded, drop every second run."""
        if self._seen % self._stride == 0:
            kept = None if gradient is None else gradient[: self._limit].bfloat16().cpu()
            ids = None if token_ids is None else token_ids[: self._limit].cpu()
            self.sample.append(SampledRun(start, len(x), x[: self._limit].clone().cpu(), kept, ids))
            while sum(len(run.x) for run in self.sample) > self._limit:
                del self.sample[1::2]
                self._stride *= 2
        self._seen += 1

    def to_cpu(self) -> None:
        """Move the sums to the CPU and drop the second moments, which are no longer needed."""
        self.products, self.metrics = [], []
        self.origin, self.total = self.origin.cpu(), self.total.cpu()
        self.sink_total, self.sink_count = self.sink_total.cpu(), self.sink_count.cpu()

    def state(self) -> dict[str, Any]:
        """See `Run`."""
        kept = {name: getattr(self, name) for name in _SUMS}
        runs = [(run.start, run.length, run.x, run.gradient, run.token_ids) for run in self.sample]
        return {**kept, "runs": runs}

    def restore(self, state: dict[str, Any]) -> None:
        """See `Run`."""
        for name in _SUMS:
            setattr(self, name, state[name])
        self.sample = [SampledRun(*run) for run in state["runs"]]

    def mean(self) -> torch.Tensor:
        """Return the mean, `[N]` float64."""
        return self.origin + self.total / self.count

    def covariances(self) -> list[torch.Tensor]:
        """Return the covariance of each block, float64."""
        out, column, offset = [], 0, self.total / self.count
        for products in self.products:
            part = offset[column : column + len(products)]
            out.append(products / self.count - torch.outer(part, part))
            column += len(products)
        return out

    def loss_metrics(self) -> list[torch.Tensor]:
        """Return the metric of each block from the gradients, shrunk towards each unit's mean sensitivity."""
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
        """Return the metric of each block that equalizes the variance of units."""
        out, column = [], 0
        for covariance in self.covariances():
            size = len(covariance)
            weight = torch.ones_like(covariance[0])
            power = self.mean()[column : column + size].square()
            # The variance of a constant unit is only rounding, which must not be scaled up to that of the others.
            most = float(covariance.diagonal().max()) * WEIGHT_RANGE
            for low, high in self._unit_runs(column, size):
                floor = max(float(power[low:high].mean()) * 1e-12, most, 1e-30)
                weight[low:high] = 1 / covariance.diagonal()[low:high].mean().clamp_min(floor)
            out.append(weight.diag())
            column += size
        return out

    def _unit_runs(self, column: int, size: int) -> list[tuple[int, int]]:
        """Return the column ranges, within the block at `column`, that belong to different units."""
        runs, edge = [], 0
        for unit in self._units:
            low, high = max(edge, column), min(edge + unit, column + size)
            if low < high:
                runs.append((low - column, high - column))
            edge += unit
        return runs


def normalized(gradient: torch.Tensor) -> torch.Tensor:
    """Divide gradients `[t, N]` of one section and sequence by a power of each token's norm, `NORMALIZED_POWER`.

    A few tokens hold nearly all of the squared gradient (the first position of a sequence up to 95%, the last ones of
    a cache most of the rest) and would dominate the metric. But its directions must serve all tokens, and the
    importance of a token belongs in its class. The heaviest tokens are also those that answers are copied from, so some
    of their weight is kept. At a KL of 0.002 on SmolLM2-135M, mean over eight kinds of text, the powers 0.5, 0.65, 0.75
    and 1 take 0.81, 0.77, 0.73 and 0.76 bits per value; where text repeats what is cached, 1.05, 1.05, 1.01 and 1.04.
    books-3m by layer takes 12% more bits at 0.75 than at 0.5 on plain text, and 3% more where it repeats.

    The weight of the section among others is kept: the mean square without the largest hundredth, so that a sink does
    not determine it.
    """
    energy = gradient.square().sum(1, keepdim=True)
    mean_energy = energy.clamp_max(torch.quantile(energy, CLIPPED_QUANTILE)).mean()
    return gradient * (energy / mean_energy.clamp_min(1e-30) + NORMALIZED_FLOOR).pow(-NORMALIZED_POWER / 2)


def new_moments(layout: KVLayout, group: str, device: torch.device | str = "cpu") -> list[Moments]:
    """Return empty sums for each section of a group."""
    limit = min(SAMPLE_TOKENS, SAMPLE_BYTES // (4 * layout.values_per_token))
    return [Moments(section, layout, limit, device) for section in partition(layout, group)]


def tokens_needed(layout: KVLayout, group: str) -> int:
    """Return how many cached tokens the bases of a group need at least."""
    return TOKENS_PER_VALUE * max(size for section in partition(layout, group) for size in section.blocks)


def held_out_count(sequences: int) -> int:
    """Return how many of the last sequences `cuvee.calibrate` holds out to measure the curve."""
    return min(max(sequences // 8, 2), 32)


def need_tokens(layout: KVLayout, group: str, tokens: int, sequences: int = 0) -> None:
    """Raise ProfileError unless this many tokens, of this many sequences, suffice for the bases of a group."""
    need = tokens_needed(layout, group)
    if tokens < need:
        missing = -(-(need - tokens) * sequences // max(tokens, 1))  # an eighth more is held out
        more = f"about {-(-8 * missing // 7)} more sequences like these" if missing else "more text"
        smaller = "" if group == "head" else ", or a smaller group"
        raise ProfileError(
            f"group: {group!r} spans {need // TOKENS_PER_VALUE} values and must have at least {need} cached tokens to "
            f"learn from, got {tokens}: give {more}{smaller}"
        )


def add_cache(
    moments: list[Moments],
    chunk: KVChunk,
    predicted: Predicted | None = None,
    gradients: KVChunk | None = None,
    sampled: bool = True,
) -> None:
    """Add the cache of a run of tokens, and the gradients on it, to the sums of every section; keep it if `sampled`.

    With `predicted`, the sums are those of what is not predicted from the chunk's ids. Leading positions, which may
    become sinks, are not predicted. Covariances gain from more text than there are gradients for: on SmolLM2-135M,
    blocks of four layers that are learned from 118,000 tokens take 2.5% fewer bits at equal KL than from 30,000.
    """
    everything = slice(0, chunk.tokens)
    ids = None if predicted is None or chunk.token_ids is None else torch.from_numpy(chunk.token_ids)
    unrotation = Rotation(chunk.start, chunk.tokens, chunk.device, inverse=True)
    # With k' = s R k, the gradient on k is s R^T times the gradient on k': the transposed map, not the inverse.
    transposed = Transposed(chunk.tokens, chunk.device)
    for index, section in enumerate(moments):
        values = gather(chunk, section.section, unrotation, everything).to(section.total.device)
        require_finite(values, section.section)
        if predicted is not None and ids is not None and chunk.tokens > SINKS:
            values[SINKS:] -= predicted(index, ids[SINKS:]).to(values.device)
        gradient = None if gradients is None else gather(gradients, section.section, transposed, everything)
        section.add(values, chunk.start, gradient, ids, sampled)


class Transposed(Rotation):
    """Maps gradients on cached keys to gradients on position-free keys."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        super().__init__(0, tokens, device)

    def _tables(self, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super()._tables(rope)
        return cos, -sin
