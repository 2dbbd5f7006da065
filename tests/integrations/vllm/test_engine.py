"""The connector in real engines: output with it, and what it says it saved, against the same engine without it.

Three processes, each with several engines in turn:

    reference   no connector             answers computed in full, from the engine's own cache, alone and in a batch
    stored      connector, empty store   the same answers; fills the store
    loaded      connector, full store    the same answers, from what the second process stored

The reference sets the standard: an engine's logits may differ in their last bits by what else is in the batch, and
as much, but no more, is allowed to ours. On CPUs where batching changes nothing, that is: equal to the last bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.integrations.vllm.vllm_engine import (
    Answer,
    Engine,
    EngineFailure,
    Ran,
    Results,
    Step,
    cuvee,
    distance,
    need_vllm,
    run_engines,
    save_tiny_model,
    spread,
)

from cuvee.codec.profile import PRESET_KL

pytestmark = pytest.mark.slow

CHUNK = 128
FAMILIES = ("books", "llama", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16")
# Most that the comparison may allow. With bfloat16 a logit of 16 to 32 moves by steps of 1/8, and on some CPUs a batch
# of another size moves it by one; with two blocks exchanged the models generate other tokens, which nothing allows.
NOISE = {"float32": 0.05, "bfloat16": 1.0}
RANKS_NOISE = 1e-3
# Which (model, dtype, block size, asynchronous) load: all of the bundled model, and every pair of two of these.
LOADS = [
    ("books", "float32", 32, False),
    ("books", "float32", 32, True),
    ("books", "float32", 128, False),
    ("books", "float32", 128, True),
    ("books", "bfloat16", 128, True),
    ("llama", "float32", 32, True),
    ("llama", "bfloat16", 128, False),
    ("qwen2", "float32", 128, True),
    ("qwen2", "bfloat16", 32, False),
    ("qwen3", "float32", 128, False),
    ("qwen3", "bfloat16", 32, True),
]
NAMES = [f"{family}-{dtype}-{block}-{'async' if load_async else 'sync'}" for family, dtype, block, load_async in LOADS]


def ids(count: int, seed: int) -> list[int]:
    """Random tokens that every one of the models has."""
    return random.Random(seed).choices(range(1, 256), k=count)


COMMON = ids(2 * CHUNK, 0)
PROMPTS: dict[str, list[int]] = {
    "shorter than a chunk": ids(100, 1),
    "one chunk": ids(CHUNK, 2),
    "one chunk and a token": ids(CHUNK + 1, 3),
    "two chunks": COMMON,
    "two chunks and a token": ids(2 * CHUNK + 1, 4),
    "three chunks and some": ids(400, 5),
    "shared prefix": [*COMMON, *ids(40, 6)],
    "shared prefix, longer": [*COMMON, *ids(150, 7)],
    "shared prefix, again": [*COMMON, *ids(40, 6)],
}
QUESTION, NEXT_QUESTION = ids(100, 8), ids(10, 9)
ANSWER = 60  # with the question it makes one chunk and some
# A step of its own for each: requests that are answered together share what the engine has cached itself.
ALONE = Step(list(PROMPTS.values()), forget=True)
TOGETHER = Step(list(PROMPTS.values()), together=True, forget=True)

# Five requests grow to seven blocks each, where there are thirteen: the engine must preempt.
CROWD = [ids(150, 20 + index) for index in range(5)]
CROWDED = {"num_gpu_blocks_override": 14, "max_model_len": 256}
CROWD_CHUNK = 64
RUSH = Step(CROWD, together=True, forget=True, max_tokens=60)
CHUNKED = {"max_num_batched_tokens": 48}  # no multiple of a block, and a block is none of it
PREFIX = 192  # tokens of a passage that are cached; `books` is calibrated with as many
BALANCED: dict[str, Any] = {"quality": "balanced", "chunk_tokens": PREFIX}


def next_tokens(prompts: list[list[int]]) -> Step:
    """The whole distribution of the token after each prompt."""
    return Step(prompts, together=True, max_tokens=1, logprobs=-1)


def loadable(prompt: list[int], chunk: int = CHUNK) -> int:
    """Tokens of a prompt that can be loaded: whole chunks, and the last token is always computed."""
    return (len(prompt) - 1) // chunk * chunk


def chunks(*prompts: list[int]) -> int:
    """Distinct chunks, each after its prefix, of some sequences whose every token has KV."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(CHUNK, len(prompt) + 1, CHUNK)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return tmp_path_factory.mktemp("vllm_engine")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """Checkpoints: the bundled model, and random ones."""
    from cuvee.eval.data import bundled_model_path

    tiny = {family: save_tiny_model(family, folder / family) for family in FAMILIES if family != "books"}
    return {"books": bundled_model_path(), **tiny}


@pytest.fixture(scope="module")
def store(folder: Path) -> Callable[[str], str]:
    """store(name) -> URL of a store on disk."""
    return lambda name: f"file://{folder / 'stores' / name}"


@pytest.fixture(scope="module")
def profile(folder: Path, books: Any) -> str:
    """Path of a profile calibrated for the bundled model."""
    path = folder / "books.profile"
    books.profile.save(path)
    return str(path)


@pytest.fixture(scope="module")
def passages(books: Any) -> list[list[int]]:
    """Text the profile was not calibrated on, each passage ending at several places after its cached part."""
    length = books.orchard.shape[1]
    return [row[:end] for row in books.orchard.tolist() for end in range(PREFIX + 4, length + 1, 4)]


@pytest.fixture(scope="module")
def reference(folder: Path, models: dict[str, Path], passages: list[list[int]]) -> Results:
    """Engines without us: prompts alone, alone again (from the engine's cache), together, together again."""
    again = [Step(step.prompts, step.together) for step in (ALONE, TOGETHER)]
    turns = [Step([QUESTION], max_tokens=ANSWER), Step([[4, 0, NEXT_QUESTION]], forget=True)]
    steps = [ALONE, again[0], TOGETHER, again[1], *turns]
    engines = [
        Engine(f"{family}-{dtype}", models[family], steps, {"dtype": dtype}) for family in FAMILIES for dtype in DTYPES
    ]
    alone = Step(CROWD, forget=True, max_tokens=60)
    engines.append(Engine("crowd", models["llama"], [alone, Step(CROWD, max_tokens=60), RUSH]))
    engines.append(Engine("passages", models["books"], [next_tokens(passages)], {"max_logprobs": -1}))
    return run_engines(folder / "reference", engines)


@pytest.fixture(scope="module")
def stored(
    folder: Path, models: dict[str, Path], store: Callable[[str], str], profile: str, passages: list[list[int]]
) -> Results:
    """Engines that fill a store: one for each model and dtype, in blocks of 32 and of 128, and under pressure."""
    turn = Step([QUESTION], max_tokens=ANSWER, until=("vllm:cuvee_stored_chunks", chunks(*PROMPTS.values()) + 1))
    engines = [
        Engine(
            f"{family}-{dtype}",
            models[family],
            [TOGETHER, turn],
            {
                "dtype": dtype,
                "block_size": (32, 128)[index % 2],
                "kv_transfer_config": cuvee(store("main"), chunk_tokens=CHUNK, load_async=index % 3 == 0),
            },
        )
        for index, (family, dtype) in enumerate((family, dtype) for family in FAMILIES for dtype in DTYPES)
    ]
    chunked = {**CHUNKED, "kv_transfer_config": cuvee(store("chunked"), chunk_tokens=CHUNK)}
    crowded = {**CROWDED, "kv_transfer_config": cuvee(store("crowd"), chunk_tokens=CROWD_CHUNK)}
    engines.append(Engine("chunked", models["llama"], [TOGETHER], chunked))
    engines.append(Engine("crowd", models["llama"], [RUSH], crowded))
    prefixes = {tuple(passage[: PREFIX + 1]) for passage in passages}
    balanced = {"kv_transfer_config": cuvee(store("balanced"), **BALANCED, profile=profile)}
    engines.append(Engine("balanced", models["books"], [Step([*map(list, prefixes)], max_tokens=1)], balanced))
    # What these store they find again themselves, once the engine's own cache is empty.
    small = {"kv_transfer_config": cuvee(store("small"), quality="small", chunk_tokens=CHUNK)}
    filled = Step(list(PROMPTS.values()), until=("vllm:cuvee_stored_chunks", chunks(*PROMPTS.values())))
    engines += [Engine(f"small-{family}", models[family], [filled, ALONE], small) for family in ("books", "llama")]
    misspelt = {"kv_transfer_config": cuvee(store("main"), chunk_token=CHUNK)}
    engines.append(Engine("misspelt", models["llama"], [], misspelt))
    return run_engines(folder / "stored", engines)


@pytest.fixture(scope="module")
def loaded(
    folder: Path,
    models: dict[str, Path],
    store: Callable[[str], str],
    profile: str,
    passages: list[list[int]],
    reference: Results,
    stored: Results,
) -> Results:
    """Engines that find the store full. The second question of a conversation comes without the first."""
    assert stored

    def engine(name: str, family: str, store_name: str, steps: list[Step], load_async: bool, **options: Any) -> Engine:
        chunk = CROWD_CHUNK if store_name == "crowd" else CHUNK
        transfer = cuvee(store(store_name), chunk_tokens=chunk, load_async=load_async)
        return Engine(name, models[family], steps, {**options, "kv_transfer_config": transfer})

    engines = []
    for name, (family, dtype, block, load_async) in zip(NAMES, LOADS, strict=True):
        turn = Step([conversation(reference[f"{family}-{dtype}"])], until=("vllm:cuvee_loaded_tokens", 1))
        steps = [ALONE, TOGETHER, turn]
        engines.append(engine(name, family, "main", steps, load_async, dtype=dtype, block_size=block))
    for load_async in (False, True):
        mode = "async" if load_async else "sync"
        engines.append(engine(f"chunked-{mode}", "llama", "chunked", [ALONE, TOGETHER], load_async, **CHUNKED))
        engines.append(engine(f"crowd-{mode}", "llama", "crowd", [RUSH], load_async, **CROWDED))
    balanced = cuvee(store("balanced"), **BALANCED, profile=profile)
    options = {"max_logprobs": -1, "kv_transfer_config": balanced}
    engines.append(Engine("balanced", models["books"], [next_tokens(passages)], options))
    return run_engines(folder / "loaded", engines)


def conversation(ran: Ran) -> list[int]:
    """Question, the reference's answer, and the next question."""
    return [*QUESTION, *ran.steps[4][0].tokens, *NEXT_QUESTION]


def assert_same(answers: list[Answer], expected: list[Answer], reference: Ran, most: float = NOISE["float32"]) -> None:
    """Same tokens; logprobs as close as the reference's own runs are to each other."""
    allowed = 4 * spread(reference.steps[: 4 if len(reference.steps) > 4 else 3])
    assert allowed < most, "the reference does not agree with itself"
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= allowed, distances


def assert_sound(ran: Ran) -> None:
    """Nothing failed, and nothing was recomputed."""
    for name in ("failures", "recomputed_tokens", "corrupt", "store_errors", "dropped", "stores_skipped"):
        assert ran.metric(f"vllm:cuvee_{name}") == 0, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_storing_changes_nothing(family: str, dtype: str, reference: Results, stored: Results) -> None:
    expected, ran = reference[f"{family}-{dtype}"], stored[f"{family}-{dtype}"]
    assert_same(ran.steps[0], expected.steps[2], expected, NOISE[dtype])
    assert ran.steps[1][0].tokens == expected.steps[4][0].tokens
    assert ran.metric("vllm:cuvee_stored_chunks") == chunks(*PROMPTS.values()) + 1  # and one of question and answer
    assert 0 < ran.metric("vllm:cuvee_stored_bytes") < ran.metric("vllm:cuvee_raw_bytes")
    assert ran.metric("vllm:cuvee_loads") == 0
    assert_sound(ran)


@pytest.mark.parametrize(("case", "name"), list(zip(LOADS, NAMES, strict=True)), ids=NAMES)
def test_another_process_answers_the_same_from_the_store(
    case: tuple[str, str, int, bool], name: str, reference: Results, loaded: Results
) -> None:
    family, dtype, _, _ = case
    expected, ran = reference[f"{family}-{dtype}"], loaded[name]
    alone, together, turn = ran.steps
    assert_same(alone, expected.steps[0], expected, NOISE[dtype])
    assert_same(together, expected.steps[2], expected, NOISE[dtype])
    assert_same(turn, expected.steps[5], expected, NOISE[dtype])
    # Alone, all that is cached comes from the store; together, requests also find what others have computed.
    assert [answer.cached for answer in alone] == [loadable(prompt) for prompt in PROMPTS.values()]
    assert all(answer.cached >= loadable(prompt) for answer, prompt in zip(together, PROMPTS.values(), strict=True))
    from_store = sum(answer.cached for answer in alone)
    assert ran.metric("vllm:cuvee_loaded_tokens") >= from_store
    assert ran.metric("vllm:external_prefix_cache_hits") >= from_store
    assert_sound(ran)


@pytest.mark.parametrize("name", NAMES)
def test_the_next_turn_loads_the_answer_of_the_last(name: str, loaded: Results) -> None:
    """Question and answer fill a chunk that neither fills alone."""
    (answer,) = loaded[name].steps[2]
    assert len(QUESTION) < CHUNK < len(QUESTION) + ANSWER
    assert answer.cached == CHUNK


@pytest.mark.parametrize("family", ["books", "llama"])
def test_the_comparison_sees_a_lossy_cache(family: str, reference: Results, stored: Results) -> None:
    """What the other tests rely on: if what is loaded were not exact, the answers would not be the same."""
    expected, ran = reference[f"{family}-float32"], stored[f"small-{family}"]
    assert [answer.cached for answer in ran.steps[1]] == [loadable(prompt) for prompt in PROMPTS.values()]
    noise = max(4 * spread(expected.steps[:4]), 1e-4)
    for answer, other, prompt in zip(ran.steps[1], expected.steps[0], PROMPTS.values(), strict=True):
        assert (distance(answer, other) > noise) == (loadable(prompt) > 0)


def test_an_engine_with_an_unknown_option_does_not_start(stored: Results) -> None:
    with pytest.raises(EngineFailure, match="has no option 'chunk_token': did you mean 'chunk_tokens'"):
        stored["misspelt"]


def test_prompts_computed_in_pieces_are_stored(reference: Results, stored: Results) -> None:
    expected, ran = reference["llama-float32"], stored["chunked"]
    assert_same(ran.steps[0], expected.steps[2], expected)
    assert_sound(ran)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_prompts_computed_in_pieces_are_loaded(mode: str, reference: Results, loaded: Results) -> None:
    expected, ran = reference["llama-float32"], loaded[f"chunked-{mode}"]
    assert_same(ran.steps[0], expected.steps[0], expected)
    assert_same(ran.steps[1], expected.steps[2], expected)
    assert [answer.cached for answer in ran.steps[0]] == [loadable(prompt) for prompt in PROMPTS.values()]
    assert_sound(ran)


@pytest.mark.parametrize("mode", ["stored", "loaded-sync", "loaded-async"])
def test_preempted_requests_end_the_same(mode: str, reference: Results, stored: Results, loaded: Results) -> None:
    expected = reference["crowd"]
    ran = stored["crowd"] if mode == "stored" else loaded[mode.replace("loaded", "crowd")]
    assert ran.metric("vllm:num_preemptions") > 0
    assert_same(ran.steps[0], expected.steps[0], expected)
    if mode != "stored":
        assert [answer.cached for answer in ran.steps[0]] == [loadable(prompt, CROWD_CHUNK) for prompt in CROWD]
    assert_sound(ran)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, models: dict[str, Path], store: Callable[[str], str]) -> Results:
    """Tensor parallelizm: an engine of two workers that computes and stores, then loads. Each start takes a minute."""
    transfer = cuvee(store("ranks"), chunk_tokens=CHUNK, load_async=True)
    filled = Step(TOGETHER.prompts, together=True, until=("vllm:cuvee_stored_chunks", 2 * chunks(*PROMPTS.values())))
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "kv_transfer_config": transfer}
    engines = [Engine("ranks", models["llama"], [filled, ALONE], options)]
    return run_engines(folder / "two_ranks", engines, VLLM_CPU_OMP_THREADS_BIND="0|1")


