"""What steps and loads take, and the decision which of them pays."""

from __future__ import annotations

from cuvee.integrations.costs import LinearCost
from cuvee.integrations.vllm.decision import Pays
from cuvee.integrations.vllm.messages import Report, StepPlan
from cuvee.integrations.vllm.scheduler_state import SchedulerState

_LEAST_PREFILL = 16  # prompt tokens of a step that tells anything about the speed of prefill
_REMEMBERED = 64  # steps whose time no worker has reported yet


class Rates:
    """Learns what steps, loads and blends cost.

    Args:
        state: of the scheduler's side.

    Attributes:
        prefill: what computing costs.
        pays: decides, by what restoring and computing cost.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.prefill = LinearCost(1e-3, 0.0)  # before anything is measured: 1,000 tokens per second
        self.pays = Pays(self.prefill, state.chunk)
        self._timed_steps: dict[int, tuple[int, float]] = {}

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
        """Learn from the steps, loads and blends that have ended."""
        timed = [(self._timed_steps.pop(step), seconds) for step, seconds in report.step_seconds.items()
                 if step in self._timed_steps]  # fmt: skip
        for (tokens, looked_at), seconds in timed:
            self.prefill.observe(tokens, looked_at, max(seconds, 1e-6))
        for done in report.restored:
            self.pays.observe(done)
        if (timed or report.restored) and self.pays.knows("load"):
            recorder = self._state.recorder
            recorder.gauge("break_even_tokens", self.pays.break_even)
            for work, speed in self.pays.speeds.items():
                recorder.gauge("tokens_per_second", speed, work)
