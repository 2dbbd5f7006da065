"""Blends on one rank: compute, slice by slice, what the placed segments of a load leave to be computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cuvee.codec.errors import CuveeError, allocations
from cuvee.integrations.core.guard import Guard
from cuvee.integrations.vllm.messages import Blend
from cuvee.integrations.vllm.phases import LoadPhase
from cuvee.integrations.vllm.worker.loads import WorkerLoads
from cuvee.integrations.vllm.worker.restore import LoadJob
from cuvee.integrations.vllm.worker.state import WorkerState

if TYPE_CHECKING:  # engines that do not blend do without it
    from cuvee.integrations.vllm.blending.executing import PageBlend, PageBlender

logger = logging.getLogger(__name__)


class WorkerBlends:
    """The blends of one rank.

    Args:
        state: of the worker.
        loads: of which a blend is the last part.
        guard: contains errors.
    """

    def __init__(self, state: WorkerState, loads: WorkerLoads, guard: Guard) -> None:
        self._state = state
        self._loads = loads
        self._guard = guard

    def advance(self, requests: Sequence[str], tokens: int, blender: PageBlender) -> None:
        """Compute this step's slice of what these requests' blends leave to be computed, one blend after the other.

        Runs in the engine's thread, between the engine's own passes. All ranks do the same in the same order, because
        their layers wait for each other. So they first agree that all of them can.

        Args:
            requests: in order; the engine names a request again until its blend is reported as over.
            tokens: most tokens to compute.
            blender: of this rank.
        """
        left = float(tokens)
        for request in requests:
            if left <= 0:
                break
            job = self._loads.job(request)
            before, left = left, 0.0  # it stays 0 after an error, because the ranks may not have computed alike
            with self._guard("blend", None if job is None else partial(self._loads.abandon, job)):
                left = before - self._slice(job, before, blender)

    def _slice(self, job: LoadJob | None, tokens: float, blender: PageBlender) -> float:
        """Compute a slice of one blend; return the number of tokens it took, which is the same on all ranks."""
        blend = None if job is None else job.load.blend
        if job is None or blend is None:
            blender.agree(False)  # the other ranks may have the blend, and must not wait
            return 0
        with job.lock:
            if not blender.agree(job.phase in (LoadPhase.PLACED, LoadPhase.BLENDING)):
                self._loads.end(job, "blend")
                return 0
            begun = time.monotonic()
            try:
                with allocations(f"blending {job.load.end - blend.start} tokens"):
                    if job.blend is None:
                        job.blend = blender.begin(blend, job.load.end)
                        job.enter(LoadPhase.BLENDING)
                    spent = job.blend.advance(tokens)
            except Exception as error:
                level, trace = (logging.WARNING, None) if isinstance(error, CuveeError) else (logging.ERROR, error)
                text = "cuvee: request %s is not blended but computed: %s"
                logger.log(level, text, job.load.request, error, exc_info=trace)
                self._loads.end(job, "blend")
                return tokens  # the ranks have not computed alike
            job.compute_seconds += time.monotonic() - begun
            self._state.recorder.count("blend_slices")
            if job.blend.done:
                self._blended(job, blend, job.blend)
            return spent

    def _blended(self, job: LoadJob, blend: Blend, done: PageBlend) -> None:
        """Book a blend that is completely computed; `job.lock` is held."""
        recorder, tokens = self._state.recorder, done.tokens
        for kind, count in tokens.items():
            recorder.count("blend_tokens", count, kind)
        recorder.count("blend_seconds", job.compute_seconds)
        # As the scheduler expected: at this cost it may be more tokens, where they are cheaper.
        job.computed = tokens["new"] + blend.cost * (tokens["reused"] + tokens["recomputed"])
        job.valid_until = job.load.end
        self._loads.end(job)
