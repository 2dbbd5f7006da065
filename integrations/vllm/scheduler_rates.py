"""Measured speeds of computing and loading, and the decision which of them pays."""

from __future__ import annotations

import logging

from cuvee.integrations.costs import LinearCost
from cuvee.integrations.vllm.decision import BlendPays, BreakEven, Estimate, load_work
from cuvee.integrations.vllm.messages import Report, StepPlan
from cuvee.integrations.vllm.scheduler_state import SchedulerState, Tracked

logger = logging.getLogger(__name__)

_LEAST_PREFILL = 16  # prompt tokens of a step that tells anything about the speed of prefill


class Rates:
    """Times steps and loads.

    Args:
        state: of the scheduler's side.
        blend_pays: decides on blends, from the same measurements of computing; None: the engine does not blend.
    """

    def __init__(self, state: SchedulerState, blend_pays: BlendPays | None) -> None:
        self._state = state
        self._break_even = BreakEven()
        self._blend_pays = blend_pays
        # Before anything is measured: 1,000 tokens per second, or a third or three times as many.
        self._prefill = LinearCost(1e-3, 0.0, 1.1)
        self._timed_steps: dict[int, tuple[int, float, float]] = {}

    @property
    def estimate(self) -> Estimate | None:
        """The rates behind the decision to load or to compute; None until both were measured often enough."""
        return self._break_even.estimate

    @property
    def prefill(self) -> tuple[float, float, float]:
        """What computing costs, as in `messages.Aim`."""
        return self._prefill.first, self._prefill.second, self._prefill.spread

    def describe(self) -> str:
        """Describe the rates for the log."""
        return self._break_even.describe()

    def pays(self, tracked: Tracked, computed: int) -> bool:
        """Return whether it pays to load what was found after the first `computed` tokens. With a deadline, the plan of
        the load decides.
        """
        has_deadline = tracked.targeted is not None and tracked.targeted.target.deadline is not None
        if has_deadline or self._state.options.decide == "always":
            return True
        found, chunk = tracked.found, self._state.chunk
        work = load_work(max(found.chunks - computed // chunk, 0), found.tail, chunk)
        return self._break_even.worth_loading(tracked.end - computed, work)

    def begin_step(self, plan: StepPlan, prompt_tokens: int, looked_at: float, scheduled: int) -> None:
        """Time a step if it tells the speed of prefill.

        Args:
            plan: of the step.
            prompt_tokens: that the step computes.
            looked_at: what these look at, as `prefill_quantities`.
            scheduled: all tokens that the step computes.
        """
        mostly_prefill = 2 * prompt_tokens >= max(scheduled, 2 * _LEAST_PREFILL)
        if mostly_prefill and not plan.blends and (self._state.options.load_async or not plan.loads):
            self._timed_steps[plan.step] = (prompt_tokens, looked_at, self._state.clock())

    def take(self, report: Report) -> None:
        """Learn from the steps and loads that have ended."""
        now = self._state.clock()
        timed = [self._timed_steps.pop(step) for step in report.steps if step in self._timed_steps]
        for tokens, looked_at, begun in timed:
            seconds = max(now - begun, 1e-6)
            self._prefill.observe(float(tokens), looked_at, seconds)
            self._break_even.observe_prefill(tokens, seconds)
            if self._blend_pays is not None:
                self._blend_pays.observe_prefill(tokens, seconds)
        for tokens, seconds in report.loaded:
            self._break_even.observe_load(tokens, max(seconds, 1e-6))
        estimate = self._break_even.estimate if timed or report.loaded else None
        if estimate is not None:
            recorder = self._state.recorder
            recorder.gauge("break_even_tokens", estimate.break_even)
            recorder.gauge("prefill_tokens_per_second", estimate.prefill_rate)
            recorder.gauge("load_tokens_per_second", estimate.load_rate)
            if self._break_even.changed():
                logger.info("cuvee: %s", self._break_even.describe())
