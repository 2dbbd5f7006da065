"""`CuveeConnector`: hands the calls of vLLM's V1 connector interface to the scheduler's side and the workers' side.

Only this module, `engine_text`, `other_connectors`, `planned`, `prometheus`, `setup`, `weights` and
`blending.paged_model` import vLLM. Tested with vLLM 0.32 and 0.33.

vLLM imports this module while it reads its configuration, long before it makes a connector. The codec is imported only
when a connector is made, because it imports numba. With numba's llvmlite in memory, vLLM 0.32 cannot start a worker on
a CPU: vLLM looks into every loaded module for kernels to replace, and one of llvmlite's objects answers to every name.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.executor.abstract import Executor
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from cuvee.codec.paged import PagedCache
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.identity.checkpoint import changed_while_loading
from cuvee.integrations.identity.weights_name import WeightsName
from cuvee.integrations.vllm.engine_text import line_breaks
from cuvee.integrations.vllm.messages import Report, StepPlan
from cuvee.integrations.vllm.metrics import Recorder
from cuvee.integrations.vllm.other_connectors import have_failed_loads_computed, multi_connector
from cuvee.integrations.vllm.pages.engine_pages import find_pages
from cuvee.integrations.vllm.pages.state_pages import StatePages
from cuvee.integrations.vllm.prometheus import CuveePrometheus, CuveeStats
from cuvee.integrations.vllm.shared_stores import borrow_store, return_store
from cuvee.integrations.vllm.weight_calls import watch_calls
from cuvee.integrations.vllm.weights import Weights, named_weights

# vLLM imports this module before its workers start. On a CPU they call `vars` on all modules, which fails for a module
# of llvmlite's. So whatever imports Numba is imported later.
if TYPE_CHECKING:
    from cuvee.integrations.identity.identity_records import IdentityRecords
    from cuvee.integrations.vllm.blending.executing import PageBlender
    from cuvee.integrations.vllm.pages.draft_layers import Drafts
    from cuvee.integrations.vllm.scheduler.side import SchedulerSide
    from cuvee.integrations.vllm.worker.side import WorkerSide

logger = logging.getLogger(__name__)


def _join_log() -> None:
    """Log to vLLM's handlers, unless the application configured logging itself."""
    ours, engine = logging.getLogger("cuvee"), logging.getLogger("vllm")
    if not ours.handlers and engine.handlers:
        ours.handlers, ours.propagate = list(engine.handlers), False
        ours.setLevel(engine.level)


_join_log()

# Seconds that a step without tokens waits for a load to end. Otherwise the engine would ask again at once, and keep the
# interpreter from the threads that decode. A request that arrives meanwhile waits no longer than this.
_IDLE_WAIT = 2e-3
_WORKERS_TIME = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
_HIT_SOURCES = {"memory": CacheHitSource.HOST, "disk": CacheHitSource.DISK}


@dataclass
class CuveeMetadata(KVConnectorMetadata):
    """From the scheduler to the workers."""

    plan: StepPlan


@dataclass
class CuveeWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> CuveeWorkerMetadata:
        """Merge the reports of two ranks."""
        if not isinstance(other, CuveeWorkerMetadata):
            raise TypeError(f"other: must be a report of a cuvee worker, got {type(other).__name__}")
        self.report.add(other.report)
        return self


class CuveeConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts compressed in a store, and loads it for later prompts.

    vLLM makes one for its scheduler and one for each worker. `connector_config.Options` lists the options.

    Raises:
        CuveeError: at start-up, for an option, a model or an engine feature that is not supported.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        from cuvee.integrations.identity.identity_records import IdentityRecords
        from cuvee.integrations.identity.lora_files import Adapters, watch_loads
        from cuvee.integrations.vllm.scheduler.side import SchedulerSide
        from cuvee.integrations.vllm.setup import Setup

        _join_log()  # vLLM may have imported this module to check its options, before it configured its log
        self._setup = Setup.of_engine(vllm_config, kv_cache_config)
        outer = multi_connector()
        have_failed_loads_computed(vllm_config, outer)
        self._setup = replace(self._setup, other_connectors=outer is not None)
        executor = vllm_config.parallel_config.distributed_executor_backend
        self._store = borrow_store(self._setup.options.store, executor)
        self._cache_hit_source = _HIT_SOURCES.get(self._store.name, CacheHitSource.EXTERNAL_UNSPECIFIED)
        self._closed = False
        self._scheduler: SchedulerSide | None = None
        self._records: IdentityRecords | None = None
        self._worker: WorkerSide | None = None
        self._blender: PageBlender | None = None
        self._cached_layers = () if self._setup.layers is None else self._setup.layers.names
        self._weights: Weights  # from `register_kv_caches` on
        self._drafts: Drafts | None = None
        self._recorder = Recorder(self._rank() if role is KVConnectorRole.WORKER else 0)
        self._guard = Guard(self._recorder)
        if role is KVConnectorRole.SCHEDULER:
            if executor != "uni":
                _give_workers_time(vllm_config.shutdown_timeout)
            model = vllm_config.model_config
            identity, make = self._setup.naming(vllm_config)
            if changed_while_loading(vllm_config, model.model):
                self._setup = replace(self._setup, loads=False, stores=False)
            weights = WeightsName(make, partial(self._recorder.count, "failures", label="weights"))
            weights.wait_at_start()
            adapters = Adapters()
            if vllm_config.lora_config is not None:
                watch_loads(adapters, Executor)
            self._records = IdentityRecords(
                self._setup.record, self._store, self._setup.options.key_ids(), self._recorder
            )
            self._scheduler = SchedulerSide(
                self._setup, identity, self._store, self._recorder, adapters,
                breaks=line_breaks(self._setup.options.blend, model), weights=weights, records=self._records,
            )  # fmt: skip
            from vllm.v1.engine.core import EngineCore

            watch_calls(EngineCore, self._scheduler.reset)
            alone = multiprocessing.parent_process() is None  # then this process stores what waits before it exits
            if self._setup.stores and not vllm_config.shutdown_timeout and not alone:
                logger.info(
                    "cuvee: vLLM ends this engine when it is stopped, and chunks that wait to be stored are lost; "
                    "--shutdown-timeout 60 gives it time, or llm.llm_engine.engine_core.shutdown(timeout=60) at the "
                    "end of a program"
                )
        atexit.register(self.shutdown)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return True: before vLLM 0.33 sleeps, the connector lets go of its pages."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may drop what it is given."""
        return False

    # The scheduler's side ---------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """See `SchedulerSide.arrived`."""
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `SchedulerSide.matched_tokens`."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See `SchedulerSide.allocated`."""
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See `SchedulerSide.plan`."""
        return CuveeMetadata(self._scheduling.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """See `SchedulerSide.take`."""
        metadata = connector_output.kv_connector_worker_meta
        if metadata is not None:
            self._scheduling.take(metadata.report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished_all_groups`, for a model with one group of layers."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let the engine free the blocks at once: they were copied, or are before anything overwrites them."""
        outcome, reason = self._scheduling.outcome(request), self._scheduling.explanation(request)
        if reason is not None:
            outcome = {**(outcome or {}), "found": reason}
        self._scheduling.finished(request, block_ids)
        return False, None if outcome is None else {"cuvee": outcome}

    def has_pending_push_work(self) -> bool:
        """Whether an engine without requests is to take another step; see `SchedulerSide.waits_for_a_step`."""
        return self._scheduling.waits_for_a_step

    def reset_cache(self) -> bool:
        """See `SchedulerSide.reset`."""
        return self._scheduling.reset()

    # The workers' side ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the layout of the pages, or refuse to start."""
        from cuvee.integrations.vllm.pages.draft_layers import Drafts
        from cuvee.integrations.vllm.worker.side import WorkerSide

        layers = self._attention_layers()
        shares = {name: getattr(layers.get(name), "kv_sharing_target_layer_name", None) for name in kv_caches}
        self._setup.check_registered(shares, self._vllm_config)
        rank = self._rank()
        codec = self._setup.codec(rank)
        first = next(iter(self._cached_layers), "")  # a drafter's layers have another model
        self._drafts = Drafts.of_engine(self._vllm_config, self._kv_cache_config, self._setup)
        self._weights = Weights(layers.get(first), named_weights)
        worker = WorkerSide(self._setup, rank, codec, self._store, self._recorder, self._weights)
        self._attach(worker, kv_caches)
        self._worker = worker

    def _rank(self) -> int:
        """Return the number of this worker among all that store a part of a token."""
        rank: int = get_tensor_model_parallel_rank()
        return rank

    def _attention_layers(self) -> dict[str, Any]:
        """Return the engine's attention layers by name."""
        layers: dict[str, Any] = get_layers_from_vllm_config(self._vllm_config, AttentionLayerBase)
        return layers

    def unregister_kv_caches(self) -> None:
        """Let go of the engine's pages before it gives their memory back (vLLM 0.33, sleep mode). See
        `WorkerSide.detach`. A second call does nothing. The engine has called `reset_cache` before.
        """
        if self._worker is not None:
            self._worker.detach()
            self._blender = None

    def restore_kv_caches(self) -> None:
        """Use the pages that the engine's layers have after it woke up. A second call does nothing.

        What was stored before is found again unless weights have changed by the next step (`SchedulerSide.reset`).
        """
        if self._worker is not None and not self._worker.attached:
            layers = self._attention_layers()
            drafted = () if self._drafts is None else self._drafts.layers.names
            self._attach(self._worker, {name: layers[name].kv_cache for name in (*self._cached_layers, *drafted)})

    def _attach(self, worker: WorkerSide, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the layout of the pages, and give them to the worker and to the blender."""
        in_order = {name: kv_caches[name] for name in self._cached_layers}
        setup, layers = self._setup, self._attention_layers()
        layout = setup.layout_of_pages(worker.rank)
        pages = find_pages(layout, layers, in_order, setup.codes)
        drafts = None if self._drafts is None else self._drafts.found(layers, kv_caches)
        held = {layer.name: layers[layer.name].kv_cache for layer in setup.recurrent}
        worker.attach(pages, drafts, StatePages(setup.recurrent, held, setup.layout.dtype) if held else None)
        if setup.options.blend is not None:
            self._blender = self._page_blender(pages, in_order)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy the tails of requests that have ended. The engine calls this at every step, with or without preemption,
        before it writes to any block. `start_load_kv` may come after the step has computed.
        """
        plan = _plan_of(kv_connector_metadata)
        self._working.begin_step(plan.step, plan.confirmed)
        self._working.saves.save(plan.last_saves)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads then compute this step's slice of blends."""
        self._working.settle(self._plan.step, self._plan.names, self._plan.coding)
        self._working.loads.start(self._plan.loads)
        self._working.loads.drop(self._plan.drops)
        # vLLM's first model runner calls this after a forward that raised, too: other ranks may wait inside theirs.
        if self._blender is not None and not self._working.saves.failing:
            self._working.blends.advance(self._plan.blends, self._plan.blend_tokens, self._blender)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request waits for its whole load, not layer by layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a chunk spans all layers and is copied after the last one."""

    def wait_for_save(self) -> None:
        """Copy the entries that this step completed. vLLM's first model runner calls this in a `finally`: nothing is
        copied after a forward that raised.
        """
        self._working.end_step()
        self._working.saves.save(self._plan.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads are over."""
        return None, self._working.loads.take_arrived(self._patience) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose loads are over, and those of them that are to be computed as a whole."""
        ended = self._working.loads.take_ended(self._patience)
        results = KVConnectorTransferResults(finished_recving={job.load.request for job in ended})
        results.failed_recving = {job.load.request for job in ended if job.failed}
        return results

    @property
    def _patience(self) -> float:
        """Seconds that this step waits for a load to end."""
        return _IDLE_WAIT if self._plan.idle else 0.0

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks to recompute; none where loads fail as a whole (`WorkerState.fails_whole`)."""
        return self._working.loads.take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        """Return what happened on this rank."""
        return CuveeWorkerMetadata(self._working.report(self._plan.step))

    # Both -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> CuveeStats | None:
        """Return figures for the log and for Prometheus; the workers' figures come through the scheduler's side."""
        if self._scheduler is None:
            return None
        with self._guard("stats"):
            data = self._recorder.drain()
            return None if data is None else CuveeStats(data)
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> CuveeStats:
        """Wrap figures that come from another process."""
        return CuveeStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> CuveePrometheus:
        """Return the Prometheus metrics of this connector."""
        return CuveePrometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish what is being stored and log what was done; further calls do nothing."""
        atexit.unregister(self.shutdown)
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
        if not self._closed:
            self._closed = True
            if self._records is not None:  # once the worker has stored what waited
                with self._guard("close"):
                    self._records.close()
            with self._guard("close"):
                return_store(self._setup.options.store)

    @property
    def _scheduling(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("this connector belongs to a worker")
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("register_kv_caches was not called")
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        return _plan_of(self._get_connector_metadata())

    def _page_blender(self, pages: PagedCache, kv_caches: dict[str, torch.Tensor]) -> PageBlender:
        """Return the blender for these pages, which runs the model that the engine has loaded."""
        from cuvee.blend import runs
        from cuvee.blend.recompute import MOST_ROWS
        from cuvee.integrations.vllm.blending.executing import PageBlender
        from cuvee.integrations.vllm.blending.paged_model import LoadedModel, agree_over_ranks, total_over_ranks
        from cuvee.integrations.vllm.blending.planning import least_slice

        layers, spec = self._attention_layers(), self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        attention = {name: layers[name] for name in kv_caches}
        model = LoadedModel(self._vllm_config, pages.layout, attention, spec, self._weights.models)
        rows = min(MOST_ROWS, least_slice(self._setup.step_tokens))
        runs.prepare()
        return PageBlender(
            pages, self._setup.block_tokens, model.open, model.context_overhead, total_over_ranks, agree_over_ranks,
            rows,
        )  # fmt: skip


def _give_workers_time(seconds: float) -> None:
    """Let workers in processes of their own finish what they store for as long as the engine may take to stop: vLLM
    ends them after 9 s whatever its `shutdown_timeout` is, unless its environment variable says otherwise.
    """
    if seconds > envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS:
        os.environ.setdefault(_WORKERS_TIME, str(round(seconds)))


def _plan_of(metadata: KVConnectorMetadata) -> StepPlan:
    if not isinstance(metadata, CuveeMetadata):
        raise TypeError(f"metadata: must be of a cuvee scheduler, got {type(metadata).__name__}")
    return metadata.plan
