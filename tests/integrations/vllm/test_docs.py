"""The connector's and the stores' READMEs say what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tests.integrations.readme_tables import check_options
from tests.integrations.readme_tables import rows as table_rows
from tests.integrations.vllm.engines import Program, run_engines

from cuvee.calibration.bundled import bundled_model_path
from cuvee.integrations.stores import open_store
from cuvee.integrations.stores.redaction import redacted
from cuvee.integrations.vllm.blending.blend_options import BlendOptions, BlendRequest
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.metric_table import METRICS

ROOT = Path(__file__).parents[3] / "integrations"
CONNECTOR = (ROOT / "vllm" / "README.md").read_text()
BLENDING = (ROOT / "vllm" / "blending" / "README.md").read_text()
OPERATING = (ROOT.parent / "docs" / "guides" / "operating.md").read_text()
STORES = (ROOT / "stores" / "README.md").read_text()


def test_every_option_is_documented_with_its_default() -> None:
    check_options(CONNECTOR, Options, {"min_tokens": "64"}, whole=True)


def test_every_metric_of_the_text_exists() -> None:
    named = re.findall(r"vllm:cuvee_([a-z_]+?)(?:_total)?\b(?=[\[ }{])", CONNECTOR + OPERATING)
    assert len(named) == 12
    assert set(named) <= set(METRICS)
    failures = " ".join(row[2] for row in table_rows(CONNECTOR, "When something fails"))
    for name, label, value in re.findall(r"`([a-z_]+)(?:\{([a-z]+)=\"([a-z]+)\"\})?`", failures):
        assert not label or label in (METRICS[name].label, METRICS[name].second)
        assert not value or value in METRICS[name].values


def test_every_configuration_of_the_text_is_accepted() -> None:
    found = [json.loads(text) for text in re.findall(r"--kv-transfer-config '(.+?)'", CONNECTOR, re.DOTALL)]
    assert len(found) == 2
    for transfer in found:
        assert transfer["kv_connector"] == "CuveeConnector"
        options = Options.from_dict(transfer["kv_connector_extra_config"])
        open_store(options.store).close()
    for text in re.findall(r"\[\"memory.+?\]", CONNECTOR):
        assert all(redacted(url) for url in json.loads(text.replace("redis://…", "redis://h:1/0")))


def test_every_option_of_blending_is_documented_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1] for row in table_rows(BLENDING, "Options")}
    defaults = {field.name: getattr(BlendOptions(), field.name) for field in fields(BlendOptions)}
    assert rows == {name: "none" if value is None else str(value).lower() for name, value in defaults.items()}


def test_every_refusal_of_a_blend_is_documented() -> None:
    assert {row[0].strip("`") for row in table_rows(BLENDING, "Refused")} == set(METRICS["blends_refused"].values)


def test_the_configurations_and_parameters_of_blending_are_accepted() -> None:
    (text,) = re.findall(r"--kv-transfer-config '(.+?)'", BLENDING, re.DOTALL)
    assert Options.from_dict(json.loads(text)["kv_connector_extra_config"]).blend == BlendOptions()
    (named,) = re.findall(r'"kv_transfer_params": (\{"cuvee": .+?\}\})', BLENDING)
    assert BlendRequest.of(json.loads(named), 2000).segments == ((12, 530), (531, 980))


@pytest.mark.parametrize(
    "url",
    [
        "memory://?max_gb=0.005", "redis://user:password@host:6379/0?ttl=1h&timeout=0.5", "rediss://host:6379/0",
        "valkey://host:6379/0", "valkeys://host:6379/0", "redis+cluster://host:6379?ttl=1d",
        "unix:///run/redis.sock?db=0", "redis://host/0?timeout=3",
    ],
)  # fmt: skip
def test_urls_of_the_table_open(url: str) -> None:
    open_store(url).close()


def test_the_examples_of_stores_run(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", STORES, re.DOTALL):
        exec(compile(code.replace("/var/cache/kv", str(tmp_path)), "README", "exec"), names)
    assert [path for path in tmp_path.rglob("12ab") if path.is_file()]


def test_the_example_says_what_it_lacks(tmp_path: Path) -> None:
    """Its usage without arguments, and the folder without documents; both before it needs a server."""
    command = [sys.executable, str(ROOT / "vllm" / "examples" / "rag.py")]
    for arguments, said in (((), "python rag.py http"), (("url", str(tmp_path), "Why?"), f"no *.txt in {tmp_path}")):
        run = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert run.returncode == 1 and said in run.stderr and "Traceback" not in run.stderr


def test_counters_of_the_text_exist() -> None:
    (names,) = re.findall(r"returns (.*?) for each tier", STORES)
    counters = open_store("memory://?max_gb=0.001")
    known = counters.counters()["memory"]
    counters.close()
    for name in re.split(r", | and ", names):
        assert hasattr(known, name)


# One process, because to import vLLM takes longer than all of this.
WRONG_OPTIONS = {
    '{"profile": "nowhere.safetensors"}': "no profile at nowhere.safetensors",
    '{"quality": "small"}': "quality: must be left out without a profile",
    '{"key_env": "CUVEE_NO_SUCH_SECRET"}': "key_env: the environment variable CUVEE_NO_SUCH_SECRET is not set",
    '{"store": "fle:///var/cache/kv"}': "got fle://; did you mean file://?",
}
STARTED = """
import json, sys
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
_, model, wrong = sys.argv
for options in json.loads(wrong):
    transfer = KVTransferConfig(
        kv_connector="CuveeConnector", kv_role="kv_both", kv_connector_extra_config=json.loads(options)
    )
    try:
        EngineArgs(model=model, kv_transfer_config=transfer).create_engine_config()
    except (OSError, ValueError) as error:
        print("refused:", *str(error).splitlines())
"""


@pytest.mark.slow
def test_wrong_options_are_refused_while_vllm_reads_its_own(folder: Path) -> None:
    """Before there is an engine that could load a model."""
    script = folder / "started.py"
    script.write_text(STARTED)
    program = Program("started", script, [str(bundled_model_path()), json.dumps([*WRONG_OPTIONS])])
    refused = re.findall(r"^refused: (.*)$", run_engines(folder / "run", [program])["started"].log, re.MULTILINE)
    for found, message in zip(refused, WRONG_OPTIONS.values(), strict=True):
        assert message in found


def test_the_dashboard_shows_metrics_that_exist() -> None:
    """Nine panels; every query names a metric as Prometheus has it, and the labels it has."""
    dashboard = json.loads((ROOT.parent / "docs" / "grafana" / "cuvee.json").read_text())
    assert len(dashboard["panels"]) == 9 and {panel["type"] for panel in dashboard["panels"]} == {"timeseries"}
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]}) == 9
    endings = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
    (variable,) = set(re.findall(r"label_values\(vllm:cuvee_([a-z_]+)_total, ", json.dumps(dashboard["templating"])))
    assert METRICS[variable].kind == "counter"
    for target in (target for panel in dashboard["panels"] for target in panel["targets"]):
        named = re.findall(r"vllm:cuvee_([a-z_]+)\{", target["expr"])
        assert named, target
        for name in named:
            found = [
                metric for metric in METRICS.values() if name in {metric.name + end for end in endings[metric.kind]}
            ]
            assert len(found) == 1, name
            grouped = set(re.findall(r"by \(([a-z]+)\)", target["expr"])) - {"le"}
            assert grouped <= {found[0].label, found[0].second}, target["expr"]
