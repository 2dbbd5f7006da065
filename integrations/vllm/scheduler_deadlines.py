"""Requests with a deadline: by when their loads have to be done, and what was loaded coarsely because of that.

**What is worse than stored keeps no exact name.** A load may restore an entry from fewer parts than a chunk has,
because the deadline or the store left out the others. From the first such block on, the request's blocks are renamed
before the engine registers them, so that they never answer for another request, and the request stores nothing: what it
computes follows from them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from itertools import accumulate

from cuvee.codec.errors import InputError
from cuvee.integrations.costs import LinearCost
from cuvee.integrations.guard import Once
from cuvee.integrations.vllm.block_names import set_apart
from cuvee.integrations.vllm.messages import Aim, Delivery, Report
from cuvee.integrations.vllm.request_params import deadline_of
from cuvee.integrations.vllm.scheduler_state import SchedulerState, Tracked
from cuvee.naming.identity import canonical

logger = logging.getLogger(__name__)


class SchedulerDeadlines:
    """Keeps account of deadlines.

    Args:
        state: of the scheduler's side.
        possible: whether loads may end early in this engine.
        prefill: what computing costs.
    """

    def __init__(self, state: SchedulerState, possible: bool, prefill: LinearCost) -> None:
        self._state, self._possible, self._prefill = state, possible, prefill
        self._engine = state.options.deadline
        self._loading: dict[str, Tracked] = {}  # who loads, also if it is not cached any more
        self._computing: list[tuple[int, float]] = []  # steps that compute a first token, and when that is due
        self._once = Once(logger)

    def begin(self, tracked: Tracked) -> None:
        """Read what a new request asks for."""
        request = tracked.request
        try:
            deadline = deadline_of(request.kv_transfer_params, self._engine)
        except InputError as error:
            self._refuse(tracked, "parameters", str(error))
            return
        if deadline is None:
            return
        if not self._possible:
            self._refuse(tracked, "engine", "windows and recurrent layers load a prefix as a whole or not at all")
        else:
            waited = max(time.time() - request.arrival_time, 0.0)
            tracked.due = self._state.clock() - waited + deadline

    def loading(self, tracked: Tracked) -> Aim | None:
        """Return what a load aims at that is about to begin; None: it restores everything."""
        self._loading[tracked.request.request_id] = tracked
        if tracked.due is None:
            return None
        left = tracked.due - self._state.clock()
        return Aim(left, tracked.request.num_tokens - tracked.end, self._prefill.learned)

    def note_step(self, tracked: Tracked, before: int, after: int, step: int) -> None:
        """Note that a step computes a request's tokens `before … after`."""
        if tracked.due is not None and before < tracked.request.num_prompt_tokens <= after:
            self._computing.append((step, tracked.due))
            tracked.due = None  # there is no hurry if it is preempted from here on

    def take(self, report: Report) -> None:
        """Count the deadlines of first tokens that were computed."""
        now = self._state.clock()
        for step, due in self._computing:
            if step in report.steps:
                self._state.recorder.count("deadlines", label="met" if now <= due else "missed")
        self._computing = [(step, due) for step, due in self._computing if step not in report.steps]

    def note_delivery(self, delivery: Delivery) -> None:
        """Note what a rank restored, before the engine hears that the load is over. What its deadline leaves out is
        computed, and not loaded after all. From the first block on that is worse than what is stored, the request's
        blocks are renamed.
        """
        tracked = self._loading.get(delivery.request)
        if tracked is None:  # the request has ended
            return
        ends = list(accumulate(delivery.tokens, initial=delivery.start))
        if not delivery.complete:
            tracked.refused = True
            # What is computed may be better than what the store has of it.
            tracked.saved = min(tracked.saved, ends[-1] // self._state.chunk)
        worse = [end for end, parts in zip(ends, delivery.parts, strict=False) if parts < self._state.parts]
        if worse:
            first = worse[0] // self._state.block
            recipe = canonical(first.to_bytes(8, "little"), bytes(delivery.parts))
            set_apart(tracked.request, first, hashlib.blake2b(recipe, digest_size=32, person=b"cuvee-parts").digest())
            tracked.unstored = "quality"

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._loading.pop(request_id, None)

    def _refuse(self, tracked: Tracked, reason: str, why: str) -> None:
        """Load a request as if it had no deadline; count why, and log each reason once, so that clients cannot fill the
        log.
        """
        self._state.recorder.count("deadlines", label="refused")
        self._once(reason, "cuvee: request %s has no deadline: %s", tracked.request.request_id, why)
