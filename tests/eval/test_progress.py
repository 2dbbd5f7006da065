"""Progress: what is counted, and what a log shows of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cuvee.eval.progress import StepLog, in_words


def test_steps_that_are_skipped_or_added_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    file, hidden = io.StringIO(), io.StringIO()
    monkeypatch.setattr("time.monotonic", lambda: 0.0)
    log = StepLog(Console(file=file, width=20))
    log.expect(2)
    log.skip()
    log.expect(2)
    monkeypatch.setattr("sys.stderr", hidden)
    with log.step("the [second] of them, which is long"):
        pass
    with log.step("third"):
        pass
    assert file.getvalue() == "    0 s  2 of 4: the [second] of them, which is long\n    0 s  3 of 4: third\n"
    assert not hidden.getvalue()


def test_a_long_step_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    log = StepLog(Console(file=(file := io.StringIO())))
    log.expect(1)
    with log.step("exact"):
        for second, done in ((29, "1 of 3"), (31, "2 of 3"), (60, "3 of 3")):
            now = second
            log.within(done)
    assert file.getvalue() == "    0 s  1 of 1: exact\n   31 s  1 of 1: exact, 2 of 3\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3540, "59 min"), (3900, "1 h 05")]
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words
