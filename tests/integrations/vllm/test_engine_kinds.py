"""Real engines as they are run: fp8 caches and drafted tokens. What is restored answers as what is computed.

One process fills a store, another finds it: each engine is compared with one of the same options without us.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.vllm import gpu_defaults
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    distance,
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

pytestmark = pytest.mark.slow

CHUNK, BLOCK = 64, 32


COMMON = ids(2 * CHUNK + 10, 0)
PROMPTS = [ids(300, 1), [*COMMON, *ids(40, 2)], [*COMMON, *ids(100, 3)], 8 * ids(20, 9)]
ALONE = Step(PROMPTS, forget=True, max_tokens=30)
TOGETHER = Step(PROMPTS, together=True, forget=True)
TALK = Step([ids(100, 5)], max_tokens=70, forget=True)
AGAIN = Step([[2, 0, ids(10, 6)]], forget=True)
STEPS = [ALONE, TOGETHER, TALK, AGAIN]
LOADABLE = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
# Triton's interpreter does not run the kernel by which vLLM's second model runner looks tokens up.
DRAFTED = ("draft_model",) if gpu_defaults.wanted() else ("ngram", "draft_model")
EXACT = ("fp8_e4m3", "fp8_e5m2", *DRAFTED)


def options(kind: str, model: Path) -> dict[str, Any]:
    """Of the engine."""
    if kind.startswith("fp8"):
        return {"kv_cache_dtype": kind}
    looks_up = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    more = looks_up if kind == "ngram" else {"model": str(model.with_name("drafter"))}
    return {"speculative_config": {"method": kind, "num_speculative_tokens": 3, **more}}


@pytest.fixture(scope="module")
def first_process(folder: Path) -> Mapping[str, Ran]:
    """Engines without us, and engines that fill a store."""
    model = save_tiny_model("llama", folder / "model")
    save_drafter(model)
    engines = [Engine("plain", model, STEPS)]
    for kind in EXACT:
        engines.append(Engine(f"reference-{kind}", model, STEPS, options(kind, model)))
        engines.append(Engine(f"stored-{kind}", model, STEPS, {**options(kind, model), **transfer(folder, kind)}))
    return run_engines(folder / "first", engines)


def save_drafter(model: Path) -> None:
    """A model that is like another one, and drafts what that often generates and often does not."""
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(1 + 0.03 * torch.randn_like(weight))
    network.save_pretrained(model.with_name("drafter"))


@pytest.fixture(scope="module")
def loaded(folder: Path, first_process: Mapping[str, Ran]) -> Mapping[str, Ran]:
    """Engines of another process. Two of them look into the store of an engine with another cache."""
    model = folder / "model"
    engines = [Engine(kind, model, STEPS, {**options(kind, model), **transfer(folder, kind)}) for kind in EXACT]
    other = options("fp8_e5m2", model)
    engines.append(Engine("other codes", model, [ALONE], {**other, **transfer(folder, "fp8_e4m3")}))
    engines.append(Engine("no codes", model, [ALONE], transfer(folder, "fp8_e4m3")))
    network: Any = AutoModelForCausalLM.from_pretrained(model)
    layout = KVLayout.from_config(network.config, "float32")
    with torch.no_grad():
        profile = fit(layout, prefill(network, torch.randint(1, 256, (8, 256)), layout), "layer")
    profile.save(folder / "profile")
    lossy = transfer(folder, "lossy", quality=None, step=0.01, profile=str(folder / "profile"))
    engines.append(Engine("lossy", model, [ALONE, ALONE], {**options("fp8_e4m3", model), **lossy}))
    return run_engines(folder / "second", engines)


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.serves(cache="fp8_e4m3", where="engine")
@pytest.mark.serves(cache="fp8_e5m2", where="engine")
@pytest.mark.serves(drafts="ngram", where="engine")
@pytest.mark.serves(drafts="draft_model", where="engine")
def test_answers_are_the_engines_own(kind: str, first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]) -> None:
    reference = first_process[f"reference-{kind}"]
    own = spread([reference.steps[0], first_process["plain"].steps[0]]) if kind in DRAFTED else 0.0
    allowed = 2 * own + 1e-4
    for ran in (first_process[f"stored-{kind}"], loaded[kind]):
        for ours, theirs in zip(ran.steps, reference.steps, strict=True):
            assert max(map(distance, ours, theirs)) <= allowed


@pytest.mark.parametrize("kind", EXACT)
def test_everything_is_found_by_another_process(kind: str, loaded: Mapping[str, Ran]) -> None:
    ran = loaded[kind]
    assert [answer.cached for answer in ran.steps[0]] == LOADABLE
    assert ran.steps[3][0].cached == 160, "question and answer of a turn, but for the last block's rest"
    assert not ran.metric("vllm:cuvee_failures") and not ran.metric("vllm:cuvee_contained")
    assert not ran.metric("vllm:cuvee_stored{kind=chunk}"), "it was all there"


@pytest.mark.parametrize("kind", DRAFTED)
def test_drafts_were_made_and_many_rejected(kind: str, first_process: Mapping[str, Ran]) -> None:
    """Otherwise the tests of answers would not tell whether rejected drafts are stored."""
    ran = first_process[f"stored-{kind}"]
    drafted = ran.metric("vllm:spec_decode_num_draft_tokens")
    accepted = ran.metric("vllm:spec_decode_num_accepted_tokens")
    assert accepted < 0.9 * drafted
    assert accepted > 0 or kind == "ngram"


@pytest.mark.parametrize("name", ["other codes", "no codes"])
def test_caches_of_another_dtype_are_not_shared(name: str, loaded: Mapping[str, Ran]) -> None:
    assert [answer.cached for answer in loaded[name].steps[0]] == [0, 0, 2 * CHUNK, 0], "only what it has just stored"


def test_values_of_an_fp8_cache_are_coded_with_loss(
    first_process: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    ran, reference = loaded["lossy"], first_process["reference-fp8_e4m3"]
    exact = first_process["stored-fp8_e4m3"]
    assert [answer.cached for answer in ran.steps[1]] == LOADABLE
    assert max(map(distance, ran.steps[1], reference.steps[0])) < 0.5
    stored, whole = (each.metric("vllm:cuvee_stored_bytes") for each in (ran, exact))
    assert 0 < stored < whole
