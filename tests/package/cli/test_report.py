"""`cuvee report`: what it writes, prints and compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import Books
from tests.package.cli.running import fails, run


@pytest.mark.filterwarnings("ignore")  # lm-eval's
def test_report_measures_and_compares(books: Books, tmp_path: Path) -> None:
    out = tmp_path / "report"
    books.profile.save(profile := tmp_path / "mine.safetensors")
    options = ["--quick", "--length", "128", "--sequences", "4", "--no-tasks", "--profile", str(profile)]
    for method in ("cuvee/mine", "fp8-e4m3", "kivi4"):
        options += ["--method", method]
    shown = run("report", "-o", out, *options).stdout
    assert "Ratios at equal KL" in shown and str(out / "report.md") in shown
    path = out / "report.json"
    data = json.loads(path.read_text())
    assert data["configuration"]["quick"] and data["configuration"]["profiles"].keys() == {"mine"} and not data["tasks"]
    assert json.loads(run("report", "-o", out, *options, "--json").stdout)["quality"]
    done = run("report", "-o", out, *options, "--text", "orchard", code=1)
    assert "differs in texts" in done.stderr

    assert "0 figures worse or missing" in run("report", "-o", out, *options, "--against", path).stdout
    data["quality"].append({**data["quality"][0], "key": "lost"})
    old = tmp_path / "old.json"
    old.write_text(json.dumps(data))
    done = run("report", "-o", out, *options, "--against", old, code=3)
    assert "4 figures worse or missing" in done.stdout and "lost" in done.stdout
    fails("report", "-o", out, *options, "--against", tmp_path / "none.json", match="none.json")
    assert json.loads(run("report", "-o", out, *options, "--json").stdout)["against"] is None


def test_options_of_the_report_that_do_not_go_together(tmp_path: Path) -> None:
    fails("report", "-o", tmp_path / "r", match="cuvee profile learn books-3m -o books-3m.safetensors")
    fails("report", "-o", tmp_path / "r", "--model", tmp_path / "nowhere", "--method", "kivi4", match="nowhere")
    fails("report", "-o", tmp_path / "r", "--no-tasks", "--controls", match="controls: must be left out")
    for options, message in {
        ("--no-tasks", "--task", "gsm8k"): "tasks: must be left out with --no-tasks",
        ("--no-tasks", "--limit", "9"): "limit: must be left out with --no-tasks",
        ("--no-tasks", "--metadata", "lines=9"): "metadata: must be left out with --no-tasks",
        ("--quick", "--sequences", "40"): "sequences: must be at most 12 in a quick report, got 40",
        ("--quick", "--limit", "400"): "limit: must be at most 50 in a quick report, got 400",
    }.items():
        fails("report", "-o", tmp_path / "r", *options, match=message)
    assert not (tmp_path / "r").exists()
