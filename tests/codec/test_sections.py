"""Coded sections to coefficients: the compiled decoder against the reference."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.planned import Planned, coding_of, decode, planned, same
from tests.codec.reference import get_stages, rans, stage_names
from tests.codec.reference.sections import read_part
from tests.codec.reference.token_order import coding_order

from cuvee.codec.entropy.coding_plan import MAX_LEVEL
from cuvee.codec.entropy.family import default_family
from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL, SectionPlanes
from cuvee.codec.errors import CorruptError, FormatError, InputError
from cuvee.codec.format.coded_part import write_coded
from cuvee.codec.format.streams import WINDOW, Escapes
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.schemes.coefficients import PackedSection, encode_sections
from cuvee.codec.stages.columns import Coefficients, class_runs
from cuvee.codec.support.arrays import F32, U8

FAMILY = default_family()
TOKENS = (1, 17, 257, 513)
# Scales of the components of each block. "deep" has more rows than are padded to; "few" is one stream of many tokens.
SCALES: dict[str, tuple[tuple[int, ...], ...]] = {
    "deep": (tuple(range(300, -300, -15)),),
    "blocks": (tuple(range(200, -200, -40)), tuple(range(500, -700, -30)), (40, -90)),
    "wide": (tuple(range(760, 0, -80)),),
    "few": ((20,),),
    "none": ((-3000, -3000),),
    "uneven": ((-3000,), tuple(range(100, -200, -30))),
}
KINDS = ("classes", "neutral")  # tokens of many classes, and all of the neutral one


def columns_of(section: Planned, columns: U8, scales: tuple[tuple[int, ...], ...], seed: int) -> F32:
    """`[R, T]` coefficients of columns of these classes; some of them are far too large."""
    rng = np.random.default_rng(seed)
    y = np.zeros((int(section.classed.rows.max()), len(columns)), np.float32)
    for run, k in class_runs(columns):
        ranks = section.class_ranks[k]
        scale = np.concatenate([np.array(block[:rank], np.float64) for block, rank in zip(scales, ranks, strict=True)])
        own = rng.standard_normal((len(scale), run.stop - run.start)) * np.exp2(scale / 64)[:, None]
        own[rng.random(own.shape) < 0.01] *= 1000  # escapes
        y[: len(scale), run] = own
    limit = np.float32(0.9 * MAX_LEVEL * section.classed.steps[columns].min(initial=1e9))
    return np.clip(y, -limit, limit)


def encoded(section: Planned, classes: U8, y: F32, name: str = "numba") -> bytes:
    """The section of tokens of these classes, given the coefficients of its columns."""
    columns = classes[coding_order(classes)]
    packed = PackedSection(cast(SectionCoding, section), FAMILY, get_stages(name), len(classes))
    for at in tiles_of(len(classes), WINDOW):
        packed.add(classes[at], columns[at], np.ascontiguousarray(y[:, at]))
    return encode_sections([packed], FAMILY, get_stages(name))[0]


@cache
def coded(name: str, kind: str, tokens: int) -> tuple[Planned, bytes, F32, U8]:
    """A section, its bytes, what they hold (columns in coding order), and the classes of the tokens."""
    scales = SCALES.get(name, ((-150,) * 512,))
    section = planned(scales)
    rng = np.random.default_rng(tokens)
    classes = np.full(tokens, NEUTRAL, np.uint8)
    if kind == "classes":
        classes = np.clip(np.rint(rng.normal(8, 3, tokens)), section.classed.finest, CLASSES - 1).astype(np.uint8)
    y = columns_of(section, classes[coding_order(classes)], scales, tokens)
    return section, encoded(section, classes, y), y, classes


def check_close(tile: Coefficients, section: Planned, y: F32, classes: U8, at: slice) -> None:
    """The tile holds what was coded, within the quantizer's error."""
    got, order = tile.y.float().numpy(), coding_order(classes[at])
    np.testing.assert_array_equal(tile.order, order)
    np.testing.assert_array_equal(tile.classes, classes[at][order])
    assert len(got) == len(section.class_ranks[0])
    for run, k in class_runs(tile.classes):
        row, unit = 0, float(section.classed.steps[k])
        for block, rank in zip(got, section.class_ranks[k], strict=True):
            source = y[row : row + rank, at][:, run]
            # The dead zone of the default family is 0.6; float32 cannot hold more of a large level.
            assert np.all(np.abs(block[:rank, run] - source) <= 0.65 * unit + 1e-6 * np.abs(source))
            assert not block[rank:, run].any()
            row += rank


