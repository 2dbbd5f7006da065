"""`CuveeStats` and `CuveePrometheus` in vLLM's own machinery: aggregator, serialization, loggers, `/metrics` text."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integrations.vllm.engines import need_vllm
from tests.integrations.vllm_tier.real_tiers import real

from cuvee.integrations.stores.base import TierCounters
from cuvee.integrations.vllm.metric_table import METRICS
from cuvee.integrations.vllm.metrics import Recorder

LABELS = ["model_name", "engine"]


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package prometheus_client, which comes with vLLM; afterwards there are no metrics of vLLM."""
    need_vllm()
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    yield real("prometheus_client")
    real("vllm.v1.metrics.prometheus").unregister_vllm_metrics()


def recorded() -> dict[str, float]:
    """What a worker drained after a load, a store and a look at its tiers."""
    recorder = Recorder()
    recorder.count("raw_bytes", 1000)
    recorder.count("stored_bytes", 250)
    recorder.count("loaded_tokens", 512)
    for seconds in (0.012, 0.012, 3.0):
        recorder.count("load_seconds", seconds)
    recorder.count("failures", 2, "load")
    recorder.record_store({"memory": TierCounters(hits=3, misses=1), "disk": TierCounters(hits=1, corrupt=1)})
    recorder.count("store_operations", 5, "disk:dropped")
    recorder.gauge("pending_bytes", 4)
    recorder.gauge("store_bytes", 9e4, "disk")
    data = recorder.drain()
    assert data is not None
    return data


def exporter(registry: Any, engine: int = 0) -> Any:
    """A CuveePrometheus that registers in `registry`; None: in that of the process, with vLLM's own classes."""
    client = real("prometheus_client")
    kinds = (client.Counter, client.Gauge, client.Histogram)
    types = {kind: kind if registry is None else partial(kind, registry=registry) for kind in kinds}
    kind = real("cuvee.integrations.vllm.prometheus").CuveePrometheus
    transfer = SimpleNamespace(kv_connector_extra_config={"store": ["memory://", "file:///kv"]})
    return kind(
        SimpleNamespace(kv_transfer_config=transfer),
        types,
        LABELS,
        {engine: ["tiny", str(engine)]},
    )


def samples(registry: Any) -> dict[str, float]:
    """Rendered samples, of ours, by `name{labels}`."""
    lines = real("prometheus_client").generate_latest(registry).decode().splitlines()
    ours = [line for line in lines if line.startswith("vllm:cuvee_") and "_created" not in line]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in ours)}


def sample(name: str, engine: int = 0, /, **labels: str) -> str:
    """How a sample is rendered: labels in alphabetical order."""
    labels |= {"model_name": "tiny", "engine": str(engine)}
    rendered = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    return f"vllm:cuvee_{name}{{{rendered}}}"


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_every_metric_is_rendered_from_the_start_or_once_it_is_known(metric: Any, client: Any) -> None:
    """Counters start at zero, so that an alarm on a rate works; gauges appear once they are known."""
    registry, recorder = client.CollectorRegistry(), Recorder()
    metrics = exporter(registry)
    suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind]
    starts = metric.kind != "gauge"
    expected = {}
    for value in metric.values or ("disk",):
        labels = {metric.label: "disk", metric.second: value} if metric.second else {metric.label: value}
        labels = {name: said for name, said in labels.items() if name}
        expected[sample(metric.name + suffix, **labels)] = 1.0
        (recorder.gauge if metric.kind == "gauge" else recorder.count)(metric.name, 1, ":".join(labels.values()))
    before = samples(registry)
    assert set(before.values()) == {0} and all((name in before) is starts for name in expected)
    metrics.observe(recorder.drain())
    assert expected.items() <= samples(registry).items()


def test_an_engine_made_anew_in_its_process_has_metrics_of_its_own(client: Any) -> None:
    exporter(None, 0).observe(recorded(), 0)
    real("vllm.v1.metrics.prometheus").unregister_vllm_metrics()  # vLLM does so before it makes a logger
    assert samples(client.REGISTRY) == {}
    exporter(None, 1).observe(recorded(), 1)
    rendered = samples(client.REGISTRY)
    assert rendered[sample("raw_bytes_total", 1)] == 1000
    assert sample("raw_bytes_total", 0) not in rendered


