"""`cuvee demo`, on the bundled model, with fewer sequences and steps than a user gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.package.cli.running import run

from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval import demo


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = demo.DemoScope(windows=12, sequences=2, groups=("layer",), octaves=(0,))
    monkeypatch.setitem(demo.SCOPES, BUNDLED_MODEL, scope)


def test_the_demo_measures_and_draws(small: None, tmp_path: Path) -> None:
    plot = tmp_path / "demo.svg"
    done = run("demo", "--json", "--plot", plot)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["model"] == BUNDLED_MODEL and found["plot"] == str(plot) and plot.stat().st_size > 10_000
    fp8 = next(entry for entry in found["baselines"] if entry["name"] == "FP8 e4m3")
    sizes = {entry["name"]: entry["bits_per_value"] for entry in found["presets"]["layer"]}
    assert list(sizes) == list(PRESET_KL) and fp8["bits_per_value"] > 2 * sizes["balanced"] > 2 * sizes["small"]
    assert {entry["name"] for entry in found["presets"]["none"]} == {"lossless"}
    said = found["continuation"]
    assert said["raw_bytes"] > 4 * said["blob_bytes"] and said["exact"] and 0 <= said["agreeing"] <= said["tokens"]
    assert "quality “high”" in done.stderr
    # The report and the progress are on standard error.
    assert "What it saves and what it costs" in done.stderr and f"Plot: {plot}" in done.stderr
    assert "calibrating on “harbour”, one basis per layer" in done.stderr or "loading the model" in done.stderr


def test_the_demo_without_a_plot(small: None) -> None:
    done = run("demo", "--no-plot")
    assert "cuvee balanced, by layer" in done.stdout and "Plot: " not in done.stdout
