"""Options that commands share, and their conversion to configurations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cuvee.cli import blend_report, report, tasks
from cuvee.cli.options import Dtype, comma_separated, fields_from, typed_command
from cuvee.eval.blend_report.blend_report_config import BlendConfig
from cuvee.eval.report.report_config import ReportConfig
from cuvee.eval.score_tasks import TasksConfig


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


@pytest.mark.parametrize(
    ("command", "configuration"),
    [(report.report, ReportConfig), (blend_report.blend_report, BlendConfig), (tasks.tasks, TasksConfig)],
)
def test_options_have_the_defaults_of_the_configuration(command: Callable[..., None], configuration: type[Any]) -> None:
    defaults = {field.name: field.default for field in fields(configuration) if field.default is not MISSING}
    for name, parameter in inspect.signature(command).parameters.items():
        default = parameter.default
        if name in defaults and default not in (None, inspect.Parameter.empty):
            plain = default.value if isinstance(default, Enum) else default
            assert defaults[name] == (tuple(plain.split(",")) if isinstance(defaults[name], tuple) else plain), name


def test_every_field_of_a_report_is_an_option() -> None:
    assert {field.name for field in fields(ReportConfig)} <= set(inspect.signature(report.report).parameters)


def test_options_become_fields() -> None:
    given = {"a": [Path("x"), Path("y")], "b": None, "c": Dtype.float16, "d": 3, "e": [], "f": (), "g": Path("z")}
    assert fields_from(given, *"abcdef") == {"a": ("x", "y"), "c": "float16", "d": 3, "f": ()}
    assert comma_separated(None) is None and comma_separated("a, b,") == ("a", "b")
    assert comma_separated("none") == ("none",) and comma_separated("none", none=True) == ()
