"""Chunks to blobs: token ids, sections by a backend, and the blobs of a chunk's parts.

A profile fits the caches of its model. Where token ids or positions are not those of the cache, it misleads, and blobs
may be larger than the cache itself. So a chunk that takes suspiciously many bytes is coded in other ways, too, and the
smallest result is kept: without prediction from its ids, then without loss. A chunk that repeats few values, such as
zeros, is coded without loss as well: see `repetition.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from cuvee.codec.backends import Backend, Coding, EncodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.coding.id_coding import IdCoding
from cuvee.codec.coding.repetition import may_be_smaller, sampled
from cuvee.codec.entropy.residuals import FINER
from cuvee.codec.format.container import NO_DIGEST, Contents, Kind, Scheme, SectionBytes, header_digest, write_blob
from cuvee.codec.format.keys import Key
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.setting import Setting, Settings, warn_of_length
from cuvee.codec.support.advice import ADVISES
from cuvee.codec.support.once import Once

_once = Once(logging.getLogger(__name__))

# Of the cache's bytes. Lossless coding takes two thirds, and a profile a tenth or less at qualities of use.
SUSPICIOUS_SHARE = 1 / 4
MISLED_SHARE = 0.8  # of the bytes with ids, from which on ids mislead: a blob without them does not tell them


class Encoder:
    """Encodes chunks with the settings of one codec. With a key, blobs carry tags."""

    def __init__(self, settings: Settings, ids: IdCoding, key: Key | None) -> None:
        self._settings, self._ids, self._key = settings, ids, key
        self._promised = settings.promised_tokens

    def coding(self, dtype: str, ids: bool) -> Coding:
        """Return how the sections of chunks of a dtype are coded, with or without token ids."""
        setting = self._settings.of(ids)
        return Coding(self._settings.profile, setting, dtype, ids and not setting.lossless)

    def requests(self, source: KVChunk | PagedChunks) -> list[EncodeRequest]:
        """Return what to encode, with the ids that something is predicted from; errors as `IdCoding.usable`."""
        chunks = [source] if isinstance(source, KVChunk) else source
        promised = self._promised if ADVISES.get() else None
        if promised is not None and any(chunk.start + chunk.tokens > promised for chunk in chunks):
            warn_of_length(self._settings.profile.id, promised)
        return [EncodeRequest(chunk, self._ids.usable(chunk.token_ids)) for chunk in chunks]

    def encode(
        self, backend: Backend, layout: KVLayout, requests: Sequence[EncodeRequest], bound: Sequence[bytes]
    ) -> list[tuple[bytes, ...]]:
        """Return the parts of each chunk, bound to their associated data."""
        parts: list[tuple[bytes, ...]] = [()] * len(requests)
        for coding in self._codings(layout.dtype):
            which = [at for at, request in enumerate(requests) if self._wanted(coding, layout, request, parts[at])]
            if coding.setting.lossless:
                others = [at for at, best in enumerate(parts) if best and at not in which]
                which = sorted(which + self._repeating(backend, layout, requests, parts, others))
            if not which:
                continue
            selected = [requests[at] if coding.predicted else replace(requests[at], token_ids=None) for at in which]
            for at, request, sections in zip(which, selected, backend.encode(coding, selected), strict=True):
                best, coded = parts[at], self._write(request, coding.setting, layout, sections, bound[at])
                if not best or _size(coded) < _size(best) * (1 if coding.setting.lossless else MISLED_SHARE):
                    parts[at] = coded
                    if best and ADVISES.get():
                        _warn_of_size(coding.setting.lossless)
        return parts

    def _wanted(self, coding: Coding, layout: KVLayout, request: EncodeRequest, parts: Sequence[bytes]) -> bool:
        """Return whether to code a chunk in a way, given its parts as coded so far."""
        if not parts:
            return coding == self.coding(layout.dtype, request.token_ids is not None)
        return _size(parts) > SUSPICIOUS_SHARE * layout.bytes_per_token * request.source.tokens

    @staticmethod
    def _repeating(
        backend: Backend,
        layout: KVLayout,
        requests: Sequence[EncodeRequest],
        parts: Sequence[Sequence[bytes]],
        which: Sequence[int],
    ) -> list[int]:
        """Return which of the coded chunks `which` repeat so few values that fewer bytes may hold them without loss."""
        if not which:
            return []
        values, counts = sampled([requests[at] for at in which])
        of_chunks = np.split(backend.to_host(values), np.cumsum(counts)[:-1])
        bits = [8 * _size(parts[at]) / (requests[at].source.tokens * layout.values_per_token) for at in which]
        return [at for at, sample, most in zip(which, of_chunks, bits, strict=True) if may_be_smaller(sample, most)]

    def _codings(self, dtype: str) -> Iterator[Coding]:
        """Yield the ways to code chunks, each of which one call of a backend takes, from the best to the safest."""
        ways = [self.coding(dtype, True), self.coding(dtype, False)]
        yield from dict.fromkeys([*ways, replace(ways[0], setting=Setting(Scheme.LOSSLESS), predicted=False)])

    def _write(
        self,
        request: EncodeRequest,
        setting: Setting,
        layout: KVLayout,
        sections: Sequence[SectionBytes],
        associated_data: bytes,
    ) -> tuple[bytes, ...]:
        """Return the blobs of a chunk, given the sections of the first one, then those of its refinement."""
        count = len(sections) // (1 + setting.refinements)
        contents = Contents(
            dtype=layout.dtype, tokens=request.source.tokens, start=request.source.start,
            values_per_token=layout.values_per_token,
            step_index=setting.step_index, schemes=(setting.scheme,) * count, layout=layout.fingerprint,
            profile=NO_DIGEST if setting.lossless else self._settings.profile.id,
        )  # fmt: skip
        ids = self._ids.write(request.token_ids)
        first = write_blob(contents, sections[:count], token_ids=ids, key=self._key, associated_data=associated_data)
        if not setting.refinements:
            return (first,)
        finer = replace(
            contents, kind=Kind.REFINEMENT, step_index=setting.step_index - FINER, refines=header_digest(first)
        )
        return first, write_blob(finer, sections[count:], key=self._key, associated_data=associated_data)


def _size(parts: Sequence[bytes]) -> int:
    return sum(map(len, parts))


def _warn_of_size(lossless: bool) -> None:
    """Warn once per process."""
    _once(
        lossless,
        "a chunk is coded %s, which takes fewer bytes than the profile does: its token ids or its positions may not be "
        "those of the cache, the cache repeats few values, or the profile was learned from other text",
        "without loss" if lossless else "without prediction from its token ids",
    )
