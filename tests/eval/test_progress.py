"""Progress: what is estimated, and what a log shows of it."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from cuvee.codec.learning.progress import tracked
from cuvee.eval import progress as progress_module
from cuvee.eval.progress import Plan, in_words, progress_bar


def lines(file: io.StringIO) -> list[str]:
    return [line for line in file.getvalue().splitlines() if line.strip()]


def test_units_take_what_their_kind_took_and_others_what_was_guessed_scaled() -> None:
    plan = Plan({"slow": 10.0, "fast": 1.0}, {"slow": 2, "fast": 3})
    assert plan.seconds_left() is None
    plan.taken["fast"] = [4.0, 6.0]
    assert plan.seconds_of("fast") == 5.0 and plan.seconds_of("slow") == 50.0
    assert plan.seconds_left() == 2 * 50 + 3 * 5
    plan.taken["slow"] = [20.0]
    assert plan.seconds_left() == 2 * 20 + 3 * 5


def test_nothing_left_takes_no_time() -> None:
    assert Plan({"a": 1.0}, {"a": 0}).seconds_left() == 0


def test_a_step_in_progress_counts_with_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = Console(file=io.StringIO())
    with progress_bar(log, 10) as bar:
        bar.expect(Plan({"learn": 10.0, "method": 1.0}, {"learn": 1, "method": 20}))
        with bar.step("learning", "learn"):
            assert bar.seconds_left() is None
            for _ in tracked(range(4), "batches", progress=False):
                now[0] += 10
            # Three of four batches were done when the last one began: 40 s for 3 of 4, so the rest is 40 / 3; a method
            # is guessed to take a tenth of the whole.
            assert bar.seconds_left() == pytest.approx(40 / 3 + 20 * (160 / 3) / 10)
        with bar.step("method", "method"):
            now[0] += 1
            assert bar.seconds_left() == pytest.approx(3 + 19 * 4)
            now[0] += 10
            assert bar.seconds_left() == pytest.approx(19 * 4)  # longer than usual: no time left, not a negative one
        bar.skip("method")
        assert bar.seconds_left() == pytest.approx(18 * 11)
        bar.amend({"method": 2})
        assert bar.seconds_left() == pytest.approx(2 * 11)


def test_a_part_of_a_step_has_a_pace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with progress_bar(Console(file=io.StringIO()), 10) as bar:
        bar.expect(Plan({"learn": 10.0, "method": 1.0}, {"learn": 1, "method": 20}))
        with bar.step("learning", "learn"):
            for _ in tracked(range(10), "sampling", progress=False):
                now[0] += 30
            measuring = tracked(range(8), "measuring", progress=False)
            next(measuring)
            now[0] += 10
            next(measuring)
            # 300 s of sampling say nothing of the measurements: one of eight took 10 s, so 70 are left.
            assert bar.seconds_left() == pytest.approx(70 + 20 * (310 + 70) / 10)


def test_a_log_gets_a_line_now_and_then_even_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(progress_module, "TICK", 0.02)
    file = io.StringIO()
    with progress_bar(Console(file=file, width=120), 10) as bar:
        bar.expect(Plan({"a": 1.0}, {"a": 50}))
        for number in range(40):  # many short steps: not a line for each
            with bar.step(f"short {number}", "a"):
                time.sleep(0.002)
        with bar.step("long", "a"):  # and one in which nothing else happens
            for _ in tracked(range(2), "part", progress=False):
                time.sleep(0.5)
    found = lines(file)
    assert found[0].split()[:3] == ["0", "s", "short"]
    assert 3 <= len(found) <= 6
    assert "long (part: 1 of 2, 40 of 50 done, about " in found[-1] and found[-1].endswith("left)")


def test_shown_estimates_do_not_swing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress_module, "TICK", 1000.0)
    estimates = iter([100.0, 400.0, None, 398.0])
    with progress_bar(Console(file=io.StringIO()), 10) as bar:
        monkeypatch.setattr(bar, "seconds_left", lambda: next(estimates))
        shown = []
        for _ in range(4):
            bar.show()
            assert bar._known is not None
            shown.append(bar._known[1])
            now[0] += 2
    # Two seconds are a tenth of the way to a new estimate; without one, the last counts down.
    assert shown == pytest.approx([100, 98 + 302 / 10, 126.2, 124.2 + (398 - 124.2) / 10])


def test_nobody_hears_tracked_work_after_a_step() -> None:
    with progress_bar(Console(file=io.StringIO()), 10) as bar:
        with bar.step("one"):
            assert list(tracked(range(3), "inside", progress=False)) == [0, 1, 2]
        before = bar.seconds_left()
        assert list(tracked(range(3), "outside", progress=False)) == [0, 1, 2] and bar.seconds_left() == before


def test_figures_are_printed_at_once_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    with progress_bar(Console(file=file, width=120), 10) as bar:
        for text in ("", "first [0.5]", "second"):
            bar.say_now_and_then(text)
        monkeypatch.setattr(progress_module, "LINE_SECONDS", 0.0)
        bar.say_now_and_then("third")
    assert lines(file) == ["first [0.5]", "third"]


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
