"""Choose tokens by what they cost in a serving engine, which is not the same for all.

A serving engine takes each run of adjacent tokens as a request of its own, whose attention reads the whole cache. So a
run costs as much as several tokens, whatever its length. Let w be their number. And a token attends to all tokens
before it, so late tokens cost more than early ones. Let c be the cost of a token, 1 on average over the cached tokens.
Among all choices that the budget pays for, the best one is sought:

    largest  sum of scores - price * (sum of c + w * runs)

The price is the lowest at which the sum of c fits the budget. For a given price the best choice is found exactly, in
one pass over the tokens (Viterbi's algorithm). What is then left of the budget is filled token by token.
"""

from __future__ import annotations

import heapq
from functools import cache
from typing import Any

import numpy as np
import torch

from cuvee.codec.support.arrays import F64, U8

_HALVINGS = 48  # of the range of prices
_ROUNDING = 1e-6  # tokens by which a sum of costs may exceed the budget


def context_overhead(config: Any) -> float:
    """Return what a token of context costs: its attention over the products of a token with a layer's weights.

        >>> from types import SimpleNamespace
        >>> shape = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
        >>> round(1 / context_overhead(SimpleNamespace(**shape)))  # tokens, for Llama-3.1-8B
        26624

    Args:
        config: of a model whose layers have dense gated MLPs. Of the whole model, not of a rank's share: all ranks must
            choose the same tokens.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    projections = 2 * (heads + config.num_key_value_heads) * width
    weights = config.hidden_size * (projections + 3 * config.intermediate_size)
    return float(2 * heads * width / weights)


def prepare() -> None:
    """Compile or load the loop now, so that no prompt waits for it."""
    best_runs(
        torch.ones(2, dtype=torch.float32), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool), 1, 1.0
    )


def best_runs(
    score: torch.Tensor,
    cached: torch.Tensor,
    leading: torch.Tensor,
    count: int,
    run_overhead: float,
    context_overhead: float = 0.0,
) -> torch.Tensor:
    """Return the positions, rising, of cached tokens with high scores that cost as much as `count` tokens on average.

        >>> score = torch.tensor([0.0, 5.0, 3.0, 4.0, 0.0, 0.0, 0.0, 6.0])
        >>> every = torch.ones(8, dtype=torch.bool)
        >>> best_runs(score, every, ~every, 3, run_overhead=0).tolist()
        [1, 3, 7]
        >>> best_runs(score, every, ~every, 3, run_overhead=2).tolist()
        [1, 2, 3]
        >>> best_runs(score, every, ~every, 3, run_overhead=0, context_overhead=1).tolist()
        [0, 1, 2, 3]

    Args:
        score: float `[T]`, at least 0; those of other tokens are ignored.
        cached: tokens to choose from; bool `[T]`. All others are computed anyway: a run that touches them costs no
            overhead.
        leading: cached tokens that are exact, bool `[T]`. They have no score: they join runs, or come last.
        count: the budget, in cached tokens of average cost; all are returned if there are not more.
        run_overhead: what a run costs, in tokens.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any.
    """
    count = min(count, int(cached.sum()))
    if count <= 0:
        return torch.empty(0, dtype=torch.int64)
    free: U8 = (~cached).numpy().astype(np.uint8)
    costs: F64 = 1 + context_overhead * np.arange(len(free), dtype=np.float64)
    costs /= costs[free == 0].mean()
    # A model whose hidden states overflow attends with NaN.
    finite = score.nan_to_num(0.0, posinf=torch.finfo(torch.float32).max, neginf=0.0)
    worth: F64 = finite.double().masked_fill(leading | ~cached, 0.0).numpy()
    low, high = 0.0, float((worth / costs).max())
    best, choice = np.zeros(len(worth), np.uint8), np.zeros(len(worth), np.uint8)
    for _ in range(_HALVINGS):
        price = (low + high) / 2
        if _viterbi()(worth, costs, free, price, price * run_overhead, choice) <= count + _ROUNDING:
            high = price
            best[:] = choice
        else:
            low = price
    chosen = torch.from_numpy(best.astype(bool)) & cached
    _fill(chosen, cached, leading, worth, costs, count - float(costs[chosen.numpy()].sum()), run_overhead)
    return chosen.nonzero()[:, 0]


def _fill(
    chosen: torch.Tensor,
    cached: torch.Tensor,
    leading: torch.Tensor,
    worth: F64,
    costs: F64,
    missing: float,
    run_overhead: float,
) -> None:
    """Add cached tokens to a choice that cost `missing` in all, each time the one with the highest score per cost."""
    left, last = (cached & ~chosen).numpy(), leading.tolist()
    if missing + _ROUNDING < costs[left].min(initial=np.inf):
        return
    computed = np.pad((chosen | ~cached).numpy(), 1)
    alone = ~(computed[:-2] | computed[2:])
    gain = worth / (costs + run_overhead * alone)
    heap = [(last[at], -gain[at], alone[at], at) for at in np.flatnonzero(left).tolist()]
    heapq.heapify(heap)
    while heap:
        at = heapq.heappop(heap)[3]
        if not left[at] or costs[at] > missing + _ROUNDING:
            continue
        left[at] = False
        chosen[at] = True
        missing -= float(costs[at])
        for neighbor in (at - 1, at + 1):  # they need no run of their own any more
            if 0 <= neighbor < len(left) and left[neighbor] and alone[neighbor]:
                heapq.heappush(heap, (last[neighbor], -worth[neighbor] / costs[neighbor], False, neighbor))


@cache
def _viterbi() -> Any:
    """Return the compiled loop; Numba is imported when it is first needed."""
    from cuvee.codec.stages.compiled.compiler import compiled

    def loop(worth: F64, costs: F64, free: U8, price: float, start: float, choice: U8) -> float:
        """Mark in `choice` the best choice at a price per cost and a price per run; return what its tokens cost."""
        between, touching, owing = 0, 1, 2  # between runs; in a run that touches text; in one that has to be paid for
        # The gain up to this token in each state, and the state before it that leads there.
        gain = np.array([0.0, -np.inf, -np.inf])
        before = np.empty((len(worth), 3), np.uint8)
        for at in range(len(worth)):
            if free[at]:
                before[at, :] = gain.argmax()
                gain[:] = -np.inf, gain.max(), -np.inf
                continue
            left = between
            if gain[touching] > gain[left]:
                left = touching
            ended = gain[left]
            if gain[owing] - start > ended:
                left, ended = owing, gain[owing] - start
            began = owing if gain[owing] > gain[between] else between
            before[at, between], before[at, touching], before[at, owing] = left, touching, began
            more = worth[at] - price * costs[at]
            gain[:] = ended, gain[touching] + more, gain[began] + more
        gain[owing] -= start
        state = gain.argmax()
        total = 0.0
        for at in range(len(worth) - 1, -1, -1):
            choice[at] = state != between and not free[at]
            if choice[at]:
                total += costs[at]
            state = before[at, state]
        return total

    return compiled(loop)
