"""Tails in real engines: prompts that end inside a chunk, stored by one process and loaded by another.

reference   no connector          the answers
stored      connector             a prompt of 511 tokens, and a conversation's first turn
loaded      another process       both again, and the turns after
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    cuvee,
    distance,
    need_vllm,
    run_engines,
    save_tiny_model,
    spread,
)

pytestmark = pytest.mark.slow

CHUNK, BLOCK, ANSWER = 256, 32, 40


def ids(count: int, seed: int) -> list[int]:
    """Random tokens that the model has."""
    return random.Random(seed).choices(range(1, 256), k=count)


PROMPT, QUESTION, SHORT = ids(511, 1), ids(300, 2), ids(90, 3)
FIRST = Step([PROMPT, QUESTION, SHORT], max_tokens=ANSWER)
# Both go on in the chunk that the first turn ended in: 340 + 60 tokens, and 551 + 20.
SECOND = Step([[0, 1, ids(60, 4)], [0, 0, ids(20, 6)]], max_tokens=ANSWER, forget=True)
THIRD = Step([[1, 0, ids(150, 5)]], max_tokens=ANSWER, forget=True)  # 440 + 150: in the next one
AGAIN = replace(FIRST, forget=True)
TAILS = 6  # where three prompts end, and their answers


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """What three engines did, the last in a process of its own."""
    need_vllm()
    folder = tmp_path_factory.mktemp("tails")
    model = save_tiny_model("llama", folder / "model")
    options = {"block_size": BLOCK, "max_model_len": 1024}
    transfer = cuvee(f"file://{folder / 'store'}", chunk_tokens=CHUNK, min_tokens=BLOCK)
    ours = {**options, "kv_transfer_config": transfer}
    stored = replace(FIRST, until=("vllm:cuvee_stored_tails", TAILS))
    first = run_engines(
        folder / "first",
        [
            Engine("reference", model, [FIRST, SECOND, THIRD, AGAIN], options),
            # So few blocks that what ended is overwritten by the step that stores its tail.
            Engine("stored", model, [stored], {**ours, "num_gpu_blocks_override": 24, "max_model_len": 640}),
        ],
    )
    # A turn's tail is stored when it has ended; the next one waits for that. The prompt of 571 tokens ends in the block
    # where the answer before it ended.
    more = [
        replace(AGAIN, until=None),
        replace(SECOND, until=("vllm:cuvee_stored_tails", 3)),
        replace(THIRD, until=("vllm:cuvee_stored_tails", 5)),
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
    for name in ("failures", "recomputed_tokens", "corrupt", "store_errors", "dropped", "stores_skipped"):
        assert ran.metric(f"vllm:cuvee_{name}") == 0, name


def test_storing_tails_changes_nothing(engines: dict[str, Ran]) -> None:
    ran = engines["stored"]
    assert_same(ran, engines["reference"])
    assert ran.metric("vllm:cuvee_stored_tails") == TAILS
    assert ran.metric("vllm:cuvee_stored_chunks") == 3, "511 and 40 tokens make two, 300 and 40 one"


def test_another_process_computes_at_most_a_block_of_what_was_stored(engines: dict[str, Ran]) -> None:
    ran = engines["loaded"]
    assert_same(ran, engines["reference"])
    assert [answer.cached for answer in ran.steps[0]] == [480, 288, 64]
    # Two whole chunks and three tails: the 511 tokens end in a tail although they have grown past the chunk.
    assert ran.metric("vllm:cuvee_loaded_chunks", 0) == 2
    assert ran.metric("vllm:cuvee_loaded_tails", 0) == 3


def test_each_turn_of_a_conversation_loads_the_turns_before(engines: dict[str, Ran]) -> None:
    ran = engines["loaded"]
    first, second = len(QUESTION) + ANSWER, len(QUESTION) + 2 * ANSWER + 60
    assert [step[0].cached for step in ran.steps[1:3]] == [whole_blocks(first - 1), whole_blocks(second - 1)]
    assert ran.steps[1][1].cached == whole_blocks(len(PROMPT) + ANSWER - 1)


def test_a_superseded_tail_is_still_found_by_the_prompt_that_ends_there(engines: dict[str, Ran]) -> None:
    assert [answer.cached for answer in engines["loaded"].steps[3]] == [480, 288, 64]
