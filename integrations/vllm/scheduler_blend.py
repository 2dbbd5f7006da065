"""Blends in the scheduler: placed by every rank, then recomputed by all ranks in the same steps."""

from __future__ import annotations

from collections.abc import Sequence

from cuvee.integrations.vllm.blending.planning import least_slice
from cuvee.integrations.vllm.messages import Report


class SchedulerBlends:
    """Keeps account of the blends that ranks have or get.

    Args:
        shards: ranks that have to place the segments of each.
        step_tokens: most tokens that a step of the engine computes.
    """

    def __init__(self, shards: int, step_tokens: int) -> None:
        self._shards = shards
        self._step_tokens = step_tokens
        self._placed: dict[str, int] = {}  # number of ranks that have placed the segments of a request
        self._ready: list[str] = []  # requests that all ranks can recompute, or have begun to
        self._drops: list[str] = []

    def begin(self, request_id: str) -> None:
        """Wait for the ranks to place the segments of a request."""
        self._placed[request_id] = 0

    def ready(self) -> list[str]:
        """Return the requests to recompute in the next step."""
        return list(self._ready)

    def budget(self, scheduled: int) -> int:
        """Return the number of tokens that blends may compute in a step for which the engine has scheduled some itself.

        Blends get the rest of a step, and a share even of a full step: otherwise they would never end on a busy engine.
        """
        return max(self._step_tokens - scheduled, least_slice(self._step_tokens))

    def take_drops(self) -> list[str]:
        """Return and forget the blends that the workers have to give up."""
        drops, self._drops = self._drops, []
        return drops

    def take(self, report: Report) -> None:
        """Note which blends are placed."""
        for request_id in report.placed:
            if request_id in self._placed:
                self._placed[request_id] += 1
                if self._placed[request_id] == self._shards:
                    del self._placed[request_id]
                    self._ready.append(request_id)
            else:  # another rank failed, or the request has ended
                self._drops.append(request_id)

    def drop(self, request_id: str) -> None:
        """Do not finish a blend that is under way: ranks that wait with it give it up."""
        if self._placed.pop(request_id, None) or request_id in self._ready:
            self._ready = [other for other in self._ready if other != request_id]
            self._drops.append(request_id)

    def drop_all(self, request_ids: Sequence[str]) -> None:
        """Finish none of these blends, whatever is known of them."""
        for request_id in request_ids:
            self._placed.pop(request_id, None)
        self._ready = [other for other in self._ready if other not in request_ids]
        self._drops += request_ids

    def over(self, request_id: str) -> None:
        """Note that the load of a request, and with it its blend, has ended."""
        if request_id in self._ready:
            self._ready.remove(request_id)
