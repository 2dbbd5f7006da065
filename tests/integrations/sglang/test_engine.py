"""Real SGLang engines with HiCache and our backend behind it, from lookup to answer, on a CPU.

All of SGLang runs as it is: tokenizer manager, scheduler, radix tree, HiCache's controller with its threads, host
pools, models, and the attention of its torch-native backend. What `cpu_engine` names is replaced; of cuvee nothing is.
How many tokens came from the store is SGLang's own count, `cached_tokens_details` of its answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.conftest import tiny_model
from tests.integrations.sglang.cpu_engine import PAGE, Engine, Engines
from tests.integrations.sglang.real_sglang import need_sglang
from tests.integrations.stores.redis_server import redis_server
from tests.integrations.vllm.engines import Answer, cached, distance, ids, save_tiny_model
from tests.waiting import wait_until

from cuvee.calibration.bundled import bundled_model_path
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.base import RECORDS

pytestmark = [need_sglang, pytest.mark.slow]

PROMPTS = [ids(6 * PAGE + 7, 1), ids(3 * PAGE + 5, 2)]
PAGES = 6 + 3
HELD = [6 * PAGE, 3 * PAGE]
# Its layers are dense: SGLang computes experts in kernels.
MELLUM = transformers.MellumConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, sliding_window=PAGE, max_position_embeddings=1024, initializer_range=0.2,
    layer_types=[*["sliding_attention"] * 2, "full_attention", "sliding_attention"], mlp_layer_types=["dense"] * 4,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip
ROUNDING = 1e-3  # of logits in float32, where another part of a prompt is computed


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with Engines.started(tmp_path_factory.mktemp("sglang")) as engines:
        yield engines


@dataclass(frozen=True, slots=True)
class Ran:
    """What engines of a tiny Llama said, and counters of our backend.

    Attributes:
        model, other: two checkpoints.
        store: URL, which now has what both computed.
        computed, held, of_other: answers without HiCache: computed, from the engine's own cache, with other weights.
        stored, restored: answers with it: computed, and from the store.
        updated, again: the same with other weights.
    """

    model: Path
    other: Path
    store: str
    computed: list[Answer]
    held: list[Answer]
    of_other: list[Answer]
    stored: list[Answer]
    restored: list[Answer]
    updated: list[Answer]
    again: list[Answer]
    counters: Mapping[str, float]


@pytest.fixture(scope="module")
def ran(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("llama")
    model, other = (save_tiny_model("llama", folder / str(seed), seed) for seed in range(2))
    store = f"file://{folder / 'store'}"
    with engines.engine(model) as engine:
        computed, held = engine.ask(*PROMPTS), engine.ask(*PROMPTS)
        engine.update_weights(other)
        of_other = engine.ask(*PROMPTS)
    with engines.engine(model, store) as engine:
        stored = engine.ask(*PROMPTS)
        engine.flush()
        restored = engine.ask(*PROMPTS)
        engine.update_weights(other)
        updated = engine.ask(*PROMPTS)
        engine.flush()
        again = engine.ask(*PROMPTS)
        counters = engine.detach()
    return Ran(model, other, store, computed, held, of_other, stored, restored, updated, again, counters)


def assert_same(answers: Sequence[Answer], expected: Sequence[Answer], within: float = 0.0) -> None:
    distances = [distance(answer, other) for answer, other in zip(answers, expected, strict=True)]
    assert max(distances) <= within, distances


def assert_from_store(answers: Sequence[Answer], tokens: Sequence[int] = HELD) -> None:
    """By SGLang's count, so many tokens of each prompt came from the store, and none from its own caches."""
    details = {"device": 0, "host": 0, "storage_backend": "CuveeHiCache"}
    assert [each.told for each in answers] == [{**details, "storage": count} if count else None for count in tokens]


def assert_sound(counters: Mapping[str, float]) -> None:
    trouble = ("failures", "contained", "opaque", "missed", "unsaved", "refused", "misfits")
    assert not [name for name in counters if name.startswith(trouble)], counters


