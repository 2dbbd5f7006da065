"""`cuvee eval`."""

from __future__ import annotations

import pytest
from tests.package.cli.running import run


def test_eval_hands_everything_to_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def fake(args: list[str]) -> int:
        seen.append(args)
        return 3 if "fail" in args else 0

    monkeypatch.setattr("cuvee.eval.lm_command.run_cli", fake)
    run("eval", "run", "--tasks", "a,b", "--help", "-x")
    run("eval", "fail", code=3)
    assert seen == [["run", "--tasks", "a,b", "--help", "-x"], ["fail"]]
