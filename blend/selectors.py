"""Selectors: choose the cached tokens to recompute.

    Prompt --Selector.select--> positions of the tokens that go through all layers

Text is always computed; selectors choose among cached tokens only.

A cost counts the cached tokens that are recomputed, and the passes of a query, each times its layers, as a share of the
cached tokens times all layers. A selector of your own needs `select`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Protocol

import torch

from cuvee.blend.correction import typical_change
from cuvee.blend.runs import best_runs
from cuvee.blend.segments import Prompt
from cuvee.codec.errors import InputError

_COST = 0.15  # the default
_DEPTHS = (1 / 3, 1 / 2, 2 / 3)  # depths of the layers whose attention is used: where models retrieve
_LEAST = 1e-3  # added to attention of mean 1, so that a product still ranks tokens without attention
_QUERIES = 16  # most tokens of the query that are asked
_QUERY_SHARE = 0.1  # largest share of the budget for their pass


class Selector(Protocol):
    """Chooses the tokens to recompute. It is immutable, and serves any number of prompts."""

    def select(self, prompt: Prompt) -> torch.Tensor:
        """Return the positions of cached tokens to recompute, int64, rising."""
        ...


@dataclass(frozen=True, slots=True)
class Nothing:
    """Recomputes no cached token: the lower bound for other selectors.

    >>> Nothing()
    Nothing()
    """

    def select(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Boundary:
    """Selects the first tokens of each chunk, which lack most of their context (EPIC, arXiv:2410.15332).

    They include the first tokens of the prompt, its attention sinks, unless these are exact already.

        >>> Boundary(0.1)
        Boundary(cost=0.1)

    Args:
        cost: share of the token-layers to spend; 1 selects all cached tokens.

    Raises:
        InputError: `cost` is no number from 0 to 1.
    """

    cost: float = _COST

    def __post_init__(self) -> None:
        _check("cost", self.cost, 1)

    def select(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return prompt.best(typical_change(prompt.offset).float(), _affordable(self.cost, prompt, 0))


@dataclass(frozen=True, slots=True)
class Guided:
    """Selects tokens that the query attends to, preferably at the beginning of chunks: the selector that measured best.

    The loss from a token's stale KV is the attention to it, times its staleness. A pass of the query, the last tokens
    of the text after the chunks, measures the attention (ProphetKV, arXiv:2602.02579): that of the layers at a third, a
    half and two thirds of the depth, because different layers attend to different tokens. The token's place in its
    chunk predicts the staleness. The pass takes at most a tenth of the budget, but at least one token.

    In a serving engine, runs of adjacent tokens cost time as well, and late tokens cost more than early ones. The
    overheads weigh that (`runs.py`), and are no part of the cost.

        >>> Guided(0.5).cost
        0.5

    Args:
        cost: share of the token-layers to spend, the query's pass included; 1 selects all cached tokens. If it does not
            pay for the pass and a token, nothing is spent.
        run_overhead: what a run of adjacent tokens costs besides them, in tokens: the more, the fewer runs. On
            SmolLM2-135M, 2 makes a third as many runs. The KL stays the same where chunks were computed behind other
            text, and grows by a third where they were computed alone.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any
            (`cuvee.blend.runs.context_overhead`). With it, `cost` is a share of what all cached tokens cost: more
            tokens, if they are early ones.

    Raises:
        InputError: `cost` is no number from 0 to 1, or an overhead is not finite or below 0.
    """

    cost: float = _COST
    run_overhead: float = field(default=0.0, kw_only=True)
    context_overhead: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        _check("cost", self.cost, 1)
        for name in ("run_overhead", "context_overhead"):
            _check(name, getattr(self, name), sys.float_info.max)

    def select(self, prompt: Prompt) -> torch.Tensor:
        """See `Selector`. The query is asked only if there is a choice."""
        layers = tuple(sorted({int(prompt.layers * depth + 1e-9) for depth in _DEPTHS}))
        queries = self._queries(prompt, layers[-1] + 1)
        count = _affordable(self.cost, prompt, queries * (layers[-1] + 1))
        if count in (0, prompt.cached_tokens):
            return prompt.cached.nonzero()[:count, 0]
        attention = prompt.attend(queries, layers)
        mean = attention[prompt.cached].mean()
        scaled = attention / mean if mean > 0 else torch.zeros_like(attention)
        score = (scaled + _LEAST) * typical_change(prompt.offset).float()
        if not (self.run_overhead or self.context_overhead):
            return prompt.best(score, count)
        return best_runs(score, prompt.cached, prompt.leading, count, self.run_overhead, self.context_overhead)

    def _queries(self, prompt: Prompt, depth: int) -> int:
        """Return how many tokens of the query are asked, in this many layers."""
        count = min(_QUERIES, int(prompt.suffix.sum()))
        most = _QUERY_SHARE * self.cost * prompt.cached_tokens * prompt.layers / depth
        return min(count, max(1, int(most + 1e-9)))


def _affordable(cost: float, prompt: Prompt, spent: int) -> int:
    """Return how many cached tokens the cost pays for besides the `spent` token-layers; all at cost 1."""
    cached = prompt.cached_tokens
    return cached if cost == 1 else max(int((cost * cached * prompt.layers - spent) / prompt.layers + 1e-9), 0)


def _check(name: str, value: object, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        limits = "a number from 0 to 1" if most == 1 else "a finite number of at least 0"
        raise InputError(f"{name}: must be {limits}, got {value!r}")
