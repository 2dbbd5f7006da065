"""The README of the SGLang backend says what the code does, and its command is what SGLang takes."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

from tests.integrations.readme_tables import check_options, rows
from tests.integrations.sglang.real_sglang import need_sglang, real

from cuvee.integrations.identity import identity_records
from cuvee.integrations.pages import COUNTED, opening, page_store
from cuvee.integrations.sglang import host_pool

README = (Path(__file__).parents[3] / "integrations" / "sglang" / "README.md").read_text(encoding="utf-8")


@need_sglang
def test_every_option_is_documented_with_its_default() -> None:
    check_options(README, real("cuvee.integrations.sglang.hicache").HiCacheOptions, {"model": "--model-path"})


@need_sglang
def test_the_command_is_what_sglang_takes() -> None:
    (text,) = re.findall(r"--hicache-storage-backend-extra-config '(.+?)'", README, re.DOTALL)
    module = real("sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller")
    extra, *_, passes_prefix = module.HybridCacheController.parse_storage_backend_extra_config(text)
    assert passes_prefix and "hicache_storage_pass_prefix_keys" not in extra
    hicache = real(extra["module_path"])
    storage = real("sglang.srt.mem_cache.hicache_storage").HiCacheStorage
    assert issubclass(getattr(hicache, extra["class_name"]), storage)
    kept = {name: value for name, value in extra.items() if name not in hicache._SGLANGS_OWN}
    assert hicache.HiCacheOptions.from_dict(kept).profile == "qwen3-8b.safetensors"
    fields = real("sglang.srt.server_args").ServerArgs.__struct_fields__
    flags = {name.replace("_", "-") for name in fields}
    for flag in re.findall(r"--([a-z0-9-]+)", README.partition("\n## ")[0]):
        assert flag in flags, flag
    (documented,) = re.findall(r"extra-config\n +'(.+?)'\n", hicache.__doc__ or "", re.DOTALL)
    assert json.loads(documented)["class_name"] == "CuveeHiCache"


def test_every_failure_that_is_counted_is_documented() -> None:
    calls = r'[.]_fail\(\s*"([a-z]+)"|wait_for[(,]\s*"[a-z_]+", "([a-z]+)"|[.]_ask\("[a-z_]+", "([a-z]+)"'
    counted = {next(filter(None, each)) for each in re.findall(calls, inspect.getsource(page_store))}
    counted |= set(
        re.findall(r'"failures", label="([a-z]+)"', inspect.getsource(opening) + inspect.getsource(identity_records))
    )
    page = (Path(__file__).parents[3] / "docs" / "reference" / "pages.md").read_text(encoding="utf-8")
    table = " ".join(row[1] for row in rows(page, "Failures"))
    assert set(re.findall(r"failures\{([a-z]+)\}", table)) == counted
    assert set(re.findall(r"[a-z]+", COUNTED["failures"][1].partition(": ")[2])) - {"or"} == counted


def test_every_arrangement_is_documented() -> None:
    (line,) = re.findall(r"^- \*\*`--hicache-mem-layout`\*\*: (.+)$", README, re.MULTILINE)
    assert re.findall(r"`([a-z_]+)`", line) == list(host_pool.ARRANGEMENTS)
