"""`cuvee bench eviction`: kvpress's presses, cuvee, and soft eviction, at equal bytes.

A context is read, its cache becomes smaller in one way or another, and the model reads on: the end of the text, or a
question about the context and its answer. What it loses is the KL of its predictions against those after the exact
cache, and for answers also their likelihood. Presses drop positions of the cache in bfloat16 or in FP8, before the
question is known; cuvee codes all of them. Bytes are those of the cache per token of the context, positions and
profiles not counted.

    contexts --presses_worker.py, in kvpress's environment--> kept positions
        |                                                          |
    exact cache ------------------------------------------------ gather --> predictions --> KL, loss
        +--------- encode(importance=, from kept positions) ----- decode -------^
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.data.bundled import EVALUATION_TEXTS
from cuvee.codec.data.corpus import (
    leading_ids,
    load_model,
    load_tokenizer,
    model_path,
    pick_evenly,
    read_corpus,
    spread_sequences,
    token_ids,
)
from cuvee.codec.entropy.family import step_value
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.divergence import compare, stderr
from cuvee.codec.models.forward import cache_argument, empty_cache, frozen, prefill
from cuvee.codec.models.latents import append_units
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.support.arrays import F64
from cuvee.eval.bench.eviction import soft
from cuvee.eval.bench.eviction.presses import Kept, Presses, run_presses
from cuvee.eval.machine import hardware, torch_threads
from cuvee.eval.methods import baseline
from cuvee.eval.progress import timed_lines
from cuvee.eval.tasks.public import open_questions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ALONE", "BY_CLASSES", "BY_SCORES", "CUVEE", "DROPPED", "DROPPED_FP8", "FAMILIES", "run_eviction_bench"]

CONTEXT, SCORED = 1024, 128
XQUAD = "XQuAD"
PASSAGES = 5  # that a question of XQuAD comes with: about as many tokens as CONTEXT
PRESSES = ("SnapKVPress", "ExpectedAttentionPress", "TOVAPress", "StreamingLLMPress", "KnormPress")
RATIOS = (0.5, 0.75, 0.875, 0.9375)
QUALITIES = (0.125, "high", "balanced", "small", 4.0, 8.0, 16.0, 32.0)
SOFT_PRESSES, SOFT_RATIOS, SOFT_STEPS = ("SnapKVPress", "TOVAPress"), (0.5, 0.75), (0.5, 2.0, 8.0)
ALONE_OCTAVES, ALONE_STEPS = 4, (0.5, 2.0)
COARSEST = ("high", "balanced", "small", 4.0, 16.0, 64.0, 256.0)

CUVEE, DROPPED, DROPPED_FP8 = "cuvee", "dropped", "dropped, FP8"
BY_SCORES, BY_CLASSES, ALONE = "soft, by scores", "soft, by classes", "soft, prediction alone"
FAMILIES = (CUVEE, DROPPED, DROPPED_FP8, BY_SCORES, BY_CLASSES, ALONE)


@dataclass(frozen=True, slots=True)
class Case:
    """A context and what is read after it.

    Attributes:
        text: where it comes from.
        context: int64 `[T]`.
        rest: int64 `[t]`.
        first: index in `rest` of the first token that is scored, at least 1.
    """

    text: str
    context: torch.Tensor
    rest: torch.Tensor
    first: int


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to make a cache smaller.

    Attributes:
        family: one of `FAMILIES`.
        press: class of kvpress whose choice it follows; "" for none.
        ratio: share of the positions that the press drops; 0 if none or several.
        quality: of the codec, a preset or a step; 0 for dropped positions. With `ALONE`, the step of kept tokens.
    """

    family: str
    press: str = ""
    ratio: float = 0.0
    quality: str | float = 0.0


