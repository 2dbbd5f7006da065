"""Lossless means every bit, whatever the bits are; each implementation alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from tests.codec.reference import get_stages, stage_names
from tests.codec.reference.byte_planes import read_layer

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, FormatError
from cuvee.codec.format.container import inspect, read_header, read_section
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.stages.compiled.coded_part import joined
from cuvee.codec.stages.rows import Rows, dense_rows

DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("stored", "coded", "mixed", "keys", "steady")
SHAPES = {"few": (1, 3, 2), "usual": (2, 16, 16), "odd": (3, 17, 5), "deep": (4, 40, 24)}
TOKENS = (1, 17, 257, 513)
POISON = -1.5
ROPE = Rope(tuple(1e4 ** (-i / 4) for i in range(4)), attention_scaling=1.2)
KINDS_OF = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}  # of their bits


def layer_of(shape: str) -> LayerLayout:
    heads, size, other = SHAPES[shape]
    return LayerLayout(heads, size, other, None)


def values_of(dtype: str, kind: str, tokens: int, shape: str) -> list[torch.Tensor]:
    """Keys and values `[T, H, D]` whose planes are all stored, all coded, or some of each."""
    heads, *sizes = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    kind_of = KINDS_OF[dtype]
    low, high = (-(1 << 15), 1 << 15) if kind_of == torch.int16 else (-(1 << 31), 1 << 31)
    out = []
    for unit, size in enumerate(sizes):
        noise = torch.randint(low, high, (tokens, heads, size), generator=generator).to(kind_of)
        if kind == "coded":  # few values in each byte
            noise = noise & (0x0303 if kind_of == torch.int16 else 0x03030303)
        elif kind == "steady":
            noise = torch.full_like(noise, 0x3F80)
            noise[::7] += 1
        elif kind == "mixed" or (kind == "keys" and unit == 0):
            noise = torch.randn(tokens, heads, size, generator=generator).to(getattr(torch, dtype)).view(kind_of)
        out.append(noise.view(getattr(torch, dtype)))
    return out


@cache
def coded(dtype: str, kind: str, tokens: int, shape: str = "usual") -> tuple[bytes, tuple[torch.Tensor, ...]]:
    """The section of a layer, and what it holds."""
    layout = KVLayout("synthetic", (layer_of(shape),), dtype, None)
    keys, values = values_of(dtype, kind, tokens, shape)
    blob = Codec(Profile.unlearned(layout), "lossless", threads=1).encode(KVChunk([keys], [values], layout))
    return bytes(read_section(blob, read_header(blob), 0)), (keys, values)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def outputs(dtype: str, shape: str, rows: int) -> list[torch.Tensor]:
    heads, *sizes = SHAPES[shape]
    return [torch.full((rows, heads, size), POISON, dtype=getattr(torch, dtype)) for size in sizes]


def decode(
    name: str, data: bytes | memoryview, dtype: str, shape: str, tokens: int, at: slice, rows: Sequence[Rows | None],
    first_row: int,
) -> None:  # fmt: skip
    view, (keys, values) = memoryview(data), rows
    stages = get_stages(name)
    index = stages.index_layers([view], [layer_of(shape)], getattr(torch, dtype), tokens)
    stages.decode_layers(index, slice(None), at, [keys], [values], first_row)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_a_layer_comes_back(dtype: str, kind: str, tokens: int) -> None:
    for shape in SHAPES:
        data, want = coded(dtype, kind, tokens, shape)
        for name in stage_names() if tokens in (17, 257) and shape != "deep" else ("numba",):
            got = outputs(dtype, shape, tokens)
            decode(name, data, dtype, shape, tokens, slice(0, tokens), [dense_rows(x) for x in got], 0)
            for mine, theirs in zip(got, want, strict=True):
                assert torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [16, 3])
def test_words_joined_sixteen_at_a_time_are_the_reference(heads: int, dtype: torch.dtype) -> None:
    """Stored low bytes and coded high bytes, as models give them."""
    layout = KVLayout("synthetic", (LayerLayout(heads, 64, 32, None),), str(dtype).removeprefix("torch."), None)
    codec = {name: Codec(Profile.unlearned(layout), "lossless", threads=1, backend=name) for name in stage_names()}
    for tokens in (16, 17, 47, 257):
        draw = torch.Generator().manual_seed(tokens)
        units = [torch.randn(2 * tokens, heads + 1, size, generator=draw).to(dtype) for size in (64, 32)]
        keys, values = ([unit[::2, 1:]] for unit in units)  # neither tokens nor heads are adjacent
        chunk = KVChunk(keys, values, layout)
        blob = codec["numba"].encode(chunk)
        assert codec["reference"].encode(chunk) == blob
        part = read_layer(
            memoryview(read_section(blob, read_header(blob), 0)), layout.layers[0], dtype.itemsize, tokens
        )
        assert [model is not None for model in part.models] == ([False] * (dtype.itemsize - 1) + [True]) * 2
        for span in (range(tokens), range(3, tokens - 2), range(tokens - 9, tokens)):
            back = codec["numba"].decode(blob, tokens=span)
            for mine, own in zip(back.keys + back.values, chunk.keys + chunk.values, strict=True):
                assert torch.equal(bits(mine), bits(own[span.start : span.stop]))
        for first in (0, 5):  # adjacent tokens of a transposed cache, whose blocks end within sixteen of them, or not
            slots = torch.arange(first, first + tokens)
            slots[20:21] = NOWHERE
            memory = [torch.full((18, heads, size, 16), POISON).to(dtype) for size in (64, 32)]
            expected = [unit.clone() for unit in memory]
            pages, same = (
                PagedCache(layout, [units[0].permute(0, 3, 1, 2)], [units[1].permute(0, 3, 1, 2)])
                for units in (memory, expected)
            )
            codec["numba"].decode_paged([blob], pages, [slots]).check()
            same.write(chunk.keys, chunk.values, slots)
            for mine, own in zip(memory, expected, strict=True):
                assert torch.equal(bits(mine), bits(own))


def one_layer(dtype: str, heads: int, size: int, rope: Rope | None = None) -> KVLayout:
    return KVLayout("synthetic", (LayerLayout(heads, size, size, rope),), dtype, 4096)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 11.2), ("float16", 14.5), ("float32", 27.5)])
def test_channels_of_different_scales_share_a_table(dtype: str, limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layout = one_layer(dtype, 2, 64)
    spread = 2.0 ** torch.linspace(-6, 6, 128).view(2, 64)
    keys, values = ((torch.randn(512, 2, 64, generator=generator) * spread).to(layout.torch_dtype) for _ in range(2))
    blob = Codec(Profile.unlearned(layout), "lossless").encode(KVChunk([keys], [values], layout))
    assert inspect(blob).bits_per_value <= limit


LAYERS = [
    ("usual", "mixed"), ("few", "coded"), ("odd", "stored"), ("deep", "mixed"), ("usual", "steady"), ("odd", "keys"),
]  # fmt: skip


def blob_of(tokens: int) -> tuple[bytearray, list[slice], list[tuple[torch.Tensor, ...]]]:
    """The sections of `LAYERS`, one after the other as in a blob; where each is; and what they hold."""
    blob, places, units = bytearray(b"xyz"), [], []
    for shape, kind in LAYERS:
        data, own = coded("bfloat16", kind, tokens, shape)
        places.append(slice(len(blob), len(blob) + len(data)))
        blob += data
        units.append(own)
    return blob, places, units


def decode_several(name: str, sections: list[memoryview], tokens: int, at: slice) -> list[list[torch.Tensor]]:
    got = [outputs("bfloat16", shape, at.stop - at.start) for shape, _ in LAYERS]
    stages = get_stages(name)
    index = stages.index_layers(sections, [layer_of(shape) for shape, _ in LAYERS], torch.bfloat16, tokens)
    keys, values = ([dense_rows(own[unit]) for own in got] for unit in range(2))
    for which in (slice(0, 4), slice(4, None)):
        stages.decode_layers(index, which, at, keys[which], values[which], 0)
    return got


@pytest.mark.parametrize(("tokens", "at"), [(17, slice(0, 17)), (257, slice(0, 257)), (513, slice(256, 512))])
def test_layers_decoded_together_come_back(tokens: int, at: slice) -> None:
    """Few streams and many, stored layers among coded ones, and layers of several shapes."""
    blob, places, want = blob_of(tokens)
    of_blob = [memoryview(blob)[place] for place in places]
    assert np.shares_memory(joined(of_blob)[0], np.frombuffer(blob, np.uint8)), "nothing is copied"
    given = bytearray(blob)
    assert not joined([memoryview(given)[place] for place in places])[0].flags.writeable, "the loops are those of bytes"
    apart = [memoryview(bytes(section)) for section in of_blob]
    for name in stage_names():
        for sections in (of_blob, of_blob[:5] + apart[5:]):
            for mine, theirs in zip(decode_several(name, sections, tokens, at), want, strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    assert torch.equal(bits(one), bits(other[at]))


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_a_damaged_layer_among_others_is_found(layer: int) -> None:
    blob, places, _ = blob_of(257)
    shape, _ = LAYERS[layer]
    data = blob[places[layer]]
    part = read_layer(memoryview(data), layer_of(shape), 2, 257).part
    assert part is not None
    streams, errors = len(part.streams.states), []
    stream = streams - 1
    blob[places[layer].start + data.rindex(part.streams.words.astype("<u2").tobytes())
         + 2 * int(part.streams.lengths[:stream].sum())] ^= 0x10  # fmt: skip
    for name in stage_names():
        with pytest.raises(CorruptError) as raised:
            decode_several(name, [memoryview(blob)[place] for place in places], 257, slice(0, 257))
        errors.append(str(raised.value))
    assert errors[0] == errors[1] and f"stream {stream} of {streams} " in errors[0]
    blob[places[layer].start] = 2
    for name in stage_names():
        with pytest.raises(FormatError, match="mode"):
            decode_several(name, [memoryview(blob)[place] for place in places], 257, slice(0, 257))
