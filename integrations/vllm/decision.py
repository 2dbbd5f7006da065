"""Decide whether loading a cached prefix (`BreakEven`) or a blend (`BlendPays`) is faster than computing.

    seconds
      |              / recompute: n / prefill rate
      |            /      ___--- load: overhead + n / load rate
      |          /___---
      |   ___--/
      |--    /
      |    / :
      +-----------------------  n tokens
             break-even length: loads from here on pay

Both lines are measured while serving. Old samples are forgotten, because stores slow down and batches change. A line
minimizes the weighted absolute deviation from the last samples (a median, for a line through the origin). The first
calls compile kernels and take a hundred times as long; outliers move such a line little while they are fewer than half
of the samples.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuvee.codec.errors import InputError
from cuvee.codec.support.arrays import F64

# A median of five samples is right when two are wrong: the first calls of two lengths, which compile.
MIN_SAMPLES = 5
# Weight halves every 8 samples, so 8 samples after a change the new ones outweigh the old; 4 half-lives are kept.
HALF_LIFE = 8
WINDOW = 32
# One in this many loads that look too slow is tried anyway: only a sample shows that loads have become faster.
TRIAL_EVERY = 32
# Least seconds between reports of a changed break-even length, which noise alone may move by a quarter.
REPORT_SECONDS = 60.0

# Share of a chunk's decoding time that does not depend on its length: headers, tables, calls. On a CPU, 256 tokens of
# SmolLM2 take 24 ms and 16 tokens 8 ms.
FIXED_SHARE = 1 / 3


def load_work(chunks: int, tail: int, chunk_tokens: int) -> int:
    """Return the decoding work of a load, in tokens of whole chunks.

    Args:
        chunks: number of whole chunks, even if the load needs only a part of their tokens.
        tail: tokens of the tail; 0: there is none.
        chunk_tokens: tokens of a whole chunk.
    """
    fixed = math.ceil(FIXED_SHARE * (chunk_tokens - tail)) if tail else 0
    return chunks * chunk_tokens + tail + fixed


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected cost of loading and of recomputing.

    Attributes:
        prefill_rate: tokens/s recomputed.
        load_rate: tokens/s loaded, beyond the overhead; `math.inf` if length makes no difference.
        overhead: seconds of a load that do not depend on its length.
    """

    prefill_rate: float
    load_rate: float
    overhead: float

    @property
    def break_even(self) -> float:
        """Return the length from which loads pay: at least 1; `math.inf` if loading is slower per token."""
        saved = 1 / self.prefill_rate - 1 / self.load_rate
        return max(1, math.ceil(self.overhead / saved)) if saved > 0 else math.inf

    def pays(self, tokens: int, work: int) -> bool:
        """Return whether it pays to load `tokens` by decoding `work` tokens (`load_work`). Work beyond `tokens` delays
        the load like overhead.
        """
        return tokens >= replace(self, overhead=self.overhead + (work - tokens) / self.load_rate).break_even


