"""Loads on one rank: start them, wait for them, give them up, and tell the engine how each of them ended.

A page that is being restored belongs to a request that waits for it, so no other request touches it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

from cuvee.codec.errors import CuveeError
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.vllm.decision import Restored, decoding_work
from cuvee.integrations.vllm.messages import Delivery, Load
from cuvee.integrations.vllm.phases import LoadPhase
from cuvee.integrations.vllm.worker.deadlines import DeadlineLoad
from cuvee.integrations.vllm.worker.restore import LoadJob, Restorer
from cuvee.integrations.vllm.worker.state import WorkerPools, WorkerState
from cuvee.kernels.devices import Mark

logger = logging.getLogger(__name__)


class WorkerLoads:
    """The loads of one rank.

    Args:
        state: of the worker.
        pools: threads of the worker.
        guard: contains errors.
    """

    def __init__(self, state: WorkerState, pools: WorkerPools, guard: Guard) -> None:
        self._state = state
        self._pools = pools
        self._guard = guard
        self._restorer = Restorer(state, pools)
        # The state's lock guards these.
        self._jobs: dict[str, LoadJob] = {}
        self._ended: list[LoadJob] = []  # of which the engine has not heard
        self._invalid: set[int] = set()
        self._moved = 0.0  # when a thread last began with a load

    def start(self, loads: Sequence[Load]) -> None:
        """Begin to restore. The engine learns of the end by `take_arrived`, and counts no block as cached before."""
        ready: Mark | None = None
        for load in loads:
            job = LoadJob(load, time.monotonic(), load.start, load.end)
            with self._state.lock:
                self._jobs[load.request] = job
            if self._state.stale:
                self.abandon(job)
                continue
            with self._guard("start_loads", partial(self.abandon, job)):
                ready = ready or Mark(self._state.device)
                self._pools.loaders.submit(self._load, job, ready)

    def take_arrived(self, patience: float = 0.0) -> set[str]:
        """Return the requests of `take_ended`."""
        return {job.load.request for job in self.take_ended(patience)}

    def take_ended(self, patience: float = 0.0) -> list[LoadJob]:
        """Return the loads that ended since the last call, successfully or not. Gives up loads that take too long. A
        load that queues does not, as long as threads still begin with others.

        Args:
            patience: seconds to wait for the first, if any load is under way.
        """
        state = self._state
        if patience:
            with state.progress:
                state.progress.wait_for(lambda: self._ended or state.report.placed or not self._jobs, patience)
        now = time.monotonic()
        with state.lock:
            restoring = [job for job in self._jobs.values() if job.phase is LoadPhase.RESTORING]
            overdue = [job for job in restoring if now - (job.started or max(job.begun, self._moved)) > state.timeout]
        for job in overdue:
            with self._guard("take_arrived"):
                self._give_up(job)
        with state.lock:
            ended, self._ended = self._ended, []
        return ended

    def take_invalid_blocks(self) -> set[int]:
        """Return the engine's blocks that were to be restored and are not, since the last call."""
        with self._state.lock:
            invalid, self._invalid = self._invalid, set()
        return invalid

    def job(self, request: str) -> LoadJob | None:
        """Return the load under way for a request; None: there is none."""
        with self._state.lock:
            return self._jobs.get(request)

    def under_way(self) -> list[LoadJob]:
        """Return the loads under way; the state's lock is held."""
        return list(self._jobs.values())

    def drop(self, requests: Sequence[str] | None = None) -> None:
        """End loads with what is valid by now, those of these requests or all: blends that are not computed after all,
        or pages that are given back. On return, no thread writes to their pages.
        """
        with self._state.lock:
            jobs = [job for name, job in self._jobs.items() if requests is None or name in requests]
        for job in jobs:
            with self._guard("drop"):
                self.abandon(job)

    def void(self) -> None:
        """End all loads with nothing, because the weights have changed. On return, no thread writes to their pages."""
        with self._state.lock:
            jobs = self.under_way()
        for job in jobs:
            with self._guard("drop"), job.lock:
                job.valid_until, job.cause = job.load.start, "the weights have changed"
                self.end(job)

    def _load(self, job: LoadJob, ready: Mark) -> None:
        load = job.load
        with self._state.lock:
            self._moved = job.started = time.monotonic()
        with self._guard("load", partial(self.abandon, job)):
            try:
                with ready.followed():
                    batches = self._restorer.fetched(job)
                    if load.aim is not None:
                        batches = DeadlineLoad(self._state, self._pools, self._restorer, job, load.aim).fetched()
                    for batch in batches:
                        with job.lock:
                            if job.over:
                                return
                            self._restorer.restore(job, batch)
            except CuveeError as error:
                job.cause = "an entry was damaged" if error.blames_blob else "an entry was gone or could not be read"
                logger.warning(
                    "cuvee: request %s: %s; its tokens from %d on are recomputed",
                    load.request, error, self._valid_until(job),
                )  # fmt: skip
            except Exception:
                if not (job.over or self._state.closed):  # otherwise it was given up, or the worker closes
                    logger.exception(
                        "cuvee: request %s: its tokens from %d on are recomputed", load.request, self._valid_until(job)
                    )
            else:
                if load.blend is not None:
                    self._place(job)
                    return
            # Without the lock, because the store may hang; and before the end, so that the entry can be stored again.
            self._restorer.discard(job)
            with job.lock:
                self.end(job)

    def _place(self, job: LoadJob) -> None:
        """Report that everything a blend reuses is placed; the scheduler's side says when the rest is computed."""
        with job.lock, self._state.lock:
            if not job.over:
                job.enter(LoadPhase.PLACED)
                job.place_seconds = time.monotonic() - job.begun
                self._state.report.placed.append(job.load.request)
                self._state.progress.notify()

    def _give_up(self, job: LoadJob) -> None:
        """Declare a load dead, unless its pages are being written: then that is left to the next call."""
        if not job.lock.acquire(blocking=False):
            return
        try:
            if not job.over:
                logger.warning(
                    "cuvee: request %s: no end of its load after load_timeout=%g s; tokens from %d on are recomputed",
                    job.load.request, self._state.timeout, self._valid_until(job),
                )  # fmt: skip
                job.cause = "it took longer than load_timeout"
                self.end(job, "timeout")
        finally:
            job.lock.release()
        self._state.store.report_overdue("get_many", self._state.timeout)

    def abandon(self, job: LoadJob) -> None:
        """End a load or blend that failed in an unforeseen place, with what is valid by now."""
        with job.lock:
            self.end(job)

    def end(self, job: LoadJob, failure: str = "load") -> None:
        """Book the outcome; `job.lock` is held. A second call does nothing."""
        if job.over:
            return
        job.enter(LoadPhase.OVER)
        with self._guard("load"):  # first: whoever hears of the end finds it counted
            self._count_load(job, failure)
        with self._guard("load", partial(self._book_as_failed, job)):
            self._book(job)

    def _book(self, job: LoadJob) -> None:
        load, done, chunk = job.load, job.valid_until, self._state.chunk
        seconds = time.monotonic() - job.begun
        incomplete = done < load.end
        failed = done < job.goal
        missing = load.blocks[done // self._state.block - load.start // self._state.block :] if incomplete else []
        work = decoding_work((entry.tokens for entry in load.entries if entry.kind != "state"), chunk)
        unsaved = [
            entry.digest
            for entry in (load.entries if failed else ())
            if entry.kind == "segment" or entry.start >= done // chunk * chunk
        ]
        delivery = self._delivery(job) if self._state.parts > 1 or load.aim is not None else None
        with self._state.lock:
            report = self._state.report
            if incomplete:  # first: the engine must not hear of the end alone
                self._fail(job, missing)
            if failed:
                report.failed.add(load.request)
                report.causes[load.request] = job.cause
            if delivery is not None:
                report.delivered.append(delivery)
            self._is_over(job)
            report.unsaved.update(unsaved)
            if incomplete or load.aim is not None:
                pass  # its time says little about loads of this length
            elif load.blend is None:
                report.restored.append(Restored("load", work, 0.0, seconds))
            else:
                report.restored.append(Restored("blend", work, job.computed, job.place_seconds + job.compute_seconds))

    def _book_as_failed(self, job: LoadJob) -> None:
        """Book a load about which nothing is certain: all blocks that it was to fill are invalid."""
        load = job.load
        with self._state.lock:
            if self._jobs.get(load.request) is not job:  # the engine may have heard of its end
                return
            self._fail(job, load.blocks)
            self._state.report.failed.add(load.request)
            self._is_over(job)

    def _delivery(self, job: LoadJob) -> Delivery:
        """Count and return what the engine keeps of a load's prefix."""
        load, valid = job.load, self._valid_until(job)
        placed = [len(load.placed(entry)) for entry in load.prefix]
        kept = sum(entry.start < valid for entry in load.prefix)
        parts = tuple(job.parts[entry.start] for entry in load.prefix[:kept])
        recorder = self._state.recorder
        for tokens, count in zip(placed, parts, strict=False):
            recorder.count("loaded_at", tokens, str(count))
        return Delivery(load.request, load.start, tuple(placed[:kept]), parts, valid >= load.exact)

    def _fail(self, job: LoadJob, blocks: Sequence[int]) -> None:
        """Have the engine compute these blocks of a load, or all of it; the state's lock is held."""
        job.failed = self._state.fails_whole
        if not job.failed:
            self._invalid.update(blocks)

    def _valid_until(self, job: LoadJob) -> int:
        """Return the position before which the engine keeps what a load has restored, if the load ends now."""
        whole = job.valid_until < job.load.end and self._state.fails_whole
        return job.load.start if whole else job.valid_until

    def _is_over(self, job: LoadJob) -> None:
        """Tell the engine of the end of a load; the state's lock is held."""
        request = job.load.request
        self._ended.append(job)
        self._state.report.ended.append(request)
        if self._jobs.get(request) is job:
            del self._jobs[request]
        self._state.progress.notify()

    def _count_load(self, job: LoadJob, failure: str) -> None:
        load, done, recorder = job.load, self._valid_until(job), self._state.recorder
        recorder.count("load_seconds", time.monotonic() - job.begun)
        recorder.count("loaded_tokens", done - load.start)
        if done < load.end:
            if job.valid_until == job.goal:
                recorder.count("loaded_at", load.end - done, "0")
            else:
                recorder.count("failures", label=failure)
                recorder.count("recomputed_tokens", load.end - done)
