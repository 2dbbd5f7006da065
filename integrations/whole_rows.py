"""Rows of a cache whose layers hold all tokens: coded in one call, on their device. `past_windows` codes the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.support.arrays import I64
from cuvee.integrations.cache_rows import CacheRows
from cuvee.integrations.cache_tensors import chunk_spans, whole_row


def encode_rows(
    codec: Codec,
    tensors: list[tuple[torch.Tensor, torch.Tensor]],
    layout: KVLayout,
    chunk_tokens: int,
    paddings: list[int],
    bound: list[bytes],
    ids: I64 | None,
) -> list[list[bytes]]:
    """Encode all chunks of all rows in one call, on their device, and bind the blobs of row b to `bound[b]`."""
    width = tensors[0][0].shape[2]
    all_slots = torch.arange(len(paddings) * width, device=tensors[0][0].device)
    slots, starts, following, associated_data = [], [], [], []
    tokens: list[I64 | None] = []
    for row, padding in enumerate(paddings):
        first = row * width + padding
        length = whole_row(tensors, layout, row, padding).tokens
        for start, end in chunk_spans(length, chunk_tokens):
            slots.append(all_slots[first + start : first + end])
            starts.append(start)
            following.append(length - end)
            associated_data.append(bound[row])
            tokens.append(None if ids is None else ids[row, padding + start : padding + end])
    cache = PagedCache(layout, [keys.transpose(1, 2) for keys, _ in tensors], [v.transpose(1, 2) for _, v in tensors])
    blobs = codec.encode(
        PagedChunks(cache, slots, starts, tokens=tokens, following=following), associated_data=associated_data
    )
    firsts = [*(index for index, start in enumerate(starts) if start == 0), len(blobs)]
    return [blobs[first:end] for first, end in pairwise(firsts)]


def decode_rows(
    codec: Codec,
    blobs: Sequence[bytes],
    bound: Sequence[bytes],
    device: torch.device,
    attention_mask: torch.Tensor | None,
    max_tokens: int | None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Decode all blobs in one call on `device`; yield keys and values `[B, H, T, D]` layer by layer."""
    # Nothing is allocated before all headers agree.
    opened = [codec.open(blob, associated_data=data) for blob, data in zip(blobs, bound, strict=True)]
    headers = [blob.header for blob in opened]
    layout = replace(codec.profile.layout, dtype=headers[-1].dtype)
    rows = CacheRows(layout, headers[-1].start + headers[-1].tokens, attention_mask, max_tokens)
    places = [rows.take(index, h.layout, h.start, h.tokens) for index, h in enumerate(headers)]
    rows.finish()
    allocate = torch.zeros if any(rows.paddings) else torch.empty

    def empty(heads: int, size: int) -> torch.Tensor:
        return allocate(rows.count, heads, rows.width, size, dtype=layout.torch_dtype, device=device)

    keys = [empty(layer.kv_heads, layer.head_dim) for layer in layout.layers]
    values = [empty(layer.kv_heads, layer.value_dim) for layer in layout.layers]
    cache = PagedCache(layout, [k.transpose(1, 2) for k in keys], [v.transpose(1, 2) for v in values])
    all_slots = torch.arange(rows.count * rows.width, device=device)
    slots = []
    for (row, column), header in zip(places, headers, strict=True):
        first = row * rows.width + column
        slots.append(all_slots[first : first + header.tokens])
    codec.decode_paged(opened, cache, slots).check()
    return ((keys.pop(0), values.pop(0)) for _ in layout.layers)
