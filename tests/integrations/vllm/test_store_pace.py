"""What storing may take of a core while the engine computes, on a clock that the tests turn."""

from __future__ import annotations

import math
import random

import pytest

from cuvee.integrations.vllm.store_pace import (
    LEAST_PATIENCE,
    LONGEST_STEP,
    MOST_PATIENCE,
    PATIENCE_INTERVALS,
    WINDOW_SECONDS,
    EngineSteps,
    StorePace,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(steps: EngineSteps, begin: float, count: int, interval: float, length: float = 0.0) -> float:
    """So many steps at even intervals; return when the last one ended."""
    for at in range(count):
        steps.begin(begin + at * interval)
        steps.end(begin + at * interval + length)
    return begin + (count - 1) * interval + length


def test_an_engine_that_has_not_begun_is_idle() -> None:
    assert EngineSteps().seconds_until_idle(0.0) == 0.0


def test_an_engine_is_busy_while_a_step_runs_however_long() -> None:
    steps = EngineSteps()
    end = run(steps, 0.0, 100, 0.02)
    steps.begin(end + 0.02)
    for seconds in (0.0, 1.0, 30.0, 0.99 * LONGEST_STEP):
        assert steps.seconds_until_idle(end + 0.02 + seconds) > 0
    assert steps.seconds_until_idle(end + 0.02 + LONGEST_STEP) == 0, "it will never end"
    steps.end(end + 40.0)
    assert steps.seconds_until_idle(end + 40.0) == pytest.approx(PATIENCE_INTERVALS * 0.02)


@pytest.mark.parametrize("interval", [0.015, 0.02, 0.1, 0.2])
def test_the_interval_between_steps_is_learned(interval: float) -> None:
    steps = EngineSteps()
    assert steps.interval is None
    end = run(steps, 0.0, 2, interval)
    assert steps.interval == pytest.approx(interval)
    end = run(steps, end + interval, 200, interval)
    assert steps.interval == pytest.approx(interval)
    patience = PATIENCE_INTERVALS * interval
    assert steps.seconds_until_idle(end) == pytest.approx(patience)
    assert steps.seconds_until_idle(end + 0.9 * patience) > 0 == steps.seconds_until_idle(end + 1.1 * patience)


def test_the_interval_follows_the_engine() -> None:
    steps = EngineSteps()
    end = run(steps, 0.0, 100, 0.02)
    end = run(steps, end + 0.1, 50, 0.1)
    assert steps.interval == pytest.approx(0.1, rel=0.01)
    steps.begin(end + 0.02)
    assert 0.05 < (steps.interval or 0) < 0.1, "not at once"


def test_pauses_teach_nothing() -> None:
    steps = EngineSteps()
    end = run(steps, 0.0, 100, 0.02)
    for _ in range(50):
        end = run(steps, end + 3600.0, 2, 0.02)
    assert steps.interval == pytest.approx(0.02)


def test_patience_has_limits() -> None:
    steps = EngineSteps()
    steps.begin(0.0)
    steps.end(0.0)
    assert steps.seconds_until_idle(0.0) == MOST_PATIENCE, "nothing is known yet"
    end = run(steps, 0.001, 100, 0.001)
    assert steps.seconds_until_idle(end) == pytest.approx(LEAST_PATIENCE)
    end = run(steps, end + 0.9, 100, 0.9)
    assert steps.seconds_until_idle(end) == pytest.approx(MOST_PATIENCE)


def test_a_step_begins_once_however_often_it_is_told() -> None:
    steps = EngineSteps()
    for at in range(50):
        for part in range(3):
            steps.begin(at * 0.1 + part * 0.01)
        steps.end(at * 0.1 + 0.03)
    assert steps.interval == pytest.approx(0.1)


def busy(share: float) -> tuple[StorePace, Clock]:
    """A pace whose engine is in a step."""
    clock = Clock()
    pace = StorePace(share, clock)
    pace.begin_step()
    return pace, clock


def test_an_idle_engine_limits_nothing() -> None:
    clock = Clock()
    pace = StorePace(0.01, clock)
    for _ in range(20):
        assert pace.wait(0) == 0
        pace.charge(5.0)
    pace.begin_step()
    assert pace.wait(0) == 0, "and what it let happen is not owed"


def test_what_was_spent_is_waited_for() -> None:
    pace, clock = busy(0.1)
    clock.now += 10
    pace.charge(0.075)
    assert pace.wait(0) == 0, "a share of the last second is left"
    pace.charge(0.075)
    assert pace.wait(0) == pytest.approx(0.5)
    clock.now += 0.4
    assert pace.wait(0) == pytest.approx(0.1)
    clock.now += 0.11
    assert pace.wait(0) == 0


def test_the_wait_ends_when_the_engine_becomes_idle() -> None:
    pace, clock = busy(0.1)
    pace.charge(1.0)
    pace.end_step()
    assert pace.wait(0) == MOST_PATIENCE
    clock.now += MOST_PATIENCE
    assert pace.wait(0) == 0
    pace.begin_step()
    assert 0 < pace.wait(0) < 10, "a debt outlasts a pause that is too short to pay it"
    clock.now += 10
    assert pace.wait(0) == 0


@pytest.mark.parametrize(("share", "at_once"), [(0.02, 1), (1.0, 1), (1.5, 2), (3, 3)])
def test_a_busy_engine_has_no_more_entries_at_once_than_fill_the_share(share: float, at_once: int) -> None:
    pace, clock = busy(share)
    assert pace.wait(at_once - 1) == 0 < pace.wait(at_once)
    pace.end_step()
    clock.now += MOST_PATIENCE
    assert pace.wait(at_once) == 0


@pytest.mark.parametrize("share", [1e-300, 5e-324])
def test_a_share_of_almost_nothing_is_a_long_wait(share: float) -> None:
    pace, _ = busy(share)
    pace.charge(1.0)
    assert 0 < pace.wait(0) <= MOST_PATIENCE


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 1.0, 2.5])
@pytest.mark.parametrize("cost", [0.001, 0.075, 0.9])
def test_a_busy_engine_gives_its_share_and_no_more(share: float, cost: float) -> None:
    """In every window, not only on average; pauses in which nothing waited earn a bounded burst."""
    draw = random.Random(str((share, cost)))
    pace, clock = busy(share)
    begun = clock.now
    spent: list[tuple[float, float]] = []  # when an entry was done, and what it took

    def compute(seconds: float) -> None:
        while seconds > 0:
            clock.now += min(seconds, 0.5)
            seconds -= 0.5
            pace.end_step()
            pace.begin_step()

    for entry in range(600):
        if entry % 100 == 99:
            compute(30.0)  # nothing waits
        while pause := pace.wait(0):
            compute(pause)
        took = cost * draw.uniform(0.5, 1.5)
        compute(took)
        pace.charge(took)
        spent.append((clock.now, took))
    burst = share * WINDOW_SECONDS + 1.5 * cost
    for first in range(0, 600, 7):
        for last in range(first, 600, 13):
            window = spent[first : last + 1]
            seconds = window[-1][0] - window[0][0]
            assert sum(took for _, took in window) <= share * seconds + burst + window[0][1] + 1e-6
    total = sum(took for _, took in spent)
    working = clock.now - begun - 6 * 30
    assert total >= 0.9 * min(share, 1.0) * working, "it is used up"


def test_clocks_that_begin_anywhere() -> None:
    for now in (0.0, -5.0, 1e9):
        clock = Clock()
        clock.now = now
        pace = StorePace(0.1, clock)
        pace.begin_step()
        assert pace.wait(0) == 0
        pace.charge(0.2)
        assert pace.wait(0) == pytest.approx(1.0, rel=1e-3)
        assert math.isfinite(pace.wait(0))
