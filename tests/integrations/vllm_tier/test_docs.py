"""The README of the tier says what the code does, and its command is what vLLM takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.integrations.readme_tables import check_options
from tests.integrations.vllm.engines import need_vllm
from tests.integrations.vllm_tier.real_tiers import MODEL, TIER, engine_config, offloading_config, real

from cuvee.integrations.vllm_tier.tier_options import TierOptions

README = (Path(__file__).parents[3] / "integrations" / "vllm_tier" / "README.md").read_text(encoding="utf-8")


def test_every_option_is_documented_with_its_default() -> None:
    check_options(README, TierOptions, {"model": "the served model", "locality": "by the store's URL"})


def test_the_command_is_what_vllm_takes(tmp_path: Path) -> None:
    need_vllm()
    command = README.partition("\n## ")[0]
    (text,) = re.findall(r"--kv-transfer-config '(.+?)'\n", command, re.DOTALL)
    documented = re.findall(
        r"--kv-transfer-config '(.+?)'\n", real("cuvee.integrations.vllm_tier.tier").__doc__ or "", re.DOTALL
    )
    given = json.loads(text)
    assert [json.loads(each) for each in documented] == [given]
    extra = given["kv_connector_extra_config"]
    (tier,) = extra["secondary_tiers"]
    assert {name: tier[name] for name in TIER} == TIER
    options = {name: value for name, value in tier.items() if name not in TIER}
    assert TierOptions.from_dict(options).profile == "qwen3-8b.safetensors"
    extra["secondary_tiers"] = [{**tier, "store": f"file://{tmp_path}", "profile": None, "model": MODEL}]
    factory = real("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    transfer = real("vllm.config").KVTransferConfig(**given)
    assert factory.get_connector_class(transfer).__name__ == "OffloadingConnector"
    extra["cpu_bytes_to_use"] = 1 << 20
    vllm_config = engine_config()  # a tier finds it in the frame that makes it
    assert vllm_config is not None
    spec = real("vllm.v1.kv_offload.factory").OffloadingSpecFactory.create_spec(offloading_config({}, extra=extra))
    manager = spec.get_manager()
    assert type(manager.secondary_tiers[0]).__name__ == "CuveeTier"
    manager.shutdown()
