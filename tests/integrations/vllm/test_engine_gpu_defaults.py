"""vLLM as it runs on a GPU by default (V2 model runner, async scheduling): loads change no bit of an answer.

Batches have one request or the same requests, so that they round alike in engines with and without us.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Step,
    cuvee,
    distance,
    ids,
    need_vllm,
    run_engines,
    save_tiny_model,
)
from tests.integrations.vllm.gpu_defaults import GPU

pytestmark = pytest.mark.slow

CHUNK, BLOCK = 64, 32
NIGHTLY = ("gemma3", "gemma4")  # windows, layers that share a cache, and heads of different sizes


COMMON = ids(2 * CHUNK + 10, 0)
PROMPTS = [ids(300, 1), [*COMMON, *ids(40, 2)], [*COMMON, *ids(100, 3)]]
CHUNKS = len({tuple(text[:end]) for text in PROMPTS for end in range(CHUNK, len(text) + 1, CHUNK)})
ALONE = Step(PROMPTS, forget=True, max_tokens=4)
TOGETHER = Step(PROMPTS, forget=True, together=True, max_tokens=4)
SLEPT = Step(PROMPTS[:1], forget=True, max_tokens=4, sleeps=True)


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(family, marks=pytest.mark.nightly) for family in NIGHTLY)]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ran]:
    """An engine without us, one that fills a store, and those of another process."""
    need_vllm()
    folder = tmp_path_factory.mktemp("gpu_defaults")
    model, store = save_tiny_model(request.param, folder / "model"), f"file://{folder / 'store'}"
    ours = {"kv_transfer_config": cuvee(store, chunk_tokens=CHUNK)}
    fill = Step(PROMPTS, max_tokens=4, until=("vllm:cuvee_stored{kind=chunk}", CHUNKS))
    first = [Engine("reference", model, [ALONE, TOGETHER]), Engine("stored", model, [fill], ours)]
    second = [Engine("loaded", model, [ALONE, TOGETHER, SLEPT], ours)]
    done: dict[str, Ran] = {}
    for name, engines in {"first": first, "second": second}.items():
        done.update(run_engines(folder / name, engines, timeout=600.0, fresh=False, **GPU))
    return done


@pytest.mark.serves(runner="V2, async", where="engine")
@pytest.mark.serves(model="sliding windows", runner="V2, async", where="engine")
@pytest.mark.serves(model="layers that share a cache", runner="V2, async", where="engine")
@pytest.mark.serves(model="heads of different sizes", runner="V2, async", where="engine")
def test_what_another_process_stored_answers_as_what_is_computed(runs: Mapping[str, Ran]) -> None:
    ran, (alone, together) = runs["loaded"], runs["reference"].steps
    cached = [answer.cached for answer in ran.steps[0]]
    assert cached in ([(len(prompt) - 1) // block * block for prompt in PROMPTS] for block in (BLOCK, 2 * BLOCK))
    for ours, theirs in zip(ran.steps, (alone, together, alone[:1]), strict=True):
        assert max(map(distance, ours, theirs)) == 0.0
    assert not ran.metric("vllm:cuvee_failures") and not ran.metric("vllm:cuvee_contained")


def test_it_is_the_runner_and_the_scheduler_of_a_gpu(runs: Mapping[str, Ran]) -> None:
    for ran in runs.values():
        assert "V2 runner: True, async scheduling: True" in ran.log
