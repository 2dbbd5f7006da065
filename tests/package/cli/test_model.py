"""Test `cuvee model`: what a cache holds, and where the files of a model are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.conftest import tiny_config
from tests.package.cli.running import fails, run
from transformers import MambaConfig

from cuvee.calibration.bundled import bundled_model_path


def test_model_path_prints_what_engines_take() -> None:
    assert run("model", "path", "books-3m").stdout == f"{bundled_model_path()}\n"
    other, mistyped = run("model", "path", "org/name"), run("model", "path", "boks-3m")
    assert (other.stdout, other.stderr, mistyped.stdout) == ("org/name\n", "", "boks-3m\n")
    assert "boks-3m is neither bundled nor a folder here" in mistyped.stderr
    fails("model", "path", "./none", match="./none: no such model folder")


def test_model_check_shows_the_layers(tmp_path: Path) -> None:
    tiny_config("gemma3-sliding-first", dtype="bfloat16").save_pretrained(tmp_path / "windows")
    data = json.loads(run("model", "check", tmp_path / "windows", "--json").stdout)
    assert (
        not data["states"]
        and not data["states_bytes"]
        and data["movable"]
        and [row["window"] for row in data["layers"]] == [8, None]
    )
    sizes = [row["bytes_per_token"] for row in data["layers"]]
    assert sizes == [2 * row["heads"] * (row["key"] + row["value"]) for row in data["layers"]]
    assert sum(sizes) == data["bytes_per_token"]
    shown = run("model", "check", tmp_path / "windows").stdout
    assert "DynamicSlidingWindowLayer" in shown and "rotated, halves" in shown and "Movable" in shown
    assert len(shown.splitlines()) < 24
    tiny_config("gpt2").save_pretrained(tmp_path / "tables")
    shown = run("model", "check", tmp_path / "tables").stdout
    assert "Bound: chunks decode at the positions where they were encoded" in shown and "there is no position" in shown


def test_model_check_shows_what_is_beside_keys_and_values(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 61}
    MambaConfig(**sizes).save_pretrained(tmp_path / "mamba")
    shown = run("model", "check", tmp_path / "mamba").stdout
    assert "holds conv_states[0] [1, 64, 4]" in shown and "15,360 bytes" in shown and "Kept as a whole" in shown
    data = json.loads(run("model", "check", tmp_path / "mamba", "--json").stdout)
    assert data["states"] and not data["movable"] and data["states_bytes"] == 3 * 4 * 64 * (4 + 16)
    fails("model", "check", tmp_path / "none", match="none")
