"""Sections of channels that are coded one by one, in plain NumPy and PyTorch: the reference.

Encoding:

    x [T, N] --center_channels--> means, deviations; x --over scale, transposed--> y [R, T]

Decoding:

    bytes --read_channels, read_coded--> side information, streams              once
    a tile of them --rANS--> planes --unpack, dequantize--> y [R, t]            for each tile
    y --times scale, transposed--> x [t, N] --place--> outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.entropy.channels import Channels, read_channels
from cuvee.codec.entropy.coding_plan import CodingPlan
from cuvee.codec.entropy.family import Family, step_value
from cuvee.codec.format.container import Reader, read_coded
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section
from cuvee.codec.stages.reference.rans import rans_decode
from cuvee.codec.stages.reference.symbols import dequantize, unpack
from cuvee.codec.stages.reference.transform import as_numpy, place
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows
from cuvee.codec.support.arrays import F32


def center_channels(x: torch.Tensor) -> tuple[F32, npt.NDArray[np.float64]]:
    """Subtract the mean of each channel from `x`, `[T, N]` float32, in place.

    Returns:
        the means `[N]`, rounded to bfloat16, and the root mean squares of what is left, `[N]`.
    """
    mean = x.mean(0, dtype=torch.float64).bfloat16().float()
    x -= mean
    # Sums of squares in float64: those of large values overflow float32.
    deviation = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64) / len(x) ** 0.5
    return as_numpy(mean), deviation.numpy()


def normalized_channels(x: torch.Tensor, scale: F32, live: npt.NDArray[np.intp]) -> F32:
    """Return the channels `live` of `x`, `[t, N]` float32, over their scales: `[R, t]`.

    The result is valid until the thread normalizes its next tile.
    """
    return np.ascontiguousarray((x.numpy() / scale).T[live])


@dataclass(frozen=True, slots=True)
class ChannelIndex:
    """A section that was read: the parts that decoding each of its tiles needs.

    Attributes:
        channels: its side information.
        plan: how the coded channels are coded.
        part: their coded part.
        family: tables and quantizer.
        step: of the quantizer.
    """

    channels: Channels
    plan: CodingPlan
    part: IndexedPart
    family: Family
    step: float


def index_channels(
    data: memoryview, section: Section, number: int, family: Family, step_index: int, tokens: int
) -> ChannelIndex:
    """Read a section, once for all of its tiles.

    Args:
        data: its bytes.
        section: what it holds.
        number: its number, for errors.
        family: tables and quantizer.
        step_index: of the relative step.
        tokens: tokens in the chunk.

    Raises:
        FormatError: the bytes break a rule.
    """
    reader = Reader(data)
    channels = read_channels(reader, section.blocks, number)
    plan = channels.plan()
    part = read_coded(reader, plan.planes, len(plan.shift), tokens)
    reader.finish()
    return ChannelIndex(channels, plan, IndexedPart(part, tokens), family, step_value(step_index))


def decode_channels(
    index: ChannelIndex,
    at: slice,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    first_row: int,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
) -> None:
    """Decode a tile of a section, and write those of its tokens that have rows in the outputs.

    Args:
        index: the result of `index_channels`.
        at: the tokens of the tile, which begins where a stream and a window begin.
        section: as for `index_channels`.
        layout: layout of the outputs.
        rotation: rotates keys to the positions of the outputs' rows.
        first_row: the row of the tile's first token; below zero for a token before the outputs' first.
        keys: per layer the rows to write; all have the same number of tokens.
        values: the same for values.

    Raises:
        CorruptError: the bytes break a rule.
    """
    n, family = index.part.part.tokens_per_stream, index.family
    streams, escapes = index.part.select(at)
    planes = rans_decode(streams, index.plan.tables, family.tables, n, at.stop - at.start)
    y = dequantize(unpack(planes, escapes, index.plan), index.step, index.plan, family.quantizer)
    x = spread(y, index.channels.live, index.channels.scale, section.values)
    place_tile(x, index.channels.mean, section, layout, rotation, first_row, keys, values)


def place_tile(
    x: torch.Tensor,
    mean: F32,
    section: Section,
    layout: KVLayout,
    rotation: Rotation,
    first_row: int,
    keys: Sequence[Rows | None],
    values: Sequence[Rows | None],
) -> None:
    """Write `x + mean` of the tokens of a tile that have rows in the outputs; see `decode_channels`.

    Args:
        x: `[t, N]` float32, the values of the tile without their means.
        mean: `[N]`.
        section: as for `decode_channels`, like all that follow.
        layout: see above.
        rotation: see above.
        first_row: see above.
        keys: see above.
        values: see above.
    """
    rows = next(len(own.begins) for own in (keys[section.first_layer], values[section.first_layer]) if own is not None)
    inside = slice(max(-first_row, 0), min(len(x), rows - first_row))
    to = slice(first_row + inside.start, first_row + inside.stop)
    place(x[inside], torch.from_numpy(mean)[None], section, layout, rotation, to, keys, values)


def spread(y: F32, live: npt.NDArray[np.intp], scale: F32, count: int) -> torch.Tensor:
    """Turn channels that are coded one by one into values.

    Args:
        y: `[R, t]` float32, the coded channels.
        live: `[R]`, numbers of these channels.
        scale: `[count]` float32, the unit of each channel.
        count: N.

    Returns:
        `[t, N]` float32; zero in the other channels.
    """
    x = torch.zeros(y.shape[1], count)
    x[:, torch.from_numpy(live)] = torch.from_numpy(y).T * torch.from_numpy(scale[live])
    return x
