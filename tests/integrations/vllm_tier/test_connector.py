"""vLLM's own `OffloadingConnector` in its scheduler's role, configured as by an engine, with our tier behind it."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.vllm.engines import need_vllm
from tests.integrations.vllm_tier.real_tiers import (
    BLOCK,
    BLOCKS,
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    MODEL,
    TIER,
    real,
    same,
    values,
)


class Connector:
    """vLLM's connector of a model on one rank, for its scheduler."""

    def __init__(self, tier: dict[str, Any]) -> None:
        transfer = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 1 << 22, "block_size": CHUNK,
                "canonical_layout": True, "secondary_tiers": [{**TIER, **tier}],
            },
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about interfaces that may change
            config = real("vllm.engine.arg_utils").EngineArgs(
                model=MODEL, dtype="bfloat16", block_size=BLOCK, enforce_eager=True, skip_tokenizer_init=True,
                max_model_len=512, kv_transfer_config=real("vllm.config").KVTransferConfig(**transfer),
            ).create_engine_config()  # fmt: skip
            config.cache_config.kv_cache_layout = "LBNHC"  # what an engine takes for most of its attention backends
            interface = real("vllm.v1.kv_cache_interface")
            spec = interface.FullAttentionSpec(
                block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.bfloat16
            )  # fmt: skip
            names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
            caches = interface.KVCacheConfig(
                num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[interface.KVCacheGroupSpec(names, spec)]
            )
            roles = real("vllm.distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole
            self.made = real("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory.create_connector(
                config, roles.SCHEDULER, caches
            )
        self.scheduler = self.made.connector_scheduler
        (self.tier,) = self.scheduler.manager.secondary_tiers

    def request(self, name: str, tokens: int = 5 * BLOCK) -> Any:
        """vLLM's request, with the hashes of its blocks, which the connector knows."""
        hashing, utils = real("vllm.utils.hashing"), real("vllm.v1.core.kv_cache_utils")
        utils.init_none_hash(hashing.sha256_cbor)
        parameters = real("vllm.sampling_params").SamplingParams(max_tokens=4)
        hasher = utils.get_request_block_hasher(BLOCK, hashing.sha256_cbor)
        made = real("vllm.v1.request").Request(
            name, list(range(1, tokens + 1)), parameters, None, block_hasher=hasher
        )  # fmt: skip
        self.made.on_new_request(made)
        return made

    def step(self) -> None:
        """A step in which nothing is scheduled."""
        self.made.build_connector_meta(real("vllm.v1.core.sched.output").SchedulerOutput.make_empty())

    def matched(self, request: Any) -> int:
        """How many tokens of a request vLLM would load, once its connector says so."""
        until = time.monotonic() + 60
        while True:
            tokens, _ = self.made.get_num_new_matched_tokens(request, 0)
            if tokens is not None:
                return int(tokens)
            self.step()
            assert time.monotonic() < until, "timed out"
            time.sleep(0.002)


@pytest.fixture(autouse=True)
def _needs_vllm() -> None:
    need_vllm()


def test_vllms_scheduler_finds_what_an_earlier_engine_stored(tmp_path: Path) -> None:
    tier = {"store": f"file://{tmp_path}/store", "lookup_timeout": 30.0}
    first = Connector(tier)
    request = first.request("first")
    assert first.matched(request) == 0
    status = first.scheduler._req_status["first"]
    keys = list(status.group_states[0].offload_keys)
    assert len(keys) == 2, "of 5 blocks, 2 whole chunks"
    manager = first.scheduler.manager
    prepared = manager.prepare_store(keys, status.req_context)
    layout = first.tier._rows.cache.layout
    for number, row in enumerate(prepared.store_spec.block_ids):
        chunk = values(number, layout)
        first.tier._rows.cache.write(chunk.keys, chunk.values, first.tier._rows.slots([int(row)]))
    manager.complete_store(keys, status.req_context)
    while manager._jobs:
        first.step()
        time.sleep(0.002)
    first.made.shutdown()
    again = Connector(tier)
    other = again.request("other")
    assert again.matched(other) == BLOCKS * 2 * BLOCK
    rows = again.scheduler.manager.prepare_load(keys, again.scheduler._req_status["other"].req_context).block_ids
    for number, row in enumerate(rows):
        assert same(again.tier._rows.cache.read(again.tier._rows.slots([int(row)]), 0), values(number, layout))
    assert again.tier.counters()["loaded_pages"] == 2
    again.made.shutdown()
