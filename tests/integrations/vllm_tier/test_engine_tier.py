"""Real vLLM engines with vLLM's own offloading and our tier behind it, over a restart and under faults.

All that is not vLLM's own in them is what `cpu_copies` names. Engines that store, and those of all faults, live in one
process, which is killed while it stores; what they stored is found by engines of another.

    gemma3        windows in a group of layers of their own
    mistral       windows in all layers
    gemma4        layers that share a cache, and blocks of other sizes
    llama4        chunked attention
    granite       Mamba 2 and attention
    qwen3_next    gated delta rule and attention, states partly in float32
    fp8_e4m3      a cache of codes
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm import faults
from tests.integrations.vllm.engines import (
    FP8,
    Answer,
    Engine,
    Ran,
    Step,
    cached,
    distance,
    fp8_runs,
    ids,
    need_vllm,
    params,
    read_results,
    run_engines,
    save_tiny_model,
)
from tests.integrations.vllm.faults import CHUNK
from tests.integrations.vllm_tier import cpu_copies, tier_faults
from tests.integrations.vllm_tier.tier_faults import KILLED, SCENARIOS, offloading
from tests.recognizing import small_model, text

import cuvee
from cuvee.integrations.stores.base import RECORDS

pytestmark = pytest.mark.slow

PROMPTS = [ids(6 * CHUNK + 7, 1), ids(3 * CHUNK + 5, 2)]
CHUNKS = 6 + 3
PASSAGES = text(2, 4 * CHUNK + 5, 5).tolist()
ASK = Step(PROMPTS, forget=True)
RANKS_NOISE = 1e-3  # of logits in float32: two ranks add up in another order than one
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"worker_cls": cpu_copies.WORKER},
    "mistral": {},
    "gemma4": {},
    "llama4": {},
    "qwen3_next": {"enable_prefix_caching": True, "dtype": "bfloat16"},
    "fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
}
RUN = {kind: own for kind, own in KINDS.items() if kind not in FP8 or fp8_runs()}
OPAQUE = {
    "mistral": ("SlidingWindowSpec",),
    "gemma4": ("FullAttentionSpec", "SlidingWindowSpec"),
    "llama4": ("FullAttentionSpec", "ChunkedLocalAttentionSpec"),
    "qwen3_next": ("FullAttentionSpec", "MambaSpec"),
    "fp8_e4m3": ("FullAttentionSpec",),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_vllm()
    return tmp_path_factory.mktemp("tier")


def model_of(folder: Path, kind: str) -> Path:
    return folder / ("llama" if kind.startswith("fp8") else kind)


def options(folder: Path, kind: str) -> dict[str, Any]:
    """Of an engine with the tier. vLLM wants chunks in blocks where groups of layers have blocks of other sizes."""
    chunk = {"blocks_per_chunk": 1} if kind == "gemma4" else None
    return {**KINDS.get(kind, {}), "kv_transfer_config": offloading(f"file://{folder / 'stores' / kind}", chunk)}


@pytest.fixture(scope="module")
def lossy(folder: Path) -> dict[str, Any]:
    """Options of an engine of the model `folder / "small"` that stores at the quality of its profile."""
    model = small_model(head_dim=32, initializer_range=0.2)
    model.save_pretrained(folder / "small")
    profile = cuvee.calibrate(model, text(30, 64, 1), "layer", more_text=text(200, 64, 2), progress=False)
    profile.save(folder / "profile")
    own: dict[str, Any] = {"profile": str(folder / "profile"), "quality": "balanced"}
    return {"kv_transfer_config": offloading(f"file://{folder / 'stores' / 'lossy'}", **own)}


@pytest.fixture(scope="module")
def faulty(folder: Path, lossy: dict[str, Any]) -> faults.Outcome:
    """Engines without a connector, engines that fill a store, every fault, and an engine that is killed."""
    engines = []
    for kind, own in RUN.items():
        model = model_of(folder, kind)
        if not model.exists():
            save_tiny_model(kind, model)
        engines.append(Engine(f"reference {kind}", model, [Step(PROMPTS)] * 2, own))
        engines.append(Engine(f"stored {kind}", model, [replace(ASK, settles=True)], options(folder, kind)))
    engines.append(Engine("reference lossy", folder / "small", [Step(PASSAGES)] * 2))
    engines.append(Engine("stored lossy", folder / "small", [Step(PASSAGES, settles=True)], lossy))
    engines.append(Engine("reference killed", folder / "llama", [Step([KILLED])]))
    (folder / "order").write_bytes(pickle.dumps(engines))
    same_products = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}  # as `run_engines` has them
    return faults.run_group("offloading", folder, folder / "llama", script=tier_faults.__file__, **same_products)


@pytest.fixture(scope="module")
def first(folder: Path, faulty: faults.Outcome) -> Mapping[str, Ran]:
    """The engines that store, and those without a connector."""
    return read_results(folder / "answers", faulty.log)


def entries_of_killed(folder: Path) -> dict[Path, bytes]:
    files = (path for path in (folder / "stores" / "killed").glob("*/*/*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.parts[-3] != RECORDS}


@pytest.fixture(scope="module")
def survived(folder: Path, faulty: faults.Outcome) -> dict[Path, bytes]:
    return entries_of_killed(folder)


@pytest.fixture(scope="module")
def loaded(
    folder: Path, first: Mapping[str, Ran], survived: dict[Path, bytes], lossy: dict[str, Any]
) -> Mapping[str, Ran]:
    """Engines of another process that find what those have stored."""
    steps = [ASK, replace(ASK, together=True)]
    engines = [Engine(kind, model_of(folder, kind), steps, options(folder, kind)) for kind in RUN]
    killed = Step([KILLED], settles=True)
    engines.append(Engine("killed", folder / "llama", [killed], options(folder, "killed")))
    engines.append(Engine("lossy", folder / "small", [Step(PASSAGES)], lossy))
    one, other = options(folder, "llama"), Step([ids(3 * CHUNK + 5, 3)], settles=True)
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    engines.append(Engine("two ranks", folder / "llama", [ASK, other], {**one, **two}))
    engines.append(Engine("one rank", folder / "llama", [other], one))
    return run_engines(folder / "second", engines)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer], within: float = 0.0) -> None:
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= within, distances


@pytest.mark.parametrize("kind", params(KINDS))
def test_storing_changes_nothing(kind: str, first: Mapping[str, Ran]) -> None:
    reference, ran = first[f"reference {kind}"], first[f"stored {kind}"]
    assert_same(ran.steps[0], reference.steps[0])
    assert ran.metric("vllm:cuvee_tier_saved_pages") >= CHUNKS or kind == "mistral"
    assert ran.metric("vllm:cuvee_tier_unsaved_pages") == ran.metric("vllm:cuvee_tier_failures") == 0
    assert 0 < ran.metric("vllm:cuvee_tier_blob_bytes") < ran.metric("vllm:cuvee_tier_raw_bytes")


@pytest.mark.parametrize("kind", params(KINDS))
@pytest.mark.serves(where="engine")
@pytest.mark.serves(model="sliding windows", where="engine")
@pytest.mark.serves(model="chunked attention", where="engine")
@pytest.mark.serves(model="layers that share a cache", where="engine")
@pytest.mark.serves(model="heads of different sizes", where="engine")
@pytest.mark.serves(model="recurrent layers", where="engine")
@pytest.mark.serves(cache="fp8_e4m3", where="engine")
def test_after_a_restart_a_load_answers_as_a_hit_in_the_engines_own_cache(
    kind: str, first: Mapping[str, Ran], loaded: Mapping[str, Ran]
) -> None:
    """To the last bit. Loaded again, it comes from vLLM's own primary tier."""
    reference, ran = first[f"reference {kind}"], loaded[kind]
    assert_same(ran.steps[0], reference.steps[1])
    assert cached(ran.steps[0]) == cached(reference.steps[1]) == [6 * CHUNK, 3 * CHUNK]
    assert ran.metric("vllm:external_prefix_cache_hits", 0) == CHUNKS * CHUNK
    pages = ran.metric("vllm:cuvee_tier_loaded_pages", 0)
    assert ran.metric("vllm:kv_offload_tiering_chunk_hits{tier=1:CuveeTier}", 0) == pages
    assert pages == ran.metric("vllm:cuvee_tier_loaded_pages"), "loaded again"
    opaque = {each: ran.metric(f"vllm:cuvee_tier_opaque_pages{{what={each}}}") for each in OPAQUE.get(kind, ())}
    assert all(opaque.values()), opaque
    assert ran.metric("vllm:cuvee_tier_opaque_pages") == (pages if opaque else 0)
    assert ("as bytes" in ran.log) is bool(opaque)
    assert ran.metric("vllm:cuvee_tier_missed_pages") == ran.metric("vllm:cuvee_tier_contained") == 0