def settings() -> list[Setting]:
    """Return everything that is measured."""
    dropped = [Setting(family, press, r) for family in (DROPPED, DROPPED_FP8) for press in PRESSES for r in RATIOS]
    out = [*(Setting(CUVEE, quality=quality) for quality in QUALITIES), *dropped]
    for press in SOFT_PRESSES:
        out += [Setting(BY_SCORES, press, quality=step) for step in SOFT_STEPS]
        out += [Setting(BY_CLASSES, press, ratio, step) for ratio in SOFT_RATIOS for step in SOFT_STEPS]
        out += [Setting(ALONE, press, SOFT_RATIOS[0], step) for step in ALONE_STEPS]
    return out


def run_eviction_bench(
    model: str,
    profile: Path,
    python: Path,
    sequences: int,
    questions: int,
    texts: Sequence[str] = (),
    data: Path | None = None,
    any_version: bool = False,
    progress: Console | None = None,
) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        model: whose caches, by the names `load_model` takes; kvpress must know its architecture.
        profile: of this model.
        python: the interpreter of an environment with kvpress.
        sequences: of each text.
        questions: of XQuAD, each about one of five paragraphs.
        texts: to read, see `read_corpus`; the profile should not know them. Default: the bundled ones.
        data: the folder with XQuAD's file; None: the hub. Not read without questions.
        any_version: read another version of XQuAD, too.
        progress: where to list what is being measured; None for nowhere.

    Returns:
        The report, as a dict for JSON: `texts`, what was read; `points`, one for each setting and text, with bytes per
        token, KL and loss, their standard errors, and the figures of each sequence; `coarsest`, what the coarsest class
        of tokens holds by step.

    Raises:
        InputError: a profile of another model, or one without prediction from tokens; a model whose layers differ in
            their number of KV heads; nothing to read, or two texts of one name; see `run_presses`, `read_corpus`,
            `open_questions`.
        FormatError: the presses' answer is malformed.
        ImportError, OSError: the model cannot be loaded, or the profile cannot be read.
    """
    say = timed_lines(progress)
    if sequences < 0 or questions < 0 or not sequences + questions:
        raise InputError(f"sequences, questions: must not both be 0 or negative, got {sequences} and {questions}")
    texts = texts or EVALUATION_TEXTS
    names = [_name(text) for text in texts]
    if len({*names, XQUAD}) <= len(names):
        raise InputError(f"texts: must have different names, got {', '.join(names)}: rename a file")
    lm = load_model(model, "float32")
    given = Profile.load(profile)
    layout = KVLayout.of(lm)
    if replace(given.layout, dtype=layout.dtype) != layout:
        raise InputError(f"profile: must be one for {model}, got {profile}, a profile of another model")
    if not given.predictions or any(section.predictor is None for section in given.learned):
        raise InputError(f"profile: must predict tokens and classes, got {profile}: make it by `cuvee profile learn`")
    if len({layer.kv_heads for layer in layout.layers}) > 1:
        raise InputError(f"model: must have equally many KV heads in all layers, which {model} has not")
    cases = [case for text in texts for case in text_cases(text, model, sequences)]
    cases += question_cases(model, data, questions, any_version)
    say(f"what kvpress keeps of {len(cases)} contexts")
    contexts = [case.context.tolist() for case in cases]
    presses = run_presses(python, Path(model_path(model)), contexts, PRESSES, RATIOS)
    with torch_threads(1):
        measured = measure(lm, given, cases, presses, say)
    return {"hardware": hardware(), "model": model, "profile": profile.name, **measured}


def measure(
    lm: PreTrainedModel, profile: Profile, cases: Sequence[Case], presses: Presses, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return what `run_eviction_bench` returns, of these contexts and of what presses keep of them."""
    layout = KVLayout.of(lm)
    every = settings()
    found: dict[str, list[list[tuple[float, float, float]]]] = {case.text: [[] for _ in every] for case in cases}
    read: dict[str, list[tuple[int, float, float]]] = {case.text: [] for case in cases}
    coarsest: list[dict[str, Any]] = []
    with frozen(lm), torch.no_grad():
        for number, (case, kept) in enumerate(zip(cases, presses.kept, strict=True)):
            say(f"context {number + 1} of {len(cases)}: {case.text}, {len(case.context)} tokens")
            (exact,) = prefill(lm, case.context[None], layout)
            bench = _Bench(lm, profile, case, exact, kept)
            read[case.text].append((len(case.context), bench.nll(bench.expected), bench.nll(bench.without())))
            for own, setting in zip(found[case.text], every, strict=True):
                own.append(bench.run(setting))
            if not coarsest:
                coarsest = [bench.coarsest(quality) for quality in COARSEST]
    return {
        "kvpress": presses.kvpress,
        "kvpress_transformers": presses.transformers,
        "bytes_per_token": 2 * layout.values_per_token,
        "texts": [
            {
                "text": text, "sequences": len(own), "context_tokens": float(np.mean([each[0] for each in own])),
                "nll": float(np.mean([each[1] for each in own])),
                "nll_without_context": float(np.mean([each[2] for each in own])),
            }
            for text, own in read.items()
        ],
        "points": [
            _point(text, setting, own) for text, each in found.items() for setting, own in zip(every, each, strict=True)
        ],
        "coarsest": coarsest,
    }  # fmt: skip


