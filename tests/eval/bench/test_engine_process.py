"""The process of an engine that benchmarks drive, and ratios within a turn. No speed is asserted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cuvee.codec.errors import CuveeError
from cuvee.eval.bench import engine_served as served
from cuvee.eval.bench.engine_process import Engine
from cuvee.eval.bench.timing import paired

# Statistics ------------------------------------------------------------------------------------------------------


def test_ratios_are_taken_within_a_turn() -> None:
    # The machine was ten times as slow in the second turn: the ratio does not see it.
    assert paired([[1.0, 1.0], [10.0, 10.0]], [2.0, 20.0]) == {"median": 0.5, "p20": 0.5, "p80": 0.5, "runs": 4}
    with pytest.raises(ValueError, match="zip"):
        paired([[1.0]], [1.0, 2.0])


# Processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let `Engine` start a program given here instead of vLLM's."""
    popen = subprocess.Popen

    def use(program: str) -> None:
        start = partial(popen, [sys.executable, "-c", program])
        monkeypatch.setattr(subprocess, "Popen", lambda _, **options: start(**options))

    return use


ECHO = "import sys, json\nfor line in sys.stdin: print(json.dumps({'result': json.loads(line)}), flush=True)"


def test_a_closed_engine_is_gone_and_may_be_closed_again(child: Callable[[str], None], tmp_path: Path) -> None:
    child(ECHO)
    with Engine(tmp_path / "log") as engine:
        engine.start(tmp_path, {}, "memory://")
        engine.close()
        assert engine._process.returncode == -signal.SIGKILL
        engine.close()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('Traceback', file=sys.stderr)", "its process ended\nTraceback"),
        ('input(); print(\'{"error": "no memory"}\')', "no memory"),
    ],
)
def test_an_engine_that_fails_is_an_error_with_the_end_of_its_log(
    child: Callable[[str], None], tmp_path: Path, program: str, message: str
) -> None:
    child(program)
    with Engine(tmp_path / "log") as engine, pytest.raises(CuveeError, match=message):
        engine.idle()


def test_an_engine_that_computes_other_tokens_than_expected_is_an_error(
    child: Callable[[str], None], tmp_path: Path
) -> None:
    answer = {"seconds": 1, "finished": 1, "tokens": [[1]], "logprobs": [[]], "cached": [256]}
    child(f"input(); print('{json.dumps({'result': answer})}'); input()")
    with (
        Engine(tmp_path / "log") as engine,
        pytest.raises(CuveeError, match=r"found \[256\] tokens .* expected \[512\]"),
    ):
        engine.ask([[1]], expect_cached=[512])


def test_a_failed_command_is_answered_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def ask(self, least: int) -> int:
            if least > 1:
                raise CuveeError("too many")
            return least

    monkeypatch.setattr(served, "_Served", Failing)
    replies: list[str] = []
    served._serve(iter([f'["ask", {least}]' for least in (1, 2, 1)]), replies.append)
    assert [json.loads(reply) for reply in replies] == [{"result": 1}, {"error": "CuveeError: too many"}]
