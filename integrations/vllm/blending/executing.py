"""The workers' side of blending: recomputes tokens among segments that were placed in the engine's pages.

Blend --> Placed --cuvee.blend.Recompute--> the engine's layers write what they compute into its pages
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from cuvee.blend import Nothing, Selector, default_selector
from cuvee.blend.model import RecomputeModel
from cuvee.blend.recompute import KVExchange, Placed, Recompute, squared_distances
from cuvee.codec.paged import PagedCache
from cuvee.integrations.vllm.messages import Blend

SINKS = 16  # tokens at the beginning of a prompt that are computed in any case


class ServedModel(RecomputeModel, Protocol):
    """A model that also says which token comes next."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `layer` returns for the last layer, `[S, C]` -> float32 logits `[S, V]`."""
        ...


class PageBlender:
    """Recomputes prompts in the pages of one rank.

    Args:
        cache: the engine's pages.
        block_tokens: of a block.
        open_model: makes the model for a prompt, from its block table.
        total: adds up over the ranks (`Recompute`).
    """

    def __init__(
        self,
        cache: PagedCache,
        block_tokens: int,
        open_model: Callable[[Sequence[int]], ServedModel],
        total: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._cache = cache
        self._block = block_tokens
        self._open_model = open_model
        self._total = total

    def blend(self, blend: Blend, end: int) -> dict[str, float]:
        """Compute the tokens `blend.start … end` that are not reused, and some that are.

        Returns:
            what happened, by the names of metrics.
        """
        placed = place(blend, end)
        slots = self._slots(blend.blocks, end)
        kv = _PagesKV(self._cache, slots, placed.cached | placed.known)
        model = self._open_model(blend.blocks)
        with torch.inference_mode():
            done = Recompute(model, kv, placed, self._total).run(selector_for(blend.cost, int(placed.cached.sum())))
            kl = self._divergence(model, slots, placed) if blend.check else None
        figures: dict[str, float] = {
            "blends": 1,
            "blended_tokens": end - blend.start,
            "blend_reused_tokens": int(placed.cached.sum()),
            "blend_recomputed_tokens": int((done.depth[placed.cached] > 0).sum()),
            "blend_token_layers": int(done.depth[placed.cached].sum()) + done.query_token_layers,
        }
        return figures if kl is None else {**figures, "blend_kl": kl}

    def _divergence(self, model: ServedModel, slots: torch.Tensor, placed: Placed) -> float:
        """KL of the next token's distribution behind the blend from that behind the whole prompt computed, in nats."""
        kv = _PagesKV(self._cache, slots, torch.arange(len(placed.tokens)) < placed.end)
        exact, blended = (
            _next_token(model, self._cache, placed.tokens, first, held) for first, held in ((0, None), (placed.end, kv))
        )
        return max(float((exact.exp() * (exact - blended)).sum()), 0.0)

    def _slots(self, blocks: Sequence[int], end: int) -> torch.Tensor:
        at = torch.arange(end)
        return (torch.tensor(blocks)[at // self._block] * self._block + at % self._block).to(self._cache.device)


def _next_token(
    model: ServedModel, cache: PagedCache, tokens: torch.Tensor, first: int, held: _PagesKV | None
) -> torch.Tensor:
    """Log-probabilities `[V]` of the token after a prompt, of which the tokens before `first` are held."""
    count = len(tokens)
    positions = torch.arange(first, count)
    rows = model.rows(positions, positions[:, None] >= torch.arange(count))
    hidden = model.embed(tokens[first:])
    for index, layer in enumerate(cache.layout.layers):
        if held is None:
            shape = (layer.kv_heads, count, layer.head_dim)
            keys, values = (torch.zeros(shape, dtype=cache.dtype, device=cache.device) for _ in range(2))
        else:
            keys, values = held.layer(index)
        hidden = model.layer(index, hidden, rows, KVExchange(keys, values, positions))
    return model.logits(hidden[-1:])[0].log_softmax(-1)


def selector_for(cost: float, reused: int) -> Selector:
    """What selects among so many reused tokens: the library's default, or nothing, where the cost pays for no token."""
    return default_selector(cost=cost) if cost * reused >= 1 else Nothing()


def place(blend: Blend, end: int) -> Placed:
    """A blend as `cuvee.blend` sees it: exact tokens, pieces, and text between and after them.

    The first tokens of a prompt are text even where a piece holds them. All others look at them far more than at any
    other (attention sinks: Xiao et al., arXiv:2309.17453), and a piece that was computed behind something has none.
    """
    tokens = torch.tensor(blend.tokens)
    count = len(tokens)
    segment = torch.zeros(count, dtype=torch.int64)
    offset = torch.arange(count)
    cached = torch.zeros(count, dtype=torch.bool)
    bounds = {0, blend.start}
    for piece in blend.pieces:
        first, last = max(piece.start, blend.start), min(piece.start + piece.tokens, end)
        cached[first:last] = True
        # A piece that ends the prompt goes on behind `end`, with the prompt's last token, which is always computed.
        bounds |= {first, piece.start + piece.tokens}
    cached[:SINKS] = False
    for number, first in enumerate(sorted(bound for bound in bounds if bound < count)):
        segment[first:] = number
        offset[first:] = torch.arange(count - first)
    for piece in blend.pieces:  # a piece counts from its own beginning, though that may be exact
        first = max(piece.start, blend.start)
        offset[first : piece.start + piece.tokens] += first - piece.start
    known = torch.arange(count) < blend.start
    return Placed(tokens, segment, offset, cached, torch.zeros_like(cached), known, end)


class _PagesKV:
    """The KV of a prompt of T tokens, the first of which have slots. `there`, bool `[T]`, have KV before the blend."""

    def __init__(self, cache: PagedCache, slots: torch.Tensor, there: torch.Tensor) -> None:
        self._cache = cache
        self._slots = slots
        self._read = cache.reader(torch.cat((slots, slots.new_zeros(len(there) - len(slots)))))
        self._missing = (~there).nonzero()[:, 0].to(slots.device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies `[H, T, D]`. All others are zeros: pages hold garbage before they are written, and 0 * NaN is NaN."""
        keys, values = self._read(index)
        for part in (keys, values):
            part[self._missing] = 0
        return keys.transpose(0, 1), values.transpose(0, 1)

    def exchange(self, index: int, positions: torch.Tensor, end: int) -> PagesExchange:
        return PagesExchange(self._cache, index, self._slots, positions)


class PagesExchange:
    """Takes note of new KV before the engine writes it into its pages, by itself."""

    def __init__(self, cache: PagedCache, layer: int, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self._cache = cache
        self._layer = layer
        self._slots = slots
        self._positions = positions
        self._watched: torch.Tensor | None = None
        self.seen: list[torch.Tensor] = []

    @property
    def watching(self) -> bool:
        """Whether somebody wants to know how far new KV is from the old."""
        return self._watched is not None

    def watch(self, cached: torch.Tensor) -> None:
        """See `cuvee.blend.recompute.WatchingExchange`."""
        self._watched = cached[self._positions].nonzero()[:, 0]

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take note of new keys and values `[H, S, D]`; returns them as they are, for the engine keeps the rest."""
        if self._watched is not None:
            device = self._slots.device
            slots = self._slots[self._positions[self._watched].to(device)]
            watched = self._watched.to(device)
            old = self._cache.layer(self._layer, slots)
            pairs = [
                (new[:, watched].float(), was.transpose(0, 1).float())
                for new, was in zip((keys, values), old, strict=True)
            ]
            self.seen = squared_distances(pairs)
        return keys, values
