"""Models with sliding windows in real engines: what is restored of them answers as what is computed.

    gemma3     three layers with a window, one without, and two RoPE bases: groups of layers with tables of their own
    gemma3n    the last four layers attend to the caches of the two before them
    gemma4     the same; layers without a window have larger heads, and blocks of half as many tokens
    gpt_oss    every other layer has a window, and attention has sinks
    llama4     a window of two chunks begins anew at each multiple of its length; a layer without one has no positions
    mistral    all layers have the same window: one group, which drops tokens

Prompts are six windows long. What one process stores, another loads: also an engine without vLLM's hybrid manager,
which keeps all tokens of all layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    EngineFailure,
    Ran,
    Step,
    distance,
    distinct_chunks,
    ids,
    run_engines,
    save_tiny_model,
    spread,
    transfer,
)
from transformers import AutoModelForCausalLM

from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile

pytestmark = pytest.mark.slow

CHUNK = WINDOW = 64
BLOCK = 32
FAMILIES = ("gemma3", "gemma3n", "gemma4", "gpt_oss", "llama4", "mistral")


COMMON = ids(4 * WINDOW + 10, 0)
PROMPTS = [ids(6 * WINDOW + 7, 1), [*COMMON, *ids(40, 2)], [*COMMON, *ids(100, 3)], ids(WINDOW + 1, 4)]
WHOLE = distinct_chunks(CHUNK, *PROMPTS)
ALONE = Step(PROMPTS, forget=True)
TOGETHER = Step(PROMPTS, together=True, forget=True)
ANSWER = 70  # longer than a window: while it is decoded, layers drop the prompt
TALK = Step([ids(100, 5)], max_tokens=ANSWER, forget=True)
AGAIN = Step([[2, 0, ids(10, 6)]], forget=True)
SLEPT = Step(PROMPTS, forget=True, sleeps=True)
CHANGED = Step(PROMPTS[:1], sleeps="changed")
BLOCKS = {"gemma4": 2 * BLOCK}  # that of its layers with a window
LOADABLE = {
    family: [(len(prompt) - 1) // block * block for prompt in PROMPTS]
    for family in FAMILIES
    for block in [BLOCKS.get(family, BLOCK)]
}
DAMAGED = ("gemma3", "mistral")  # several groups of layers; one that drops tokens
LOSSY: dict[str, dict[str, Any]] = {
    "gemma3": {"quality": None, "step": 0.01},
    "mistral": {"quality": None, "step": 0.01},
}
PIECES = {"max_num_batched_tokens": 48}  # no multiple of a block: chunks are computed in several steps


@pytest.fixture(scope="module")
def first_process(folder: Path) -> Mapping[str, Ran]:
    """Engines without us, and engines that fill a store in pieces."""
    engines = []
    for family in FAMILIES:
        model = save_tiny_model(family, folder / family)
        engines.append(Engine(f"reference-{family}", model, [ALONE, TOGETHER, TALK, AGAIN]))
        filled = [
            Step(PROMPTS, together=True, forget=True, until=("vllm:cuvee_stored{kind=chunk}", WHOLE)),
            # Every one of these prompts is in the engine's own cache, whose windows hold only ends.
            Step(PROMPTS),
            Step(TALK.prompts, max_tokens=ANSWER, until=("vllm:cuvee_stored{kind=chunk}", WHOLE + 2)),
        ]
        engines.append(Engine(f"stored-{family}", model, filled, {**PIECES, **transfer(folder, family)}))
    engines.append(Engine("apart", folder / "llama4", [], transfer(folder, "llama4", chunk_tokens=3 * BLOCK)))
    return run_engines(folder / "first", engines)


def fitted(path: Path) -> Profile:
    """A profile of a checkpoint, learned from caches of random text."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    layout = KVLayout.from_config(model.config, "float32")
    with torch.no_grad():
        return fit(layout, prefill(model, torch.randint(1, 256, (8, 256)), layout), "layer")


@pytest.fixture(scope="module")
def loaded(folder: Path, first_process: Mapping[str, Ran]) -> Mapping[str, Ran]:
    """Engines of another process, which find what the first one has stored."""
    engines = [
        Engine(family, folder / family, [ALONE, TOGETHER, TALK, AGAIN, SLEPT, CHANGED], transfer(folder, family))
        for family in FAMILIES
    ]
    for family in DAMAGED:
        shutil.copytree(folder / "stores" / family, folder / "stores" / f"damaged-{family}")
        for path in sorted((folder / "stores" / f"damaged-{family}").glob("*/*/*"))[::3]:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        twice = [replace(ALONE, settles=True), ALONE]
        engines.append(Engine(f"damaged-{family}", folder / family, twice, transfer(folder, f"damaged-{family}")))
    gemma, whole = folder / "gemma3", {"disable_hybrid_kv_cache_manager": True}
    engines.append(Engine("whole", gemma, [ALONE], {**whole, **transfer(folder, "gemma3")}))
    filled = Step(PROMPTS, together=True, until=("vllm:cuvee_stored{kind=chunk}", WHOLE))
    for family, options in LOSSY.items():
        fitted(folder / family).save(folder / f"{family}.profile")
        lossy = transfer(folder, f"lossy-{family}", **options, profile=str(folder / f"{family}.profile"))
        engines.append(Engine(f"lossy-{family}", folder / family, [filled, ALONE], lossy))
    return run_engines(folder / "second", engines)


