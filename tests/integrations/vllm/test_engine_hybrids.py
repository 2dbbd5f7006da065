"""Models with recurrent layers in real engines: what is restored of them answers as what is computed.

    granite       Mamba 2 and attention; steps of one block, so that there is a state at the end of every chunk
    lfm2          short convolutions and attention; steps as long as they come, so that most chunks end without one
    qwen3_next    gated delta rule (as in Qwen3.5) and attention in bfloat16, its states partly in float32; the same
    falcon_h1     Mamba 2 beside attention in every layer; shown to load, no more
    nemotron_h    Mamba 2 and attention; the same

vLLM's answers of such models with random weights move with the length of its steps, by far more than rounding. So an
engine that loads is compared with one that has found as many tokens in its own prefix cache: the same states, and the
same steps behind them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    EngineFailure,
    Ran,
    Step,
    distance,
    ids,
    run_engines,
    save_tiny_model,
    transfer,
)

pytestmark = pytest.mark.slow

CHUNK, BLOCK = 64, 32
PROMPTS = [ids(4 * CHUNK + 7, 1), ids(3 * CHUNK + BLOCK + 2, 2), ids(5 * CHUNK, 3)]
LOADABLE = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
# The first prompt's text, with other ends behind three chunks.
BRANCHES = [[*PROMPTS[0][: 3 * CHUNK + 5], *ids(50, seed)] for seed in (4, 7)]
TALK = Step([ids(100, 5)], max_tokens=CHUNK, forget=True)
AGAIN = Step([[0, 0, ids(10, 6)]])
FIRST = Step(PROMPTS)
FORGOTTEN = Step(PROMPTS, forget=True)  # by the engine's own cache
STEPS: dict[str, dict[str, Any]] = {
    # On a CPU, vLLM 0.32 and 0.33 raise where a step of Mamba 2 crosses a block's end.
    "granite": {"max_num_batched_tokens": BLOCK},
    "falcon_h1": {"max_num_batched_tokens": BLOCK},
    "nemotron_h": {"max_num_batched_tokens": BLOCK},
    "lfm2": {},
    "qwen3_next": {"dtype": "bfloat16"},
}
LOADED = tuple(STEPS)
FAMILIES = ("granite", "lfm2", "qwen3_next")


def options(family: str) -> dict[str, Any]:
    """Of an engine."""
    return {"enable_prefix_caching": True, **STEPS[family]}


@pytest.fixture(scope="module")
def first_process(folder: Path) -> Mapping[str, Ran]:
    """Engines without us, and engines that fill a store; both find a prompt again in their own caches."""
    engines = []
    for family in LOADED:
        model, own = save_tiny_model(family, folder / family), options(family)
        stored = Step(PROMPTS[:1], max_tokens=1, until=("vllm:cuvee_stored{kind=state}", 3))
        further = [Step(BRANCHES)] if family in FAMILIES else []
        engines.append(Engine(f"reference-{family}", model, [FIRST, FIRST, *further], own))
        engines.append(Engine(f"stored-{family}", model, [FIRST, stored], {**own, **transfer(folder, family)}))
        if family not in FAMILIES:
            continue
        engines.append(Engine(f"talk-{family}", model, [TALK, AGAIN], own))
        engines.append(Engine(f"talked-{family}", model, [TALK, stored], {**own, **transfer(folder, family)}))
    without = {"enable_prefix_caching": False, **transfer(folder, "none")}
    engines.append(Engine("none", folder / "lfm2", [FIRST], without))
    return run_engines(folder / "first", engines)


@pytest.fixture(scope="module")
def loaded(folder: Path, first_process: Mapping[str, Ran]) -> Mapping[str, Ran]:
    """Engines of another process, which find what the first one has stored, whole and damaged."""
    engines = []
    for family in LOADED:
        given = {**options(family), **transfer(folder, family)}
        if family not in FAMILIES:
            engines.append(Engine(family, folder / family, [FIRST], given))
            continue
        engines.append(Engine(family, folder / family, [FIRST, Step(BRANCHES, forget=True)], given))
        talked = [Step([TALK.prompts[0]], max_tokens=CHUNK), Step([[0, 0, ids(10, 6)]], forget=True)]
        engines.append(Engine(f"again-{family}", folder / family, talked, given))
        shutil.copytree(folder / "stores" / family, folder / "stores" / f"damaged-{family}")
        for path in sorted((folder / "stores" / f"damaged-{family}").glob("*/*/*")):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        broken = {**options(family), **transfer(folder, f"damaged-{family}")}
        twice = [Step(PROMPTS, settles=True), FORGOTTEN]
        engines.append(Engine(f"damaged-{family}", folder / family, twice, broken))
    return run_engines(folder / "second", engines)


def distances(answers: list[Answer], expected: list[Answer]) -> list[float]:
    return [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]


@pytest.mark.parametrize("family", LOADED)
def test_storing_changes_nothing(family: str, first_process: Mapping[str, Ran]) -> None:
    ran = first_process[f"stored-{family}"]
    assert distances(ran.steps[0], first_process[f"reference-{family}"].steps[0]) == [0.0] * len(PROMPTS)
    ran.assert_sound()


@pytest.mark.parametrize("family", LOADED)
@pytest.mark.serves(model="recurrent layers", where="engine")
def test_a_load_answers_as_a_hit_in_the_engines_own_cache(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """Bit for bit: a state of another step, or in another block, would answer another prompt."""
    ran, reference = loaded[family], first_process[f"reference-{family}"]
    assert [answer.cached for answer in reference.steps[1]] == LOADABLE, "the reference found its own"
    assert [answer.cached for answer in ran.steps[0]] == LOADABLE
    assert distances(ran.steps[0], reference.steps[1]) == [0.0] * len(PROMPTS)
    assert ran.metric("vllm:cuvee_loaded{kind=state}") >= len(PROMPTS)
    ran.assert_sound()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_load_is_as_long_as_the_last_state(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """The chunks before a branch are all there; whether a state is, depends on where the engine's steps ended. Where it
    is not, the engine has a step end there, so that the next branch finds it.
    """
    answers, expected = loaded[family].steps[1], first_process[f"reference-{family}"].steps[2]
    assert [answer.cached for answer in expected] == [0, 3 * CHUNK], "the engine's own cache drops more states"
    assert [answer.cached for answer in answers] == [3 * CHUNK if family == "granite" else 0, 3 * CHUNK]
    assert distances(answers, expected) == [0.0, 0.0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_a_state_of_its_answer(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    said, again = first_process[f"talk-{family}"].steps[0], loaded[f"again-{family}"].steps
    assert again[0][0].tokens == said[0].tokens
    assert again[1][0].cached == 2 * CHUNK, "the last chunk that has ended while the answer was generated"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_damaged_is_computed_and_stored_again(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    ran, reference = loaded[f"damaged-{family}"], first_process[f"reference-{family}"]
    assert distances(ran.steps[0], reference.steps[0]) == [0.0] * len(PROMPTS), "as if there were no store"
    assert ran.metric("vllm:cuvee_failures", 0) == len(PROMPTS)
    assert ran.metric("vllm:cuvee_contained") == 0
    assert [answer.cached for answer in ran.steps[1]] == LOADABLE, "stored anew by what computed them"
    assert distances(ran.steps[1], reference.steps[1]) == [0.0] * len(PROMPTS)


@pytest.mark.serves(model="recurrent layers, no states kept", where="refused")
def test_without_states_at_the_ends_of_blocks_the_engine_does_not_start(first_process: Mapping[str, Ran]) -> None:
    with pytest.raises(EngineFailure, match=r"mamba_cache_mode='none' are not supported, .*--enable-prefix-caching"):
        first_process["none"]
