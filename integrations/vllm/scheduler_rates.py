"""Measured speeds of computing and loading, and the decision which of them pays."""

from __future__ import annotations

from cuvee.integrations.costs import LinearCost
from cuvee.integrations.vllm.decision import BreakEven, load_work
from cuvee.integrations.vllm.messages import Report, StepPlan
from cuvee.integrations.vllm.scheduler_state import SchedulerState, Tracked

_LEAST_PREFILL = 16  # prompt tokens of a step that tells anything about the speed of prefill
_REMEMBERED = 64  # steps whose time no worker has reported yet


class Rates:
    """Learns what steps and loads cost.

    Args:
        state: of the scheduler's side.
        prefill: learns what computing costs, for loads and blends alike.

    Attributes:
        break_even: decides, by what loads and computing cost.
    """

    def __init__(self, state: SchedulerState, prefill: LinearCost) -> None:
        self._state = state
        self._prefill = prefill
        self.break_even = BreakEven(prefill)
        self._timed_steps: dict[int, tuple[int, float]] = {}

    def pays(self, tracked: Tracked, computed: int) -> bool:
        """Return whether it pays to load what was found after the first `computed` tokens. With a deadline, the load
        itself decides.
        """
        if tracked.due is not None or self._state.options.decide == "always":
            return True
        found, chunk = tracked.found, self._state.chunk
        work = load_work(max(found.chunks - computed // chunk, 0), found.tail, chunk)
        return self.break_even.worth_loading(computed, tracked.end, work)

    def begin_step(self, plan: StepPlan, prompt_tokens: int, looked_at: float, scheduled: int) -> None:
        """Have a step timed if it tells the speed of prefill.

        Args:
            plan: of the step.
            prompt_tokens: that the step computes.
            looked_at: what these look at, as `prefill_quantities`.
            scheduled: all tokens that the step computes.
        """
        mostly_prefill = 2 * prompt_tokens >= max(scheduled, 2 * _LEAST_PREFILL)
        if mostly_prefill and not plan.blends:
            self._timed_steps[plan.step] = (prompt_tokens, looked_at)
            if len(self._timed_steps) > _REMEMBERED:
                del self._timed_steps[next(iter(self._timed_steps))]

    def take(self, report: Report) -> None:
        """Learn from the steps and loads that have ended."""
        timed = [(self._timed_steps.pop(step), seconds) for step, seconds in report.step_seconds.items()
                 if step in self._timed_steps]  # fmt: skip
        for (tokens, looked_at), seconds in timed:
            self._prefill.observe(tokens, looked_at, max(seconds, 1e-6))
        for work, seconds in report.loaded:
            self.break_even.observe_load(work, max(seconds, 1e-6))
        estimate = self.break_even.estimate if timed or report.loaded else None
        if estimate is not None:
            recorder = self._state.recorder
            recorder.gauge("break_even_tokens", estimate.break_even)
            recorder.gauge("tokens_per_second", estimate.prefill_rate, "prefill")
            recorder.gauge("tokens_per_second", estimate.load_rate, "load")
