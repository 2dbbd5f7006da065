"""`Recorder`: counts what the connector does, one recorder per process.

    worker, rank 0   Recorder --drain--+
    worker, rank 1   Recorder --drain--+--> merge --> absorb, scheduler's Recorder --drain--> API process: Prometheus

Recorders exchange plain dicts of numbers. Their keys are `name|label`: the label's value if the metric has one. A
counter's number is its change. A histogram's label is the observed value to 3 digits, and its number the count of that
value. A gauge's number is its value, which workers send with every report: a lost one leaves nothing wrong. What ranks
send adds up. Totals count observations without their values, so they do not grow with the load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cuvee.codec.support.suggest import suggestion
from cuvee.integrations.vllm.metric_table import METRICS, Metric

if TYPE_CHECKING:
    from cuvee.integrations.stores.base import TierCounters

Data = dict[str, float]

_OPERATIONS = "store_operations"
# The metric of each field of TierCounters, and the result that it counts.
_OF_TIERS = {
    "hits": (_OPERATIONS, "hit"), "misses": (_OPERATIONS, "miss"), "corrupt": (_OPERATIONS, "corrupt"),
    "errors": (_OPERATIONS, "error"), "skipped": (_OPERATIONS, "skipped"), "dropped": (_OPERATIONS, "dropped"),
    "evictions": (_OPERATIONS, "evicted"), "hit_bytes": ("hit_bytes", ""), "put_bytes": ("put_bytes", ""),
    "queued": ("store_queue_depth", ""), "bytes": ("store_bytes", ""),
}  # fmt: skip


def metric_of(key: str) -> tuple[Metric, str]:
    """Return the metric of a key of `Recorder.drain`, and its label's value (for a histogram: the observation)."""
    name, _, label = key.partition("|")
    return METRICS[name], label


def merge(first: Mapping[str, float], second: Mapping[str, float], replace: bool = False) -> Data:
    """Add two drained dicts to a new one; `replace`: gauges take the second one's value."""
    merged = dict(first)
    for key, value in second.items():
        replaced = replace and metric_of(key)[0].kind == "gauge"
        merged[key] = value if replaced else merged.get(key, 0) + value
    return merged


def figures(data: Mapping[str, float]) -> dict[str, int | float]:
    """Return a drained dict, or totals, by the names that they have in the log, with the ratio of what was stored."""
    shown: dict[str, float] = {}
    for key, value in data.items():
        metric, label = metric_of(key)
        name = f"{metric.name} {'count' if metric.kind == 'histogram' else label}".strip()
        shown[name] = shown.get(name, 0) + value
    if shown.get("stored_bytes"):
        shown["ratio"] = shown.get("raw_bytes", 0) / shown["stored_bytes"]
    return {name: round(value, 3) for name, value in sorted(shown.items())}


def summary(data: Mapping[str, float]) -> str:
    """Return `figures` in one line, without gauges."""
    counted = {key: value for key, value in data.items() if metric_of(key)[0].kind != "gauge"}
    return "; ".join(f"{name} {value:,}" for name, value in figures(counted).items()) or "nothing counted"


class Recorder:
    """Counts what happens in one process. Thread-safe.

    Args:
        rank: tensor-parallel rank of a worker; 0 for the scheduler.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.RLock()
        self._totals: Data = {}
        self._pending: Data = {}
        self._gauges: Data = {}  # those that are sent
        self._stores: dict[str, dict[str, float]] = {}  # figures of tiers, as counted so far

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add `value` to a counter, or one observation of `value` seconds to a histogram.

        Raises:
            KeyError: no such counter or histogram, or a label it does not take.
        """
        if _declared(name, label).kind == "histogram":
            self._add(f"{name}|{value:.3g}", 1)
        elif value:
            self._add(f"{name}|{label}", value)

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge.

        Raises:
            KeyError: no such gauge, or a label it does not take.
        """
        _declared(name, label)
        self._set(f"{name}|{label}", value)

    def record_store(self, counters: Mapping[str, TierCounters], fields: Iterable[str] = _OF_TIERS) -> None:
        """Count what a store did since the last call, and set the gauges of its tiers.

        Call it in one place per store: two connectors that share a store would count the same operations twice.

        Args:
            counters: cumulative, from `Store.counters`. A reopened store starts from zero. What is no number that
                can be sent is left out.
            fields: what to count.
        """
        for tier, now in counters.items():
            seen = self._stores.setdefault(tier, {})
            for name in fields:
                value, last = getattr(now, name), seen.get(name)
                if value == last or type(value) is not int or not 0 <= value < 1 << 53:
                    continue  # most often: the rest would take tens of microseconds of every step
                metric, result = _OF_TIERS[name]
                if METRICS[metric].kind == "gauge":
                    self.gauge(metric, value, tier)
                else:
                    new = value if last is None or value < last else value - last
                    self.count(metric, new, f"{tier}:{result}" if result else tier)
                seen[name] = value

    def absorb(self, data: Mapping[str, float]) -> None:
        """Add what the workers drained of one step, and set their gauges."""
        for key, value in data.items():
            (self._set if metric_of(key)[0].kind == "gauge" else self._add)(key, value)

    def drain(self, gauges: bool = False) -> Data | None:
        """Return the changes since the last drain, or None; `gauges`: and all gauges, changed or not."""
        with self._lock:
            data, self._pending = self._pending, {}
            if gauges:
                data |= self._gauges
        return data or None

    def totals(self) -> dict[tuple[str, str], float]:
        """Return all figures since the start by name and label: of this process, whatever its rank, and those it
        absorbed; of a histogram the number of observations.
        """
        with self._lock:
            several = [(*metric_of(key), value) for key, value in self._totals.items()]
        return {(metric.name, label): value for metric, label, value in several}

    def summary(self) -> str:
        """Return what was counted since the start in one line."""
        with self._lock:
            return summary(self._totals)

    def _add(self, key: str, value: float) -> None:
        metric, _ = metric_of(key)
        with self._lock:
            total = f"{metric.name}|" if metric.kind == "histogram" else key
            self._totals[total] = self._totals.get(total, 0) + value
            if self._sent(metric):
                self._pending[key] = self._pending.get(key, 0) + value

    def _set(self, key: str, value: float) -> None:
        with self._lock:
            if value != self._totals.get(key):
                self._totals[key] = value
                if self._sent(metric_of(key)[0]):
                    self._gauges[key] = self._pending[key] = value

    def _sent(self, metric: Metric) -> bool:
        return metric.ranks == "sum" or self._rank == 0


def _declared(name: str, label: str) -> Metric:
    if name not in METRICS:
        raise KeyError(f"{name!r} is not in metric_table: {suggestion(name, METRICS)}")
    metric = METRICS[name]
    label.encode()  # an error for what cannot be sent: lone surrogates
    first, _, last = label.rpartition(":") if metric.second else (label, "", label)
    if bool(first) != bool(metric.label) or (metric.values and last not in metric.values) or "|" in label:
        raise KeyError(f"{name!r} with the label {label!r} is not in metric_table")
    return metric
