"""Bit-exact coding. A section is one layer: see `codec/stages/reference/byte_planes.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.coding_plan import Escapes
from cuvee.codec.entropy.coefficients import tokens_per_stream
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.format.container import write_streams
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section, partition, tile_tokens, tiles_around
from cuvee.codec.schemes import overlap
from cuvee.codec.stages.implementations import Stages
from cuvee.codec.stages.reference.byte_planes import PROB_BITS, choose_table, write_model
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows, dense_rows

_NO_ESCAPES = Escapes(np.empty(0, np.uint32), np.empty(0, np.int32))


class LosslessScheme:
    """Codes sections of any model bit for bit."""

    def __init__(self, layout: KVLayout, stages: Stages) -> None:
        self._sections = partition(layout, "unit")
        self._stages = stages

    @property
    def sections(self) -> tuple[Section, ...]:
        """See `SectionScheme.sections`."""
        return self._sections

    def encode(
        self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation, offsets: torch.Tensor | None = None
    ) -> list[bytes]:
        """See `SectionScheme.encode`. Keys are coded as stored: un-rotation is not exactly invertible."""
        return [self._encode(chunk, index) for index in numbers]

    def _encode(self, chunk: KVChunk, index: int) -> bytes:
        layer = self._sections[index].first_layer
        planes = [plane for unit in (chunk.keys[layer], chunk.values[layer]) for plane in self._stages.split_unit(unit)]
        tables = [choose_table(plane.counts, len(plane.data)) for plane in planes]
        head, stored = bytearray(), bytearray()
        for plane, freq in zip(planes, tables, strict=True):
            head.append(freq is not None)
            if freq is None:
                stored += plane.data.tobytes()
            else:
                head += write_model(plane.reference, freq)
        head += bytes(-len(head) % 4)
        stored += bytes(-len(stored) % 4)
        coded = [(plane, freq) for plane, freq in zip(planes, tables, strict=True) if freq is not None]
        if not coded:
            return bytes(head + stored)
        family = EntropyTables(np.stack([freq for _, freq in coded]), PROB_BITS)
        which = np.repeat(np.arange(len(coded), dtype=np.uint16), [len(plane.data) for plane, _ in coded])
        symbols = np.empty((len(which), chunk.tokens), np.uint8)
        row = 0
        for plane, _ in coded:
            np.subtract(plane.data, plane.reference[:, None], out=symbols[row : row + len(plane.data)])
            row += len(plane.data)
        per_stream = tokens_per_stream(len(which), float(family.entropy[which].sum()))
        streams = self._stages.rans_encode(symbols, which, family, per_stream)
        return b"".join((head, stored, write_streams(streams, _NO_ESCAPES, len(which), per_stream)))

    def decode(
        self,
        parts: Sequence[tuple[int, memoryview]],
        request: DecodeRequest,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        rotation: Rotation,
    ) -> None:
        """See `SectionScheme.decode`. Keys are turned only if the tokens move."""
        layout, span, tokens = request.layout, request.span, request.header.tokens
        first, dtype = request.header.start + span.start, layout.torch_dtype
        unrotation = None
        if request.start != first:
            unrotation = Rotation(layout, first, len(span), torch.device("cpu"), inverse=True)
        for index, data in parts:
            section = self._sections[index]
            key_rows, value_rows = keys[section.first_layer], values[section.first_layer]
            (layer,) = section.layers(layout)
            indexed = self._stages.index_layer(data, layer, dtype, tokens)
            for at in tiles_around(span, tile_tokens(section, layout), tokens):
                if unrotation is None or key_rows is None:
                    self._stages.decode_layer(indexed, at, key_rows, value_rows, at.start - span.start)
                    continue
                self._stages.decode_layer(indexed, at, None, value_rows, at.start - span.start)
                stored = torch.empty(at.stop - at.start, layer.kv_heads, layer.head_dim, dtype=dtype)
                self._stages.decode_layer(indexed, at, dense_rows(stored), None, 0)
                columns, rows = overlap(at, span)
                self._stages.move_keys(stored[columns], layer, unrotation, rotation, rows, key_rows)
