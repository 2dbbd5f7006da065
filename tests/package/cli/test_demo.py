"""`cuvee demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.package.cli.running import run


def test_demo_writes_json_and_keeps_its_report_off_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(console: Any, out: Path | None, model: str) -> dict[str, Any]:
        console.print("the report")
        return {"plot": None if out is None else str(out)}

    monkeypatch.setattr("cuvee.eval.demo.run_demo", fake)
    done = run("demo", "--json", "--out", "x.png")
    assert json.loads(done.stdout) == {"plot": "x.png"} and "the report" in done.stderr
    done = run("demo", "--no-plot")
    assert "the report" in done.stdout and not done.stderr
