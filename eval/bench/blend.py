"""Time to first token of blended prompts in vLLM, over computing them, by length and cost.

    documents of 512 tokens, each computed once behind another one --> the store
    prompts of them in new orders --> computed, and blended at several costs, in turns --> seconds to the first token
                                                      the same in float32, other prompts --> KL of the first token

Ratios are taken within a turn. In every run the engine must count as cached exactly the tokens up to the end of the
last document, or none. The KL is from the distribution after the prompt computed, over the whole vocabulary. It is
measured in an engine of its own, in float32: 16-bit arithmetic rounds differently with the number of tokens computed
together, which alone makes a KL of thousandths, and writing a vocabulary of logprobs would count in a timed run.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import read_corpus
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.eval.bench.engine_process import DTYPE, Engine, EngineAnswer, conditions
from cuvee.eval.bench.frame import Shown, checkpoint, machine_and_vllm, need_vllm, run_bench, say
from cuvee.eval.bench.timing import paired, spread
from cuvee.eval.documents import ReportTable

__all__ = ["BlendScope", "run_blend_bench", "show_blends"]

BLOCK = 128
_HEAD, _QUESTION = 24, 24  # tokens before and after the documents


@dataclass(frozen=True, slots=True)
class BlendScope:
    """The scope of the benchmark.

    Attributes:
        lengths: tokens of documents in a prompt; multiples of `document`.
        costs: of blends.
        rounds: timed turns, after one that warms up; medians of fewer than five say little.
        prompts: of each length, over which the KL is averaged.
        document: tokens of each document.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    costs: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3, 1.0)
    rounds: int = 5
    prompts: int = 16
    document: int = 512


