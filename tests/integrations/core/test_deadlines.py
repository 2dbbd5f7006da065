"""`choose`: how much to load by a deadline; `RecentRates`: how fast tiers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cuvee.integrations.core import deadlines as loading
from cuvee.integrations.core.deadlines import Choice, RecentRates, choose

TOKENS, MB = 256, 1e6
NOW = 100.0


def chosen(
    deadline: float,
    count: int = 4,
    base: float = 0.1,
    refinement: float = 0.2,
    *,
    compute: float = 2e-3,
    loaded: int = 0,
    refined: int = 0,
    under_way: float = 0.0,
) -> Choice:
    """The choice for chunks whose parts take so many seconds each, some of which are there."""
    edges = [TOKENS * at for at in range(count + 1)]

    def computing(chunks: int) -> float:
        return compute * (edges[-1] - edges[chunks] + 16)

    bases = [0.0] * loaded + [base] * (count - loaded)
    refinements = [0.0] * refined + [refinement] * (count - refined)
    return choose(deadline, edges, computing, under_way, loaded, bases, refinements)


def end(chunks: int, refined: int, count: int = 4) -> float:
    """Seconds until the first token, by `chosen`'s defaults."""
    return 0.1 * chunks + 2e-3 * ((count - chunks) * TOKENS + 16)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"deadline": 5.0}, (4, 4)),  # all that fits is loaded
        ({"deadline": 1.0}, (4, 2)),  # 0.4 s for bases, 0.032 s to compute: time for two refinements
        ({"deadline": 0.45}, (4, 0)),
        ({"deadline": 0.1}, (4, 0)),  # late in any case: as early as possible
        ({"deadline": -3.0}, (4, 0)),
        ({"deadline": 0.1, "base": 1.0}, (0, 0)),  # computing a chunk takes 0.51 s
        ({"deadline": 2.2, "base": 0.5, "refinement": 9.0}, (0, 0)),  # time to compute what only bases could be had of
        ({"deadline": 1.0, "refinement": 0.0}, (4, 4)),  # chunks of one part are loaded at their best
        ({"deadline": 0.6, "loaded": 4, "refined": 1}, (4, 3)),
        ({"deadline": 0.6, "loaded": 4, "refined": 1, "under_way": 0.3}, (4, 2)),
        ({"deadline": 0.1, "loaded": 2, "base": 5.0}, (2, 0)),  # what has come is used, and the rest computed
        ({"deadline": 2.2, "loaded": 2, "base": 0.5, "refinement": 9.0}, (2, 0)),  # also where there is time for better
        ({"deadline": 0.0, "count": 0}, (0, 0)),
    ],
    ids=repr,
)
def test_what_is_loaded(given: dict[str, Any], expected: tuple[int, int]) -> None:
    choice = chosen(**given)
    assert (choice.chunks, choice.refined) == expected


@pytest.mark.parametrize("deadline", [0.45, 0.6, 0.9, 1.3, 2.0])
def test_time_is_used_and_not_exceeded(deadline: float) -> None:
    choice = chosen(deadline)
    last = end(choice.chunks, 0) + 0.2 * choice.refined
    assert last <= deadline and (choice.refined == 4 or last + 0.2 > deadline)


# Rates ---------------------------------------------------------------------------------------------------------------


def test_of_hundreds_of_chunks_a_few_numbers_are_compared() -> None:
    choice = chosen(12.0, count=300, refinement=9.0, compute=1e-4)
    assert choice.chunks < 300
    exact = 12.0 - 1e-4 * (300 * TOKENS + 16)  # left for loading, which saves less time than it takes
    assert choice.chunks * (0.1 - 1e-4 * TOKENS) <= exact


@pytest.mark.parametrize(("true", "told"), [(2 * MB, 20 * MB), (20 * MB, 2 * MB)])
def test_a_rate_that_is_wrong_by_ten_times_is_corrected(true: float, told: float) -> None:
    rates = RecentRates({"far": told}, otherwise=1.0)
    for _ in range(60):
        rates.observe("far", 200_000, 200_000 / true)
    assert rates("far") == pytest.approx(true, rel=0.1) and rates("near") == 1.0


def test_a_rate_without_samples_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = NOW
    monkeypatch.setattr(loading, "time", SimpleNamespace(monotonic=lambda: now))
    rates = RecentRates({"far": MB}, otherwise=1.0)
    rates.observe("far", 1, 3600.0)
    now += 59
    assert rates("far") < 1.0
    now += 2
    assert rates("far") == MB
