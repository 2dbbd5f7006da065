"""Test the options that commands share."""

from __future__ import annotations

import pytest

from cuvee.cli.options import typed_command


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["report", "--quick", "-o", "out/report"], "cuvee report --quick -o out/report"),
        (["tasks", "cuvee_xquad", "--data", "/home/me/data", "--profile=/tmp/a/p.cuvee"],
         "cuvee tasks cuvee_xquad --data data --profile=p.cuvee"),
        (["report", "--text", "/home/me/my notes.txt=0.5"], "cuvee report --text 'my notes.txt=0.5'"),
        (["blend-report", "--multidoc", "/a/b.jsonl,/c/d.jsonl"], "cuvee blend-report --multidoc b.jsonl,d.jsonl"),
        (["report", "--model", "org/model", "--text", "hf:org/texts:train:text"],
         "cuvee report --model org/model --text hf:org/texts:train:text"),
        (["report", "-o", "/"], "cuvee report -o /"),
    ],
)  # fmt: skip
def test_a_command_for_others_names_no_folders(monkeypatch: pytest.MonkeyPatch, typed: list[str], told: str) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/.venv/bin/cuvee", *typed])
    assert typed_command() == told
