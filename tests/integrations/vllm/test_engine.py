"""The connector in real engines: output with it, and what it says it saved, against the same engine without it.

    reference   no connector             answers computed in full, from the engine's own cache, alone and in a batch
    stored      connector, empty store   the same answers; fills the store
    loaded      connector, full store    the same answers, from what the first process stored
    ranks       two ranks                the same answers, computed and loaded; then one misses an entry, and one raises

The first two share a process, the others have one each: what one process stored another must find. Within a process
engines follow each other, since importing vLLM takes longer than an engine does.

The reference sets the standard: an engine's logits may differ in their last bits by what else is in the batch, and
as much, but no more, is allowed to ours. On CPUs where batching changes nothing, that is: equal to the last bit. That
this sees a cache which is not exact, `test_engine_kinds` shows of random models, and `test_balanced_keeps_its_promise`
of the trained one.

In `CASES`, dtypes and block sizes meet, as they do in the pages (`probe`, `PagedCache`). Models differ, to the
connector, by their `KVLayout` alone; each case has another one, and `tests/codec` crosses layouts with everything the
codec does. What is stored in blocks of one size is loaded into blocks of the other.
"""

from __future__ import annotations

import math
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.integrations.vllm import faults, gpu_defaults
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    EngineFailure,
    Ran,
    Results,
    Step,
    cuvee,
    distance,
    distinct_chunks,
    ids,
    read_results,
    run_engines,
    save_tiny_model,
    spread,
)

from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.integrations.profiles.collection import ProfileCollection
from cuvee.naming.part_keys import part_number

pytestmark = pytest.mark.slow

CHUNK = 128