def _point(text: str, setting: Setting, found: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    size, kl, loss = (list(column) for column in zip(*found, strict=True))
    return {
        "text": text, "family": setting.family, "press": setting.press, "ratio": setting.ratio,
        "quality": setting.quality, "bytes_per_token": float(np.mean(size)), "kl": float(np.mean(kl)),
        "kl_stderr": stderr(kl), "delta_nll": float(np.mean(loss)), "delta_nll_stderr": stderr(loss),
        "per_sequence": {"bytes_per_token": size, "kl": kl, "delta_nll": loss},
    }  # fmt: skip


class _Bench:
    """One context, to be measured with many settings."""

    def __init__(
        self, lm: PreTrainedModel, profile: Profile, case: Case, exact: KVChunk, kept: dict[tuple[str, float], Kept]
    ) -> None:
        self._lm, self._profile, self._case, self._kept = lm, profile, case, kept
        served = replace(exact.layout, dtype="bfloat16")
        keys, values = ([tensor.bfloat16() for tensor in units] for units in (exact.keys, exact.values))
        self._cache = KVChunk(keys, values, served, exact.start, exact.token_ids)
        fp8 = baseline("fp8-e4m3")
        self._fp8 = fp8.decode(fp8.encode(self._cache)[0])
        self.expected = self._read(exact)
        self._codec = lru_cache(maxsize=None)(self._make_codec)
        self._own_weights = lru_cache(maxsize=None)(self._make_own_weights)

    def run(self, setting: Setting) -> tuple[float, float, float]:
        """Return bytes per token, KL and loss of log-likelihood, the latter two in nats per scored token."""
        if setting.family in (DROPPED, DROPPED_FP8):
            kept = self._kept[setting.press, setting.ratio]
            cache, width = (self._cache, 2) if setting.family == DROPPED else (self._fp8, 1)
            size = float(kept.mean()) * width * cache.layout.values_per_token
            return (size, *self._lost(self._read(cache, kept)))
        if setting.family == ALONE:  # kept tokens have the step that is asked for, the blob's is coarser
            codec = self._codec(float(setting.quality) * 2**ALONE_OCTAVES)
        else:
            codec = self._codec(setting.quality)
        return self._coded(codec, self._weights(setting, codec))

    def coarsest(self, quality: str | float) -> dict[str, Any]:
        """Return what a context takes and loses with all tokens but the first in the coarsest class."""
        codec = self._codec(quality)
        weights = np.zeros(self._cache.tokens)
        weights[0] = 1
        size, kl, _ = self._coded(codec, weights)
        coded, neutral = soft.coarsest_components(codec)
        return {
            "quality": quality, "step": step_value(codec.step_index), "components": coded,
            "neutral_components": neutral, "bytes_per_token": size, "kl": kl,
        }  # fmt: skip

    def without(self) -> torch.Tensor:
        """Return the predictions without the context."""
        return self._predictions(self._lm(input_ids=self._case.rest[None]).logits)

    def nll(self, predicted: torch.Tensor) -> float:
        """Return the negative log-likelihood of the scored tokens, nats per token."""
        return -float(predicted.gather(-1, self._targets[..., None]).mean())

    @property
    def _targets(self) -> torch.Tensor:
        return self._case.rest[None, self._case.first :]

    def _make_codec(self, quality: str | float) -> Codec:
        if isinstance(quality, str):
            return Codec(self._profile, quality, threads=1)
        return Codec(self._profile, step=quality, threads=1)

    def _make_own_weights(self, codec: Codec) -> F64:
        return soft.weights_of_classes(soft.token_classes(codec, codec.encode(self._cache)))

    def _weights(self, setting: Setting, codec: Codec) -> F64 | None:
        if setting.family == CUVEE:
            return None
        if setting.family == BY_SCORES:
            return soft.votes([self._kept[setting.press, ratio] for ratio in RATIOS])
        kept = self._kept[setting.press, setting.ratio]
        own = self._own_weights(codec)
        if setting.family == BY_CLASSES:
            return soft.evicted(own, kept, setting.ratio)
        return soft.alone(own, kept, setting.ratio, ALONE_OCTAVES)

    def _coded(self, codec: Codec, weights: object) -> tuple[float, float, float]:
        # The whole context is one chunk, because weights of different chunks are not compared with each other.
        blob = codec.encode(self._cache, importance=weights)
        return (len(blob) / self._cache.tokens, *self._lost(self._read(codec.decode(blob))))

    def _lost(self, predicted: torch.Tensor) -> tuple[float, float]:
        (kl,), (loss,), _ = compare(self.expected, predicted, self._targets)
        return kl, loss

    def _read(self, chunk: KVChunk, kept: Kept | None = None) -> torch.Tensor:
        """Return the log-probabilities `[1, t - first, V]` of the scored tokens after what is kept of a cache."""
        cache = empty_cache()
        for layer, units in enumerate(zip(chunk.keys, chunk.values, strict=True)):
            rows = [unit.transpose(0, 1)[None].to(self._lm.dtype) for unit in units]
            if kept is not None:
                index = torch.from_numpy(np.stack([np.flatnonzero(head) for head in kept[layer]]))[None, :, :, None]
                rows = [unit.gather(2, index.expand(-1, -1, -1, unit.shape[-1])) for unit in rows]
            append_units(cache, rows[0], rows[1], layer, chunk.layout.model_type)
        # What is left of the cache is shorter than the context, but the next token's position stays the same.
        positions = torch.arange(chunk.tokens, chunk.tokens + len(self._case.rest))[None]
        rest = self._case.rest[None]
        return self._predictions(
            self._lm(input_ids=rest, position_ids=positions, **cache_argument(self._lm, cache)).logits
        )

    def _predictions(self, logits: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = logits[:, self._case.first - 1 : -1].float().log_softmax(-1)
        return out


def _name(text: str) -> str:
    return Path(text).name


def text_cases(text: str, model: str, count: int) -> list[Case]:
    """Return sequences of a text, of which the last tokens are scored; errors: see `read_corpus`."""
    if not count:
        return []
    rows = spread_sequences([read_corpus(text, model)], CONTEXT + SCORED, count)
    return [Case(_name(text), row[:CONTEXT], row[CONTEXT:], 1) for row in rows]


def question_cases(model: str, data: Path | None, count: int, any_version: bool) -> list[Case]:
    """Return questions of XQuAD after their paragraphs, of which the answers are scored; errors: see `open_questions`.

    Arguments are those of `run_eviction_bench`.
    """
    if not count:
        return []
    tokenizer = load_tokenizer(model)
    leading = torch.tensor(leading_ids(tokenizer), dtype=torch.int64)
    every = open_questions("xquad", None if data is None else str(data), passages=PASSAGES, any_version=any_version)
    cases = []
    for chosen in pick_evenly(every, count):
        document = chosen.document()
        given, question, answer = (
            token_ids(tokenizer, document[part], special=False) for part in ("context", "question", "continuation")
        )
        cases.append(Case(XQUAD, torch.cat([leading, given]), torch.cat([question, answer]), len(question)))
    return cases
