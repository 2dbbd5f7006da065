"""The linear stages: from a chunk's tensors to a section's values, to coefficients, and back.

    keys, values of a section's layers --un-rotate keys, concatenate--> x [T, N]
    y = forward (x - mean)  per block   ->   y [R, T]  component-major, one row per component
    x = inverse y + mean

A *section* is a run of layers that is coded, found and decoded on its own. Its N values per token are ordered by layer,
K before V, head, dimension. A *block* is a contiguous part of them that shares one basis. The blocks partition N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.dtypes import saturated
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.profiles.sections import Section
from cuvee.codec.profiles.token_prediction import Predictions
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import I64


class Centers(NamedTuple):
    """What is subtracted from the values of a run of tokens before they are coded, and added to decoded ones.

    Attributes:
        means: `[m, N]` float32, contiguous; the last row serves all further tokens.
        predictions: of the tokens; None: nothing is predicted.
    """

    means: torch.Tensor
    predictions: Predictions | None = None

    def of(self, tokens: int) -> torch.Tensor:
        """Return the center of each token, `[tokens, N]` float32, or `[1, N]` if all are equal."""
        means, predictions = self
        if 1 < len(means) < tokens:
            means = means[torch.arange(tokens).clamp_max(len(means) - 1)]
        if predictions is None:
            return means
        return means + predictions.rows[torch.from_numpy(predictions.index)].float()


def gather(chunk: KVChunk, section: Section, rotation: Rotation | None, at: slice) -> torch.Tensor:
    """Return the section's values `[t, N]` float32 of the tokens `at`, keys rotated by `rotation` (None: as stored)."""
    x = torch.empty(at.stop - at.start, section.values, device=chunk.device, dtype=torch.float32)
    for unit in section.units(chunk.layout):
        if unit.is_value or rotation is None:
            unit_x = (chunk.values if unit.is_value else chunk.keys)[unit.layer][at]
        else:
            unit_x = rotation.apply(chunk.keys[unit.layer][at], chunk.layout.layers[unit.layer].rope, at)
        unit.of(x).copy_(unit_x)
    return x


def gather_centered(
    chunk: KVChunk,
    section: Section,
    rotation: Rotation,
    at: slice,
    centers: Centers,
) -> torch.Tensor:
    """Gather values and subtract the centers of the tokens `at`; the result is valid until the thread's next tile.

    Raises:
        InputError: values are NaN or infinite.
    """
    x = gather(chunk, section, rotation, at)
    x -= centers.of(len(x))
    require_finite(x, section)
    return x


def require_finite(x: torch.Tensor, section: Section) -> None:
    """Raise InputError if `x`, values of the section, holds NaN or infinities."""
    # A sum is finite only if all of its terms are. If it overflows, check the terms.
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        raise not_finite_error(section)


def not_finite_error(section: Section) -> InputError:
    """Return the error about a section whose values are not all finite."""
    return InputError(
        f"cache: must be finite, got NaN or infinite values in layers {section.first_layer} … {section.end_layer - 1}: "
        "encode it with quality='lossless'"
    )


def scatter(
    x: torch.Tensor,
    centers: Centers,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    at: slice,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
    order: I64 | None = None,
) -> None:
    """Write values plus their centers to the rows `at` of per-layer outputs, with keys rotated and all values rounded.

    Values beyond the range of the outputs' dtype become the largest that it holds.

    Args:
        x: `[t, N]` with position-free keys, or `[blocks, t, N / blocks]`; float32 or bfloat16. Arithmetic is float32.
        centers: of the tokens `at`.
        rotation: rotates keys to their positions; `at` indexes it.
        at: rows of the outputs.
        keys: per layer the rows to write; None for a layer to leave out.
        order: `[t]`, for each row of x its row in `centers`, `at` and the outputs; None: the same row. Rows of x are
            left out where `order` is below zero or beyond `at`.
    """
    if x.ndim == 3:
        x = x.transpose(0, 1).flatten(1)
    if order is not None:
        inside = (order >= 0) & (order < at.stop - at.start)
        x = x[torch.from_numpy(np.flatnonzero(inside)[np.argsort(order[inside])])]
    x = x.float() + centers.of(len(x))
    for unit in section.units(layout):
        rows = (values if unit.is_value else keys)[unit.layer]
        if rows is not None:
            unit_x = unit.of(x)
            unit_x = unit_x if unit.is_value else rotation.apply(unit_x, layout.layers[unit.layer].rope, at)
            limit = torch.finfo(rows.memory.dtype).max
            rows.write(unit_x.clamp_(-limit, limit), at)  # neither is a view of what the caller gave


def move_keys(
    stored: torch.Tensor, layer: LayerLayout, unrotation: Rotation, rotation: Rotation, at: slice, rows: Rows
) -> None:
    """Write keys of one run of positions to rows of another, rotated. Finite keys stay finite.

    Args:
        stored: `[t, H, D]`, contiguous; any values. Arithmetic is float32, and position-free keys are not rounded.
        unrotation: from the positions of `stored`; `at` indexes it.
        rotation: to the new positions; `at` indexes it.
    """

    def moved(keys: torch.Tensor) -> torch.Tensor:
        return rotation.apply(unrotation.apply(keys, layer.rope, at), layer.rope, at)

    # A pair with a value that is not finite stays so.
    finite = stored.isfinite()
    which = None if bool(finite.all()) else moved(stored.where(~finite, 0.0)).isfinite()
    rows.write(saturated(moved(stored), stored.dtype, which), at)