@dataclass(frozen=True, slots=True)
class Case:
    """Options of the engines of one model: those that load; those that store have blocks of the other size."""

    dtype: str
    block: int
    in_pieces: bool = False  # prompts are computed and loaded in several steps

    @property
    def other_block(self) -> int:
        """Of the engine that stores."""
        return {32: 128, 128: 32}[self.block]

    @property
    def noise(self) -> float:
        """Most that the comparison may allow.

        With bfloat16 a logit of 16 to 32 moves by steps of 1/8, and on some CPUs a batch of another size moves it by
        one; with two blocks exchanged the models generate other tokens, which nothing allows.
        """
        return 0.05 if self.dtype == "float32" else 1.0

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine."""
        return {"dtype": self.dtype, **(CHUNKED if self.in_pieces else {})}


CHUNKED = {"max_num_batched_tokens": 48}  # no multiple of a block, and a block is none of it
# In pieces only where a batch of another size gives the same logits: with bfloat16 that is left to chance.
CASES = {
    "books": Case("float32", 32, in_pieces=True),
    "llama": Case("float32", 128, in_pieces=True),
    "qwen3": Case("bfloat16", 128),
}
RANKS_NOISE = 1e-3


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
# A step of its own for each: requests that are answered together share what the engine has cached itself.
ALONE = Step(list(PROMPTS.values()), forget=True)
TOGETHER = Step(list(PROMPTS.values()), together=True, forget=True)

# Five requests grow to seven blocks each, where there are thirteen: the engine must preempt.
CROWD = [ids(150, 20 + index) for index in range(5)]
CROWDED = {"num_gpu_blocks_override": 12, "max_model_len": 256}  # of two requests, the second to grow preempts one
CROWD_CHUNK = 64
RUSH = Step(CROWD, together=True, forget=True, max_tokens=100)
PREFIX = 192  # tokens of a passage that are cached; `books` is calibrated with as many
PARTS: dict[str, Any] = {"quality": "high", "refinements": 1, "chunk_tokens": PREFIX}
BALANCED: dict[str, Any] = {"quality": "balanced", "chunk_tokens": PREFIX}


def next_tokens(prompts: list[list[int]]) -> Step:
    """The whole distribution of the token after each prompt."""
    return Step(prompts, together=True, max_tokens=1, logprobs=-1)


def prefix_ends(passages: list[list[int]]) -> list[list[int]]:
    """The shortest passage with each prefix."""
    return [passage for passage in passages if len(passage) == PREFIX + 4]


def loadable(prompt: list[int], block: int, unit: int = CHUNK) -> int:
    """Tokens of a prompt that can be loaded: whole blocks of the engine, and the last token is always computed.

    Args:
        prompt: that was stored.
        block: of the engine that loads.
        unit: what was stored of it, multiples of so many tokens: a chunk, or a block where there are tails.
    """
    found = min((len(prompt) - 1) // block * block, len(prompt) // unit * unit)
    return found if found >= 64 else 0


def tails(*prompts: list[int], size: int, block: int) -> int:
    """Distinct tails of some prompts."""
    ends = [(prompt, len(prompt) // block * block) for prompt in prompts]
    return len({tuple(prompt[:end]) for prompt, end in ends if end % size and end >= 64})


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Path]:
    """Checkpoints: the bundled model, and random ones."""
    from cuvee.calibration.bundled import bundled_model_path

    tiny = {family: save_tiny_model(family, folder / family) for family in CASES if family != "books"}
    return {"books": bundled_model_path(), **tiny}


@pytest.fixture(scope="module")
def store(folder: Path) -> Callable[[str], str]:
    """store(name) -> URL of a store on disk."""
    return lambda name: f"file://{folder / 'stores' / name}"


@pytest.fixture(scope="module")
def profile(folder: Path, books: Any) -> str:
    """A collection that holds a profile calibrated for the bundled model."""
    where = f"file://{folder / 'profiles'}"
    ProfileCollection(where).push(books.profile)
    return f"{where}#{books.profile.id.hex()}"


@pytest.fixture(scope="module")
def passages(books: Any) -> list[list[int]]:
    """Text the profile was not calibrated on, each passage ending at several places after its cached part."""
    length = books.orchard.shape[1]
    return [row[:end] for row in books.orchard.tolist() for end in range(PREFIX + 4, length + 1, 4)]


@pytest.fixture(scope="module")
def first_process(
    folder: Path, models: dict[str, Path], store: Callable[[str], str], profile: str, passages: list[list[int]]
) -> Results:
    """Engines without us, and engines that fill a store."""
    # Prompts alone, alone again (from the engine's cache), together, together again.
    again = [Step(step.prompts, step.together) for step in (ALONE, TOGETHER)]
    more = {
        "books": [next_tokens(passages)],
        "llama": [Step(CROWD, forget=True, max_tokens=100), RUSH],
    }
    engines = []
    for family, case in CASES.items():
        steps = [ALONE, again[0], TOGETHER, again[1], *more.get(family, [])]
        # All logprobs, for the passages; the other engines' steps ask for five.
        engines.append(Engine(f"reference-{family}", models[family], steps, {"dtype": case.dtype, "max_logprobs": -1}))
    all_stored = distinct_chunks(CHUNK, *PROMPTS.values())
    for family, case in CASES.items():
        filled = replace(TOGETHER, until=("vllm:cuvee_stored{kind=chunk}", all_stored))
        transfer = cuvee(store("main"), chunk_tokens=CHUNK)
        options = {**case.options, "block_size": case.other_block, "kv_transfer_config": transfer}
        engines.append(Engine(f"stored-{family}", models[family], [filled], options))
    prefixes = [passage[: PREFIX + 1] for passage in prefix_ends(passages)]
    parts = {"kv_transfer_config": cuvee(store("parts"), **PARTS, profile=profile)}
    known = Step(prefixes, together=True, max_tokens=1, until=("vllm:cuvee_stored{kind=chunk}", len(prefixes)))
    engines.append(Engine("parts", models["books"], [known], parts))
    misspelt = {"kv_transfer_config": cuvee(store("main"), chunk_token=CHUNK)}
    engines.append(Engine("misspelt", models["llama"], [], misspelt))
    return run_engines(folder / "first", engines)


@pytest.fixture(scope="module")
def reference(first_process: Results) -> dict[str, Ran]:
    """Engines without us, by model."""
    return {family: first_process[f"reference-{family}"] for family in CASES}


@pytest.fixture(scope="module")
def stored(first_process: Results) -> dict[str, Ran]:
    """Engines that filled the store, by model."""
    return {family: first_process[f"stored-{family}"] for family in CASES}


@pytest.fixture(scope="module")
def loaded(
    folder: Path,
    models: dict[str, Path],
    store: Callable[[str], str],
    profile: str,
    passages: list[list[int]],
    stored: dict[str, Ran],
) -> Results:
    """Engines that find the store full."""
    assert stored
    engines = []
    for family, case in CASES.items():
        transfer = cuvee(store("main"), chunk_tokens=CHUNK)
        options = {**case.options, "block_size": case.block, "kv_transfer_config": transfer}
        engines.append(Engine(family, models[family], [ALONE, TOGETHER], options))
    # The others find what they have stored themselves.
    transfer = cuvee(store("crowd"), chunk_tokens=CROWD_CHUNK)
    crowd_chunks = len(CROWD) * ((len(CROWD[0]) + RUSH.max_tokens - 1) // CROWD_CHUNK)
    filled = replace(RUSH, until=("vllm:cuvee_stored{kind=chunk}", crowd_chunks))
    engines.append(Engine("crowd", models["llama"], [filled, RUSH], {**CROWDED, "kv_transfer_config": transfer}))
    prefixes = [list(prefix) for prefix in {tuple(passage[: PREFIX + 1]) for passage in passages}]
    known = Step(prefixes, together=True, max_tokens=1, until=("vllm:cuvee_stored{kind=chunk}", len(prefixes)))
    balanced = cuvee(store("balanced"), **BALANCED, profile=profile)
    options = {"max_logprobs": -1, "kv_transfer_config": balanced}
    engines.append(Engine("balanced", models["books"], [known, replace(next_tokens(passages), forget=True)], options))
    # A store that has all parts, and one that has dropped its refinements.
    shutil.copytree(folder / "stores" / "parts", folder / "stores" / "whole")
    for file in sorted((folder / "stores" / "parts").rglob("*")):
        if file.is_file() and part_number(file.name):
            file.unlink()
    asked = next_tokens(prefix_ends(passages))
    hurry = replace(asked, params=[{"cuvee": {"deadline_ms": 1.5}} for _ in asked.prompts], forget=True)
    for name, steps in (
        ("parts", [replace(asked, forget=True), asked, hurry]),
        ("whole", [replace(asked, forget=True)]),
    ):
        options = {"max_logprobs": -1, "kv_transfer_config": cuvee(store(name), **PARTS, profile=profile)}
        engines.append(Engine(name, models["books"], steps, options))
    return run_engines(folder / "loaded", engines, fresh=True)


def assert_same(answers: list[Answer], expected: list[Answer], runs: list[list[Answer]], most: float) -> None:
    """Same tokens; logprobs as close as the reference's `runs` of the same prompts are to each other."""
    allowed = 4 * spread(runs)
    assert allowed < most, "the reference does not agree with itself"
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= allowed, distances