def run_blend_bench(scope: BlendScope, model: Path) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        scope: what to measure.
        model: folder of a checkpoint, with its tokenizer.

    Returns:
        The report, as a dict for JSON.

    Raises:
        ImportError: vLLM is not installed.
        InputError: a length is not a multiple of the document's, or more than the texts have.
        CuveeError: an engine failed, or did not reuse the expected tokens.
    """
    need_vllm()
    if bad := [length for length in scope.lengths if length < scope.document or length % scope.document]:
        raise InputError(f"length: must be a multiple of {scope.document} tokens, got {bad[0]}")
    texts = _Texts.of(scope, model)
    timed = [_timed(rounds) for rounds in _answers(scope, model, texts, DTYPE)]
    losses = [_losses(rounds) for rounds in _answers(scope, model, texts, "float32")]
    return {
        **conditions(model, LOSSLESS, None),
        "document_tokens": scope.document,
        "rounds": scope.rounds,
        "prompts": scope.prompts,
        "lengths": [
            {
                "tokens": length,
                "computed_seconds": computed,
                "blends": [{"cost": cost, "over_computed": ratios[cost], "kl": kls[cost]} for cost in scope.costs],
            }
            for length, (computed, ratios), kls in zip(scope.lengths, timed, losses, strict=True)
        ],
    }


_Answered = tuple[EngineAnswer, dict[float, EngineAnswer]]  # computed, and blended by cost


def _answers(scope: BlendScope, model: Path, texts: _Texts, dtype: str) -> Iterator[list[_Answered]]:
    """Yield the turns of each length: those to time, or in float32 those with the logprobs of the whole vocabulary."""
    longest = _HEAD + max(*scope.lengths, BLOCK + scope.document) + _QUESTION
    options: dict[str, Any] = {
        "max_model_len": longest + 1,
        "max_num_batched_tokens": longest + BLOCK,
        "block_size": BLOCK,
        "dtype": dtype,
        "max_logprobs": -1,
    }
    with tempfile.TemporaryDirectory() as folder, Engine(Path(folder) / "engine.log") as engine:
        say(f"starting an engine: {dtype}")
        engine.start(model, options, "memory://?max_gb=8", more={"blend": {}})
        say(f"computing {len(texts.documents)} documents")
        for number, document in enumerate(texts.documents):
            before = [*texts.head, *texts.documents[number - 1][:BLOCK]]
            span = [len(before), len(before) + scope.document]
            engine.ask(
                [[*before, *document, *texts.question]], expect_cached=[0], forget=True,
                params={"cuvee": {"segments": [span]}},
            )  # fmt: skip
        engine.idle()
        for length in scope.lengths:
            rng = random.Random(f"{length} {dtype}")
            if dtype == DTYPE:  # what runs for the first time is compiled, or touches memory for the first time
                yield [_ask(scope, engine, length, texts, rng, None) for _ in range(scope.rounds + 1)][1:]
            else:
                yield [_ask(scope, engine, length, texts, rng, -1) for _ in range(scope.prompts)]


def _ask(
    scope: BlendScope, engine: Engine, length: int, texts: _Texts, rng: random.Random, logprobs: int | None
) -> _Answered:
    """Ask one new prompt with this many tokens of documents, blended at every cost and computed."""
    head = texts.head
    spans = [[len(head) + at, len(head) + at + scope.document] for at in range(0, length, scope.document)]
    chosen = rng.sample(texts.documents, length // scope.document)
    # A text of its own in front, or the store would have the prompt from its first token on.
    front = rng.sample(head, len(head))
    prompt = [*front, *(token for document in chosen for token in document), *texts.question]
    answers: dict[float, EngineAnswer] = {}
    for cost in rng.sample(scope.costs, len(scope.costs)):
        answers[cost] = engine.ask(
            [prompt], expect_cached=[len(front) + length], forget=True, logprobs=logprobs,
            params={"cuvee": {"segments": spans, "cost": cost}},
        )  # fmt: skip
    # Computed last: it is stored, and whatever came after it would find it.
    exact = engine.ask(
        [prompt], expect_cached=[0], forget=True, logprobs=logprobs,
        params={"cuvee": {"segments": spans, "blend": False}},
    )  # fmt: skip
    engine.idle()
    return exact, answers


def _timed(rounds: Sequence[_Answered]) -> tuple[dict[str, Any], dict[float, dict[str, Any]]]:
    """The seconds of computing, and the ratios of blends to it by cost."""
    full = [exact.seconds for exact, _ in rounds]
    costs = rounds[0][1]
    return spread(full), {cost: paired([[answers[cost].seconds] for _, answers in rounds], full) for cost in costs}


def _losses(rounds: Sequence[_Answered]) -> dict[float, float]:
    """The mean KL by cost."""
    return {cost: fmean(answers[cost].first_token_kl(exact) for exact, answers in rounds) for cost in rounds[0][1]}


@dataclass(frozen=True, slots=True)
class _Texts:
    """What prompts are made of: token ids of the documents, and of what stands before and after them."""

    documents: list[list[int]]
    head: list[int]
    question: list[int]

    @classmethod
    def of(cls, scope: BlendScope, model: Path) -> _Texts:
        longest = max(scope.lengths)
        tokens = _tokens(model, longest)
        documents = [tokens[at : at + scope.document] for at in range(0, longest, scope.document)]
        return cls(documents, tokens[-_HEAD - _QUESTION : -_QUESTION], tokens[-_QUESTION:])


def _tokens(model: Path, length: int) -> list[int]:
    """Return this many tokens of the bundled evaluation texts, and those around the documents."""
    ids = [int(one) for name in EVALUATION_TEXTS for one in read_corpus(name, str(model)).documents[0]]
    most = len(ids) - _HEAD - _QUESTION
    if length > most:
        raise InputError(f"length: must be at most {most} tokens, which the texts have, got {length}")
    return ids[: length + _HEAD + _QUESTION]


def show_blends(report: Mapping[str, Any]) -> Shown:
    """Make the table of a report."""
    lengths = report["lengths"]
    rows = [["computed, s", *(f"{entry['computed_seconds']['median']:.3g}" for entry in lengths)]]
    for index, blend in enumerate(lengths[0]["blends"]):
        found = [entry["blends"][index] for entry in lengths]
        cells = (f"{one['over_computed']['median']:.2f} (KL {one['kl']:.2g})" for one in found)
        rows.append([f"blended at cost {blend['cost']:g}, ratio", *cells])
    title = (
        f"Time to first token: {report['model']}, lossless documents of {report['document_tokens']} tokens; ratio to "
        f"computing the prompt (median), and the KL of {report['prompts']} prompts in float32"
    )
    table = ReportTable(["tokens ", *(str(entry["tokens"]) for entry in lengths)], rows, title)
    return Shown(machine_and_vllm(report), [table])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument(
        "--length", action="append", type=int, default=[], metavar="TOKENS", help="of documents; repeatable"
    )


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    scope = BlendScope()
    if given.length:
        scope = replace(scope, lengths=tuple(sorted(set(given.length))))
    return run_blend_bench(scope, checkpoint(given.model))


if __name__ == "__main__":
    sys.exit(run_bench("blend", "Time and KL of the first token of blends in vLLM.", _options, _measure, show_blends))
