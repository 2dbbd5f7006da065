"""vLLM's hooks for a connector's figures: `CuveeStats` for the log line, `CuveePrometheus` for `/metrics`.

Both run in the API process and receive, at every engine step, the figures that the scheduler's `Recorder` drained.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from cuvee.codec.errors import InputError
from cuvee.integrations.stores.urls import tier_names
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.metric_table import METRICS, Metric
from cuvee.integrations.vllm.metrics import figures, merge, metric_of

NAMESPACE = "vllm:cuvee_"


class CuveeStats(KVConnectorStats):
    """The figures of an interval; `data` comes from `Recorder.drain`."""

    def reset(self) -> None:
        """Start a new interval."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> CuveeStats:
        """Add later figures. Changes neither dict, because Prometheus may be reading them."""
        self.data = merge(self.data, other.data, replace=True)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for the log."""
        return figures(self.data)

    def is_empty(self) -> bool:
        """Return whether there are no figures: the engine drops what is empty, so a gauge alone is not."""
        return not self.data


class CuveePrometheus(KVConnectorPromMetrics):
    """The metrics of `METRICS`, each with vLLM's labels and its own, as `vllm:cuvee_<name>` (counters: `…_total`).

    The arguments are vLLM's: classes of metrics (prometheus_client's or Ray's), names of its labels, and their values
    by engine. Counters start at zero, so that an alarm on a rate works; gauges appear once they are known.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {metric.name: self._register(metric) for metric in METRICS.values()}
        tiers = _tiers(vllm_config)
        for metric in METRICS.values():
            labels = metric.values or ("",)
            if metric.label == "tier":
                labels = tuple(f"{tier}:{value}" if value else tier for tier in tiers for value in labels)
            for engine in per_engine_labelvalues if metric.kind != "gauge" else ():
                for label in labels:
                    self._child(metric, label, engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the figures of an engine."""
        for key, value in transfer_stats_data.items():
            metric, label = metric_of(key)
            if metric.kind == "counter":
                self._child(metric, label, engine_idx).inc(value)
            elif metric.kind == "gauge":
                self._child(metric, label, engine_idx).set(value)
            else:
                child = self._child(metric, "", engine_idx)
                for _ in range(int(value)):
                    child.observe(float(label))

    def _register(self, metric: Metric) -> Any:
        extra: dict[str, Any] = {}
        if metric.kind == "counter":
            kind = self._counter_cls
        elif metric.kind == "gauge":
            # Each of several API processes gets some of the figures: the latest value is the right one.
            kind, extra = self._gauge_cls, {"multiprocess_mode": "mostrecent"}
        else:
            kind, extra = self._histogram_cls, {"buckets": list(metric.buckets)}
        labelnames = [*self._labelnames, *filter(None, (metric.label, metric.second))]
        return kind(name=NAMESPACE + metric.name, documentation=metric.help, labelnames=labelnames, **extra)

    def _child(self, metric: Metric, label: str, engine: int) -> Any:
        """Return the metric for these label values; prometheus_client keeps one object for each."""
        own = label.rsplit(":", 1) if metric.second else [label] * bool(label)
        return self._metrics[metric.name].labels(*self.per_engine_labelvalues[engine], *own)


def _tiers(vllm_config: Any) -> list[str]:
    """Return the names of the store's tiers; none if its URL is invalid, which the engine's start reports."""
    with suppress(InputError, TypeError):
        return tier_names(vllm_config.kv_transfer_config.kv_connector_extra_config.get("store", Options().store))
    return []
