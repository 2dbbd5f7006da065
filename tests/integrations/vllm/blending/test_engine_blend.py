"""Blending in real engines: exact where it must be, `cuvee.blend`'s elsewhere, and never found by exact requests.

    plain     without us: the reference
    first     computes every document once, behind some other text; then blends prompts of them, in new orders, at
              several costs, alone and together, and asks for the same prompts exactly in between
    later     another process on the same store: what it blends, the first one stored
    ranks     two ranks
    compiled  the model compiled (nightly)

Engines differ in family, block size and in how segments are found. What is compared with the reference is compared to
the last bit or nearly so: on some CPUs a batch of another size moves a logit by a rounding error.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.vllm import gpu_defaults
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    Ran,
    Results,
    Step,
    cuvee,
    distance,
    run_engines,
    save_tiny_model,
)

from cuvee.blend import Blender, Guided, Segment
from cuvee.blend.runs import context_overhead
from cuvee.calibration.bundled import bundled_model_path, bundled_text
from cuvee.calibration.corpus import load_tokenizer
from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.integrations.vllm.blending.executing import RUN_OVERHEAD

pytestmark = pytest.mark.slow

NOISE = 1e-4  # nats, in float32
RANKS_NOISE = 1e-3
COSTS = (0.0, 0.15, 0.3)
STEP = 48  # tokens of a step, where blends are computed in several
FAMILIES = {"llama": 32, "qwen3": 128}  # block sizes


def ids(count: int, seed: int) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(1, 250), k=count)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of text and documents: its parts, and which of them are documents."""

    parts: tuple[tuple[list[int], bool], ...]

    @property
    def tokens(self) -> list[int]:
        return [token for part, _ in self.parts for token in part]

    @property
    def segments(self) -> list[list[int]]:
        spans, at = [], 0
        for part, cached in self.parts:
            if cached:
                spans.append([at, at + len(part)])
            at += len(part)
        return spans

    def params(self, cost: float) -> dict[str, Any]:
        return {"cuvee": {"segments": self.segments, "cost": cost}}


A, B, C = ids(93, 1), ids(131, 2), ids(77, 3)
BEHIND = ids(11, 4)  # what documents were computed behind
QUESTION = ids(19, 5)
EXACTLY = {"cuvee": {"blend": False}}
PROMPTS = {
    "odd offsets": Prompt(
        ((ids(21, 6), False), (C, True), (A, True), (ids(5, 7), False), (B, True), (QUESTION, False))
    ),
    "repeated and adjacent": Prompt(((ids(17, 12), False), (A, True), (A, True), (C, True), (QUESTION, False))),
    "ends in a document": Prompt(((ids(25, 8), False), (B, True), (C, True))),
    "whole blocks": Prompt(((ids(128, 9), False), (B[:128], True), (C[:64], True), (QUESTION, False))),
}
LEARNED = [Prompt(((BEHIND, False), (part, True), (QUESTION, False))) for part in (A, B, C, B[:128], C[:64])]
# The text before the documents of the last is stored and loaded as any prefix is. The query sees it then, and chooses
# other tokens than `Blender`, which computes all text at once.
ALIKE = len(PROMPTS) - 1
TOKENS = [prompt.tokens for prompt in PROMPTS.values()]
STORED = ("vllm:cuvee_stored{kind=segment}", len(LEARNED))


def blends(cost: float, **step: Any) -> Step:
    """All prompts, blended."""
    return Step(TOKENS, params=[prompt.params(cost) for prompt in PROMPTS.values()], logprobs=-1, **step)


LEARN = Step([p.tokens for p in LEARNED], params=[p.params(0.15) for p in LEARNED], max_tokens=1, until=STORED)
FIRST = [
    LEARN,
    Step(TOKENS, params=[EXACTLY] * len(TOKENS), forget=True, logprobs=-1, salt="reference"),
    blends(1, forget=True),
    *(blends(cost, forget=True) for cost in COSTS),
    blends(COSTS[-1]),
    blends(COSTS[-1]),  # nothing is forgotten: the same again
    Step(TOKENS, params=[EXACTLY] * len(TOKENS), logprobs=-1),  # nor here
    blends(1, forget=True, together=True),
]
WHOLE, ZERO, AGAIN, AFTER, TOGETHER = 2, 3, 7, 8, 9
SEVERAL = Step(TOKENS[:ALIKE], params=blends(0.3).params[:ALIKE], forget=True, samples=3, logprobs=-1, max_tokens=4)
LATE = Prompt(((ids(23, 50), False), (B, True), (A, True), (QUESTION, False)))  # nobody asked for this before
LATER = [Step([LATE.tokens], params=[LATE.params(1)], forget=True, logprobs=-1)]


