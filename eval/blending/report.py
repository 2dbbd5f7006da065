"""`cuvee report --blend`: what blending cached chunks loses, and what recomputing some of their tokens wins back.

    texts, passages, FILE.jsonl -> prompts --full prefill--> the reference
                                      |
                 chunks cached alone, or averaged over contexts; exact, or decoded
                                      |
                 blend: selector x cost --KL to the reference--> share recovered -> blend.json

The floor is the blend of exact chunks, each computed alone, with nothing recomputed. The share recovered is one minus
the mean KL over the mean KL of the floor: 0 at the floor, 1 for a full prefill. Standard errors are over prompts, by
the delta method, for both means come from the same prompts; intervals of ratios are percentile bootstraps over prompts.
Costs are in token-layers, check layers and passes of the query included (`cuvee.blend`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cuvee.blend import Blender, ChunkCache, Segment
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.divergence import compare, stderr
from cuvee.codec.errors import InputError, ProfileMismatch
from cuvee.codec.fingerprint import model_fingerprint
from cuvee.codec.layout import KVLayout
from cuvee.codec.model import empty_cache
from cuvee.codec.profile import Profile
from cuvee.eval.bench.machine import hardware, torch_threads
from cuvee.eval.blending.methods import (
    ALONE,
    AVERAGED,
    COMPARED,
    DEFAULT,
    EXACT,
    NOTHING,
    ON_ALONE,
    ON_AVERAGED,
    ON_DECODED,
    SELECTORS,
)
from cuvee.eval.blending.prompts import (
    Construction,
    Prompt,
    ahead_prompts,
    multidoc_prompts,
    passage_prompts,
    reread_prompts,
)
from cuvee.eval.blending.render import write_blend_report
from cuvee.eval.blending.wall_time import LEAST_TOKENS, measure_wall_time
from cuvee.eval.corpus import (
    BUNDLED_MODEL,
    Corpus,
    calibration_windows,
    load_model,
    load_tokenizer,
    read_corpus,
    spread_sequences,
)
from cuvee.eval.data import CALIBRATION_TEXTS, EVALUATION_TEXTS
from cuvee.eval.files import write_json
from cuvee.eval.protocol import LENGTH, PREFIX, SEED, reread
from cuvee.eval.stats import DRAWS, paired_difference
from cuvee.integrations.stores.memory import MemoryStore

__all__ = ["BlendConfig", "quick_blend_config", "run_blend_report", "share_recovered"]

FORMAT, VERSION = "cuvee-blend-report", 1
RIVALS = {"hkvd": ("hkvd", "hkvd-gradual"), "boundary": ("boundary",)}  # each taken at its better setting
_REPORT = "blend.json"
_STORE_BYTES = 1 << 28

F64 = npt.NDArray[np.float64]
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BlendConfig:
    """What a report on blending measures.

    Attributes:
        model: a folder, a hub name, or "books-3m".
        profile: the profile that codes the chunks; none: one is learned, group "layer".
        calibration: texts to learn from, and to take contexts from; `calibration_sequences` of them at most.
        evaluation: texts of the construction "reread"; `prompts` of them at most.
        multidoc: .jsonl files, each a construction of its own: objects with id, passages, gold, query and target.
        chunks, chunk_tokens, suffix: cached chunks of a prompt, tokens of each, tokens after them.
        documents: of the task cuvee_passages, and of each file, at most.
        fit: a prompt of a `multidoc` file with more tokens has its passages cut, to 64 tokens each.
        contexts, context_tokens: what chunks are averaged over.
        costs: shares of the token-layers that are spent; all of them on exact chunks of "reread".
        few_costs: those among them for decoded chunks and for what else is measured.
        qualities: of the codec.
        lengths: of prompts whose wall time is measured, tokens.
        seed: of the repeats, of random selection, of the bootstrap.
        quick: less of everything; see `quick_blend_config`.

    Raises:
        InputError: a number out of range.
    """

    model: str = BUNDLED_MODEL
    profile: str | None = None
    calibration: tuple[str, ...] = CALIBRATION_TEXTS
    calibration_sequences: int = 200
    evaluation: tuple[str, ...] = EVALUATION_TEXTS
    multidoc: tuple[str, ...] = ()
    prompts: int = 48
    chunks: int = 3
    chunk_tokens: int = 128
    suffix: int = 64
    documents: int = 60
    fit: int = 512
    contexts: int = 8
    context_tokens: int = 128
    costs: tuple[float, ...] = (0.05, 0.1, 0.15, 0.3, 0.45, 0.7, 1.0)
    few_costs: tuple[float, ...] = COMPARED
    qualities: tuple[str, ...] = ("high", "balanced", "small")
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    seed: int = SEED
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("prompts", "chunk_tokens", "documents", "fit", "contexts", "context_tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: must be at least 1, got {getattr(self, name)}")
        for name in ("chunks", "suffix"):
            if getattr(self, name) < 2:
                raise InputError(f"{name}: must be at least 2, got {getattr(self, name)}")
        if bad := [cost for cost in self.costs if not 0 < cost <= 1]:
            raise InputError(f"costs: must be above 0 and at most 1, got {bad[0]:g}")
        if set(self.few_costs) - set(self.costs):
            raise InputError("few_costs: must be among costs, for decoded chunks are compared with exact ones")
        if short := [length for length in self.lengths if length < LEAST_TOKENS]:
            raise InputError(f"lengths: must be at least {LEAST_TOKENS} tokens, got {short[0]}")


def quick_blend_config(config: BlendConfig) -> BlendConfig:
    """The same with fewer prompts, costs and lengths; what was narrower already stays."""
    return replace(
        config,
        quick=True,
        calibration_sequences=min(config.calibration_sequences, 32),
        prompts=min(config.prompts, 10),
        documents=min(config.documents, 8),
        costs=tuple(cost for cost in config.costs if cost in (*COMPARED, 1.0)),
        qualities=tuple(quality for quality in config.qualities if quality == "balanced"),
        lengths=tuple(length for length in config.lengths if length <= 1024),
    )


@dataclass(slots=True)
class _Measured:
    """One selector at one cost on one kind of chunks: a number per prompt."""

    kv: str
    chunks: str
    selector: str
    cost: float | None
    described: str = ""
    reason: str | None = None
    kl: list[float] = field(default_factory=list)
    delta_nll: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)
    correct: list[bool] = field(default_factory=list)


def share_recovered(kl: Sequence[float] | F64, floor: Sequence[float] | F64) -> tuple[float | None, float | None]:
    """One minus mean KL over the mean KL of the floor, and its standard error over prompts (delta method).

    Args:
        kl: nats per token, one number per prompt.
        floor: the same where nothing is recomputed.

    Returns:
        The share, None where the floor is no worse than the reference; its error, None of a single prompt.
    """
    above, below = np.asarray(kl, np.float64), np.asarray(floor, np.float64)
    if below.mean() <= 0:
        return None, None
    ratio = above.mean() / below.mean()
    error = stderr(((above - ratio * below) / below.mean()).tolist())
    return float(1 - ratio), error


def ratio_of_shares(of: F64, against: F64, floor: F64, seed: int) -> dict[str, float | None]:
    """How many times as much of the floor one method recovers as another, from KL by prompt, with its 95 % interval.

    None where the other recovers nothing, and for an end of the interval where that is so in too many draws.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    weights = generator.multinomial(len(floor), np.full(len(floor), 1 / len(floor)), size=DRAWS)
    won, base = weights @ (floor - of), weights @ (floor - against)
    drawn = np.sort(np.divide(won, base, out=np.full(DRAWS, np.inf), where=base > 0))
    low, high = drawn[int(0.025 * DRAWS)], drawn[-1 - int(0.025 * DRAWS)]
    whole = float((floor - against).sum())
    return {
        "ratio": float((floor - of).sum()) / whole if whole > 0 else None,
        "low": float(low) if np.isfinite(low) else None,
        "high": float(high) if np.isfinite(high) else None,
    }