def test_storing_changes_nothing_and_after_a_flush_pages_are_restored(ran: Ran) -> None:
    assert_same(ran.stored, ran.computed)
    assert cached(ran.stored) == [0, 0]
    assert_same(ran.restored, ran.held)
    assert_from_store(ran.restored)
    assert_sound(ran.counters)
    assert 0 < ran.counters["blob_bytes"] < ran.counters["raw_bytes"]


def test_pages_of_other_weights_are_not_served(ran: Ran) -> None:
    """Those that this engine stores after an update are."""
    assert max(map(distance, ran.of_other, ran.computed)) > 1
    assert cached(ran.updated) == [0, 0]
    assert_same(ran.updated, ran.of_other)
    assert_from_store(ran.again)
    assert_same(ran.again, ran.of_other, ROUNDING)
    assert ran.counters["weights_changed"] == 1
    assert ran.counters["saved_pages"] == ran.counters["loaded_pages"] == 2 * PAGES


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
@pytest.mark.serves(where="engine")
def test_after_a_restart_a_load_answers_as_a_hit_in_the_engines_own_cache(
    engines: Engines, ran: Ran, layout: str
) -> None:
    """To the last bit, whatever arrangement the engine has that stored the pages."""
    with engines.engine(ran.model, ran.store, layout) as engine:
        answers = engine.ask(*PROMPTS)
        assert_from_store(answers)
        assert_same(answers, ran.held)
        counters = engine.detach()
    assert counters["loaded_pages"] == PAGES and "saved_pages" not in counters
    assert_sound(counters)


def test_prompts_that_share_a_beginning_and_arrive_together(engines: Engines, ran: Ran) -> None:
    prompts = [PROMPTS[0][: 2 * PAGE] + ids(2 * PAGE, seed) for seed in range(3, 6)]
    with engines.engine(ran.model) as engine:
        expected = engine.ask(*prompts)
    with engines.engine(ran.model, ran.store) as engine:
        for _ in range(2):
            assert_same(engine.ask(*prompts, together=True), expected, ROUNDING)
            engine.flush()
        answers = engine.ask(*prompts, together=True)
        assert_same(answers, expected, ROUNDING)
        assert cached(answers) == [3 * PAGE] * 3 and any(each.told["storage"] for each in answers if each.told), answers
        assert_sound(engine.detach())


def test_lossy_pages_are_close(engines: Engines, books: Any, tmp_path: Path) -> None:
    """In bfloat16, of the bundled model, at the quality of its profile."""
    books.profile.save(tmp_path / "profile")
    prompts = [row.tolist() for row in books.orchard[:2]]
    own = {"profile": str(tmp_path / "profile"), "quality": "balanced"}
    options: dict[str, Any] = {"dtype": "bfloat16", "context_length": 512, "cuvee": own}
    with engines.engine(bundled_model_path(), f"file://{tmp_path}/store", **options) as engine:
        engine.ask(*prompts)
        held = engine.ask(*prompts)
        engine.flush()
        restored = engine.ask(*prompts)
        counters = engine.detach()
    assert_from_store(restored, [192, 192])
    distances = [distance(*pair) for pair in zip(restored, held, strict=True)]
    assert 0 < max(distances) < 1, distances
    assert counters["loaded_pages"] == 6 and counters["blob_bytes"] < counters["raw_bytes"] / 10
    assert_sound(counters)


def restored_as_held(engine: Engine) -> dict[str, float]:
    """Check that pages come from the store as from SGLang's own cache; the counters after that."""
    engine.ask(*PROMPTS)
    held = engine.ask(*PROMPTS)
    engine.flush()
    restored = engine.ask(*PROMPTS)
    assert_from_store(restored)
    assert_same(restored, held)
    return engine.detach()


