"""`cuvee blend-report`: measure what blending cached chunks loses, and what recomputing some tokens recovers.

    texts, passages, FILE.jsonl -> prompts --full prefill--> the reference
                                      |
                 chunks cached alone, averaged over contexts, or cut out of other prompts; exact, or decoded
                                      |
                 blend: selector x cost --KL to the reference--> share recovered -> blend.json

`shares.py` defines the share recovered and its error. Costs are in token-layers and include check layers and passes of
the query (`cuvee.blend`).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import cuvee
from cuvee.blend import Blender, ChunkCache, Segment
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.data.corpus import Corpus, calibration_windows, load_tokenizer, read_corpus, spread_sequences
from cuvee.codec.errors import InputError
from cuvee.codec.learning.divergence import compare
from cuvee.codec.learning.sequences import LENGTH, PREFIX, reread
from cuvee.codec.models.forward import cache_argument, empty_cache, prefill
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.blend_report.blend_report_config import BlendConfig
from cuvee.eval.blend_report.blend_sections import write_blend_report
from cuvee.eval.blend_report.prompts import (
    PUBLIC,
    BlendPrompt,
    Construction,
    ahead_prompts,
    multidoc_prompts,
    passage_prompts,
    public_prompts,
    reread_prompts,
)
from cuvee.eval.blend_report.selectors import (
    ALONE,
    AVERAGED,
    BEHIND,
    CORRECTED,
    EXACT,
    NOTHING,
    ON_ALONE,
    ON_DECODED,
    ON_OTHERS,
    SELECTORS,
)
from cuvee.eval.blend_report.shares import (
    Figures,
    Measured,
    MeasuredPrompts,
    accuracy,
    codec_costs,
    compare_selectors,
    first_figures,
    mean_figures,
    summarize,
)
from cuvee.eval.blend_report.wall_time import measure_wall_time
from cuvee.eval.machine import hardware
from cuvee.eval.progress import ProgressBar
from cuvee.eval.runs import (
    KEPT,
    ReportRun,
    check_folder,
    need_packages,
    software,
    stoppable_run,
    text_entry,
    tokens_sha256,
    writing,
)
from cuvee.integrations.stores.memory import MemoryStore

__all__ = ["BLEND_FORMAT", "BLEND_REPORT_FILE", "BLEND_VERSION", "run_blend_report"]

BLEND_FORMAT, BLEND_VERSION = "cuvee-blend-report", 1
BLEND_REPORT_FILE = "blend.json"
PROFILE_FILE = "profile.safetensors"  # if one is learned
_STORE_BYTES = 1 << 28


def run_blend_report(
    config: BlendConfig, out: Path, console: Console, *, force: bool = False, command: str = ""
) -> dict[str, Any]:
    """Measure blending, or go on with it, and write `blend.json`, `blend.md` and `plots/` into the folder `out`.

    Args:
        config: what to measure.
        out: the folder. If it holds an unfinished report of the same configuration, that is finished; a finished one
            is only rendered again.
        console: where to list the steps.
        force: replace the report of another configuration.
        command: what a reader would type to get the same report.

    Returns:
        The report, as a dict for JSON.

    Ctrl-C and SIGTERM raise `Interrupted` and leave a folder that can be continued.

    Raises:
        ImportError: a package of `cuvee[eval]` is missing.
        InputError: `out` holds other files or cannot be written, or texts, files or sizes do not fit the model.
        Interrupted: Ctrl-C or SIGTERM.
        UnsupportedModelError: cuvee does not support the model.
        ProfileMismatchError, ProfileError: the profile belongs to another model, or cannot be learned.
        CuveeError: a blend that recomputes everything differs from the full prefill, so nothing is timed.
    """
    need_packages("cuvee blend-report", "transformers", "matplotlib")
    check_folder(out, force, resumed=BLEND_REPORT_FILE)
    with stoppable_run(console, f"{out} {KEPT}", config.model), torch.no_grad():
        return _BlendReport(config, out, console, force, command).run()


class _BlendReport(ReportRun):
    """The run behind `run_blend_report`."""

    FORMAT, VERSION, FILE = BLEND_FORMAT, BLEND_VERSION, BLEND_REPORT_FILE
    PERSON = b"cuvee-blend"
    COLUMNS = 32

    def __init__(self, config: BlendConfig, out: Path, console: Console, force: bool, command: str) -> None:
        super().__init__(config.model, config.dtype, "cpu", out, console)
        self.config = config
        self.given = None if config.profile is None else self.measured.profile(config.profile)
        self.calibration = [read_corpus(text, config.model) for text in config.calibration]
        texts = config.evaluation if {"reread", "ahead"} & set(config.constructions) else ()
        evaluation = [read_corpus(text, config.model) for text in texts]
        self.constructions = self._constructions(evaluation)
        for made in self.constructions:
            self._check_lengths(made)
        contexts = torch.empty(0, config.context_tokens, dtype=torch.int64)
        if config.contexts:
            contexts = spread_sequences(self.calibration, config.context_tokens, config.contexts)
        exact = Codec(Profile.unlearned(self.layout), "lossless")
        store = MemoryStore(_STORE_BYTES)
        self.blenders = {correct: Blender(self.model, correct=correct) for correct in (False, True)}
        self.codec = exact
        self.libraries = {ALONE: ChunkCache(self.model, exact, store)}
        if len(contexts):
            self.libraries[AVERAGED] = ChunkCache(self.model, exact, store, contexts=contexts)
        self.kinds = [*self.libraries, *([BEHIND] if config.behind else [])]
        for made in self.constructions:
            self._check_others(made)
        self._coders: dict[str, Codec] | None = None
        self._describe(command, force, evaluation, contexts)

    # What is measured --------------------------------------------------------------------------------------------

    def _constructions(self, evaluation: Sequence[Corpus]) -> list[Construction]:
        config = self.config
        tokenizer = load_tokenizer(config.model)
        made: list[Construction] = []
        if evaluation:
            whole = reread_prompts(
                evaluation, config.prompts, config.chunks, config.chunk_tokens, config.suffix, config.seed
            )
            made += [one for one in (whole, ahead_prompts(whole)) if one.name in config.constructions]
        if "passages" in config.constructions:
            made.append(passage_prompts(tokenizer, config.documents))
        for name in PUBLIC:
            if name in config.constructions:
                made.append(public_prompts(name, config.data, config.any_version, tokenizer, config.documents))
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
                f"{made.name}: has a prompt of {longest} tokens and chunks that end at {averaged} after a context; "
                f"the model has {limit} positions"
            )

    def _check_others(self, made: Construction) -> None:
        """Check that every prompt has enough chunks of other prompts to put before its own, and room for them."""
        behind, limit = self.config.behind, self.layout.max_positions
        for prompt in made.prompts if behind else ():
            others = _others(made, prompt)
            if len(others) < behind:
                raise InputError(
                    f"behind: {made.name} has a prompt beside which there are only {len(others)} chunks of others, not "
                    f"{behind}: give more documents, or a smaller number"
                )
            longest = sum(sorted(map(len, others))[-behind:]) + max(map(len, prompt.chunks))
            if limit is not None and longest > limit:
                raise InputError(
                    f"behind: {behind} chunks of {made.name} and the one behind them may have {longest} tokens; the "
                    f"model has {limit} positions: give a smaller number"
                )

    def _describe(self, command: str, force: bool, evaluation: Sequence[Corpus], contexts: torch.Tensor) -> None:
        """Begin the report, or continue the one in the folder."""
        config = self.config
        asked = json.loads(json.dumps(asdict(config)))  # in the form in which it will be read back
        model = self.measured.describe()
        configuration = {
            **{name: value for name, value in asked.items() if name not in ("profile", "data")},
            "model": model["name"],
            "multidoc": [Path(path).name for path in config.multidoc],
            "profile": None if self.given is None else self.given.id.hex(),
        }
        machine = hardware()
        decided = {
            **configuration,
            "model_fingerprint": self.fingerprint,
            "calibration": [corpus.sha256 for corpus in self.calibration],
            "prompts": {
                made.name: tokens_sha256(*(prompt.tokens for prompt in made.prompts)) for made in self.constructions
            },
            "contexts": tokens_sha256(contexts),
            "software": software(machine),
        }
        empty: dict[str, Any] = {
            "environment": {**machine, "gpu": None, "threads": torch.get_num_threads()},
            "model": model,
            "text": {
                "calibration": [text_entry(corpus) for corpus in self.calibration],
                "evaluation": [text_entry(corpus) for corpus in evaluation],
                "contexts": len(contexts),
                "contexts_sha256": tokens_sha256(contexts),
            },
            "profile": None,
            "constructions": [],
            "unfinished": None,
            "comparison": [],
            "codec_cost": [],
            "wall_time": None,
        }
        self.resume(configuration, decided, empty, command, force)

    @staticmethod
    def measurements(data: Mapping[str, Any]) -> int:
        """Prompts measured."""
        finished = sum(len(made["prompts"]) for made in data["constructions"])
        return finished + (data["unfinished"]["prompts"] if data["unfinished"] else 0)

    # Measuring ---------------------------------------------------------------------------------------------------

    def write_documents(self) -> None:
        """Write `blend.md` and the plots."""
        write_blend_report(self.data, self.out)

    def measure(self, progress: ProgressBar) -> None:
        """Measure one construction after the other, then the wall time."""
        progress.expect(self._steps())
        for made in self.constructions[len(self.data["constructions"]) :]:
            whole = self._measure(made, progress)
            self.data["constructions"].append(whole)
            self.data["comparison"] += compare_selectors(whole, self.config.seed)
            self.data["codec_cost"] += codec_costs(whole)
            self.data["unfinished"] = None
            self.save()
        if self.config.lengths:
            with progress.step("wall time"):
                self.data["wall_time"] = measure_wall_time(self.config.lengths, self.config.seed, progress.tell)

    def _steps(self) -> int:
        """How many steps are missing."""
        missing = sum(len(made.prompts) for made in self.constructions[len(self.data["constructions"]) :])
        missing -= self.data["unfinished"]["prompts"] if self.data["unfinished"] else 0
        return int(self._learns) + int(bool(self.config.lengths)) + missing * (2 if self.config.qualities else 1)

    @property
    def _learns(self) -> bool:
        """Whether a profile must be learned."""
        kept = self.data["profile"] is not None and (self.out / PROFILE_FILE).exists()
        return bool(self.config.qualities) and self.given is None and not kept

    def _codecs(self, progress: ProgressBar) -> dict[str, Codec]:
        """One for each quality. A profile is learned when the first of them is needed."""
        if self._coders is None:
            if self._learns:
                with progress.step("learning a profile, group layer"):
                    self._coders = self._learn_codecs()
            else:
                self._coders = self._learn_codecs()
        return self._coders

    def _learn_codecs(self) -> dict[str, Codec]:
        config, known = self.config, self.data["profile"]
        if not config.qualities:
            return {}
        path = self.out / PROFILE_FILE
        profile, seconds = self.given, None if known is None else known["seconds"]
        if profile is None and not self._learns:
            profile = Profile.load(path)
        elif profile is None:
            began = time.perf_counter()
            tokens = calibration_windows(self.calibration, LENGTH, config.calibration_sequences)
            with torch.enable_grad():
                profile = cuvee.calibrate(
                    self.model, reread(tokens, PREFIX, config.seed), "layer", prefix=PREFIX, seed=config.seed,
                    progress=False,
                )  # fmt: skip
            seconds = time.perf_counter() - began
            with writing(path):
                profile.save(path)
        if known is not None and known["id"] != profile.id.hex():
            raise InputError(f"out: {path} is not the profile that this report was measured with: use --force")
        self.data["profile"] = {
            "id": profile.id.hex(),
            "group": profile.group,
            "source": profile.source,
            "given": self.given is not None,
            "seconds": seconds,
        }
        return {quality: Codec(profile, quality) for quality in config.qualities}

    def _methods(self, made: Construction) -> list[tuple[str, str, str, float | None]]:
        """List the measurements of every prompt: the kind of chunks in two words, the selector, the cost."""
        few = self.config.few_costs
        costs = few if made.prompts[0].choices else self.config.costs
        groups = [(EXACT, chunks, ON_ALONE if chunks == ALONE else ON_OTHERS, costs) for chunks in self.kinds]
        groups += [(quality, chunks, ON_DECODED, few) for quality in self.config.qualities for chunks in self.kinds]
        return [
            (kv, chunks, selector, cost)
            for kv, chunks, selectors, asked in groups
            for selector in selectors
            if selector in (NOTHING, *self.config.selectors)
            for cost in ((None,) if selector == NOTHING else asked)
        ]

    def _measure(self, made: Construction, progress: ProgressBar) -> Figures:
        """Measure one construction, prompt by prompt, so that large tensors are kept for one prompt only."""
        if self.data["unfinished"]:
            found = self._unfinished()
        else:
            coded = {(quality, chunks): 0 for quality in self.config.qualities for chunks in self.kinds}
            found = MeasuredPrompts([Measured(*method) for method in self._methods(made)], coded)
        for index in range(found.prompts, len(made.prompts)):
            self._measure_prompt(made, index, found, progress)
            self.data["unfinished"] = found.to_dict()
            self.save()
        return self._figures(made, found)

    def _unfinished(self) -> MeasuredPrompts:
        try:
            return MeasuredPrompts.from_dict(self.data["unfinished"])
        except InputError as error:
            path = self.out / BLEND_REPORT_FILE
            raise InputError(f"out: {path} is damaged ({error}): choose another folder, or --force") from error

    def _measure_prompt(self, made: Construction, index: int, found: MeasuredPrompts, progress: ProgressBar) -> None:
        """Measure exact chunks first and show their figures, because learning a profile may take minutes."""
        prompt, seed = made.prompts[index], self.config.seed + index
        name = f"{made.name}, prompt {index + 1} of {len(made.prompts)}"
        cached = {}
        with progress.step(f"blending: {name}"):
            reference, targets, correct = self._reference(prompt)
            found.full += [correct] if len(prompt.choices) > 1 else []
            if prompt.words:
                found.answers.append(-float(reference.gather(-1, targets[:, None]).sum()) / prompt.words)
            for chunks in self.kinds:
                cached[EXACT, chunks] = (
                    self._behind(made, prompt, seed) if chunks == BEHIND else self._chunks(prompt, chunks)
                )
                for one in found.methods:
                    if one.reason is None and (one.kv, one.chunks) == (EXACT, chunks):
                        self._blend(one, prompt, cached[EXACT, chunks], reference, targets, seed)
                progress.say_now_and_then(first_figures(made.name, found.methods))
        if found.coded:
            codecs = self._codecs(progress)
            with progress.step(f"blending: {name}, decoded"):
                for quality, chunks in found.coded:
                    blobs = [codecs[quality].encode(chunk) for chunk in cached[EXACT, chunks]]
                    found.coded[quality, chunks] += sum(map(len, blobs))
                    cached[quality, chunks] = [codecs[quality].decode(blob) for blob in blobs]
                for one in found.methods:
                    if one.reason is None and one.kv != EXACT:
                        self._blend(one, prompt, cached[one.kv, one.chunks], reference, targets, seed)
        found.prompts += 1

    def _figures(self, made: Construction, found: MeasuredPrompts) -> Figures:
        values = self.layout.values_per_token * sum(len(chunk) for prompt in made.prompts for chunk in prompt.chunks)
        kinds = [prompt.kind for prompt in made.prompts]
        rates = [len(p.choices[p.answer]) / p.words for p in made.prompts] if found.answers else []
        return {
            "name": made.name,
            "about": made.about,
            "tokens_sha256": tokens_sha256(*(prompt.tokens for prompt in made.prompts)),
            "prompts": [
                {
                    "kind": prompt.kind,
                    "tokens": len(prompt.tokens),
                    "cached": sum(map(len, prompt.chunks)),
                    "scored": prompt.scored or len(prompt.choices[prompt.answer]),
                }
                for prompt in made.prompts
            ],
            "full": {"correct": found.full, **accuracy(found.full, [])} if found.full else None,
            "answers": {**mean_figures("nll", found.answers), "per_prompt": found.answers} if found.answers else None,
            "coded": [
                {"kv": quality, "chunks": chunks, "bits_per_value": 8 * size / values}
                for (quality, chunks), size in found.coded.items()
            ],
            "entries": [summarize(one, found.methods[0], kinds, found.full, rates) for one in found.methods],
        }

    def _chunks(self, prompt: BlendPrompt, which: str) -> list[KVChunk]:
        library = self.libraries[which]
        return [
            self.codec.decode(library.get_or_compute(tokens, leading=index == 0))
            for index, tokens in enumerate(prompt.chunks)
        ]

    def _behind(self, made: Construction, prompt: BlendPrompt, seed: int) -> list[KVChunk]:
        """The chunks of a prompt as they would be harvested from prompts with other chunks before them."""
        draw, others = random.Random(seed), _others(made, prompt)
        found = self._chunks(replace(prompt, chunks=prompt.chunks[:1]), ALONE)
        for tokens in prompt.chunks[1:]:
            before = torch.cat(draw.sample(others, self.config.behind))
            (whole,) = prefill(self.model, torch.cat([before, tokens])[None], self.layout)
            found.append(whole.slice(len(before), len(before) + len(tokens)))
        return found

    def _reference(self, prompt: BlendPrompt) -> tuple[torch.Tensor, torch.Tensor, bool]:
        cache = empty_cache()
        kept = prompt.scored + 1
        logits = self.model(
            input_ids=prompt.tokens[None], **cache_argument(self.model, cache), use_cache=True, logits_to_keep=kept
        ).logits[0]
        return self._predictions(prompt, logits, cache)

    def _predictions(
        self, prompt: BlendPrompt, logits: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Log-probabilities `[S, V]` of what is scored, its tokens `[S]`, and whether the model takes the right choice.

        Args:
            prompt: with S scored tokens.
            logits: `[prompt.scored + 1, V]`, of its last tokens.
            cache: of the prompt. It is used up.
        """
        predicted = logits.float().log_softmax(-1)
        if not prompt.choices:
            return predicted[:-1], prompt.text[-prompt.scored :], False
        # All choices go through in one pass: each token sees the prompt, and the tokens before it in its own choice.
        lengths = torch.tensor([len(choice) for choice in prompt.choices])
        tokens = torch.tensor([token for choice in prompt.choices for token in choice])
        choice = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.arange(len(tokens)) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        own = (choice[:, None] == choice) & (place[:, None] >= place)
        visible = torch.cat([torch.ones(len(tokens), len(prompt.tokens), dtype=torch.bool), own], 1)
        mask = torch.zeros(visible.shape, dtype=self.model.dtype)
        after = self.model(
            input_ids=tokens[None],
            position_ids=(len(prompt.tokens) + place)[None],
            attention_mask=mask.masked_fill(~visible, torch.finfo(mask.dtype).min)[None, None],
            **cache_argument(self.model, cache),
        ).logits[0].float().log_softmax(-1)  # fmt: skip
        # Each token is predicted by the one before it, and the first one of a choice by the last one of the prompt.
        steps = torch.where((place == 0)[:, None], predicted[-1], after.roll(1, 0))
        chosen = steps.gather(-1, tokens[:, None])[:, 0]
        scores = torch.zeros(len(lengths)).index_add(0, choice, chosen)
        right = choice == prompt.answer
        return steps[right], tokens[right], int(scores.argmax()) == prompt.answer

    def _blend(
        self,
        one: Measured,
        prompt: BlendPrompt,
        chunks: Sequence[KVChunk],
        reference: torch.Tensor,
        targets: torch.Tensor,
        seed: int,
    ) -> None:
        segments = [Segment(tokens, chunk) for tokens, chunk in zip(prompt.chunks, chunks, strict=True)]
        try:
            selector = SELECTORS[one.selector][1](one.cost or 0.0, seed)
            result = self.blenders[one.selector in CORRECTED].blend(
                [*segments, Segment(prompt.text)], logits_to_keep=prompt.scored + 1, selector=selector
            )
        except InputError as refused:  # the cost does not even pay for what the selector looks at
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


def _others(made: Construction, prompt: BlendPrompt) -> list[torch.Tensor]:
    """The different chunks of other prompts that are not among this one's."""
    own = {tuple(tokens.tolist()) for tokens in prompt.chunks}
    found = {tuple(tokens.tolist()): tokens for other in made.prompts for tokens in other.chunks}
    return [tokens for key, tokens in found.items() if key not in own]
