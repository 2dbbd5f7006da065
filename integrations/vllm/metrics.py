"""What the connector measures: the table of its metrics, and `Recorder`, which every process has one of.

    worker, rank 0   Recorder --drain--+
    worker, rank 1   Recorder --drain--+--> merge --> absorb, scheduler's Recorder --drain--> API process: Prometheus

What travels is a plain dict of numbers, changes only. Its keys are `name|label|rank`: the label's value where the
metric has one, the rank of a gauge that ranks add up. A histogram's label is the observed value to 3 digits, its number
how often that was seen; so all but gauges merge by addition, and no list grows with the load.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from cuvee.codec.errors import InputError
from cuvee.codec.support.suggest import suggestion

if TYPE_CHECKING:
    from cuvee.integrations.stores.base import TierCounters

logger = logging.getLogger(__name__)

Data = dict[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as the recorder takes it; Prometheus has `vllm:cuvee_` before it.
        kind: a counter only grows, a gauge is set, a histogram takes observations.
        help: one line for operators.
        label: name of its label, if it has one.
        values: the label's permitted values; empty: any.
        ranks: what becomes of the figures of several tensor-parallel ranks: "sum", or "first" where all ranks see the
            same thing, and only rank 0 reports it.
        buckets: upper edges of a histogram's buckets, in seconds if the metric's name says nothing else.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    ranks: Literal["sum", "first"] = "sum"
    buckets: tuple[float, ...] = ()


_LOAD_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_LOOKUP_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_KL_BUCKETS = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_RESULTS = ("hit", "partial", "miss", "declined", "timeout")
_FAILURES = ("load", "encode", "store", "lookup", "timeout", "blend")
_UNCACHED = ("embeddings", "streamed", "media", "salt", "error")
_ENTRIES = (
    "arrived", "matched_tokens", "allocated", "plan", "take", "finished", "told", "reset", "stats",
    "start_loads", "load", "blend", "drop", "save", "store", "take_arrived", "report", "close",
)  # fmt: skip
_REFUSALS = ("parameters", "adapter", "media", "prompt_logprobs", "hashes", "timeout", "declined", "failed")
_LEFT_OUT = ("number", "positions", "time")

# A chunk is one rank's: with two ranks, a span of tokens is two chunks. Where nothing else is said, tails are chunks.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("raw_bytes", "counter", "Bytes of KV that were stored, before compression."),
        Metric("stored_bytes", "counter", "Bytes that they were compressed to."),
        Metric("stored_chunks", "counter", "Whole chunks stored, of all ranks."),
        Metric("stored_tails", "counter", "Unfinished chunks stored, of all ranks: ends of prompts and of answers."),
        Metric("encode_seconds", "counter", "Seconds of compression, added up over threads and ranks."),
        Metric("decode_seconds", "counter", "Seconds of decompression, added up over threads and ranks."),
        Metric("fetch_seconds", "counter", "Seconds of reading from the store, added up over threads and ranks."),
        Metric("load_seconds", "histogram", "Seconds from the start to the end of a load, failed ones included, on the "
               "first rank.", ranks="first", buckets=_LOAD_BUCKETS),
        Metric("loads", "counter", "Loads that ended, failed ones included.", ranks="first"),
        Metric("loaded_tokens", "counter", "Tokens that were loaded instead of computed.", ranks="first"),
        Metric("loaded_chunks", "counter", "Whole chunks loaded, of all ranks."),
        Metric("loaded_tails", "counter", "Unfinished chunks loaded, of all ranks."),
        Metric("loaded_segments", "counter", "Segments placed for blends, of all ranks."),
        Metric("stored_segments", "counter", "Segments of prompts stored to be blended, of all ranks."),
        Metric("blends", "counter", "Prompts that were blended.", ranks="first"),
        Metric("blended_tokens", "counter", "Tokens of blends, reused ones and the text between them.", ranks="first"),
        Metric("blend_reused_tokens", "counter", "Tokens of them that came with cached KV.", ranks="first"),
        Metric("blend_recomputed_tokens", "counter", "Reused tokens that were recomputed all the same.", ranks="first"),
        Metric("blend_token_layers", "counter", "Token-layers spent on that and on choosing them.", ranks="first"),
        Metric("blend_seconds", "histogram", "Seconds of choosing and recomputing, in the engine's loop.",
               ranks="first", buckets=_LOAD_BUCKETS),
        Metric("blend_slices", "counter", "Steps of the engine that computed a part of a blend.", ranks="first"),
        Metric("blend_kl", "histogram", "How far blends moved the next token's distribution, in nats: those that were "
               "computed exactly, too (check_every).", ranks="first", buckets=_KL_BUCKETS),
        Metric("blend_checks_failed", "counter", "Blends that were to be compared with the exact prompt and could not.",
               ranks="first"),
        Metric("blends_refused", "counter", "Requests that were not blended although segments were given or found.",
               "reason", _REFUSALS),
        Metric("segments_left_out", "counter", "Segments that were not looked up: too many in one prompt, beyond the "
               "model's positions (neither is stored), or not asked for within lookup_timeout.", "reason", _LEFT_OUT),
        Metric("recomputed_tokens", "counter", "Tokens of loads that failed, recomputed instead; of all ranks."),
        Metric("lookups", "counter", "Requests by what was found for them: their whole prompt, a part, nothing, "
               "something slower to load than to compute, no answer in time.", "result", _RESULTS),
        Metric("lookup_seconds", "histogram", "Seconds a question to the store took, of what a prompt's chunks are.",
               buckets=_LOOKUP_BUCKETS),
        Metric("failures", "counter", "Operations that failed or took too long; their tokens are computed or not "
               "stored.", "kind", _FAILURES),
        Metric("contained", "counter", "Errors inside the connector that were kept from the engine, by the hook it "
               "called; what they were about is computed, or not stored.", "entry", _ENTRIES),
        Metric("uncached", "counter", "Requests that are neither loaded nor stored: the prompt is embeddings or comes "
               "in parts, an image has no name or no place in it, the salt is no text or too long, or an error.",
               "reason", _UNCACHED),
        Metric("stores_skipped", "counter", "Chunks not stored because too many were waiting to be."),
        Metric("lost", "counter", "Chunks that waited when the engine stopped, for compression or to be written, and "
               "were not stored within close_timeout.", "where", ("encode", "store")),
        Metric("tenant_stored_bytes", "counter", "Compressed bytes that a tenant stored, all ranks; with "
               "tenant_metrics. A tenant is named as its part of the store's keys is.", "tenant"),
        Metric("tenant_loaded_tokens", "counter", "Tokens that a tenant loaded instead of computing them; with "
               "tenant_metrics.", "tenant", ranks="first"),
        Metric("hits", "counter", "Chunks that a tier of the store had.", "tier"),
        Metric("misses", "counter", "Chunks that a tier was asked for and did not have.", "tier"),
        Metric("hit_bytes", "counter", "Bytes read from a tier.", "tier"),
        Metric("puts", "counter", "Chunks written to a tier.", "tier"),
        Metric("put_bytes", "counter", "Bytes written to a tier.", "tier"),
        Metric("evictions", "counter", "Chunks a tier deleted to stay within its budget.", "tier"),
        Metric("expired", "counter", "Chunks found older than their time to live; misses too.", "tier"),
        Metric("corrupt", "counter", "Chunks that failed their checksum: deleted, and misses too.", "tier"),
        Metric("store_errors", "counter", "Operations of a tier that failed.", "tier"),
        Metric("store_skipped", "counter", "Operations not tried because the tier is known to be down.", "tier"),
        Metric("dropped", "counter", "Chunks a tier gave up: its queue was full, or they exceed its budget.", "tier"),
        Metric("queue_depth", "gauge", "Chunks that wait for compression or are in it."),
        Metric("pending_bytes", "gauge", "Bytes of KV copied and not stored yet."),
        Metric("store_queue_depth", "gauge", "Chunks that wait to be written to a tier behind the first.", "tier"),
        Metric("store_entries", "gauge", "Chunks a tier holds, where it knows.", "tier", ranks="first"),
        Metric("store_bytes", "gauge", "Bytes a tier holds, where it knows.", "tier", ranks="first"),
        Metric("ratio", "gauge", "raw_bytes over stored_bytes since the start.", ranks="first"),
        Metric("break_even_tokens", "gauge", "Length in tokens from which loading is quicker than computing; +Inf: "
               "at no length. Absent until it was measured.", ranks="first"),
        Metric("prefill_tokens_per_second", "gauge", "Measured speed of computing tokens.", ranks="first"),
        Metric("load_tokens_per_second", "gauge", "Measured speed of loading tokens, the fixed cost of a load apart.",
               ranks="first"),
    )
}  # fmt: skip

MOST_TENANTS = 1000  # that have figures of their own: what counts them must not grow with what clients send
OTHER_TENANTS = "others"

_MOST = 1 << 63  # what counts has less: every message and every client takes that
_EXACT = 1 << 53  # up to here a float is exact
_LONGEST_TIER = 64
_MOST_LEFT_OUT = 100  # figures of stores that are remembered as unsound

# Fields of TierCounters whose metric has another name.
_TIER_COUNTERS = {"errors": "store_errors", "skipped": "store_skipped"}
_TIER_GAUGES = {"queued": "store_queue_depth", "entries": "store_entries", "bytes": "store_bytes"}


def metric_of(key: str) -> tuple[Metric, str]:
    """The metric of a key of `Recorder.drain`, and its label's value (a histogram's: the observation)."""
    name, label, _ = key.split("|")
    return METRICS[name], label


def merge(first: Mapping[str, float], second: Mapping[str, float]) -> Data:
    """Two drained dicts, of two ranks or of one after the other, as one. Neither is changed.

    Counters and histograms add up. Of a gauge the second counts: ranks that are added up have keys of their own.
    """
    merged = dict(first)
    for key, value in second.items():
        merged[key] = value if metric_of(key)[0].kind == "gauge" else merged.get(key, 0) + value
    return merged


def collect(data: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """The figures of a drained dict by name and label, ranks added up."""
    figures: dict[tuple[str, str], float] = {}
    for key, value in data.items():
        metric, label = metric_of(key)
        figures[metric.name, label] = figures.get((metric.name, label), 0) + value
    return figures


class Recorder:
    """Counts what happens in one process. Safe to call from several threads.

    Args:
        rank: tensor-parallel rank of a worker; 0 for the scheduler.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._totals: Data = {}
        self._pending: Data = {}
        self._stores: dict[tuple[str, str], float] = {}
        self._left_out: set[str] = set()
        self._tenants: set[str] = set()

    def count(self, name: str, value: float = 1, label: str = "") -> None:
        """Add `value` to a counter, or one observation of `value` seconds to a histogram.

        Raises:
            InputError: no such counter or histogram, a label it does not take, or a negative or infinite value.
        """
        metric = _declared(name, label, gauge=False)
        value = _number(name, value)
        if not 0 <= value < math.inf:
            raise InputError(f"value: {name} takes finite numbers from 0 on, got {value}")
        if metric.kind == "histogram":
            self._add(metric, f"{name}|{value:.3g}|", 1)
        elif value:
            self._add(metric, f"{name}|{label}|", value)

    def count_tenant(self, name: str, value: float, tenant: str) -> None:
        """Add `value` to a counter of a tenant; `OTHER_TENANTS` stands for all beyond the first `MOST_TENANTS`.

        Args:
            name: of a counter whose label is `tenant`.
            value: as in `count`.
            tenant: `cuvee.codec.identity.tenant_id` of it; a cache salt is as good as a secret.
        """
        with self._lock:
            if tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS:
                tenant = OTHER_TENANTS
            self._tenants.add(tenant)
        self.count(name, value, tenant)

    def gauge(self, name: str, value: float, label: str = "") -> None:
        """Set a gauge.

        Raises:
            InputError: no such gauge, a label it does not take, or NaN.
        """
        metric = _declared(name, label, gauge=True)
        value = _number(name, value)
        if math.isnan(value):
            raise InputError(f"value: {name} must be a number, got NaN")
        if metric.ranks == "sum":
            self._set(f"{name}|{label}|{self._rank}", value)
        elif self._rank == 0:
            self._set(f"{name}|{label}|", value)

    def record_store(self, counters: Mapping[str, TierCounters]) -> None:
        """Count what a store did since the last call, and set the gauges of its tiers.

        Call it in one place a store: of two connectors in a process that share one, both would count the same.

        This never raises: it runs in the engine's loop, and some figures come from a server. A figure that is no number
        from 0 up to 2^63 is left out, and so is a tier whose name cannot be a label. The first is logged, and each is
        counted once in `failures` of the kind "store".

        Args:
            counters: cumulative, of `Store.counters`. A store that was opened anew starts from zero.
        """
        for tier, now in counters.items():
            if not _is_label(tier) or not is_dataclass(now):
                self._leave_out("the name or the counters of a tier", tier)
                continue
            for field in fields(now):
                given, gauge = getattr(now, field.name), _TIER_GAUGES.get(field.name)
                value = _figure(given)
                if value is None:
                    if gauge is None or given is not None:
                        self._leave_out(f"{field.name} of {tier}", given)
                elif gauge is not None:
                    self.gauge(gauge, value, tier)
                else:
                    with self._lock:
                        last, self._stores[tier, field.name] = self._stores.get((tier, field.name), 0), value
                    new = value - last if value >= last else value
                    # Integers may add up to more than the 64 bits that messages between processes have for them.
                    name = _TIER_COUNTERS.get(field.name, field.name)
                    self.count(name, new if new < _EXACT else float(new), tier)

    def _leave_out(self, what: str, given: object) -> None:
        """Count a figure of a store that is none, once, and log the first."""
        with self._lock:
            if what in self._left_out or len(self._left_out) >= _MOST_LEFT_OUT:
                return
            first = not self._left_out
            self._left_out.add(what)
        self.count("failures", label="store")
        if first:
            why = "out of range" if isinstance(given, Real) else f"of the type {type(given).__name__}"
            logger.warning("cuvee: the store reports what cannot be counted, and it is left out: %s, %s", what, why)

    def absorb(self, data: Mapping[str, float]) -> None:
        """Take in what another recorder drained."""
        for key, value in data.items():
            metric, _ = metric_of(key)
            if metric.kind == "gauge":
                self._set(key, value)
            else:
                self._add(metric, key, value)

    def drain(self) -> Data | None:
        """What came since the last drain, or None if nothing did; a gauge only if it changed, then of every rank."""
        with self._lock:
            data, self._pending = self._pending, {}
            raw, stored = self._totals.get("raw_bytes||", 0), self._totals.get("stored_bytes||", 0)
            if "stored_bytes||" in data and self._rank == 0:
                data["ratio||"] = self._totals["ratio||"] = raw / stored
            changed = {key.rpartition("|")[0] for key in data if not key.endswith("|")}
            data |= {key: value for key, value in self._totals.items() if key.rpartition("|")[0] in changed}
        return data or None

    def totals(self) -> dict[tuple[str, str], float]:
        """Everything since the start by name and label, as `collect` gives it: what this process saw, whatever its
        rank, and what it absorbed.
        """
        with self._lock:
            return collect(self._totals)

    def summary(self) -> str:
        """One line about everything since the start."""
        totals = self.totals()

        def figure(name: str, label: str = "") -> float:
            return totals.get((name, label), 0)

        def split(name: str) -> str:
            """Figures of a metric by label, in the order they came."""
            return ", ".join(f"{value:,} {label}" for (of, label), value in totals.items() if of == name)

        parts = []
        if figure("stored_chunks") or figure("stored_tails"):
            raw, stored = figure("raw_bytes"), figure("stored_bytes")
            parts.append(
                f"stored {figure('stored_chunks'):,} chunks and {figure('stored_tails'):,} tails, "
                f"{_size(raw)} as {_size(stored)} "
                f"({raw / max(stored, 1):.1f}x), encoding {figure('encode_seconds'):.3g} s"
            )
        if figure("stored_segments"):
            parts.append(f"stored {figure('stored_segments'):,} segments")
        if figure("blends"):
            parts.append(
                f"blended {figure('blends'):,} prompts of {figure('blended_tokens'):,} tokens: "
                f"{figure('blend_reused_tokens'):,} reused, {figure('blend_recomputed_tokens'):,} of them recomputed"
            )
        checks = {label: count for (name, label), count in totals.items() if name == "blend_kl"}
        if checks:
            mean = sum(float(kl) * count for kl, count in checks.items()) / sum(checks.values())
            parts.append(f"{sum(checks.values()):,} blends were computed exactly, too: KL {mean:.3g} nats on average")
        if refused := split("blends_refused"):
            parts.append(f"not blended: {refused}")
        if figure("loads"):
            parts.append(
                f"loaded {figure('loaded_tokens'):,} tokens ({figure('loaded_chunks'):,} chunks and "
                f"{figure('loaded_tails'):,} tails) in "
                f"{figure('loads'):,} loads, fetching {figure('fetch_seconds'):.3g} s, "
                f"decoding {figure('decode_seconds'):.3g} s"
            )
        if lookups := split("lookups"):
            parts.append(f"lookups: {lookups}")
        for tier in dict.fromkeys(label for name, label in totals if name in ("hits", "misses")):
            hits = figure("hits", tier)
            parts.append(f"{tier}: {hits:,} of {hits + figure('misses', tier):,} chunks found")
        if failures := split("failures"):
            parts.append(f"failures: {failures}, {figure('recomputed_tokens'):,} tokens recomputed")
        for name, words in _LOSSES.items():
            if lost := sum(value for (of, _), value in totals.items() if of == name):
                parts.append(f"{lost:,} {words}")
        return "; ".join(parts) or "nothing stored, nothing loaded"

    def _add(self, metric: Metric, key: str, value: float) -> None:
        with self._lock:
            self._totals[key] = _number(key, self._totals.get(key, 0) + value)
            if metric.ranks == "sum" or self._rank == 0:
                self._pending[key] = _number(key, self._pending.get(key, 0) + value)

    def _set(self, key: str, value: float) -> None:
        with self._lock:
            if self._totals.get(key) != value:
                self._totals[key] = self._pending[key] = value