@pytest.mark.parametrize("family", CASES)
@pytest.mark.serves(where="engine")
def test_storing_changes_nothing(family: str, reference: dict[str, Ran], stored: dict[str, Ran]) -> None:
    """Of two models also where prompts are computed in pieces."""
    expected, ran = reference[family].steps, stored[family]
    assert_same(ran.steps[0], expected[2], expected[:4], CASES[family].noise)
    assert ran.metric("vllm:cuvee_stored{kind=chunk}") == distinct_chunks(CHUNK, *PROMPTS.values())
    assert 0 < ran.metric("vllm:cuvee_stored_bytes") < ran.metric("vllm:cuvee_raw_bytes")
    assert ran.metric("vllm:cuvee_load_seconds_count") == 0
    ran.assert_sound()


@pytest.mark.parametrize("family", CASES)
def test_another_process_answers_the_same_from_the_store(
    family: str, reference: dict[str, Ran], loaded: Results
) -> None:
    expected, ran, most = reference[family].steps, loaded[family], CASES[family].noise
    alone, together = ran.steps
    assert_same(alone, expected[0], expected[:4], most)
    assert_same(together, expected[2], expected[:4], most)
    # Alone, all that is cached comes from the store; together, requests also find what others have computed.
    # One of the two engines has blocks as long as a chunk, so they share whole chunks; of the last one, the engine with
    # shorter blocks loads a part where the prompt ends with it.
    found = [loadable(prompt, CASES[family].block) for prompt in PROMPTS.values()]
    assert [answer.cached for answer in alone[:-1]] == found[:-1]
    # The last prompt was asked before: its tail may be stored by now, by this engine for itself.
    block = CASES[family].block
    assert alone[-1].cached in (found[-1], loadable(PROMPTS["shared prefix, again"], block, block))
    assert all(answer.cached >= most for answer, most in zip(together, found, strict=True))
    from_store = sum(answer.cached for answer in alone)
    assert ran.metric("vllm:cuvee_loaded_tokens") >= from_store
    assert ran.metric("vllm:external_prefix_cache_hits") >= from_store
    ran.assert_sound()


