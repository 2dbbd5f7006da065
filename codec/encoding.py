"""Chunks to blobs: token ids, sections by a backend, and the blobs of a chunk's parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cuvee.codec.backends import Backend, Coding, EncodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.residuals import FINER
from cuvee.codec.format.container import NO_DIGEST, Contents, Kind, header_digest, write_blob
from cuvee.codec.format.keys import Key
from cuvee.codec.id_coding import IdCoding
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.setting import Settings, warn_of_length


class Encoder:
    """Encodes chunks with the settings of one codec. With a key, blobs carry tags."""

    def __init__(self, settings: Settings, ids: IdCoding, key: Key | None) -> None:
        self._settings, self._ids, self._key = settings, ids, key
        self._promised = settings.promised_tokens

    def coding(self, dtype: str, ids: bool) -> Coding:
        """Return how the sections of chunks of a dtype are coded, with or without token ids."""
        own = self._settings.of(ids)
        return Coding(self._settings.profile, own, dtype, ids and not own.lossless)

    def requests(self, source: KVChunk | PagedChunks) -> list[EncodeRequest]:
        """Return what to encode, with the ids that something is predicted from; errors as `IdCoding.known`."""
        chunks = [source] if isinstance(source, KVChunk) else source
        promised = self._promised
        if promised is not None and any(own.start + own.tokens > promised for own in chunks):
            warn_of_length(self._settings.profile.id, promised)
        return [EncodeRequest(own, self._ids.known(own.token_ids)) for own in chunks]

    def encode(
        self, backend: Backend, layout: KVLayout, requests: Sequence[EncodeRequest], bound: Sequence[bytes]
    ) -> list[tuple[bytes, ...]]:
        """Return the parts of each chunk, bound to their associated data."""
        parts: list[tuple[bytes, ...]] = [()] * len(requests)
        for with_ids in (False, True):  # which one call of a backend cannot mix
            own = [number for number, request in enumerate(requests) if (request.token_ids is not None) == with_ids]
            if not own:
                continue
            coded = backend.encode(self.coding(layout.dtype, with_ids), [requests[number] for number in own])
            for number, sections in zip(own, coded, strict=True):
                parts[number] = self._write(requests[number], layout, sections, bound[number])
        return parts

    def _write(
        self, request: EncodeRequest, layout: KVLayout, sections: Sequence[bytes], associated_data: bytes
    ) -> tuple[bytes, ...]:
        """Return the blobs of a chunk, given the sections of the first one, then those of its refinement."""
        setting = self._settings.of(request.token_ids is not None)
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
