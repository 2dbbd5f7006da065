"""Correct the cached tokens that are not recomputed, by how the recomputed tokens of their chunk changed.

    new KV - cached KV of recomputed tokens --estimate, per layer--> what to add to the chunk's other tokens

When a chunk moves into another context, the KV of all its tokens changes in part alike. Measured on SmolLM2-135M and
paragraphs of XQuAD between other paragraphs, with position-free keys: a third of the variance of the keys' changes and
a fifth of the values' is common to a chunk's tokens, and another fifth to tokens that stand next to each other. Changes
are largest at the chunk's beginning: the variance at offset t falls like (t + 2) ** -0.53.

So the changes are modelled as a Gaussian process over the offset (Rasmussen & Williams, Gaussian Processes for Machine
Learning, 2006), whose covariance of the offsets s and t is

    e(s) e(t) (COMMON exp(-(log((s + 2) / (t + 2)) / 3.2)² / 2)  +  NEAR exp(-|s - t| / 3)  +  the rest if s = t)

with e(t) = (t + 2) ** -0.265. The estimate is its mean given the changes of the recomputed tokens (equation 2.25):
weights that depend on offsets only, the same for all layers, heads and dimensions.

The constants need not fit another model or chunk. So in each layer and head, each recomputed token is predicted from
the others of its chunk (equation 5.12), and the estimates are scaled down by what these predictions got wrong: to
nothing where tokens do not change alike. They are scaled by n / (n + 8), too, where n tokens were recomputed, since few
tokens that were chosen for the attention they get say little of others. Keys are corrected by half, because errors of
keys act through an exponential. Without the last two, single prompts lost several times what they lose uncorrected;
with no correction of keys, chunks that had been computed alone gained half as much.

A long chunk is corrected in windows of 512 tokens, which begin at fixed offsets. If tokens are computed in blocks, a
block's tokens are estimated from all that were recomputed in their window so far: changes in earlier blocks are carried
on. So where blocks end only decides which changes are not known yet. At a boundary one window at most is open, so less
than 512 tokens are carried: per layer, as many float32 numbers as these tokens have keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.rope import cos_sin, rotate_by_tables

if TYPE_CHECKING:
    from cuvee.blend.recompute import Placed

_COMMON, _NEAR = 0.27, 0.19  # shares of the variance
_COMMON_RANGE, _NEAR_RANGE = 3.2, 3.0  # in nats of the offset, and in tokens
_FIRST, _DECAY = 2.0, 0.53
_TRUST = 8  # recomputed tokens of which half is believed
_KEYS = 0.5
_WINDOW = 512  # tokens of a chunk that are estimated together, which bounds the work and what is carried


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Tokens of one chunk that are estimated together, as far as one block of computed tokens goes.

    Positions are int64 and rise.

    Attributes:
        observed: positions that this block recomputes.
        corrected: positions to correct, once the block's changes are known.
        begin: position at which the chunk begins.
        earlier: positions that earlier blocks recomputed, whose estimates count these as well.
        goes_on: whether a later block corrects tokens of the window.
        changes: changes of `earlier` by layer, float32 `[len(earlier), H, D]`, keys without positions before values.
            The windows of successive blocks share it: each takes what the one before left there.
    """

    observed: torch.Tensor
    corrected: torch.Tensor
    begin: int
    earlier: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    goes_on: bool = False
    changes: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Estimate:
    """How to estimate the changes of a window's tokens: rows of the tensors of all windows, and weights.

    Attributes:
        observed, corrected: rows.
        others: float32 `[n, n]`: weights that predict each of n tokens, observed in this block or earlier, from the
            others, with its standard deviation as the unit.
        weights: float32 `[R, n]`: weights of these tokens for each of R corrected ones.
        units: standard deviations of these tokens, up to one factor, float32 `[n, 1, 1]`.
    """

    observed: slice
    corrected: slice
    others: torch.Tensor
    weights: torch.Tensor
    units: torch.Tensor


