from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cuvee.codec.errors import InputError
from cuvee.codec.support.arrays import F64
from cuvee.eval import stats
from cuvee.eval.stats import (
    FamilyCurve,
    Resamples,
    bits_at_kl,
    compare_at_equal_kl,
    interval,
    of_sequences,
    paired_difference,
    sizes_at_kl,
)

SIZES: npt.NDArray[np.float64] = np.array([0.5, 1.0, 2.0, 4.0])


def power_law(scale: float, sequences: int, seed: int, noise: float = 0.4, shared: F64 | None = None) -> FamilyCurve:
    """KL = scale / bits**2 times noise of mean one: a factor a sequence (`shared` or its own), and a little more."""
    draw = np.random.default_rng(seed)
    hard = draw.normal(0, noise, sequences) if shared is None else shared
    own = draw.normal(0, 0.02, (len(SIZES), sequences))
    factor = np.exp(hard - noise**2 / 2 + own)
    return FamilyCurve(np.repeat(SIZES[:, None], sequences, 1), scale / SIZES[:, None] ** 2 * factor)


def entry(key: str, bits: Any, kl: Any) -> dict[str, Any]:
    return {
        "key": key,
        "family": key.partition("@")[0],
        "bits_per_value": float(np.mean(bits)),
        "kl": float(np.mean(kl)),
        "per_sequence": {"bits_per_value": list(bits), "kl": list(kl)},
    }


def family(name: str, curve: FamilyCurve) -> list[dict[str, Any]]:
    pairs = zip(curve.bits.tolist(), curve.kl.tolist(), strict=True)
    return [entry(f"{name}@{i}", bits, kl) for i, (bits, kl) in enumerate(pairs)]


def bootstrap_ratio(of: FamilyCurve, against: FamilyCurve, kl: Any, *, draws: int = 1000, seed: int = 0) -> Any:
    """The interval of a ratio of sizes, drawn as `compare_at_equal_kl` does."""
    sample = Resamples(of.kl.shape[1], draws, seed)
    target = sample.mean(np.broadcast_to(np.asarray(kl, np.float64), np.shape(kl) or of.kl.shape[1:]))
    size = sample.mean(against.bits[0]) if len(against.bits) == 1 else sample.size(against, target)
    return interval(stats._over(size, sample.size(of, target)), of.kl.shape[1])


# The size at a KL --------------------------------------------------------------------------------------------------


def test_a_power_law_comes_back_exactly_between_points_in_any_order() -> None:
    bits = np.array([4, 0.5, 2, 1])
    for wanted in (0.5, 0.7, 1, 1.7, 3, 4):
        assert bits_at_kl(bits, 0.3 * bits**-2.5, 0.3 * wanted**-2.5 * (1 + 1e-13 * (wanted == 4))) == pytest.approx(
            wanted
        )


def test_the_ends_belong_to_the_curve_and_nothing_beyond() -> None:
    bits, kl = [1.0, 2.0, 3.0], [0.3, 0.1, 0.07]
    assert bits_at_kl(bits, kl, 0.3) == pytest.approx(1) and bits_at_kl(bits, kl, 0.07) == pytest.approx(3)
    assert bits_at_kl(bits, kl, 0.3 * (1 + 1e-9)) is None
    assert bits_at_kl(bits, kl, 0.07 * (1 - 1e-9)) is None
    assert bits_at_kl(bits, kl, 0.0) is None and bits_at_kl(bits, kl, -1.0) is None


def test_neighbors_that_rise_are_pooled_at_their_means() -> None:
    # 2 and 8 bits have 0.01 and 0.04: their geometric means are 4 bits and 0.02.
    bits, kl = [1, 2, 8, 16], [0.32, 0.01, 0.04, 0.002]
    assert bits_at_kl(bits, kl, 0.02) == pytest.approx(4)
    assert bits_at_kl(bits, kl, 0.08) == pytest.approx(2)  # half way from (1, 0.32) to (4, 0.02)
    assert bits_at_kl(bits, kl, 0.04) == pytest.approx(2**1.5)
    for last in (0.001, 0.002, 0.003, 0.005, 0.007):  # what is not pooled stays as it is, to the last bit
        assert bits_at_kl(bits, [*kl[:3], last], last) == pytest.approx(16)