def test_an_engine_with_an_unknown_option_does_not_start(first_process: Results) -> None:
    with pytest.raises(EngineFailure, match="has no option 'chunk_token': did you mean 'chunk_tokens'"):
        first_process["misspelt"]


def test_preempted_requests_end_the_same(reference: dict[str, Ran], loaded: Results) -> None:
    """Those that store, and those that load what these have stored."""
    crowd, ran = reference["llama"].steps[4:], loaded["crowd"]
    computed, found = ran.steps
    preempted = [ran.metric("vllm:num_preemptions", after) for after in range(2)]
    assert 0 < preempted[0] < preempted[1]
    for answers in (computed, found):
        assert_same(answers, crowd[0], crowd, CASES["llama"].noise)
    assert ran.metric("vllm:cuvee_load_seconds_count", 0) < ran.metric("vllm:cuvee_load_seconds_count", 1)
    assert [answer.cached for answer in found] == [loadable(prompt, 32, 32) for prompt in CROWD]
    ran.assert_sound()


@pytest.fixture(scope="module")
def ranks(folder: Path, models: dict[str, Path]) -> tuple[Results, faults.Outcome]:
    """An engine of two workers that computes and stores, then loads; then a rank misses entries; then one raises."""
    gpu_defaults.need_one_process()
    place, root = folder / "ranks", folder / "ranks-store"
    place.mkdir()
    stored = 2 * distinct_chunks(faults.CHUNK, *PROMPTS.values())
    filled = Step(TOGETHER.prompts, together=True, until=("vllm:cuvee_stored{kind=chunk}", stored))
    ended = 2 * tails(*PROMPTS.values(), size=faults.CHUNK, block=32)
    filled_up = Step(until=("vllm:cuvee_stored{kind=tail}", ended))
    transfer = cuvee(f"file://{root}", chunk_tokens=faults.CHUNK)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "kv_transfer_config": transfer}
    order = [Engine("ranks", models["llama"], [filled, filled_up, ALONE], options)]
    (place / "order").write_bytes(pickle.dumps(order))
    # The engine's own process among them: a worker that raises must not take the scenarios with it.
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "12",  # so long vLLM waits for the rank that waits for the other one
    }  # fmt: skip
    outcome = faults.run_group("ranks", place, models["llama"], str(root), **variables)
    assert (place / "answers").exists(), outcome.log[-4000:]
    return read_results(place / "answers", outcome.log), outcome


