"""Test that the README's Python runs, that what it names exists, and that committed results stay small."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from tests.learned import learned_once, shared_folder
from tests.package.result_tables import DOCUMENTS, renewed

import cuvee
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec
from cuvee.codec.format.keys import MAX_KEY_BYTES, MIN_KEY_BYTES
from cuvee.integrations.stores import urls
from cuvee.integrations.vllm.connector_config import Options

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDER = ROOT / "eval" / "results"
MOST_BYTES = 1_000_000  # of committed results: figures of single sequences and superseded runs are in git
MOST_RUNS, MOST_LINES = 10, 60  # folders of results, and lines of each README


def test_the_python_of_the_readme_runs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first page of the documentation learns the same profile.
    learn = learned_once(cuvee.calibrate, shared_folder(tmp_path_factory, "learned"))
    monkeypatch.setattr(cuvee, "calibrate", learn)
    (library,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(library, "README.md", "exec"), names)
    assert names["cache"].get_seq_length() == 300
    assert len(names["blobs"]) == 2
    assert 5 < cuvee.inspect(names["blobs"][0]).ratio < 50


def test_two_commands_do_everything_and_two_install() -> None:
    first = re.findall(r"```\n(.*?)```", README, re.DOTALL)[0]
    lines = [line.split("#")[0].strip() for line in first.splitlines()]
    assert lines[:2] == ["make demo", "make test"]
    assert [re.findall(r"^uv pip install --torch-backend=(\w+) ", line) for line in lines[2:]] == [["cpu"], ["auto"]]
    assert len(README.splitlines()) <= 90


def test_links_and_pictures_of_the_readme_exist() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(targets) > 12
    for target in targets:
        assert (ROOT / target).is_file(), target


def test_security_names_what_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    names = {field.name for field in fields(Options)}
    assert {"key_env", "key_file"} <= names and all(f"`{name}`" in text for name in ("key_env", "key_file"))
    assert {"password_env", "password_file"} == set(urls._PASSWORD) and all(f"`{n}=`" in text for n in urls._PASSWORD)
    parameters = {**inspect.signature(Codec).parameters, **inspect.signature(Codec.decode).parameters}
    for name in re.findall(r"`(?:Codec\()?(\w+)=\)?`", text):
        assert name in parameters or name in urls._PASSWORD, name
    assert f"default {MAX_DECODED_TOKENS}" in text and f"{MIN_KEY_BYTES} to {MAX_KEY_BYTES} secret bytes" in text


def test_tables_of_results_are_those_of_the_data() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        assert "<!-- table: " in text
        assert renewed(text) == text, f"{path}: make results"
    changed = README.replace("| 8.00 |", "| 7.00 |")
    assert changed != README and renewed(changed) == README


def test_results_stay_small_and_whole() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert not [path for path in files if path.suffix in (".html", ".pdf")]
    runs = [path for path in FOLDER.iterdir() if path.is_dir()]
    assert len(runs) <= MOST_RUNS and all((run / "README.md").is_file() for run in runs)
    for page in FOLDER.rglob("README.md"):
        assert len(page.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, page
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page}: {target}"
