"""Progress: what is counted, and what a log shows of it."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from cuvee.codec.learning.progress import tracked
from cuvee.eval import progress as progress_module
from cuvee.eval.progress import in_words, progress_bar


def lines(file: io.StringIO) -> list[str]:
    return [line for line in file.getvalue().splitlines() if line.strip()]


def test_a_log_gets_a_line_now_and_then_even_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(progress_module, "TICK", 0.02)
    file = io.StringIO()
    with progress_bar(Console(file=file, width=120), 10) as bar:
        bar.expect(50)
        for number in range(40):  # many short steps: not a line for each
            with bar.step(f"short {number}"):
                time.sleep(0.002)
        with bar.step("long"):  # and one in which nothing else happens
            for _ in tracked(range(2), "part", progress=False):
                time.sleep(0.5)
    found = lines(file)
    assert found[0].split()[:3] == ["0", "s", "short"]
    assert 3 <= len(found) <= 6
    assert found[-1].endswith("long (part: 1 of 2, 40 of 50 steps done)")


def test_nobody_hears_tracked_work_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "TICK", 1000.0)
    file = io.StringIO()
    with progress_bar(Console(file=file, width=120), 10) as bar:
        with bar.step("one"):
            assert list(tracked(range(3), "inside", progress=False)) == [0, 1, 2]
        assert list(tracked(range(3), "outside", progress=False)) == [0, 1, 2]
        bar.show()
    assert lines(file)[-1].endswith("one (inside: 2 of 3)")


def test_steps_that_are_skipped_or_added_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "TICK", 1000.0)
    file = io.StringIO()
    with progress_bar(Console(file=file, width=120), 10) as bar:
        bar.expect(3)
        bar.skip()
        bar.expect(2)
        with bar.step("second"):
            pass
    assert lines(file) == ["    0 s  second (1 of 5 steps done)"]


def test_lines_reach_the_log_while_standard_error_is_another_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
    hidden = io.StringIO()
    with progress_bar(Console(stderr=True, width=120), 10) as bar:
        monkeypatch.setattr("sys.stderr", hidden)
        with bar.step("scoring"):
            pass
        monkeypatch.undo()
    assert not hidden.getvalue() and "scoring" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3540, "59 min"), (3900, "1 h 05")]
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words and re.fullmatch(r"[\d hmins]+", words)
