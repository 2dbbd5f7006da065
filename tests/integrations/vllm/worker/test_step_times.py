"""What a step took on a rank: between its begin and its end, and not if it failed."""

from __future__ import annotations

import pytest
import torch

from cuvee.integrations.vllm.messages import Report
from cuvee.integrations.vllm.worker.step_times import StepTimes

CPU = torch.device("cpu")


def test_steps_are_timed_once_and_failed_ones_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    times = StepTimes()
    for step, seconds, failed in ((1, 0.5, False), (2, 0.25, True), (3, 2.0, False)):
        times.begin(step, CPU)
        now[0] += seconds
        times.end(CPU, failed)
        now[0] += 5.0  # until the next step begins
    times.end(CPU, failed=False)  # none has begun
    assert times.take() == {1: 0.5, 3: 2.0} and times.take() == {}


def test_the_slowest_rank_counts() -> None:
    report = Report([1, 2], step_seconds={1: 0.5, 2: 0.1})
    report.add(Report([1, 2], step_seconds={1: 0.4, 2: 0.3, 7: 1.0}))
    assert report.step_seconds == {1: 0.5, 2: 0.3, 7: 1.0}
