"""Requests that ask for a deadline or a floor of quality: what their loads aim at, and what became of that.

**What is worse than stored keeps no exact name.** A load may restore an entry from fewer parts than a chunk has,
because the deadline or the store left out the others. From the first such block on, the request's blocks are renamed
before the engine registers them, so that they never answer for another request, and the request stores nothing: what it
computes follows from them.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from cuvee.codec.errors import InputError
from cuvee.integrations.guard import Once
from cuvee.integrations.vllm.block_names import set_apart
from cuvee.integrations.vllm.load_target import Targeted
from cuvee.integrations.vllm.messages import Aim, Delivery
from cuvee.integrations.vllm.scheduler_state import SchedulerState, Tracked
from cuvee.naming.identity import canonical

logger = logging.getLogger(__name__)

_DIGITS = 3  # of figures for clients


class SchedulerTargets:
    """Keeps account of targets.

    Args:
        state: of the scheduler's side.
        plans: whether loads can be planned in this engine.
        known_kl: whether the KL of parts was measured; without that, no floor can be kept.
    """

    def __init__(self, state: SchedulerState, plans: bool, known_kl: bool) -> None:
        self._state = state
        self._plans = plans
        self._known_kl = known_kl
        self._engine = state.options.load_target
        # Of each request's last load, also if the request is not cached any more: who asked, and what ranks delivered.
        self._loading: dict[str, Tracked] = {}
        self._delivered: dict[str, list[Delivery]] = {}
        self._due: dict[int, list[Targeted]] = {}  # whose first token a step computes
        self._once = Once(logger)

    def begin(self, tracked: Tracked) -> None:
        """Read what a new request asks for."""
        request = tracked.request
        try:
            target = self._engine.of_request(request.kv_transfer_params)
        except InputError as error:
            self._refuse(tracked, "parameters", str(error))
            return
        if not target:
            return
        if not self._plans:
            self._refuse(tracked, "engine", "loads of models with sliding windows are not planned")
        elif target.kl_max is not None and not self._known_kl:
            self._refuse(tracked, "profile", "no KL was measured for the profile, so kl_max cannot be kept")
        else:
            waited = max(time.time() - request.arrival_time, 0.0)
            tracked.targeted = Targeted(target, self._state.clock() - waited)

    def loading(self, tracked: Tracked, queued: Callable[[], int], prefill: tuple[float, float, float]) -> Aim | None:
        """Return what a load aims at that is about to begin; None: it restores everything.

        Args:
            tracked: the request.
            queued: counts the tokens that the engine computes first, over all requests.
            prefill: what computing costs, as in `Aim`.
        """
        self._loading[tracked.request.request_id] = tracked
        self._delivered.pop(tracked.request.request_id, None)
        targeted = tracked.targeted
        if targeted is None or targeted.first_token is not None:  # preempted after its first token: there is no hurry
            return None
        deadline = targeted.target.deadline
        left = None if deadline is None else targeted.arrived + deadline - self._state.clock()
        return Aim(left, targeted.target.kl_max, tracked.request.num_tokens - tracked.end, queued(), prefill)

    def computes(self, tracked: Tracked, before: int, after: int, step: int) -> None:
        """Note that a step computes a request's tokens `before … after`."""
        targeted = tracked.targeted
        if targeted is not None and before < tracked.request.num_prompt_tokens <= after:
            targeted.step = step
            self._due.setdefault(step, []).append(targeted)

    def executed(self, steps: Sequence[int]) -> None:
        """Note that steps were executed."""
        for step in steps:
            for targeted in self._due.pop(step, ()):
                self._settle(targeted)

    def delivered(self, delivery: Delivery) -> None:
        """Note what a rank restored, before the engine hears that the load is over. What its plan leaves out is
        computed, and not loaded after all.
        """
        tracked = self._loading.get(delivery.request)
        if tracked is None:  # the request has ended
            return
        self._delivered.setdefault(delivery.request, []).append(delivery)
        if not delivery.complete:
            tracked.refused = True
            # What is computed may be better than what the store has of it.
            tracked.saved = min(tracked.saved, (delivery.start + sum(delivery.tokens)) // self._state.chunk)
        self._keep_apart(tracked, delivery)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._loading.pop(request_id, None)
        self._delivered.pop(request_id, None)

    def told(self, tracked: Tracked) -> dict[str, Any] | None:
        """Return what the client learns; None: it asked for nothing."""
        if tracked.target_refused:
            return {"refused": tracked.target_refused}
        targeted = tracked.targeted
        if targeted is None:
            return None
        if targeted.step:  # the step is over, although its report is still to come
            self._settle(targeted)
        said: dict[str, Any] = {"loaded_tokens": 0, "parts": [0] * self._state.parts}
        delivered = self._of_all_ranks(tracked.request.request_id)
        for tokens, parts in zip(*delivered, strict=True):
            said["loaded_tokens"] += tokens
            said["parts"][parts - 1] += tokens
        kls = [each.kl for each in self._delivered.get(tracked.request.request_id, ())]
        known = [kl for kl in kls if kl is not None]
        if known and len(known) == len(kls):
            said["expected_kl"] = _rounded(max(known))
        if targeted.first_token is not None:
            said["first_token_ms"] = _rounded(1e3 * targeted.first_token)
            deadline = targeted.target.deadline
            if deadline is not None:
                said["deadline_met"] = targeted.first_token <= deadline
        return said

    def _of_all_ranks(self, request_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens and the parts of the entries that all ranks have restored of a load, as far as is known."""
        deliveries = self._delivered.get(request_id)
        if not deliveries:
            return (), ()
        common = min(len(each.tokens) for each in deliveries)
        parts = tuple(min(each.parts[at] for each in deliveries) for at in range(common))
        return deliveries[0].tokens[:common], parts

    def _keep_apart(self, tracked: Tracked, delivery: Delivery) -> None:
        """Rename a request's blocks from the first on that is worse than what is stored, if there is one."""
        full = self._state.parts
        at = next((at for at, parts in enumerate(delivery.parts) if parts < full), None)
        if at is None:
            return
        first = (delivery.start + sum(delivery.tokens[:at])) // self._state.block
        recipe = canonical(first.to_bytes(8, "little"), bytes(delivery.parts))
        set_apart(tracked.request, first, hashlib.blake2b(recipe, digest_size=32, person=b"cuvee-parts").digest())
        tracked.unstored = "quality"

    def _settle(self, targeted: Targeted) -> None:
        """Note that a first token is there."""
        if targeted.first_token is not None:
            return
        targeted.first_token = self._state.clock() - targeted.arrived
        deadline = targeted.target.deadline
        if deadline is not None:
            self._state.recorder.count("deadlines", label="met" if targeted.first_token <= deadline else "missed")

    def _refuse(self, tracked: Tracked, reason: str, why: str) -> None:
        """Plan nothing for a request; count why, and log each reason once, so that clients cannot fill the log."""
        tracked.target_refused = reason
        self._state.recorder.count("deadlines", label="refused")
        self._once(reason, "cuvee: the load of request %s is not planned: %s", tracked.request.request_id, why)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
