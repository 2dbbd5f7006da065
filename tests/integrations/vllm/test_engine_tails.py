"""Tails in real engines: prompts that end inside a chunk, stored by one process and loaded by another.

reference       no connector                    the answers
stored          connector                       a prompt of 511 tokens, and a conversation's first turn
ids             a profile that predicts         what is stored holds the ids of prompt and answer, and nothing private
loaded          another process                 both again, and the turns after
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    cuvee,
    distance,
    ids,
    run_engines,
    save_tiny_model,
    spread,
)
from tests.predicting import predicting
from transformers import AutoConfig

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.stores import open_store

pytestmark = pytest.mark.slow

CHUNK, BLOCK, ANSWER = 256, 32, 40


PROMPT, QUESTION, SHORT = ids(511, 1), ids(300, 2), ids(90, 3)
FIRST = Step([PROMPT, QUESTION, SHORT], max_tokens=ANSWER)
# Both go on in the chunk that the first turn ended in: 340 + 60 tokens, and 551 + 20.
SECOND = Step([[0, 1, ids(60, 4)], [0, 0, ids(20, 6)]], max_tokens=ANSWER, forget=True)
THIRD = Step([[1, 0, ids(150, 5)]], max_tokens=ANSWER, forget=True)  # 440 + 150: in the next one
AGAIN = replace(FIRST, forget=True)
TAILS = 6  # where three prompts end, and their answers
TOLD = ids(100, 7)  # is stored with its ids, and those of its answer
PRIVATE = ids(100, 8)  # asks not to be stored


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_tiny_model("llama", folder / "model")


@pytest.fixture(scope="module")
def learned(folder: Path, model: Path) -> Profile:
    """A profile of the model that predicts from tokens, also in the folder."""
    layout = KVLayout.from_config(AutoConfig.from_pretrained(model), dtype="float32")
    noise = torch.randn(2, layout.num_layers, 600, 2, 32, generator=torch.Generator().manual_seed(0))
    profile = predicting(fit(layout, [KVChunk(list(noise[0]), list(noise[1]), layout)]), vocabulary=256)
    profile.save(folder / "profile")
    return profile


@pytest.fixture(scope="module")
def engines(folder: Path, model: Path, learned: Profile) -> dict[str, Ran]:
    """What the engines did, the last in a process of its own."""
    options = {"block_size": BLOCK, "max_model_len": 1024}
    transfer = cuvee(f"file://{folder / 'store'}", chunk_tokens=CHUNK, min_tokens=BLOCK)
    ours = {**options, "kv_transfer_config": transfer}
    stored = replace(FIRST, until=("vllm:cuvee_stored{kind=tail}", TAILS))
    lossy = {"quality": None, "step": 0.05, "profile": str(folder / "profile")}
    with_ids = cuvee(f"file://{folder / 'ids-store'}", chunk_tokens=64, min_tokens=32, **lossy)
    told = Step([TOLD], max_tokens=ANSWER, until=("vllm:cuvee_stored{kind=tail}", 1))
    private = Step(
        [PRIVATE], max_tokens=ANSWER, params=[{"cuvee": {"store": False}}], until=("vllm:cuvee_unstored_tokens", 1)
    )
    first = run_engines(
        folder / "first",
        [
            Engine("reference", model, [FIRST, SECOND, THIRD, AGAIN], options),
            # So few blocks that what ended is overwritten by the step that stores its tail.
            Engine("stored", model, [stored], {**ours, "num_gpu_blocks_override": 24, "max_model_len": 640}),
            Engine(
                "ids", model, [told, private], {"block_size": 32, "max_model_len": 256, "kv_transfer_config": with_ids}
            ),
        ],
    )
    # A turn's tail is stored when it has ended; the next one waits for that. The prompt of 571 tokens ends in the block
    # where the answer before it ended.
    more = [
        replace(AGAIN, until=None),
        replace(SECOND, until=("vllm:cuvee_stored{kind=tail}", 3)),
        replace(THIRD, until=("vllm:cuvee_stored{kind=tail}", 5)),
        AGAIN,
    ]
    second = run_engines(folder / "second", [Engine("loaded", model, more, ours)])
    return {**first, **second}


def assert_same(ran: Ran, reference: Ran) -> None:
    """The same words, and logprobs as close as those of two runs without us."""
    allowed = 4 * spread([reference.steps[0], reference.steps[3]]) + 1e-5
    for ours, theirs in zip(ran.steps, reference.steps, strict=False):
        assert [answer.tokens for answer in ours] == [answer.tokens for answer in theirs]
        assert all(distance(answer, other) <= allowed for answer, other in zip(ours, theirs, strict=True))
    ran.assert_sound()


def test_storing_tails_changes_nothing(engines: dict[str, Ran]) -> None:
    ran = engines["stored"]
    assert_same(ran, engines["reference"])
    assert ran.metric("vllm:cuvee_stored{kind=tail}") == TAILS
    assert ran.metric("vllm:cuvee_stored{kind=chunk}") == 3, "511 and 40 tokens make two, 300 and 40 one"


def test_another_process_computes_at_most_a_block_of_what_was_stored(engines: dict[str, Ran]) -> None:
    ran = engines["loaded"]
    assert_same(ran, engines["reference"])
    assert [answer.cached for answer in ran.steps[0]] == [480, 288, 64]
    # Two whole chunks and three tails: the 511 tokens end in a tail although they have grown past the chunk.
    assert ran.metric("vllm:cuvee_loaded{kind=chunk}", 0) == 2
    assert ran.metric("vllm:cuvee_loaded{kind=tail}", 0) == 3


def test_each_turn_of_a_conversation_loads_the_turns_before(engines: dict[str, Ran]) -> None:
    ran = engines["loaded"]
    first, second = len(QUESTION) + ANSWER, len(QUESTION) + 2 * ANSWER + 60
    assert [step[0].cached for step in ran.steps[1:3]] == [whole_blocks(first - 1), whole_blocks(second - 1)]
    assert ran.steps[1][1].cached == whole_blocks(len(PROMPT) + ANSWER - 1)


def test_a_superseded_tail_is_still_found_by_the_prompt_that_ends_there(engines: dict[str, Ran]) -> None:
    assert [answer.cached for answer in engines["loaded"].steps[3]] == [480, 288, 64]


def test_an_engine_stores_the_ids_of_prompt_and_answer(engines: dict[str, Ran], folder: Path, learned: Profile) -> None:
    """So that a codec can predict from them."""
    (answer,) = engines["ids"].steps[0]
    store = open_store(f"file://{folder / 'ids-store'}", guarded=False)
    blobs = store.get_many([f"{path.parents[1].name}/{path.name}" for path in (folder / "ids-store").glob("*/*/*")])
    text, found = [*TOLD, *answer.tokens], set()
    for blob in blobs:
        chunk = Codec(learned, step=0.05).decode(blob or b"")
        assert chunk.token_ids is not None and chunk.token_ids.tolist() == text[chunk.start : chunk.end]
        found.add((chunk.start, chunk.tokens))
    assert found == {(0, 64), (64, 64), (64, 32)}, "two chunks, and the tail where the prompt ended"
