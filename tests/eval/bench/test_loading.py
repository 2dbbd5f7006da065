"""`cuvee bench loading`: links are what they are called, no policy beats the oracle, and the report is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cuvee.codec.errors import InputError
from cuvee.eval.bench.loading.cases import KL, LoadCase
from cuvee.eval.bench.loading.loading_bench import CACHEGEN, ORACLE, OURS, RAW, run_loading_bench, tuned
from cuvee.eval.bench.loading.loading_tables import draw_loading_report, loading_markdown, print_loading_report
from cuvee.eval.bench.loading.policies import best_single, cachegen, computed, fixed, oracle, raw, refined
from cuvee.eval.bench.loading.traces import SPEEDS, STEPPING, TRACES, Trace, make_trace
from cuvee.eval.plots import save_figure
from cuvee.integrations.loading import Compute


def case(
    trace: str = "bursty", mb_per_s: float = 4, tokens: int = 2048, deadline: float = 0.7, **more: Any
) -> LoadCase:
    return LoadCase(trace, 1e6 * mb_per_s, tokens, deadline, **{"latency": 0.002, "kl_max": 0.02, "seed": 3, **more})


@pytest.mark.parametrize("kind", TRACES)
def test_a_trace_carries_its_mean_and_its_inverse_is_right(kind: str) -> None:
    trace = make_trace(kind, 4e6, 1)
    if kind != STEPPING:
        assert trace.mean == pytest.approx(4e6)
    assert (trace.sent(60.0) - trace.sent(0.0)) / 60 == pytest.approx(trace.mean)
    for begin in (-7.3, 0.0, 31.7, 59.99):
        for nbytes in (1e3, 1e6, 3e8):
            end = trace.arrives(begin, nbytes)
            assert end > begin and trace.sent(end) - trace.sent(begin) == pytest.approx(nbytes, rel=1e-6, abs=1e-3)
    again, other = make_trace(kind, 4e6, 1), make_trace(kind, 4e6, 2)
    assert again.sent(11.1) == trace.sent(11.1) != other.sent(11.1)


def test_traces_differ_as_they_are_said_to() -> None:
    def rates(kind: str) -> Any:
        trace = make_trace(kind, 4e6, 5)
        return np.diff([trace.sent(at / 100) for at in range(6000)]) * 100

    assert rates("constant").std() < 0.1 * 4e6
    bursty = rates("bursty")
    assert np.quantile(bursty, 0.1) < 0.2 * np.quantile(bursty, 0.9)
    assert rates("mobile").min() < 0.05 * 4e6
    assert set(np.round(rates(STEPPING)[50::100] / 1e6)) <= set(np.round(np.array(SPEEDS) / 1e6))
    with pytest.raises(InputError, match="kind: must be one of constant"):
        make_trace("carrier pigeon", 1e6, 0)
    with pytest.raises(InputError, match="rates: must be finite and at least 0"):
        Trace(np.zeros(5))


def test_a_silent_link_delivers_when_it_speaks_again() -> None:
    trace = Trace(np.array([0.0, 0.0, 100.0, 0.0, 100.0]) / 0.01)
    assert trace.arrives(0.0, 50) == pytest.approx(0.025)
    assert trace.arrives(0.0, 150) == pytest.approx(0.045)


def test_policies_do_what_they_say() -> None:
    one = case(trace="constant", mb_per_s=16)
    assert computed(one).seconds == one.prefill(0) and computed(one).kl == 0
    assert raw(one).nbytes == 2048 * 23_040 and raw(one).seconds > raw(one).nbytes / 17e6
    for level, kl in enumerate(KL):
        assert fixed(one, level).kl == kl and fixed(one, level).nbytes == one.single[:, level].sum()
    assert best_single(case(deadline=5.0)).kl == KL[2] and best_single(case(deadline=0.01)).kl == KL[0]
    assert best_single(case(deadline=0.5), 0.1).kl == KL[0]
    whole, text = case(deadline=0.5), case(deadline=2.0)
    assert cachegen(text).computed == 1.0, "text is the least lossy choice, if there is time for it"
    assert cachegen(whole).nbytes > 0 and cachegen(whole).computed < 1
    assert cachegen(whole, 0.3).kl > cachegen(whole).kl


@pytest.mark.parametrize("trace", TRACES)
def test_nothing_beats_the_oracle(trace: str) -> None:
    met = 0
    for number, deadline in enumerate((0.15, 0.3, 0.6, 1.2)):
        for mb_per_s in (2, 32):
            one = case(trace, mb_per_s, 1024 * (1 + number % 3), deadline, seed=number)
            bound = oracle(one)
            outcomes = [cachegen(one), best_single(one), *(fixed(one, level) for level in range(3))]
            outcomes.append(refined(one, one.measured_link(), list(Compute)[number % 2]))
            assert outcomes[-1].kl <= 0.02 + 1e-12
            for outcome in outcomes:
                if outcome.seconds <= deadline:
                    met += 1
                    assert bound is not None and bound.kl <= outcome.kl + 1e-12
    assert met > 8


def test_the_oracle_keeps_the_floor() -> None:
    loose, strict = case(deadline=0.2, mb_per_s=8), case(deadline=0.2, mb_per_s=8, kl_max=0.004)
    found = oracle(loose)
    assert found is not None and found.kl > 0.004 and oracle(strict) is None


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return run_loading_bench(2, seed=1, traces=("constant", STEPPING))


def test_the_report(report: dict[str, Any], tmp_path: Path) -> None:
    policies = report["policies"]
    assert report["loads"] == 10 and policies[ORACLE]["met_of_oracle"] == 1.0
    assert policies[OURS]["floor_broken"] == 0 and policies[RAW]["kl"] == 0.0
    assert policies[tuned(CACHEGEN)]["met_of_oracle"] >= policies[CACHEGEN]["met_of_oracle"]
    assert [each["is"] for each in report["groups"]["mb_per_s"]] == [1.0, 4.0, 16.0, 64.0, STEPPING]
    ours, bound = policies[OURS]["kl"], policies[ORACLE]["kl"]
    assert report["targets"]["kl_over"][ORACLE] == pytest.approx(ours / bound)
    console = Console(record=True, width=200)
    print_loading_report(report, console)
    text, markdown = console.export_text(), loading_markdown(report)
    for shown in (*policies, "By kind of link", "By mean MB/s", "Ratios"):
        assert shown in text and shown in markdown
    path = tmp_path / "loading.svg"
    save_figure(draw_loading_report(report), path)
    drawn = path.read_text()
    assert "mean bandwidth, MB/s" in drawn and OURS in drawn and tuned(CACHEGEN) in drawn


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (run_loading_bench(1, seed=seed, traces=(STEPPING,)) for seed in (1, 1, 2))
    assert again["policies"] == first["policies"] != other["policies"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loads": 0}, "loads: must be at least 1"),
        ({"kl_max": 0.0}, "kl_max: must be above 0"),
        ({"traces": ("smoke",)}, "traces: must be among constant"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_loading_bench(**options)
