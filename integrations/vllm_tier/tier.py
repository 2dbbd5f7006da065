"""`CuveeTier`: a secondary tier of vLLM's offloading that keeps chunks compressed.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 20000000000, "block_size": 256,
      "canonical_layout": true, "secondary_tiers": [{"type": "CuveeTier",
        "module_path": "cuvee.integrations.vllm_tier", "store": "file:///var/cache/kv?max_gb=200",
        "profile": "qwen3-8b.safetensors"}]}}'

vLLM copies chunks between the GPU and its primary tier, which is host memory that all of its processes share. Its
scheduler calls the tier, which returns at once and works on threads of its own:

    lookup    key ──> vLLM's AsyncLookupManager ──thread──> PageStore.stored
    store     row of the primary tier ──view──> PageStore ──codec──> entry
    load      entry ──codec──> row of the primary tier, in place
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Event
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.core.refusals import check_uniform
from cuvee.integrations.identity.checkpoint import changed_while_loading, naming_of_weights, read_layout
from cuvee.integrations.identity.engine_config import vllm_options
from cuvee.integrations.identity.weights_name import Make
from cuvee.integrations.pages import COUNTED, Counts, PageStore, PageStores
from cuvee.integrations.pages.counts import GAUGES
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.weight_calls import watch_calls
from cuvee.integrations.vllm_tier.chunk_rows import ChunkRows, OpaqueRows, cache_dtype, row_memory, row_shape
from cuvee.integrations.vllm_tier.tier_checks import (
    check_model,
    drafter_of,
    of_connector,
    options_of_bytes,
    refuse_names,
    watch_steps,
)
from cuvee.integrations.vllm_tier.tier_options import TierOptions

logger = logging.getLogger(__name__)

_ENGINE = "vllm-tier"
_METRICS = "vllm:cuvee_tier_"  # begins the names of vLLM's metrics
_THREADS = 4  # for each kind of job; they mostly wait for the store and for the codec's threads
_TOGETHER = 2048  # tokens of a job that are stored between two looks at the clock


class _Lookups(AsyncLookupManager):
    """vLLM's own manager of lookups, which asks on a thread. `stored`: tells in bounded time what is stored."""

    def __init__(self, tier_type: str, stored: Callable[[Sequence[bytes]], list[bool]]) -> None:
        self._stored = stored
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[Any], req_context: Any) -> list[bool]:
        """Return whether each chunk is stored."""
        return self._stored(keys)


