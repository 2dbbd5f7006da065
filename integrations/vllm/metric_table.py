"""The table of the connector's metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as the recorder takes it; Prometheus prefixes it with `vllm:cuvee_`.
        kind: a counter only grows, a gauge is set, a histogram takes observations.
        help: one line for operators.
        label: name of its label, if it has one.
        values: permitted values of the label, or of the second one if there are two; empty: any.
        second: name of a second label. The recorder takes `first:second`.
        ranks: how figures of several tensor-parallel ranks combine: "sum", or "first" where all ranks count the same
            events and only rank 0 reports them.
        buckets: upper edges of a histogram's buckets, in seconds unless the metric's name has another unit.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    ranks: Literal["sum", "first"] = "sum"
    buckets: tuple[float, ...] = ()
    second: str = ""


_LOAD_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
_LOOKUP_BUCKETS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_RESULTS = ("hit", "partial", "miss", "declined", "timeout")
_KINDS = ("chunk", "tail", "segment", "drafts", "state")
_FAILURES = ("load", "encode", "store", "lookup", "timeout", "blend", "refinement", "drafts", "weights", "records")
_UNCACHED = ("embeddings", "streamed", "media", "salt", "adapter", "unnamed", "error")
_ENTRIES = (
    "arrived", "matched_tokens", "allocated", "plan", "take", "finished", "reset", "stats",
    "start_loads", "load", "blend", "drop", "save", "store", "take_arrived", "report", "close",
)  # fmt: skip
_REFUSALS = ("parameters", "adapter", "media", "prompt_logprobs", "hashes", "timeout", "declined", "failed")
_UNSTORED = ("asked", "positions", "blended", "quality", "reset", "overwritten")
_SKIPPED = ("full", "failed", "down", "adapter", "window", "weights", "profile", "stopped")

# A chunk belongs to one rank: with two ranks, a run of tokens is two chunks. Unless stated otherwise, tails are chunks.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("raw_bytes", "counter", "Bytes of stored KV before compression."),
        Metric("stored_bytes", "counter", "Bytes of stored KV after compression."),
        Metric("stored", "counter", "Entries stored, of all ranks: whole chunks, tails (unfinished chunks: ends "
               "of prompts and of answers), segments for blends, a drafter's layers beside chunks and tails, and "
               "states of recurrent layers.", "kind", _KINDS),
        Metric("misfits", "counter", "Entries stored without prediction from token ids, or without loss, because their "
               "profile would have taken more bytes."),
        Metric("loaded", "counter", "Entries loaded, of all ranks, by kind as in `stored`.", "kind", _KINDS),
        Metric("work_seconds", "counter", "Seconds of compression, of decompression and of reading from the "
               "store, summed over threads and ranks.", "step", ("encode", "decode", "fetch")),
        Metric("load_seconds", "histogram", "Seconds from the start to the end of a load, failed loads included, on "
               "the first rank; its count is that of the loads.", ranks="first", buckets=_LOAD_BUCKETS),
        Metric("loaded_tokens", "counter", "Tokens loaded instead of computed.", ranks="first"),
        Metric("saved_seconds_estimate", "counter", "Seconds that computing the loaded tokens would have taken, "
               "as the break-even estimates them from measured steps; nothing before it has measured enough. What "
               "loading took is not deducted: see `load_seconds`."),
        Metric("ttft_loaded_seconds", "histogram", "Seconds from a request's arrival to its first token, as the "
               "engine's core sees both, if tokens of it were loaded.", buckets=_TTFT_BUCKETS),
        Metric("ttft_computed_seconds", "histogram", "The same if none were: compare requests of equal length.",
               buckets=_TTFT_BUCKETS),
        Metric("blend_tokens", "counter", "Tokens of blends: with cached KV that is reused, with cached KV "
               "but recomputed, and new ones between the segments.", "kind",
               ("reused", "recomputed", "new"), ranks="first"),
        Metric("blend_seconds", "histogram", "Seconds of choosing and recomputing tokens in the engine's loop; "
               "its count is that of the blended prompts.", ranks="first", buckets=_LOAD_BUCKETS),
        Metric("blend_slices", "counter", "Steps of the engine that computed a part of a blend.", ranks="first"),
        Metric("blends_refused", "counter", "Requests that were not blended although segments were given or found.",
               "reason", _REFUSALS),
        Metric("recomputed_tokens", "counter", "Tokens of failed loads that were recomputed, of all ranks."),
        Metric("loaded_at", "counter", "Tokens by the number of parts of their chunks that were loaded, of all "
               "ranks, with refinements or a deadline; 0: computed because of the deadline.", "parts",
               ("0", "1", "2")),
        Metric("deadlines", "counter", "Requests by whether their first token came by their deadline; refused: it "
               "is not valid, or cannot be aimed at.", "result", ("met", "missed", "refused")),
        Metric("lookups", "counter", "Requests by result: the whole prompt found, a part, nothing, something slower to "
               "load than to compute, no answer in time.", "result", _RESULTS),
        Metric("lookup_seconds", "histogram", "Seconds of a lookup of a prompt's chunks in the store.",
               buckets=_LOOKUP_BUCKETS),
        Metric("failures", "counter", "Operations that failed or took too long; their tokens are computed or not "
               "stored. After one of kind weights, nothing is: they cannot be named, or the profile is of others.",
               "kind", _FAILURES),
        Metric("contained", "counter", "Errors inside the connector that were kept from the engine, by the hook it "
               "called; affected tokens are computed, or not stored.", "entry", _ENTRIES),
        Metric("uncached", "counter", "Requests that are neither loaded nor stored: the prompt is given as embeddings "
               "or in parts, it is not known what an image holds or where it is, the salt is no string or too long, an "
               "adapter's files cannot be read or have changed, the weights had no name yet, or an error.",
               "reason", _UNCACHED),
        Metric("unstored_tokens", "counter", "Tokens that were computed and are not stored: their request asks for "
               "that, they are beyond the model's positions, behind a blend, behind tokens loaded at less than the "
               "stored quality or computed before a reset, or they are overwritten too soon.", "reason", _UNSTORED),
        Metric("stores_skipped", "counter", "Chunks not stored: too many waited (full), a step of the engine had "
               "failed, the store was known to be down, an adapter's files have changed, the engine had dropped a part "
               "of them from a layer with a window, its weights have changed, a rank has another profile or "
               "other secrets than the scheduler, or they still waited when the engine stopped.", "reason", _SKIPPED),
        Metric("weights_changed", "counter", "How often the engine's weights were found to be others than before. "
               "Nothing is loaded or stored until all ranks have read them."),
        Metric("store_operations", "counter", "Operations of a tier of the store by result. hit, miss: a chunk "
               "was read, or a lookup or a read did not find it. corrupt: it failed its checksum, so it is deleted, "
               "and missed, too. error: the tier failed. skipped: it is known to be down. dropped: its queue or its "
               "disk was full, or a chunk exceeds its budget. evicted: deleted for room, unless by a server.",
               "tier", second="result", values=("hit", "miss", "corrupt", "error", "skipped", "dropped", "evicted")),
        Metric("hit_bytes", "counter", "Bytes read from a tier.", "tier"),
        Metric("put_bytes", "counter", "Bytes written to a tier.", "tier"),
        Metric("pending_bytes", "gauge", "Bytes that wait to be stored: copies of KV, then their blobs."),
        Metric("store_queue_depth", "gauge", "Chunks that wait to be written to a tier behind the first.", "tier"),
        Metric("identity_entries", "gauge", "About how many entries a shared store has of this engine's identity, and "
               "of others that it keeps records of: `cuvee store explain` says how they differ.", "identity",
               ("same", "other"), ranks="first"),
        Metric("store_bytes", "gauge", "Bytes in a tier, if the tier knows.", "tier", ranks="first"),
    )
}  # fmt: skip
