"""Whether to load or to compute, and to blend or to compute, by costs that are measured while serving.

seconds
|                  . computing, without overhead
|              .  _-
|          .  _-      loading: overhead + tokens / rate
|      . _-
|    _x
|_-.  :
+-----:-------------- tokens
break-even: loads from here on pay
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cuvee.integrations.costs import LinearCost, prefill_quantities

MIN_SAMPLES = 5  # of each side, before a load or a blend is declined
# One in this many loads that look too slow is tried anyway: only a sample shows that loads have become faster.
TRIAL_EVERY = 32
_LONGEST = 1e7  # tokens; a break-even length beyond is none
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
    """The expected cost of loading and of computing.

    Attributes:
        prefill_rate: tokens/s computed, of a prompt of as many tokens as `break_even`, or of 1,024 if that is infinite.
        load_rate: tokens/s loaded, beyond the overhead; `math.inf` if length makes no difference.
        break_even: the length from which loads pay: at least 1; `math.inf` if they never do.
    """

    prefill_rate: float
    load_rate: float
    break_even: float

    @classmethod
    def of(cls, prefill: LinearCost, load: LinearCost) -> Estimate:
        """Return the estimate that two measured costs make."""
        # The positive solution of overhead + t / rate = a * t + b * t ** 2.
        saved, square, overhead = prefill.first - load.first, prefill.second, load.constant
        root = math.hypot(saved, 2 * math.sqrt(square * overhead))
        if saved > 0:
            length = 2 * overhead / (root + saved)
        else:
            length = (root - saved) / (2 * square) if square > 0 else math.inf
        break_even = max(1.0, math.ceil(length)) if length < _LONGEST else math.inf
        tokens = break_even if break_even < math.inf else 1024.0
        rate = tokens / max(prefill(*prefill_quantities(0, int(tokens))), 1e-9)
        return cls(rate, 1 / load.first if load.first > 0 else math.inf, break_even)


class BreakEven:
    """Decides between loading and computing. Used only in the engine's loop.

    A load counts from submission to completion, so waiting for a worker counts. What a step takes whatever its tokens
    does not count for computing: a load is followed by a step all the same, which computes the rest of the prompt.

    Args:
        prefill: what computing costs, by the workers' own time of steps that consist mostly of prompt tokens. A step
            also computes the decode tokens of its batch, so computing looks slower than it is, by half at worst.
    """

    def __init__(self, prefill: LinearCost) -> None:
        self._prefill = prefill
        self._load = LinearCost(1e-5, 0.0, 1e-3)
        self._declined = 0

    def observe_load(self, work: int, seconds: float) -> None:
        """Note that a load of this much work, by `load_work`, took `seconds` from submission to completion."""
        self._load.observe(work, 0.0, seconds)

    def worth_loading(self, start: int, stop: int, work: int) -> bool:
        """Return whether to load tokens `start … stop - 1` of a prompt by decoding `work` tokens. Call it once per
        request.

        True until `MIN_SAMPLES` loads and prefill steps were measured, because only loads yield samples. Afterwards one
        in `TRIAL_EVERY` declined loads is let through, to notice a store that has recovered.
        """
        if self.estimate is None or self._load(work, 0.0) <= self._prefill.marginal(*prefill_quantities(start, stop)):
            return True
        self._declined += 1
        return self._declined % TRIAL_EVERY == 0

    @property
    def estimate(self) -> Estimate | None:
        """The rates behind the decision; None until both sides were measured often enough."""
        if min(self._prefill.samples, self._load.samples) < MIN_SAMPLES:
            return None
        return Estimate.of(self._prefill, self._load)


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
    measured separately, each per token and among blends of the same shape. A shape that was not measured yet counts as
    free, so that it is tried. The wait for the engine's step between placing and computing counts as neither.

    Args:
        prefill: what computing costs.
    """

    def __init__(self, prefill: LinearCost) -> None:
        self._prefill = prefill
        self._place: dict[Shape, LinearCost] = {}
        self._compute: dict[Shape, LinearCost] = {}
        self._declined: dict[tuple[Shape, Shape], int] = {}

    def observe(self, done: BlendCost) -> None:
        """Note a blend that was made. Parts without time or work count as not measured."""
        place, compute = done.shapes
        for costs, shape, work, seconds in (
            (self._place, place, done.placed + done.prefix if done.placed else 0, done.place_seconds),
            (self._compute, compute, done.computed, done.compute_seconds),
        ):
            if work > 0 and 0 < seconds < math.inf:
                costs.setdefault(shape, LinearCost(1e-3, 0.0)).observe(work, 0.0, seconds)

    def expected(self, blend: BlendCost) -> float:
        """Return the expected seconds of a blend, from blends of its shape; unmeasured parts count as free."""
        place, compute = blend.shapes
        both = ((self._place.get(place), blend.placed + blend.prefix), (self._compute.get(compute), blend.computed))
        return sum(cost(work, 0.0) for cost, work in both if cost is not None and cost.samples >= MIN_SAMPLES)

    def worth(self, start: int, stop: int, blend: BlendCost) -> bool:
        """Return whether to blend instead of computing tokens `start … stop - 1`. Call it once per request.

        One in `TRIAL_EVERY` declined blends of a shape is let through, as in `BreakEven.worth_loading`.
        """
        computed = self._prefill.marginal(*prefill_quantities(start, stop))
        if self._prefill.samples < MIN_SAMPLES or self.expected(blend) < computed:
            return True
        declined = self._declined[blend.shapes] = self._declined.get(blend.shapes, 0) + 1
        return declined % TRIAL_EVERY == 0


def _octave(number: float) -> int:
    """Return the `n` for which a number is in `2 ** (n - 1) … 2 ** n`; 0 for numbers below 1."""
    return max(math.frexp(number)[1], 0)
