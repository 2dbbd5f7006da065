"""Decoding takes time linear in a blob's bytes: sections are read once, and a tile touches nothing but its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.cpu.backend import CpuBackend
from cuvee.codec.format.container import read_header, read_section
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.format.streams import WINDOW
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.step_coding import StepCoding
from cuvee.codec.stages import reference
from cuvee.codec.stages.compiled import coded_part
from cuvee.codec.stages.implementations import get_stages
from cuvee.codec.stages.reference.sections import read_part
from cuvee.codec.stages.rows import dense_rows

LAYOUT = KVLayout("mine", (LayerLayout(1, 8, 8, Rope((1.0,) * 4)),) * 2, "bfloat16", None)
SCHEMES = ("classes", "transform", "lossless")


def chunk_of(tokens: int) -> KVChunk:
    """Few values of each window are outliers, which are coded as escapes."""
    noise = torch.Generator().manual_seed(tokens)
    units = [torch.randn(tokens, 1, 8, generator=noise) for _ in range(4)]
    for unit in units:
        unit[::97] *= 200
    return KVChunk([unit.bfloat16() for unit in units[:2]], [unit.bfloat16() for unit in units[2:]], LAYOUT)


@pytest.fixture(scope="module")
def learned() -> Profile:
    noise = torch.Generator().manual_seed(1)
    tensors = [[torch.randn(256, 1, 8, generator=noise).bfloat16() for _ in range(2)] for _ in range(16)]
    return fit(LAYOUT, [KVChunk(tensors[i], tensors[i + 8], LAYOUT) for i in range(8)], "layer")


@pytest.fixture
def coded(learned: Profile) -> Callable[[str, int], tuple[Codec, bytes]]:
    def encode(scheme: str, tokens: int) -> tuple[Codec, bytes]:
        profile = with_classes(learned, torch.arange(1024) % 7 + 1) if scheme == "classes" else learned
        codec = Codec(profile, "lossless", threads=1) if scheme == "lossless" else Codec(profile, step=0.3, threads=1)
        return codec, codec.encode(chunk_of(tokens))

    return encode


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "tokens"), [("reference", 1100), ("numba", 2048), ("numba", 32768)])
def test_each_section_is_read_once(coded: Any, name: str, scheme: str, tokens: int) -> None:
    codec, blob = coded(scheme, tokens)
    header = read_header(blob)
    stages, read, tiles = get_stages(name), Counter[int](), Counter[str]()

    def index_sections(coding: Any, parts: Any, count: int) -> Any:
        read.update(len(data) for _, data in parts)
        return stages.index_sections(coding, parts, count)

    def index_layers(sections: Any, *arguments: Any) -> Any:
        read.update(map(len, sections))
        return stages.index_layers(sections, *arguments)

    def tile(kind: str) -> Callable[..., Any]:
        def decode(index: Any, *arguments: Any) -> Any:
            tiles[kind] += 1
            return getattr(stages, kind)(index, *arguments)

        return decode

    watched = {
        "index_sections": index_sections, "index_layers": index_layers, "decode_sections": tile("decode_sections"),
        "decode_layers": tile("decode_layers"),
    }  # fmt: skip
    counted: Any = SimpleNamespace(**{key: getattr(stages, key) for key in reference.__all__} | watched)
    want = codec.decode(blob)
    read.clear()
    codec._backends._known["cpu"] = CpuBackend(counted, 1)
    got = codec.decode(blob)
    assert read == Counter(header.section_bytes)
    assert sum(tiles.values()) > len(header.section_bytes), "several tiles"
    if name == "numba":
        assert all(torch.equal(a, b) for a, b in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True))


def kept(
    data: np.ndarray[Any, np.dtype[np.uint8]], spans: list[tuple[int, int]]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of these spans; all others are 255, which breaks every rule."""
    out = np.full_like(data, 255)
    for begin, end in spans:
        out[begin:end] = data[begin:end]
    return out


