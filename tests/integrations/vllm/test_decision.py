"""When loads and blends pay: the break-even length, what is tried although it looks too slow, and shapes of blends."""

from __future__ import annotations

import math

import pytest

from cuvee.integrations.costs import LinearCost, prefill_quantities
from cuvee.integrations.vllm.decision import (
    MIN_SAMPLES,
    TRIAL_EVERY,
    BlendCost,
    BlendPays,
    BreakEven,
    Estimate,
    load_work,
)


def computing(token: float = 1e-3, looked_at: float = 0.0, steps: int = 8, constant: float = 0.0) -> LinearCost:
    """What was learned from steps of several lengths."""
    cost = LinearCost(1e-3, 0.0)
    for at in range(steps):
        x, y = prefill_quantities(1024 * (at % 3), 1024 * (at % 3) + 256 * (1 + at % 4))
        cost.observe(x, y, constant + token * x + looked_at * y)
    return cost


def loading(decision: BreakEven, overhead: float, token: float, loads: int = 8) -> None:
    for at in range(loads):
        work = 256 * (1 + at % 4)
        decision.observe_load(work, overhead + token * work)


def test_the_first_length_that_pays() -> None:
    decision = BreakEven(computing(1e-3))
    loading(decision, 0.1, 1e-4)
    estimate = decision.estimate
    assert estimate is not None and estimate.break_even == pytest.approx(0.1 / 9e-4, rel=0.05)
    assert estimate.prefill_rate == pytest.approx(1000, rel=0.05) and estimate.load_rate == pytest.approx(1e4, rel=0.1)
    length = int(estimate.break_even)
    assert decision.worth_loading(0, length + 8, length + 8) and not decision.worth_loading(0, length - 8, length - 8)


def test_what_every_step_takes_makes_no_load_pay() -> None:
    """The rest of the prompt is computed in a step of its own after a load."""
    decision = BreakEven(computing(1e-3, constant=0.5))
    loading(decision, 0.1, 1e-4)
    assert decision.estimate is not None and decision.estimate.break_even == pytest.approx(0.1 / 9e-4, rel=0.1)
    assert not decision.worth_loading(0, 64, 64) and decision.worth_loading(0, 160, 160)


def test_attention_over_a_long_prefix_makes_loads_pay() -> None:
    decision = BreakEven(computing(1e-4, 2e-7))
    loading(decision, 0.02, 3e-4)
    assert not decision.worth_loading(0, 64, 64) and decision.worth_loading(8192, 8256, 64)
    estimate = decision.estimate
    assert estimate is not None and math.isfinite(estimate.break_even)
    tokens = estimate.break_even
    assert 0.02 + 3e-4 * tokens == pytest.approx(1e-4 * tokens + 2e-7 * tokens**2, rel=0.1)


@pytest.mark.parametrize(
    ("prefill", "load", "expected"),
    [
        ((1e-3, 0.0), (0.0, 1e-4), 1), ((1e-4, 0.0), (0.1, 1e-3), math.inf), ((1e-3, 0.0), (0.1, 1e-3), math.inf),
        ((1e-3, 0.0), (0.1, 0.0), 100), ((1e-4, 1e-6), (0.0, 1e-3), 900), ((1e-3, 1e-6), (0.0, 0.0), 1),
    ],
)  # fmt: skip
def test_lengths_at_the_edges(prefill: tuple[float, float], load: tuple[float, float], expected: float) -> None:
    estimate = Estimate.of(LinearCost(*prefill), LinearCost(load[1], 0.0, constant=load[0]))
    assert estimate.break_even == pytest.approx(expected, abs=1) and estimate.prefill_rate > 0


def test_what_a_load_has_to_decode() -> None:
    assert load_work(3, 0, 256) == 768
    assert load_work(0, 16, 256) == 16 + 80 and load_work(1, 255, 256) == 256 + 255 + 1
    decision = BreakEven(computing(1e-3))
    loading(decision, 0.01, 5e-4)
    assert decision.worth_loading(240, 512, 272) and not decision.worth_loading(240, 512, 1024), "decoded in vain"


def test_loads_until_both_sides_are_known() -> None:
    few = BreakEven(computing(1e-5, steps=MIN_SAMPLES - 1))
    loading(few, 1.0, 1.0)
    assert few.estimate is None and few.worth_loading(0, 100, 100)


def test_one_in_so_many_declined_is_tried_and_notices_a_store_that_has_recovered() -> None:
    decision = BreakEven(computing(1e-4))
    loading(decision, 1.0, 1e-3)
    answers = [decision.worth_loading(0, 512, 512) for _ in range(3 * TRIAL_EVERY)]
    assert [at for at, tried in enumerate(answers, 1) if tried] == [TRIAL_EVERY, 2 * TRIAL_EVERY, 3 * TRIAL_EVERY]
    loading(decision, 1e-4, 1e-6, loads=32)
    assert all(decision.worth_loading(0, 512, 512) for _ in range(8))


# Blends --------------------------------------------------------------------------------------------------------------

USEFUL = BlendCost(4, 1024, 100, 1200)
USELESS = BlendCost(1000, 4000, 3000, 7000)


def blends(pays: BlendPays, shape: BlendCost, seconds: float, count: int = 8) -> None:
    for _ in range(count):
        fields = {name: getattr(shape, name) for name in ("pieces", "placed", "computed", "context", "prefix")}
        pays.observe(BlendCost(**fields, place_seconds=seconds / 2, compute_seconds=seconds / 2))


def test_blends_are_judged_by_their_shape() -> None:
    pays = BlendPays(computing(1e-3))
    assert pays.worth(0, 1200, USEFUL), "nothing was measured yet"
    blends(pays, USEFUL, 0.2)
    blends(pays, USELESS, 20.0)
    assert pays.expected(USEFUL) == pytest.approx(0.2, rel=0.05)
    assert pays.worth(0, 1200, USEFUL) and not pays.worth(0, 7000, USELESS)
    answers = [pays.worth(0, 7000, USELESS) for _ in range(2 * TRIAL_EVERY - 1)]
    assert answers.count(True) == 2, "some are tried, to notice that they have become quicker"
    blends(pays, USELESS, 0.5, count=32)
    assert pays.worth(0, 7000, USELESS)


def test_parts_of_blends_that_were_not_measured_count_as_free() -> None:
    pays = BlendPays(computing(1e-3))
    for _ in range(MIN_SAMPLES):
        pays.observe(BlendCost(4, 1024, 0, 1200, place_seconds=0.5, compute_seconds=0.5))
        pays.observe(BlendCost(4, 0, 100, 1200, prefix=512, place_seconds=0.5))
        pays.observe(BlendCost(4, 1024, 100, 1200, place_seconds=math.inf))
    assert pays.expected(USEFUL) == pytest.approx(0.5, rel=0.05), "placing alone was measured"
    early = BlendPays(computing(1e-5, steps=MIN_SAMPLES - 1))
    blends(early, USEFUL, 9.0)
    assert early.worth(0, 1200, USEFUL)