class BreakEven:
    """Decides between loading and recomputing by recent measurements of both. Thread-safe.

    The two measurements and their biases:

    - *prefill* is the throughput of engine steps that consist mostly of prompt tokens. A step also computes the decode
      tokens of its batch and has fixed costs, so recompute looks slower than it is, by half at worst; long steps weigh
      more, which keeps the share of fixed costs small. Attention over a long prefix makes late tokens more expensive
      than average. Requests that share a step wait longer than their own tokens take: the figure is the engine's cost,
      not a request's latency.
    - *load* is the time from submission to completion, so waiting for a worker counts. The fit is a median, so rare
      slow loads (a store's time-out) do not count.

    Args:
        clock: seconds, monotonic; spaces the reports of `changed`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._prefill: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._load: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._fitted: Estimate | None = None
        self._stale = False
        self._declined = 0
        self._reported: tuple[float, float] | None = None  # break-even length, time

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Note that an engine step took `seconds` and computed `tokens` prompt tokens (16 or more, half of its batch).

        Raises:
            InputError: `tokens` is below 1, or `seconds` is not positive and finite.
        """
        self._add(self._prefill, tokens, seconds)

    def observe_load(self, tokens: int, seconds: float) -> None:
        """Note that a load of `tokens` tokens, by `load_work`, took `seconds` from submission to completion.

        Raises:
            InputError: `tokens` is below 1, or `seconds` is not positive and finite.
        """
        self._add(self._load, tokens, seconds)

    def worth_loading(self, tokens: int, work: int | None = None) -> bool:
        """Return whether to load `tokens` cached tokens instead of computing them. Call it once per request.

        Args:
            tokens: to load.
            work: tokens to decode, by `load_work`; default: `tokens`.

        True until `MIN_SAMPLES` loads and prefill steps were measured, because only loads yield samples. Afterwards one
        in `TRIAL_EVERY` declined loads is let through, to notice a store that has recovered.
        """
        with self._lock:
            estimate = self._estimate()
            if estimate is None or estimate.pays(tokens, tokens if work is None else work):
                return True
            self._declined += 1
            return self._declined % TRIAL_EVERY == 0

    @property
    def estimate(self) -> Estimate | None:
        """The rates behind the decision; None until both sides were measured often enough."""
        with self._lock:
            return self._estimate()

    @property
    def tokens(self) -> float | None:
        """Return the break-even length in tokens: `math.inf` if no load pays, None if not yet measured."""
        estimate = self.estimate
        return None if estimate is None else estimate.break_even

    def changed(self) -> bool:
        """Return whether the break-even length is worth reporting: known for the first time, or changed by a quarter
        since the last report. True once per change, and at most once in `REPORT_SECONDS`.
        """
        with self._lock:
            estimate = self._estimate()
            if estimate is None:
                return False
            tokens, now = estimate.break_even, self._clock()
            if self._reported is not None:
                before, then = self._reported
                if now - then < REPORT_SECONDS or tokens == before or 0.8 <= tokens / before <= 1.25:
                    return False
            self._reported = (tokens, now)
            return True

    def describe(self) -> str:
        """Return one line: `loads pay from 384 tokens on: prefill 21.3 k tokens/s, load 96 k tokens/s + 3.1 ms`."""
        with self._lock:
            estimate = self._estimate()
            loads, steps = len(self._load), len(self._prefill)
        if estimate is None:
            return (
                f"break-even length not measured yet: {min(loads, MIN_SAMPLES)} of {MIN_SAMPLES} loads, "
                f"{min(steps, MIN_SAMPLES)} of {MIN_SAMPLES} prefill steps"
            )
        pays = f"pay from {estimate.break_even} tokens on" if estimate.break_even < math.inf else "pay at no length"
        load = f"{_rate(estimate.load_rate)} + " if estimate.load_rate < math.inf else ""
        return f"loads {pays}: prefill {_rate(estimate.prefill_rate)}, load {load}{estimate.overhead * 1e3:.3g} ms"

    def _add(self, samples: deque[tuple[int, float]], tokens: int, seconds: float) -> None:
        _check_sample(tokens, seconds)
        with self._lock:
            samples.append((tokens, seconds))
            self._stale = True

    def _estimate(self) -> Estimate | None:
        """Return the fit, updated if there are new samples; the lock is held."""
        if self._stale and min(len(self._prefill), len(self._load)) >= MIN_SAMPLES:
            _, cost = _fit(self._prefill, through_origin=True)
            lengths = [tokens for tokens, _ in self._load]
            # Loads of similar length cannot tell overhead from rate: take all as rate, so that shorter loads are tried.
            overhead, slope = _fit(self._load, through_origin=max(lengths) < 2 * min(lengths))
            self._fitted = Estimate(1 / cost, 1 / slope if slope > 0 else math.inf, overhead)
            self._stale = False
        return self._fitted


Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlendCost:
    """The work of a blend, and the time it took.

    Attributes:
        pieces: segments to place.
        placed: tokens to decode of these.
        computed: tokens to compute: the text, and the reused tokens times the cost.
        context: tokens of the prompt up to the blend's end, which the last of them look at.
        prefix: tokens to decode of the exact prefix that is loaded along, by `load_work`.
        place_seconds: from submission until all was in its place; 0: not measured.
        compute_seconds: of computing; 0: not measured.
    """

    pieces: int
    placed: int
    computed: float
    context: int
    prefix: int = 0
    place_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """The shapes of placing and of computing, to within a factor of two: number and size of the placed pieces;
        computed tokens and the context before them. Equal shapes cost about the same per token.
        """
        size = self.placed / max(self.pieces, 1)
        return (_octave(self.pieces), _octave(size)), (_octave(self.computed), _octave(self.context))