def run_blend_report(
    config: BlendConfig, out: Path, console: Console, *, force: bool = False, command: str = ""
) -> dict[str, Any]:
    """Measure blending and write `blend.json`, `blend.md` and `plots/` into the folder `out`.

    Args:
        config: what to measure.
        out: the folder.
        console: where progress goes.
        force: replace another report there.
        command: what a reader would type to get the same.

    Returns:
        the report, JSON-ready.

    Raises:
        InputError: `out` holds something; texts, files or sizes that do not fit the model.
        UnsupportedModel, ProfileMismatch, ProfileError: a model that cuvee does not support, a profile of another one.
        CuveeError: a blend that recomputes everything is not the full prefill; then nothing is timed.
    """
    _check_folder(out, force)
    # A model so small gains nothing by more threads of torch, and on a busy machine they wait for each other.
    with torch_threads(1) if config.model == BUNDLED_MODEL else contextlib.nullcontext(), torch.no_grad():
        return _Run(config, out, console, command).run()


class _Run:
    """One run: what is measured so far (`data`), and how to measure the rest."""

    def __init__(self, config: BlendConfig, out: Path, console: Console, command: str) -> None:
        self.config = config
        self.out = out
        self.console = console
        self.model: Any = load_model(config.model, "float32")
        self.layout = KVLayout.from_config(self.model.config, dtype=self.model.dtype)
        self.fingerprint = model_fingerprint(self.model)
        self.given = None if config.profile is None else self._given(config.profile)
        self.calibration = [read_corpus(text, config.model) for text in config.calibration]
        evaluation = [read_corpus(text, config.model) for text in config.evaluation]
        self.constructions = self._constructions(evaluation)
        for made in self.constructions:
            self._check_lengths(made)
        contexts = spread_sequences(self.calibration, config.context_tokens, config.contexts)
        exact = Codec(Profile.generic(self.layout), "lossless")
        store = MemoryStore(_STORE_BYTES)
        self.blender = Blender(self.model)
        self.codec = exact
        self.libraries = {
            ALONE: ChunkCache(self.model, exact, store),
            AVERAGED: ChunkCache(self.model, exact, store, contexts=contexts),
        }
        self.data = self._describe(command, evaluation, contexts)

    # What is measured --------------------------------------------------------------------------------------------

    def _given(self, path: str) -> Profile:
        profile = Profile.load(path)
        profile.check_layout(self.layout)
        if profile.model not in (None, self.fingerprint):
            raise ProfileMismatch(
                f"{path}: was calibrated on other weights ({profile.model[:12]}…) than those of {self.config.model} "
                f"({self.fingerprint[:12]}…): learn one for this model, or leave --profile out"
            )
        return profile

    def _constructions(self, evaluation: Sequence[Corpus]) -> list[Construction]:
        config = self.config
        tokenizer = load_tokenizer(config.model)
        whole = reread_prompts(
            evaluation, config.prompts, config.chunks, config.chunk_tokens, config.suffix, config.seed
        )
        made = [whole, ahead_prompts(whole), passage_prompts(tokenizer, config.documents)]
        for path in config.multidoc:
            made.append(multidoc_prompts(Path(path), tokenizer, config.documents, config.fit))
            if made[-1].name in [other.name for other in made[:-1]]:
                raise InputError(f"multidoc: {path} must have a name of its own, {made[-1].name} is taken")
        return made

    def _check_lengths(self, made: Construction) -> None:
        longest = max(prompt.length for prompt in made.prompts)
        averaged = self.config.context_tokens + max(len(c) for prompt in made.prompts for c in prompt.chunks)
        limit = self.layout.max_positions
        if limit is not None and max(longest, averaged) > limit:
            raise InputError(
                f"{made.name}: has a prompt of {longest} tokens and chunks that end at {averaged} behind a context; "
                f"the model has {limit} positions"
            )

    def _describe(self, command: str, evaluation: Sequence[Corpus], contexts: torch.Tensor) -> dict[str, Any]:
        """The report before anything is measured."""
        config = self.config
        asked = json.loads(json.dumps(asdict(config)))  # as it will be read back
        return {
            "format": FORMAT,
            "version": VERSION,
            "complete": False,
            "command": command,
            "configuration": {
                **{name: value for name, value in asked.items() if name != "profile"},
                "model": Path(config.model).name,
                "multidoc": [Path(path).name for path in config.multidoc],
            },
            "environment": {**hardware(), "gpu": None, "threads": torch.get_num_threads()},
            "model": {
                "name": Path(config.model).name,
                "fingerprint": self.fingerprint,
                "model_type": self.layout.model_type,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "dtype": self.layout.dtype,
                "layers": self.layout.num_layers,
                "values_per_token": self.layout.values_per_token,
            },
            "text": {
                "calibration": [_text(corpus) for corpus in self.calibration],
                "evaluation": [_text(corpus) for corpus in evaluation],
                "contexts": len(contexts),
                "contexts_sha256": _sha256(contexts),
            },
            "profile": None,
            "constructions": [],
            "comparison": [],
            "codec_cost": [],
            "wall_time": None,
            "seconds": 0.0,
        }

    # Measuring ---------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """All of it, then the documents."""
        began = time.perf_counter()

        def save() -> None:
            self.data["seconds"] = time.perf_counter() - began
            write_json(self.out / _REPORT, self.data)

        columns = (TextColumn("{task.description:32}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
        shown = Console(file=sys.stderr, force_terminal=self.console.is_terminal or None)
        with Progress(*columns, TimeRemainingColumn(), console=shown, transient=True) as progress:
            bar = progress.add_task("", total=None)

            def step(what: str) -> None:
                progress.update(bar, description=what)
                if not shown.is_terminal:
                    self.console.print(f"{what} …", style="dim", highlight=False)

            codecs = self._codecs(step)
            save()
            progress.update(bar, total=sum(len(made.prompts) for made in self.constructions), completed=0)
            for made in self.constructions:
                step(f"blending: {made.name}")
                entry = self._measure(made, codecs, lambda: progress.advance(bar))
                self.data["constructions"].append(entry)
                self.data["comparison"] += _comparison(entry, self.config.seed)
                self.data["codec_cost"] += _codec_cost(entry)
                save()
            if self.config.lengths:
                progress.update(bar, total=None)
                self.data["wall_time"] = measure_wall_time(self.config.lengths, self.config.seed, step)
        self.data["complete"] = True
        save()
        write_blend_report(self.data, self.out)
        return self.data

    def _codecs(self, step: Callable[[str], None]) -> dict[str, Codec]:
        config = self.config
        if not config.qualities:
            return {}
        profile, seconds = self.given, None
        if profile is None:
            step("learning a profile, group layer")
            began = time.perf_counter()
            tokens = calibration_windows(self.calibration, LENGTH, config.calibration_sequences)
            with torch.enable_grad():
                profile = Profile.calibrate(
                    self.model, reread(tokens, PREFIX, config.seed), "layer", prefix=PREFIX, seed=config.seed,
                    progress=False,
                )  # fmt: skip
            seconds = time.perf_counter() - began
        self.data["profile"] = {
            "id": profile.id.hex(),
            "group": profile.group,
            "source": profile.source,
            "given": self.given is not None,
            "seconds": seconds,
        }
        return {quality: Codec(profile, quality) for quality in config.qualities}

    def _methods(self, made: Construction) -> list[tuple[str, str, str, float | None]]:
        """What is measured on every prompt: kind of chunks (two words), selector, cost."""
        few = self.config.few_costs
        costs = few if made.prompts[0].choices else self.config.costs
        groups = [(EXACT, ALONE, ON_ALONE, costs), (EXACT, AVERAGED, ON_AVERAGED, costs)]
        groups += [(q, c, ON_DECODED, few) for q in self.config.qualities for c in (ALONE, AVERAGED)]
        return [
            (kv, chunks, selector, cost)
            for kv, chunks, selectors, asked in groups
            for selector in selectors
            for cost in ((None,) if selector == NOTHING else asked)
        ]

    def _measure(self, made: Construction, codecs: Mapping[str, Codec], advance: Callable[[], None]) -> Entry:
        """One construction, prompt by prompt: what is large is kept for one prompt only."""
        found = [_Measured(*method) for method in self._methods(made)]
        full: list[bool] = []
        sizes: dict[tuple[str, str], int] = dict.fromkeys(((q, c) for q in codecs for c in (ALONE, AVERAGED)), 0)
        for index, prompt in enumerate(made.prompts):
            reference, targets, correct = self._reference(prompt)
            full += [correct] if len(prompt.choices) > 1 else []
            cached = {(EXACT, chunks): self._chunks(prompt, chunks) for chunks in self.libraries}
            for quality, chunks in sizes:
                blobs = [codecs[quality].encode(chunk) for chunk in cached[EXACT, chunks]]
                sizes[quality, chunks] += sum(map(len, blobs))
                cached[quality, chunks] = [codecs[quality].decode(blob) for blob in blobs]
            for one in found:
                if one.reason is None:
                    self._blend(one, prompt, cached[one.kv, one.chunks], reference, targets, self.config.seed + index)
                advance()
        values = self.layout.values_per_token * sum(len(chunk) for prompt in made.prompts for chunk in prompt.chunks)
        kinds = [prompt.kind for prompt in made.prompts]
        floor = np.array(found[0].kl)  # of exact chunks alone, nothing recomputed: the first method
        return {
            "name": made.name,
            "about": made.about,
            "tokens_sha256": _sha256(*(prompt.tokens for prompt in made.prompts)),
            "prompts": [
                {
                    "kind": prompt.kind,
                    "tokens": len(prompt.tokens),
                    "cached": sum(map(len, prompt.chunks)),
                    "scored": prompt.scored or len(prompt.choices[prompt.answer]),
                }
                for prompt in made.prompts
            ],
            "full": {"correct": full, **_accuracy(full, [])} if full else None,
            "coded": [
                {"kv": quality, "chunks": chunks, "bits_per_value": 8 * size / values}
                for (quality, chunks), size in sizes.items()
            ],
            "entries": [_entry(one, floor, kinds, full) for one in found],
        }

    def _chunks(self, prompt: Prompt, which: str) -> list[KVChunk]:
        library = self.libraries[which]
        return [
            self.codec.decode(library.get_or_compute(tokens, leading=index == 0))
            for index, tokens in enumerate(prompt.chunks)
        ]

    def _reference(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor, bool]:
        cache = empty_cache()
        kept = prompt.scored + 1
        logits = self.model(
            input_ids=prompt.tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=kept
        ).logits[0]
        return self._predictions(prompt, logits, cache)

    def _predictions(self, prompt: Prompt, logits: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Log-probabilities `[S, V]` of what is scored, its tokens `[S]`, and whether the right choice is taken.

        Args:
            prompt: of S scored tokens.
            logits: `[prompt.scored + 1, V]`, of its last tokens.
            cache: of the prompt; it is used up.
        """
        predicted = logits.float().log_softmax(-1)
        if not prompt.choices:
            return predicted[:-1], prompt.text[-prompt.scored :], False
        # All choices in one pass: each token sees the prompt, and those before it in its own choice.
        lengths = torch.tensor([len(choice) for choice in prompt.choices])
        tokens = torch.tensor([token for choice in prompt.choices for token in choice])
        choice = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(len(tokens)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        own = (choice[:, None] == choice) & (place[:, None] >= place)
        visible = torch.cat([torch.ones(len(tokens), len(prompt.tokens), dtype=torch.bool), own], 1)
        after = self.model(
            input_ids=tokens[None],
            position_ids=(len(prompt.tokens) + place)[None],
            attention_mask=torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None],
            past_key_values=cache,
        ).logits[0].float().log_softmax(-1)  # fmt: skip
        # A token is predicted by the one before it, the first of a choice by the last of the prompt.
        steps = torch.where((place == 0)[:, None], predicted[-1], after.roll(1, 0))
        chosen = steps.gather(-1, tokens[:, None])[:, 0]
        scores = torch.zeros(len(lengths)).index_add(0, choice, chosen)
        right = choice == prompt.answer
        return steps[right], tokens[right], int(scores.argmax()) == prompt.answer

    def _blend(
        self,
        one: _Measured,
        prompt: Prompt,
        chunks: Sequence[KVChunk],
        reference: torch.Tensor,
        targets: torch.Tensor,
        seed: int,
    ) -> None:
        segments = [Segment(tokens, chunk) for tokens, chunk in zip(prompt.chunks, chunks, strict=True)]
        try:
            selector = SELECTORS[one.selector][1](one.cost or 0.0, seed)
            result = self.blender.blend(
                [*segments, Segment(prompt.text)], logits_to_keep=prompt.scored + 1, selector=selector
            )
        except InputError as refused:  # a cost that does not pay for what the selector looks at
            if one.cost is None:
                raise
            one.reason = str(refused)
            return
        predicted, _, correct = self._predictions(prompt, result.logits, result.cache)
        kl, loss, same = compare(reference[None], predicted[None], targets[None])
        one.described = one.described or result.record.selector
        one.kl += kl
        one.delta_nll += loss
        one.top1 += same
        one.spent.append(result.record.cost)
        one.correct += [correct] if len(prompt.choices) > 1 else []


# Numbers -------------------------------------------------------------------------------------------------------------


def _entry(one: _Measured, floor: F64, kinds: Sequence[str], full: Sequence[bool]) -> Entry:
    """What was measured, and what follows from it."""
    named: Entry = {
        "kv": one.kv,
        "chunks": one.chunks,
        "selector": one.selector,
        "label": SELECTORS[one.selector][0],
        "cost": one.cost,
        "described": one.described or None,
        "reason": one.reason,
    }
    if one.reason is not None:
        return named
    kl = np.array(one.kl)
    share, error = share_recovered(kl, floor)
    parts = {}
    for kind in dict.fromkeys(kinds) if len(set(kinds)) > 1 else ():
        mask = np.array([k == kind for k in kinds])
        part, part_error = share_recovered(kl[mask], floor[mask])
        parts[kind] = {
            "prompts": int(mask.sum()),
            **_mean("kl", kl[mask].tolist()),
            "share": part,
            "share_stderr": part_error,
        }
    return {
        **named,
        "spent": float(np.mean(one.spent)),
        **_mean("kl", one.kl),
        "share": share,
        "share_stderr": error,
        **_mean("delta_nll", one.delta_nll),
        **_mean("top1", one.top1),
        **_accuracy(one.correct, full),
        "parts": parts,
        "per_prompt": {
            "kl": one.kl,
            "delta_nll": one.delta_nll,
            "top1": one.top1,
            "spent": one.spent,
            "correct": one.correct or None,
        },
    }


def _mean(name: str, values: Sequence[float]) -> Entry:
    return {name: float(np.mean(values)), f"{name}_stderr": stderr(values)}


def _accuracy(correct: Sequence[bool], full: Sequence[bool]) -> Entry:
    """Accuracy, and its paired difference to that of the full prefill."""
    names = ("accuracy", "accuracy_stderr", "difference", "difference_stderr")
    if not correct:
        return dict.fromkeys(names)
    difference = paired_difference(list(map(float, correct)), list(map(float, full))) if full else (None, None)
    return dict(zip(names, (float(np.mean(correct)), stderr(list(map(float, correct))), *difference), strict=True))


def _measured(made: Entry, **named: Any) -> list[Entry]:
    """Entries with these fields that could be measured."""
    return [
        entry
        for entry in made["entries"]
        if entry["reason"] is None and all(entry[name] == value for name, value in named.items())
    ]


def _kl(entry: Entry) -> F64:
    return np.array(entry["per_prompt"]["kl"])


def _comparison(made: Entry, seed: int) -> list[Entry]:
    """At equal cost, on exact chunks: the best selector and the default against HKVD and boundary tokens."""
    (floor_entry,) = _measured(made, kv=EXACT, chunks=ALONE, selector=NOTHING)
    floor = _kl(floor_entry)
    found = []
    for cost in COMPARED:
        for chunks in (ALONE, AVERAGED):
            measured = _measured(made, kv=EXACT, chunks=chunks, cost=cost)
            if not measured or floor_entry["share"] is None:
                continue
            best = max(measured, key=lambda entry: float(entry["share"]))
            default = [entry for entry in measured if entry["selector"] == DEFAULT]
            for entry in [best, *(d for d in default if d is not best)]:
                against = [
                    _against(made, entry, floor, rival, on, cost, seed)
                    for on in dict.fromkeys((chunks, ALONE))
                    for rival in RIVALS
                ]
                found.append(
                    {
                        "construction": made["name"],
                        "cost": cost,
                        "chunks": chunks,
                        "selector": entry["selector"],
                        "label": entry["label"],
                        "best": entry is best,
                        "share": entry["share"],
                        "share_stderr": entry["share_stderr"],
                        "against": against,
                    }
                )
    return found


def _against(made: Entry, of: Entry, floor: F64, rival: str, chunks: str, cost: float, seed: int) -> Entry:
    """A ratio of shares, with the rival at the better of its settings."""
    asked = [e for key in RIVALS[rival] for e in made["entries"] if _is(e, EXACT, chunks, key, cost)]
    settings = [entry for entry in asked if entry["reason"] is None]
    named = {"rival": rival, "chunks": chunks}
    if not settings:
        reason = next((entry["reason"] for entry in asked), "was not measured")
        empty = dict.fromkeys(("selector", "share", "ratio", "low", "high"))
        return {**named, **empty, "reason": reason}
    other = max(settings, key=lambda entry: float(entry["share"]))
    ratio = ratio_of_shares(_kl(of), _kl(other), floor, seed)
    return {**named, "selector": other["selector"], "share": other["share"], **ratio, "reason": None}


def _is(entry: Entry, kv: str, chunks: str, selector: str, cost: float | None) -> bool:
    return (entry["kv"], entry["chunks"], entry["selector"], entry["cost"]) == (kv, chunks, selector, cost)


def _codec_cost(made: Entry) -> list[Entry]:
    """What decoded chunks lose of the share, in points, paired with exact chunks of the same kind."""
    (floor_entry,) = _measured(made, kv=EXACT, chunks=ALONE, selector=NOTHING)
    scale = float(_kl(floor_entry).mean())
    found = []
    for entry in made["entries"]:
        if entry["kv"] == EXACT or entry["reason"] is not None or scale <= 0:
            continue
        named = {"chunks": entry["chunks"], "selector": entry["selector"], "cost": entry["cost"]}
        for exact in _measured(made, kv=EXACT, **named):
            # Of the difference only: the floor is the same in both shares.
            lost, error = paired_difference(entry["per_prompt"]["kl"], exact["per_prompt"]["kl"])
            found.append(
                {
                    "construction": made["name"],
                    "kv": entry["kv"],
                    **named,
                    "label": entry["label"],
                    "points": 100 * lost / scale,
                    "points_stderr": None if error is None else 100 * error / scale,
                }
            )
    return found


# Files ---------------------------------------------------------------------------------------------------------------


def _text(corpus: Corpus) -> Entry:
    return {"name": Path(corpus.name).name, "sha256": corpus.sha256, "tokens": corpus.tokens}


def _sha256(*tokens: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for row in tokens:
        digest.update(row.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _check_folder(out: Path, force: bool) -> None:
    """Refuse, before anything is loaded, a folder that is none or that holds other things."""
    if out.exists() and not out.is_dir():
        raise InputError(f"out: {out} is a file: choose a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError(f"out: {out} is not empty: choose another folder, or --force to replace a report there")
    if not os.access(next(p for p in (out, *out.parents) if p.exists()), os.W_OK):
        raise InputError(f"out: {out} cannot be written to")
