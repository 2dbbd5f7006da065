"""Selectors: choose the cached tokens to recompute.

    Prompt --Selector.select--> positions of the tokens that go through all layers

Text is always computed; selectors choose among cached tokens only.

Costs are counted in token-layers: recomputed cached tokens, summed over layers, as a share of cached tokens times
layers. A pass of the query costs its layers. A selector takes either

    ratio   share of the cached tokens to select, not counting the cost of finding them, or
    cost    share of the token-layers to spend in total.

Both count tokens. In a serving engine, runs of adjacent tokens cost time as well, and late tokens cost more than early
ones: `run_overhead` makes runs few, and `context_overhead` weighs tokens by their position (`runs.py`).

A score (`Scorer`) weighs each token: `Boundary`, `QueryGuided`, and their products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Protocol

import torch

from cuvee.blend.budget import DEFAULT_RATIO, affordable, check_budget, check_share
from cuvee.blend.correction import typical_change
from cuvee.blend.runs import best_runs, check_overhead
from cuvee.blend.segments import Prompt
from cuvee.codec.errors import InputError

_DEPTHS = (1 / 3, 1 / 2, 2 / 3)  # depths of the layers whose attention is used: where models retrieve
_LEAST = 1e-3  # added to attention of mean 1, so that a product still ranks tokens without attention
_QUERY_SHARE = 0.1  # largest share of the budget for the query's pass in the default selector


class Selector(Protocol):
    """Chooses the tokens to recompute. It is immutable, and serves any number of prompts."""

    def select(self, prompt: Prompt) -> torch.Tensor:
        """Return the positions of cached tokens to recompute, int64, rising.

        Raises:
            InputError: the cost does not pay for the selector's passes.
        """
        ...


class Scorer(Protocol):
    """Scores how important it is to recompute each token."""

    def score(self, prompt: Prompt) -> torch.Tensor:
        """Return scores above 0, float32 `[T]`. Only their ratios matter; those of text are ignored."""
        ...

    def overhead(self, prompt: Prompt) -> int:
        """Return the token-layers that `score` spends."""
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
        """See `Scorer`."""

    def overhead(self, prompt: Prompt) -> int:
        """See `Scorer`."""
        return 0

    def select(self, prompt: Prompt) -> torch.Tensor:
        """See `Selector`. Tokens are scored only if there is a choice."""
        spent = self.overhead(prompt)
        count = affordable(self.ratio, self.cost, prompt, spent, "the pass of the query")
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
class QueryGuided(_Scored):
    """Selects tokens of the cached chunks that the query attends to (ProphetKV, arXiv:2602.02579).

    The attention of the layers at a third, a half and two thirds of the depth is summed, because different layers
    attend to different tokens.

        >>> QueryGuided(0.15, queries=16, most=0.02)
        QueryGuided(ratio=0.15, queries=16, most=0.02)

    Args:
        ratio: share of the cached tokens to select; default 0.15. The query's pass costs extra.
        cost: instead of `ratio`, share of the token-layers to spend, the query's pass included.
        queries: number of query tokens: the last tokens of the text after the chunks.
        most: largest share of the token-layers for the pass. A longer query is cut to fewer tokens, at least one.
            Default: no limit.
    """

    queries: int = 32
    most: float | None = None

    def __post_init__(self) -> None:
        _Scored.__post_init__(self)
        if type(self.queries) is not int or self.queries < 1:
            raise InputError(f"QueryGuided.queries: must be an int of at least 1, got {self.queries!r}")
        check_share("QueryGuided.most", self.most)

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return _scaled(prompt.attend(self._count(prompt), _asked_layers(prompt)), prompt) + _LEAST

    def overhead(self, prompt: Prompt) -> int:  # noqa: D102
        return self._count(prompt) * (_asked_layers(prompt)[-1] + 1)

    def _count(self, prompt: Prompt) -> int:
        count = min(self.queries, int(prompt.suffix.sum()))
        if self.most is None or not count:
            return count
        affordable = self.most * prompt.cached_tokens * prompt.layers / (_asked_layers(prompt)[-1] + 1)
        return min(count, max(1, int(affordable + 1e-9)))


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Product(_Scored):
    """Selects the tokens with the largest product of scores: tokens that matter by every score.

        >>> Product(QueryGuided(), Boundary(), ratio=0.1)
        Product(QueryGuided(), Boundary(), ratio=0.1)

    Args:
        scorers: at least one. Their ratios and costs are ignored.
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
        run_overhead: what a run of adjacent tokens costs besides them, in tokens.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any.
    """

    scorers: tuple[Scorer, ...] = ()

    def __init__(
        self,
        *scorers: Scorer,
        ratio: float | None = None,
        cost: float | None = None,
        run_overhead: float = 0.0,
        context_overhead: float = 0.0,
    ) -> None:
        if not scorers or not all(hasattr(scorer, "score") for scorer in scorers):
            raise InputError(
                "scorers: must be selectors with a score, such as Boundary or QueryGuided, "
                f"got {', '.join(type(scorer).__name__ for scorer in scorers) or 'none'}"
            )
        object.__setattr__(self, "scorers", scorers)
        _Scored.__init__(self, ratio, cost, run_overhead=run_overhead, context_overhead=context_overhead)

    def __repr__(self) -> str:
        budget = {name: getattr(self, name) for name in ("ratio", "cost")}
        overheads = {name: getattr(self, name) or None for name in ("run_overhead", "context_overhead")}
        said = [f"{name}={value}" for name, value in (budget | overheads).items() if value is not None]
        return f"Product({', '.join([*map(repr, self.scorers), *said])})"

    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""
        return torch.stack([scorer.score(prompt) for scorer in self.scorers]).prod(0)

    def overhead(self, prompt: Prompt) -> int:
        """See `Scorer`."""
        return sum(scorer.overhead(prompt) for scorer in self.scorers)


def default_selector(
    *,
    ratio: float | None = None,
    cost: float | None = None,
    run_overhead: float = 0.0,
    context_overhead: float = 0.0,
) -> Product:
    """Return the selector that measured best: tokens that the query attends to, preferably at the beginning of chunks.

    The loss from a token's stale KV is the attention to it, times its staleness. A pass of the query measures the
    attention; the token's place in its chunk predicts the staleness. The pass takes at most a tenth of the budget, but
    at least one token. With a ratio it costs extra.

        >>> default_selector(ratio=0.5)
        Product(QueryGuided(queries=16, most=0.05), Boundary(), ratio=0.5)

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend, the query's pass included.
        run_overhead: what a run of adjacent tokens costs besides them, in tokens. On SmolLM2-135M, 2 makes a third as
            many runs. The KL stays the same where chunks were computed behind other text, and grows by a third where
            they were computed alone.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any.
    """
    check_budget(ratio, cost)
    budget = next(share for share in (ratio, cost, DEFAULT_RATIO) if share is not None)
    query = QueryGuided(queries=16, most=_QUERY_SHARE * budget)
    return Product(
        query, Boundary(), ratio=ratio, cost=cost, run_overhead=run_overhead, context_overhead=context_overhead
    )


def _asked_layers(prompt: Prompt) -> tuple[int, ...]:
    """Return the layers whose attention is summed, rising."""
    return tuple(sorted({int(prompt.layers * depth + 1e-9) for depth in _DEPTHS}))


def _scaled(score: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Return the score scaled to mean 1 over the cached tokens; 0 if it is 0 everywhere."""
    mean = score[prompt.cached].mean() if prompt.cached_tokens else torch.tensor(0.0)
    return score / mean if mean > 0 else torch.zeros_like(score)
