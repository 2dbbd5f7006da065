"""Whether to restore tokens or to compute them, by what both took a moment ago. Loads and blends are judged alike.

seconds
|                  . computing, without overhead
|              .  _-
|          .  _-      restoring: overhead + decoded tokens / rate + recomputed tokens / rate
|      . _-
|    _x
|_-.  :
+-----:-------------- tokens
break-even: loads from here on pay
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from cuvee.integrations.core.costs import LinearCost, prefill_quantities

if TYPE_CHECKING:  # it imports this module
    from cuvee.integrations.vllm.messages import Report, StepPlan

MIN_SAMPLES = 5  # of each side, before a load or a blend is declined
# One in this many that look too slow is tried anyway: only a sample shows that restoring has become faster.
TRIAL_EVERY = 32
_LEAST_PREFILL = 16  # prompt tokens of a step that tells anything about the speed of prefill
_REMEMBERED = 64  # steps whose time no worker has reported yet
# Share of a chunk's decoding time that does not depend on its length: headers, tables, calls. On a CPU, 256 tokens of
# SmolLM2 take 24 ms and 16 tokens 8 ms.
FIXED_SHARE = 1 / 3

Kind = Literal["load", "blend"]


class Verdict(Enum):
    """Whether something is restored, and why."""

    PAYS = "pays"  # it looks quicker than computing
    TRIAL = "trial"  # it looks slower, and is tried
    SLOW = "slow"  # it looks slower
    WAITED = "waited"  # it has waited for ranks as long as computing takes

    @property
    def restores(self) -> bool:
        """Whether it is restored."""
        return self in (Verdict.PAYS, Verdict.TRIAL)


class Restored(NamedTuple):
    """What a load or a blend took: its `decoding_work`, the tokens that it computed, and the seconds of both."""

    kind: Kind
    decoded: float
    computed: float
    seconds: float


def decoding_work(sizes: Iterable[int], chunk: int) -> float:
    """Return the work of decoding entries of so many tokens each, in tokens of whole chunks. An entry is decoded as a
    whole, even if only a part of its tokens is needed.
    """
    return sum(tokens + FIXED_SHARE * max(chunk - tokens, 0) for tokens in sizes)


class Pays:
    """Decides between restoring and computing. Used only in the engine's loop.

    A load counts from submission to completion, so waiting for a worker counts; a blend without its wait for the
    engine's step. What a step takes whatever its tokens does not count for computing: restoring is followed by a step
    all the same, which computes the rest of the prompt.

    Args:
        chunk: tokens per chunk.

    Attributes:
        prefill: what computing costs, by the workers' own time of steps that consist mostly of prompt tokens. A step
            also computes the decode tokens of its batch, so computing looks slower than it is, by half at worst.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self.prefill = LinearCost(1e-3, 0.0)  # before anything is measured: 1,000 tokens per second
        self._timed_steps: dict[int, tuple[int, float]] = {}
        self._costs: dict[Kind, LinearCost] = {kind: LinearCost(1e-5, 1e-3, 1e-3) for kind in ("load", "blend")}
        self._slow: Counter[Kind] = Counter()

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
        for step, seconds in report.step_seconds.items():
            if step in self._timed_steps:
                tokens, looked_at = self._timed_steps.pop(step)
                self.prefill.observe(tokens, looked_at, seconds)
        for done in report.restored:
            self.observe(done)

    def observe(self, done: Restored) -> None:
        """Note what a load or a blend took."""
        self._costs[done.kind].observe(done.decoded, done.computed, done.seconds)

    def judge(self, kind: Kind, start: int, stop: int, sizes: Iterable[int], computed: float = 0.0) -> Verdict:
        """Return whether to restore tokens `start … stop - 1` of a prompt from entries of these sizes, of which so many
        are computed all the same. Changes nothing: `note` does, once per request.

        PAYS until `MIN_SAMPLES` of both sides were measured, because only what is restored yields samples. Afterwards
        one in `TRIAL_EVERY` that look too slow is tried.
        """
        restoring = self._costs[kind](decoding_work(sizes, self._chunk), computed)
        if not self.knows(kind) or restoring <= self.prefill.marginal(*prefill_quantities(start, stop)):
            return Verdict.PAYS
        return Verdict.SLOW if (self._slow[kind] + 1) % TRIAL_EVERY else Verdict.TRIAL

    def note(self, kind: Kind, verdict: Verdict) -> None:
        """Note a verdict by which a request was answered."""
        self._slow[kind] += verdict in (Verdict.TRIAL, Verdict.SLOW)

    def knows(self, kind: Kind) -> bool:
        """Return whether both sides were measured often enough."""
        return min(self.prefill.samples, self._costs[kind].samples) >= MIN_SAMPLES
