"""What a profile knows of a cache: whether a few tokens fit their ids and their positions.

In the first layer, the values of a token follow from its id alone in most models, and a profile predicts them. And keys
that are freed of their positions lie where the profile has learned; freed of other positions, they lie elsewhere. Both
are compared with themselves: values with what other ids would predict, which explains nothing, and keys with the same
keys at other positions. So text of another kind passes, and so do caches that were quantized before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from cuvee.codec.entropy.family import deviation_of
from cuvee.codec.layout import KVLayout, Rope
from cuvee.codec.profiles.section_profile import SectionProfile
from cuvee.codec.profiles.sections import Section, UnitColumns
from cuvee.codec.profiles.token_prediction import TokenMap, TokenTable
from cuvee.codec.rope import cos_sin, unrotate
from cuvee.codec.support.arrays import I64
from cuvee.codec.support.lazy import lazy

SHARES = (0.25, 4.0)  # of the energy of values, between which that of predictions is, or they tell nothing
LEAST_FIT = 0.25  # regression of values on predictions: 1 with their ids, 0 with others
NEAR = (1, 2, 3, -1, -2, -3)  # offsets that leave keys not far from where they belong
REACH = 8192  # the largest offset that is tried where keys are far from it
FAR = (97, 389, 1543, 6151)  # offsets at which nothing fits
NOISE = 0.01  # of a pair's energy: what FP8 or four bits did to a cache
LEAST_GAP = 8.0  # how many times as far keys must be expected at FAR, or they tell nothing
BETTER = 0.5  # share of its distance from which on another position fits
UNLIKE = 1.5  # times as far as keys of the learned text are, from which on all offsets are tried
TRIED = 16  # tokens, at most, with which all offsets are tried
LAYERS = 8  # at most, among which the one is chosen whose keys tell most


class KnownLayers:
    """The values of the first layer, and the keys of the layers that tell most of their positions."""

    def __init__(
        self, layout: KVLayout, sections: Sequence[Section], learned: Sequence[SectionProfile], table: TokenTable | None
    ) -> None:
        units = {
            (unit.layer, unit.is_value): (section_profile, unit)
            for section, section_profile in zip(sections, learned, strict=True)
            for unit in section.units(layout)
        }
        ropes = {number: layer.rope for number, layer in enumerate(layout.layers) if layer.rope is not None}
        some = list(ropes)[:: max(-(-len(ropes) // LAYERS), 1)]
        plain = [Keys(*units[layer, False], ropes[layer], None) for layer in some]
        of_ids = [] if table is None else [Keys(*units[layer, False], ropes[layer], table) for layer in some[:1]]
        self.vocabulary = 0 if table is None else table.vocabulary
        self.values = None if table is None else Values(*units[0, True], table)
        self._plain, self._of_ids = _most_telling(plain), _most_telling([*of_ids, *plain])

    def keys(self, ids: bool) -> Keys | None:
        """Return the keys that tell most of their positions, with or without the ids of their tokens."""
        return self._of_ids if ids else self._plain


class _Unit:
    """The values of a unit as a section knows them: `[H, D]` per token."""

    def __init__(self, section: SectionProfile, unit: UnitColumns, table: TokenTable | None) -> None:
        self.layer = unit.layer
        self._columns = unit.of(torch.arange(len(section.basis.mean), device="cpu")[None])[0]
        self._mean = section.basis.mean[self._columns]
        self._table, self._map = table, None if table is None else _map_of(section, self._columns)

    def _centered(self, values: torch.Tensor) -> torch.Tensor:
        return values.float() - self._mean

    def _predicted(self, token_ids: I64 | None) -> torch.Tensor:
        """Return the predictions for tokens, relative to the mean, `[t, H, D]`; zeros without ids or a table."""
        if token_ids is None or self._table is None or self._map is None:
            return torch.zeros(1, *self._mean.shape, dtype=torch.float32, device="cpu")
        unique_ids, index = np.unique(token_ids, return_inverse=True)
        rows = self._map.predict(self._table.rows(unique_ids)).float()[torch.from_numpy(index)]
        return rows.view(-1, *self._mean.shape)


class Values(_Unit):
    """The values of a layer."""

    def fit(self, values: torch.Tensor, _: torch.Tensor, token_ids: I64 | None) -> bool:
        """Return whether values `[t, H, D]` may be those of these ids, wherever they are."""
        predicted, rest = self._predicted(token_ids), self._centered(values)
        energy, whole = float(predicted.square().sum()), float(rest.square().sum())
        tells = SHARES[0] * whole < energy < SHARES[1] * whole
        return not (tells and float((rest * predicted).sum()) < LEAST_FIT * energy)


class Keys(_Unit):
    """The keys of a layer. At wrong positions they are expected to be `gap` times as far from where they belong."""

    def __init__(self, section: SectionProfile, unit: UnitColumns, rope: Rope, table: TokenTable | None) -> None:
        super().__init__(section, unit, table)
        self._rope, mean = rope, self._mean.double()
        whole = _covariance(section.plain, self._columns)
        pairs = _pairs(rope, unit.size)
        energy = (whole.diagonal(dim1=1, dim2=2) + mean.square())[:, pairs].mean(2)
        noise = torch.empty_like(mean)
        noise[:, pairs] = NOISE * energy[..., None]
        noise = torch.diag_embed(noise + 1e-9 * noise.amax() + 1e-30)
        spread = whole if table is None else _covariance(section, self._columns)
        self._root = torch.linalg.cholesky(spread + noise)
        # The mean moves with the position, and so do all directions in which keys spread.
        points = torch.cat([mean[None], torch.linalg.cholesky(whole + noise).permute(2, 0, 1)])
        fixed = len(points) if table is not None else 1  # what is expected where it was, because of the mean or ids
        far = []
        for offset in FAR:
            moved = unrotate(points.float(), rope, torch.full((len(points),), offset, device="cpu")).double()
            moved[:fixed] -= points[:fixed]
            far.append(float(self._squares(moved).sum()))
        self.gap = float(np.median(far)) / mean.numel()

    def fit(self, keys: torch.Tensor, positions: torch.Tensor, token_ids: I64 | None, padding: int) -> bool:
        """Return whether keys `[t, H, D]` may be at these positions.

        They may not if they fit elsewhere: `padding` later, near, or, if they are far from here, within `REACH`. With
        ids that fit their values, they may not either if they fit nowhere; without, a profile of another model would
        look alike.
        """
        distance = self._distance(keys, positions, token_ids)
        limit = math.sqrt(max(self.gap, 1)) * self._mean.numel()
        offsets = {padding, *NEAR} - {0}
        if distance > limit and self._table is not None and self.gap > LEAST_GAP:
            far = [self._distance(keys, positions + offset, token_ids) for offset in FAR]
            return float(np.median(far)) > math.sqrt(self.gap) * distance
        if distance > UNLIKE * self._mean.numel():
            offsets.add(self.offset(keys, positions, token_ids))
        near = min(self._distance(keys, positions + offset, token_ids) for offset in offsets)
        return not (near < BETTER * distance and near < limit)

    def offset(self, keys: torch.Tensor, positions: torch.Tensor, token_ids: I64 | None) -> int:
        """Return how much later than at `positions`, up to `REACH`, keys `[t, H, D]` fit best.

        What a rotation by an offset makes of a key is linear in the cosines and sines of that offset. So the squared
        distance of all tokens is a quadratic form of them, the same one for every offset.
        """
        few, width = slice(None, None, -(-len(keys) // TRIED)), self._rope.rotary_dim
        free = unrotate(keys[few], self._rope, positions[few])
        rest = free - self._mean - self._predicted(None if token_ids is None else token_ids[few])
        squares = self._squares(rest.double()).float()
        weight = squares.clamp(min=squares.median()).rsqrt()[:, None, None]  # tokens that are far rule no others
        free, rest = free * weight, rest * weight
        rest[..., :width] -= free[..., :width]
        inverse, waves = self._rotations
        sides = _pairs(self._rope, width).T
        x, y = (free[:, :, None, side] for side in sides)
        first, second = (inverse[..., side] for side in sides)
        parts = torch.cat([first * x + second * y, first * y - second * x, inverse @ rest[..., None]], -1).flatten(0, 2)
        return int((waves @ (parts.T @ parts) * waves).sum(1).argmin()) - REACH

    @lazy
    def _rotations(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The root's inverse, and by offset the cosines and sines of its rotation, and 1 for what it leaves alone."""
        offsets = torch.arange(-REACH, REACH + 1, device="cpu")
        cos, sin = cos_sin(replace(self._rope, attention_scaling=1.0), offsets)
        return torch.linalg.inv(self._root).float(), torch.cat([cos, sin, torch.ones_like(cos[:, :1])], 1)

    def _distance(self, keys: torch.Tensor, positions: torch.Tensor, token_ids: I64 | None) -> float:
        """Return how far most keys are from where they belong."""
        free = self._centered(unrotate(keys, self._rope, positions)) - self._predicted(token_ids)
        return float(self._squares(free.double()).median())

    def _squares(self, centered: torch.Tensor) -> torch.Tensor:
        """Return the squared distances `[t]` of what is centered, `[t, H, D]`."""
        white: torch.Tensor = torch.linalg.solve_triangular(self._root, centered.permute(1, 2, 0), upper=False)
        return white.square().sum((0, 1))


