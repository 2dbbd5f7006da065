"""The connector beside others, through vLLM's `MultiConnector`: what it changes for them, and when."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.vllm.blending.test_planning import BLOCKS, FIRST, SECOND, ask
from tests.integrations.vllm.engines import Engine, Step, cuvee, need_vllm, run_engines, save_tiny_model
from tests.integrations.vllm.sides import Desk
from tests.integrations.vllm_tier.real_tiers import real

from cuvee.integrations.vllm.messages import Report

BASE = "vllm.distributed.kv_transfer.kv_connector.v1"


@pytest.fixture(autouse=True)
def _needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    need_vllm()
    monkeypatch.setattr(sys.modules[__name__], "Other", other_class(), raising=False)  # vLLM looks for it here


def ours() -> Any:
    return real("cuvee.integrations.vllm.other_connectors")


def other_class() -> type[Any]:
    """A connector that has as many tokens of every prompt as a test says. It keeps who made it, and names of blocks."""

    class Other(real(f"{BASE}.example_connector").ExampleConnector):  # type: ignore[misc]
        tokens = 0

        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            self.maker = ours().multi_connector()
            ours().have_failed_loads_computed(vllm_config, self.maker)
            self.seen: list[list[Any]] = []

        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
            self.seen.append(list(request.block_hashes))
            return self.tokens, False

        def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
            """The engine's blocks are of no interest here."""

    return Other


def engine_config(policy: str) -> SimpleNamespace:
    child = {"kv_connector": "Other", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
    transfer = real("vllm.config.kv_transfer").KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [child]},
    )  # fmt: skip
    return SimpleNamespace(
        kv_transfer_config=transfer, scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True)
    )


def made(policy: str = "recompute") -> tuple[SimpleNamespace, Any]:
    """vLLM's configuration, and its connector of another one."""
    config, role = engine_config(policy), real(f"{BASE}.base").KVConnectorRole.SCHEDULER
    return config, real(f"{BASE}.multi_connector").MultiConnector(config, role, SimpleNamespace())


@pytest.fixture
def desk(desk: Callable[..., Desk]) -> Desk:
    return desk(blend={"segment_tokens": 12}, setup={"other_connectors": True})


def beside(d: Desk, tokens: int) -> tuple[Any, Any]:
    """vLLM's connector of ours, behind another one that has so many tokens."""
    _, multi = made()
    (other,) = multi._connectors
    other.tokens = tokens
    connector = real("cuvee.integrations.vllm.connector").CuveeConnector
    own = connector.__new__(connector)
    own._scheduler = d.side
    multi._connectors.append(own)
    return multi, other


def scheduled(d: Desk, multi: Any, request: Any) -> int:
    """vLLM schedules a request, as soon as all connectors know what they have of it."""
    tokens = None
    while tokens is None:
        tokens, _ = multi.get_num_new_matched_tokens(request, 0)
    blocks = SimpleNamespace(get_block_ids=lambda: (BLOCKS,))
    multi.update_state_after_alloc(request, blocks, tokens)
    return int(tokens)


def test_who_makes_a_connector_is_known() -> None:
    _, multi = made()
    assert multi._connectors[0].maker is multi
    assert ours().multi_connector() is None


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_becomes_of_failed_loads_is_the_users_to_say_beside_others(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = made(policy)
    assert config.kv_transfer_config.kv_load_failure_policy == policy
    assert ("kv_load_failure_policy is 'fail'" in caplog.text) is (policy == "fail")
    ours().have_failed_loads_computed(config, None)
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute", "alone, it is ours to say"


def test_blocks_are_renamed_once_our_blend_is_taken(desk: Desk) -> None:
    desk.put_segments(FIRST, SECOND)
    multi, other = beside(desk, 0)
    request = ask(desk)
    exact = list(request.block_hashes)
    assert scheduled(desk, multi, request) == 65
    assert all(seen == exact for seen in other.seen), "what others look up has the names that it has without us"
    assert request.block_hashes != exact and request.block_hashes[:1] == exact[:1]
    renamed = list(request.block_hashes)
    desk.side.take(Report(ended=["r"]))
    assert scheduled(desk, multi, request) == 65 and request.block_hashes == renamed, "it was preempted"
    assert desk.side.outcome(request) == {"blended": True, "reused_tokens": 50, "cost": 0.15}


def test_another_connector_that_loads_finds_the_names_as_they_were(desk: Desk) -> None:
    desk.put_segments(FIRST, SECOND)
    multi, _ = beside(desk, 64)
    request = ask(desk)
    exact = list(request.block_hashes)
    assert scheduled(desk, multi, request) == 64
    assert request.block_hashes == exact
    told = {"blended": False, "reused_tokens": 0, "reason": "untaken"}
    assert desk.side.outcome(request) == told
    assert not desk.plan().loads


@pytest.mark.slow
def test_beside_another_connector_one_loads_and_both_save(tmp_path: Path) -> None:
    chunk, model = 64, save_tiny_model("llama", tmp_path / "llama")
    prompts = [[(7 * at + seed) % 250 + 1 for at in range(4 * chunk + 5)] for seed in (0, 1)]
    children = [
        cuvee(f"file://{tmp_path / 'store'}", chunk_tokens=chunk),
        {
            "kv_connector": "ExampleConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "raw")},
        },
    ]  # fmt: skip
    transfer = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }  # fmt: skip
    engines = []
    for name in ("reference", "filled", "ours first"):
        options = {} if name == "reference" else {"kv_transfer_config": transfer}
        until = ("vllm:cuvee_stored{kind=chunk}", 8) if name == "filled" else None
        engines.append(Engine(name, model, [Step(prompts, forget=True, until=until)], options))
    ran = run_engines(tmp_path / "run", engines)
    filled, loaded = ran["filled"], ran["ours first"]
    assert list((tmp_path / "raw").rglob("*.safetensors")), "the other connector saves as well"
    expected = [answer.tokens for answer in ran["reference"].steps[0]]
    for engine in (filled, loaded):
        assert [answer.tokens for answer in engine.steps[0]] == expected
    assert filled.metric("vllm:cuvee_stored{kind=chunk}") == 8 and filled.metric("vllm:cuvee_load_seconds_count") == 0
    assert loaded.metric("vllm:cuvee_load_seconds_count") == 2
    assert [answer.cached for answer in loaded.steps[0]] == [4 * chunk] * 2
