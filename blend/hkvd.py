"""HKVD: selects the tokens whose new keys and values deviate most from the cached ones in the first layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cuvee.blend.budget import affordable, check_budget, check_layers
from cuvee.blend.segments import Prompt
from cuvee.blend.selection import Scorer, Selection
from cuvee.codec.errors import InputError


@dataclass(frozen=True, slots=True)
class HKVD:
    """Selects by high KV deviation (CacheBlend, arXiv:2405.16444): tokens whose new KV is farthest from the cached KV.

    All cached tokens, except exact ones at the beginning, go through the layers up to the last check layer. Then only
    the tokens that deviate most go on. The check costs (check layer + 1) / layers before any selection: little in a
    deep model, but a third in a model of six layers.

        >>> HKVD(0.15)
        HKVD(ratio=0.15, cost=None, check_layers=(1,), of='both', shrink=(), weight=None)
        >>> HKVD(cost=0.3, check_layers=(1, 2), shrink=(1.5, 1.2)).cost
        0.3

    Args:
        ratio: share of the cached tokens to select, not counting the cost of the check layers; default 0.15.
        cost: instead of `ratio`, share of the token-layers to spend, check layers included.
        check_layers: layers, rising, whose deviations are summed. In layer 0 nothing deviates, because its KV depends
            on the token alone.
        of: "keys", "values" or "both".
        shrink: CacheBlend's gradual filtering. Falling factors such as (1.5, 1.2): multiples of the final number of
            tokens in the layers after the last check layer; after each layer, its deviations decide which tokens stay.
        weight: a score to multiply deviations by.

    Raises:
        InputError: an argument is out of range.
    """

    ratio: float | None = None
    cost: float | None = None
    check_layers: tuple[int, ...] = (1,)
    of: str = "both"
    shrink: tuple[float, ...] = ()
    weight: Scorer | None = None

    def __post_init__(self) -> None:
        check_budget(self.ratio, self.cost)
        check_layers("HKVD.check_layers", self.check_layers)
        if self.of not in ("keys", "values", "both"):
            raise InputError(f"HKVD.of: must be 'keys', 'values' or 'both', got {self.of!r}")
        if list(self.shrink) != sorted(self.shrink, reverse=True) or any(factor < 1 for factor in self.shrink):
            raise InputError(f"HKVD.shrink: must be falling numbers of at least 1, got {self.shrink}")
        if self.weight is not None and not hasattr(self.weight, "score"):
            raise InputError(f"HKVD.weight: must have a score, like Boundary(), got {self.weight!r}")

    def begin(self, prompt: Prompt) -> Selection:  # noqa: D102
        return _Deviating(self, prompt)


class _Deviating:
    """The selection of HKVD on one prompt."""

    def __init__(self, selector: HKVD, prompt: Prompt) -> None:
        self._of = selector.of
        self._checks = selector.check_layers
        self._prompt = prompt
        self._last = max(self._checks)
        after = prompt.layers - self._last - 1  # layers that only the selected tokens go through
        if after < 1 or len(selector.shrink) > after:
            raise InputError(
                f"HKVD.check_layers: must fit a model of {prompt.layers} layers, got {self._checks} and "
                f"{len(selector.shrink)} shrinking layers"
            )
        overhead = 0 if selector.weight is None else selector.weight.overhead(prompt)
        weights = [*selector.shrink, *[1.0] * (after - len(selector.shrink))]
        candidates = prompt.cached & ~prompt.leading
        for pool in (candidates, prompt.cached):
            self._pool = pool.nonzero()[:, 0]
            spent = overhead + len(self._pool) * (self._last + 1)
            count = affordable(selector.ratio, selector.cost, prompt, spent, sum(weights), "the check layers of HKVD")
            # A cost below 1 that exceeds the inexact tokens does not recompute exact ones.
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
            # These tokens stay until the counts fall again.
            for later in range(layer + 1, self._prompt.layers):
                self._chosen[later] = kept
