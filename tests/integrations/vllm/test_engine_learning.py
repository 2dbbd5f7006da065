"""Profiles that real engines learn: from the requests of one, for those that start later.

learning    learns from its requests, alone         publishes a profile, goes on without loss
ranks       two ranks learn together                publish one profile of the whole model
using       another process, the same collection    finds the profile of `learning`, and answers as without a connector
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    Ran,
    Step,
    cuvee,
    distance,
    need_vllm,
    run_engines,
    save_tiny_model,
)
from transformers import AutoConfig

from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.integrations.checkpoint import weight_fingerprints
from cuvee.integrations.profile_collection.collection import ProfileCollection

pytestmark = pytest.mark.slow

STEP = 0.01
MOVED = 0.5  # nats; a random model is far more sensitive than a trained one
TOKENS = 4096  # 32 for each of the model's 128 features
PROMPTS = [random.Random(seed).choices(range(1, 256), k=400) for seed in range(16)]
LEARN = Step(PROMPTS, max_tokens=1, until=("vllm:cuvee_learned_profiles", 1))
ASK = Step(PROMPTS[:2], max_tokens=8, until=("vllm:cuvee_stored_chunks", 6))
AGAIN = Step(PROMPTS[:2], max_tokens=8, forget=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return tmp_path_factory.mktemp("learning")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return save_tiny_model("llama", folder / "model")


@pytest.fixture(scope="module")
def engines(folder: Path, model: Path) -> dict[str, Ran]:
    """What the engines did, the last two in a process of their own."""

    def ours(place: str, **more: object) -> dict[str, object]:
        options = {
            "quality": None,
            "step": STEP,
            "profile": f"learn:{folder / place}",
            "learn_tokens": TOKENS,
            "learn_share": 1,
        }
        return {"kv_transfer_config": cuvee(f"file://{folder / place}-store", **options), **more}

    first = run_engines(
        folder / "first",
        [
            Engine("reference", model, [replace(AGAIN, forget=False)]),
            Engine("learning", model, [LEARN], ours("alone")),
            Engine("ranks", model, [LEARN], ours("ranks", tensor_parallel_size=2)),
        ],
    )
    second = run_engines(folder / "second", [Engine("using", model, [ASK, AGAIN], ours("alone"))])
    return {**first, **second}


def first_token(answer: Answer, reference: Answer) -> float:
    """How far the first token's logprobs moved, of tokens that both answers name."""
    ours, theirs = answer.logprobs[0], reference.logprobs[0]
    assert ours.keys() & theirs.keys()
    return max(abs(ours[key] - theirs[key]) for key in ours.keys() & theirs.keys())


def published(folder: Path, model: Path, place: str, tmp_path: Path) -> Profile:
    layout = KVLayout.from_config(AutoConfig.from_pretrained(model), "float32")
    with ProfileCollection.open(str(folder / place)) as collection:
        return collection.pull(layout, tmp_path / "p", weights=weight_fingerprints(model)).profile


@pytest.mark.parametrize(("place", "group"), [("alone", "layer"), ("ranks", "heads:1")])
def test_engines_publish_what_they_learned(
    engines: dict[str, Ran], folder: Path, model: Path, place: str, group: str, tmp_path: Path
) -> None:
    ran = engines["learning" if place == "alone" else place]
    assert TOKENS <= ran.metric("vllm:cuvee_learned_tokens") < len(PROMPTS) * 400
    assert ran.metric("vllm:cuvee_learned_profiles") == 1 and "published the learned profile" in ran.log
    assert ran.metric("vllm:cuvee_contained") == ran.metric("vllm:cuvee_failures") == 0
    profile = published(folder, model, place, tmp_path)
    assert (profile.group, profile.source) == (group, "fitted") and profile.token_table is not None


def test_the_next_engine_finds_the_profile(engines: dict[str, Ran], folder: Path, model: Path, tmp_path: Path) -> None:
    reference, using = engines["reference"], engines["using"]
    profile = published(folder, model, "alone", tmp_path)
    assert f"took profile {profile.id.hex()} (fitted, group layer" in using.log
    assert using.metric("vllm:cuvee_learned_tokens") == 0 and "is learned from" not in using.log
    assert using.metric("vllm:cuvee_stored_without_ids") == 0
    computed, loaded = using.steps
    assert [answer.cached for answer in loaded] == [384, 384]
    assert max(map(distance, computed, reference.steps[0])) < 1e-3  # nothing was stored for this profile
    # A random model's answers part ways soon, whatever the step; its first token tells how far its predictions moved.
    moved = [first_token(*pair) for pair in zip(loaded, reference.steps[0], strict=True)]
    assert 0 < max(moved) < MOVED


def test_it_takes_less_than_before(engines: dict[str, Ran]) -> None:
    def bits(ran: Ran) -> float:
        return 32 * ran.metric("vllm:cuvee_stored_bytes") / ran.metric("vllm:cuvee_raw_bytes")

    assert bits(engines["using"]) < 0.9 * bits(engines["learning"])