_LOSSES = {
    "corrupt": "corrupt entries",
    "store_errors": "store errors",
    "store_skipped": "operations skipped while a store was down",
    "dropped": "chunks dropped by a store",
    "stores_skipped": "chunks not stored because too many waited",
    "lost": "chunks lost because the engine stopped before they were stored",
}


def interval_figures(data: Mapping[str, float]) -> dict[str, int | float]:
    """The few figures of an interval that the engine's log line shows; `data` is what was drained in it."""
    figures = collect(data)

    def total(*names: str) -> int:
        return int(sum(value for (name, _), value in figures.items() if name in names))

    line: dict[str, int | float] = {}
    if total("loads"):
        line |= {"loads": total("loads"), "loaded tokens": total("loaded_tokens")}
    if total("hits", "misses"):
        line["chunk hit rate"] = round(total("hits") / total("hits", "misses"), 3)
    if stored := total("stored_bytes"):
        raw = total("raw_bytes")
        line |= {"raw MB": round(raw / 1e6, 3), "stored MB": round(stored / 1e6, 3), "ratio": round(raw / stored, 2)}
    if ("queue_depth", "") in figures:
        line["queue depth"] = total("queue_depth")
    line["failures"] = total("failures", "store_errors", "corrupt")
    line["not stored"] = total("stores_skipped", "dropped", "store_skipped")
    return line