def _most_telling(keys: Iterable[Keys]) -> Keys | None:
    return max(keys, key=lambda each: each.gap, default=None)


def _map_of(section: SectionProfile, columns: torch.Tensor) -> TokenMap | None:
    return None if section.token_map is None else section.token_map.take(columns.flatten())


def _covariance(section: SectionProfile, columns: torch.Tensor) -> torch.Tensor:
    """Return the covariance of the values in columns `[H, D]` of a section, head by head: float64 `[H, D, D]`."""
    out = torch.zeros(*columns.shape, columns.shape[1], dtype=torch.float64, device="cpu")
    row = column = 0
    for block in section.basis.maps:
        inside = (columns[:, 0] >= column) & (columns[:, 0] < column + block.size)  # a head lies in one block
        if bool(inside.any()):
            scale = torch.from_numpy(deviation_of(section.scale[row : row + block.rank]))
            maps = block.inverse[columns[inside] - column].double() * scale
            out[inside] = maps @ maps.transpose(1, 2)
        row, column = row + block.rank, column + block.size
    return out


def _pairs(rope: Rope, size: int) -> torch.Tensor:
    """Return the dimensions that are turned together, `[pairs, 2]`; those that are not are with themselves."""
    turned = torch.arange(rope.rotary_dim, device="cpu")
    pairs = turned.view(-1, 2) if rope.interleaved else turned.view(2, -1).T
    return torch.cat([pairs, torch.arange(rope.rotary_dim, size, device="cpu")[:, None].expand(-1, 2)])
