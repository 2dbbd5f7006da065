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
from typing import Protocol

import torch

from cuvee.blend.correction import Correction, corrections
from cuvee.blend.recompute_model import Exchange, RecomputeModel
from cuvee.blend.segments import Prompt
from cuvee.blend.selection import Selection, Selector
from cuvee.codec.stages.rows import LayerRows

MOST_ROWS = 1024
"""The most tokens per block: a mask has one row per token, and each row is as long as the prompt."""


Observer = Callable[[torch.Tensor, torch.Tensor], None]
"""Sees a layer's new keys and values `[H, S, D]` before they replace those of the prompt."""


class PromptKV(Protocol):
    """The KV of a prompt of T tokens while it is blended."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[H, T, D]` of a layer. The pass of the query writes its KV there."""
        ...

    def reader(self, positions: torch.Tensor) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function that copies a layer's keys and values `[S, H, D]` at `positions`."""
        ...

    def adder(self, positions: torch.Tensor) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
        """Return a function that adds float32 `[S, H, D]` to a layer's keys and values at `positions`."""
        ...

    def rows(self, positions: torch.Tensor) -> LayerRows | None:
        """Return where the tokens at `positions` are, if compiled loops can read them and add to them there."""
        ...

    def exchange(self, index: int, positions: torch.Tensor, end: int, observer: Observer | None) -> Exchange:
        """Return a layer's exchange for the tokens at `positions` (rising), which attend to tokens before `end`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A prompt of T tokens whose cached KV is in place. All tensors are on the CPU, `[T]`.

    Attributes:
        tokens, segment, offset, cached, leading: as in `Prompt`.
        known: tokens whose KV is in place and exact, which are neither computed nor selected; bool.
        end: tokens from here on are not computed here. Selectors see them nevertheless.
    """

    tokens: torch.Tensor
    segment: torch.Tensor
    offset: torch.Tensor
    cached: torch.Tensor
    leading: torch.Tensor
    known: torch.Tensor
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """The result of a recomputation.

    Attributes:
        hidden: hidden states of the tokens that went through the last layer, in the model's form, in order.
        depth: number of layers that each token went through, int64 `[T]`.
        by_segment: number of tokens of each segment that went through each layer, int64 `[layers, segments]`.
        query_token_layers: token-layers that the selector spent on passes of the query.
    """

    hidden: torch.Tensor
    depth: torch.Tensor
    by_segment: torch.Tensor
    query_token_layers: int


