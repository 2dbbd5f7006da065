"""Which cached tokens are recomputed, and in which layers.

    Prompt --Selector.begin--> Selection --tokens(layer)--> positions that go through that layer
                                  ^
                                  └── observe(layer, …): how far new KV is from the cached, where it asks for that

The KV of a token can only be renewed in a layer if the token went through all layers below: the sets shrink from layer
to layer, never grow. Text is always computed and is no concern of a selector.

Costs are counted in token-layers: cached tokens recomputed, summed over layers, over cached tokens times layers. A
check of deviations has its price in the layers before it, and so has an attention pass of the query. A selector takes
either

    ratio   share of the cached tokens that it selects, whatever finding them costs on top, or
    cost    share of the token-layers that it may spend in all.

Scores (`Scorer`) say how much a token matters; a selector made of a score selects once, before the first layer:
`Random`, `Boundary`, `Overlap`, `QueryGuided`, their sums and products. `HKVD` looks at what the first layers show.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from cuvee.blend.segments import Prompt
from cuvee.codec.errors import InputError

DEFAULT_RATIO = 0.15
_BASE = 0.6  # of a score whose mean is 1: what a token gets that the query does not look at (0.3 and 1 measured worse)
_QUERY_SHARE = 0.1  # of the budget: what the default selector's pass of the query may take
_PAIR = 4.0  # weight of a match of two tokens in a row beside that of one


class Selection(Protocol):
    """What a selector chose for one prompt; the blender asks layer by layer."""

    def tokens(self, layer: int) -> torch.Tensor:
        """Positions of cached tokens that go through `layer`, int64, rising; some of those of the layer before."""
        ...

    def watches(self, layer: int) -> bool:
        """Whether `observe` is wanted after `layer` computed its keys and values."""
        ...

    def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Squared deviation of new from cached keys and values of `tokens(layer)`, over the mean square of the new.

        Args:
            layer: it was measured in.
            keys: float32, one number per token.
            values: likewise.
        """
        ...


class Selector(Protocol):
    """Chooses the tokens to recompute. Immutable: it serves any number of prompts."""

    def begin(self, prompt: Prompt) -> Selection:
        """Start on a prompt.

        Raises:
            InputError: a cost that does not pay for what the selector has to look at.
        """
        ...


