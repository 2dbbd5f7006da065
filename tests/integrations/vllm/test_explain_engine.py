"""Real engines on one store that differ in one option: their answers say why a request was loaded or missed, and the
command finds what they wrote by the flags of `vllm serve` alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm.engines import (
    Answer,
    Engine,
    Program,
    Step,
    fp8_runs,
    ids,
    run_engines,
    save_tiny_model,
    transfer,
)
from typer.testing import CliRunner

from cuvee.cli import app

pytestmark = pytest.mark.slow

ASKS = {"cuvee": {"explain": True}}
CODED = {"kv_cache_dtype": "fp8_e5m2"} if fp8_runs() else {"dtype": "float16"}
EXPLAIN = """
import json, sys
from typer.testing import CliRunner
from cuvee.cli import app
for flags in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, ["store", "explain", *flags, "--json"])
    print("\\nexplained:", json.dumps([done.exit_code, done.stdout, done.stderr]))
"""


def found(answer: Answer) -> Any:
    assert answer.told is not None
    return answer.told["cuvee"]["found"]


def explained(folder: Path, *calls: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of `cuvee store explain`, of every call, in the process of the engines."""
    script = folder / "explain.py"
    script.write_text(EXPLAIN)
    log = run_engines(folder / "explain", [Program("explain", script, [json.dumps(calls)])])["explain"].log
    return [tuple(json.loads(line.partition(":")[2])) for line in log.splitlines() if line.startswith("explained:")]


def test_answers_of_engines_that_do_not_share_say_why(folder: Path) -> None:
    model = save_tiny_model("llama", folder / "tiny")
    steps = [
        Step([ids(200, "a")], params=[ASKS], settles=True),
        Step([ids(200, "a")], params=[ASKS], forget=True),
        Step([ids(64, "a") + ids(136, "b")], params=[ASKS], forget=True),
    ]
    first = {"dtype": "float32", **transfer(folder, "kv")}
    second = first | {"dtype": "bfloat16"}
    third = first | {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}
    ran = run_engines(
        folder / "run",
        [
            Engine("first", model, steps, first, watched=True),
            Engine("second", model, steps[:1], second),
            Engine("third", model, steps[:1], third),
            Engine("coded", model, steps[:1], first | CODED),
        ],
        fresh=True,  # as a server, which imports the connector before it configures its log
    )
    told = [[found(answer) for answer in step] for step in ran["first"].steps]
    cold, warm, partly = (each[0] for each in told)
    assert (cold["reason"], cold["found_tokens"], cold["missing_from"]) == ("absent", 0, 0)
    assert (warm["reason"], warm["found_tokens"], warm["loaded_tokens"]) == ("hit", 192, 192)
    assert (partly["reason"], partly["found_tokens"], partly["missing_from"]) == ("partial", 64, 64)
    for name in ("second", "third"):
        assert found(ran[name].steps[0][0])["reason"] == "absent"
        ran[name].assert_sound()
    shown = CliRunner().invoke(app, ["store", "explain", f"file://{folder / 'stores' / 'kv'}", "--json"]).stdout
    last, *others = json.loads(shown)["identities"]
    assert last["differs"] is None and [each["entries"] > 0 for each in others] == [True] * 3
    fields = {name for each in others for name in each["differs"]}
    assert {"dtype", "cache_dtype", "layout.rope"} < fields and any(name.endswith("rope_theta") for name in fields)
    planned_engines_are_found(folder, model, third["hf_overrides"])
    assert "which differ in: dtype (1)" in ran["second"].log
    assert ran["first"].metric("vllm:cuvee_ttft_loaded_seconds_count") == 2
    hooks, bites, bitten = re.findall(r"watchdog: (.*)", ran["first"].log)
    assert bites == "[]" and hooks.count("CuveeConnector.") >= 12, "no file, socket or long hash on its thread"
    assert "('stat', 'CuveeConnector.build_connector_meta')" in bitten, "it would be seen"


def planned_engines_are_found(folder: Path, model: Path, overrides: Any) -> None:
    """What flags tell is what the engines above have written, to the last field; a flag that differs is named."""
    options = {"chunk_tokens": 64}
    connector = {"kv_connector": "CuveeConnector", "kv_role": "kv_both", "kv_connector_extra_config": options}
    url = f"file://{folder / 'stores' / 'kv'}"
    base = [url, "--model", str(model), "--kv-transfer-config", json.dumps(connector), "--skip-tokenizer-init"]
    rope = ["--hf-overrides", json.dumps(overrides)]
    codes = [f"--{name.replace('_', '-')}={value}" for name, value in CODED.items()]
    flags = [["--dtype", "float32", *more] for more in ([], rope, codes, ["--port", "1", "--block-size", "32"])]
    *equal, parallel, unknown, away = explained(
        folder,
        *([*base, *more] for more in (*flags, ["--dtype", "bfloat16"])),
        [*base, "--dtype", "float32", "--tensor-parallel-size", "2"],
        [*base, "--no-such-flag"],
        [url, "--model", str(folder / "none")],
    )
    found = [json.loads(shown)["identities"] for code, shown, _ in equal if code == 0]
    assert [len(rows) for rows in found] == [4] * 5, equal
    assert all(rows[0]["entries"] > 0 and rows[0]["differs"] is None for rows in found)
    assert len({rows[0]["identity"] for rows in found}) == 4 and found[0][0]["identity"] == found[3][0]["identity"]
    rows = json.loads(parallel[1])["identities"]
    assert rows[0]["entries"] == 0 and rows[0]["written"] is None
    assert {"tensor_parallel_size": ["2", "1"]} in [row["differs"] for row in rows]
    assert unknown[0] == 1 and "flags: must be those of `vllm serve`" in unknown[2] and "--no-such-flag" in unknown[2]
    assert away[0] == 1 and "flags: must be ones that vLLM takes" in away[2]
