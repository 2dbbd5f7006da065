"""What benchmarks share: one command line, one folder, one line for an error."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.frame import Shown, run_bench
from cuvee.eval.documents import ReportTable


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=1)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    if given.size < 0:
        raise CuveeError(f"size: must be 0 or more, got {given.size}")
    return {"size": given.size}


def show(report: Any) -> Shown:
    table = ReportTable(["what ", "number"], [["size", str(report["size"])]], "Sizes", "In units.")
    return Shown("On a machine.", [table])


def run(*argv: str) -> int:
    return run_bench("some", "Measures something.", options, measure, show, argv)


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--size", "-1") == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "error: size: must be 0 or more, got -1\n")


def test_a_folder_that_holds_something_is_not_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("")
    untouched: Callable[..., Any] = lambda *_: pytest.fail("it was measured")  # noqa: E731
    assert run_bench("some", "", options, untouched, show, ["--out", str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["mine"]