def assert_same(answers: list[Answer], expected: list[Answer], reference: Ran) -> None:
    """Same tokens; logprobs as close as batching alone leaves them."""
    allowed = max(4 * spread(reference.steps[:2]), 1e-4)
    assert allowed < 0.05, "the reference does not agree with itself"
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= allowed, distances


@pytest.mark.parametrize("family", FAMILIES)
def test_storing_changes_nothing(family: str, first_process: Mapping[str, Ran]) -> None:
    reference, ran = first_process[f"reference-{family}"], first_process[f"stored-{family}"]
    assert_same(ran.steps[0], reference.steps[1], reference)
    assert_same(ran.steps[1], reference.steps[0], reference)
    ran.assert_sound("stores_skipped")
    assert ran.metric("vllm:cuvee_stored{kind=chunk}") == WHOLE + 2
    assert ran.metric("vllm:cuvee_load_seconds_count") == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.serves(model="sliding windows", where="engine")
@pytest.mark.serves(model="chunked attention", where="engine")
@pytest.mark.serves(model="layers that share a cache", where="engine")
@pytest.mark.serves(model="heads of different sizes", where="engine")
def test_another_process_answers_the_same_from_the_store(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    reference, ran = first_process[f"reference-{family}"], loaded[family]
    for at, expected in enumerate(reference.steps):
        assert_same(ran.steps[at], expected, reference)
    assert [answer.cached for answer in ran.steps[0]] == LOADABLE[family]
    talked = (len(TALK.prompts[0]) + ANSWER) // CHUNK * CHUNK
    assert ran.steps[3][0].cached >= talked, "what was generated is found too"
    assert ran.metric("vllm:external_prefix_cache_hits") >= sum(LOADABLE[family])
    ran.assert_sound("stores_skipped")


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_sleep_what_was_stored_before_is_loaded(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """Into the pages that the engine's layers have then: those from before are noise to nobody."""
    reference, answers = first_process[f"reference-{family}"], loaded[family].steps[4]
    assert_same(answers, reference.steps[0], reference)
    assert [answer.cached for answer in answers] == LOADABLE[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_sleep_in_which_weights_changed_nothing_is_loaded(family: str, loaded: Mapping[str, Ran]) -> None:
    (answer,) = loaded[family].steps[5]
    assert answer.cached == 0
    loaded[family].assert_sound("stores_skipped")


def test_a_chunk_must_not_cross_the_end_of_one_of_the_attention(first_process: Mapping[str, Ran]) -> None:
    """The engine says so because it drops tokens there: the others of this family would not show it."""
    with pytest.raises(EngineFailure, match=r"chunk_tokens: must divide the 128 tokens of a chunk .*set it to 32"):
        first_process["apart"]


def test_an_engine_that_keeps_all_tokens_loads_the_same_entries(
    first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    reference = first_process["reference-gemma3"]
    assert_same(loaded["whole"].steps[0], reference.steps[0], reference)
    assert [answer.cached for answer in loaded["whole"].steps[0]] == LOADABLE["gemma3"]
    loaded["whole"].assert_sound("stores_skipped")


@pytest.mark.parametrize("family", LOSSY)
def test_a_lossy_cache_is_close_and_not_the_same(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """So the comparison of the others would see what is not exact; RoPE is undone and done again, by each layer's base.

    Where keys were rotated otherwise than they are stored, answers would be those of another prompt.
    """
    exact, answers = first_process[f"reference-{family}"].steps[0], loaded[f"lossy-{family}"].steps[1]
    for answer, expected, prompt in zip(answers, exact, PROMPTS, strict=True):
        assert answer.cached == (len(prompt) - 1) // BLOCK * BLOCK
        ours, theirs = answer.logprobs[0], expected.logprobs[0]
        moved = max(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys())
        assert 1e-4 < moved < 0.5
    loaded[f"lossy-{family}"].assert_sound("stores_skipped")


@pytest.mark.parametrize("family", DAMAGED)
def test_what_is_damaged_is_computed_as_a_whole(
    family: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """The engine cannot keep a part of such a load: it stops if it is told of blocks, or mistakes one for another."""
    reference, ran = first_process[f"reference-{family}"], loaded[f"damaged-{family}"]
    assert_same(ran.steps[0], reference.steps[0], reference)
    assert_same(ran.steps[1], reference.steps[0], reference)
    failed = ran.metric("vllm:cuvee_failures", 0)
    assert 0 < failed <= len(PROMPTS) and ran.metric("vllm:cuvee_store_operations{result=corrupt}", 0) > 0
    assert ran.metric("vllm:cuvee_contained") == 0
    assert failed * BLOCK <= ran.metric("vllm:cuvee_recomputed_tokens", 0) <= sum(LOADABLE[family])
    assert [answer.cached for answer in ran.steps[1]] == LOADABLE[family], "stored anew by what computed them"
