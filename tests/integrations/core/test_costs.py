"""`LinearCost`: what it learns from measurements, and what it forgets."""

from __future__ import annotations

import math

import pytest

from cuvee.integrations.core.costs import HALF_LIFE, LinearCost, prefill_quantities


def test_prefill_is_learned_with_its_attention() -> None:
    cost = LinearCost(1e-3, 0.0)
    for start in (0, 1024, 4096):
        for tokens in (256, 512, 2048):
            x, y = prefill_quantities(start, start + tokens)
            cost.observe(x, y, 4e-4 * x + 2e-8 * y)
    assert cost.samples == 9
    assert (cost.first, cost.second) == pytest.approx((4e-4, 2e-8), rel=0.02)
    x, y = prefill_quantities(8192, 9216)
    assert cost(x, y) == pytest.approx(4e-4 * x + 2e-8 * y, rel=0.02)


def test_loads_of_several_lengths_tell_latency_from_bandwidth() -> None:
    cost = LinearCost(1e-4, 0.0, constant=1e-3)
    for tokens in (64, 256, 1024, 4096, 512):
        cost.observe(tokens, 0.0, 0.02 + 1e-5 * tokens)
    assert (cost.constant, cost.first) == pytest.approx((0.02, 1e-5), rel=0.05)


def test_short_steps_do_not_make_long_ones_look_dear() -> None:
    """A step of 64 tokens takes 0.05 s, most of it whatever their number; one of 1,088 takes 0.43 s."""
    cost = LinearCost(1e-3, 0.0)
    for start, stop in [(0, 1088)] * 4 + [(1024, 1088)] * 24:
        x, y = prefill_quantities(start, stop)
        cost.observe(x, y, 0.027 + 3.6e-4 * x)
    assert cost(*prefill_quantities(0, 1088)) == pytest.approx(0.42, rel=0.1)
    assert cost(*prefill_quantities(1024, 1088)) == pytest.approx(0.05, rel=0.05)
    assert cost.marginal(64, 0) < 0.03, "the constant is paid once, however many tokens there are"


def test_steps_of_one_size_have_little_of_a_constant() -> None:
    cost = LinearCost(1e-5, 0.0)
    for _ in range(20):
        cost.observe(512, 0, 0.2)
    assert cost(512, 0) == pytest.approx(0.2, rel=0.02) and 0.35 < cost(1024, 0) < 0.41


def test_quantities_that_samples_do_not_tell_apart_share_the_cost() -> None:
    cost = LinearCost(1e-3, 1e-6)
    for _ in range(8):
        cost.observe(256, 100_000, 0.05)
    assert cost(256, 100_000) == pytest.approx(0.05, rel=0.02)
    assert cost(512, 200_000) == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize("slow", [0, 3])
def test_samples_that_compile_count_little(slow: int) -> None:
    cost = LinearCost(1e-3, 0.0)
    for at in range(6):
        cost.observe(512, 0, 0.1 * (100 if at == slow else 1))
    assert cost(512, 0) == pytest.approx(0.1, rel=0.05)


def test_old_costs_are_forgotten_and_none_is_negative() -> None:
    cost = LinearCost(1e-3, 0.0)
    for _ in range(20):
        cost.observe(256, 0, 0.2)
    for _ in range(12):
        cost.observe(256, 0, 0.05)
    assert cost(256, 0) < 0.11
    for _ in range(4 * HALF_LIFE):
        cost.observe(256, 0, 0.05)
    assert cost(256, 0) == pytest.approx(0.05, rel=0.02)
    for seconds, x, y in ((0.1, 256, 1000), (0.05, 256, 9000), (0.1, 100, 1e5), (0.05, 1000, 1e5)):  # less was slower
        for _ in range(8):
            cost.observe(x, y, seconds)
            assert min(cost.first, cost.second, cost.constant) >= 0


@pytest.mark.parametrize("sample", [(0, 0, 1.0), (-1, 0, 1.0), (1, 0, 0.0), (1, 0, math.inf), (math.nan, 0, 1.0)])
def test_what_is_no_measurement_tells_nothing(sample: tuple[float, float, float]) -> None:
    cost = LinearCost(1e-3, 0.0)
    cost.observe(*sample)
    assert cost.samples == 0 and cost(1, 0) == 1e-3