def test_a_long_pool_is_one_mean() -> None:
    kl = np.exp([5.0, 1.0, 2.0, 3.0, 0.0])  # 1, 2, 3 rise: one pool of mean 2
    assert bits_at_kl([1, 2, 4, 8, 16], kl, np.exp(2.0) * (1 + 1e-12)) == pytest.approx(4)


def test_points_that_lost_nothing_are_left_out() -> None:
    assert bits_at_kl([1, 4, 16], [0.1, 0.01, 0.0], 10**-1.5) == pytest.approx(2)
    assert bits_at_kl([1, 4, 16], [0.1, 0.01, 0.0], 0.005) is None
    assert bits_at_kl([1, 4], [0.0, -1e-9], 0.01) is None


@pytest.mark.parametrize(
    ("bits", "kl", "field"),
    [
        ([1, 2], [0.1], "kl: must be"),
        ([], [], "kl: must be"),
        ([0, 1], [0.2, 0.1], "bits: must be positive"),
        ([1, 2], [0.2, np.nan], "bits: must be positive and kl finite"),
    ],
)
def test_no_curve(bits: list[float], kl: list[float], field: str) -> None:
    with pytest.raises(InputError, match=field):
        bits_at_kl(bits, kl, 0.1)


# The bootstrap ------------------------------------------------------------------------------------------------------


def test_the_anchor_is_resampled_with_the_curve() -> None:
    # The curve's KL is the anchor's times a constant on every sequence: the size at its KL is the same in every draw.
    hard = np.random.default_rng(3).lognormal(0, 1, 20)
    of = FamilyCurve(np.repeat(SIZES[:, None], 20, 1), 0.04 / SIZES[:, None] ** 2 * hard)
    anchor = FamilyCurve(np.full((1, 20), 8.0), 0.01 * hard[None])
    low, high = bootstrap_ratio(of, anchor, anchor.kl[0])
    assert low == pytest.approx(4) and high == pytest.approx(4)
    fixed_low, fixed_high = bootstrap_ratio(of, anchor, float(anchor.kl.mean()))
    assert fixed_low is not None and fixed_high is not None and fixed_high - fixed_low > 0.5


def test_sizes_are_resampled_too() -> None:
    bits = np.repeat(SIZES[:, None], 20, 1)
    of = FamilyCurve(
        bits * np.random.default_rng(0).lognormal(0, 0.5, 20), np.repeat(0.04 / SIZES[:, None] ** 2, 20, 1)
    )
    low, high = bootstrap_ratio(of, FamilyCurve(np.full((1, 20), 8.0), np.full((1, 20), 0.01)), 0.01)
    assert low is not None and high is not None and high - low > 0.5


def test_the_interval_covers_the_truth_at_ten_sequences() -> None:
    """KLs of a sequence are lognormal, and half of that is of the sequence and shared by all methods."""
    draw, covered, trials, spread = np.random.default_rng(7), 0, 600, 0.6
    points = np.array([4.0, 2.0, 1.0, 0.5, 0.25])
    for seed in range(trials):
        hard, own, others = draw.normal(0, spread * math.sqrt(0.5), (3, 10))
        curve = FamilyCurve(np.repeat(points[:, None], 10, 1), 0.01 / points[:, None] * np.exp(hard + own))
        anchor = entry("fp8", np.full(10, 8.0), 0.01 * np.exp(hard + others))
        (found,) = compare_at_equal_kl([anchor, *family("cuvee/layer", curve)], ["fp8"], seed)[0]["ratios"]
        covered += (found["low"] or 0) <= 8.0 <= (found["high"] or math.inf)
    assert 0.93 <= covered / trials <= 0.97


