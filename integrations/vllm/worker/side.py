"""A worker's side of the connector: restores entries into the engine's pages and stores what the engine computed.

    load:  store -> bytes -> codec -> pages            in a pool; the engine goes on
    save:  pages -> copy, inside the step -> codec -> store     in two pools; the copies have a budget

A `WorkerSide` has `loads` (which restores by `restore`), `blends` and `saves`. They share `state`.

Once the engine runs, no error leaves these modules. Where one occurs, the entry is not stored, or its blocks are
invalid and its load is over: the engine never waits for a load that will not end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.support.advice import without_advice
from cuvee.codec.support.once import Once
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.stores import Store
from cuvee.integrations.vllm.messages import Report, Seen
from cuvee.integrations.vllm.metrics import Recorder, summary
from cuvee.integrations.vllm.pages.draft_layers import DraftPages, Drafts
from cuvee.integrations.vllm.pages.state_pages import StatePages
from cuvee.integrations.vllm.phases import LoadPhase
from cuvee.integrations.vllm.setup import Setup
from cuvee.integrations.vllm.worker.blends import WorkerBlends
from cuvee.integrations.vllm.worker.loads import WorkerLoads
from cuvee.integrations.vllm.worker.saves import WorkerSaves
from cuvee.integrations.vllm.worker.state import WorkerPools, WorkerState
from cuvee.integrations.vllm.worker.step_times import StepTimes
from cuvee.kernels.devices import Mark

if TYPE_CHECKING:
    from cuvee.integrations.vllm.weights import Weights

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 1.0  # that a store gets at least to write what it queued, when the engine stops


class WorkerSide:
    """Executes the plans of the scheduler's side on one rank.

    Args:
        setup: of the engine.
        rank: tensor-parallel rank.
        codec: of this rank.
        store: read and written.
        recorder: figures, drained into the reports.
        weights: of the rank; None: they never change.

    Attributes:
        loads, blends, saves: what the engine has the rank do.
    """

    def __init__(
        self,
        setup: Setup,
        rank: int,
        codec: Codec,
        store: Store,
        recorder: Recorder,
        weights: Weights | None = None,
    ) -> None:
        options = setup.options
        self._weights = weights
        self._first = None if weights is None else weights.digest()  # of what the checkpoint's name stands for
        self._once = Once(logger)
        self._close_timeout = options.close_timeout
        self._guard = Guard(recorder)
        self._state = WorkerState(setup, rank, codec, store, recorder)
        self._coding = setup.coding(self._state.keys.key_ids)
        self._pools = WorkerPools(options.threads, options.load_timeout, options.store_niceness)
        self.loads = WorkerLoads(self._state, self._pools, self._guard)
        self.blends = WorkerBlends(self._state, self.loads, self._guard)
        budget = round(options.max_pending_gb * 1e9)
        self.saves = WorkerSaves(self._state, self._pools, self._guard, budget)
        self._times = StepTimes()

    def attach(
        self,
        cache: PagedCache,
        drafts: tuple[Drafts, PagedCache] | None = None,
        states: StatePages | None = None,
    ) -> None:
        """Use the engine's pages, those of a drafter's layers, and the states of recurrent layers; nothing can be
        loaded or stored before.

        Codes a chunk of zeros, so that no request waits for compilers.
        """
        coders = self._pools.coders
        self._state.attach(cache, coders, None if drafts is None else DraftPages(*drafts, coders), states)
        self._pools.use_free_cores()
        if cache.device.type == "cpu":  # threads of the codec run on the cores of the thread that first needs them
            self._pools.coders.submit(self._warm_up, cache).result()
        else:
            self._warm_up(cache)

    def detach(self) -> None:
        """Let go of the engine's pages, because their memory is given back until `attach` names others.

        Loads under way end, and what they have not restored is computed. Copies of pages are complete on return; they
        are encoded and stored meanwhile. A second call does nothing.
        """
        if self._state.coded is None:
            return
        self.loads.drop()
        Mark(self._state.device).wait()
        self._state.detach()

    @property
    def rank(self) -> int:
        """The tensor-parallel rank."""
        return self._state.rank

    @property
    def attached(self) -> bool:
        """Whether there are pages."""
        return self._state.coded is not None

    @without_advice()
    def _warm_up(self, cache: PagedCache) -> None:
        layout, tokens, codec = self._state.pages.layout, self._state.chunk, self._state.codec
        zeros = partial(torch.zeros, dtype=layout.torch_dtype, device=cache.device)
        chunk = PagedCache.dense(
            layout,
            [zeros(tokens, layer.kv_heads, layer.head_dim) for layer in layout.layers],
            [zeros(tokens, layer.kv_heads, layer.value_dim) for layer in layout.layers],
        )
        slots = torch.arange(tokens, device=cache.device)
        if codec.refinements:
            base, *refinements = codec.encode_parts(PagedChunks(chunk, [slots], [0]))[0]
            opened = codec.open(base, refinements=refinements)
        else:
            opened = codec.open(codec.encode(PagedChunks(chunk, [slots], [0]))[0])
        if not self._state.pages.direct:
            codec.decode_paged([opened], chunk, [slots]).check()
            return
        nowhere = torch.full((tokens,), NOWHERE, device=cache.device)
        codec.decode_paged([opened], cache, [nowhere]).check()

    # In the order in which the engine calls them at a step.

    def begin_step(self, step: int, confirmed: int) -> None:
        """See `WorkerSaves.begin_step`; the step is timed."""
        self.saves.begin_step(step, confirmed)
        if self.attached:
            with self._guard("start_loads"):
                self._times.begin(step, self._state.device)

    def end_step(self) -> None:
        """See `WorkerSaves.end_step`; the step is timed."""
        if self.attached:
            with self._guard("save"):
                self._times.end(self._state.device, self.saves.failing)
        self.saves.end_step()

    def settle(self, step: int, names: bool, coding: str = "") -> None:
        """Look whether the engine has the weights that it had, before it computes anything with others.

        Where the scheduler asks, all of them are read and reported. Otherwise a part is read; if it has changed, what
        waits to be stored is dropped, loads under way fail, and nothing is loaded or stored until the scheduler asks.
        """
        state, weights = self._state, self._weights
        with self._guard("start_loads"):
            if coding not in ("", self._coding):
                state.stale = "profile"
                self._once(
                    "profile", "cuvee: rank %d: nothing is loaded or stored, because the scheduler has another profile "
                    "or other secrets (%s) than this rank (%s): a file was replaced meanwhile, or hosts have different "
                    "ones; restart the engine", state.rank,
                    coding, self._coding, level=logging.ERROR,
                )  # fmt: skip
                return
            if names:
                now = None if weights is None else weights.digest()
                with state.lock:
                    state.stale = ""
                    state.report.seen.append(Seen(step, state.rank, self._first, now))
            elif weights is not None and self.attached and not state.stale and weights.changed():
                with state.lock:
                    state.stale = "weights"
                    state.report.changed.add(state.rank)
                self.saves.void()
                self.loads.void()

    def report(self, step: int) -> Report:
        """Return what happened since the last report; `step` was executed. A store whose counters fail costs no more
        than its figures.
        """
        state = self._state
        with state.lock:
            report, state.report = state.report, Report()
            _, pending = self.saves.queued()
        report.steps.append(step)
        with self._guard("report"):
            report.step_seconds = self._times.take()
        with self._guard("report"):
            state.recorder.gauge("pending_bytes", pending)
        with self._guard("report"):
            state.recorder.record_store(state.store.counters())
        with self._guard("report"):
            report.metrics = state.recorder.drain(gauges=True)
        return report

    def close(self) -> None:
        """Finish what is being stored, for at most `close_timeout` seconds, then log what was done and what is lost."""
        state, pools = self._state, self._pools
        deadline = time.monotonic() + self._close_timeout
        with state.lock:
            if state.closed:
                return
            state.closed = True
            jobs = self.loads.under_way()
        with self._guard("close"):
            pools.fetchers.dismiss(0, cancel=True)
        for job in jobs:  # not while pages are written: the engine is about to free them
            held = job.lock.acquire(timeout=max(deadline - time.monotonic(), 0))
            if not job.over:
                job.enter(LoadPhase.OVER)
            if held:
                job.lock.release()
        with self._guard("close"):
            pools.loaders.dismiss(0, cancel=True)
        with self._guard("close"):
            pools.encoders.dismiss(max(deadline - time.monotonic(), 0))
        with self._guard("close"):
            pools.writers.dismiss(max(deadline - time.monotonic(), 0))
        with self._guard("close"):  # what they decode is of no use any more; it may take until the pages are freed
            pools.coders.dismiss(max(deadline - time.monotonic(), _FLUSH_SECONDS))
        lost = {"encode": self.saves.queued()[0], "store": 0}
        with self._guard("close"):
            state.store.flush(max(deadline - time.monotonic(), _FLUSH_SECONDS))
        with self._guard("close"):
            lost["store"] = sum(tier.queued for tier in state.store.counters().values())
        with self._guard("close"):
            self._log_last(lost)

    def _log_last(self, lost: Mapping[str, int]) -> None:
        """Log and count what no report has told the engine."""
        state = self._state
        state.recorder.count("stores_skipped", sum(lost.values()), "stopped")
        if any(lost.values()):
            logger.warning(
                "cuvee: rank %d: %d chunks waited to be compressed and %d to be written when the engine stopped, and "
                "were not within close_timeout=%g s, or other ranks may not have computed them: they are lost",
                state.rank, lost["encode"], lost["store"], self._close_timeout,
            )  # fmt: skip
        state.recorder.record_store(state.store.counters())
        rest = state.recorder.drain()
        if rest is not None:
            logger.info("cuvee: rank %d, after its last report: %s", state.rank, summary(rest))
