"""Two real engines on one store, which share nothing: `cuvee store explain` names the field, and each request why."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.integrations.vllm.engines import Engine, Step, ids, run_engines, save_tiny_model, transfer
from tests.package.cli import running

pytestmark = pytest.mark.slow

ASKS = {"cuvee": {"explain": True}}


def test_two_engines_learn_why_they_do_not_share(folder: Path) -> None:
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
        ],
    )
    told = [[answer.told["cuvee"]["found"] for answer in step] for step in ran["first"].steps]
    cold, warm, partly = (each[0] for each in told)
    assert (cold["reason"], cold["found_tokens"], cold["missing_from"]) == ("absent", 0, 0)
    assert (warm["reason"], warm["found_tokens"], warm["loaded_tokens"]) == ("hit", 192, 192)
    assert (partly["reason"], partly["found_tokens"], partly["missing_from"]) == ("partial", 64, 64)
    for name in ("second", "third"):
        assert ran[name].steps[0][0].told["cuvee"]["found"]["reason"] == "absent"
        ran[name].assert_sound()
    assert ran["first"].metric("vllm:cuvee_ttft_loaded_seconds_count") == 2
    assert "watchdog: []" in ran["first"].log
    (line,) = re.findall("the store has .*", ran["third"].log)
    assert "differ in" in line and "dtype" in line
    url = f"file://{folder / 'stores' / 'kv'}"
    data = json.loads(running.run("store", "explain", url, "--json").stdout)
    latest, *others = data["identities"]
    assert data["problems"] == [] and all(row["entries"] >= 3 for row in data["identities"])
    named = {row["fields"]["dtype"]: row["differs"] for row in others}
    layouts = {row["fields"]["dtype"]: row["fields"]["layout"] for row in others}
    assert named["torch.float32"] == {
        "options.hf_overrides.rope_parameters.rope_theta": ["500000.0", ""],
        "options.hf_overrides.rope_parameters.rope_type": ["default", ""],
        "layout": [latest["fields"]["layout"], layouts["torch.float32"]],
    }
    assert named["torch.bfloat16"]["dtype"] == ["torch.float32", "torch.bfloat16"]
    assert named["torch.bfloat16"]["cache_dtype"] == ["float32", "bfloat16"]
    said = running.run("store", "explain", url).stdout
    assert "          dtype: torch.bfloat16, not torch.float32" in said.splitlines()
