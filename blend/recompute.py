"""Recompute the tokens that a selector chooses, in a prompt whose cached KV is in place.

    Placed + Selector --> positions --layer by layer--> PromptKV: new KV replaces cached KV
                                                          |
                          other tokens of the chunks <----+  corrected by how these changed (correction.py)

The KV may be in the tensors of a transformers cache (`blender.py`), or in the pages of a serving engine
(`cuvee.integrations.vllm.blending`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cuvee.blend.correction import Correction, corrections
from cuvee.blend.recompute_model import Exchange, RecomputeModel
from cuvee.blend.segments import Prompt
from cuvee.blend.selectors import Selector
from cuvee.codec.dtypes import saturated
from cuvee.codec.paged import PagedCache

MOST_ROWS = 1024
"""The most tokens per block: a mask has one row per token, and each row is as long as the prompt."""


Observer = Callable[[torch.Tensor, torch.Tensor], None]
"""Sees a layer's new keys and values `[H, S, D]` before they replace those of the prompt."""


class PromptKV:
    """The KV of a prompt of T tokens in pages, while it is blended. The model's own layers write new KV there.

    Args:
        cache: the pages.
        slots: of the prompt's first tokens, int64, on the pages' device. The others have no KV, and get none here.
        there: tokens that have KV before the blend, bool `[T]`.
    """

    def __init__(self, cache: PagedCache, slots: torch.Tensor, there: torch.Tensor) -> None:
        self.cache = cache
        self._slots = slots
        self._read = cache.reader(torch.cat((slots, slots.new_zeros(len(there) - len(slots)))))
        self._missing = (~there).nonzero()[:, 0].to(slots.device)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[H, T, D]` of a layer, for the pass of the query, which writes its KV there.

        Here they are copies. Missing tokens are zeros, because unwritten pages may hold NaN.
        """
        keys, values = self._read(index)
        for part in (keys, values):
            part[self._missing] = 0
        return keys.transpose(0, 1), values.transpose(0, 1)

    def reader(self, positions: torch.Tensor) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function that copies a layer's keys and values `[S, H, D]` at `positions`."""
        return self.cache.reader(self._at(positions))

    def adder(self, positions: torch.Tensor) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
        """Return a function that adds float32 `[S, H, D]` to a layer's keys and values at `positions`. Sums are rounded
        once to the KV's dtype, and none is beyond its range.
        """
        slots = self._at(positions)
        read, write = self.cache.reader(slots), self.cache.writer(slots)

        def add(index: int, *more: torch.Tensor) -> None:
            write(index, *(saturated(old.float() + new, old.dtype) for old, new in zip(read(index), more, strict=True)))

        return add

    def exchange(self, index: int, positions: torch.Tensor, end: int, observer: Observer | None) -> Exchange:
        """Return a layer's exchange for the tokens at `positions` (rising), which attend to tokens before `end`.

        Here it returns the new KV, which the layer writes.
        """

        def exchange(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if observer is not None:
                observer(keys, values)
            return keys, values

        return exchange

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        return self._slots[positions.to(self._slots.device)]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A prompt of T tokens whose cached KV is in place. All tensors are on the CPU, `[T]`.

    Attributes:
        tokens, segment, offset, cached, leading: as in `Prompt`.
        exact: tokens whose KV is in place and exact; they are neither computed nor selected; bool.
        end: tokens from here on are not computed here. Selectors see them nevertheless.
    """

    tokens: torch.Tensor
    segment: torch.Tensor
    offset: torch.Tensor
    cached: torch.Tensor
    leading: torch.Tensor
    exact: torch.Tensor
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """The result of a recomputation.

    Attributes:
        hidden: hidden states of the computed tokens after the last layer, in the model's form, in order.
        computed: which tokens were computed, bool `[T]`.
        query_token_layers: token-layers that the selector spent on passes of the query.
    """

    hidden: torch.Tensor
    computed: torch.Tensor
    query_token_layers: int


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged: the sum over the ranks of a model that is not split."""
    return tensor


class Recompute:
    """Recomputes one prompt.

    The tokens are cut into blocks. Like the pieces of a chunked prefill, each block goes through all layers before the
    next block begins, so only one block's masks and hidden states are held.

    Args:
        model: computes tokens.
        kv: reads and writes their KV.
        placed: the prompt.
        total: adds up a float32 tensor over the ranks that each hold some of the model's heads. It must give all ranks
            the same bits, because each rank selects by itself.
        rows: the most tokens per block.
        correct: correct the other cached tokens by how the recomputed ones change (`correction.py`).
    """

    def __init__(
        self,
        model: RecomputeModel,
        kv: PromptKV,
        placed: Placed,
        total: Callable[[torch.Tensor], torch.Tensor] = same,
        rows: int = MOST_ROWS,
        correct: bool = True,
    ) -> None:
        self._model = model
        self._kv = kv
        self._placed = placed
        self._total = total
        self._rows = rows
        self._correct = correct
        self._layers = model.layout.num_layers
        self._query_token_layers = 0

    def run(self, selector: Selector) -> Recomputed:
        """Compute the text and the tokens that `selector` chooses; call it once."""
        blocks = self.blocks(selector)
        while True:
            try:
                next(blocks)
            except StopIteration as end:
                done: Recomputed = end.value
                return done

    def blocks(self, selector: Selector) -> Generator[int, None, Recomputed]:
        """Run like `run`, but stop before each block.

        Yields:
            The block's token-layers, once the block is prepared and before it is computed.
        """
        placed, model = self._placed, self._model
        prompt = Prompt(
            placed.tokens, placed.segment, placed.offset, placed.cached, placed.leading, self._layers, self._attend
        )
        computed = ~placed.cached & ~placed.exact
        computed[placed.end :] = False
        computed[selector.select(prompt)] = True
        positions = computed.nonzero()[:, 0]
        blocks = positions.split(self._rows) if len(positions) else ()
        correcting = self._correcting(blocks)
        after = [model.embed(placed.tokens[:0])]
        for block, observe in zip(blocks, correcting, strict=True):
            rows = model.rows(block, None)
            yield len(block) * self._layers
            states = model.embed(placed.tokens[block])
            for layer in range(self._layers):
                observer = None if observe is None else partial(observe, layer)
                exchange = self._kv.exchange(layer, block, int(block[-1]) + 1, observer)
                states = model.layer(layer, states, rows, exchange)
            after.append(states)
        hidden = torch.cat(after[1:]) if blocks else after[0]
        return Recomputed(hidden, computed, self._query_token_layers)

    def _correcting(self, blocks: Sequence[torch.Tensor]) -> list[_Correcting | None]:
        """Return what corrects other tokens as each of these blocks is computed."""
        if not self._correct or not blocks:
            return [None for _ in blocks]
        found = corrections(self._model.layout, self._placed, blocks, self._kv.cache.device)
        return [_Correcting(self._kv, each, block) if each else None for each, block in zip(found, blocks, strict=True)]

    def _attend(self, queries: int, layers: Sequence[int]) -> torch.Tensor:
        """See `Prompt.attend`."""
        placed, model = self._placed, self._model
        count = len(placed.tokens)
        there = placed.cached | placed.exact
        positions = (~there).nonzero()[:, 0][-queries:]
        there[positions] = True  # the rest of the text is not computed yet
        visible = (positions[:, None] >= torch.arange(count)) & there
        rows = model.rows(positions, visible)
        hidden = model.embed(placed.tokens[positions])
        mass = torch.zeros(count, dtype=torch.float32)
        for layer in range(max(layers) + 1):
            keys, values = self._kv.layer(layer)
            after = model.layer(layer, hidden, rows, KVExchange(keys, values, positions))
            if layer in layers:
                query = model.queries(layer, hidden, rows).float()
                scores = query @ keys.float().repeat_interleave(len(query) // len(keys), 0).transpose(1, 2)
                scores.masked_fill_(~visible.to(query.device), float("-inf"))
                mass += scores.softmax(-1).sum((0, 1)).cpu()
            hidden = after
        self._query_token_layers += len(positions) * (max(layers) + 1)
        return self._total(mass)


class KVExchange:
    """Writes a layer's new keys and values `[H, S, D]` among the prompt's `[H, T, D]`, once they were observed."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, observer: Observer | None = None
    ) -> None:
        self._keys = keys
        self._values = values
        self._positions = positions.to(keys.device)
        self._observer = observer

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `cuvee.blend.recompute_model.Exchange`."""
        if self._observer is not None:
            self._observer(keys, values)
        self._keys.index_copy_(1, self._positions, keys)
        self._values.index_copy_(1, self._positions, values)
        return self._keys, self._values


class _Correcting:
    """Corrects cached tokens by how others change, in the block that is computed and in those before it."""

    def __init__(self, kv: PromptKV, estimators: Sequence[Correction], block: torch.Tensor) -> None:
        self._parts = [
            (
                torch.searchsorted(block, each.observed).to(kv.cache.device),
                kv.reader(each.observed),
                each.estimate,
                kv.adder(each.corrected),
            )
            for each in estimators
        ]

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for rows, read, estimate, add in self._parts:
            changes = [
                new[:, rows].transpose(0, 1).float() - old.float()
                for new, old in zip((keys, values), read(layer), strict=True)
            ]
            add(layer, *estimate(layer, *changes))
