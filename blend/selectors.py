"""Selectors: choose the cached tokens to recompute, layer by layer.

    Prompt --Selector.begin--> Selection --tokens(layer)--> positions that go through that layer
                                  ^
                                  └── observe(layer, …): distance of new KV from cached KV, on request

A token can be recomputed in a layer only if it went through all layers below, so the sets never grow from layer to
layer. Text is always computed; selectors choose among cached tokens only.

Costs are counted in token-layers: recomputed cached tokens, summed over layers, as a share of cached tokens times
layers. A check of deviations costs the layers before it, and a pass of the query costs its layers. A selector takes
either

    ratio   share of the cached tokens to select, not counting the cost of finding them, or
    cost    share of the token-layers to spend in total.

Both count tokens. In a serving engine, runs of adjacent tokens cost time as well, and late tokens cost more than early
ones: `run_overhead` makes runs few, and `context_overhead` weighs tokens by their position (`runs.py`).

A score (`Scorer`) weighs each token. Selectors with a score select once, before the first layer: `Random`, `Boundary`,
`Overlap`, `QueryGuided`, and their products. `HKVD` selects by deviations in the first layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields

import torch

from cuvee.blend.budget import DEFAULT_RATIO, affordable, check_budget, check_layers, check_share
from cuvee.blend.correction import typical_change
from cuvee.blend.runs import best_runs, check_context_overhead, check_run_overhead
from cuvee.blend.segments import Prompt
from cuvee.blend.selection import Scorer, Selection
from cuvee.codec.errors import InputError

_BASE = 0.6  # added to votes of mean 1, for tokens that are not in the text (0.3 and 1 measured worse)
_DEPTHS = (1 / 3, 1 / 2, 2 / 3)  # depths of the layers whose attention is used: where models retrieve
_LEAST = 1e-3  # added to attention of mean 1, so that a product still ranks tokens without attention
_QUERY_SHARE = 0.1  # largest share of the budget for the query's pass in the default selector
_PAIR = 4.0  # weight of a match of two tokens in a row, relative to a match of one


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The same tokens in all layers."""

    chosen: torch.Tensor

    def tokens(self, layer: int) -> torch.Tensor:
        return self.chosen

    def watches(self, layer: int) -> bool:
        return False

    def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        raise AssertionError("a fixed selection watches no layer")


