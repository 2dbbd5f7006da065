"""Options that commands share, and their conversion to configurations."""

from __future__ import annotations

import inspect
from dataclasses import fields
from enum import Enum

import pytest

from cuvee.cli import report
from cuvee.cli.options import typed_command
from cuvee.eval.report.report_config import ReportConfig


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["report", "--quick", "-o", "out/report"], "cuvee report --quick -o out/report"),
        (["report", "--out", "/home/me/run", "--profile=/tmp/a/p.cuvee"], "cuvee report --out run --profile=p.cuvee"),
        (["report", "--text", "/home/me/my notes.txt=0.5"], "cuvee report --text 'my notes.txt=0.5'"),
        (["report", "--model", "org/model", "--text", "a:b"],
         "cuvee report --model org/model --text a:b"),
        (["report", "-o", "/"], "cuvee report -o /"),
    ],
)  # fmt: skip
def test_a_command_for_others_names_no_folders(monkeypatch: pytest.MonkeyPatch, typed: list[str], told: str) -> None:
    monkeypatch.setattr("sys.argv", ["/home/me/.venv/bin/cuvee", *typed])
    assert typed_command() == told


def test_options_are_fields_of_the_configuration_with_its_defaults() -> None:
    defaults = {field.name: field.default for field in fields(ReportConfig)}
    own = {"out", "against", "force", "as_json", "no_tasks"}
    for name, parameter in inspect.signature(report.report).parameters.items():
        assert name in defaults or name in own
        if name in defaults and parameter.default is not None:
            default = parameter.default
            assert defaults[name] == (default.value if isinstance(default, Enum) else default), name
