"""The chunks of a transformers cache, coded where the cache is.

    full layers    |---------------- all tokens ---------------|
    window layers                          |- the last W - 1 --|
    segments       |        full layers    |     all layers    |
    blobs          | ………… | ………… | ………… | … | ………… | ………… | ……… |

A segment is coded in one call for all rows. A cache whose layers hold all tokens is one segment. Elsewhere, a chunk of
tokens that some windows have dropped is an ordinary blob of the other layers: its header names their layout, and the
profile of these layers. What no layer holds has no blob.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError, ProfileMismatchError
from cuvee.codec.format.container import read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.support.arrays import I64
from cuvee.integrations.transformers.cache_rows import CacheRows
from cuvee.integrations.transformers.cache_tensors import chunk_spans

_Units = tuple[torch.Tensor, torch.Tensor]


def check_units(tensors: Sequence[_Units], width: int, layout: KVLayout, paddings: Sequence[int]) -> None:
    """Refuse tensors that `encode_rows` cannot take.

    Raises:
        InputError: a shape or dtype differs from the layout's, or there are too many tokens.
    """
    last = [[unit[0, :, -1:].transpose(0, 1) for unit in units] for units in zip(*tensors, strict=True)]
    KVChunk(last[0], last[1], layout)
    layout.check_positions(0, width - min(paddings))


def encode_rows(
    codec: Codec,
    tensors: Sequence[_Units],
    width: int,
    layout: KVLayout,
    chunk_tokens: int,
    paddings: Sequence[int],
    bound: Sequence[bytes],
    ids: I64 | None,
) -> list[list[bytes]]:
    """Encode rows whose layers hold all tokens, or the last ones, once `check_units` has; return the blobs of each row.

    Args:
        codec: of the model.
        tensors: keys and values `[B, H, T_l, D]` per layer, of the last T_l columns.
        width: columns of the batch.
        layout: of the model, in the dtype of the tensors.
        chunk_tokens: tokens per chunk.
        paddings: padded columns of each row.
        bound: the bytes that the blobs of each row are bound to.
        ids: `[B, width]` of the tokens, or None.

    Raises:
        ProfileError: the profile's bases mix layers that hold a chunk with layers that do not.
    """
    spans = [chunk_spans(width - padding, chunk_tokens) for padding in paddings]
    begins = [width - keys.shape[2] for keys, _ in tensors]
    rows: list[list[bytes]] = [[] for _ in paddings]
    for first, stop in pairwise([*sorted(set(begins)), width]):
        held = [layer for layer, begin in enumerate(begins) if begin <= first]
        slots, starts, following, owners = [], [], [], []
        tokens: list[I64 | None] = []
        every = torch.arange(len(rows) * (stop - first), device=tensors[0][0].device).view(len(rows), -1)
        for row, padding in enumerate(paddings):
            for start, end in spans[row]:
                begin, after = max(padding + start, first), min(padding + end, stop)  # columns
                if begin < after:
                    slots.append(every[row, begin - first : after - first])
                    starts.append(begin - padding)
                    following.append(width - after)
                    owners.append(row)
                    tokens.append(None if ids is None else ids[row, begin:after])
        if not slots:  # padding
            continue
        keys, values = (
            [tensors[at][unit][:, :, first - begins[at] : stop - begins[at]].transpose(1, 2) for at in held]
            for unit in (0, 1)
        )
        chunks = PagedChunks(PagedCache(_part(layout, held), keys, values), slots, starts, tokens, following)
        blobs = _codec_of(codec, held).encode(chunks, associated_data=[bound[row] for row in owners])
        for row, blob in zip(owners, blobs, strict=True):
            rows[row].append(blob)
    return rows


def decode_rows(
    codec: Codec,
    blobs: Sequence[bytes],
    bound: Sequence[bytes],
    device: torch.device,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[_Units]:
    """Decode the blobs of `encode_rows` on `device`, those of the same layers in one call.

    Returns:
        keys and values `[B, H, T, D]` layer by layer; zeros for padding, and for what windows have dropped.

    Raises:
        InputError: the list does not make whole rows, or ends before the windows of its last tokens are complete.
        ProfileMismatchError: a blob has the layout of another model.
    """
    # Nothing is allocated before all headers agree.
    headers = [read_header(blob) for blob in blobs]
    layout = replace(codec.profile.layout, dtype=headers[-1].dtype)
    windows, every = [layer.sliding_window for layer in layout.layers], list(range(layout.num_layers))
    parts = {_part(layout, held).fingerprint: held for held in _parts(layout)}
    for index, header in enumerate(headers):
        if header.layout not in parts:
            raise ProfileMismatchError(
                f"blobs[{index}]: must have the layout of the codec's profile, or of some of its layers, and the dtype "
                "of the last blob: pass the blobs of one cache, and a codec of its model"
            )
    holders = [parts[header.layout] for header in headers]
    opened = [
        _codec_of(codec, held).open(blob, associated_data=data)
        for held, blob, data in zip(holders, blobs, bound, strict=True)
    ]
    rows = CacheRows(headers[-1].start + headers[-1].tokens, attention_mask, max_tokens, late=None not in windows)
    places = [rows.take(index, header.start, header.tokens) for index, header in enumerate(headers)]
    rows.finish()
    _check_windows(rows, windows, holders, places)
    whole = all(held == every for held in holders) and sum(own.tokens for own in headers) == rows.count * rows.width
    allocate = torch.empty if whole else torch.zeros

    def empty(heads: int, size: int) -> torch.Tensor:
        return allocate(rows.count, heads, rows.width, size, dtype=layout.torch_dtype, device=device)

    keys = [empty(layer.kv_heads, layer.head_dim) for layer in layout.layers]
    values = [empty(layer.kv_heads, layer.value_dim) for layer in layout.layers]
    all_slots = torch.arange(rows.count * rows.width, device=device).view(rows.count, -1)
    for held in parts.values():
        numbers = [number for number, own in enumerate(holders) if own == held]
        if numbers:
            own_keys, own_values = ([unit[layer].transpose(1, 2) for layer in held] for unit in (keys, values))
            cache = PagedCache(_part(layout, held), own_keys, own_values)
            slots = []
            for number in numbers:
                row, column = places[number]
                slots.append(all_slots[row, column : column + headers[number].tokens])
            _codec_of(codec, held).decode_paged([opened[number] for number in numbers], cache, slots).check()
    return ((keys.pop(0), values.pop(0)) for _ in layout.layers)


def _check_windows(
    rows: CacheRows,
    windows: Sequence[int | None],
    holders: Sequence[Sequence[int]],
    places: Sequence[tuple[int, int]],
) -> None:
    """Refuse rows that lack tokens which the windows of their last tokens reach."""
    # First column of each row and layer behind which all tokens are there.
    begins = [[rows.width] * len(windows) for _ in range(rows.count)]
    limited = [(layer, window) for layer, window in enumerate(windows) if window is not None]
    for held, (row, column) in zip(holders, places, strict=True):
        for layer, _ in limited:
            begins[row][layer] = min(begins[row][layer], column) if layer in held else rows.width
    for row, padding in enumerate(rows.paddings):
        for layer, window in limited:
            needed = max(padding, rows.width - window + 1)
            if begins[row][layer] > needed:
                raise InputError(
                    f"blobs: must hold the last {rows.width - needed} tokens of layer {layer} in row {row}, got "
                    f"{rows.width - begins[row][layer]}: they continue a longer cache, whose last blobs are missing"
                )


def _parts(layout: KVLayout) -> Iterator[list[int]]:
    """Yield the layers that may hold a token: all, and those whose windows are longer than one of the windows."""
    windows = [layer.sliding_window for layer in layout.layers]
    yield list(range(layout.num_layers))
    for shortest in sorted({window for window in windows if window is not None}):
        held = [layer for layer, window in enumerate(windows) if window is None or window > shortest]
        if held:
            yield held


def _part(layout: KVLayout, held: Sequence[int]) -> KVLayout:
    return replace(layout, layers=tuple(layout.layers[layer] for layer in held))


def _codec_of(codec: Codec, held: Sequence[int]) -> Codec:
    return codec if len(held) == codec.profile.layout.num_layers else codec.of_layers(held)
