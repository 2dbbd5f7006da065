"""`CuveeStats` and `CuveePrometheus` in vLLM's own machinery: aggregator, serialization, loggers, `/metrics` text.

And what vLLM imports before its workers start.

Importing vLLM warns and patches torch, so it happens in a process of its own: this file as a script
runs every `check_…` below and prints what became of each; the tests read that.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

LABELS = ["model_name", "engine"]


def recorded() -> dict[str, float]:
    """What a worker drained after a load, a store and a look at its tiers."""
    from cuvee.integrations.stores.base import TierCounters
    from cuvee.integrations.vllm.metrics import Recorder

    recorder = Recorder()
    recorder.count("raw_bytes", 1000)
    recorder.count("stored_bytes", 250)
    recorder.count("loaded_tokens", 512)
    recorder.count("load_seconds", 0.012)
    recorder.count("load_seconds", 0.012)
    recorder.count("load_seconds", 3.0)
    recorder.count("failures", 2, "load")
    recorder.record_store({"memory": TierCounters(hits=3, misses=1), "disk": TierCounters(hits=1)})
    recorder.gauge("pending_bytes", 4)
    recorder.gauge("store_bytes", 9e4, "disk")
    data = recorder.drain()
    assert data is not None
    return data


def exporter(registry: Any, engines: int = 1) -> Any:
    """A CuveePrometheus that registers in `registry`."""
    from prometheus_client import Counter, Gauge, Histogram

    from cuvee.integrations.vllm.prometheus import CuveePrometheus

    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    values: dict[int, list[object]] = {engine: ["tiny", str(engine)] for engine in range(engines)}
    return CuveePrometheus(SimpleNamespace(kv_transfer_config=None), types, LABELS, values)


def samples(registry: Any) -> dict[str, float]:
    """Rendered samples, of ours, by `name{labels}`."""
    from prometheus_client import generate_latest

    lines = generate_latest(registry).decode().splitlines()
    ours = [line for line in lines if line.startswith("vllm:cuvee_") and "_created" not in line]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in ours)}


def sample(name: str, engine: int = 0, /, **labels: str) -> str:
    """How a sample is rendered: labels in alphabetical order."""
    labels |= {"model_name": "tiny", "engine": str(engine)}
    rendered = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"vllm:cuvee_{name}{{{rendered}}}"


def own_labels(metric: Any, value: str = "") -> dict[str, str]:
    """Labels that a metric takes: the given value of the last one, or the first that is permitted."""
    last = value or (metric.values or ("disk",))[0]
    if metric.second:
        return {metric.label: "disk", metric.second: last}
    return {metric.label: last} if metric.label else {}


# Checks: each runs in the script, in this order -----------------------------------------------------------------


def check_the_connector_is_imported_without_numba() -> None:
    """vLLM's workers call `vars` on all modules when they start on a CPU, which fails for a module of llvmlite's."""
    compilers = {"numba", "llvmlite"}
    assert not compilers & set(sys.modules), "another check came first"
    importlib.import_module("cuvee.integrations.vllm.connector")
    assert not compilers & set(sys.modules)


def check_what_is_recorded_is_rendered() -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    metrics = exporter(registry)
    for _ in range(2):
        metrics.observe(recorded())
    rendered = samples(registry)
    for name, value in {
        sample("raw_bytes_total"): 2000,
        sample("stored_bytes_total"): 500,
        sample("loaded_tokens_total"): 1024,
        sample("failures_total", kind="load"): 4,
        sample("failures_total", kind="encode"): 0,
        sample("store_operations_total", tier="memory", result="hit"): 6,
        sample("store_operations_total", tier="disk", result="hit"): 2,
        sample("store_operations_total", tier="memory", result="miss"): 2,
        sample("pending_bytes"): 4,
        sample("store_bytes", tier="disk"): 9e4,
        sample("load_seconds_bucket", le="0.01"): 0,
        sample("load_seconds_bucket", le="0.02"): 4,
        sample("load_seconds_bucket", le="2.0"): 4,
        sample("load_seconds_bucket", le="5.0"): 6,
        sample("load_seconds_count"): 6,
    }.items():
        assert rendered[name] == value, (name, rendered.get(name))
    assert abs(rendered[sample("load_seconds_sum")] - 6.048) < 1e-9


def check_counters_start_at_zero_and_gauges_when_known() -> None:
    from prometheus_client import CollectorRegistry

    from cuvee.integrations.vllm.metric_table import METRICS

    registry = CollectorRegistry()
    exporter(registry)
    rendered = samples(registry)
    assert set(rendered.values()) == {0}
    for metric in METRICS.values():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        expected = metric.kind != "gauge" and not metric.second and (bool(metric.values) or not metric.label)
        for value in metric.values or ("",):
            labels = own_labels(metric, value)
            assert (sample(metric.name + suffix, **labels) in rendered) is expected, metric.name


def check_every_metric_can_be_observed() -> None:
    from prometheus_client import CollectorRegistry

    from cuvee.integrations.vllm.metric_table import METRICS
    from cuvee.integrations.vllm.metrics import Recorder

    registry = CollectorRegistry()
    metrics = exporter(registry)
    recorder = Recorder()
    for metric in METRICS.values():
        record = recorder.gauge if metric.kind == "gauge" else recorder.count
        record(metric.name, 1, ":".join(own_labels(metric).values()))
    metrics.observe(recorder.drain())
    rendered = samples(registry)
    for metric in METRICS.values():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
        assert rendered[sample(metric.name + suffix, **own_labels(metric))] == 1, metric.name


def check_a_second_exporter_of_a_process_shares_the_first() -> None:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from cuvee.integrations.vllm.prometheus import CuveePrometheus

    def make(engine: int) -> Any:
        types = {kind: kind for kind in (Counter, Gauge, Histogram)}
        return CuveePrometheus(SimpleNamespace(kv_transfer_config=None), types, LABELS, {engine: ["tiny", str(engine)]})

    first, second = make(0), make(1)
    first.observe(recorded(), 0)
    second.observe(recorded(), 1)
    rendered = samples(REGISTRY)
    assert rendered[sample("raw_bytes_total", 0)] == rendered[sample("raw_bytes_total", 1)] == 1000
    unregister_vllm_metrics()  # vLLM does so before it makes a logger
    assert samples(REGISTRY) == {}
    make(1).observe(recorded(), 1)
    rendered = samples(REGISTRY)
    assert rendered[sample("raw_bytes_total", 1)] == 1000
    assert sample("raw_bytes_total", 0) not in rendered
    unregister_vllm_metrics()

    registry = CollectorRegistry()
    Counter("vllm:cuvee_raw_bytes", "Somebody else's.", ["other"], registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        exporter(registry)


def check_stats_as_vllm_uses_them() -> None:
    from cuvee.integrations.vllm.prometheus import CuveeStats

    stats = CuveeStats()
    assert stats.is_empty() and stats.to_dict() == {}
    later = CuveeStats({"raw_bytes||": 1, "pending_bytes||0": 2})
    assert stats.aggregate(later) is stats
    assert stats.to_dict() == {"raw_bytes||": 1, "pending_bytes||0": 2} and not stats.is_empty()
    stats.aggregate(CuveeStats({"raw_bytes||": 1, "pending_bytes||0": 1}))
    assert stats.to_dict() == {"raw_bytes||": 2, "pending_bytes||0": 1}
    assert later.to_dict() == {"raw_bytes||": 1, "pending_bytes||0": 2}
    assert stats.reduce() == {"failures": 0, "not stored": 0, "pending MB": 0}
    stats.reset()
    assert stats.is_empty() and CuveeStats().is_empty()


def check_from_the_scheduler_to_the_text_and_the_log() -> None:
    from prometheus_client import REGISTRY
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from cuvee.integrations.vllm.prometheus import CuveePrometheus, CuveeStats

    class Connector(KVConnectorBase_V1):  # type: ignore[misc, unused-ignore] # an untyped base where vLLM is absent
        """The hooks of CuveeConnector that make figures visible."""

        @classmethod
        def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CuveeStats:
            return CuveeStats(data or {})

        @classmethod
        def build_prom_metrics(cls, *arguments: Any) -> CuveePrometheus:
            return CuveePrometheus(*arguments)

    KVConnectorFactory._registry["CuveeHooks"] = lambda: Connector
    config = KVTransferConfig(kv_connector="CuveeHooks", kv_role="kv_both")
    engine_config: Any = SimpleNamespace(kv_transfer_config=config)
    prometheus = KVConnectorProm(engine_config, LABELS, {0: ["tiny", "0"]})
    logging = KVConnectorLogging(config)

    steps: list[dict[str, float]] = [recorded(), recorded(), {"pending_bytes||0": 0}]
    for step in steps:
        sent = MsgpackEncoder().encode(SchedulerStats(kv_connector_stats=CuveeStats(dict(step)).to_dict()))
        stats = MsgpackDecoder(SchedulerStats).decode(sent)
        assert stats.kv_connector_stats == step
        logging.observe(stats.kv_connector_stats)  # vLLM logs first, and both get the same dict
        prometheus.observe(stats.kv_connector_stats)
    rendered = samples(REGISTRY)
    unregister_vllm_metrics()
    assert rendered[sample("raw_bytes_total")] == 2000
    assert rendered[sample("load_seconds_count")] == 6
    assert rendered[sample("pending_bytes")] == 0

    lines: list[str] = []
    logging.log(lambda text, figures: lines.append(text % figures))
    assert lines == [
        "KV Transfer metrics: loads=6, loaded tokens=1024, chunk hit rate=0.8, raw MB=0.002, stored MB=0.001, "
        "ratio=4.0, pending MB=0.0, failures=4, not stored=0"
    ]
    logging.log(lines.append)
    assert len(lines) == 1  # nothing came


def check_our_log_has_a_list_of_handlers_of_its_own() -> None:
    """What the application adds to our logger does not hear vLLM as well."""
    import logging

    connector = importlib.import_module("cuvee.integrations.vllm.connector")
    ours, engine = logging.getLogger("cuvee"), logging.getLogger("vllm")
    shared, own = logging.NullHandler(), logging.NullHandler()
    engine.addHandler(shared)
    ours.handlers = []
    connector._join_log()
    assert shared in ours.handlers == engine.handlers
    ours.addHandler(own)
    assert own not in engine.handlers
    engine.removeHandler(shared)
    ours.handlers = []


def check_several_api_processes_add_up() -> None:
    from prometheus_client import CollectorRegistry, multiprocess, values

    def serve(process: int, depth: int) -> None:
        values.ValueClass = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call, unused-ignore]
        metrics = exporter(CollectorRegistry())
        metrics.observe(recorded())
        metrics.observe({"pending_bytes||0": depth})

    before = values.ValueClass
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # as vLLM sets it for several API servers
        try:
            serve(1, 7)
            serve(2, 5)
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call, unused-ignore]
            rendered = samples(registry)
        finally:
            values.ValueClass = before
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]
    assert rendered[sample("raw_bytes_total")] == 2000
    assert rendered[sample("load_seconds_count")] == 6
    assert rendered[sample("pending_bytes")] == 5


CHECKS: dict[str, Callable[[], None]] = {name: check for name, check in globals().items() if name.startswith("check_")}


# Tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What became of each check: empty, or a traceback."""
    from tests.integrations.vllm.engines import need_vllm  # not where this file is run as a script

    need_vllm()
    environment = {key: value for key, value in os.environ.items() if key != "PROMETHEUS_MULTIPROC_DIR"}
    environment["VLLM_NO_USAGE_STATS"] = "1"
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_in_vllm(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


def run_checks() -> dict[str, str]:
    """What became of each check."""
    found: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(run_checks()))