def tiles_of(tokens: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]


@pytest.mark.parametrize("tokens", TOKENS)
def test_all_sections_at_once_are_the_references(tokens: int) -> None:
    """Deep and shallow, wide and empty ones, with escapes, of many classes and of one, in a call."""
    made = [coded(name, kind, tokens) for name, kind in product(SCALES, KINDS)]
    coding = coding_of([section for section, *_ in made])
    parts = [(number, data) for number, (_, data, _, _) in enumerate(made)][::-1]
    whole = decode("numba", coding, parts, tokens)
    same(whole, decode("reference", coding, parts, tokens))
    for (number, _), tile in zip(parts, whole, strict=True):
        section, _, y, classes = made[number]
        check_close(tile, section, y, classes, slice(0, tokens))
    # Rounded to the dtype of matrix instructions, which is done elsewhere in the loop.
    narrow = decode("numba", coding, parts, tokens, dtype=torch.bfloat16)
    rounded = [Coefficients(tile.order, tile.classes, tile.y.bfloat16()) for tile in whole]
    same(narrow, rounded)
    if tokens == 257:
        same(narrow, decode("reference", coding, parts, tokens, dtype=torch.bfloat16))
    # Each alone gives what it gives among the others.
    for part, tile in zip(parts, whole, strict=True):
        same(decode("numba", coding, [part], tokens), [tile])


@pytest.mark.parametrize("tokens", [1, 257, 700])
def test_both_encoders_write_the_same_bytes(tokens: int) -> None:
    for name, kind in product(SCALES, KINDS):
        section, data, y, classes = coded(name, kind, tokens)
        assert encoded(section, classes, y, "reference") == data


@pytest.mark.parametrize(("name", "log2"), [("blocks", 0), ("blocks", 3), ("blocks", 7), ("many", 7)])
def test_streams_of_any_length_are_decoded(name: str, log2: int) -> None:
    """Other encoders may choose other lengths; of 128 tokens with 512 planes, lengths take four bytes."""
    section, data, _, classes = coded(name, "classes", 257)
    part, columns = read_part(memoryview(data), section.classed, 257), classes[coding_order(classes)]
    planes = rans.rans_decode(part.streams, columns, section.classed, FAMILY.tables, part.tokens_per_stream)
    (streams,) = rans.rans_encode([SectionPlanes(planes, columns, section.classed, 1 << log2)], FAMILY.tables)
    other = replace(part, streams=streams, tokens_per_stream=1 << log2)
    parts = [(0, write_coded(other, int(section.classed.planes.max())))]
    want = decode("reference", coding_of([section]), [(0, data)], 257)
    for stages in stage_names():
        same(decode(stages, coding_of([section]), parts, 257), want)


