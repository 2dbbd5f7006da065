"""`Recorder`: what is counted, what travels, and how ranks and intervals become one."""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import fields
from functools import reduce
from typing import Any

import pytest

from cuvee.integrations.stores.base import TierCounters
from cuvee.integrations.vllm.metric_table import METRICS
from cuvee.integrations.vllm.metrics import Recorder, merge

# Recording --------------------------------------------------------------------------------------------------------


def test_drains_what_came_since_the_last_time() -> None:
    recorder = Recorder()
    assert recorder.drain() is None
    recorder.count("loaded_tokens")
    recorder.count("loaded_tokens", 2)
    recorder.count("lookups", label="hit")
    recorder.count("raw_bytes", 0)
    for seconds in (0.0123456, 0.0123449, 2.5):
        recorder.count("load_seconds", seconds)
    assert recorder.drain() == {
        "loaded_tokens|": 3, "lookups|hit": 1, "load_seconds|0.0123": 2, "load_seconds|2.5": 1
    }  # fmt: skip
    assert recorder.drain() is None
    recorder.count("loaded_tokens")
    assert recorder.drain() == {"loaded_tokens|": 1}
    assert recorder.totals() == {("loaded_tokens", ""): 4, ("lookups", "hit"): 1, ("load_seconds", ""): 3}


def test_what_is_kept_does_not_grow_with_the_observations() -> None:
    worker, scheduler = Recorder(), Recorder()
    for index in range(50_000):
        worker.count("lookup_seconds", 1e-6 * 1.0004**index)
        if index % 1000 == 0:
            scheduler.absorb(worker.drain() or {})
    scheduler.absorb(worker.drain() or {})
    assert worker.totals() == scheduler.totals() == {("lookup_seconds", ""): 50_000}


def test_the_value_of_a_gauge_travels() -> None:
    recorder = Recorder()
    for values, sent in (([0], 0), ([0], None), ([3, 5], 5), ([2], 2)):
        for value in values:
            recorder.gauge("pending_bytes", value)
        assert recorder.drain() == (None if sent is None else {"pending_bytes|": sent})
    assert recorder.drain(gauges=True) == {"pending_bytes|": 2}


@pytest.mark.parametrize(
    ("name", "label"),
    [("load", ""), ("loaded_tokens", "disk"), ("hit_bytes", ""), ("hit_bytes", "a|b"), ("lookups", "no")],
)
def test_what_is_not_in_the_table_is_an_error(name: str, label: str) -> None:
    recorder = Recorder()
    with pytest.raises(KeyError, match=f"{name}' .*is not in metric_table"):
        recorder.count(name, 1, label)
    assert recorder.drain() is None


def test_threads_lose_nothing() -> None:
    recorder = Recorder()
    drained: list[dict[str, float]] = []

    def run() -> None:
        for _ in range(500):
            recorder.count("stored", label="chunk")
            if data := recorder.drain():
                drained.append(data)

    threads = [threading.Thread(target=run) for _ in range(8)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sum(data["stored|chunk"] for data in drained) == 4000
    assert recorder.totals()["stored", "chunk"] == 4000


# Stores -----------------------------------------------------------------------------------------------------------


def test_every_metric_of_tiers_is_a_figure_of_each() -> None:
    recorder = Recorder()
    recorder.record_store({"disk": TierCounters(**{field.name: 7 for field in fields(TierCounters)})})
    totals = recorder.totals()
    assert set(totals.values()) == {7}
    assert {label.partition(":")[0] for _, label in totals} == {"disk"}
    assert {label[5:] for name, label in totals if name == "store_operations"} == set(
        METRICS["store_operations"].values
    )
    assert {name for name, _ in totals} == {name for name, metric in METRICS.items() if metric.label == "tier"}


def test_a_store_opened_anew_starts_from_zero() -> None:
    recorder = Recorder()
    recorder.record_store({"memory": TierCounters(hits=10, misses=5)})
    recorder.record_store({"memory": TierCounters(hits=2, misses=6)})
    assert recorder.totals()["store_operations", "memory:hit"] == 12
    assert recorder.totals()["store_operations", "memory:miss"] == 6


@pytest.mark.parametrize("figure", [None, -1, math.nan, math.inf, 10**400, "abc", []], ids=repr)
def test_a_figure_that_is_none_is_left_out_and_the_next_one_counts(figure: Any) -> None:
    recorder = Recorder()
    for hits in (5, figure, 7):
        recorder.record_store({"redis": TierCounters(hits=hits, bytes=figure, entries=12)})
    assert recorder.drain() == {"store_operations|redis:hit": 7, "store_queue_depth|redis": 0}


# Ranks and intervals ----------------------------------------------------------------------------------------------


def worker(rank: int) -> Recorder:
    recorder = Recorder(rank)
    recorder.count("loaded_tokens", 512)
    recorder.count("load_seconds", 0.1 + rank)
    recorder.count("loaded", 2, "chunk")
    recorder.count("raw_bytes", 1000)
    recorder.count("stored_bytes", 100 + 100 * rank)
    recorder.gauge("pending_bytes", 3 + rank)
    recorder.gauge("store_bytes", 1e6 + rank, "disk")
    return recorder


def test_the_scheduler_sends_on_the_gauges_of_all_ranks() -> None:
    """Whoever reads what it sends, and whichever rank's has changed. Of what all ranks do alike, the first speaks."""
    scheduler = Recorder()
    ranks = [worker(0), worker(1)]

    def step() -> dict[str, float]:
        return reduce(merge, (rank.drain(gauges=True) or {} for rank in ranks))

    scheduler.absorb(step())
    totals = scheduler.totals()
    assert (totals["loaded_tokens", ""], totals["load_seconds", ""], totals["raw_bytes", ""]) == (512, 1, 2000)
    assert totals["loaded", "chunk"] == 4 and ranks[1].totals()["loaded_tokens", ""] == 512, "of its own process"
    sent = scheduler.drain() or {}
    assert (sent["pending_bytes|"], sent["store_bytes|disk"]) == (7, 1e6)
    scheduler.absorb(step())
    assert scheduler.drain() is None
    ranks[1].gauge("pending_bytes", 0)
    step()  # a report that nobody gets
    scheduler.absorb(step())
    assert scheduler.drain() == {"pending_bytes|": 3}
    ranks[0] = Recorder()  # another process takes its place
    scheduler.absorb(step())
    assert scheduler.drain() == {"pending_bytes|": 0}
    assert merge({"pending_bytes|": 7, "raw_bytes|": 1}, {"pending_bytes|": 3, "raw_bytes|": 1}, replace=True) == {
        "pending_bytes|": 3, "raw_bytes|": 2
    }  # fmt: skip


# Words ------------------------------------------------------------------------------------------------------------


def test_the_summary_is_one_line() -> None:
    recorder = Recorder()
    recorder.gauge("pending_bytes", 7)
    assert recorder.summary() == "nothing counted"
    recorder.count("raw_bytes", 1_100_000_000)
    recorder.count("stored", 1024, "chunk")
    recorder.count("stored", 7, "tail")
    for seconds in (0.1, 0.1, 0.4):
        recorder.count("load_seconds", seconds)
    recorder.record_store({"memory": TierCounters(hits=500, misses=20), "disk": TierCounters(errors=2)})
    assert recorder.summary() == (
        "load_seconds count 3; raw_bytes 1,100,000,000; store_operations disk:error 2; "
        "store_operations memory:hit 500; store_operations memory:miss 20; stored chunk 1,024; stored tail 7"
    )
