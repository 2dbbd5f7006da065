"""Blobs to chunks: into tensors, or into the pages of a serving engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from cuvee.codec.backends import Backends, Coding, DecodeRequest, PendingDecode
from cuvee.codec.chunk import KVChunk
from cuvee.codec.coding.id_coding import IdCoding
from cuvee.codec.coding.open_blob import OpenBlob
from cuvee.codec.coding.opening import Opener
from cuvee.codec.errors import InputError, allocations
from cuvee.codec.format.container import read_sections
from cuvee.codec.paged import PagedCache


class Decoder:
    """Decodes blobs that one codec has opened."""

    def __init__(self, opener: Opener, ids: IdCoding, backends: Backends) -> None:
        self._opener, self._ids, self._backends = opener, ids, backends

    def verify(self, opened: OpenBlob) -> None:
        """See `Codec.verify`."""
        self._ids.read(opened.blob, opened.header)
        self._opener.coding(opened)
        for blob, header in opened.parts:
            read_sections(blob, header, range(len(header.section_bytes)))

    def decode(self, opened: OpenBlob, span: range, start: int | None, device: torch.device) -> KVChunk:
        """Decode the tokens `span` of a blob into new tensors."""
        layout, encoded_at = opened.layout, opened.start + span.start
        layers = range(layout.num_layers)
        start = layout.check_move(encoded_at, encoded_at if start is None else start, len(span))
        coding = self._opener.coding(opened)
        backend = self._backends.of(device.type)
        with allocations(f"decoding {len(span)} tokens"):
            cache = PagedCache.empty(layout, len(span), layers, device)
            ids = self._ids.read(opened.blob, opened.header)
            backend.decode(coding, [DecodeRequest(opened, span, layers, cache, None, start, token_ids=ids)])()
        return cache.chunk(None, start, None if ids is None else ids[span.start : span.stop])

    def decode_paged(
        self,
        blobs: Sequence[OpenBlob],
        cache: PagedCache,
        slots: Sequence[torch.Tensor],
        starts: Sequence[int] | None,
        layers: range,
    ) -> PendingDecode:
        """Start to decode blobs into pages: see `Codec.decode_paged`."""
        work: dict[Coding, list[DecodeRequest]] = defaultdict(list)
        for number, (opened, at) in enumerate(zip(blobs, slots, strict=True)):
            cache.check_slots(at, opened.tokens)
            wanted = opened.start if starts is None else starts[number]
            start = opened.layout.check_move(opened.start, wanted, opened.tokens)
            ids = self._ids.read(opened.blob, opened.header)
            request = DecodeRequest(opened, range(opened.tokens), layers, cache, at, start, number, ids)
            work[self._opener.coding(opened)].append(request)
        backend = self._backends.of(cache.device.type)
        with allocations(f"decoding {sum(map(len, slots))} tokens"):
            return PendingDecode(tuple(backend.decode(coding, requests) for coding, requests in work.items()))


def within(name: str, wanted: object, count: int, of: str) -> range:
    """Return `wanted` if it is a range without gaps, not empty, and within `count`; raise InputError otherwise."""
    if not isinstance(wanted, range):
        raise InputError(f"{name}: must be a range, such as range(0, {count}), got {wanted!r}")
    if wanted.step != 1 or not 0 <= wanted.start < wanted.stop <= count:
        raise InputError(f"{name}: must lie within the {count} {name} {of} and not be empty, got {wanted!r}")
    return wanted


def check_tokens(tokens: int, max_tokens: int | None) -> None:
    """Refuse to restore more tokens than the caller expects.

    Raises:
        InputError: more than `max_tokens`, or an invalid limit.
    """
    if max_tokens is None:
        return
    if type(max_tokens) is not int or max_tokens < 1:
        raise InputError(f"max_tokens: must be at least 1, or None for no limit, got {max_tokens!r}")
    if tokens > max_tokens:
        raise InputError(
            f"max_tokens: must be at least {tokens} to restore these tokens, got {max_tokens}: raise it if you expect "
            "this many"
        )
