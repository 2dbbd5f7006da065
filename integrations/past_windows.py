"""Caches whose sliding windows have dropped tokens.

    full layers    |---------------- all tokens ---------------|
    window layers                          |- the last W - 1 --|
    blobs          | full layers | … | ... | all layers | …    |

A chunk of tokens that some windows have dropped is an ordinary blob of the other layers: its header names their layout,
and the profile of these layers.
What no layer holds has no blob.
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
from cuvee.codec.support.arrays import I64
from cuvee.integrations.cache_rows import CacheRows

_Units = tuple[torch.Tensor, torch.Tensor]


def encode_past_windows(
    codec: Codec,
    tensors: Sequence[_Units],
    width: int,
    layout: KVLayout,
    spans: Sequence[Sequence[tuple[int, int]]],
    paddings: Sequence[int],
    bound: Sequence[bytes],
    ids: I64 | None,
) -> list[list[bytes]]:
    """Encode rows whose layers hold the last tokens only, or all; return the blobs of each row.

    Args:
        codec: of the model.
        tensors: keys and values `[B, H, T_l, D]` per layer, of the last T_l columns.
        width: columns of the batch.
        layout: of the model, in the dtype of the tensors.
        spans: first and last token (exclusive) of the chunks of each row.
        paddings: padded columns of each row.
        bound: the bytes that the blobs of each row are bound to.
        ids: `[B, width]` of the tokens, or None.

    Raises:
        ProfileError: the profile's bases mix layers that hold a chunk with layers that do not.
        InputError: a shape differs from the layout's.
    """
    begins = [width - keys.shape[2] for keys, _ in tensors]
    rows: list[list[bytes]] = []
    for row, (padding, chunks) in enumerate(zip(paddings, spans, strict=True)):
        rows.append([])
        for start, end in _cut(chunks, [begin - padding for begin in begins]):
            held = [layer for layer, begin in enumerate(begins) if begin - padding <= start]
            if not held:
                continue
            columns = [slice(padding + start - begins[layer], padding + end - begins[layer]) for layer in held]
            keys, values = (
                [tensors[layer][unit][row, :, own].transpose(0, 1) for layer, own in zip(held, columns, strict=True)]
                for unit in (0, 1)
            )
            known = None if ids is None else ids[row, padding + start : padding + end]
            chunk = KVChunk(keys, values, _part(layout, held), start, known, width - padding - end)
            rows[-1].append(codec.of_layers(held).encode(chunk, associated_data=bound[row]))
    return rows


def lacks_windows(blobs: Sequence[bytes], layout: KVLayout) -> bool:
    """Return whether blobs of a model of this layout lack tokens that windows have dropped."""
    headers = [read_header(blob) for blob in blobs]
    late = all(layer.sliding_window is not None for layer in layout.layers) and headers[0].start > 0
    return late or any(header.values_per_token != layout.values_per_token for header in headers)


def decode_past_windows(
    codec: Codec,
    blobs: Sequence[bytes],
    bound: Sequence[bytes],
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[_Units]:
    """Decode the blobs of `encode_past_windows`; yield keys and values `[B, H, T, D]`, zeros where they were dropped.

    Raises:
        InputError: the list does not make whole rows, or ends before the windows of its last tokens are complete.
        ProfileMismatchError: a blob has the layout of another model.
    """
    headers = [read_header(blob) for blob in blobs]
    layout = replace(codec.profile.layout, dtype=headers[-1].dtype)
    parts = {_part(layout, held).fingerprint: held for held in _parts(layout)}
    windows = [layer.sliding_window for layer in layout.layers]
    rows = CacheRows(
        layout, headers[-1].start + headers[-1].tokens, attention_mask, max_tokens, late=None not in windows
    )
    places = []
    for index, header in enumerate(headers):
        if header.layout not in parts:
            raise ProfileMismatchError(
                f"blobs[{index}]: must have the layout of the codec's profile, or of some of its layers, and the dtype "
                "of the last blob"
            )
        places.append(rows.take(index, layout.fingerprint, header.start, header.tokens))
    rows.finish()

    def empty(heads: int, size: int) -> torch.Tensor:
        return torch.zeros(rows.count, heads, rows.width, size, dtype=layout.torch_dtype)

    filled = [(empty(own.kv_heads, own.head_dim), empty(own.kv_heads, own.value_dim)) for own in layout.layers]
    # First column of each row and layer behind which all tokens are there.
    begins = [[rows.width] * layout.num_layers for _ in range(rows.count)]
    for blob, data, header, (row, column) in zip(blobs, bound, headers, places, strict=True):
        held = parts[header.layout]
        chunk = codec.of_layers(held).decode(blob, associated_data=data)
        end = column + chunk.tokens
        for layer in range(layout.num_layers):
            if layer not in held:
                begins[row][layer] = rows.width
        for layer, keys, values in zip(held, chunk.keys, chunk.values, strict=True):
            begins[row][layer] = min(begins[row][layer], column)
            for to, unit in zip(filled[layer], (keys, values), strict=True):
                to[row, :, column:end] = unit.transpose(0, 1)
    for row, padding in enumerate(rows.paddings):
        for layer, window in enumerate(windows):
            needed = padding if window is None else max(padding, rows.width - window + 1)
            if begins[row][layer] > needed:
                raise InputError(
                    f"blobs: must hold the last {rows.width - needed} tokens of layer {layer} in row {row}, got "
                    f"{rows.width - begins[row][layer]}: they continue a longer cache, whose last blobs are missing"
                )
    yield from filled


def _cut(spans: Sequence[tuple[int, int]], begins: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the spans, cut where another layer begins."""
    for start, end in spans:
        cuts = [start, *sorted({begin for begin in begins if start < begin < end}), end]
        yield from pairwise(cuts)


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
