"""Time to first token of blended prompts in vLLM, over computing them, by length and cost.

    documents of 512 tokens, each computed once behind another one --> the store
    prompts of them in new orders --> computed, and blended at several costs, in turns --> seconds to the first token

Ratios are taken within a turn. In every timed run the engine must count as cached exactly the tokens up to the end of
the last document, or none. The distance of the first token's distribution from that of the prompt computed is recorded;
at cost 1 it is what the engine makes of another batch size.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cuvee.calibration.bundled import EVALUATION_TEXTS
from cuvee.calibration.corpus import read_corpus
from cuvee.codec.errors import InputError
from cuvee.codec.profiles.quality import LOSSLESS
from cuvee.eval.bench.engine_process import Engine, EngineAnswer, EngineVariant, conditions
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
        rounds: measured turns, after one that warms up.
        document: tokens of each document.
    """

    lengths: tuple[int, ...] = (1024, 2048, 4096)
    costs: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3, 1.0)
    rounds: int = 5
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
    longest = max(scope.lengths) + _HEAD + _QUESTION
    tokens = _tokens(model, max(scope.lengths))
    documents = [tokens[at : at + scope.document] for at in range(0, max(scope.lengths), scope.document)]
    head, question = tokens[-_HEAD - _QUESTION : -_QUESTION], tokens[-_QUESTION:]
    options = {
        "max_model_len": longest + 1 + BLOCK,
        "max_num_batched_tokens": longest + BLOCK,
        "block_size": BLOCK,
    }
    variant = EngineVariant("blend", LOSSLESS, "memory://?max_gb=8")
    with tempfile.TemporaryDirectory() as folder, Engine(Path(folder) / "engine.log") as engine:
        say("starting an engine")
        engine.start(model, options, variant, more={"blend": {}})
        say(f"computing {len(documents)} documents")
        for number, document in enumerate(documents):
            before = [*head, *documents[number - 1][:BLOCK]]
            span = [len(before), len(before) + scope.document]
            engine.ask(
                [[*before, *document, *question]], expect_cached=[0], forget=True,
                params={"cuvee": {"segments": [span]}},
            )  # fmt: skip
        engine.idle()
        measured = [_length(scope, engine, length, documents, head, question) for length in scope.lengths]
    return {
        **conditions(model, LOSSLESS, None),
        "document_tokens": scope.document,
        "rounds": scope.rounds,
        "lengths": measured,
    }


def _length(
    scope: BlendScope,
    engine: Engine,
    length: int,
    documents: Sequence[Sequence[int]],
    head: Sequence[int],
    question: Sequence[int],
) -> dict[str, Any]:
    """Make prompts with this many tokens of documents."""
    rng = random.Random(length)
    turns: list[tuple[EngineAnswer, dict[float, EngineAnswer]]] = []  # computed, and blended by cost
    spans = [[len(head) + at, len(head) + at + scope.document] for at in range(0, length, scope.document)]
    for turn in range(scope.rounds + 1):
        say(f"{length} tokens, turn {turn} of {scope.rounds}")
        chosen = rng.sample(documents, length // scope.document)
        # A text of its own in front, or the store would have the prompt from its first token on.
        front = rng.sample(list(head), len(head))
        prompt = [*front, *(token for document in chosen for token in document), *question]
        answers: dict[float, EngineAnswer] = {}
        for cost in rng.sample(scope.costs, len(scope.costs)):
            answers[cost] = engine.ask(
                [prompt], expect_cached=[len(front) + length], forget=True, logprobs=20,
                params={"cuvee": {"segments": spans, "cost": cost}},
            )  # fmt: skip
        # Computed last: it is stored, and whatever came after it would find it.
        exact = engine.ask(
            [prompt], expect_cached=[0], forget=True, logprobs=20,
            params={"cuvee": {"segments": spans, "blend": False}},
        )  # fmt: skip
        engine.idle()
        if turn:  # what runs for the first time is compiled, or touches memory for the first time
            turns.append((exact, answers))
    full = [exact.seconds for exact, _ in turns]
    return {
        "tokens": length,
        "computed_seconds": spread(full),
        "blends": [
            {
                "cost": cost,
                "over_computed": paired([[answers[cost].seconds] for _, answers in turns], full),
                "kl": fmean(answers[cost].first_token_kl(exact) for exact, answers in turns),
            }
            for cost in scope.costs
        ],
    }


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
        cells = (f"{one['over_computed']['median']:.2f} (KL {one['kl']:.3g})" for one in found)
        rows.append([f"blended at cost {blend['cost']:g}, ratio", *cells])
    title = (
        f"Time to first token: {report['model']}, lossless documents of {report['document_tokens']} tokens; ratio to "
        "computing the prompt (median)"
    )
    table = ReportTable(["tokens ", *(str(entry["tokens"]) for entry in lengths)], rows, title)
    return Shown("Blended prompts in vLLM", machine_and_vllm(report), [table])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="two turns for each length")
    parser.add_argument("--model", "-m", required=True, help="folder of a checkpoint, or smollm2")
    parser.add_argument(
        "--length", action="append", type=int, default=[], metavar="TOKENS", help="of documents; repeatable"
    )


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    scope = BlendScope(rounds=2 if given.quick else 5)
    if given.length:
        scope = replace(scope, lengths=tuple(sorted(set(given.length))))
    return run_blend_bench(scope, checkpoint(given.model))


if __name__ == "__main__":
    sys.exit(run_bench("blend", "Time to first token of blended prompts in vLLM.", _options, _measure, show_blends))
