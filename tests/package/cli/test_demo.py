"""`cuvee demo`, on the bundled model, with fewer sequences and steps than a user gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.package.cli.running import run

from cuvee.calibration.corpus import BUNDLED_MODEL
from cuvee.codec.profiles.quality import PRESET_KL
from cuvee.eval import demo


def test_the_demo_measures_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = demo.DemoScope(learned=12, sequences=2, groups=("layer",), octaves=(0,))
    monkeypatch.setitem(demo.SCOPES, BUNDLED_MODEL, scope)
    measured: list[demo.Demo] = []
    real = demo.run_demo
    monkeypatch.setattr(demo, "run_demo", lambda *given, **named: measured.append(real(*given, **named)))
    plot = tmp_path / "demo.svg"
    done = run("demo", "--plot", plot)
    (found,) = measured
    fp8 = next(entry for entry in found.baselines if entry.name == "FP8 e4m3")
    sizes = {entry.name: entry.bits_per_value for entry in found.presets["layer"]}
    assert list(sizes) == list(PRESET_KL) and fp8.bits_per_value > 2 * sizes["balanced"] > 2 * sizes["small"]
    assert [entry.name for entry in found.presets["none"]] == ["lossless"]
    said = found.continuation
    assert said.raw_bytes > 4 * said.blob_bytes and said.exact and 0 <= said.agreeing <= said.tokens
    assert plot.stat().st_size > 10_000 and f"Plot: {plot}" in done.stdout
    assert "quality “high”" in done.stdout and "cuvee balanced, by layer" in done.stdout
    # Progress is on standard error.
    assert "calibrating on three novels, one basis per layer" in done.stderr or "loading the model" in done.stderr
