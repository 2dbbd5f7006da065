"""Two tensor-parallel ranks, processes of their own: what they compute, load and blend is what one rank makes of it.

    plain    one rank without us: the reference
    one      one rank that blends, in one slice
    sliced   the same, in slices of 48 tokens: what corrects a token depends on the slice that it is in
    ranks    two ranks of 48 tokens a step: they compute and store, load, and blend; then one misses an entry, and one
             raises

To start two ranks takes longer than all that they do here, so one engine does it all.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from tests.integrations.vllm import faults, gpu_defaults
from tests.integrations.vllm.blending.test_engine_blend import (
    ALIKE,
    LEARN,
    PLAIN,
    SLICED,
    STORED,
    TOKENS,
    apart,
    blends,
    connector,
)
from tests.integrations.vllm.engines import (
    Engine,
    Ran,
    Results,
    Step,
    cached,
    cuvee,
    distinct_chunks,
    read_results,
    run_engines,
    save_tiny_model,
)
from tests.integrations.vllm.test_engine import ALONE, PROMPTS, TOGETHER, loadable

pytestmark = pytest.mark.slow

BLOCK = 32
NOISE = 1e-3  # nats: two ranks add up in another order than one
WHOLE, SOME = blends(1, forget=True), blends(0.3, forget=True)


def tails(*prompts: list[int]) -> int:
    """Distinct tails of some prompts."""
    ends = [(prompt, len(prompt) // BLOCK * BLOCK) for prompt in prompts]
    return len({tuple(prompt[:end]) for prompt, end in ends if end % faults.CHUNK and end >= 64})


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    gpu_defaults.need_one_process()
    return save_tiny_model("llama", folder / "llama")


@pytest.fixture(scope="module")
def single(folder: Path, model: Path) -> Results:
    """Engines of one rank."""
    exact = Step(TOKENS, forget=True, logprobs=-1)
    return run_engines(
        folder / "single",
        [
            Engine("plain", model, [ALONE, TOGETHER, exact], PLAIN),
            Engine("one", model, [LEARN, SOME], connector(folder / "one-store")),
            Engine("sliced", model, [LEARN, SOME], {**SLICED, **connector(folder / "sliced-store")}),
        ],
    )


@pytest.fixture(scope="module")
def outcome(folder: Path, model: Path) -> faults.Outcome:
    place, root = folder / "ranks", folder / "ranks-store"
    place.mkdir()
    stored = 2 * distinct_chunks(faults.CHUNK, *PROMPTS.values())
    steps = [
        Step(TOGETHER.prompts, together=True, until=("vllm:cuvee_stored{kind=chunk}", stored)),
        Step(until=("vllm:cuvee_stored{kind=tail}", 2 * tails(*PROMPTS.values()))),
        ALONE,
        Step(LEARN.prompts, params=LEARN.params, max_tokens=1, until=(STORED[0], 2 * STORED[1])),
        WHOLE,
        SOME,
    ]
    # Prompts that name no segments have none: no context is as long.
    blending = {"segment_tokens": 48, "min_context": faults.MAX_LEN}
    transfer = cuvee(f"file://{root}", chunk_tokens=faults.CHUNK, blend=blending)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "kv_transfer_config": transfer}
    (place / "order").write_bytes(pickle.dumps([Engine("ranks", model, steps, {**PLAIN, **SLICED, **options})]))
    # The engine's own process among them: a worker that raises must not take the scenarios with it.
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20",  # so long vLLM waits for the rank that waits for the other one
    }  # fmt: skip
    return faults.run_group("ranks", place, model, str(root), **variables)


@pytest.fixture(scope="module")
def ranks(folder: Path, outcome: faults.Outcome) -> Ran:
    """The engine of two ranks."""
    answers = folder / "ranks" / "answers"
    assert answers.exists(), outcome.log[-4000:]
    return read_results(answers, outcome.log)["ranks"]


@pytest.mark.serves(parallel="tensor parallelism", where="engine")
def test_two_ranks_agree(single: Results, ranks: Ran) -> None:
    """What they compute, and what they load, is what one rank without us computes."""
    alone, together, _ = single["plain"].steps
    computed, _, found, *_ = ranks.steps
    assert cached(found) == [loadable(prompt, BLOCK, BLOCK) for prompt in PROMPTS.values()]
    assert apart(computed, together) < NOISE
    assert apart(found, alone) < NOISE
    ranks.assert_sound()


def test_two_ranks_blend_alike(single: Results, ranks: Ran) -> None:
    whole, some = ranks.steps[-2:]
    assert apart(whole, single["plain"].steps[2]) < NOISE
    assert apart(some[:ALIKE], single["sliced"].steps[1][:ALIKE]) < NOISE
    assert apart(some[:ALIKE], single["one"].steps[1][:ALIKE]) > 10 * NOISE
    assert ranks.metric("vllm:cuvee_blend_seconds_count") == 2 * len(TOKENS)


@pytest.mark.parametrize("scenario", faults.RANKS)
def test_what_one_rank_misses_or_has_not_computed_neither_has(scenario: str, outcome: faults.Outcome) -> None:
    outcome.expect_sound(scenario)