def _figure(given: object) -> float | None:
    """A plain number for a figure of a store; None if it is not a number from 0 up to 2^63."""
    if not isinstance(given, Real):
        return None
    figure: Any = given
    if not 0 <= figure < _MOST:
        return None
    return int(figure) if isinstance(given, Integral) else float(figure)


def _is_label(tier: object) -> bool:
    """Whether the name of a tier can be a label, in messages between processes and at Prometheus."""
    return isinstance(tier, str) and tier.isprintable() and "|" not in tier and 0 < len(tier) <= _LONGEST_TIER


def _declared(name: str, label: str, *, gauge: bool) -> Metric:
    """The metric of that name, if it is (not) a gauge and takes that label."""
    metric = METRICS.get(name)
    if metric is None:
        raise InputError(f"name: there is no metric {name!r}: {suggestion(name, METRICS)}")
    if (metric.kind == "gauge") is not gauge:
        raise InputError(f"name: {name} is a {metric.kind}; call {'count' if gauge else 'gauge'}")
    if not isinstance(label, str):
        raise InputError(f"label: must be text, got {type(label).__name__}")
    if bool(label) != bool(metric.label):
        raise InputError(f"label: {name} needs a {metric.label}" if metric.label else f"label: {name} takes none")
    if metric.values and label not in metric.values:
        raise InputError(f"label: {metric.label} must be one of {', '.join(metric.values)}, got {label!r}")
    if "|" in label:
        raise InputError(f"label: {metric.label} must not contain '|', got {label!r}")
    if not _is_unicode(label):
        raise InputError(f"label: {metric.label} must not contain surrogates, got {label!r}")
    return metric


def _is_unicode(text: str) -> bool:
    """Whether a text can be sent: no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(name: str, value: float) -> float:
    """A number as it travels: the engine sends figures by msgpack, whose integers have 64 bits.

    Raises:
        InputError: it is none.
    """
    try:
        if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
            return int(value)
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"value: {name} takes numbers, got {type(value).__name__}: {error}") from None


def _size(count: float) -> str:
    """Bytes in decimal units, 3 digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3f} TB"