def same(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unchanged: the sum over the ranks of a model that is not split."""
    return tensor


class Recompute:
    """Recomputes one prompt.

    The tokens are cut into blocks. Like the pieces of a chunked prefill, each block goes through as many layers as
    possible before the next block begins, so only one block's masks and hidden states are held. All blocks wait for
    each other at a layer that the selector watches.

    Args:
        model: computes tokens.
        kv: reads and writes their KV.
        placed: the prompt.
        total: adds up a float32 tensor over the ranks that each hold some of the model's heads. It must give all ranks
            the same bits, because each rank selects by itself.
        rows: the most tokens per block.
        correct: correct the other cached tokens by how the recomputed ones change (`correction.py`), unless the
            selector chooses the tokens that change most: what they have in common is not what all tokens have.
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
        self._depth = torch.zeros(len(placed.tokens), dtype=torch.int64)
        self._through = torch.zeros(self._layers, int(placed.segment.max()) + 1, dtype=torch.int64)
        self._query_token_layers = 0

    def run(self, selector: Selector) -> Recomputed:
        """Compute the text and the tokens that `selector` chooses; call it once.

        Raises:
            InputError: the selector's cost is too low.
        """
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
            An upper bound of the block's token-layers, once the block is prepared and before it is computed.

        Raises:
            InputError: the selector's cost is too low.
        """
        placed = self._placed
        prompt = Prompt(
            placed.tokens, placed.segment, placed.offset, placed.cached, placed.leading, self._layers, self._attend
        )
        selection = selector.begin(prompt)
        corrects = self._correct and not any(selection.watches(layer) for layer in range(self._layers))
        text = ~placed.cached & ~placed.known
        text[placed.end :] = False
        wanted_text = text.nonzero()[:, 0]

        def wanted(layer: int) -> torch.Tensor:
            return torch.cat((wanted_text, selection.tokens(layer))).sort().values

        positions = wanted(0)
        hidden: torch.Tensor | None = None  # hidden states of the tokens at `positions`, before layer `first`
        first = 0
        while first < self._layers and len(positions):
            # The choice is known up to a watched layer, but not after it.
            watched = next((at for at in range(first, self._layers) if selection.watches(at)), None)
            layers = range(first, self._layers if watched is None else watched + 1)
            sets = {layer: wanted(layer) for layer in layers}
            hidden, seen = yield from self._through_layers(sets, positions, hidden, selection, corrects)
            if watched is not None and seen:
                selection.observe(watched, *self._deviations(seen))
            positions, first = sets[layers[-1]], layers.stop
        if hidden is None:  # nothing is computed
            hidden = self._model.embed(placed.tokens[:0])
        return Recomputed(hidden, self._depth, self._through, self._query_token_layers)

    def _through_layers(
        self,
        sets: dict[int, torch.Tensor],
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        selection: Selection,
        corrects: bool,
    ) -> Generator[int, None, tuple[torch.Tensor, list[list[torch.Tensor]]]]:
        """Take tokens through some layers, block by block.

        Args:
            sets: positions of the tokens that go through each layer; each a subset of the previous layer's.
            positions: positions of the given tokens.
            hidden: their hidden states; None: they went through no layer yet.
            selection: tells which layers are watched.
            corrects: whether other cached tokens are corrected.

        Returns:
            The hidden states of the tokens that went through the last layer, and what `_Watching` has seen of each
            block in the layer that is watched.
        """
        model, placed = self._model, self._placed
        after: list[torch.Tensor] = []
        seen: list[list[torch.Tensor]] = []
        first = next(iter(sets))
        done = 0
        whole = positions.split(self._rows)
        correcting: dict[int, list[list[_Correcting]]] = {}  # by the number of tokens of a set, which only shrink
        for number, all_of_block in enumerate(whole):
            block = _between(sets[first], all_of_block)
            rows = model.rows(block, None) if len(block) else None
            yield len(block) * len(sets)
            if hidden is None:
                states = model.embed(placed.tokens[block])
            else:
                states = _rows_of(hidden[done : done + len(all_of_block)], all_of_block, block)
            done += len(all_of_block)
            for layer, chosen in sets.items():
                going_on = _between(chosen, all_of_block)
                if len(going_on) < len(block):
                    states = _rows_of(states, block, going_on)
                    block, rows = going_on, model.rows(going_on, None) if len(going_on) else None
                if not len(block):
                    break
                self._depth[block] += 1
                self._through[layer] += torch.bincount(placed.segment[block], minlength=self._through.shape[1])
                observers: list[Observer] = []
                if selection.watches(layer):
                    watching = _Watching(self._kv, layer, block, placed.cached)
                    seen.append(watching.seen)
                    observers.append(watching)
                if corrects:
                    if len(chosen) not in correcting:
                        correcting[len(chosen)] = self._correcting([_between(chosen, each) for each in whole])
                    observers += [partial(correct, layer) for correct in correcting[len(chosen)][number]]
                exchange = self._kv.exchange(layer, block, int(block[-1]) + 1, _all_of(observers))
                states = model.layer(layer, states, rows, exchange)
            after.append(states)
        return torch.cat(after), seen

    def _correcting(self, blocks: Sequence[torch.Tensor]) -> list[list[_Correcting]]:
        """Return what corrects other tokens as each of these blocks is computed."""
        found = corrections(self._model.layout, self._placed, blocks, self._kv.device)
        return [
            [_Correcting(self._kv, each, block) for each in of_block]
            for of_block, block in zip(found, blocks, strict=True)
        ]

    def _attend(self, queries: int, layers: Sequence[int]) -> torch.Tensor:
        """See `Prompt.attend`."""
        placed, model = self._placed, self._model
        count = len(placed.tokens)
        there = placed.cached | placed.known
        positions = (~there).nonzero()[:, 0][-queries:]
        there[positions] = True  # the rest of the text is not computed yet
        visible = (positions[:, None] >= torch.arange(count)) & there
        rows = model.rows(positions, visible)
        hidden = model.embed(placed.tokens[positions])
        mass = torch.zeros(count)
        for layer in range(max(layers) + 1):
            keys, values = self._kv.layer(layer)
            after = model.layer(layer, hidden, rows, KVExchange(keys, values, positions))
            if layer in layers:
                asked = model.queries(layer, hidden, rows).float()
                scores = asked @ keys.float().repeat_interleave(len(asked) // len(keys), 0).transpose(1, 2)
                scores.masked_fill_(~visible.to(asked.device), float("-inf"))
                mass += scores.softmax(-1).sum((0, 1)).cpu()
            hidden = after
        self._query_token_layers += len(positions) * (max(layers) + 1)
        return self._total(mass)

    def _deviations(self, seen: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Selection.observe`: keys and values, float32 `[n]`, over all blocks."""
        keys, values, new_keys, new_values = (self._total(torch.cat(parts)) for parts in zip(*seen, strict=True))
        smallest = torch.finfo(torch.float32).tiny
        return keys / new_keys.mean().clamp_min(smallest), values / new_values.mean().clamp_min(smallest)


def _between(positions: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return those of `positions` (rising) that lie between the first and the last token of a block."""
    low = int(torch.searchsorted(positions, block[0]))
    high = int(torch.searchsorted(positions, block[-1], right=True))
    return positions[low:high]


def _rows_of(hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the rows of `hidden` (one per position) that belong to `wanted`, a subset of `positions`."""
    if len(wanted) == len(positions):
        return hidden
    return hidden[torch.searchsorted(positions, wanted).to(hidden.device)]


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


def _all_of(observers: Sequence[Observer]) -> Observer | None:
    """Return an observer that calls all of these in order; None for none."""
    if len(observers) < 2:
        return observers[0] if observers else None

    def observe(keys: torch.Tensor, values: torch.Tensor) -> None:
        for each in observers:
            each(keys, values)

    return observe


class _Watching:
    """Measures the distance of a layer's new KV from the KV that it replaces.

    Attributes:
        seen: four tensors float32 `[n]`, for n cached tokens: the squared distances of keys and of values, then the
            squares of the new keys and the new values. Empty before it was called.
    """

    def __init__(self, kv: PromptKV, layer: int, positions: torch.Tensor, cached: torch.Tensor) -> None:
        rows = cached[positions].nonzero()[:, 0]
        self._old = partial(kv.reader(positions[rows]), layer)
        self._rows = rows.to(kv.device)
        self.seen: list[torch.Tensor] = []

    def __call__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        new = [part[:, self._rows].transpose(0, 1).float() for part in (keys, values)]
        changed = [mine - old.float() for mine, old in zip(new, self._old(), strict=True)]
        self.seen += [part.square().sum((1, 2)).cpu() for part in (*changed, *new)]


class _Correcting:
    """Corrects cached tokens by how others change, in the block that is computed and in those before it."""

    def __init__(self, kv: PromptKV, correction: Correction, block: torch.Tensor) -> None:
        self._correction = correction
        self._rows = torch.searchsorted(block, correction.observed).to(kv.device)
        self._places: LayerRows | None = None
        if correction.compilable:
            self._places = kv.rows(torch.cat((correction.observed, correction.corrected)))
        if self._places is None:
            self._old = kv.reader(correction.observed)
            self._add = kv.adder(correction.corrected)

    def __call__(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._places is not None:
            self._correction.correct_rows(layer, keys, values, self._rows, self._places)
            return
        changes = [
            new[:, self._rows].transpose(0, 1).float() - old.float()
            for new, old in zip((keys, values), self._old(layer), strict=True)
        ]
        self._add(layer, *self._correction.estimate(layer, *changes))
