"""Measure the curve of a profile: size, error and KL at each step, on text that it was not learned from."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.family import finest_step_index
from cuvee.codec.errors import InputError
from cuvee.codec.models.fingerprint import model_fingerprint
from cuvee.codec.models.forward import check_tokens, coded_layout, fill, score
from cuvee.codec.models.frozen import frozen
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.support.steps import OCTAVE, step_value
from cuvee.codec.support.torch_modes import without_modes
from cuvee.learning.divergence import compare, stderr
from cuvee.learning.learned_sections import MIN_STEP_INDEX
from cuvee.learning.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)

CURVE_STEP_INDICES = tuple(range(-7 * OCTAVE, OCTAVE + 1, OCTAVE // 2))
CURVE_CHUNK = 256  # tokens per blob on the curve
MEASURE_BATCH = 8  # sequences per forward pass, at most
_MOST_LOGITS = 1 << 26  # of a forward pass: two float32 tensors of them are held at a time
_Way = tuple[int, bool]  # step index, and whether the chunks are coded without token ids


def by_kind(
    model: PreTrainedModel, token_ids: torch.Tensor | Mapping[str, torch.Tensor], prefix: int | None
) -> dict[str | None, tuple[torch.Tensor, int]]:
    """Return checked calibration text by kind (None for a single one), with the length of its prefix."""
    if isinstance(token_ids, torch.Tensor):
        return {None: (token_ids, check_tokens(model, token_ids, prefix))}
    if not isinstance(token_ids, Mapping):
        raise InputError(
            f"token_ids: must be an integer tensor [N, T], or a mapping of such by kind of text, got "
            f"{type(token_ids).__name__}: tokenize texts first"
        )
    if not token_ids:
        raise InputError("token_ids: must have at least one kind of text, got an empty mapping")
    return {kind: (tokens, check_tokens(model, tokens, prefix)) for kind, tokens in token_ids.items()}


def _plain_step_indices(plain: Profile, steps: Sequence[int]) -> Sequence[int]:
    """Return the steps at which chunks without token ids are measured: half as many, since few chunks lack them."""
    finest = max(finest_step_index(section.scale) for section in plain.learned)
    served = [step_index for step_index in steps if step_index >= finest]
    return [step_index for number, step_index in enumerate(served) if number % 2 == 0 or step_index == served[-1]]


def default_step_indices(profile: Profile) -> Sequence[int]:
    """Return the step indices of a curve, without those that are too fine for the widest components."""
    finest = max((finest_step_index(section.scale) for section in profile.learned), default=MIN_STEP_INDEX)
    return tuple(s for s in CURVE_STEP_INDICES if s >= finest)


@dataclass(frozen=True, slots=True)
class Coded:
    """Chunks after a round trip, with their size and error."""

    chunks: list[KVChunk]
    bits_per_value: float
    error: float


def round_trip(codec: Codec, chunks: list[KVChunk]) -> Coded:
    """Encode and decode chunks in blobs of `CURVE_CHUNK` tokens."""
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
    """Return squared error over variance, averaged over units (K or V of a layer)."""
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
    """Measurements of one point of the curve: `kl`, `loss`, `same` per sequence, the others per batch."""

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

    def point(self, step_index: int, plain: bool, kind: str | None) -> CurvePoint:
        return CurvePoint(
            step_index,
            bits_per_value=float(np.average(self.bits, weights=self.tokens)),
            error=float(np.average(self.error, weights=self.tokens)),
            kl=float(np.mean(self.kl)),
            kl_stderr=stderr(self.kl),
            delta_nll=float(np.mean(self.loss)),
            delta_nll_stderr=stderr(self.loss),
            top1=float(np.mean(self.same)),
            kl_worst=float(np.max(self.kl)),
            kind=kind,
            plain=plain,
        )


_PARTS = tuple(part.name for part in fields(_Tally))


class _Tallies:
    """The measurements of a curve, as `Run` keeps them."""

    def __init__(self, tallies: dict[str | None, dict[_Way, _Tally]]) -> None:
        self._tallies = tallies

    def state(self) -> list[list[list[float]]]:
        return [[list(getattr(tally, part)) for part in _PARTS] for tally in self._each()]

    def restore(self, state: list[list[list[float]]]) -> None:
        for tally, parts in zip(self._each(), state, strict=True):
            for part, numbers in zip(_PARTS, parts, strict=True):
                getattr(tally, part)[:] = numbers

    def _each(self) -> list[_Tally]:
        return [tally for by_way in self._tallies.values() for tally in by_way.values()]


@without_modes
def measure(
    profile: Profile,
    model: PreTrainedModel,
    token_ids: torch.Tensor | Mapping[str, torch.Tensor],
    *,
    prefix: int | None = None,
    step_indices: Iterable[int] | None = None,
    batch_size: int = 8,
    progress: bool | Run = True,
) -> Profile:
    """Return the profile with a curve measured on `token_ids`, `[N, T]` or several kinds; arguments as in `calibrate`.

    A curve is of the weights that it was measured with, and the profile names these. If it named others, such as those
    of the model before it was fine-tuned, or none, it gets another id; if not, blobs of one decode with the other.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=4, max_position_embeddings=128)
        >>> model = LlamaForCausalLM(config).eval()
        >>> from cuvee import KVLayout, fit
        >>> from cuvee.codec.models.forward import prefill
        >>> layout, text = KVLayout.from_config(config, model.dtype), torch.randint(64, (8, 64))
        >>> with torch.no_grad():
        ...     fitted = fit(layout, prefill(model, text, layout))
        >>> measured = measure(fitted, model, text[:4], step_indices=(-128, -64), progress=False)
        >>> [point.step_index for point in measured.curve]
        [-128, -64]
    """
    kinds = by_kind(model, token_ids, prefix)
    if single := [str(kind or "the text") for kind, (ids, _) in kinds.items() if len(ids) == 1]:
        _log.warning(
            "token_ids: %s has one sequence, which does not tell how much its KL varies, so presets, which go by the "
            "worst kind and its error, take it without one: measure at least two of each kind", ", ".join(single),
        )  # fmt: skip
    layout = coded_layout(model)
    profile.check_layout(layout)
    steps = sorted(set(step_indices or default_step_indices(profile)))
    ways = [(step_index, False) for step_index in steps]
    coded_by = {False: profile}
    if profile.token_table is not None:
        coded_by[True] = profile.plain
        ways += [(step_index, True) for step_index in _plain_step_indices(coded_by[True], steps)]
    codecs = {way: Codec(coded_by[way[1]], step=step_value(way[0])) for way in ways}
    names = (None, *kinds)
    tallies: dict[str | None, dict[_Way, _Tally]] = {name: {way: _Tally() for way in ways} for name in names}
    vocabulary = model.config.get_text_config().vocab_size
    work = []
    for kind, (ids, cached) in kinds.items():
        rows = max(1, min(batch_size, _MOST_LOGITS // ((ids.shape[1] - cached) * vocabulary)))
        work += [(kind, batch, cached) for batch in ids.split(rows)]
    run = progress if isinstance(progress, Run) else Run(progress)
    filled_of = None
    # A unit of progress is one step on one batch: there may be only a few batches, of more than a minute each.
    units = [(*item, way) for item in work for way in ways]
    with frozen(model), torch.no_grad():
        for kind, batch, cached, way in run.stage("measuring", units, _Tallies(tallies)):
            if batch is not filled_of:  # the next one, or that of a run that goes on
                filled_of, tokens = batch, batch.to(model.device)
                filled, rest = fill(model, tokens[:, :cached], layout), tokens[:, cached:]
                chunks = filled.chunks(tokens[:, :cached])
                exact = score(model, chunks, rest, filled)
                # Rows that go on differently from the same tokens are coded once.
                cut = [row.tobytes() for row in batch[:, :cached].cpu().numpy()]
                first = {key: cut.index(key) for key in cut}
            coded = round_trip(codecs[way], [chunks[row] for row in first.values()])
            back = dict(zip(first, coded.chunks, strict=True))
            other = score(model, [back[key] for key in cut], rest, filled)
            for name in dict.fromkeys((None, kind)):
                tallies[name][way].add(coded, exact, other, rest[:, 1:])
            del other  # before the next, which is as large
    points = (tally.point(*way, kind) for kind, by_way in tallies.items() for way, tally in by_way.items())
    return profile.with_curve(points, [ids.shape[1] for ids, _ in kinds.values()], model_fingerprint(model))