@dataclass(frozen=True, slots=True)
class Nothing:
    """Recomputes no cached token: the lower bound for other selectors.

    >>> Nothing()
    Nothing()
    """

    def begin(self, prompt: Prompt) -> Selection:  # noqa: D102
        return _Fixed(torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class _Scored(ABC):
    """Selects the tokens with the highest scores, before the first layer.

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
        check_run_overhead(self.run_overhead)
        check_context_overhead(self.context_overhead)

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(said)})"

    @abstractmethod
    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""

    def overhead(self, prompt: Prompt) -> int:
        """See `Scorer`."""
        return 0

    def begin(self, prompt: Prompt) -> Selection:
        return _fixed(self, prompt)


@dataclass(frozen=True, slots=True, repr=False)
class Random(_Scored):
    """Selects random tokens: the control for other selectors.

        >>> Random(0.15, seed=1)
        Random(ratio=0.15, seed=1)

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
        seed: seed of the draw, used for every prompt.
    """

    seed: int = 0

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return torch.rand(len(prompt.tokens), generator=torch.Generator().manual_seed(self.seed)) + 0.5


@dataclass(frozen=True, slots=True, repr=False)
class Boundary(_Scored):
    """Selects the first tokens of each chunk, which lack most of their context (EPIC, arXiv:2410.15332).

    They include the first tokens of the prompt, its attention sinks, unless these are exact already.

        >>> Boundary(tokens=16)
        Boundary(tokens=16)

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
        tokens: instead of both, the number of tokens to select in each chunk.
    """

    tokens: int | None = None

    def __post_init__(self) -> None:
        _Scored.__post_init__(self)
        if self.tokens is not None:
            if (self.ratio, self.cost) != (None, None):
                raise InputError("Boundary.tokens: must not be given along with ratio or cost, got both")
            if type(self.tokens) is not int or self.tokens < 0:
                raise InputError(f"Boundary.tokens: must be an int of at least 0, got {self.tokens!r}")

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return typical_change(prompt.offset).float()

    def begin(self, prompt: Prompt) -> Selection:  # noqa: D102
        if self.tokens is None:
            return _Scored.begin(self, prompt)
        return _Fixed((prompt.cached & ~prompt.leading & (prompt.offset < self.tokens)).nonzero()[:, 0])


@dataclass(frozen=True, slots=True, repr=False)
class Overlap(_Scored):
    """Selects tokens that also occur in the text after the chunks, and their successors: the sources of copying.

    Each token of the query divides one vote among its occurrences in the chunks. An occurrence counts five times if it
    follows the same token as in the query. Half of a vote goes to the token itself, half to its successor, whose key
    encodes the token before it (induction heads: Olsson et al., arXiv:2209.11895). Without a pass of the model, this is
    free.

        >>> Overlap(cost=0.2)
        Overlap(cost=0.2)

    Args:
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
    """

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        tokens, positions = prompt.tokens.tolist(), prompt.cached.nonzero()[:, 0].tolist()
        goes_on = ~prompt.cached
        goes_on[1:] &= ~prompt.cached[:-1]  # adjacent segments of text are one text
        first = (prompt.offset == 0) & ~goes_on
        pairs = list(zip([-1, *tokens[:-1]], tokens, strict=True))  # each token with the one before it
        pairs = [(-1, pair[1]) if starts else pair for pair, starts in zip(pairs, first.tolist(), strict=True)]
        singles, doubles = Counter(tokens[p] for p in positions), Counter(pairs[p] for p in positions)
        single_votes: dict[int, float] = defaultdict(float)
        double_votes: dict[tuple[int, int], float] = defaultdict(float)
        for at in prompt.suffix.nonzero()[:, 0].tolist():
            if not singles[tokens[at]]:
                continue
            known = doubles[pairs[at]] if pairs[at][0] >= 0 else 0
            weight = singles[tokens[at]] + _PAIR * known
            single_votes[tokens[at]] += 1 / weight
            if known:
                double_votes[pairs[at]] += _PAIR / weight
        votes = torch.zeros(len(tokens))
        votes[positions] = torch.tensor([single_votes[tokens[p]] + double_votes[pairs[p]] for p in positions])
        following = torch.zeros_like(votes)
        following[1:] = votes[:-1]
        following[first] = 0
        return _scaled(votes + following, prompt) + _BASE


@dataclass(frozen=True, slots=True, repr=False)
class QueryGuided(_Scored):
    """Selects tokens of the cached chunks that the query attends to (ProphetKV, arXiv:2602.02579).

    The attention of several layers is summed, because different layers attend to different tokens.

        >>> QueryGuided(0.15, queries=16, most=0.02)
        QueryGuided(ratio=0.15, queries=16, most=0.02)

    Args:
        ratio: share of the cached tokens to select; default 0.15. The query's pass costs extra.
        cost: instead of `ratio`, share of the token-layers to spend, the query's pass included.
        queries: number of query tokens: the last tokens of the text after the chunks.
        layers: the layers whose attention is summed; default: those at a third, a half and two thirds of the depth.
        most: largest share of the token-layers for the pass. A longer query is cut to fewer tokens, at least one.
            Default: no limit.
    """

    queries: int = 32
    layers: tuple[int, ...] | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        _Scored.__post_init__(self)
        if type(self.queries) is not int or self.queries < 1:
            raise InputError(f"QueryGuided.queries: must be an int of at least 1, got {self.queries!r}")
        check_layers("QueryGuided.layers", self.layers)
        check_share("QueryGuided.most", self.most)

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return _scaled(prompt.attend(self._count(prompt), self._layers(prompt)), prompt) + _LEAST

    def overhead(self, prompt: Prompt) -> int:  # noqa: D102
        return self._count(prompt) * (max(self._layers(prompt)) + 1)

    def _count(self, prompt: Prompt) -> int:
        count = min(self.queries, int(prompt.suffix.sum()))
        if self.most is None or not count:
            return count
        affordable = self.most * prompt.cached_tokens * prompt.layers / (max(self._layers(prompt)) + 1)
        return min(count, max(1, int(affordable + 1e-9)))

    def _layers(self, prompt: Prompt) -> tuple[int, ...]:
        chosen = self.layers or tuple(sorted({int(prompt.layers * depth + 1e-9) for depth in _DEPTHS}))
        if max(chosen) >= prompt.layers:
            raise InputError(
                f"QueryGuided.layers: must be below {prompt.layers}, the layers of the model, got {max(chosen)}"
            )
        return chosen


class Product:
    """Selects the tokens with the largest product of scores: tokens that matter by every score.

        >>> Product(Overlap(), Boundary(), ratio=0.1)
        Product(Overlap(), Boundary(), ratio=0.1)

    Args:
        scorers: at least one. Their ratios and costs are ignored.
        ratio: share of the cached tokens to select; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend.
        run_overhead: what a run of adjacent tokens costs besides them, in tokens.
        context_overhead: what each token before a token adds to its cost, as a share of what it costs without any.
    """

    __slots__ = ("context_overhead", "cost", "ratio", "run_overhead", "scorers")

    def __init__(
        self,
        *scorers: Scorer,
        ratio: float | None = None,
        cost: float | None = None,
        run_overhead: float = 0.0,
        context_overhead: float = 0.0,
    ) -> None:
        check_budget(ratio, cost)
        check_run_overhead(run_overhead)
        check_context_overhead(context_overhead)
        if not scorers or not all(hasattr(scorer, "score") for scorer in scorers):
            raise InputError(
                "scorers: must be selectors with a score, such as Random, Boundary, Overlap or QueryGuided, "
                f"got {', '.join(type(scorer).__name__ for scorer in scorers) or 'none'}"
            )
        self.scorers = scorers
        self.ratio = ratio
        self.cost = cost
        self.run_overhead = run_overhead
        self.context_overhead = context_overhead

    def __repr__(self) -> str:
        budget = {"ratio": self.ratio, "cost": self.cost}
        overheads = {"run_overhead": self.run_overhead or None, "context_overhead": self.context_overhead or None}
        said = [f"{name}={value}" for name, value in (budget | overheads).items() if value is not None]
        return f"{type(self).__name__}({', '.join([*map(repr, self.scorers), *said])})"

    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""
        return torch.stack([scorer.score(prompt) for scorer in self.scorers]).prod(0)

    def overhead(self, prompt: Prompt) -> int:
        """See `Scorer`."""
        return sum(scorer.overhead(prompt) for scorer in self.scorers)

    def begin(self, prompt: Prompt) -> Selection:
        """See `Selector`."""
        return _fixed(self, prompt)


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


def _fixed(scorer: _Scored | Product, prompt: Prompt) -> Selection:
    """Select the tokens that score highest, scoring them only if there is a choice."""
    spent = scorer.overhead(prompt)
    count = affordable(scorer.ratio, scorer.cost, prompt, spent, prompt.layers, "the pass of the query")
    if count in (0, prompt.cached_tokens):
        return _Fixed(prompt.cached.nonzero()[:count, 0])
    score, overheads = scorer.score(prompt), (scorer.run_overhead, scorer.context_overhead)
    if not any(overheads):
        return _Fixed(prompt.best(score, count))
    return _Fixed(best_runs(score, prompt.cached, prompt.leading, count, *overheads))


def _scaled(score: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Return the score scaled to mean 1 over the cached tokens; 0 if it is 0 everywhere."""
    mean = score[prompt.cached].mean() if prompt.cached_tokens else torch.tensor(0.0)
    return score / mean if mean > 0 else torch.zeros_like(score)