def test_a_word_that_goes_to_the_next_stream_is_missed() -> None:
    """The lengths still add up, and the next stream, which needs no word, ends in the right state."""
    section, data, _, classes = coded("few", "neutral", 257)
    part, columns = read_part(memoryview(data), section.classed, 257), classes[coding_order(classes)]
    planes = rans.rans_decode(part.streams, columns, section.classed, FAMILY.tables, part.tokens_per_stream)
    (streams,) = rans.rans_encode([SectionPlanes(planes, columns, section.classed, 8)], FAMILY.tables)
    at = int(np.flatnonzero((streams.lengths[:-1] > 0) & (streams.lengths[1:] == 0))[0])
    streams.lengths[at : at + 2] += np.array([-1, 1]).astype(np.uint32)
    other = replace(part, streams=streams, tokens_per_stream=8)
    parts = [(0, write_coded(other, int(section.classed.planes.max())))]
    for name in stage_names():
        with pytest.raises(CorruptError, match="does not end where it must"):
            decode(name, coding_of([section]), parts, 257)


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(-400, 700), min_size=1, max_size=12), min_size=1, max_size=3),
    tokens=st.integers(1, 600),
    step=st.integers(-60, 200),
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_plan_is_the_references(
    blocks: list[list[int]], tokens: int, step: int, seed: int, dtype: torch.dtype
) -> None:
    scales = tuple(tuple(sorted(block, reverse=True)) for block in blocks)
    section, rng = planned(scales, step), np.random.default_rng(seed)
    low = int(rng.integers(section.classed.finest, CLASSES))
    classes = rng.integers(low, int(rng.integers(low, CLASSES)) + 1, tokens).astype(np.uint8)
    y = columns_of(section, classes[coding_order(classes)], scales, seed)
    data, coding = encoded(section, classes, y), coding_of([section])
    at = tiles_of(tokens, WINDOW)[int(rng.integers(0, -(-tokens // WINDOW)))]
    for part in (slice(0, tokens), at, slice(at.start, tokens)):
        (got,) = decode("numba", coding, [(0, data)], tokens, part, dtype)
        same([got], decode("reference", coding, [(0, data)], tokens, part, dtype))
        if dtype == torch.float32:
            check_close(got, section, y, classes, part)


def test_a_run_of_tokens_touches_only_its_windows() -> None:
    section, data, _, _ = coded("deep", "classes", 1000)
    coding = coding_of([section])
    (whole,) = decode("numba", coding, [(0, data)], 1000)
    part = read_part(memoryview(data), section.classed, 1000)
    streams, n = part.streams, part.tokens_per_stream
    first, end = (int(streams.lengths[: window * WINDOW // n].sum()) for window in (1, 2))
    streams.words[:first] ^= 0x5555  # words of other windows may be anything
    streams.words[end:] ^= 0x5555
    damaged = write_coded(part, int(section.classed.planes.max()))
    assert len(damaged) == len(data)
    (again,) = decode("numba", coding, [(0, damaged)], 1000, slice(256, 512))
    np.testing.assert_array_equal(again.order + 256, whole.order[256:512])
    assert torch.equal(again.y, whole.y[:, : again.y.shape[1], 256:512])
    with pytest.raises(CorruptError, match="does not end where it must"):
        decode("numba", coding, [(0, damaged)], 1000)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0 * MAX_LEVEL])
def test_values_too_large_for_their_class_are_refused(value: float) -> None:
    section, y = planned(((60, 40, 20),)), np.zeros((3, 2), np.float32)
    y[0, 1] = value
    for name in stage_names():
        with pytest.raises(InputError, match="lossless"):
            encoded(section, np.array([0, NEUTRAL], np.uint8), y, name)


# --- damaged bytes: `test_hostile.py` breaks each rule and flips each byte; here is what only several sections have


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1, 1 << 24, 0, -1])
def test_hostile_escape_values_come_out_alike(kind: str, value: int) -> None:
    for name in ("blocks", "wide"):
        section, data, _, _ = coded(name, kind, 257)
        part = read_part(memoryview(data), section.classed, 257)
        hostile = Escapes(part.escapes.index, np.full_like(part.escapes.value, value))
        bad = write_coded(replace(part, escapes=hostile), int(section.classed.planes.max()))
        for dtype in (torch.float32, torch.bfloat16):
            tiles = [decode(one, coding_of([section]), [(0, bad)], 257, dtype=dtype) for one in ("numba", "reference")]
            same(*tiles)


# The numbers at the head of a coded part, and its first state.
@pytest.mark.parametrize("at", [0, 4, 8, 9, 12, 16, 20])
def test_the_damaged_one_of_several_sections_is_named(at: int) -> None:
    """Whatever is wrong with one section, the other ones do not hide it."""
    made = [coded(name, "classes", 257) for name in ("few", "deep", "blocks")]
    coding = coding_of([section for section, *_ in made])
    for number in range(3):
        bad = bytearray(made[number][1])
        bad[at] ^= 0x55
        parts = [(i, bytes(bad) if i == number else own) for i, (_, own, _, _) in enumerate(made)]
        messages = []
        for name in ("numba", "reference"):
            with pytest.raises(FormatError) as caught:
                decode(name, coding, parts, 257)
            messages.append((type(caught.value), re.sub(r"stream \d+", "stream N", str(caught.value))))
        assert messages[0] == messages[1]
