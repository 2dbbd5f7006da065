"""Bit-exact coding. A section is one layer: see `codec/stages/byte_planes.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.chunk import KVChunk
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import MORE_BYTES, SectionPlanes, one_class
from cuvee.codec.format.coded_part import CodedPart, coded_pieces
from cuvee.codec.format.container import Piece
from cuvee.codec.format.streams import NO_ESCAPES, ONE_CLASS, Streams
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.sections import Section, partition, tile_tokens, tiles_around
from cuvee.codec.schemes import overlap
from cuvee.codec.schemes.coefficients import tokens_per_stream
from cuvee.codec.stages.byte_planes import BytePlane, choose_tables, write_model
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows, dense_rows
from cuvee.codec.stages.stages import Stages
from cuvee.codec.support.arrays import U16

BATCH_BYTES = 8 << 20  # of planes and symbols: enough layers to choose tables together, few enough for little memory


class LosslessScheme:
    """Codes sections of any model bit for bit; with the methods of `TransformScheme`."""

    def __init__(self, layout: KVLayout, stages: Stages) -> None:
        self.sections: tuple[Section, ...] = partition(layout, "unit")
        self._tile = max((tile_tokens(section, layout) for section in self.sections), default=1)
        self._stages = stages

    def encode(self, chunk: KVChunk, numbers: Sequence[int], unrotation: Rotation) -> list[tuple[list[Piece]]]:
        """See `TransformScheme.encode`. Keys are coded as stored: un-rotation is not exactly invertible."""
        layers = [self.sections[index].first_layer for index in numbers]
        size = 2 * (chunk.keys[layers[0]].nbytes + chunk.values[layers[0]].nbytes) if layers else 1
        batch = max(BATCH_BYTES // size, 1)
        return [
            (section,)
            for first in range(0, len(layers), batch)
            for section in self._encode(chunk, layers[first : first + batch])
        ]

    def _encode(self, chunk: KVChunk, layers: Sequence[int]) -> list[list[Piece]]:
        """Encode layers, whose tables are chosen together."""
        split = [
            [plane for unit in (chunk.keys[layer], chunk.values[layer]) for plane in self._stages.split_unit(unit)]
            for layer in layers
        ]
        planes = [plane for of_layer in split for plane in of_layer]
        tables = choose_tables(
            np.stack([plane.counts for plane in planes]), np.array([len(plane.data) for plane in planes])
        )
        chosen = [freq for freq in tables if freq is not None]
        family = EntropyTables(np.stack(chosen)) if chosen else None
        heads: list[list[Piece]] = []
        coded: list[SectionPlanes | None] = []
        first = table = 0
        for of_layer in split:
            layer_tables = tables[first : first + len(of_layer)]
            heads.append(_head(of_layer, layer_tables))
            coded.append(None if family is None else _coded_planes(of_layer, layer_tables, family, table, chunk.tokens))
            first += len(of_layer)
            table += sum(freq is not None for freq in layer_tables)
        streams = iter([] if family is None else self._stages.rans_encode([each for each in coded if each], family))
        return [
            head if each is None else [*head, *_write(each, next(streams))]
            for head, each in zip(heads, coded, strict=True)
        ]

    def decode(
        self,
        parts: Sequence[tuple[int, tuple[memoryview, ...]]],
        request: DecodeRequest,
        keys: Sequence[Rows | None],
        values: Sequence[Rows | None],
        rotation: Rotation,
    ) -> None:
        """See `TransformScheme.decode`. Keys are turned only if the tokens move."""
        layout, span, tokens = request.opened.layout, request.span, request.opened.tokens
        first, dtype = request.opened.start + span.start, layout.torch_dtype
        unrotation = None
        if request.start != first:
            unrotation = Rotation(first, len(span), torch.device("cpu"), inverse=True)
        if not parts:
            return
        of_layers = [self.sections[index].first_layer for index, _ in parts]
        layers = [layout.layers[layer] for layer in of_layers]
        key_rows, value_rows = ([units[layer] for layer in of_layers] for units in (keys, values))
        indexed = self._stages.index_layers([data for _, (data,) in parts], layers, dtype, tokens)
        tiles = list(tiles_around(span, self._tile, tokens))
        if unrotation is None:
            at = slice(tiles[0].start, tiles[-1].stop)
            self._stages.decode_layers(indexed, slice(None), at, key_rows, value_rows, at.start - span.start)
            return
        for at in tiles:
            columns, rows = overlap(at, span)
            for i, (layer, key, value) in enumerate(zip(layers, key_rows, value_rows, strict=True)):
                stored = torch.empty(rows.stop - rows.start, layer.kv_heads, layer.head_dim, dtype=dtype)
                targets = None if key is None else dense_rows(stored), None if value is None else value.take(rows)
                self._stages.decode_layers(indexed, slice(i, i + 1), at, targets[:1], targets[1:], -columns.start)
                if key is not None:
                    self._stages.move_keys(stored, layer, unrotation, rotation, rows, key)


def _head(planes: Sequence[BytePlane], tables: Sequence[U16 | None]) -> list[Piece]:
    """Return all of a layer's section before its coded part."""
    head = bytearray()
    for plane, freq in zip(planes, tables, strict=True):
        head.append(freq is not None)
        if freq is not None:
            head += write_model(plane.reference, freq)
    head += bytes(-len(head) % 4)
    stored = [plane.data.reshape(-1).data for plane, freq in zip(planes, tables, strict=True) if freq is None]
    return [head, *stored, bytes(-sum(map(len, stored)) % 4)]


def _coded_planes(
    planes: Sequence[BytePlane], tables: Sequence[U16 | None], family: EntropyTables, first_table: int, tokens: int
) -> SectionPlanes | None:
    """Return a layer's planes to entropy-code, if there are any; its tables are those of `family` from one on."""
    coded = [plane for plane, freq in zip(planes, tables, strict=True) if freq is not None]
    if not coded:
        return None
    which = np.repeat(
        np.arange(first_table, first_table + len(coded), dtype=np.uint16), [len(plane.data) for plane in coded]
    )
    size = len(which) * tokens
    symbols = np.empty(size + MORE_BYTES, np.uint8)[:size].reshape(len(which), tokens)
    row = 0
    for plane in coded:
        np.subtract(plane.data, plane.reference[:, None], out=symbols[row : row + len(plane.data)])
        row += len(plane.data)
    per_stream = tokens_per_stream(len(which), float(family.entropy[which].sum()))
    return SectionPlanes(symbols, np.zeros(tokens, np.uint8), one_class(which), per_stream)


def _write(planes: SectionPlanes, streams: Streams) -> list[bytes | memoryview]:
    """Write a layer's coded part."""
    part = CodedPart(streams, NO_ESCAPES, planes.tokens_per_stream, ONE_CLASS)
    return coded_pieces(part, len(planes.planes))
