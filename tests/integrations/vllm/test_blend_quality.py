"""The cost of blends that are asked for by KL."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cuvee.integrations.vllm.blending.quality import (
    _MOST_TENANTS,
    _WINDOW,
    COSTS,
    PRIOR_LEVEL,
    RATE,
    BlendQuality,
)


def taught(level: float, cost: float, checks: int = _WINDOW, tenant: str = "") -> BlendQuality:
    quality = BlendQuality()
    for _ in range(checks):
        quality.observe(tenant, cost, level * math.exp(-RATE * cost))
    return quality


def test_without_checks_the_prior_counts() -> None:
    quality = BlendQuality()
    assert quality.checks == 0 and quality.level == PRIOR_LEVEL
    assert [quality.cost_for(kl) for kl in (1.0, PRIOR_LEVEL, 0.02, 0.005, 0.002, 1e-9)] == [0, 0, 0.25, 0.6, 0.8, 1]


@pytest.mark.parametrize("level", [0.001, 0.02, 0.05, 0.3, 2.0])
@pytest.mark.parametrize("kl", [0.002, 0.005, 0.02])
def test_a_deployment_corrects_itself(level: float, kl: float) -> None:
    """KLs scatter by a factor of two and a half around the curve; their mean comes to be at most what was asked."""
    generator = np.random.default_rng(0)
    quality, scale = BlendQuality(), math.exp(0.9**2 / 2)  # of the mean of a log-normal
    costs = []
    for _ in range(200):
        cost = min(quality.cost_for(kl), COSTS[-2])
        quality.observe("", cost, level * math.exp(-RATE * cost) * generator.lognormal(0, 0.9) / scale)
        costs.append(cost)
    settled = costs[-100:]
    assert np.mean([level * math.exp(-RATE * cost) for cost in settled]) < 1.3 * kl or set(settled) == {COSTS[-2]}
    ideal = min(max(math.log(level / kl) / RATE, 0.0), COSTS[-2])
    assert np.mean(settled) < ideal + 0.25, "it does not overpay"


@pytest.mark.parametrize("steeper", [3.0, 9.0])
def test_another_rate_does_little_harm(steeper: float) -> None:
    quality, found = BlendQuality(), []
    for _ in range(300):
        cost = min(quality.cost_for(0.005), COSTS[-2])
        found.append(0.08 * math.exp(-steeper * cost))
        quality.observe("", cost, found[-1])
    assert np.mean(found[-200:]) < 1.3 * 0.005 or cost == COSTS[-2]


def test_the_expected_kl_falls_to_zero() -> None:
    quality = taught(0.02, 0.3)
    found = [quality.expected(cost) for cost in COSTS]
    assert found == sorted(found, reverse=True) and found[-1] == 0
    assert quality.expected(0.3) == pytest.approx(0.02 * math.exp(-RATE * 0.3), rel=0.25)


def test_checks_that_say_nothing_are_not_counted() -> None:
    quality = BlendQuality()
    for cost, kl in ((1.0, 0.0), (0.5, math.nan), (0.5, math.inf), (0.5, -1.0)):
        quality.observe("", cost, kl)
    assert quality.checks == 0


def test_one_tenant_does_not_set_the_quality_of_others() -> None:
    quality = taught(0.02, 0.3)
    before = quality.level
    for _ in range(1000):
        quality.observe("noisy", 0.3, 0.0)
    assert quality.checks == 2 * _WINDOW and quality.level > before / 2.1
    for tenant in range(2 * _MOST_TENANTS):
        quality.observe(f"tenant {tenant}", 0.3, 0.001)
    assert quality.checks == _MOST_TENANTS, "memory is bounded: the tenants that were quiet longest are forgotten"
