"""Selectors: choose the cached tokens to recompute.

    Prompt --Selector.select--> positions of the tokens that go through all layers

Text is always computed; selectors choose among cached tokens only.

Costs are counted in token-layers: recomputed cached tokens, summed over layers, as a share of cached tokens times
layers. A pass of the query costs its layers. A selector takes either

    ratio   share of the cached tokens to select, not counting the cost of finding them, or
    cost    share of the token-layers to spend in total.

Both count tokens. In a serving engine, runs of adjacent tokens cost time as well, and late tokens cost more than early
ones: `run_overhead` makes runs few, and `context_overhead` weighs tokens by their position (`runs.py`).

`Boundary` and `Guided` score each token. A selector of your own needs `select`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch

from cuvee.blend.budget import DEFAULT_RATIO, affordable, check_budget
from cuvee.blend.correction import typical_change
from cuvee.blend.runs import best_runs, check_overhead
from cuvee.blend.segments import Prompt

_DEPTHS = (1 / 3, 1 / 2, 2 / 3)  # depths of the layers whose attention is used: where models retrieve
_LEAST = 1e-3  # added to attention of mean 1, so that a product still ranks tokens without attention
_QUERIES = 16  # most tokens of the query that are asked
_QUERY_SHARE = 0.1  # largest share of the budget for their pass


class Selector(Protocol):
    """Chooses the tokens to recompute. It is immutable, and serves any number of prompts."""

    def select(self, prompt: Prompt) -> torch.Tensor:
        """Return the positions of cached tokens to recompute, int64, rising.

        Raises:
            InputError: the cost does not pay for the selector's passes.
        """
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
class _Scored(ABC):
    """Selects the tokens with the highest scores.

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
        run_overhead: what a run of adjacent tokens costs besides them, in tokens: the more, the fewer runs. It is not
            part of the cost.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any.
            With it, `ratio` and `cost` are shares of what all cached tokens cost: more tokens, if they are early ones.
    """

    ratio: float | None = None
    cost: float | None = None
    run_overhead: float = field(default=0.0, kw_only=True)
    context_overhead: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        check_budget(self.ratio, self.cost)
        for name in ("run_overhead", "context_overhead"):
            check_overhead(name, getattr(self, name))

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(said)})"

    @abstractmethod
    def score(self, prompt: Prompt) -> torch.Tensor:
        """Return scores above 0, float32 `[T]`. Only their ratios matter; those of text are ignored."""

    def overhead(self, prompt: Prompt) -> int:
        """Return the token-layers that `score` spends."""
        return 0

    def select(self, prompt: Prompt) -> torch.Tensor:
        """See `Selector`. Tokens are scored only if there is a choice."""
        spent = self.overhead(prompt)
        count = affordable(self.ratio, self.cost, prompt, spent)
        if count in (0, prompt.cached_tokens):
            return prompt.cached.nonzero()[:count, 0]
        score, overheads = self.score(prompt), (self.run_overhead, self.context_overhead)
        if not any(overheads):
            return prompt.best(score, count)
        return best_runs(score, prompt.cached, prompt.leading, count, *overheads)


@dataclass(frozen=True, slots=True, repr=False)
class Boundary(_Scored):
    """Selects the first tokens of each chunk, which lack most of their context (EPIC, arXiv:2410.15332).

    They include the first tokens of the prompt, its attention sinks, unless these are exact already.

        >>> Boundary(0.1)
        Boundary(ratio=0.1)

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
    """

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return typical_change(prompt.offset).float()


@dataclass(frozen=True, slots=True, repr=False)
class Guided(_Scored):
    """Selects tokens that the query attends to, preferably at the beginning of chunks: the selector that measured best.

    The loss from a token's stale KV is the attention to it, times its staleness. A pass of the query, the last tokens
    of the text after the chunks, measures the attention (ProphetKV, arXiv:2602.02579): that of the layers at a third, a
    half and two thirds of the depth, because different layers attend to different tokens. The token's place in its
    chunk predicts the staleness. The pass takes at most a tenth of the budget, but at least one token. With a ratio it
    costs extra.

        >>> Guided(0.5)
        Guided(ratio=0.5)

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend, the query's pass included.
        run_overhead: what a run of adjacent tokens costs besides them, in tokens. On SmolLM2-135M, 2 makes a third as
            many runs. The KL stays the same where chunks were computed behind other text, and grows by a third where
            they were computed alone.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any.
    """

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        attention = _scaled(prompt.attend(self._queries(prompt), _asked_layers(prompt)), prompt) + _LEAST
        return attention * typical_change(prompt.offset).float()

    def overhead(self, prompt: Prompt) -> int:  # noqa: D102
        return self._queries(prompt) * (_asked_layers(prompt)[-1] + 1)

    def _queries(self, prompt: Prompt) -> int:
        """Return how many tokens of the query are asked."""
        count = min(_QUERIES, int(prompt.suffix.sum()))
        if not count:
            return 0
        budget = next(share for share in (self.ratio, self.cost, DEFAULT_RATIO) if share is not None)
        most = _QUERY_SHARE * budget * prompt.cached_tokens * prompt.layers / (_asked_layers(prompt)[-1] + 1)
        return min(count, max(1, int(most + 1e-9)))


def _asked_layers(prompt: Prompt) -> tuple[int, ...]:
    """Return the layers whose attention is summed, rising."""
    return tuple(sorted({int(prompt.layers * depth + 1e-9) for depth in _DEPTHS}))


def _scaled(score: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Return the score scaled to mean 1 over the cached tokens; 0 if it is 0 everywhere."""
    mean = score[prompt.cached].mean() if prompt.cached_tokens else torch.tensor(0.0)
    return score / mean if mean > 0 else torch.zeros_like(score)