def typical_change(offset: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of a token's change at this offset in its chunk, float64, up to one factor."""
    return (offset.double() + _FIRST) ** (-_DECAY / 2)


class Correction:
    """The correction of some tokens by others, in all layers.

    Args:
        layout: of the model.
        windows: their tokens, at least one window.
        device: where the KV is.

    Attributes:
        windows: as given.
        observed: positions of the tokens that this block recomputes, int64 `[n]`.
        corrected: positions of the tokens to correct, int64 `[R]`.
    """

    def __init__(
        self,
        layout: KVLayout,
        windows: Sequence[Window],
        device: torch.device,
    ) -> None:
        self.windows = windows
        self.observed = torch.cat([window.observed for window in windows])
        self.corrected = torch.cat([window.corrected for window in windows])
        self._layout = layout
        self._device = device
        self._estimates: list[_Estimate] = []
        observed = corrected = 0
        for window in windows:
            rows = slice(observed, observed + len(window.observed)), slice(corrected, corrected + len(window.corrected))
            positions = torch.cat((window.earlier, window.observed))
            tensors = _weights(positions - window.begin, window.corrected - window.begin)
            self._estimates.append(_Estimate(*rows, *(each.to(device) for each in tensors)))
            observed, corrected = rows[0].stop, rows[1].stop
        self._tables: dict[Rope, tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {}

    def estimate(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to add to the corrected tokens' keys and values, float32 `[R, H, D]`.

        Call it once per layer, after the same layer of the block before.

        Args:
            layer: its index.
            keys: changes of the observed tokens' keys, with positions, float32 `[n, H, D]`.
            values: changes of their values.
        """
        rope = self._layout.layers[layer].rope
        if rope is not None:
            keys = rotate_by_tables(keys, rope, *self._rotations(rope)[0])
        changes = torch.cat((keys, values), 2)
        heads, size = changes.shape[1:]
        estimates = torch.empty(len(self.corrected), heads * size, device=self._device, dtype=torch.float32)
        for window, how in zip(self.windows, self._estimates, strict=True):
            observed = changes[how.observed]
            if len(window.earlier):
                observed = torch.cat((window.changes.pop(layer), observed))
            if window.goes_on:
                window.changes[layer] = observed.clone()  # a view would hold the whole block's changes
            if not len(window.corrected):
                continue
            predicted = (how.others @ observed.flatten(1)).view_as(observed)
            agreeing = (predicted * observed / how.units).sum(0)
            energy = predicted.square().sum(0)
            trust = _trust(len(observed))
            scales = torch.empty_like(energy)
            # Head by head, so that ranks that hold some of the heads each need not agree.
            for part, most in ((slice(keys.shape[2]), trust * _KEYS), (slice(keys.shape[2], None), trust)):
                share = agreeing[:, part].sum(1) / energy[:, part].sum(1).clamp_min(torch.finfo(torch.float32).tiny)
                scales[:, part] = share.clamp(0, 1)[:, None] * most
            torch.mm(how.weights, (observed * scales).flatten(1), out=estimates[how.corrected])
        added_keys, added_values = estimates.view(-1, heads, size).tensor_split([keys.shape[2]], 2)
        if rope is not None:
            added_keys = rotate_by_tables(added_keys, rope, *self._rotations(rope)[1])
        return added_keys, added_values

    def _rotations(self, rope: Rope) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Return the tables that take the observed tokens' keys to position 0, and the corrected ones' back."""
        if rope not in self._tables:
            (cos, sin), (back_cos, back_sin) = (
                tuple(table[:, None] for table in cos_sin(rope, positions.to(self._device)))
                for positions in (self.observed, self.corrected)
            )
            square = rope.attention_scaling**2
            self._tables[rope] = (cos / square, -sin / square), (back_cos, back_sin)
        return self._tables[rope]


def _trust(count: int) -> float:
    """Return how far the estimates from this many tokens are believed."""
    return count / (count + _TRUST)


def corrections(
    layout: KVLayout, placed: Placed, blocks: Sequence[torch.Tensor], device: torch.device
) -> list[list[Correction]]:
    """Return how each block of computed tokens corrects tokens that are not computed.

    Each token is corrected once, by the first block that holds a token of its window at or after it, or by the last
    block that holds one of its window. So it is corrected before any later token attends to it. What it learns from is
    all tokens of its window that this block and earlier ones compute.

    Args:
        layout: of the model.
        placed: the prompt.
        blocks: positions of the tokens that are computed, in order; all int64, rising.
        device: where the KV is.
    """
    windows: list[list[Window]] = [[] for _ in blocks]
    computed = torch.zeros(len(placed.tokens), dtype=torch.bool)
    computed[torch.cat(list(blocks))] = True
    lasts = torch.tensor([int(block[-1]) for block in blocks if len(block)])
    full = [index for index, block in enumerate(blocks) if len(block)]
    able = placed.cached & ~placed.leading
    window = placed.segment * (len(placed.tokens) // _WINDOW + 1) + placed.offset // _WINDOW
    positions = able.nonzero()[:, 0]
    for tokens in positions.split(torch.unique_consecutive(window[positions], return_counts=True)[1].tolist()):
        chosen = tokens[computed[tokens]]
        others = tokens[~computed[tokens]]
        if not len(chosen) or not len(others):
            continue
        begin = int(tokens[0] - placed.offset[tokens[0]])
        following = torch.searchsorted(chosen, others).clamp(max=len(chosen) - 1)
        block_of = torch.searchsorted(lasts, chosen)
        corrects = block_of[following]
        last = int(corrects.max())
        changes: dict[int, torch.Tensor] = {}
        for block in block_of[block_of <= last].unique().tolist():
            observed, earlier = chosen[block_of == block], chosen[block_of < block]
            mine = Window(observed, others[corrects == block], begin, earlier, block < last, changes)
            windows[full[block]].append(mine)
    return [[Correction(layout, group, device) for group in _groups(each)] for each in windows]


def _groups(windows: Sequence[Window]) -> list[list[Window]]:
    """Divide windows into groups of about as many tokens to correct as a processor's cache holds."""
    groups: list[list[Window]] = []
    room = 0
    for window in windows:
        if room <= 0:
            groups.append([])
            room = _WINDOW
        groups[-1].append(window)
        room -= len(window.corrected)
    return groups


def _weights(observed: torch.Tensor, corrected: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors of `_Estimate` for tokens at these offsets."""
    covariance = _covariance(observed, observed)
    inverse = torch.linalg.inv(covariance)
    units = typical_change(observed)[:, None]
    others = torch.eye(len(observed), dtype=torch.float64) - inverse / inverse.diagonal()[:, None]
    return (others / units).float(), (_covariance(corrected, observed) @ inverse).float(), units[:, None].float()


def _covariance(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the covariance of changes at these offsets, float64 `[left, right]`."""
    lag = (left[:, None] - right).abs().double()
    logs = [torch.log(offsets.double() + _FIRST) for offsets in (left, right)]
    common = torch.exp(-(((logs[0][:, None] - logs[1]) / _COMMON_RANGE) ** 2) / 2)
    rest = (1 - _COMMON - _NEAR) * (lag == 0).double()
    scale = typical_change(left)[:, None] * typical_change(right)
    return scale * (_COMMON * common + _NEAR * torch.exp(-lag / _NEAR_RANGE) + rest)