class CuveeTier(SecondaryTierManager):
    """vLLM's view of the page store of its model. vLLM makes it, in its scheduler's process.

    Args:
        offloading_spec: vLLM's `TieringOffloadingSpec`.
        primary_kv_view: memory of the primary tier, `(rows, bytes)`.
        tier_type: name of this class.
        backpressure_detector: of vLLM, which decides what it stores.
        options: by the names in `TierOptions`.

    Raises:
        InputError: an option out of range, no such checkpoint, a store or a secret that cannot be used; a lossy quality
            without a learned profile, or of a model without RoPE.
        ProfileError, FormatError, ProfileMismatchError, FileNotFoundError: as `PageStores`.
        UnsupportedModelError: names of chunks that do not tell what they hold.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = given = TierOptions.from_dict(options)
        config = offloading_spec.config
        path, engine = given.model or str(config.model.name), of_connector("vllm_config")
        refuse_names(engine, given)
        revision = None if given.model else engine.model_config.revision
        # Released at the end, because vLLM cannot release its memory while others refer to it.
        self._rows: ChunkRows | OpaqueRows | None = None
        layout = None
        try:
            layout, self._rows = self._known_rows(path, revision, config, primary_kv_view)
        except UnsupportedModelError as error:
            logger.warning("cuvee: chunks are stored as bytes, without loss and without a profile: %s", error)
            self._rows = OpaqueRows(offloading_spec, primary_kv_view, of_connector("kv_cache_config"))
        self._description = getattr(self._rows, "description", None)
        self._tokens = self._rows.tokens
        self.locality = Locality(given.locality or ("LOCAL" if given.local else "REMOTE"))
        self._counts = Counts()
        self._guard = Guard(self._counts)
        self._stores = PageStores(
            given, layout, self._naming(path, revision, layout, engine),
            checkpoint=(path, revision), engine=_ENGINE, page_tokens=self._tokens, counts=self._counts, positions=False,
        )  # fmt: skip
        watch_calls(EngineCore, self._withdraw)
        self._failed = False
        watch_steps(EngineCore, self)
        self._storing, self._loading = (
            ThreadPool(_THREADS, f"cuvee-{kind}", float("inf")) for kind in ("store", "load")
        )
        self._changed = Condition()
        self._jobs: dict[int, _Job] = {}  # that have not ended
        self._ended: list[_Job] = []
        self._given_up = float("-inf")  # what was submitted before this time begins nothing new
        self._closed = False
        _ = self._pages  # whose identity is recorded from now on
        self._lookups = _Lookups(tier_type, self._find_stored)

    def _naming(self, path: str, revision: str | None, layout: KVLayout | None, engine: Any) -> Make:
        """Return what names the weights as vLLM uses them; `layout` is None if the rows are bytes."""
        model_id = self._options.model_id
        options, drafter = vllm_options(engine, named=model_id is not None), None
        if layout is None:
            options["bytes"], drafter = options_of_bytes(engine), drafter_of(engine)
        make = naming_of_weights(
            path, engine.model_config.dtype, options, model_id=model_id, revision=revision,
            load_format=str(engine.load_config.load_format), drafter=drafter,
        )  # fmt: skip

        def name(stop: Event) -> str:
            named = make(stop)
            if model_id is None and changed_while_loading(engine, path):
                raise InputError("model: must not change while the engine starts")
            return named

        return name

    def _known_rows(self, path: str, revision: str | None, config: Any, view: memoryview) -> tuple[KVLayout, ChunkRows]:
        """Return the model's layout, and the rows as keys and values.

        Raises:
            UnsupportedModelError: their order is not known.
        """
        if torch.version.hip:
            raise UnsupportedModelError(
                "on ROCm, some attention backends keep keys and values in an order of their own"
            )
        layout = read_layout(path, cache_dtype(config), revision=revision)
        check_model(path, revision)
        check_uniform(layout)
        shape = row_shape(config, layout, self.block_size_bytes)
        return layout, ChunkRows(row_memory(view, layout), layout, shape)

    # Finding --------------------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Ask for chunks as they are computed, which is vLLM's default."""
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Return whether a chunk is stored; RETRY until that is known."""
        with self._guard("lookup"):
            found = False if self._closed else self._lookups.lookup(key, req_context)
            return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS
        return LookupResult.MISS

    def _find_stored(self, keys: Sequence[bytes]) -> list[bool]:
        with self._guard("lookup"):
            return [False] * len(keys) if self._closed else self._pages.stored(keys)
        return [False] * len(keys)

    def on_schedule_end(self, context: Any) -> None:
        """Ask the store for the chunks that were looked up in this step."""
        with self._guard("on_schedule_end"):
            self._lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        """Forget what the request asked for."""
        with self._guard("on_request_finished"):
            self._lookups.cleanup(req_context.req_id)

    # Jobs -----------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        """Store chunks from rows of the primary tier, which vLLM keeps until the job is done."""
        self._submit("store", self._storing, self._store, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Restore chunks into rows of the primary tier, whose contents are undefined if they are not restored."""
        self._submit("load", self._loading, self._load, job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        with self._changed:
            ended, self._ended = self._ended, []
        for job in ended:
            if not job.stores:
                with self._guard("get_finished_jobs"):
                    self._lookups.mark_miss(job.failed)  # which vLLM would find again
        return [
            JobResult(
                job_id=job.number, success=not job.failed,
                successful_keys=job.good if job.good and job.failed and not job.stores else None,
                transfer_time=job.seconds, transfer_bytes=len(job.good) * self.block_size_bytes,
            )
            for job in ended
        ]  # fmt: skip

    def drain_jobs(self) -> None:
        """Give up what waits, and wait for what has begun. `get_finished_jobs` has the results."""
        with self._guard("drain_jobs"):
            self._give_up(None)
            if self._stores.withdrawn:  # now vLLM empties its primary tier, which may be of the weights before
                self._stores.rename()

    @property
    def _pages(self) -> PageStore:
        """The pages of the weights as they are now."""
        if self._description is not None:
            return self._stores.opaque(self._description, self._options.tenant)
        return self._stores.of(0, 1, self._options.tenant)

    def step_failed(self) -> None:
        """Store nothing from here on: vLLM goes on with what a step that raised has computed, and builds on it."""
        if not self._failed and not self._closed:
            self._failed = True
            logger.error("cuvee: a step of vLLM has failed, so nothing is stored until it is restarted")

    def _withdraw(self) -> None:
        """Store and find nothing until vLLM resets its cache: a user's call may have changed its weights.

        It tells nothing about them, so what is stored after that is found by this engine alone.
        """
        with self._guard("withdraw"):
            self._stores.withdraw("a call to vLLM's workers may have changed weights: reset its external cache, too")

    def _submit(self, kind: str, pool: ThreadPool, work: Callable[[_Job, Any], list[bool]], metadata: Any) -> None:
        job = _Job(metadata.job_id, kind == "store", list(metadata.keys), metadata, time.monotonic())
        with self._changed:
            waiting = sum(len(each.keys) for each in self._jobs.values() if each.stores) * self.block_size_bytes
            full = job.stores and (self._failed or waiting >= self._options.max_pending_gb * 1e9)
            self._jobs[job.number] = job
        with self._guard(f"submit_{kind}", then=lambda: self._end(job, [])):
            if full:
                self._end(job, [])
                return
            pool.submit(self._run, kind, work, job).add_done_callback(partial(self._end_of, job))

    def _run(self, kind: str, work: Callable[[_Job, Any], list[bool]], job: _Job) -> list[bool]:
        """Return whether each chunk of the job was stored, or restored; of a list that ends early, the others not."""
        rows = self._rows
        with self._guard(kind):
            if rows is not None and not self._late(job):
                return work(job, rows)
        return []

    def _late(self, job: _Job) -> bool:
        """Return whether a job was given up, or has waited too long."""
        return job.since < self._given_up or time.monotonic() - job.since > self._options.load_timeout

    def _store(self, job: _Job, rows: ChunkRows | OpaqueRows) -> list[bool]:
        done: list[bool] = []
        pages = self._pages
        chunks = max(_TOGETHER // self._tokens, 1)
        while len(done) < len(job.keys) and not self._late(job):
            part = slice(len(done), len(done) + chunks)
            keys, numbers = job.keys[part], job.metadata.chunk_ids[part]
            if isinstance(rows, OpaqueRows):
                done += pages.save_opaque(rows.pages(keys, numbers), keys)
                continue
            following = (len(job.keys) - len(done) - len(keys)) * self._tokens  # all of one request, in order
            done += pages.save(rows.cache, rows.slots(numbers), keys, None, following=following)
        return done

    def _load(self, job: _Job, rows: ChunkRows | OpaqueRows) -> list[bool]:
        numbers = job.metadata.chunk_ids
        if isinstance(rows, OpaqueRows):
            return self._pages.load_opaque(rows.pages(job.keys, numbers), job.keys)
        return self._pages.load(rows.cache, rows.slots(numbers), job.keys, None)

    def _end_of(self, job: _Job, future: Future[list[bool]]) -> None:
        self._end(job, [] if future.cancelled() or future.exception() else future.result())

    def _end(self, job: _Job, done: Sequence[bool]) -> None:
        """Keep the result of a job, once: vLLM does not know a job any more that it was told of."""
        flags = [*done, *[False] * (len(job.keys) - len(done))]
        good, failed = (
            [key for key, there in zip(job.keys, flags, strict=True) if there is each] for each in (True, False)
        )
        with self._changed:
            if self._jobs.pop(job.number, None) is None:
                return
            # What was not begun, which the page store did not count; first: whoever hears of the end finds it counted.
            self._counts.count("unsaved_pages" if job.stores else "missed_pages", len(job.keys) - len(done))
            job.good, job.failed, job.seconds = good, failed, time.monotonic() - job.since
            self._ended.append(job)
            self._changed.notify_all()

    def _give_up(self, timeout: float | None) -> None:
        """Let the jobs begin nothing new, and wait for what they have begun."""
        with self._changed:
            self._given_up = time.monotonic()
            self._changed.wait_for(lambda: not self._jobs, timeout)

    # What vLLM is told ----------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's definitions of the tier's counters."""
        return {
            _METRICS + name: (OffloadingGaugeMetadata if name in GAUGES else OffloadingCounterMetadata)(
                text, ("what",) if labelled else ()
            )
            for name, (labelled, text) in COUNTED.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call; None if nothing was."""
        with self._guard("get_stats"):
            new = {key: value for key, value in self._counts.take_new().items() if key[0] in COUNTED}
            if new:
                stats = OffloadingConnectorStats()
                for (name, label), value in new.items():
                    add = stats.set_gauge if name in GAUGES else stats.increase_counter
                    add(_METRICS + name, value, (label,) if label else ())
                return stats
        return None

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of what `config_info` tells."""
        return ("profile", "quality")

    def config_info(self) -> dict[str, str]:
        """Return the labels of this tier in vLLM 0.33's metric `kv_offload_config_info`."""
        given = self._options
        asked = given.codec_quality or {"quality": "lossless" if given.profile is None else "balanced"}
        quality = " ".join(f"{name}={value}" for name, value in asked.items())
        told = str(given.profile), quality.removeprefix("quality=")
        return dict(zip(self.config_info_keys({}), told, strict=True))

    def counters(self) -> dict[str, float]:
        """Return what happened so far, by the names in `cuvee.integrations.pages.Counts`."""
        return self._counts.snapshot()

    def shutdown(self) -> None:
        """Let what has begun end, give up what waits, close the store, and log what happened.

        Takes about `load_timeout` seconds if the store hangs. May be called more than once.
        """
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + self._options.load_timeout
        with self._guard("shutdown"):
            self._give_up(self._options.load_timeout)
        for pool in (self._storing, self._loading):
            with self._guard("shutdown"):
                pool.dismiss(max(until - time.monotonic(), 0))
        for close in (self._lookups.shutdown, self._stores.close):
            with self._guard("shutdown"):
                close()
        self._rows = None  # vLLM cannot release its memory while a view is left
        logger.info("cuvee: %s", self.counters())


@dataclass(slots=True)
class _Job:
    """A job of vLLM: what it does, since when, and once it has ended, which of its chunks were stored or restored."""

    number: int
    stores: bool
    keys: list[bytes]
    metadata: Any
    since: float
    seconds: float = 0.0
    good: list[bytes] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