PLAIN = {"max_logprobs": -1}


def connector(store: Path, **blend: Any) -> dict[str, Any]:
    """Our connector, for short documents."""
    few = {"segment_tokens": 48, "min_context": 0, **blend}
    return {**PLAIN, "kv_transfer_config": cuvee(f"file://{store}", blend=few)}


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    return {family: save_tiny_model(family, folder / family) for family in FAMILIES}


@cache
def paragraph(number: int) -> list[int]:
    """Tokens of sixty words and a blank line."""
    words = bundled_text("orchard").split()[60 * number : 60 * number + 60]
    found: list[int] = load_tokenizer("books-3m")(" ".join(words) + "\n\n", add_special_tokens=False).input_ids
    return found


def paragraphs(*numbers: int) -> list[int]:
    """A prompt of paragraphs and a question."""
    return [*(token for number in numbers for token in paragraph(number)), *paragraph(5)[:19]]


LONG = ids(400, 30)  # found again by its content, behind something else
MOVED = [*ids(37, 31), *LONG, *QUESTION]
CROWD = [Prompt(((ids(9 + n, 40 + n), False), (A, True), (QUESTION, False))) for n in range(5)]
SLICED = {"max_num_batched_tokens": STEP}
CROWDED = {"num_gpu_blocks_override": 14, "max_model_len": 256}


@pytest.fixture(scope="module")
def first(folder: Path, models: dict[str, Path]) -> Results:
    engines = [
        Engine("plain", models["llama"], [Step(TOKENS, forget=True, logprobs=-1)], PLAIN),
        Engine(
            "plain, others", models["llama"],
            [
                Step([LATE.tokens, MOVED], forget=True, logprobs=-1),
                Step([p.tokens for p in CROWD], max_tokens=60),
            ],
            PLAIN,
        ),
        *(
            Engine(
                family, models[family], FIRST,
                {"block_size": block, **connector(folder / f"{family}-store")},
            )
            for family, block in FAMILIES.items()
        ),
        Engine(
            # The second time the engine has all prompts, the third time it finds them.
            "in slices", models["llama"], [LEARN, blends(0.3, forget=True), blends(0.3), blends(0.3), SEVERAL],
            {**SLICED, **connector(folder / "slices-store")},
        ),
        Engine(
            "by content", models["llama"],
            [
                Step([[*LONG, *QUESTION]], max_tokens=1, until=("vllm:cuvee_stored{kind=segment}", 5)),
                Step([MOVED], forget=True, logprobs=-1),
                Step([MOVED], forget=True, logprobs=-1, sleeps=True),
            ],
            {**SLICED, **connector(folder / "content-store", cost=1)},
        ),
        Engine(
            "by paragraphs", bundled_model_path(),
            [
                Step([paragraphs(0, 1, 2)], max_tokens=1, until=("vllm:cuvee_stored{kind=segment}", 3)),
                Step([paragraphs(3, 2, 1)], forget=True),
            ],
            {"skip_tokenizer_init": False, **connector(folder / "paragraphs-store", cost=1)},
        ),
        Engine(
            "crowded", models["llama"],
            [
                LEARN,
                Step(
                    [p.tokens for p in CROWD], params=[p.params(1) for p in CROWD], together=True, forget=True,
                    max_tokens=60,
                ),
            ],
            {**CROWDED, **connector(folder / "crowded-store")},
        ),
    ]  # fmt: skip
    return run_engines(folder / "first", engines)


@pytest.fixture(scope="module")
def later(folder: Path, models: dict[str, Path], first: Results) -> Results:
    assert first["llama"].steps
    engine = Engine("later", models["llama"], LATER, connector(folder / "llama-store"))
    return run_engines(folder / "later", [engine])


