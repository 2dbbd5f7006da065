"""Weights that change while vLLM's engine serves, and nobody tells the connector: it finds out by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.integrations.vllm.engines import (
    Engine,
    EngineFailure,
    Ran,
    Step,
    ids,
    run_engines,
    save_tiny_model,
    transfer,
)
from transformers import LlamaForCausalLM

from cuvee.codec.models.fingerprint import PREFIX, model_fingerprint
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.identity.checkpoint import read_layout

CHUNK = 32
FIRST, SECOND = ids(200, "first"), ids(200, "second")
WHOLE = 192  # tokens of either that can be loaded
CHANGED = "vllm:cuvee_weights_changed"
WRONG = f"{PREFIX}{0:032}"  # the fingerprint of no weights


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ran]:
    folder = tmp_path_factory.mktemp("weights")
    save_tiny_model("llama", folder / "model")

    def found(times: int) -> Step:
        return Step(until=(CHANGED, times))

    def once(*prompts: list[int]) -> Step:
        return Step(prompts, forget=True, settles=True)

    given = transfer(folder, "entries", chunk_tokens=CHUNK)
    steps = [
        once(FIRST), once(FIRST),
        Step(weights="changed"), found(1), once(FIRST, SECOND), once(FIRST, SECOND),
        Step(weights="reloaded"), found(2), once(FIRST, SECOND),
    ]  # fmt: skip
    restarted = [once(FIRST, SECOND)]
    unnamed = [once(FIRST), once(FIRST), Step(weights="named"), once(FIRST), once(FIRST)]
    model = str(folder / "model")
    for name, weights in (("own", model_fingerprint(LlamaForCausalLM.from_pretrained(model))), ("wrong", WRONG)):
        profile = Profile.unlearned(read_layout(model, torch.float32))
        profile.model = weights
        profile.save(folder / name)

    def with_profile(name: str) -> dict[str, Any]:
        return transfer(folder, "others", chunk_tokens=CHUNK, profile=str(folder / name))

    engines = [
        Engine("updated", folder / "model", steps, given), Engine("restarted", folder / "model", restarted, given),
        Engine("mistaken", folder / "model", unnamed, with_profile("wrong"), unread=True),
        Engine("unnamed", folder / "model", unnamed, with_profile("own"), unread=True),
        Engine("refused", folder / "model", unnamed, with_profile("wrong")),
    ]  # fmt: skip
    return run_engines(folder / "runs", engines, timeout=600.0)


def cached(ran: Ran, step: int) -> list[int]:
    return [answer.cached for answer in ran.steps[step]]


def test_what_other_weights_have_stored_is_not_found(ran: Mapping[str, Ran]) -> None:
    """Nor is it lost: weights that are changed back find it again, and only that."""
    updated = ran["updated"]
    assert cached(updated, 0) == [0] and cached(updated, 1) == [WHOLE]
    assert cached(updated, 4) == [0, 0], "after the change"
    assert cached(updated, 5) == [WHOLE, WHOLE], "what the changed weights have stored"
    assert cached(updated, 8) == [WHOLE, 0], "after the reload"
    answers = [updated.steps[step][0].tokens for step in (0, 1, 4, 5, 8)]
    assert answers[0] == answers[1] == answers[4] != answers[2] == answers[3]
    assert updated.metric(CHANGED) == 2
    assert updated.log.count("the engine's weights have changed and nobody said so") == 1, "vLLM's own calls are seen"


def test_an_engine_with_the_files_weights_finds_nothing_of_others(ran: Mapping[str, Ran]) -> None:
    """`SECOND` was stored by the reloaded weights, which are those of the files."""
    answers = ran["restarted"].steps[0]
    assert cached(ran["restarted"], 0) == [WHOLE, WHOLE]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in ran["updated"].steps[8]]
    ran["restarted"].assert_sound()


def test_an_engine_serves_while_its_checkpoint_is_read_and_caches_afterwards(ran: Mapping[str, Ran]) -> None:
    unnamed = ran["unnamed"]
    assert [cached(unnamed, step) for step in (0, 1, 3, 4)] == [[0], [0], [0], [WHOLE]]
    assert len({tuple(unnamed.steps[step][0].tokens) for step in (0, 1, 3, 4)}) == 1
    assert unnamed.metric("vllm:cuvee_uncached{reason=unnamed}", after=1) >= 2
    assert "the checkpoint is being read to name it" in unnamed.log
    unnamed.assert_sound()


def test_an_engine_with_the_profile_of_other_weights_serves_and_stores_nothing(ran: Mapping[str, Ran]) -> None:
    """That is found out after its start. The next start knows it, and fails."""
    mistaken = ran["mistaken"]
    assert [cached(mistaken, step) for step in (0, 1, 3, 4)] == [[0]] * 4
    assert mistaken.metric("vllm:cuvee_failures{kind=weights}", after=1) == 0
    assert mistaken.metric("vllm:cuvee_failures{kind=weights}") == 1
    assert mistaken.log.count("nothing is stored or loaded: profile: must be of the model's weights") == 1
    assert mistaken.metric("vllm:cuvee_stored") == 0
    mistaken.assert_sound("failures")
    with pytest.raises(EngineFailure, match="calibrated on other weights"):
        ran["refused"]