def test_from_the_scheduler_to_the_text_and_the_log(client: Any) -> None:
    hooks, serial = real("vllm.distributed.kv_transfer.kv_connector.v1.metrics"), real("vllm.v1.serial_utils")
    own, stats_kind = (
        real("cuvee.integrations.vllm.prometheus").CuveeStats,
        real("vllm.v1.metrics.stats").SchedulerStats,
    )
    config = real("vllm.config").KVTransferConfig(
        kv_connector="CuveeConnector", kv_role="kv_both", kv_connector_module_path="cuvee.integrations.vllm.connector"
    )
    vllm_config = SimpleNamespace(kv_transfer_config=config)
    prometheus = hooks.KVConnectorProm(vllm_config, LABELS, {0: ["tiny", "0"]})
    log = hooks.KVConnectorLogging(config)
    steps: list[dict[str, float]] = [recorded(), recorded(), {"pending_bytes|": 0}]
    for step in steps:
        sent = serial.MsgpackEncoder().encode(stats_kind(kv_connector_stats=own(dict(step)).to_dict()))
        stats = serial.MsgpackDecoder(stats_kind).decode(sent)
        assert stats.kv_connector_stats == step
        log.observe(stats.kv_connector_stats)  # vLLM logs first, and both get the same dict
        prometheus.observe(stats.kv_connector_stats)
    rendered = samples(client.REGISTRY)
    for name, value in {
        sample("raw_bytes_total"): 2000,
        sample("failures_total", kind="load"): 4,
        sample("failures_total", kind="encode"): 0,
        sample("store_operations_total", tier="memory", result="hit"): 6,
        sample("store_operations_total", tier="disk", result="hit"): 2,
        sample("pending_bytes"): 0,
        sample("store_bytes", tier="disk"): 9e4,
        sample("load_seconds_bucket", le="0.01"): 0,
        sample("load_seconds_bucket", le="0.02"): 4,
        sample("load_seconds_bucket", le="2.0"): 4,
        sample("load_seconds_bucket", le="5.0"): 6,
        sample("load_seconds_sum"): pytest.approx(6.048),
    }.items():
        assert rendered[name] == value, name

    lines: list[str] = []
    log.log(lambda text, figures: lines.append(text % figures))
    assert lines == [
        "KV Transfer metrics: failures load=4, load_seconds count=6, loaded_tokens=1024, pending_bytes=0, ratio=4.0, "
        "raw_bytes=2000, store_bytes disk=90000.0, store_operations disk:corrupt=2, store_operations disk:dropped=10, "
        "store_operations disk:hit=2, store_operations memory:hit=6, store_operations memory:miss=2, "
        "store_queue_depth disk=0, store_queue_depth memory=0, stored_bytes=500"
    ]
    log.log(lines.append)
    assert len(lines) == 1, "nothing came"


def test_our_log_has_a_list_of_handlers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the application adds to our logger does not hear vLLM as well."""
    ours, engine = logging.getLogger("cuvee"), logging.getLogger("vllm")
    shared, own = logging.NullHandler(), logging.NullHandler()
    monkeypatch.setattr(engine, "handlers", [shared])
    monkeypatch.setattr(ours, "handlers", [])
    monkeypatch.setattr(ours, "propagate", True)
    monkeypatch.setattr(ours, "level", logging.NOTSET)
    real("cuvee.integrations.vllm.connector")._join_log()
    assert ours.handlers == engine.handlers == [shared]
    ours.addHandler(own)
    assert own not in engine.handlers


def test_several_api_processes_add_up(client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, multiprocess = real("prometheus_client.values"), real("prometheus_client.multiprocess")
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))  # as vLLM sets it for several API servers
    for process, depth in ((1, 7), (2, 5)):
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda process=process: process))
        metrics = exporter(client.CollectorRegistry())
        metrics.observe(recorded())
        metrics.observe({"pending_bytes|": depth})
    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    rendered = samples(registry)
    assert rendered[sample("raw_bytes_total")] == 2000
    assert rendered[sample("load_seconds_count")] == 6
    assert rendered[sample("pending_bytes")] == 5
