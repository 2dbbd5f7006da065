"""Blends in the scheduler: offered to the engine, placed by every rank, then recomputed by all ranks in one step."""

from __future__ import annotations

from collections.abc import Sequence

from cuvee.integrations.vllm.blending.planning import BlendPlanner, least_slice
from cuvee.integrations.vllm.messages import Report
from cuvee.integrations.vllm.scheduler_state import SchedulerState, Tracked


class SchedulerBlends:
    """Keeps account of blends.

    Args:
        state: of the scheduler's side.
        planner: finds what can be blended; None: the engine does not blend.
        step_tokens: most tokens that a step of the engine computes.
    """

    def __init__(self, state: SchedulerState, planner: BlendPlanner | None, step_tokens: int) -> None:
        self._state = state
        self._planner = planner
        self._step_tokens = step_tokens
        self._placed: dict[str, int] = {}  # number of ranks that have placed the segments of a request
        self._ready: list[str] = []  # requests that all ranks can recompute, or have begun to
        self._drops: list[str] = []

    def segment(self, tracked: Tracked) -> None:
        """Find a new request's segments. A load with a deadline is not blended."""
        if self._planner is not None and tracked.due is None:
            tracked.segmented = self._planner.segment(tracked.request, tracked.tenant)

    def ask(self, tracked: Tracked) -> None:
        """Ask the store for a request's segments."""
        if self._planner is not None and tracked.segmented is not None:
            self._planner.ask(tracked.segmented, tracked.tenant)

    def match(self, tracked: Tracked, computed: int, tokens: int) -> int | None:
        """Return how many tokens after the first `computed` can be loaded and blended; None: ask again.

        Args:
            tracked: the request.
            computed: tokens that the engine has.
            tokens: that can be loaded from the prefix after them; returned where no blend follows them.
        """
        if self._planner is None or tracked.segmented is None or tracked.refused:
            return tokens
        tracked.blend = None
        offer = self._planner.offer(tracked.request, tracked.segmented, computed + tokens)
        if offer.ask_again:
            return None
        if offer.blend is None:
            return tokens
        tracked.blend = offer.blend
        tracked.blend_end = min(offer.blend.pieces[-1].end, tracked.request.num_prompt_tokens - 1)
        return tracked.blend_end - computed

    def allocate(self, tracked: Tracked, blocks: Sequence[int]) -> None:
        """Take a request's blend, if it has one, and give it its blocks."""
        blend, block = tracked.blend, self._state.block
        if blend is not None:
            if self._planner is not None and tracked.segmented is not None:
                self._planner.take(tracked.request, tracked.segmented, blend)
            blend.blocks = list(blocks[: -(-tracked.blend_end // block)])
            blend.pieces = [piece.within([blend.blocks], [block]) for piece in blend.pieces]
            self._placed[tracked.request.request_id] = 0

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
                if self._placed[request_id] == self._state.shards:
                    del self._placed[request_id]
                    self._ready.append(request_id)
            else:  # another rank failed, or the request has ended
                self._drops.append(request_id)

    def refuse(self, tracked: Tracked) -> None:
        """Blend a request no more, because its load failed."""
        if tracked.segmented is not None and tracked.blend is not None and self._planner is not None:
            self._planner.refuse(tracked.segmented, "failed")

    def rename(self, tracked: Tracked) -> None:
        """Name a request's segments by the planner's new identity."""
        if tracked.segmented is not None and self._planner is not None:
            self._planner.rename(tracked.segmented, tracked.request, tracked.tenant)

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
