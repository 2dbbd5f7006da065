"""The files of docs/deploy parse, name files that exist, and pass options that cuvee takes and flags that vLLM has."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuvee.integrations.profiles.location import ProfileLocation, names_collection
from cuvee.integrations.stores import open_store
from cuvee.integrations.vllm.connector_config import Options

FOLDER = Path(__file__).parents[2] / "docs" / "deploy"
FLAG = "--kv-transfer-config"


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    return services


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign] # systemd's names have capitals
    parser.read(FOLDER / "vllm.service", encoding="utf-8")
    assert parser.sections() == ["Unit", "Service", "Install"]
    return parser["Service"]


def pod() -> dict[str, Any]:
    page = (FOLDER.parent / "recipes" / "deploy.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    spec: dict[str, Any] = yaml.safe_load(text)["spec"]
    return spec


def arguments(where: str) -> list[str]:
    """Return the arguments of `vllm serve MODEL` in one of the files, each as `--name=value`. The image of vLLM has the
    command; its model is positional, and vLLM warns of `--model`.
    """
    if where == "unit":
        command, serve, model, *flags = shlex.split(unit()["ExecStart"])
        assert (command, serve) == ("/opt/vllm/bin/vllm", "serve")
        given = [f"{name}={value}" for name, value in zip(flags[::2], flags[1::2], strict=True)]
    else:
        model, *given = compose()["vllm"]["command"] if where == "compose" else pod()["containers"][0]["args"]
    assert model == "Qwen/Qwen3-8B"
    return given


@pytest.mark.parametrize("where", ["compose", "unit", "pod"])
def test_the_connector_takes_what_the_file_passes(where: str) -> None:
    named = dict(each.split("=", 1) for each in arguments(where))
    transfer = json.loads(named.pop(FLAG))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("CuveeConnector", "kv_both")
    options = Options.from_dict(transfer["kv_connector_extra_config"])
    if options.store[0].startswith("redis"):
        open_store(options.store).close()
    assert options.profile is not None
    assert not names_collection(options.profile) or ProfileLocation.parse(options.profile).id
    assert set(named) == {"--shutdown-timeout"}
    seconds = {"compose": compose()["vllm"]["stop_grace_period"], "unit": unit()["TimeoutStopSec"]}
    wait = int(str(seconds.get(where, pod()["terminationGracePeriodSeconds"])).rstrip("s"))
    assert wait > int(named["--shutdown-timeout"])


def test_vllm_has_the_flags() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    assert {"model", "shutdown_timeout", "kv_transfer_config"} <= set(arg_utils.EngineArgs.__dataclass_fields__)


def test_files_and_services_that_the_files_name_exist() -> None:
    services = compose()
    mounted = [volume for each in services.values() for volume in each.get("volumes", ()) if volume.endswith("yml:ro")]
    names = [volume.split(":")[0] for volume in mounted]
    assert len(names) == 2 and all((FOLDER / name).is_file() for name in names)
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    (source,) = yaml.safe_load((FOLDER / "datasource.yml").read_text(encoding="utf-8"))["datasources"]
    hosts = [target.split(":")[0] for each in scraped[0]["static_configs"] for target in each["targets"]]
    hosts += re.findall(r"//(\w+):9090$", source["url"])
    store = json.loads(dict(each.split("=", 1) for each in arguments("compose"))[FLAG])
    hosts += re.findall(r"redis://(\w+):", str(store))
    assert sorted(hosts) == ["prometheus", "valkey", "vllm"] and set(hosts) <= set(services)
