"""What links, computing and decoding are measured to be, with their spread."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from cuvee.codec.errors import InputError
from cuvee.integrations.loading import LinearCost, LinkRate, prefill_quantities
from cuvee.integrations.loading.links import Forecast


def measured(rate: Callable[[float], float], seconds: float, piece: float = 0.02) -> LinkRate:
    """A link after so many seconds of transfers."""
    link, now = LinkRate(1e6, 0.0), 0.0
    while now < seconds:
        link.observe(rate(now) * piece, piece)
        now += piece
    return link


def test_a_forecast_is_for_a_span() -> None:
    """On and off ten times a second: nobody knows the next .05 s, and everybody the next 3 s."""
    random = np.random.default_rng(0)
    on = random.random(5000) < 0.5
    link = measured(lambda now: 10e6 if on[int(now / 0.05)] else 1e6, 240.0, 0.05)
    short, long = link.forecast(0.05), link.forecast(3.0)
    assert short.spread > 0.7 and long.spread < 0.3
    assert long.rate == pytest.approx(5.5e6, rel=0.25)


def test_a_link_that_steps_is_followed_by_the_short_memory() -> None:
    link = measured(lambda now: 1e6 if now % 4 < 2 else 16e6, 41.0)
    assert link.forecast(0.1).rate == pytest.approx(1e6, rel=0.1)
    link.observe(16e6 * 0.5, 0.5)
    assert link.forecast(0.1).rate == pytest.approx(16e6, rel=0.2)


def test_a_steady_link_becomes_certain() -> None:
    fresh, link = LinkRate(1e6, 0.0), measured(lambda now: 3e6, 60.0)
    assert fresh.forecast(1.0).spread == pytest.approx(0.7)
    assert link.forecast(1.0).spread < 0.35 and link.forecast(0.1).spread < 0.1
    assert Forecast(1e6, 0.5).at(2.0) == pytest.approx(1e6 / math.e) and Forecast(1e6, 0.5).at(0.0) == 1e6


def test_silence_is_evidence() -> None:
    link = measured(lambda now: 2e6, 10.0)
    usual = link.forecast(1.0)
    assert link.forecast(1.0, (100_000, 0.04)) == usual, "it is not overdue yet"
    late = [link.forecast(1.0, (100_000, passed)) for passed in (0.1, 0.5, 2.0)]
    assert all(a.rate > b.rate and a.spread < b.spread for a, b in zip([usual, *late], late, strict=False))
    assert late[-1].at(1.64) < usual.rate / 50
    assert link.forecast(1.0) == usual, "and is forgotten if the answer comes at once"
    link.observe_canceled(100_000, 0.04)
    assert link.forecast(1.0) == usual
    link.observe_canceled(100_000, 2.0)
    assert link.forecast(1.0).rate < 0.75 * usual.rate, "what was given up because it was late is remembered"


def test_latency_is_no_part_of_the_rate() -> None:
    link, now = LinkRate(2e6, 0.1), 0.0
    for _ in range(30):  # 30 ms, and 5 MB/s; a second request is sent before the first is answered
        link.observe_request(500_000, now, now - 1.0, now + 0.13)
        link.observe_request(500_000, now, now + 0.13, now + 0.23)
        now += 2.0
    assert link.latency == pytest.approx(0.03, abs=0.025) and link.forecast(0.4).rate == pytest.approx(5e6, rel=0.25)
    pipelined = LinkRate(1e6, 0.03)
    for number in range(60):
        pipelined.observe_request(500_000, 0.1 * number - 0.05, 0.1 * number, 0.1 * number + 0.1)
    assert pipelined.forecast(0.4).rate == pytest.approx(5e6, rel=0.05) and pipelined.latency == 0.03


def test_a_latency_that_is_thought_too_long_makes_no_rate_without_bound() -> None:
    link = LinkRate(1e6, 10.0)
    for number in range(5):
        link.observe_request(100_000, number, number - 1.0, number + 0.1)
    assert link.forecast(0.1).rate <= 2.01e6


def test_prefill_is_learned_with_its_attention() -> None:
    cost, random = LinearCost(1e-2, 0.0), np.random.default_rng(0)
    for number in range(32):
        start = 1000 * (number % 8)
        x, y = prefill_quantities(start, start + 512)
        cost.observe(x, y, (4e-4 * x + 2e-8 * y) * float(np.exp(0.03 * random.standard_normal())))
    assert cost(*prefill_quantities(0, 8000)) == pytest.approx(4e-4 * 8000 + 2e-8 * 8000**2, rel=0.05)
    assert 0.01 < cost.spread < 0.06
    assert prefill_quantities(256, 512) == (256.0, 512.0**2 - 256.0**2)


def test_quantities_that_samples_do_not_tell_apart_share_the_cost() -> None:
    cost = LinearCost(1e-3, 1e-7)
    for _ in range(20):
        cost.observe(256.0, 1e5, 2 * (1e-3 * 256 + 1e-7 * 1e5))
    assert cost(256.0, 1e5) == pytest.approx(2 * (1e-3 * 256 + 1e-7 * 1e5), rel=0.02)
    assert cost.first >= 1e-3 and cost.second >= 1e-7, "both are more than was given"


def test_old_costs_are_forgotten_and_none_is_negative() -> None:
    cost = LinearCost(1e-3, 0.0)
    for seconds in (1.0,) * 32 + (2.0,) * 24:
        cost.observe(100.0, 0.0, seconds)
    assert cost(100.0, 0.0) > 1.55, "without forgetting, 8 of 32 samples would make it 1.43"
    for number in range(32):
        cost.observe(100.0, 100.0 * number, 1.0 / (1 + number))  # the more, the quicker
        assert cost.first >= 0 and cost.second >= 0 and cost(100.0, 0.0) + cost(0.0, 100.0) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinkRate(0.0, 0.0), "rate: must be finite and above 0, got 0"),
        (lambda: LinkRate(1.0, -1.0), "latency: must be"),
        (lambda: LinkRate(1.0, 0.0, math.nan), "spread: must be"),
        (lambda: LinkRate(1.0, 0.0).observe(0, 1.0), "nbytes: must be"),
        (lambda: LinkRate(1.0, 0.0).observe(1, 0.0), "seconds: must be"),
        (lambda: LinearCost(0.0, 0.0), "first, second: must be seconds"),
        (lambda: LinearCost(-1.0, 0.0), "first: must be"),
        (lambda: LinearCost(1.0, 0.0).observe(1.0, 0.0, math.inf), "seconds: must be"),
        (lambda: LinearCost(1.0, 0.0).observe(0.0, 0.0, 1.0), "x, y: must not both be 0"),
    ],
)
def test_measurements_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
