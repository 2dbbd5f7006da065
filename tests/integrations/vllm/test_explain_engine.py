"""Real engines on one store that differ in one option: their answers say why a request was loaded or missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.vllm.engines import Answer, Engine, Step, ids, run_engines, save_tiny_model, transfer
from typer.testing import CliRunner

from cuvee.cli import app

pytestmark = pytest.mark.slow

ASKS = {"cuvee": {"explain": True}}


def found(answer: Answer) -> Any:
    assert answer.told is not None
    return answer.told["cuvee"]["found"]


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
        ],
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
    third, *others = json.loads(shown)["identities"]
    assert third["differs"] is None and [each["entries"] > 0 for each in others] == [True, True]
    fields = {name for each in others for name in each["differs"]}
    assert {"dtype", "cache_dtype", "layout"} < fields and any(name.endswith("rope_theta") for name in fields)
    assert "which differ in: dtype (1)" in ran["second"].log
    assert ran["first"].metric("vllm:cuvee_ttft_loaded_seconds_count") == 2
    assert "watchdog: []" in ran["first"].log
