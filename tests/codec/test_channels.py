"""Channels that are coded one by one: the compiled decoder against the reference, also with damaged bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.coding_plan import ESCAPE
from cuvee.codec.errors import CorruptError, FormatError
from cuvee.codec.format.container import Reader, read_coded, read_header, read_section
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.sections import partition
from cuvee.codec.stages.implementations import get_stages, stage_names
from cuvee.codec.stages.reference.channels import ChannelIndex
from cuvee.codec.stages.reference.rans import rans_decode
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows, dense_rows
from cuvee.codec.support.arrays import U8

POISON = -1.5
TILES = (0, 256), (256, 513)
TOKENS = (1, 15, 16, 17, 130, 256, 513)
CPU = torch.device("cpu")


def rope_of(pairs: int, interleaved: bool = False) -> Rope:
    return Rope(tuple(1e4 ** (-i / pairs) for i in range(pairs)), interleaved=interleaved)


ROPES = {"none": None, "all": rope_of(16), "some": rope_of(8), "odd": rope_of(5), "interleaved": rope_of(8, True)}
SHAPES = {"usual": (2, 32, 32), "odd": (3, 33, 5), "one": (1, 40, 24)}


def layout_of(dtype: str = "bfloat16", rope: str = "all", shape: str = "usual") -> KVLayout:
    heads, size, other = SHAPES[shape]
    return KVLayout("synthetic", (LayerLayout(heads, size, other, ROPES[rope]),), dtype, None)


def chunk_of(layout: KVLayout, tokens: int, kind: str) -> KVChunk:
    """A chunk of noise around a mean per channel. In some, channels are constant, and a few values escape."""
    draw = torch.Generator().manual_seed(tokens)
    units = []
    for size in (layout.layers[0].head_dim, layout.layers[0].value_dim):
        x = torch.randn(tokens, layout.layers[0].kv_heads, size, generator=draw)
        x = x * 2.0 ** torch.randint(-3, 3, x.shape[1:], generator=draw) + torch.randn(x.shape[1:], generator=draw)
        if kind == "zeros":
            x = torch.zeros_like(x)
        elif kind != "plain":
            x[:, 0, 1::3] = 2.0
            x[tokens // 2, 0, :2] += 300.0
            x[-1, -1, -1] -= 200.0
        units.append(x.to(layout.torch_dtype))
    return KVChunk([units[0]], [units[1]], layout, 7)


@cache
def coded(layout: KVLayout, tokens: int, kind: str = "mixed", step: float = 0.25) -> tuple[bytes, int]:
    """The section of a layer, and its step index."""
    blob = Codec(Profile.generic(layout), step=step, threads=1).encode(chunk_of(layout, tokens, kind))
    header = read_header(blob)
    return bytes(read_section(blob, header, 0)), header.step_index


def decode(
    name: str, data: bytes, step_index: int, layout: KVLayout, tokens: int, rows: Sequence[Rows], first_row: int = 0,
    at: slice | None = None,
) -> None:  # fmt: skip
    stages = get_stages(name)
    (section,) = partition(layout, "unit")
    family = Profile.generic(layout).family
    index = stages.index_channels(memoryview(data), section, 0, family, step_index, tokens)
    rotation = Rotation(100, len(rows[0].begins), CPU)
    keys, values = ([own] for own in rows)
    stages.decode_channels(index, at or slice(0, tokens), section, layout, rotation, first_row, keys, values)


def decoded(
    name: str, data: bytes, step_index: int, layout: KVLayout, tokens: int, rows: int | None = None,
    first_row: int = 0, at: slice | None = None, skipped: Sequence[int] = (),
) -> list[torch.Tensor]:  # fmt: skip
    """Keys and values as a backend decodes them, between other values."""
    heads, sizes = layout.layers[0].kv_heads, (layout.layers[0].head_dim, layout.layers[0].value_dim)
    out = [torch.full((rows or tokens, heads + 1, size + 3), POISON, dtype=layout.torch_dtype) for size in sizes]
    to = [dense_rows(unit[:, :heads, :size]) for unit, size in zip(out, sizes, strict=True)]
    for own in to:
        own.begins[list(skipped)] = -1
    decode(name, data, step_index, layout, tokens, to, first_row, at)
    return out


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def planes_of(data: bytes, layout: KVLayout, tokens: int, step_index: int) -> tuple[ChannelIndex, U8]:
    (section,) = partition(layout, "unit")
    family = Profile.generic(layout).family
    index = get_stages("reference").index_channels(memoryview(data), section, 0, family, step_index, tokens)
    part = index.part.part
    return index, rans_decode(part.streams, index.plan.tables, family.tables, part.tokens_per_stream, tokens)


# --- what is sound


@pytest.mark.parametrize("kind", ["plain", "mixed", "zeros"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_tiles_are_those_of_the_reference(tokens: int, kind: str) -> None:
    for step in (0.25, 0.004):  # the finer of the two has planes of low bits
        data, index = coded(layout_of(), tokens, kind, step)
        got, want = (decoded(name, data, index, layout_of(), tokens) for name in stage_names())
        same(got, want)
        for unit in got:
            assert not bool((unit[:, :-1, :-3] == POISON).all(-1).any()), "not written"
            assert bool((unit[:, -1] == POISON).all() and (unit[..., -3:] == POISON).all()), "written beside"


def test_the_cases_have_low_bits_and_escapes_and_channels_that_are_not_coded() -> None:
    for step in (0.25, 0.004):
        data, index = coded(layout_of(), 130, "mixed", step)
        read, planes = planes_of(data, layout_of(), 130, index)
        rows, wide = len(read.plan.shift), read.plan.shift > 0
        escaped = (planes[:rows] == ESCAPE).any(1)
        assert 60 < rows < layout_of().values_per_token
        assert bool((escaped & ~wide).any() if step == 0.25 else (escaped & wide).any())
    data, index = coded(layout_of(), 130, "zeros")
    assert not len(planes_of(data, layout_of(), 130, index)[0].plan.shift)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_layout_is_decoded_alike(dtype: str, rope: str, shape: str) -> None:
    layout = layout_of(dtype, rope, shape)
    for step in (0.25, 0.004):
        data, index = coded(layout, 70, "mixed", step)
        same(*(decoded(name, data, index, layout, 70, skipped=(3, 69)) for name in stage_names()))


@pytest.mark.parametrize(("first_row", "rows"), [(0, 40), (-20, 300), (5, 600), (-200, 10)])
def test_only_rows_that_are_there_are_written(first_row: int, rows: int) -> None:
    layout, tokens = layout_of(), 513
    data, index = coded(layout, tokens)
    for at in (slice(0, 256), slice(256, 513)):
        got, want = (
            decoded(name, data, index, layout, tokens, rows, first_row, at, skipped=(1, rows - 1))
            for name in ("numba", "reference")
        )
        same(got, want)
        there = [row for row in range(rows) if 0 <= row - first_row < at.stop - at.start and row not in (1, rows - 1)]
        written = (got[0][:, :-1, :-3] != POISON).any(-1).any(-1).nonzero()[:, 0].tolist()
        assert written == there


@pytest.mark.parametrize("rope", ["all", "interleaved"])
def test_permuted_rows_are_written_alike(rope: str) -> None:
    layout, tokens = layout_of(rope=rope), 70
    data, index = coded(layout, tokens)
    results = []
    for name in stage_names():
        rows = []
        for size in (32, 32):
            memory = torch.full((tokens * 2 * size * 2,), POISON, dtype=torch.bfloat16)
            places = torch.randperm(2 * size * 2, generator=torch.Generator().manual_seed(size))[: 2 * 2 * size]
            offsets = places.view(2, 2, size).numpy()  # two kinds of rows
            begins = np.arange(tokens, dtype=np.int64) * 2 * size * 2
            rows.append(Rows(memory, begins, 0, 2, size, offsets, np.arange(tokens) % 2))
        decode(name, data, index, layout, tokens, rows)
        results.append([own.memory for own in rows])
    same(*results)


def test_what_a_chunk_loses_is_bounded_by_its_step() -> None:
    layout = layout_of("float32", "none")
    chunk = chunk_of(layout, 130, "mixed")
    data, index = coded(layout, 130, "mixed", 0.25)
    for back, own in zip(decoded("numba", data, index, layout, 130), (chunk.keys[0], chunk.values[0]), strict=True):
        error = (back[:, :-1, :-3] - own).abs()
        unit = float((own - own.mean(0)).square().mean().sqrt())
        assert float(error.max()) < 0.25 * unit * 1.1


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_chunks_are_encoded_alike(dtype: str, shape: str) -> None:
    for tokens in TOKENS:
        for rope, kind, step in (("all", "mixed", 0.25), ("some", "mixed", 0.004), ("interleaved", "zeros", 0.25)):
            layout = layout_of(dtype, rope, shape)
            blobs = [
                Codec(Profile.generic(layout), step=step, backend=name, threads=1).encode(
                    chunk_of(layout, tokens, kind)
                )
                for name in stage_names()
            ]
            assert blobs[0] == blobs[1], (tokens, rope)


@pytest.mark.parametrize("channels", [1, 15, 16, 33])
@pytest.mark.parametrize("tokens", [1, 15, 16, 50])
def test_channels_are_centered_and_normalized_alike(tokens: int, channels: int) -> None:
    draw = torch.Generator().manual_seed(channels)
    x = torch.randn(tokens, channels, generator=draw) * 1e20 + 3e20  # squares beyond float32
    scale = torch.rand(channels, generator=draw).numpy() + np.float32(0.5)
    live = np.flatnonzero(np.arange(channels) % 3 != 1)
    results = []
    for name in stage_names():
        own, stages = x.clone(), get_stages(name)
        mean, deviation = stages.center_channels(own)
        assert deviation.dtype == np.float64 and np.isfinite(deviation).all()
        np.testing.assert_allclose(deviation, own.double().square().mean(0).sqrt().numpy(), rtol=1e-12)
        results.append((mean, own.numpy().copy(), stages.normalized_channels(own, scale, live).copy()))
        assert results[-1][2].shape == (len(live), tokens)
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(got, want)


# --- what is not


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1, 0, -128, 127])
def test_hostile_escape_values_come_out_alike(value: int) -> None:
    layout, tokens = layout_of(), 130
    for step in (0.25, 0.004):
        data, index = coded(layout, tokens, "mixed", step)
        read, _ = planes_of(data, layout, tokens, index)
        escapes = len(read.part.part.escapes.index)
        hostile = data[: -4 * escapes] + struct.pack("<i", value) * escapes
        same(*(decoded(name, hostile, index, layout, tokens) for name in stage_names()))


@pytest.mark.parametrize("change", ["one fewer", "another place", "one more", "of another tile"])
def test_escapes_that_do_not_match_are_found_out(change: str) -> None:
    layout, tokens = layout_of(), 513
    data, step_index = coded(layout, tokens)
    (section,) = partition(layout, "unit")
    read, _ = planes_of(data, layout, tokens, step_index)
    escapes = read.part.part.escapes
    index, values = escapes.index.tolist(), escapes.value.tolist()
    begin = len(data) - 8 * len(index)
    if change == "one fewer":
        index, values = index[1:], values[1:]
    elif change == "another place":
        index[0] += 1
    elif change == "one more":
        index, values = [0, *index], [5, *values]
    else:
        index[0] -= index[0] % tokens  # the same row, token 0
    head = bytearray(data[:begin])
    coded_at = len(data) - len(bytes(_coded_part(data, section.blocks)))
    head[coded_at + 4 : coded_at + 8] = struct.pack("<I", len(index))
    damaged = bytes(head) + struct.pack(f"<{len(index)}I{len(values)}i", *index, *values)
    refused = {name: [tile for tile in TILES if refuses(name, damaged, step_index, layout, tokens, tile)] for name in
               stage_names()}  # fmt: skip
    assert refused["numba"] == refused["reference"] and refused["numba"]
    if change == "of another tile":
        assert refused["numba"] == list(TILES)


def refuses(name: str, data: bytes, step_index: int, layout: KVLayout, tokens: int, tile: tuple[int, int]) -> bool:
    """Whether a backend refuses the tile because of its escapes."""
    try:
        decoded(name, data, step_index, layout, tokens, 257, 0, slice(*tile))
    except CorruptError as error:
        return "escape" in str(error)
    return False


def _coded_part(data: bytes, blocks: tuple[int, ...]) -> bytes:
    side = sum(2 + 3 * size for size in blocks)
    return data[side + -side % 4 :]


# Of the layout "odd": where a unit's scale, means, and scale codes begin, and where the padding is.
SIDE = {"scale": (0, 2 + 297), "mean": (2, 2 + 297 + 2), "code": (2 + 198, 2 + 297 + 2 + 30), "padding": (346, 347)}
REFUSED = [("scale", struct.pack("<h", value)) for value in (126 * 64 + 1, -126 * 64 - 1, 2**15 - 1, -(2**15))]
REFUSED += [("mean", struct.pack("<H", bits)) for bits in (0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF)]
REFUSED += [("code", bytes([code])) for code in (57, 128, 254)] + [("padding", b"\1"), ("padding", b"\x80")]


@pytest.mark.parametrize(("what", "value"), REFUSED)
@pytest.mark.parametrize("unit", [0, 1])
def test_side_information_that_no_encoder_writes_is_refused(unit: int, what: str, value: bytes) -> None:
    layout = layout_of("bfloat16", "some", "odd")
    data, index = coded(layout, 70)
    at = SIDE[what][unit]
    damaged = data[:at] + value + data[at + len(value) :]
    for name in stage_names():
        with pytest.raises(FormatError) as caught:
            decoded(name, damaged, index, layout, 70)
        assert not isinstance(caught.value, CorruptError)


def test_sections_that_end_too_early_or_too_late_are_refused() -> None:
    layout = layout_of("bfloat16", "some", "odd")
    data, index = coded(layout, 70)
    for section in [data[:length] for length in (0, 1, 2, 150, 299, 300, 346, 347, 348, 359)] + [data + bytes(4)]:
        for name in stage_names():
            with pytest.raises(FormatError):
                decoded(name, section, index, layout, 70)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_sections_are_refused_or_decoded_alike(draw: st.DataObject) -> None:
    tokens = draw.draw(st.sampled_from([1, 17, 70, 256]))
    step = draw.draw(st.sampled_from([0.25, 0.004]))
    layout = layout_of(shape=draw.draw(st.sampled_from(list(SHAPES))), rope="some")
    data, index = coded(layout, tokens, draw.draw(st.sampled_from(["plain", "mixed", "zeros"])), step)
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        damaged[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.sampled_from([0, 0, 0, 1, 4, 40]))
    section = bytes(damaged[: len(damaged) - cut])
    outcomes: list[list[torch.Tensor] | type[Exception]] = []
    for name in stage_names():
        try:
            outcomes.append(decoded(name, section, index, layout, tokens))
        except (FormatError, CorruptError) as error:
            outcomes.append(type(error))
    first, second = outcomes
    if isinstance(first, list) and isinstance(second, list):
        same([unit.nan_to_num() for unit in first], [unit.nan_to_num() for unit in second])
    else:
        assert first == second


def test_a_plan_is_read_with_its_section() -> None:
    """The tests above damage what the format says is there: side information, then the coded part."""
    layout = layout_of()
    data, index = coded(layout, 130)
    (section,) = partition(layout, "unit")
    read, _ = planes_of(data, layout, 130, index)
    reader = Reader(memoryview(_coded_part(data, section.blocks)))
    part = read_coded(reader, read.plan.planes, len(read.plan.shift), 130)
    reader.finish()
    assert np.array_equal(part.escapes.index, read.part.part.escapes.index)