@pytest.mark.serves(model="latents (MLA)", where="engine")
def test_latents(engines: Engines, tmp_path: Path) -> None:
    # On a CPU, SGLang computes latents with YaRN only.
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 1e4}
    changes: dict[str, Any] = {
        "vocab_size": 256, "max_position_embeddings": 1024, "initializer_range": 0.2, "first_k_dense_replace": 2,
        "moe_layer_freq": 1, "rope_parameters": {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0},
    }  # fmt: skip
    tiny_model("deepseek_v3", **changes).save_pretrained(tmp_path / "model")
    with engines.engine(tmp_path / "model", f"file://{tmp_path}/store") as engine:
        counters = restored_as_held(engine)
    assert counters["loaded_pages"] == PAGES
    assert_sound(counters)


@pytest.mark.serves(cache="fp8_e4m3", where="engine")
def test_pages_of_fp8_are_bytes(engines: Engines, ran: Ran, tmp_path: Path) -> None:
    with engines.engine(ran.model, f"file://{tmp_path}/store", kv_cache_dtype="fp8_e4m3") as engine:
        counters = restored_as_held(engine)
    assert counters["opaque_pages{kv}"] == 2 * PAGES == 2 * counters["loaded_pages"]
    assert not [name for name in counters if name.startswith(("failures", "contained", "missed", "unsaved"))]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("mellum", marks=pytest.mark.serves(model="sliding windows", where="engine")),
        pytest.param("lfm2", marks=pytest.mark.serves(model="recurrent layers", where="engine")),
    ],
)
def test_windows_and_states(engines: Engines, tmp_path: Path, kind: str) -> None:
    """In further pools, of which SGLang stores the end of each prompt: a prompt that leaves one earlier is computed."""
    options: dict[str, Any] = {}
    if kind == "mellum":
        model, pool = tmp_path / "model", "swa"
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(MELLUM, dtype=torch.float32).save_pretrained(model)
    else:
        model, pool = save_tiny_model(kind, tmp_path / "model"), "mamba"
        options = {
            "page_size": 1, "mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True,
            "max_mamba_cache_size": 32,
        }  # fmt: skip
    leaving = PROMPTS[0][: 4 * PAGE] + ids(20, "another end")
    with engines.engine(model, f"file://{tmp_path}/store", **options) as engine:
        expected = engine.ask(leaving)
        engine.flush()
        engine.clear_storage()
        longer = [
            prompt + answer.tokens + ids(20, "on") for prompt, answer in zip(PROMPTS, engine.ask(*PROMPTS), strict=True)
        ]
        held = engine.ask(*longer)
        engine.flush()
        restored = engine.ask(*longer[::-1])[::-1]  # in the other order, because flushed memory still has what it had
        engine.flush()
        assert_same(engine.ask(leaving), expected)
        counters = engine.detach()
    assert min(cached(held)) >= 3 * PAGE
    assert_from_store(restored, cached(held))
    assert_same(restored, held)
    assert counters["opaque_pages{kv}"] and counters[f"opaque_pages{{{pool}}}"]
    assert not [name for name in counters if name.startswith(("failures", "contained", "missed", "unsaved"))]


@pytest.mark.serves(parallel="tensor parallelism", where="engine")
def test_two_ranks(engines: Engines, ran: Ran, tmp_path: Path) -> None:
    """Each has entries of its own: half of the heads."""
    with engines.engine(ran.model, f"file://{tmp_path}/store", tp_size=2) as engine:
        counters = restored_as_held(engine)
        engine.wait_for_log("cuvee: closed after", 2)
    assert len(entries(tmp_path / "store")) == 2 * PAGES
    assert counters["loaded_pages"] == PAGES
    assert_sound(counters)


# What goes wrong --------------------------------------------------------------------------------------------------


def entries(folder: Path) -> list[str]:
    paths = [path for path in folder.glob("*/*/*") if path.is_file() and path.parts[-3] != RECORDS]
    return sorted(f"{path.parts[-3]}/{path.name}" for path in paths)