def test_two_ranks_agree(two_ranks: Results, reference: Results) -> None:
    """What they compute, and what they load, is what one rank without us computes."""
    expected, ran = reference["llama-float32"], two_ranks["ranks"]
    computed, loaded = ran.steps
    assert [answer.cached for answer in loaded] == [loadable(prompt) for prompt in PROMPTS.values()]
    for answers, exact in ((computed, expected.steps[2]), (loaded, expected.steps[0])):
        # Two ranks add up in another order than one.
        distances = [distance(answer, other) for answer, other in zip(answers, exact, strict=True)]
        assert max(distances) < RANKS_NOISE, distances
    assert_sound(ran)


def divergence(answer: Answer, exact: Answer) -> float:
    """KL of the next token's distribution from the exact one, in nats."""
    ours, theirs = answer.logprobs[0], exact.logprobs[0]
    assert ours.keys() == theirs.keys()
    return math.fsum(math.exp(logprob) * (logprob - ours[token]) for token, logprob in theirs.items())


def test_balanced_keeps_its_promise(passages: list[list[int]], reference: Results, loaded: Results) -> None:
    """KL of the next token, mean over positions after a loaded cache, against the exact engine.

    At most what the preset promises, times 1.5: the profile was calibrated on another text (see `KL_MARGIN`).
    """
    (exact,), ran = reference["passages"].steps, loaded["balanced"]
    first = [index for index, passage in enumerate(passages) if len(passage) == PREFIX + 4]
    assert all(answer.cached >= PREFIX for answer in ran.steps[0])
    assert ran.metric("vllm:external_prefix_cache_hits") >= len(first) * PREFIX
    assert_sound(ran)
    kl = [divergence(answer, other) for answer, other in zip(ran.steps[0], exact, strict=True)]
    assert len(kl) >= 256
    assert PRESET_KL["balanced"] / 20 < fmean(kl) < 1.5 * PRESET_KL["balanced"]
