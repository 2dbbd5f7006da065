"""Recognition: a cache tells which tokens it is of, and at which positions they were.

Some engines name their pages by a hash, and tell a storage backend neither token ids nor positions. The codec wants
both: it takes the rotation out of keys, and predicts from tokens (`cuvee.codec.profiles.token_prediction`). Both can be
read off the first layers.

    ids        The first layer's values follow from the token alone: take the id whose predicted values are nearest.
    positions  A position p turns the pair f of a key's dimensions by p * theta_f. Summed over tokens, heads and layers,
               the products of keys and expected keys have that angle: take the position that explains all angles best.

On SmolLM2-135M every id and every position is found, also with 16 tokens. A mistake costs bytes and nothing else: a
blob holds what was recognized, and is decoded with the same.

Without ids, pages of 64 tokens of the bundled model take 3.4 times the bytes at `balanced`, and 2.6 times at `small`,
with a profile that was learned from 12,540 tokens (group `all`, six sequences of "orchard").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.layout import Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.token_prediction import TokenMap, TokenTable
from cuvee.codec.support.arrays import F64, I64

if TYPE_CHECKING:
    from cuvee.codec.profiles.profile import Profile

# The share of a token's energy in the first layer that its id may leave unexplained: at most .12 on SmolLM2-135M.
LARGEST_RESIDUAL = 0.5
# How well a position must explain the angles, 1 being best: at least .998 on SmolLM2-135M, where another position a
# multiple of 16 away reaches .8.
LEAST_AGREEMENT = 0.95
POSITION_TOKENS = 64  # that tell the position; 16 are enough on SmolLM2-135M
MOST_POSITIONS = 1 << 20  # that are tried of a model without a limit

DIMENSIONS = 32  # in which ids are searched; 16 find all of the 49,152 ids of SmolLM2-135M
SAMPLE = 4096  # ids that show which dimensions tell ids apart
BLOCK, BLOCKS = 256, 8  # ids per block, and blocks whose scores fit the second cache together

C128 = npt.NDArray[np.complex128]


@dataclass(frozen=True, slots=True)
class Recognized:
    """What the cache of a chunk told.

    Attributes:
        start: position of the first token; None if no position explains the keys.
        token_ids: `[T]`; None if no id explains the values of some token.
    """

    start: int | None
    token_ids: I64 | None


class Recognizer:
    """Recognizes tokens by a learned profile. Safe to call from several threads.

    Args:
        profile: a learned one. By one without a token table, only positions are recognized.
    """

    def __init__(self, profile: Profile) -> None:
        basis, columns = profile.learned[0].basis, _columns(profile)
        self._layout = profile.layout
        self._mean, self._sinks = basis.mean, len(basis.sinks)
        self._keys = {layer: own for (layer, is_value), own in columns.items() if not is_value}  # columns [H, D]
        self._values = columns[0, True].flatten()
        token_map = profile.learned[0].token_map
        self._ids: _IdSearch | None = None
        if profile.token_table is not None and token_map is not None:
            self._ids = _IdSearch(profile.token_table, token_map.take(self._values))
            self._predictions = profile.predictions[0]

    def recognize(
        self, cache: PagedCache, slots: torch.Tensor, start: int | None = None, multiple_of: int = 1
    ) -> Recognized:
        """Recognize the tokens of a chunk.

        Args:
            cache: holds the tokens.
            slots: int64 `[T]` on the cache's device: the slots of the tokens, in order.
            start: position of the first token, if it is known.
            multiple_of: a number that divides the position.

        Raises:
            InputError: a slot that the cache does not have.
        """
        layers = range(1 + max(self._keys))
        cache.check_range(slots, layers, least=0)
        expected, ids = self._mean[None], None
        if self._ids is not None:
            values = _values_of(cache, slots) - self._mean[self._values]
            ids = self._ids.nearest(values)
            own = self._predictions.of(ids, self._sinks)  # as if none was a sink, whose values tell their id, too
            predicted = own.rows[torch.from_numpy(own.index)].float()
            if _explained(values, predicted[:, self._values]).all():
                expected = expected + predicted[:POSITION_TOKENS]
            else:
                ids = None
        if start is None:
            start = self._start(cache, slots, expected, multiple_of)
        return Recognized(start, ids)

    def _start(self, cache: PagedCache, slots: torch.Tensor, expected: torch.Tensor, multiple_of: int) -> int | None:
        """Return the position of the first of these tokens; None if no position explains the keys of the first few.

        `expected` are the section's values without rotation, `[T, N]` of the first few tokens, or `[1, N]`.
        """
        few = slots[:POSITION_TOKENS]
        read = cache.reader(few)
        sums: dict[Rope, C128] = {}
        for layer, columns in self._keys.items():
            rope = self._layout.layers[layer].rope
            if rope is None:
                continue
            turned = np.exp(-1j * np.outer(np.arange(len(few)), rope.inv_freq))[:, None]  # since the first token
            with np.errstate(invalid="ignore", over="ignore"):  # what is not finite agrees with no position
                keys = _pairs(read(layer)[0].cpu(), rope)  # whatever their scale in an fp8 cache, it turns nothing
                products = keys * _pairs(expected[:, columns], rope).conj() * turned
                sums[rope] = sums.get(rope, 0) + products.sum((0, 1))
        positions = (self._layout.max_positions or MOST_POSITIONS) - len(slots) + 1
        if not sums or positions < 1:
            return None
        frequencies = np.concatenate([rope.inv_freq for rope in sums])
        together = np.concatenate(list(sums.values()))
        scores = _scores(together, frequencies * multiple_of, -(-positions // multiple_of))
        best, most = int(scores.argmax()), float(np.abs(together).sum())
        return best * multiple_of if scores[best] > LEAST_AGREEMENT * most else None


def tells_positions(profile: Profile) -> bool:
    """Return whether the model rotates keys of the first section, so that they tell positions."""
    return any(layer.rope is not None for layer in profile.sections[0].layers(profile.layout))


class _IdSearch:
    """Finds the ids whose predicted values in the first layer are nearest to given ones.

    Args:
        table: the embeddings of the vocabulary.
        token_map: the map to the values of the first layer.
    """

    def __init__(self, table: TokenTable, token_map: TokenMap) -> None:
        ids = np.arange(0, table.vocabulary, max(table.vocabulary // SAMPLE, 1))
        sample = token_map.predict(table.rows(ids)).float()
        # The leading eigenvectors of the sample's second moments: no map to so few dimensions keeps more of distances.
        self._axes = torch.linalg.eigh(sample.T @ sample)[1][:, -DIMENSIONS:].contiguous()
        weights = (token_map.weights * token_map.scale) @ self._axes
        blocks = -(-table.vocabulary // (BLOCK * BLOCKS)) * BLOCKS
        at = torch.zeros(blocks * BLOCK, self._axes.shape[1], dtype=torch.float32)
        for first in range(0, table.vocabulary, SAMPLE):
            rows = slice(first, first + SAMPLE)
            at[: table.vocabulary][rows] = table.embedding[rows].float() @ weights * table.row_scale[rows, None]
        half = at.square().sum(1) / 2
        half[table.vocabulary :] = torch.inf  # no ids
        # x is nearest to the row a with the largest x a - a a / 2.
        self._rows = torch.cat([at, -half[:, None]], 1).view(blocks, BLOCK, -1)

    def nearest(self, x: torch.Tensor) -> I64:
        """Return the ids of tokens with these values minus their mean, float32 `[T, H * D]`, of the first layer.

        Where values are NaN, an id is returned, too: the first of all maxima that are NaN.
        """
        at = torch.nn.functional.pad(x @ self._axes, (0, 1), value=1.0)
        best = torch.cat(
            [
                (at @ several.flatten(0, 1).T).view(len(at), BLOCKS, BLOCK).amax(2)
                for several in self._rows.split(BLOCKS)
            ],
            dim=1,
        ).argmax(1)
        within = torch.bmm(self._rows[best], at[:, :, None])[..., 0].argmax(1)
        ids: I64 = (best * BLOCK + within).numpy()
        return ids


def _columns(profile: Profile) -> dict[tuple[int, bool], torch.Tensor]:
    """Return where the units of the first section stand in it: `[H, D]` by layer, and by whether they are values."""
    section = profile.sections[0]
    everything = torch.arange(section.values)[None]
    return {(unit.layer, unit.is_value): unit.of(everything)[0] for unit in section.units(profile.layout)}


def _values_of(cache: PagedCache, slots: torch.Tensor) -> torch.Tensor:
    """Return the tokens' values in layer 0, float32 `[T, H * D]` on the CPU."""
    return cache.layer(0, slots)[1].cpu().float().flatten(1) * cache.value_scales[0]


def _explained(values: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """Return whether its id explains the values of each token, `[T, H * D]` like their predictions."""
    rest = (values - predicted).square().sum(1)
    return rest < LARGEST_RESIDUAL * values.square().sum(1)


def _pairs(x: torch.Tensor, rope: Rope) -> C128:
    """Return the dimensions `[..., D]` that turn together as complex numbers, `[..., rotary_dim / 2]`."""
    turned: F64 = x[..., : rope.rotary_dim].double().numpy()
    half = rope.rotary_dim // 2
    if rope.interleaved:
        return turned[..., 0::2] + 1j * turned[..., 1::2]
    return turned[..., :half] + 1j * turned[..., half:]


def _scores(together: C128, frequencies: F64, count: int) -> F64:
    """Return the real part of the sum of `together[f] * exp(-i * p * frequencies[f])`, for p = 0 ... count - 1.

    With p = a + width * b, two small tables of angles serve all positions.
    """
    width = math.isqrt(count) + 1
    near = together * np.exp(-1j * np.outer(np.arange(width), frequencies))
    far = np.exp(-1j * np.outer(np.arange(-(-count // width)) * width, frequencies))
    scores: F64 = (far @ near.T).real.flatten()[:count]
    return scores