@pytest.fixture(scope="module")
def ranks(folder: Path, models: dict[str, Path]) -> Ran:
    gpu_defaults.need_one_process()
    options = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        **SLICED,
        **connector(folder / "ranks-store"),
    }
    learn = Step(LEARN.prompts, params=LEARN.params, max_tokens=1, until=(STORED[0], 2 * STORED[1]))
    steps = [learn, blends(1, forget=True), blends(0.3, forget=True)]
    engine = Engine("ranks", models["llama"], steps, options)
    ran = run_engines(folder / "ranks", [engine], VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="0|1")
    return ran["ranks"]


@pytest.fixture(scope="module")
def compiled(folder: Path, models: dict[str, Path]) -> Ran:
    """An engine that compiles the model, as vLLM does by default."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    steps = [LEARN, blends(1, forget=True), blends(0.3, forget=True)]
    options = {"enforce_eager": False, **connector(folder / "compiled-store")}
    ran = run_engines(
        folder / "compiled",
        [Engine("compiled", models["llama"], steps, options)],
        TORCH_COMPILE_DISABLE="0",
        VLLM_CACHE_ROOT=str(folder / "compiled-model"),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
    )
    return ran["compiled"]


def apart(answers: Sequence[Answer], others: Sequence[Answer]) -> float:
    """Largest distance of answers from others to the same prompts."""
    return max(distance(answer, other) for answer, other in zip(answers, others, strict=True))


def reused(answers: Sequence[Answer]) -> list[int]:
    """Tokens that each answer says its prompt took from the store."""
    return [answer.told["cuvee"]["reused_tokens"] for answer in answers if answer.told]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_blend_that_recomputes_everything_is_exact(family: str, first: Results) -> None:
    """In one batch, too. Tokens up to the last document count as cached."""
    exact, whole = first[family].steps[1], first[family].steps[WHOLE]
    assert apart(whole, exact) < NOISE and apart(first[family].steps[TOGETHER], exact) < NOISE
    ends = [min(prompt.segments[-1][1], len(prompt.tokens) - 1) for prompt in PROMPTS.values()]
    assert [answer.cached for answer in whole] == ends
    expected = [min(sum(b - a for a, b in p.segments), len(p.tokens) - 1 - p.segments[0][0]) for p in PROMPTS.values()]
    assert reused(whole) == expected
    if family == "llama":
        assert apart(exact, first["plain"].steps[0]) == 0
        assert apart(whole, first["plain"].steps[0]) < NOISE


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_request_never_finds_what_was_blended(family: str, first: Results) -> None:
    ran = first[family]
    assert apart(ran.steps[ZERO], ran.steps[1]) > 0.05  # with nothing recomputed the difference shows
    assert apart(ran.steps[AFTER], ran.steps[1]) < NOISE
    assert ran.metric("vllm:cuvee_blend_seconds_count") >= (1 + len(COSTS)) * len(PROMPTS)
    assert ran.metric("vllm:cuvee_failures") == 0


@pytest.mark.parametrize(("family", "block"), FAMILIES.items())
def test_the_same_blend_is_found_in_the_engine(family: str, block: int, first: Results) -> None:
    ran = first[family]
    held = [(len(tokens) - 1) // block * block for tokens in TOKENS]
    ends = [answer.cached for answer in ran.steps[ZERO]]
    # A rest that is worth it is blended, any other computed.
    expected = [end if end - whole >= 64 else whole for end, whole in zip(ends, held, strict=True)]
    assert [answer.cached for answer in ran.steps[AGAIN]] == expected


def test_paragraphs_are_found_in_another_order(first: Results) -> None:
    """The engine's tokenizer knows the blank lines."""
    (answer,) = first["by paragraphs"].steps[1]
    assert answer.told is not None
    assert answer.told["cuvee"]["reused_tokens"] == len(paragraph(1)) + len(paragraph(2))


def test_a_document_is_found_by_its_content(first: Results) -> None:
    """Prefill in pieces of 48 tokens, too, and so is the blend computed."""
    assert first["by content"].metric("vllm:cuvee_blend_slices") >= len(LONG) / STEP
    (found,), exact = first["by content"].steps[1], first["plain, others"].steps[0][-1]
    assert distance(found, exact) < NOISE
    assert found.told is not None
    assert found.told["cuvee"]["reused_tokens"] > len(LONG) / 2


def test_after_a_sleep_what_was_stored_before_is_blended(first: Results) -> None:
    (before,), (after,) = first["by content"].steps[1:]
    assert distance(after, before) < NOISE
    assert before.told is not None and after.told is not None
    assert after.told["cuvee"]["reused_tokens"] >= before.told["cuvee"]["reused_tokens"]