def test_damaged_and_forged_pages_are_computed(engines: Engines, ran: Ran, tmp_path: Path) -> None:
    """From each of them on, and stored anew; what is before it is restored."""
    (tmp_path / "key").write_text("0123456789abcdef" * 2)
    damages: list[Callable[[bytes, bytes], bytes]] = [
        lambda blob, other: blob[:-1] + bytes([blob[-1] ^ 1]),
        lambda blob, other: blob[: len(blob) // 2],
        lambda blob, other: b"",
        lambda blob, other: bytes(len(blob)),
        lambda blob, other: other,  # of another page
        lambda blob, other: blob + b"x",
    ]
    found = []
    store, own = open_store(f"file://{tmp_path}/store"), {"key_file": str(tmp_path / "key")}
    with engines.engine(ran.model, f"file://{tmp_path}/store", cuvee=own) as engine:
        engine.ask(PROMPTS[0])
        engine.flush()
        keys = entries(tmp_path / "store")
        for number, (key, damage) in enumerate(zip(keys, damages, strict=True)):
            blob, other = store.get_many([key, keys[number - 1]])
            assert blob and other and store.put(key, damage(blob, other))
            answers = engine.ask(PROMPTS[0])
            assert_same(answers, ran.computed[:1], ROUNDING)
            found += cached(answers)
            engine.flush()
            assert_from_store(engine.ask(PROMPTS[0]), HELD[:1])
            engine.flush()
        engine.clear_storage()
        assert cached(engine.ask(PROMPTS[0])) == [0]
        counters = engine.detach()
    assert sorted(found) == [page * PAGE for page in range(6)]
    assert counters["failures{decode}"] == 6, counters


def test_a_store_that_fails_hangs_or_is_gone_costs_no_answer(engines: Engines, ran: Ran) -> None:
    """A real Redis; once it is well, pages are stored and restored again."""

    def restored() -> bool:
        engine.flush()
        engine.ask(ids(10 * PAGE, f"turn {next(turns)}"))  # where the pages of these prompts were
        engine.flush()
        answers = engine.ask(*PROMPTS)
        assert_same(answers, ran.held, ROUNDING)
        return all(each.told and each.told["storage"] == held for each, held in zip(answers, HELD, strict=True))

    turns, limits = itertools.count(), {"lookup_timeout": 0.3, "load_timeout": 1.0}
    with redis_server() as server, engines.engine(ran.model, server.url, cuvee=limits) as engine:
        wait_until(restored)
        server.client().execute_command("ACL", "SETUSER", "default", "-getrange")  # a lookup still finds pages
        assert not restored()
        server.client().execute_command("ACL", "SETUSER", "default", "+getrange")
        wait_until(restored)
        server.pause()
        assert not restored()
        server.resume()
        wait_until(restored)
        server.kill()
        assert not restored()
        server.start()
        wait_until(restored)
        counters = engine.detach()
    assert counters["failures{lookup}"] and counters["failures{store}"] and counters["missed_pages"], counters


def test_what_a_killed_engine_stored_is_sound(engines: Engines, ran: Ran, tmp_path: Path) -> None:
    """What was stored before is restored, and whatever it was storing when it was killed."""
    prompt, store = PROMPTS[0][: 6 * PAGE] + ids(6 * PAGE + 1, 7), f"file://{tmp_path}/store"
    with engines.engine(ran.model, store) as engine:
        engine.ask(PROMPTS[0])
        engine.flush()
        before = entries(tmp_path / "store")
        expected = engine.ask(prompt)
        wait_until(lambda: len(entries(tmp_path / "store")) > len(before), "more is stored")
    with engines.engine(ran.model, store) as engine:
        answers = engine.ask(prompt)
        assert_same(answers, expected, ROUNDING)
        assert cached(answers)[0] >= len(before) * PAGE == 6 * PAGE
        engine.flush()
        assert_from_store(engine.ask(prompt), [12 * PAGE])
        assert_sound(engine.detach())