class Scorer(Protocol):
    """How much it matters that a token be recomputed."""

    def score(self, prompt: Prompt) -> torch.Tensor:
        """Numbers above 0, float32 `[T]`, of which only the ratios matter; what stands at text is ignored."""
        ...

    def overhead(self, prompt: Prompt) -> int:
        """Token-layers that `score` spends."""
        ...


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
    """Recomputes no cached token: the floor."""

    def begin(self, prompt: Prompt) -> Selection:  # noqa: D102
        return _Fixed(torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class _Scored(ABC):
    """Selects the tokens of the highest score, before the first layer.

    Args:
        ratio: share of the cached tokens; default 0.15.
        cost: instead of it, share of the token-layers.
    """

    ratio: float | None = None
    cost: float | None = None

    def __post_init__(self) -> None:
        _check_budget(self.ratio, self.cost)

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
        return _fixed(self, self.ratio, self.cost, prompt)


@dataclass(frozen=True, slots=True, repr=False)
class Random(_Scored):
    """Any tokens: the control that a selector has to beat.

    Args:
        ratio, cost: see above.
        seed: of the draw, the same for every prompt.
    """

    seed: int = 0

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return torch.rand(len(prompt.tokens), generator=torch.Generator().manual_seed(self.seed)) + 0.5


@dataclass(frozen=True, slots=True, repr=False)
class Boundary(_Scored):
    """The first tokens of each chunk, which miss most of what they would have looked at (EPIC, arXiv:2410.15332).

    The first tokens of the prompt, its attention sinks, are among them unless they are exact already.

    Args:
        ratio, cost: see above.
        tokens: instead of both, so many tokens of each chunk.
    """

    tokens: int | None = None

    def __post_init__(self) -> None:
        _check_budget(self.ratio, self.cost)
        if self.tokens is not None:
            if (self.ratio, self.cost) != (None, None):
                raise InputError("Boundary.tokens: leave ratio and cost out beside it")
            if type(self.tokens) is not int or self.tokens < 0:
                raise InputError(f"Boundary.tokens: must be an int of at least 0, got {self.tokens!r}")

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        # Alone only the order counts. In a product this fall measured better than that of its root, which is about how
        # the deviation of isolated chunks falls.
        return 1.0 / (1.0 + prompt.offset.float())

    def begin(self, prompt: Prompt) -> Selection:  # noqa: D102
        if self.tokens is None:
            return _Scored.begin(self, prompt)
        return _Fixed((prompt.cached & ~prompt.leading & (prompt.offset < self.tokens)).nonzero()[:, 0])


@dataclass(frozen=True, slots=True, repr=False)
class Overlap(_Scored):
    """Tokens that occur in the text after the chunks, and those that follow them: where a model looks to copy from.

    Each token of the query shares one vote among its occurrences in the chunks, an occurrence after the same token as
    in the query counting five times; half of it goes to the token, half to the one after it, whose key says what stood
    before it (induction heads: Olsson et al., arXiv:2209.11895). No pass of the model: costs nothing.
    """

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        tokens, positions = prompt.tokens.tolist(), prompt.cached.nonzero()[:, 0].tolist()
        goes_on = ~prompt.cached
        goes_on[1:] &= ~prompt.cached[:-1]  # text after text is one text, in however many segments
        first = (prompt.offset == 0) & ~goes_on
        pairs = list(zip([-1, *tokens[:-1]], tokens, strict=True))  # of a token and the one before it
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
        return _lifted(votes + following, prompt)


@dataclass(frozen=True, slots=True, repr=False)
class QueryGuided(_Scored):
    """Tokens that the query attends to over the chunks as they are cached (ProphetKV, arXiv:2602.02579).

    Args:
        ratio, cost: see above; the pass of the query counts as recomputed tokens.
        queries: how many of the last tokens of the text after the chunks ask.
        layers: in which layers their attention is summed; default: the one at two thirds of the depth.
        most: share of the token-layers that the pass may take: where it would take more, fewer tokens ask, one at
            least. Default: no limit.
    """

    queries: int = 32
    layers: tuple[int, ...] | None = None
    most: float | None = None

    def __post_init__(self) -> None:
        _check_budget(self.ratio, self.cost)
        if type(self.queries) is not int or self.queries < 1:
            raise InputError(f"QueryGuided.queries: must be an int of at least 1, got {self.queries!r}")
        _check_layers("QueryGuided.layers", self.layers)
        _check_share("QueryGuided.most", self.most)

    def score(self, prompt: Prompt) -> torch.Tensor:  # noqa: D102
        return _lifted(prompt.attend(self._count(prompt), self._layers(prompt)), prompt)

    def overhead(self, prompt: Prompt) -> int:  # noqa: D102
        return self._count(prompt) * (max(self._layers(prompt)) + 1)

    def _count(self, prompt: Prompt) -> int:
        count = min(self.queries, int(prompt.suffix.sum()))
        if self.most is None or not count:
            return count
        affordable = self.most * prompt.cached_tokens * prompt.layers / (max(self._layers(prompt)) + 1)
        return min(count, max(1, int(affordable + 1e-9)))

    def _layers(self, prompt: Prompt) -> tuple[int, ...]:
        chosen = self.layers or (2 * prompt.layers // 3,)
        if max(chosen) >= prompt.layers:
            raise InputError(f"QueryGuided.layers: {max(chosen)} is not among the {prompt.layers} layers")
        return chosen


class _Combination(ABC):
    """Tokens that several scores agree on in some way.

    Args:
        scorers: at least one; their own ratios do not matter.
        ratio, cost: see above.
    """

    __slots__ = ("cost", "ratio", "scorers")

    def __init__(self, *scorers: Scorer, ratio: float | None = None, cost: float | None = None) -> None:
        _check_budget(ratio, cost)
        if not scorers or not all(hasattr(scorer, "score") for scorer in scorers):
            raise InputError("scorers: must be selectors with a score (Random, Boundary, Overlap, QueryGuided, Sum …)")
        self.scorers = scorers
        self.ratio = ratio
        self.cost = cost

    def __repr__(self) -> str:
        said = [f"{name}={value}" for name, value in (("ratio", self.ratio), ("cost", self.cost)) if value is not None]
        return f"{type(self).__name__}({', '.join([*map(repr, self.scorers), *said])})"

    @abstractmethod
    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""

    def overhead(self, prompt: Prompt) -> int:
        """See `Scorer`."""
        return sum(scorer.overhead(prompt) for scorer in self.scorers)

    def begin(self, prompt: Prompt) -> Selection:
        """See `Selector`."""
        return _fixed(self, self.ratio, self.cost, prompt)


class Product(_Combination):
    """Tokens whose scores have the largest product: those that matter to all of them."""

    __slots__ = ()

    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""
        return torch.stack([scorer.score(prompt) for scorer in self.scorers]).prod(0)


class Sum(_Combination):
    """Tokens whose scores have the largest sum: those that matter to any of them."""

    __slots__ = ()

    def score(self, prompt: Prompt) -> torch.Tensor:
        """See `Scorer`."""
        return torch.stack([scorer.score(prompt) for scorer in self.scorers]).sum(0)


class Union:
    """Every token that one of several selectors selects; each keeps to its own ratio or cost.

    Args:
        selectors: at least one, such as `Boundary(tokens=16)` and `HKVD(0.15)`.
    """

    __slots__ = ("selectors",)

    def __init__(self, *selectors: Selector) -> None:
        if not selectors or not all(hasattr(selector, "begin") for selector in selectors):
            raise InputError("selectors: must be at least one selector")
        self.selectors = selectors

    def __repr__(self) -> str:
        return f"Union({', '.join(map(repr, self.selectors))})"

    def begin(self, prompt: Prompt) -> Selection:
        """See `Selector`."""
        return _UnionSelection([selector.begin(prompt) for selector in self.selectors])


class _UnionSelection:
    def __init__(self, parts: Sequence[Selection]) -> None:
        self._parts = parts

    def tokens(self, layer: int) -> torch.Tensor:
        positions: torch.Tensor = torch.cat([part.tokens(layer) for part in self._parts]).unique()
        return positions

    def watches(self, layer: int) -> bool:
        return any(part.watches(layer) for part in self._parts)

    def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        everything = self.tokens(layer)
        for part in self._parts:
            if part.watches(layer):
                own = torch.searchsorted(everything, part.tokens(layer))
                part.observe(layer, keys[own], values[own])


@dataclass(frozen=True, slots=True)
class HKVD:
    """High KV deviation (CacheBlend, arXiv:2405.16444): tokens whose new KV is farthest from the cached.

    All cached tokens (but those at the beginning that are exact) go through the layers up to the last check layer; from
    there on only those that deviated most. That costs (check layer + 1) / layers before anything is selected: little in
    a deep model, a third in one of six layers.

    Args:
        ratio, cost: see above; `cost` includes the check layers.
        check_layers: layers, rising, whose deviations are summed. At layer 0 there are none: its KV depends on the
            token alone.
        of: "keys", "values" or "both".
        shrink: CacheBlend's gradual filtering: how many times the final number of tokens go through the layers after
            the last check layer, falling, such as (1.5, 1.2); after each the deviation there decides who stays.
        weight: deviations are multiplied by this score.

    Raises:
        InputError: an argument out of range.
    """

    ratio: float | None = None
    cost: float | None = None
    check_layers: tuple[int, ...] = (1,)
    of: str = "both"
    shrink: tuple[float, ...] = ()
    weight: Scorer | None = None

    def __post_init__(self) -> None:
        _check_budget(self.ratio, self.cost)
        _check_layers("HKVD.check_layers", self.check_layers)
        if self.of not in ("keys", "values", "both"):
            raise InputError(f"HKVD.of: must be 'keys', 'values' or 'both', got {self.of!r}")
        if list(self.shrink) != sorted(self.shrink, reverse=True) or any(factor < 1 for factor in self.shrink):
            raise InputError(f"HKVD.shrink: must be falling numbers of at least 1, got {self.shrink}")
        if self.weight is not None and not hasattr(self.weight, "score"):
            raise InputError(f"HKVD.weight: must have a score, as Boundary() has, got {self.weight!r}")

    def begin(self, prompt: Prompt) -> Selection:  # noqa: D102
        return _Deviating(self, prompt)


class _Deviating:
    """HKVD on one prompt."""

    def __init__(self, selector: HKVD, prompt: Prompt) -> None:
        self._of = selector.of
        self._checks = selector.check_layers
        self._prompt = prompt
        self._last = max(self._checks)
        after = prompt.layers - self._last - 1  # layers that the selected tokens go through
        if after < 1 or len(selector.shrink) > after:
            raise InputError(
                f"HKVD: check_layers {self._checks} and {len(selector.shrink)} shrinking layers do not fit a model of "
                f"{prompt.layers} layers"
            )
        overhead = 0 if selector.weight is None else selector.weight.overhead(prompt)
        weights = [*selector.shrink, *[1.0] * (after - len(selector.shrink))]
        candidates = prompt.cached & ~prompt.leading
        for pool in (candidates, prompt.cached):
            self._pool = pool.nonzero()[:, 0]
            spent = overhead + len(self._pool) * (self._last + 1)
            count = _affordable(selector.ratio, selector.cost, prompt, spent, sum(weights), "HKVD's check layers")
            # What a cost below 1 leaves over is not spent on tokens that are exact.
            if count <= len(self._pool) or selector.cost not in (None, 1):
                break
        count = min(count, len(self._pool))
        self._weight = torch.ones(len(prompt.tokens))
        if selector.weight is not None and 0 < count < len(self._pool):  # scored only where there is a choice
            self._weight = selector.weight.score(prompt)
        self._score = torch.zeros(len(prompt.tokens))
        self._counts = {self._last + 1 + i: int(count * weight + 1e-9) for i, weight in enumerate(weights)}
        self._chosen = dict.fromkeys(range(self._last + 1), self._pool)

    def tokens(self, layer: int) -> torch.Tensor:
        return self._chosen[layer]

    def watches(self, layer: int) -> bool:
        following = self._counts.get(layer + 1)
        return layer in self._checks or (following is not None and following < self._counts.get(layer, 0))

    def observe(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        chosen = self._chosen[layer]
        seen = torch.zeros_like(self._score)
        seen[chosen] = {"keys": keys, "values": values, "both": keys + values}[self._of]
        self._score = self._score + seen if layer <= self._last else seen
        if layer >= self._last:
            kept = self._prompt.best(self._score * self._weight, self._counts[layer + 1], chosen)
            # No decision comes any more until the counts fall again.
            for later in range(layer + 1, self._prompt.layers):
                self._chosen[later] = kept


def default_selector(*, ratio: float | None = None, cost: float | None = None) -> Product:
    """What measured best: tokens that the text names or attends to, those near the beginnings of chunks first.

    The pass of the query takes a tenth of the budget at most, unless that is less than one token's; beside a ratio it
    comes on top.
    """
    _check_budget(ratio, cost)
    budget = next(share for share in (ratio, cost, DEFAULT_RATIO) if share is not None)
    query = QueryGuided(queries=16, most=_QUERY_SHARE * budget)
    return Product(Sum(Overlap(), query), Boundary(), ratio=ratio, cost=cost)


def _fixed(scorer: Scorer, ratio: float | None, cost: float | None, prompt: Prompt) -> Selection:
    """The tokens that score highest; scored only where there is a choice."""
    count = _affordable(ratio, cost, prompt, scorer.overhead(prompt), prompt.layers, "the pass of the query")
    if count in (0, prompt.cached_tokens):
        return _Fixed(prompt.cached.nonzero()[:count, 0])
    return _Fixed(prompt.best(scorer.score(prompt), count))


def _lifted(score: torch.Tensor, prompt: Prompt) -> torch.Tensor:
    """Scaled to mean 1 over the cached tokens, and raised, so that nothing is without a chance."""
    mean = score[prompt.cached].mean() if prompt.cached_tokens else torch.tensor(0.0)
    return (score / mean if mean > 0 else torch.zeros_like(score)) + _BASE


def _affordable(ratio: float | None, cost: float | None, prompt: Prompt, spent: int, layers: float, what: str) -> int:
    """How many tokens can go through so many layers, after `spent` token-layers."""
    cached = prompt.cached_tokens
    if cost is None:
        return round((DEFAULT_RATIO if ratio is None else ratio) * cached)
    if not cached:
        return 0
    if cost == 1:
        return cached
    left = cost * cached * prompt.layers - spent
    if left < -1e-9:
        raise InputError(
            f"cost={cost:g} does not pay for {what}: {spent / cached / prompt.layers:.3f} of the token-layers of this "
            "prompt; raise it, or say ratio= instead"
        )
    return int(left / layers + 1e-9)


def _check_budget(ratio: float | None, cost: float | None) -> None:
    if ratio is not None and cost is not None:
        raise InputError("ratio, cost: give one of them")
    _check_share("ratio", ratio)
    _check_share("cost", cost)


def _check_share(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
        raise InputError(f"{name}: must be a number from 0 to 1, got {value!r}")


def _check_layers(name: str, layers: tuple[int, ...] | None) -> None:
    if layers is None:
        return
    if not layers or list(layers) != sorted(set(layers)) or any(type(n) is not int or n < 0 for n in layers):
        raise InputError(f"{name}: must be rising layer numbers, at least one, got {layers!r}")
