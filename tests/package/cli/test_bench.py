"""`cuvee bench`: which benchmark runs, with what, and where its report goes. The benchmarks: tests/eval/bench."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.package.cli.running import fails, misused, run

from cuvee.eval.bench.engine.scope import ENGINE_FULL, ENGINE_QUICK


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the benchmarks are asked for, instead of running them."""
    made: list[tuple[Any, ...]] = []
    for kind in ("cpu", "engine"):

        def measure(*args: Any, kind: str = kind) -> dict[str, Any]:
            made.append((kind, *args[:-1]))
            args[-1].print("measuring")
            return {"kind": kind}

        def show(report: dict[str, Any], console: Any) -> None:
            console.print(f"the table of {report['kind']}")

        monkeypatch.setattr(f"cuvee.eval.bench.{kind}.{kind}_bench.run_{kind}_bench", measure)
        monkeypatch.setattr(f"cuvee.eval.bench.{kind}.{kind}_tables.print_{kind}_report", show)
    return made


@pytest.mark.parametrize(
    ("typed", "call"),
    [
        ("", ("cpu", False, (), (1, 2), (), ())),
        ("--quick", ("cpu", True, (), (1, 2), (), ())),
        ("cpu", ("cpu", False, (), (1, 2), (), ())),
        ("cpu --quick", ("cpu", True, (), (1, 2), (), ())),
        (
            "cpu --model smollm2 --model books-3m --threads 4 --threads 1",
            ("cpu", False, ("smollm2", "books-3m"), (1, 4), (), ()),
        ),
        (
            "cpu --only stages --only comparison --model smollm2 --profile p.safetensors",
            ("cpu", False, ("smollm2",), (1, 2), ("stages", "comparison"), (Path("p.safetensors"),)),
        ),
        ("engine", ("engine", ENGINE_FULL, None, (), None, ())),
        (
            "engine --quick --model m --store file:///a --store file:///b --profile m.safetensors",
            ("engine", ENGINE_QUICK, Path("m").resolve(), ["file:///a", "file:///b"], Path("m.safetensors"), ()),
        ),
        (
            "engine --length 4096 --length 512 --store-niceness 0 --store-niceness 19",
            ("engine", replace(ENGINE_FULL, lengths=(512, 4096)), None, (), None, (0, 19)),
        ),
    ],
)
def test_what_runs(typed: str, call: tuple[Any, ...], calls: list[tuple[Any, ...]]) -> None:
    done = run("bench", *typed.split())
    assert done.stdout == f"the table of {call[0]}\n" and done.stderr == "measuring\n"
    assert json.loads(run("bench", *typed.split(), "--json").stdout) == {"kind": call[0]}
    assert calls == [call, call]


def test_the_cpu_report_in_markdown(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr("cuvee.eval.bench.cpu.cpu_tables.cpu_markdown", lambda report: f"# {report['kind']}\n")
    assert run("bench", "cpu", "--markdown").stdout == "# cpu\n"
    assert "not both" in misused("bench", "cpu", "--markdown", "--json")
    assert "--threads" in misused("bench", "cpu", "--threads", "0")
    assert "--only" in misused("bench", "cpu", "--only", "stages", "--against", "HEAD")
    assert len(calls) == 1


def test_a_report_is_not_replaced_without_force(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    path = tmp_path / "bench.json"
    run("bench", "--out", path)
    assert json.loads(path.read_text()) == {"kind": "cpu"}
    fails("bench", "engine", "--out", path, match="--force")
    assert len(calls) == 1, "the engine was not measured"
    run("bench", "engine", "--out", path, "--force")
    assert json.loads(path.read_text()) == {"kind": "engine"}
