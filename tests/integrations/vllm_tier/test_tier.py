"""vLLM's own tiering manager, factory, primary tier and copies, with our tier behind them: on the CPU, no model."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.integrations.identity.test_checkpoint import cached
from tests.integrations.pages.forging import forge
from tests.integrations.stores.dict_store import DictStore, hold
from tests.integrations.vllm.engines import need_vllm
from tests.integrations.vllm_tier.real_tiers import (
    BLOCK,
    CHUNK,
    LAYERS,
    MODEL,
    Engine,
    Worker,
    key_of,
    real,
)
from tests.waiting import let_name, wait_until

from cuvee.codec.errors import CuveeError, InputError, UnsupportedModelError
from cuvee.integrations.identity.file_digests import file_digests
from cuvee.integrations.identity.records import RecordStore, differences
from cuvee.integrations.pages import PageStore
from cuvee.integrations.stores.disk import DiskStore
from cuvee.integrations.vllm_tier import tier_checks


@pytest.fixture(autouse=True)
def _needs_vllm() -> None:
    need_vllm()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    def make(tier: dict[str, Any] | None = None, **changes: Any) -> Engine:
        given = {"store": "memory://?max_gb=0.099", "load_timeout": 10.0, "lookup_timeout": 10.0, **(tier or {})}
        return stack.enter_context(closing(Engine(given, **changes)))

    with ExitStack() as stack:
        yield make


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[DictStore]:
    """What tiers of this test write to."""
    held = DictStore()
    monkeypatch.setattr("cuvee.integrations.pages.opening.open_store", lambda urls: held)
    yield held
    held.before = lambda operation: None


# vLLM's manager -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_cache_layout", "blocks", "ranks"), [("LBNHC", 1, 1), ("LBHNC", 3, 2), ("LBNHC", 3, 4)])
def test_views_are_where_vllms_workers_copy_keys_and_values(
    engine: Callable[..., Engine], kv_cache_layout: str, blocks: int, ranks: int
) -> None:
    """vLLM's own copies from the pages of all ranks, read through our view, are keys and values; and back."""
    e = engine(layout=kv_cache_layout, blocks=blocks, tp=ranks)
    workers = [Worker(e, rank) for rank in range(ranks)]
    heads = e.layout.layers[0].kv_heads
    order = random.Random(1).sample(range(64), 2 * blocks)
    groups = min(ranks, heads)  # of heads: with more ranks than heads, several ranks hold the same
    whole = [torch.randn(64, heads, BLOCK, 128).to(torch.bfloat16) for _ in range(e.layout.num_layers)]
    for rank, worker in enumerate(workers):
        for pages, of_layer in zip(worker.pages, whole, strict=True):
            pages.copy_(of_layer.chunk(groups, dim=1)[rank * groups // ranks])
    rows = [5, 2]
    for worker in workers:
        worker.transfer(order, rows, store=True)
    for number, row in enumerate(rows):
        seen = e.chunk(row)
        blocks_of = order[number * blocks : (number + 1) * blocks]
        for layer, of_layer in enumerate(whole):
            expected = of_layer[blocks_of].transpose(1, 2).reshape(blocks * BLOCK, heads, 128)
            assert torch.equal(seen.keys[layer], expected[..., :64])
            assert torch.equal(seen.values[layer], expected[..., 64:])
    before = [[page.clone() for page in worker.pages] for worker in workers]
    for worker in workers:
        for page in worker.pages:
            page.fill_(7)
        worker.transfer(order, rows, store=False)
    for worker, kept in zip(workers, before, strict=True):
        for now, then in zip(worker.pages, kept, strict=True):
            assert torch.equal(now[order], then[order])
        worker.close()


@pytest.mark.serves(where="classes")
@pytest.mark.serves(parallel="tensor parallelism", where="classes")
def test_entries_do_not_depend_on_ranks_and_layouts(engine: Callable[..., Engine], tmp_path: Path) -> None:
    """What one rank stored is found by two, and what tokens first stored is found by heads first."""
    tier = {"store": f"file://{tmp_path}/store"}
    one = engine(tier)
    one.save(range(3))
    one.close()
    for changes in ({"tp": 2}, {"layout": "LBHNC"}, {"tp": 4, "layout": "LBHNC"}):
        other = engine(tier, **changes)
        assert other.load(range(4)) == 3, changes
        other.close()


# Failures -------------------------------------------------------------------------------------------------------------


def test_nothing_blocks_the_scheduler_while_the_store_hangs(engine: Callable[..., Engine], store: DictStore) -> None:
    e = engine({"lookup_timeout": 60.0})
    e.save([50])
    held = hold(store, "contains")  # what storing and lookups ask first
    before = time.monotonic()
    context = e.offload(range(6))
    other = e.request()
    assert e.manager.lookup(key_of(9), other) is e.base.LookupResult.RETRY
    for _ in range(5):
        e.step()
    e.tier.get_stats()
    assert time.monotonic() - before < 30
    assert e.manager._jobs and e.counters["saved_pages"] == 1
    held.set()
    e.settle()
    assert e.counters["saved_pages"] == 7
    e.manager.on_request_finished(context)


def test_draining_ends_all_jobs_and_reports_each(engine: Callable[..., Engine], store: DictStore) -> None:
    e = engine()
    e.save([50])
    held = hold(store, "put")
    for number in range(15):
        e.offload([number])
    held.reached()
    before = e.tier._given_up

    def let_go() -> None:
        wait_until(lambda: e.tier._given_up > before, "what waits is given up")
        held.set()

    letting_go = threading.Thread(target=let_go)
    letting_go.start()
    e.reset()  # asserts that no job is left
    letting_go.join()
    assert not e.manager._jobs and not e.tier._jobs
    e.view.fill_(-1)
    found = [number for number in range(15) if e.load([number])]
    assert len(found) == e.counters["saved_pages"] - 1 < 15


def test_a_reset_before_the_weights_have_a_name_changes_no_name(
    engine: Callable[..., Engine], store: DictStore
) -> None:
    go = threading.Event()

    def digests(files: list[Path], stop: threading.Event | None = None) -> list[bytes]:
        assert go.wait(60)
        return file_digests(files, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cuvee.integrations.identity.checkpoint.file_digests", digests)
        patch.setattr("cuvee.integrations.identity.weights_name.START_SECONDS", 0.0)
        e = engine()
    e.reset()
    let_name(go)
    e.save([1])
    assert engine().lookup([1]) == 1


def test_after_new_weights_nothing_of_the_old_is_found_and_nothing_is_stored_under_their_name(
    engine: Callable[..., Engine], store: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM tells the tier of a reset; of calls to its workers, which may change weights, we hear by ourselves."""
    core = real("vllm.v1.engine.core").EngineCore
    engine_core = SimpleNamespace(model_executor=SimpleNamespace(collective_rpc=lambda *given: [given[0]]))
    e = engine()
    e.save([1])
    assert core.collective_rpc(engine_core, "check_health") == ["check_health"] and e.lookup([1]) == 1
    before = dict(store.entries)
    assert core.collective_rpc(engine_core, "reload_weights") == ["reload_weights"]
    e.save([2])
    assert e.lookup([1]) == 0 and store.entries == before, "the primary tier may hold the old weights' KV"
    e.reset()
    assert e.lookup([1]) == 0
    e.save([1, 3])
    assert e.lookup([1, 3]) == 2 and len(store.entries) == 3
    e.reset()
    assert e.lookup([1, 3]) == 2, "a reset alone changes no weights"
    assert e.counters["weights_changed"] == 1 and "reset its external cache, too" in caplog.text
    restarted = engine()
    assert restarted.lookup([1]) == 1 and restarted.lookup([3]) == 0
    assert restarted.load([1])


def test_a_job_is_stored_in_parts_between_which_it_can_be_given_up(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later parts are known to follow."""
    told: list[int] = []
    e, save = engine(), PageStore.save

    def noting(self: PageStore, *arguments: Any, following: int = 0) -> list[bool]:
        told.append(following)
        if len(told) == 4:
            e.tier._given_up = time.monotonic()
        return save(self, *arguments, following=following)

    monkeypatch.setattr(PageStore, "save", noting)
    monkeypatch.setattr(real("cuvee.integrations.vllm_tier.tier"), "_TOGETHER", 2 * CHUNK)
    e.save(range(5))
    assert told == [3 * CHUNK, CHUNK, 0]
    e.save(range(10, 15))
    assert told[3:] == [3 * CHUNK]
    assert (e.counters["saved_pages"], e.counters["unsaved_pages"]) == (7, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3"])
def test_a_job_with_bad_rows_or_lengths_fails(engine: Callable[..., Engine], dtype: str) -> None:
    e = engine(dtype=dtype)
    job = e.jobs()
    e.tier.submit_store(job(1, [1], [10_000], False))
    e.tier.submit_load(job(2, [1, 2], [0], True))
    e.tier.submit_store(job(3, [], [], False))
    e.tier.submit_load(job(4, [1], [-1], True))
    results: list[Any] = []

    def all_four() -> bool:
        results.extend(e.tier.get_finished_jobs())
        return len(results) == 4

    wait_until(all_four)
    assert {result.job_id for result in results if result.success} == {3}
    assert e.tier.get_finished_jobs() == []


def test_a_job_that_ends_twice_is_reported_once_and_counted_before(
    engine: Callable[..., Engine], store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's manager asserts that it knows each job, and ends the engine if it does not."""
    e, held, counted = engine(), hold(store, "contains"), list[float]()
    e.offload([1])
    (job,) = e.tier._jobs.values()
    monkeypatch.setattr(e.tier._changed, "notify_all", lambda: counted.append(e.counters["unsaved_pages"]))
    e.tier._end(job, [])
    held.set()
    assert e.tier._storing.dismiss(30)
    (result,) = e.tier.get_finished_jobs()
    assert not result.success and counted == [1]


# What vLLM is told ----------------------------------------------------------------------------------------------------


def test_counts_are_vllms_metrics(engine: Callable[..., Engine]) -> None:
    e = engine()
    definitions = e.spec.build_metric_definitions(e.config.extra_config)
    e.save([1, 2])
    e.tier._counts.count("failures", label="decode")
    stats = e.manager.get_stats().reduce()
    assert stats["vllm:cuvee_tier_saved_pages"] == 2 and stats["vllm:cuvee_tier_failures:('decode',)"] == 1
    assert {name.partition(":('")[0] for name in stats if "cuvee" in name} <= set(definitions)
    assert e.tier.get_stats() is None
    e.load([1])
    e.tier._counts.gauge("identity_entries", 3, "same")
    e.tier._counts.gauge("identity_entries", 0, "other")
    again = e.manager.get_stats().reduce()
    assert [again[f"vllm:cuvee_tier_identity_entries:('{label}',)"] for label in ("same", "other")] == [3, 0]
    assert "vllm:cuvee_tier_saved_pages" not in again and again["vllm:cuvee_tier_loaded_pages"] == 1


def test_vllm_tells_the_tiers_options(engine: Callable[..., Engine]) -> None:
    """0.33 publishes them; 0.32 does not ask."""
    e, expected = engine(), {"profile": "None", "quality": "lossless"}
    assert e.tier.config_info() == expected
    if hasattr(e.manager, "config_info"):
        *_, told = e.manager.config_info()
        assert expected.items() <= told.items()
        assert expected.keys() <= set(e.spec.config_info_keys(e.config.extra_config))


def test_back_pressure_is_vllms(engine: Callable[..., Engine]) -> None:
    e = engine({"backpressure": {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}})
    e.offload([1, 2])
    e.settle()
    assert e.tier.bp_detector._completions == 1


def test_locality_follows_the_store(engine: Callable[..., Engine]) -> None:
    locality = real("vllm.v1.kv_offload.base").Locality
    assert engine({"locality": "REMOTE"}).tier.locality is locality.REMOTE
    assert engine({"store": "redis://127.0.0.1:1/0"}).tier.locality is locality.REMOTE


# Bytes ----------------------------------------------------------------------------------------------------------------


def specs(*names: str) -> list[Any]:
    module = real("vllm.v1.kv_cache_interface")
    heads = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    made = {
        "FullAttentionSpec": lambda: module.FullAttentionSpec(**heads),
        "SlidingWindowSpec": lambda: module.SlidingWindowSpec(**heads, sliding_window=64),
        "MambaSpec": lambda: module.MambaSpec(
            block_size=BLOCK, shapes=((64,), (64, 32)), dtypes=(torch.bfloat16, torch.float32)
        ),
    }
    return [made[name]() for name in names]


@pytest.mark.parametrize(
    ("kinds", "changes", "reason"),
    [
        (["bfloat16"], {"canonical_layout": False}, 'set "canonical_layout": true'),
        (["bfloat16"], {"pp_size": 2}, "pipeline parallelism"),
        (["bfloat16"], {"dcp_size": 2}, "context parallelism"),
        (["bfloat16"], {"is_parallelism_agnostic": False}, "bytes depend on the number of ranks"),
        (["bfloat16"], {"layout": "BLHNC"}, "format v1-blhnc"),
        (["bfloat16"], {"layers": 5}, "the engine offloads 5 layers, the model has 6"),
        (["bfloat16"], {"heads": 4}, r"block: must have \d+ bytes on each of 1 ranks"),
        pytest.param(
            ["bfloat16"], {"dim": 576, "heads": 1}, r"block: must have \d+ bytes .* MLA",
            marks=pytest.mark.serves(model="latents (MLA)", where="classes"),
        ),
        (["bfloat16"], {"replicated_layout": True}, "MLA"),
        pytest.param(
            ["fp8_e4m3"], {"dtype": "fp8_e4m3"}, "got a KV cache of fp8_e4m3",
            marks=pytest.mark.serves(cache="fp8_e4m3", where="classes"),
        ),
        pytest.param(
            ["nvfp4"], {"dtype": "nvfp4", "block_bytes": 27_648}, "got a KV cache of nvfp4",
            marks=pytest.mark.serves(cache="nvfp4", where="classes"),
        ),
        pytest.param(
            ["FullAttentionSpec", "SlidingWindowSpec"], {"groups": 2}, "2 groups of layers",
            marks=pytest.mark.serves(model="sliding windows", where="classes"),
        ),
        pytest.param(
            ["FullAttentionSpec", "MambaSpec"], {"groups": 2}, "2 groups of layers",
            marks=pytest.mark.serves(model="recurrent layers", where="classes"),
        ),
    ],
)  # fmt: skip
def test_chunks_in_an_order_that_is_not_known_come_back_bit_for_bit(
    engine: Callable[..., Engine], kinds: list[str], changes: dict[str, Any], reason: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """After a restart, counted by kind; and an engine that has them in another order does not find them."""
    where = {"store": f"file://{tmp_path}/store"}
    given = {"specs": specs(*kinds)} if kinds[0].endswith("Spec") else {}
    first = engine(where, **changes, **given)
    assert "chunks are stored as bytes, without loss" in caplog.text
    assert re.search(reason, caplog.text)
    first.save(range(4))
    assert first.counters["raw_bytes"] == 4 * len(first.values(0)) > 1.1 * first.counters["blob_bytes"]
    first.close()
    again = engine(where, **changes, **given)
    assert again.load(range(6)) == 4
    counted = {f"opaque_pages{{{kind}}}": 4 / len(kinds) for kind in kinds}
    assert counted.items() <= again.counters.items() and "contained" not in " ".join(again.counters)
    assert engine(where, **{**changes, **given, "blocks": 4}).lookup(range(4)) == 0


def test_a_forged_chunk_is_not_loaded(engine: Callable[..., Engine], store: DictStore) -> None:
    """It may have written a part of its row before it was refused."""
    e = engine(specs=specs("FullAttentionSpec", "SlidingWindowSpec"), groups=2)
    e.save(range(2))
    assert len(forge(store)) == 2
    assert e.load(range(2)) == 0 and e.counters["failures{decode}"] >= 1 and "loaded_pages" not in e.counters
    assert "contained" not in " ".join(e.counters)


# A step that fails ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "error"), [("step", KeyboardInterrupt), ("step_with_batch_queue", RuntimeError)])
def test_after_a_step_that_raised_nothing_is_stored(
    engine: Callable[..., Engine], store: DictStore, caplog: pytest.LogCaptureFixture, step: str,
    error: type[BaseException],
) -> None:  # fmt: skip
    """vLLM offers what it computed in part, and what builds on it, if an application goes on. It still loads."""

    def fails(*_: Any) -> None:
        raise error

    e, core = engine(), real("vllm.v1.engine.core").EngineCore
    e.save([1])
    failing = SimpleNamespace(
        scheduler=SimpleNamespace(has_requests=lambda: True, schedule=fails), batch_queue=[], batch_queue_size=2,
        _should_throttle_prefills=lambda: False,
    )  # fmt: skip
    e.offload([2])  # of a step before
    e.settle()
    with pytest.raises(error):
        getattr(core, step)(failing)
    e.save([3, 4])
    assert len(store.entries) == 2 and e.load([1]) == 1 and e.lookup([3]) == 0
    assert e.counters["unsaved_pages"] == 2 and caplog.text.count("a step of vLLM has failed") == 1
    assert "contained" not in " ".join(e.counters)


def test_a_model_with_windows_is_stored_as_bytes(
    engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    heads = {"num_key_value_heads": 2, "num_attention_heads": 2}
    shape: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": 128, **heads}
    MistralForCausalLM(MistralConfig(sliding_window=64, vocab_size=64, **shape)).save_pretrained(tmp_path)
    e = engine(model=str(tmp_path))
    e.save(range(3))
    assert e.load(range(4)) == 3 and e.counters["opaque_pages{bfloat16}"] == 6
    assert "got layers of sliding_attention" in caplog.text


class _Told:
    failed = 0

    def step_failed(self) -> None:
        self.failed += 1


def test_a_step_that_vllm_wraps_itself_is_watched_once() -> None:
    def fails(core: object) -> None:
        raise RuntimeError

    @wraps(fails)
    def wrapped(core: object) -> None:
        fails(core)

    core, tiers = SimpleNamespace(step=fails, step_with_batch_queue=wrapped), [_Told(), _Told()]
    for tier in tiers:
        tier_checks.watch_steps(core, tier)
    for step in (core.step, core.step_with_batch_queue):
        with pytest.raises(RuntimeError):
            step(core)
    assert [tier.failed for tier in tiers] == [2, 2]


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "changes", "error", "message"),
    [
        ({"stores": "x"}, {}, InputError, "secondary_tiers: has no option 'stores'"),
        ({"model": "/nowhere"}, {}, InputError, "model: must be a folder or hub id"),
        ({"locality": "here"}, {}, InputError, "locality: must be one of LOCAL, REMOTE, or left out"),
        ({"max_pending_gb": 0}, {}, InputError, "max_pending_gb: must be a number above 0"),
    ],
)
def test_what_is_not_supported_does_not_start(
    engine: Callable[..., Engine], tier: dict[str, Any], changes: dict[str, Any], error: type[CuveeError], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine(tier, **changes)


def test_the_engines_options_are_in_the_names(engine: Callable[..., Engine], tmp_path: Path) -> None:
    """Although vLLM tells a tier the model's path alone."""
    where = {"store": f"file://{tmp_path}/store"}
    plain = engine(where)
    plain.save([1])

    def other(option: str, value: Any) -> Any:
        changed = copy.copy(plain.engine)
        changed.model_config = copy.copy(changed.model_config)
        setattr(changed.model_config, option, value)
        return changed

    assert engine(where, engine=other("seed", 7)).lookup([1]) == 1, "it is listed"
    assert engine(where, engine=other("hf_overrides", {"rms_norm_eps": 0.5})).lookup([1]) == 0
    with pytest.raises(InputError, match=r"^model_config\.model_class_overrides: must .* 'model_id'"):
        engine(where, engine=other("model_class_overrides", print))
    assert engine({**where, "model_id": "mine"}, engine=other("model_class_overrides", print)).lookup([1]) == 0
    assert engine(where, blocks=4).lookup([1]) == 0 and engine(where).lookup([1]) == 1


def test_a_revision_of_a_hub_id_names_its_own_weights(
    engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the records of both say which they are."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    where, plain = {"store": f"file://{tmp_path}/store"}, engine().engine
    config = json.loads((Path(MODEL) / "config.json").read_text())
    for number, revision in enumerate(("main", "tuned")):
        folder = shutil.copytree(MODEL, tmp_path / revision)
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 300 + number}))
        cached(tmp_path, folder, revision)

    def of(revision: str) -> Engine:
        changed = copy.copy(plain)
        changed.model_config = copy.copy(changed.model_config)
        changed.model_config.revision = revision
        return engine(where, engine=changed, model="org/name")

    of("main").save([1])
    assert of("tuned").lookup([1]) == 0 and of("main").lookup([1]) == 1
    with closing(DiskStore(tmp_path / "store")) as store:
        wait_until(lambda: len(RecordStore(store).read()[0]) == 2)
        one, other = RecordStore(store).read()[0]
        assert {*differences(one, other)["revision"]} == {"main", "tuned"}


def test_a_drafters_weights_are_in_the_names_where_its_layers_lie_in_the_rows(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """And nowhere else: engines share keys and values, whatever proposes their tokens."""
    where, plain = {"store": f"file://{tmp_path}/store"}, engine().engine
    folder = Path(shutil.copytree(MODEL, tmp_path / "drafter"))
    tensors = load_file(folder / "model.safetensors")

    def of(layers: int, quantization: str | None = None) -> Engine:
        drafts = SimpleNamespace(model=str(folder), revision=None, dtype=torch.bfloat16, quantization=quantization)
        changed = copy.copy(plain)
        changed.speculative_config = SimpleNamespace(
            method="eagle", num_speculative_tokens=3, draft_model_config=drafts
        )
        return engine(where, engine=changed, layers=layers)

    for layers in (LAYERS + 1, LAYERS):
        of(layers).save([1])
        shared = layers == LAYERS
        assert of(layers).lookup([1]) == 1
        assert of(layers, "fp8").lookup([1]) == engine(where, layers=layers).lookup([1]) == shared
        next(iter(tensors.values())).view(torch.uint8).flatten()[0] ^= 1
        save_file(tensors, folder / "model.safetensors")
        assert of(layers).lookup([1]) == shared


def test_how_vllm_arranges_its_pages_names_rows_of_bytes(
    engine: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options that change no keys and values, and so name none: rows that vLLM itself describes are shared."""
    where, plain = {"store": f"file://{tmp_path}/store"}, engine().engine
    interface = real("vllm.v1.kv_cache_interface")
    dtypes = (torch.bfloat16, torch.float32)

    def states(size: int) -> Any:
        return interface.MambaSpec(BLOCK, shapes=((size, 64), (2, 8)), dtypes=dtypes, page_size_padded=4096)

    def of(part: str = "", option: str = "", value: Any = None) -> Any:
        changed = copy.copy(plain)
        if part:
            setattr(changed, part, copy.copy(getattr(changed, part)))
            setattr(getattr(changed, part), option, value)
        return changed

    def drafts(tokens: int) -> Any:
        changed = copy.copy(plain)
        changed.speculative_config = SimpleNamespace(
            method="mtp", num_speculative_tokens=tokens, draft_model_config=changed.model_config
        )
        return changed

    rows: dict[str, Any] = {"dtype": "fp8_e4m3", "specs": [states(3)]}
    engine(where, engine=of(), **rows).save([1])
    engine(where).save([2])
    engine(where, engine=drafts(2), **rows).save([1])

    def found(changed: Any, **other: Any) -> tuple[int, int]:
        opaque = engine(where, engine=changed, **{**rows, **other}).lookup([1])
        return opaque, engine(where, engine=changed).lookup([2])

    assert found(of()) == found(drafts(2)) == (1, 1)
    assert found(drafts(3)) == (0, 1)
    assert found(of(), specs=[states(4)]) == (0, 1), "another room for states in a page of one size"
    assert found(of("attention_config", "backend", "FLASHINFER")) == (0, 1)
    assert found(of("parallel_config", "cp_kv_cache_interleave_size", 64)) == (0, 1)
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert found(of()) == (0, 1)
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert engine(where).lookup([2]) == 0, "backends there have orders of their own, so that rows are bytes"


def test_a_checkpoint_that_changes_while_the_engine_starts_is_not_used(
    engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = copy.copy(engine().engine)
    began.instance_id = str(time.time_ns() - 10**9)  # the clock of files ticks every few milliseconds
    folder = shutil.copytree(MODEL, tmp_path / "model")
    late = engine(engine=began, model=str(folder), began=True)
    late.save([1])
    assert late.lookup([1]) == 0 and "changed while the engine started" in caplog.text


@pytest.mark.serves(model="images", where="refused")
def test_names_that_do_not_tell_the_content_are_refused(engine: Callable[..., Engine]) -> None:
    adapters, images = copy.copy(engine().engine), copy.copy(engine().engine)
    adapters.lora_config = real("vllm.config").LoRAConfig()
    with pytest.raises(InputError, match="model_id: must be a name that changes with the adapters' files"):
        engine(engine=adapters)
    engine({"model_id": "mine"}, engine=adapters)
    weak = copy.copy(adapters)
    weak.cache_config = copy.copy(weak.cache_config)
    weak.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(InputError, match="prefix_caching_hash_algo: must be sha256"):
        engine({"model_id": "mine"}, engine=weak)
    images.model_config = SimpleNamespace(supports_multimodal_inputs=True)
    with pytest.raises(UnsupportedModelError, match="does not support images"):
        engine({"model_id": "mine"}, engine=images)
    with pytest.raises(UnsupportedModelError, match="does not support this vLLM, which tells it nothing"):
        engine({"model_id": "mine"}, engine=None)