class BlendPays:
    """Decides between a blend and computing its tokens. Used only in the engine's loop.

    Clients choose the shape of their blends: much text and little reuse, a thousand small pieces, a few tokens. With
    one rate for all, one client's useless blends would get another's useful ones refused. So placing and computing are
    measured separately, each per unit of work and among blends of the same shape: a median for each, with forgetting.
    A shape that was not measured yet counts as free, so that it is tried. The wait for the engine's step between
    placing and computing counts as neither.
    """

    def __init__(self) -> None:
        self._prefill: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._place: dict[Shape, deque[tuple[float, float]]] = {}
        self._compute: dict[Shape, deque[tuple[float, float]]] = {}
        self._declined: dict[tuple[Shape, Shape], int] = {}

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Note a step of prefill, as `BreakEven.observe_prefill`.

        Raises:
            InputError: `tokens` is below 1, or `seconds` is not positive and finite.
        """
        _check_sample(tokens, seconds)
        self._prefill.append((tokens, seconds))

    def observe(self, done: BlendCost) -> None:
        """Note a blend that was made. Parts without time or work count as not measured."""
        place, compute = done.shapes
        if done.placed > 0 and 0 < done.place_seconds < math.inf:
            self._place.setdefault(place, deque(maxlen=WINDOW)).append((done.placed + done.prefix, done.place_seconds))
        if done.computed > 0 and 0 < done.compute_seconds < math.inf:
            self._compute.setdefault(compute, deque(maxlen=WINDOW)).append((done.computed, done.compute_seconds))

    def expected(self, blend: BlendCost) -> float:
        """Return the expected seconds of a blend, from blends of its shape; unmeasured parts count as free."""
        place, compute = blend.shapes
        placing = _rate_of(self._place.get(place)) * (blend.placed + blend.prefix)
        return placing + _rate_of(self._compute.get(compute)) * blend.computed

    def worth(self, tokens: int, blend: BlendCost) -> bool:
        """Return whether to blend instead of computing `tokens`. Call it once per request.

        One in `TRIAL_EVERY` declined blends of a shape is let through, as in `BreakEven.worth_loading`.
        """
        if self.expected(blend) < _rate_of(self._prefill) * tokens or len(self._prefill) < MIN_SAMPLES:
            return True
        declined = self._declined[blend.shapes] = self._declined.get(blend.shapes, 0) + 1
        return declined % TRIAL_EVERY == 0


def _octave(number: float) -> int:
    """Return the `n` for which a number is in `2 ** (n - 1) … 2 ** n`; 0 for numbers below 1."""
    return max(math.frexp(number)[1], 0)


def _rate_of(samples: deque[Any] | None) -> float:
    """Return seconds per token, a weighted median; 0 until there are `MIN_SAMPLES`."""
    return 0.0 if samples is None or len(samples) < MIN_SAMPLES else _fit(samples, through_origin=True)[1]


def _check_sample(tokens: int, seconds: float) -> None:
    if tokens < 1:
        raise InputError(f"tokens: must be at least 1, got {tokens}")
    if not 0 < seconds < math.inf:
        raise InputError(f"seconds: must be above 0 and finite, got {seconds}")


def _fit(samples: deque[Any], *, through_origin: bool) -> tuple[float, float]:
    """Return overhead (s) and cost (s/token), both at least 0, with the least weighted absolute deviation, exactly.

    This is a linear program in two unknowns, so an optimum lies where two constraints meet: two samples, or one sample
    and a bound. All candidates are tried: 560 for 32 samples.
    """
    t, s = np.array(samples, dtype=np.float64).T
    decay = 0.5 ** (np.arange(len(t))[::-1] / HALF_LIFE)
    if through_origin:
        return 0.0, _best(np.zeros_like(t), s / t, t, s, decay)[1]
    first, second = np.triu_indices(len(t), 1)
    run = t[second] - t[first]
    two = run != 0
    slope = (s[second] - s[first])[two] / run[two]
    overhead = np.concatenate([np.zeros_like(t), s, s[first][two] - slope * t[first][two]])
    slope = np.concatenate([s / t, np.zeros_like(t), slope])
    allowed = (overhead >= 0) & (slope >= 0)
    # Deviations count per token: otherwise one slow long call outweighs many right short ones.
    return _best(overhead[allowed], slope[allowed], t, s, decay / t)


def _best(overhead: F64, slope: F64, t: F64, s: F64, weight: F64) -> tuple[float, float]:
    """Return the candidate `overhead[i] + slope[i] * t` closest to the samples `s`."""
    deviation = np.abs(overhead[:, None] + slope[:, None] * t - s) @ weight
    best = int(deviation.argmin())
    return float(overhead[best]), float(slope[best])


def _rate(rate: float) -> str:
    return f"{rate / 1e3:.3g} k tokens/s" if rate >= 1e3 else f"{rate:.3g} tokens/s"