def test_blended_requests_survive_preemption(first: Results) -> None:
    ran, exact = first["crowded"], first["plain, others"].steps[1]
    assert ran.metric("vllm:num_preemptions") > 0
    assert apart(ran.steps[1], exact) < NOISE


def test_another_process_blends_what_the_first_stored(first: Results, later: Results) -> None:
    ran, exact = later["later"], first["plain, others"].steps[0][-2]
    (answer,) = ran.steps[0]
    assert distance(answer, exact) < NOISE
    assert reused([answer]) == [len(A) + len(B)]
    assert answer.cached == len(LATE.tokens) - len(QUESTION)
    assert ran.metric("vllm:cuvee_stored{kind=segment}") == 0


def test_two_ranks_blend_alike(first: Results, ranks: Ran) -> None:
    _, whole, some = ranks.steps
    assert apart(whole, first["plain"].steps[0]) < RANKS_NOISE
    assert apart(some[:ALIKE], first["in slices"].steps[1][:ALIKE]) < RANKS_NOISE
    assert apart(some[:ALIKE], first["llama"].steps[ZERO + COSTS.index(0.3)][:ALIKE]) > 10 * RANKS_NOISE
    assert ranks.metric("vllm:cuvee_blend_seconds_count") == 2 * len(PROMPTS)


@pytest.mark.nightly  # 45 s, most of them in the compiler
def test_a_compiled_model_blends_alike(folder: Path, first: Results, compiled: Ran) -> None:
    assert list((folder / "compiled-model").rglob("torch_aot_compile/*/*/model")), "the model was compiled"
    _, whole, some = compiled.steps
    assert apart(whole, first["plain"].steps[0]) < RANKS_NOISE
    assert apart(some[:ALIKE], first["llama"].steps[ZERO + COSTS.index(0.3)][:ALIKE]) < RANKS_NOISE
    assert compiled.metric("vllm:cuvee_failures") == 0


def test_several_answers_to_a_prompt_follow_from_the_same_blend(first: Results) -> None:
    """One that is looked up later than another finds its blend in the engine, as if the prompt came again."""
    _, some, _, again, several = first["in slices"].steps
    assert len(several) == 3 * ALIKE
    for at in range(ALIKE):
        answers = [answer.logprobs[0] for answer in several[3 * at : 3 * at + 3]]
        own, found = (
            [
                max(abs(answer[token] - logprob) for token, logprob in blend[at].logprobs[0].items())
                for answer in answers
            ]
            for blend in (some, again)
        )
        assert min(own) < RANKS_NOISE
        assert max(map(min, own, found)) < RANKS_NOISE
        assert {answer.cached for answer in several[3 * at : 3 * at + 3]} <= {some[at].cached, again[at].cached}
    assert len({tuple(answer.tokens) for answer in several[:3]}) > 1, "they are drawn"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cost", COSTS)
def test_a_blend_is_what_the_library_makes_of_it(family: str, cost: float, first: Results, models: Any) -> None:
    """The same chunks, the same selection, the same KV: the next token's distribution is that of `Blender`."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32).eval()
    layout = KVLayout.from_config(model.config, dtype=torch.float32)
    chunks: dict[tuple[int, ...], KVChunk] = {}
    with torch.no_grad():
        for prompt in LEARNED:
            (whole,) = prefill(model, torch.tensor([prompt.tokens]), layout)
            ((start, end),) = prompt.segments
            chunks[tuple(prompt.tokens[start:end])] = whole.slice(start, end)
    blender = Blender(model)
    selector = Guided(cost, run_overhead=RUN_OVERHEAD, context_overhead=context_overhead(model.config))
    answers = first[family].steps[ZERO + COSTS.index(cost)]
    for prompt, answer in list(zip(PROMPTS.values(), answers, strict=True))[:ALIKE]:
        segments = [Segment(part, chunks[tuple(part)] if cached else None) for part, cached in prompt.parts]
        logits = blender.blend(segments, selector=selector).logits[-1]
        expected = logits.log_softmax(-1)
        ours = torch.tensor([answer.logprobs[0][token] for token in range(len(expected))])
        assert float((expected.exp() * (expected - ours)).sum()) < 1e-5
        assert float((expected - ours).abs().max()) < 1e-2
