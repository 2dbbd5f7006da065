"""Size at equal quality: what is read off a curve, and the command on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cuvee.codec.layout import KVLayout
from cuvee.codec.profile import Profile
from cuvee.eval import rate
from cuvee.eval.data import bundled_text, load_bundled_model
from cuvee.eval.rate import bits_at, main


def test_bits_are_read_off_between_points() -> None:
    curve = [(4.0, 0.001), (1.0, 0.004), (0.5, 0.1)]
    assert bits_at(curve, 0.002) == pytest.approx(2.0)
    assert bits_at(curve, 0.001) == 4.0 and bits_at(curve, 0.1) == 0.5
    assert bits_at(curve, 0.0009) is None and bits_at(curve, 0.2) is None
    assert bits_at([(4.0, 0.0), (1.0, 0.004)], 0.002) is None, "a KL of zero is on no logarithm"
    assert bits_at([], 0.1) is None and bits_at([(1.0, 0.1)], 0.1) is None


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, _ = load_bundled_model()
    path = tmp_path_factory.mktemp("rate") / "nothing.safetensors"
    Profile.generic(KVLayout.from_config(model.config, model.dtype)).save(path)
    return path


def rivals_of(out: Path) -> list[dict[str, Any]]:
    return list(json.loads(out.read_text())["texts"]["orchard"]["rivals"].values())


@pytest.mark.parametrize("again", [False, True])
def test_the_command_measures_profiles_and_baselines(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: bool
) -> None:
    monkeypatch.setattr(rate, "STEPS", (-192, -64, 64))
    text, out = tmp_path / "text.txt", tmp_path / "out" / "rate.json"
    text.write_text(bundled_text("orchard"), encoding="ascii")
    arguments = ["books-3m", str(profile), "--text", f"orchard={text}", "--sequences", "2", "--length", "96"]
    arguments += ["--methods", "fp8-e4m3,kivi4", "--json", str(out), *(["--reread"] if again else [])]
    arguments += ["--plots", str(tmp_path / "plots")]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "orchard: 2 sequences, 72 tokens cached, 24 scored" in shown and ("rereading" in shown) == again
    assert ("beyond the curve" in shown) == any(None in r["times_smaller"].values() for r in rivals_of(out))
    assert "| fp8-e4m3 | 8.00 |" in shown and "nothing is smaller" in shown
    drawn = (tmp_path / "plots" / "orchard.svg").read_text()
    assert all(label in drawn for label in ("kivi4", "fp8-e4m3", "cuvee, group unit", "orchard: 2 sequences"))
    written = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text() and str(profile.parent) not in out.read_text()
    assert written["asked"]["texts"] == {"orchard": "text.txt"} and written["asked"]["reread"] == again
    assert written["asked"]["profiles"] == [profile.name] and written["asked"]["length"] == 96
    found = written["texts"]["orchard"]
    points = found["profiles"]["nothing"]["points"]
    assert [p["name"] for p in points] == ["step 2^-3", "step 2^-1", "step 2^1"]
    assert points[0]["bits_per_value"] > points[1]["bits_per_value"] > points[2]["bits_per_value"]
    assert all(p["kl_worst"] >= p["kl"] for p in points)
    rival = found["rivals"]["kivi4"]
    curve = [(p["bits_per_value"], p["kl"]) for p in points]
    assert rival["bits_at_its_kl"]["nothing"] == bits_at(curve, rival["kl"])


def test_what_a_codec_is_asked_for_is_set_beside_what_it_gives(
    tmp_path: Path, books: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, out = tmp_path / "harbour.safetensors", tmp_path / "rate.json"
    books.profile.save(profile)
    text = tmp_path / "text.txt"
    text.write_text(bundled_text("orchard"), encoding="ascii")
    arguments = ["books-3m", str(profile), "--text", f"orchard={text}", "--sequences", "2", "--length", "128"]
    arguments += ["--cached", "96", "--kl", "0.01", "--kl", "0.05", "--no-curve", "--methods", "", "--json", str(out)]
    assert main(arguments) == 0
    found = json.loads(out.read_text())["texts"]["orchard"]
    promises = found["profiles"]["harbour"]["promises"]
    assert 0 < promises["0.01"]["kl"] < promises["0.05"]["kl"] <= promises["0.05"]["kl_worst"]
    assert found["profiles"]["harbour"]["points"] == [] and found["rivals"] == {}
    assert promises["0.01"]["perplexity"] == pytest.approx(found["exact"]["perplexity"], rel=0.1)
    shown = capsys.readouterr().out
    assert "2 sequences, 96 tokens cached, 32 scored" in shown and "bits per value at KL" not in shown
    kl, worst = promises["0.05"]["kl"], promises["0.05"]["kl_worst"]
    assert f"| harbour, kl=0.05 | {kl:.4f} | {kl / 0.05:.2f} | {worst / 0.05:.2f} |" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "orchard"], "must be NAME=FILE"),
        (["--text", "a=no/such/file.txt"], "no such text file"),
        (["--text", "a=orchard", "--methods", "fp9"], "method: 'fp9' is not known"),
    ],
)
def test_bad_input_is_one_line(
    profile: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["books-3m", str(profile), *arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_a_profile_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["books-3m", "no/such.safetensors", "--text", "a=orchard"]) == 1
    assert "no profile at no/such.safetensors" in capsys.readouterr().err