@pytest.mark.serves(parallel="tensor parallelism", where="engine")
def test_two_ranks_agree(ranks: tuple[Results, faults.Outcome], reference: dict[str, Ran]) -> None:
    """What they compute, and what they load, is what one rank without us computes."""
    expected, ran = reference["llama"].steps, ranks[0]["ranks"]
    computed, _, found = ran.steps
    assert [answer.cached for answer in found] == [loadable(prompt, 32, 32) for prompt in PROMPTS.values()]
    for answers, exact in ((computed, expected[2]), (found, expected[0])):
        # Two ranks add up in another order than one.
        distances = [distance(answer, other) for answer, other in zip(answers, exact, strict=True)]
        assert max(distances) < RANKS_NOISE, distances
    ran.assert_sound()


@pytest.mark.parametrize("scenario", faults.RANKS)
def test_what_one_rank_misses_or_has_not_computed_neither_has(
    scenario: str, ranks: tuple[Results, faults.Outcome]
) -> None:
    ranks[1].expect_sound(scenario)


def divergence(answer: Answer, exact: Answer) -> float:
    """KL of the next token's distribution from the exact one, in nats."""
    ours, theirs = answer.logprobs[0], exact.logprobs[0]
    assert ours.keys() == theirs.keys()
    return math.fsum(math.exp(logprob) * (logprob - ours[token]) for token, logprob in theirs.items())


def test_balanced_keeps_its_promise(passages: list[list[int]], reference: dict[str, Ran], loaded: Results) -> None:
    """KL of the next token, mean over positions after a loaded cache, against the exact engine.

    At most what the preset promises, times 1.5: the profile was calibrated on another text (see `KL_MARGIN`).
    """
    exact, ran = reference["books"].steps[4], loaded["balanced"]
    first = [index for index, passage in enumerate(passages) if len(passage) == PREFIX + 4]
    assert all(answer.cached >= PREFIX for answer in ran.steps[1])
    assert ran.metric("vllm:external_prefix_cache_hits") >= len(first) * PREFIX
    ran.assert_sound()
    assert ran.log.count("cuvee: took profile ") == 1, "one for both roles, from the collection"
    kl = [divergence(answer, other) for answer, other in zip(ran.steps[1], exact, strict=True)]
    assert len(kl) >= 256
    assert PRESET_KL["balanced"] / 20 < fmean(kl) < 1.5 * PRESET_KL["balanced"]


def test_a_store_that_has_dropped_refinements_is_told_from_one_that_has_not(
    passages: list[list[int]], reference: dict[str, Ran], first_process: Results, loaded: Results
) -> None:
    """Loaded from bases alone; again, which must find nothing of that in the engine; and in a hurry. In another engine,
    from all parts.
    """
    count, ran = len(prefix_ends(passages)), loaded["parts"]
    assert first_process["parts"].metric("vllm:cuvee_stored{kind=chunk}") == count
    exact = [
        answer
        for answer, passage in zip(reference["books"].steps[4], passages, strict=True)
        if len(passage) == PREFIX + 4
    ]
    poor, again, _, whole = (
        [divergence(answer, other) for answer, other in zip(step, exact, strict=True)]
        for step in (*ran.steps, loaded["whole"].steps[0])
    )
    assert [ran.metric("vllm:cuvee_loaded_tokens", after) for after in range(2)] == [count * PREFIX, 2 * count * PREFIX]
    assert fmean(whole) < fmean(poor) / 4 and poor == pytest.approx(again)
    assert ran.metric("vllm:cuvee_deadlines{result=missed}") == count
    assert ran.metric("vllm:cuvee_loaded_at{parts=2}") == 0, "nothing is there but bases"
    assert ran.metric("vllm:cuvee_loaded_at{parts=1}") == ran.metric("vllm:cuvee_loaded_tokens")
    assert ran.metric("vllm:cuvee_loaded_at") == 3 * count * PREFIX, "what the last step computed is counted, too"
    ran.assert_sound()