@pytest.mark.parametrize("at", [slice(0, 512), slice(1024, 1536), slice(1536, 1900)])
@pytest.mark.parametrize("scheme", ["classes", "transform"])
def test_a_tile_of_sections_touches_nothing_else(coded: Any, scheme: str, at: slice) -> None:
    """Whatever is not the tile's own would be found damaged, or be taken for one more of its escapes."""
    tokens = 1900
    codec, blob = coded(scheme, tokens)
    header = read_header(blob)
    coding = StepCoding(codec.profile.learned, codec.profile.family, codec.step_index)
    parts = [(i, read_section(blob, header, i)) for i in range(len(header.section_bytes))]
    stages = get_stages("numba")
    want = [(tile.order, tile.y.clone()) for tile in
            stages.decode_sections(stages.index_sections(coding, parts, tokens), at, torch.float32)]  # fmt: skip
    index = stages.index_sections(coding, parts, tokens)
    spans, words_at, by_window = [], np.full_like(index.words_at, 1 << 31), index.by_window.copy()
    windows = slice(at.start // WINDOW, -(-at.stop // WINDOW))
    first_listed = 0
    for found, windows_at in zip(index.found, index.windows_at, strict=True):
        n = 1 << found[coded_part.LOG2]
        own = slice(at.start // n, -(-at.stop // n))
        states, words, listed = (found[f] for f in (coded_part.STATES, coded_part.WORDS, coded_part.ESCAPES))
        begin = found[coded_part.STREAMS]
        these = slice(begin + own.start, begin + own.stop + 1)
        words_at[these] = index.words_at[these]
        spans.append((states + 4 * own.start, states + 4 * own.stop))
        spans.append((words + 2 * int(words_at[these][0]), words + 2 * int(words_at[these][-1])))
        count = found[coded_part.LISTED]
        numbers = by_window[windows_at[windows.start] : windows_at[windows.stop]].copy()
        assert 0 < len(numbers) < count, "there are escapes, here and elsewhere"
        by_window[first_listed : first_listed + count] = numbers[0]
        by_window[windows_at[windows.start] : windows_at[windows.stop]] = numbers
        first_listed += count
        spans += [(listed + 4 * i, listed + 4 * i + 4) for k in numbers for i in (int(k), count + int(k))]
    classes = np.full_like(index.classes, 255)
    classes[:, at] = index.classes[:, at]
    alone = replace(index, data=kept(index.data, spans), words_at=words_at, by_window=by_window, classes=classes)
    for tile, (order, y) in zip(stages.decode_sections(alone, at, torch.float32), want, strict=True):
        np.testing.assert_array_equal(tile.order, order)
        assert torch.equal(tile.y, y)


def test_a_tile_of_a_lossless_layer_touches_nothing_else(coded: Any) -> None:
    tokens, at = 1900, slice(512, 1024)
    _, blob = coded("lossless", tokens)
    stages, data = get_stages("numba"), read_section(blob, read_header(blob), 0)
    outputs = [[torch.zeros(512, 1, 8, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)]
    index = stages.index_layers([data], LAYOUT.layers[:1], torch.bfloat16, tokens)
    stages.decode_layers(index, slice(None), at, [dense_rows(outputs[0][0])], [dense_rows(outputs[0][1])], 0)
    found = index.found[0]
    n = 1 << found[coded_part.LOG2]
    own = slice(at.start // n, -(-at.stop // n))
    words_at = np.full_like(index.words_at, 1 << 31)
    words_at[own.start : own.stop + 1] = index.words_at[own.start : own.stop + 1]
    states, words = found[coded_part.STATES], found[coded_part.WORDS]
    spans = [(states + 4 * own.start, states + 4 * own.stop),
             (words + 2 * int(words_at[own.start]), words + 2 * int(words_at[own.stop]))]  # fmt: skip
    for coded_plane, begin, _, end in index.planes[0]:
        if coded_plane:
            spans.append((begin, end))
        else:
            spans += [(begin + c * tokens + at.start, begin + c * tokens + at.stop) for c in range(8)]
    alone = replace(index, data=kept(index.data, spans), words_at=words_at)
    stages.decode_layers(alone, slice(None), at, [dense_rows(outputs[1][0])], [dense_rows(outputs[1][1])], 0)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    want = chunk_of(tokens)
    assert torch.equal(outputs[1][0], want.keys[0][at]) and torch.equal(outputs[1][1], want.values[0][at])


@pytest.mark.parametrize("scheme", ["classes", "transform"])
def test_an_index_selects_what_a_scan_finds(coded: Any, learned: Profile, scheme: str) -> None:
    tokens = 1900
    codec, blob = coded(scheme, tokens)
    section = StepCoding(learned.learned, learned.family, codec.step_index).sections[0]
    part = read_part(read_section(blob, read_header(blob), 0), section.classed, tokens)
    indexed, n, ends = IndexedPart(part, tokens), part.tokens_per_stream, np.cumsum(part.streams.lengths)
    row, column = np.divmod(part.escapes.index.astype(np.int64), tokens)
    seen = 0
    for at in (slice(0, tokens), slice(0, 256), slice(256, 1024), slice(1792, tokens)):
        streams, escapes = indexed.select(at)
        own = slice(at.start // n, -(-at.stop // n))
        np.testing.assert_array_equal(streams.states, part.streams.states[own])
        np.testing.assert_array_equal(streams.lengths, part.streams.lengths[own])
        low = ends[own.start - 1] if own.start else 0
        np.testing.assert_array_equal(streams.words, part.streams.words[low : ends[own.stop - 1]])
        inside = (at.start <= column) & (column < at.stop)
        index = row[inside] * (at.stop - at.start) + column[inside] - at.start
        np.testing.assert_array_equal(escapes.index, index)
        np.testing.assert_array_equal(escapes.value, part.escapes.value[inside])
        seen += len(index)
    assert seen > len(part.escapes.index)
