"""`cuvee report` and `cuvee compare`, which reads what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.package.cli.running import fails, run


@pytest.mark.filterwarnings("ignore")  # lm-eval's
def test_report_measures_and_the_gate_compares(tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("--quick", "--length", "128", "--sequences", "4", "--calibration-sequences", "24", "--group", "layer")
    shown = run("report", "-o", out, *options, "--tasks", "none").stdout
    assert "How much smaller at equal KL" in shown and str(out / "report.html") in shown
    path = out / "report.json"
    data = json.loads(path.read_text())
    assert data["configuration"]["quick"] and data["configuration"]["groups"] == ["layer"] and data["tasks"] == []
    assert json.loads(run("report", "-o", out, *options, "--tasks", "none", "--json").stdout)["quality"]
    done = run("report", "-o", out, *options, "--tasks", "none", "--chunk-tokens", "32", code=1)
    assert "differs in chunk_tokens" in done.stderr.splitlines()[-1]  # behind the bar of loading the model

    run("compare", path, path, "--fail-if", "kl>1%", "--fail-if", "bits>0@cuvee/*")
    for entry in data["quality"]:
        if entry["key"] == "cuvee/layer@balanced":
            entry["kl"] *= 1.5
    worse = tmp_path / "worse.json"
    worse.write_text(json.dumps(data))
    done = run("compare", path, worse, "--fail-if", "kl>5%@cuvee/*", code=1)
    assert "cuvee/layer@balanced" in done.stdout
    failures = json.loads(run("compare", path, worse, "--fail-if", "kl>5%", "--json", code=1).stdout)
    assert [f["key"] for f in failures["failures"]] == ["cuvee/layer@balanced"]
    fails("compare", path, worse, "--fail-if", "speed>5%", match="speed")
    fails("compare", path, tmp_path / "none.json", match="none.json")


def test_options_of_the_report_that_do_not_go_together(tmp_path: Path) -> None:
    run("report", "-o", tmp_path / "r", "--cache-dtype", "auto", code=2)
    fails("report", "-o", tmp_path / "r", "--profile", "a", "--group", "layer", match="groups: must be left out")
    fails("report", "-o", tmp_path / "r", "--model", tmp_path / "nowhere", match="nowhere")
    assert not (tmp_path / "r").exists()