def test_an_end_outside_what_was_measured_is_none() -> None:
    # The KL looked for is that of the smallest setting: in about half of the draws it is larger than any measured.
    of = power_law(0.04, 20, 1)
    at_the_end = float(of.kl[0].mean()) * 0.98
    low, high = bootstrap_ratio(of, FamilyCurve(np.full((1, 20), 8.0), np.full((1, 20), 0.1)), at_the_end)
    assert high is None and low is not None and low < 16
    of_largest = float(of.kl[-1].mean()) * 1.02
    low, high = bootstrap_ratio(of, FamilyCurve(np.full((1, 20), 8.0), np.full((1, 20), 0.1)), of_largest)
    assert low is None and high is not None and high > 2
    # Where both are outside, a draw says nothing.
    assert bootstrap_ratio(of, of, float(of.kl[0].mean())) == (None, None)


def test_other_sequences_or_no_draws_are_refused() -> None:
    of = power_law(0.04, 20, 1)
    with pytest.raises(InputError, match="sequences: methods must be measured on the same, got 19 and 20"):
        bootstrap_ratio(of, power_law(0.04, 19, 1), 0.01)
    with pytest.raises(InputError, match="draws: must be at least 1, got 0"):
        bootstrap_ratio(of, of, 0.01, draws=0)


# The comparison of a report -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quality() -> list[dict[str, Any]]:
    hard = np.random.default_rng(9).normal(0, 0.3, 24)
    ones = np.ones(24)
    return [
        entry("bf16", 16 * ones, 0 * ones),
        entry("fp8", 8 * ones, 0.01 * np.exp(hard)),
        entry("cachegen", 6 * ones, 0.9 * np.exp(hard)),
        entry("cuvee/lossless", 11 * ones, 1e-9 * ones),
        *family("cuvee/layer", power_law(0.04, 24, 1, 0.3, hard)),
        *family("pca/layer", power_law(0.09, 24, 2, 0.3, hard)),
        *family("pca/all", power_law(0.0001, 24, 3, 0.3, hard)),
        entry("cuvee/generic@balanced", 5 * ones, 0.01 * ones),
    ]


def test_families_and_ratios_at_the_kl_of_an_anchor(quality: list[dict[str, Any]]) -> None:
    fp8, cachegen = compare_at_equal_kl(quality, ["fp8", "cachegen"], seed=7)
    assert (fp8["anchor"], fp8["bits_per_value"], fp8["kl"]) == ("fp8", 8, quality[1]["kl"])
    found = {f["family"]: f for f in fp8["families"]}
    assert list(found) == ["cuvee/layer", "pca/layer", "pca/all"]  # a single setting is no curve
    ours = found["cuvee/layer"]
    points = [e for e in quality if e["family"] == "cuvee/layer"]
    kl = fp8["kl"]
    assert ours["bits_per_value"] == bits_at_kl([e["bits_per_value"] for e in points], [e["kl"] for e in points], kl)
    assert ours["bits_per_value"] == pytest.approx(2, rel=0.05)
    assert ours["low"] < ours["bits_per_value"] < ours["high"] and "reason" not in ours
    assert found["pca/all"] == {
        "family": "pca/all", "bits_per_value": None, "low": None, "high": None,
        "reason": f"its curve ends below, at a KL of {np.mean(quality[12]['per_sequence']['kl']):.3g}",
    }  # fmt: skip
    ratios = {(r["of"], r["against"]): r for r in fp8["ratios"]}
    assert list(ratios) == [("cuvee/layer", against) for against in ("fp8", "pca/layer", "pca/all")]
    ratio = ratios["cuvee/layer", "pca/layer"]
    assert (
        ratio["ratio"] == found["pca/layer"]["bits_per_value"] / ours["bits_per_value"] == pytest.approx(1.5, rel=0.03)
    )
    assert 1.4 < ratio["low"] < ratio["ratio"] < ratio["high"] < 1.6
    assert ratios["cuvee/layer", "fp8"]["ratio"] == 8 / ours["bits_per_value"]
    assert ratios["cuvee/layer", "pca/all"]["ratio"] is None
    assert ratios["cuvee/layer", "pca/all"]["reason"] == f"pca/all: {found['pca/all']['reason']}"
    assert all(f["bits_per_value"] is None and "ends below" in f["reason"] for f in cachegen["families"])
    assert all(r["ratio"] is r["low"] is r["high"] is None for r in cachegen["ratios"])


