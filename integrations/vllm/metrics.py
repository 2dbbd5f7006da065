"""`Recorder`: counts what the connector does, one recorder per process.

    worker, rank 0   Recorder --drain--+
    worker, rank 1   Recorder --drain--+--> merge --> absorb, scheduler's Recorder --drain--> API process: Prometheus

Recorders exchange plain dicts of numbers, which hold changes only. Their keys are `name|label|rank`: the label's value
if the metric has a label, and the rank for a gauge that ranks add up. A histogram's label is the observed value to 3
digits, and its number the count of that value; so all but gauges merge by addition. Totals count observations without
their values, so they do not grow with the load.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from cuvee.integrations.vllm.metric_table import METRICS, Metric

if TYPE_CHECKING:
    from cuvee.integrations.stores.base import TierCounters

Data = dict[str, float]

_OPERATIONS = "store_operations"
# The metric of each field of TierCounters, and the result that it counts.
_OF_TIERS = {
    "hits": (_OPERATIONS, "hit"), "misses": (_OPERATIONS, "miss"), "corrupt": (_OPERATIONS, "corrupt"),
    "errors": (_OPERATIONS, "error"), "skipped": (_OPERATIONS, "skipped"), "dropped": (_OPERATIONS, "dropped"),
    "hit_bytes": ("hit_bytes", ""), "put_bytes": ("put_bytes", ""),
    "queued": ("store_queue_depth", ""), "bytes": ("store_bytes", ""),
}  # fmt: skip


def metric_of(key: str) -> tuple[Metric, str]:
    """Return the metric of a key of `Recorder.drain`, and its label's value (for a histogram: the observation)."""
    name, label, _ = key.split("|")
    return METRICS[name], label


def merge(first: Mapping[str, float], second: Mapping[str, float]) -> Data:
    """Merge two drained dicts, of two ranks or of two intervals, into a new one.

    Counters and histograms add up. A gauge takes the second value: gauges that ranks add up have a key per rank.
    """
    merged = dict(first)
    for key, value in second.items():
        merged[key] = value if metric_of(key)[0].kind == "gauge" else merged.get(key, 0) + value
    return merged


def collect(data: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return the figures of a drained dict by name and label, summed over ranks."""
    figures: dict[tuple[str, str], float] = {}
    for key, value in data.items():
        metric, label = metric_of(key)
        figures[metric.name, label] = figures.get((metric.name, label), 0) + value
    return figures


class Recorder:
    """Counts what happens in one process. Thread-safe.

    Args:
        rank: tensor-parallel rank of a worker; 0 for the scheduler.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._totals: Data = {}
        self._pending: Data = {}
        self._ranks: set[str] = set()  # that have gauges of their own
        self._stores: dict[str, dict[str, float]] = {}  # figures of tiers, as counted so far

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add `value` to a counter, or one observation of `value` seconds to a histogram.

        Raises:
            KeyError: no such counter or histogram, or a label it does not take.
        """
        metric = _declared(name, label)
        if metric.kind == "histogram":
            self._add(metric, f"{name}|{value:.3g}|", 1)
        elif value:
            self._add(metric, f"{name}|{label}|", value)

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge.

        Raises:
            KeyError: no such gauge, or a label it does not take.
        """
        metric = _declared(name, label)
        if metric.ranks == "sum":
            self._set(f"{name}|{label}|{self._rank}", value)
        elif self._rank == 0:
            self._set(f"{name}|{label}|", value)

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
        """Add what another recorder drained."""
        for key, value in data.items():
            metric, _ = metric_of(key)
            if metric.kind == "gauge":
                self._set(key, value)
            else:
                self._add(metric, key, value)

    def drain(self) -> Data | None:
        """Return the changes since the last drain, or None; a gauge only if it changed, then for every rank."""
        with self._lock:
            data, self._pending = self._pending, {}
            for gauge in {key.rpartition("|")[0] for key in data if not key.endswith("|")}:
                keys = [f"{gauge}|{rank}" for rank in self._ranks]
                data |= {key: self._totals[key] for key in keys if key in self._totals}
        return data or None

    def totals(self) -> dict[tuple[str, str], float]:
        """Return all figures since the start by name and label, as `collect`: of this process, whatever its rank, and
        those it absorbed; of a histogram the number of observations.
        """
        with self._lock:
            return collect(self._totals)

    def summary(self) -> str:
        """Return everything that was counted since the start, but not gauges, in one line."""
        totals, parts = self.totals(), []
        for metric in METRICS.values():
            own = [f"{_shown(value)} {label}".strip() for (name, label), value in totals.items() if name == metric.name]
            if own and metric.kind != "gauge":
                parts.append(f"{metric.name} {', '.join(own)}")
        return "; ".join(parts) or "nothing counted"

    def _add(self, metric: Metric, key: str, value: float) -> None:
        with self._lock:
            total = f"{metric.name}||" if metric.kind == "histogram" else key
            self._totals[total] = self._totals.get(total, 0) + value
            if metric.ranks == "sum" or self._rank == 0:
                self._pending[key] = self._pending.get(key, 0) + value

    def _set(self, key: str, value: float) -> None:
        with self._lock:
            if self._totals.get(key) != value:
                self._totals[key] = self._pending[key] = value
                if rank := key.rpartition("|")[2]:
                    self._ranks.add(rank)


def interval_figures(data: Mapping[str, float]) -> dict[str, int | float]:
    """Return the figures of an interval for the engine's log line; `data` was drained in the interval."""
    figures = collect(data)

    def total(name: str, *results: str) -> int:
        """Add up a metric's figures, or those of the results that are named."""
        of_name = ((label.rpartition(":")[2], value) for (of, label), value in figures.items() if of == name)
        return int(sum(value for result, value in of_name if not results or result in results))

    line: dict[str, int | float] = {}
    if loads := total("load_seconds"):
        line |= {"loads": loads, "loaded tokens": total("loaded_tokens")}
    if asked := total(_OPERATIONS, "hit", "miss"):
        line["chunk hit rate"] = round(total(_OPERATIONS, "hit") / asked, 3)
    if stored := total("stored_bytes"):
        raw = total("raw_bytes")
        line |= {"raw MB": round(raw / 1e6, 3), "stored MB": round(stored / 1e6, 3), "ratio": round(raw / stored, 2)}
    if ("pending_bytes", "") in figures:
        line["pending MB"] = round(total("pending_bytes") / 1e6, 3)
    line["failures"] = total("failures") + total(_OPERATIONS, "error", "corrupt")
    line["not stored"] = total("stores_skipped") + total(_OPERATIONS, "dropped", "skipped")
    return line


def _declared(name: str, label: str) -> Metric:
    metric = METRICS[name]
    label.encode()  # an error for what cannot be sent: lone surrogates
    first, _, last = label.rpartition(":") if metric.second else (label, "", label)
    if bool(first) != bool(metric.label) or (metric.values and last not in metric.values) or "|" in label:
        raise KeyError(f"{name!r} with the label {label!r} is not in metric_table")
    return metric


def _shown(value: float) -> str:
    """Show a figure in the log: whole, or to 3 digits if it is small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