@pytest.mark.serves(parallel="tensor parallelism", where="engine")
def test_two_ranks_load_what_one_has_stored(first: Mapping[str, Ran], loaded: Mapping[str, Ran]) -> None:
    """And one what two have."""
    two, one = loaded["two ranks"], loaded["one rank"]
    assert_same(two.steps[0], first["reference llama"].steps[1], RANKS_NOISE)
    assert_same(one.steps[0], two.steps[1], RANKS_NOISE)
    assert [*map(cached, two.steps), cached(one.steps[0])] == [[6 * CHUNK, 3 * CHUNK], [0], [3 * CHUNK]]
    assert two.metric("vllm:cuvee_tier_loaded_pages") == CHUNKS and one.metric("vllm:cuvee_tier_loaded_pages") == 3
    assert two.metric("vllm:cuvee_tier_opaque_pages") == one.metric("vllm:cuvee_tier_opaque_pages") == 0


def test_lossy_chunks_are_close(first: Mapping[str, Ran], loaded: Mapping[str, Ran]) -> None:
    """Their ids and positions are recognized: vLLM tells the tier neither."""
    exact, stored, ran = first["reference lossy"], first["stored lossy"], loaded["lossy"]
    assert_same(stored.steps[0], exact.steps[0])
    assert stored.metric("vllm:cuvee_tier_saved_pages") == stored.metric("vllm:cuvee_tier_recognized_pages") == 8
    raw, coded = (stored.metric(f"vllm:cuvee_tier_{name}_bytes") for name in ("raw", "blob"))
    assert coded < raw / 20
    assert cached(ran.steps[0]) == cached(exact.steps[1]) == [4 * CHUNK] * 2
    assert ran.metric("vllm:cuvee_tier_loaded_pages") == 8
    distances = [distance(*pair) for pair in zip(ran.steps[0], exact.steps[1], strict=True)]
    assert 0 < max(distances) < 0.4, distances  # 0.17, and 0.7 or more if keys move by a position or a layer is missing


def test_what_a_killed_engine_stored_is_sound(
    folder: Path,
    faulty: faults.Outcome,
    survived: dict[Path, bytes],
    first: Mapping[str, Ran],
    loaded: Mapping[str, Ran],
) -> None:
    """What lies before a gap is loaded, the rest is computed and stored."""
    assert faulty.status == -signal.SIGKILL, faulty.log[-4000:]
    ran = loaded["killed"]
    assert_same(ran.steps[0], first["reference killed"].steps[0], within=1e-4)
    assert 0 < len(survived) < 6, "some were stored"
    assert ran.metric("vllm:cuvee_tier_failures") == 0
    entries = entries_of_killed(folder)
    assert len(entries) == 6 and survived.items() <= entries.items()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_answers_are_right(scenario: str, faulty: faults.Outcome) -> None:
    faulty.expect_sound(scenario)