def test_the_intervals_are_those_of_the_bootstrap(quality: list[dict[str, Any]]) -> None:
    entry_ = compare_at_equal_kl(quality, ["fp8"], seed=3, draws=200)[0]
    curves = {f: FamilyCurve.of([e for e in quality if e["family"] == f]) for f in ("cuvee/layer", "pca/layer", "fp8")}
    for ratio in entry_["ratios"][:2]:
        of, against = curves[ratio["of"]], curves[ratio["against"]]
        expected = bootstrap_ratio(of, against, quality[1]["per_sequence"]["kl"], draws=200, seed=3)
        assert (ratio["low"], ratio["high"]) == expected


def test_an_anchor_above_all_curves_and_one_that_lost_nothing(quality: list[dict[str, Any]]) -> None:
    lossless, exact = compare_at_equal_kl(quality, ["cuvee/lossless", "bf16"], seed=1)
    assert all("its curve ends above, at a KL of " in f["reason"] for f in lossless["families"])
    assert all("no place on a logarithmic axis" in f["reason"] for f in exact["families"])
    flat = [quality[1], *family("cuvee/none", FamilyCurve(np.ones((2, 24)), np.zeros((2, 24))))]
    assert compare_at_equal_kl(flat, ["fp8"], 1)[0]["families"][0]["reason"] == "no setting has a KL above zero"


def test_the_comparison_is_json_and_the_seed_decides(quality: list[dict[str, Any]]) -> None:
    first, second, other = (compare_at_equal_kl(quality, ["fp8", "bf16"], seed) for seed in (1, 1, 2))
    assert json.loads(json.dumps(first, allow_nan=False)) == first == second != other
    assert compare_at_equal_kl(quality, [], 1) == []


def test_an_anchor_that_was_not_measured(quality: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="anchors: 'cachgen' was not measured; did you mean 'cachegen'"):
        compare_at_equal_kl(quality, ["fp8", "cachgen"], 1)


# Paired differences -------------------------------------------------------------------------------------------------


def test_some_sequences_are_compared_as_if_they_were_all(quality: list[dict[str, Any]]) -> None:
    chosen = [3, 5, 8, 13, 21]
    alone = [
        entry(e["key"], *(np.array(e["per_sequence"][name])[chosen] for name in ("bits_per_value", "kl")))
        for e in quality
    ]
    assert of_sequences(quality, chosen) == alone
    assert compare_at_equal_kl(of_sequences(quality, chosen), ["fp8"], 1) == compare_at_equal_kl(alone, ["fp8"], 1)
    for wrong in ([], [24], [-1]):
        with pytest.raises(InputError, match="chosen: "):
            of_sequences(quality, wrong)


def test_sizes_are_read_off_each_curve(quality: list[dict[str, Any]]) -> None:
    found = {(e["family"], e["kl"]): e for e in sizes_at_kl(quality, [0.01, 100.0])}
    assert {family for family, _ in found} == {"cuvee/layer", "pca/layer", "pca/all"}  # a single setting is no curve
    ours, theirs = found["cuvee/layer", 0.01], found["pca/layer", 0.01]
    assert ours["bits_per_value"] == pytest.approx(2, rel=0.1) and theirs["bits_per_value"] == pytest.approx(3, rel=0.1)
    assert found["cuvee/layer", 100.0]["bits_per_value"] is None


def test_paired_differences() -> None:
    mean, error = paired_difference([3, 5, 10], [1, 2, 3])  # 2, 3, 7
    assert mean == 4 and error == pytest.approx((7 / 3) ** 0.5)
    assert paired_difference([1.5], [1]) == (0.5, None)
    for other in ([], [1.0, 2.0]):
        with pytest.raises(InputError, match="b: must have as many entries as a"):
            paired_difference(other[:-1], other)
