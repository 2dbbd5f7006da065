"""The README of the LMCache adapter says what the code does, and its command is what LMCache takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.integrations.lmcache.real_lmcache import MODEL, NEED_LMCACHE, PLUGIN, configured, real
from tests.integrations.readme_tables import check_options

README = (Path(__file__).parents[3] / "integrations" / "lmcache" / "README.md").read_text(encoding="utf-8")
pytestmark = NEED_LMCACHE


def test_every_option_is_documented_with_its_default() -> None:
    options = real("cuvee.integrations.lmcache.l2_options").LMCacheOptions
    check_options(README, options, {"model_name": "model", "dtype": "the checkpoint's"})


def test_the_command_is_what_lmcache_takes() -> None:
    command = README.partition("\n## ")[0]
    (text,) = re.findall(r"--l2-adapter '(.+?)'\n", command, re.DOTALL)
    adapter = json.loads(text)
    assert {name: adapter[name] for name in PLUGIN} == PLUGIN
    flags = dict(re.findall(r"--(l1-size-gb|eviction-policy) (\S+)", command))
    assert len(flags) == 2
    (config,) = configured(adapter, **flags).l2_adapter_config.adapters
    ours = real(adapter["module_path"])
    assert ours.CuveeL2AdapterConfig.from_dict(config.adapter_params).options.model == "Qwen/Qwen3-8B"
    documented = re.findall(r"--l2-adapter '(.+?)'\n", ours.__doc__ or "", re.DOTALL)
    assert [json.loads(each) for each in documented] == [adapter]
    assert all(name in ours.CuveeL2AdapterConfig.help() for name in ("chunk_tokens", "max_gb"))


def test_eviction_is_configured_as_documented() -> None:
    (eviction,) = re.findall(r'"eviction": (\{.+?\})`', README)
    adapter = {**PLUGIN, "adapter_params": {"model": MODEL}, "eviction": json.loads(eviction)}
    (config,) = configured(adapter).l2_adapter_config.adapters
    assert config.eviction_config.eviction_policy == "LRU"


def test_defaults_of_lmcache_are_as_documented() -> None:
    assert configured().l1_manager_config.read_ttl_seconds == 300
    assert real("lmcache.v1.multiprocess.config").MPServerConfig().chunk_size == 256
    ours = real(PLUGIN["module_path"])
    assert f"At most {ours._ACCOUNTED:,} entries are counted" in README


def test_every_shape_is_documented() -> None:
    shapes = re.findall(
        r"^    (\[.+?\]) +\w", real("cuvee.integrations.lmcache.memory_objects").__doc__ or "", re.MULTILINE
    )
    assert len(shapes) == 3  # the last only lacks the 1 of the one before
    assert all(f"`{shape}`" in README for shape in shapes[:2])
