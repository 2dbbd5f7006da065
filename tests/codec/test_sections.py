"""Coded sections to coefficients: the compiled decoder against the reference, also with damaged bytes."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.planned import Planned, coding_of, decode, encode_plain, planned, same

from cuvee.codec.entropy.coding_plan import MAX_LEVEL, Escapes
from cuvee.codec.entropy.coefficients import ClassedSection, CoefficientCoder
from cuvee.codec.entropy.family import default_family, step_value
from cuvee.codec.entropy.token_classes import CLASSES, WINDOW
from cuvee.codec.errors import CorruptError, FormatError
from cuvee.codec.format.coded_part import write_streams
from cuvee.codec.stages.implementations import get_stages
from cuvee.codec.stages.reference.sections import Coefficients, padded, read_part
from cuvee.codec.stages.reference.symbols_by_class import class_runs
from cuvee.codec.stages.reference.token_order import coding_order, dealt_order
from cuvee.codec.support.arrays import F32, U8

ROOT = Path(__file__).parents[2]
FAMILY = default_family()
TOKENS = (1, 15, 16, 17, 255, 256, 257, 500, 513)
# Scales of the components of each block. "deep" has more rows than are padded to; "few" is one stream of many tokens.
SCALES: dict[str, tuple[tuple[int, ...], ...]] = {
    "deep": (tuple(range(300, -300, -15)),),
    "blocks": (tuple(range(200, -200, -40)), tuple(range(500, -700, -30)), (40, -90)),
    "wide": (tuple(range(760, 0, -80)),),
    "few": ((20,),),
    "none": ((-3000, -3000),),
    "uneven": ((-3000,), tuple(range(100, -200, -30))),
}
KINDS = ("classes", "plain")
# In the process of `test_compiled_loops_stay_within_their_arrays`.
BOUNDS_CHECKED = os.environ.get("NUMBA_BOUNDSCHECK") == "1"


def columns_of(section: Planned, classes: U8, scales: tuple[tuple[int, ...], ...], seed: int, step: int) -> F32:
    """`[R, T]` coefficients of columns of these classes; some of them are far too large."""
    rng = np.random.default_rng(seed)
    y = np.zeros((int(section.classed.rows.max()), len(classes)), np.float32)
    for run, k in class_runs(classes):
        y[: sum(section.class_ranks[k]), run] = values_of(scales, section.class_ranks[k], run.stop - run.start, rng)
    return clipped(y, float(section.classed.steps[classes].min(initial=1e9)))


def values_of(
    scales: tuple[tuple[int, ...], ...], ranks: tuple[int, ...], tokens: int, rng: np.random.Generator
) -> F32:
    scale = np.concatenate([np.array(block[:rank], np.float64) for block, rank in zip(scales, ranks, strict=True)])
    y = rng.standard_normal((len(scale), tokens)) * np.exp2(scale / 64)[:, None]
    y[rng.random(y.shape) < 0.01] *= 1000  # escapes
    plain: F32 = y.astype(np.float32)
    return plain


def clipped(y: F32, step: float) -> F32:
    limit = np.float32(0.9 * MAX_LEVEL * step)
    return np.clip(y, -limit, limit)


@cache
def coded(name: str, kind: str, tokens: int, seed: int = 0, step: int = 0) -> tuple[Planned, bytes, F32, U8 | None]:
    """A section, its bytes, what they hold (columns in coding order), and the classes of the tokens."""
    scales = SCALES[name]
    section = planned(scales, step)
    rng = np.random.default_rng([seed, tokens])
    if kind != "classes":
        y = clipped(values_of(scales, section.ranks, tokens, rng), step_value(step))
        return section, encode_plain(section, y, step), y, None
    classes = np.clip(np.rint(rng.normal(8, 3, tokens)), section.classed.finest, CLASSES - 1).astype(np.uint8)
    columns = classes[coding_order(classes)]
    y = columns_of(section, columns, scales, seed, step)
    tiles = [slice(at, min(at + WINDOW, tokens)) for at in range(0, tokens, WINDOW)]
    pieces = [(classes[at], columns[at], np.ascontiguousarray(y[:, at])) for at in tiles]
    coder = CoefficientCoder(get_stages("numba"), FAMILY, step)
    classed = ClassedSection(pieces, section.classed, section.class_table)
    return section, coder.encode_classes([classed], tokens)[0], y, classes


def check_close(tile: Coefficients, section: Planned, y: F32, classes: U8 | None, at: slice, step: int = 0) -> None:
    """The tile holds what was coded, within the quantizer's error."""
    got = tile.y.float().numpy()
    if classes is None:
        assert tile.classes is None
        there = tile.order >= 0
        assert sorted(tile.order[there].tolist()) == list(range(at.stop - at.start))
        columns = [(there, section.ranks, y[:, at][:, tile.order[there]], step_value(step))]
    else:
        order = coding_order(classes[at])
        np.testing.assert_array_equal(tile.order, order)
        assert tile.classes is not None
        np.testing.assert_array_equal(tile.classes, classes[at][order])
        own = y[:, at]
        columns = []
        for run, k in class_runs(tile.classes):
            which = np.zeros(len(order), bool)
            which[run] = True
            columns.append((which, section.class_ranks[k], own[:, run], float(section.classed.steps[k])))
    assert len(got) == len(section.ranks)
    for which, ranks, want, unit in columns:
        row = 0
        for block, rank in zip(got, ranks, strict=True):
            part, source = block[:rank][:, which], want[row : row + rank]
            # The dead zone of the default family is 0.6; float32 cannot hold more of a large level.
            assert np.all(np.abs(part - source) <= 0.65 * unit + 1e-6 * np.abs(source))
            assert not block[rank:][:, which].any()
            row += rank


def tiles_of(tokens: int, size: int) -> list[slice]:
    return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]


def test_columns_without_classes_are_dealt_out_row_by_row() -> None:
    assert dealt_order(7, 2).tolist() == [0, 2, 4, 6, 1, 3, 5, -1]
    assert dealt_order(3, 4).tolist() == [0, 1, 2, -1]
    assert dealt_order(3, 1).tolist() == [0, 1, 2]
    assert dealt_order(4, 4).tolist() == [0, 1, 2, 3]


def test_rows_of_a_block_are_padded() -> None:
    assert [padded(rank) for rank in (0, 1, 32, 33, 64)] == [0, 32, 32, 64, 64]


@pytest.mark.parametrize("tokens", TOKENS)
def test_all_sections_at_once_are_the_references(tokens: int) -> None:
    """Deep and shallow, wide and empty ones, with escapes, with classes and without, in a call."""
    made = [(name, kind, *coded(name, kind, tokens)) for name in SCALES for kind in KINDS]
    coding = coding_of([section for _, _, section, _, _, _ in made])
    parts = [(number, data) for number, (_, _, _, data, _, _) in enumerate(made)][::-1]
    whole = decode("numba", coding, parts, tokens)
    same(whole, decode("reference", coding, parts, tokens))
    for (number, _), tile in zip(parts, whole, strict=True):
        _, _, section, _, y, classes = made[number]
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


def test_the_sections_exercise_what_they_are_to() -> None:
    for name in ("deep", "blocks", "wide"):
        for kind in KINDS:
            section, data, _, classes = coded(name, kind, 512)
            part = read_part(memoryview(data), section.plan, section.classed, 512)
            row, column = np.divmod(part.escapes.index, 512)
            assert (part.classes is None) == (classes is None) == (kind != "classes")
            assert {int(at) // WINDOW for at in column} == {0, 1}, "escapes in several tiles"
            if classes is None:
                wide = section.plan.shift > 0
                assert wide.any()
                if name == "wide":
                    assert wide[row].any(), "an escape of a row with low bits"
                if name == "blocks":
                    assert wide.any() and (~wide[row]).any(), "an escape of one without"
            else:
                assert section.classed.shift[classes].any() and len(set(classes.tolist())) > 4
    few = read_part(memoryview(coded("few", "plain", 513)[1]), coded("few", "plain", 513)[0].plan, None, 513)
    assert len(few.streams.states) <= 5
    empty = coded("none", "classes", 513)[0]
    assert not empty.classed.rows.any() and not empty.plan.planes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [WINDOW, 2 * WINDOW])
def test_tiles_are_the_references(kind: str, size: int) -> None:
    made = [coded(name, kind, 513) for name in SCALES]
    coding = coding_of([section for section, _, _, _ in made])
    parts = [(number, data) for number, (_, data, _, _) in enumerate(made)]
    for at in tiles_of(513, size):
        tiles = decode("numba", coding, parts, 513, at)
        same(tiles, decode("reference", coding, parts, 513, at))
        for (section, _, y, classes), tile in zip(made, tiles, strict=True):
            check_close(tile, section, y, classes, at)


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(-400, 700), min_size=1, max_size=12), min_size=1, max_size=3),
    tokens=st.integers(1, 600),
    kind=st.sampled_from(KINDS),
    step=st.integers(-60, 200),
    seed=st.integers(0, 1 << 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_plan_is_the_references(
    blocks: list[list[int]], tokens: int, kind: str, step: int, seed: int, dtype: torch.dtype
) -> None:
    scales = tuple(tuple(sorted(block, reverse=True)) for block in blocks)
    section = planned(scales, step)
    rng = np.random.default_rng(seed)
    if kind == "classes":
        low = int(rng.integers(section.classed.finest, CLASSES))
        classes = rng.integers(low, int(rng.integers(low, CLASSES)) + 1, tokens).astype(np.uint8)
        columns = classes[coding_order(classes)]
        y = columns_of(section, columns, scales, seed, step)
        coder = CoefficientCoder(get_stages("numba"), FAMILY, step)
        pieces = [(classes[at], columns[at], np.ascontiguousarray(y[:, at])) for at in tiles_of(tokens, WINDOW)]
        (data,) = coder.encode_classes([ClassedSection(pieces, section.classed, section.class_table)], tokens)
    else:
        y = clipped(values_of(scales, section.ranks, tokens, rng), step_value(step))
        data = encode_plain(section, y, step)
    coding = coding_of([section], step)
    at = tiles_of(tokens, WINDOW)[int(rng.integers(0, -(-tokens // WINDOW)))]
    for part in (slice(0, tokens), at, slice(at.start, tokens)):
        (got,) = decode("numba", coding, [(0, data)], tokens, part, dtype)
        same([got], decode("reference", coding, [(0, data)], tokens, part, dtype))
        if dtype == torch.float32:
            check_close(got, section, y, classes if kind == "classes" else None, part, step)


def test_what_an_earlier_call_left_does_not_show() -> None:
    """Memory is used again without being cleared: large first, then small, then other kinds."""
    large = [coded("blocks", kind, 513) for kind in KINDS]
    small = [coded("uneven", kind, 17) for kind in KINDS]
    one, other = (coding_of([section for section, *_ in made]) for made in (large, small))
    want = [decode("reference", c, list(enumerate(d for _, d, *_ in m)), t)
            for c, m, t in ((one, large, 513), (other, small, 17))]  # fmt: skip
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16):
            for coding, made, tokens, tiles in ((one, large, 513, want[0]), (other, small, 17, want[1])):
                got = decode("numba", coding, list(enumerate(d for _, d, *_ in made)), tokens, dtype=dtype)
                same(got, [Coefficients(tile.order, tile.classes, tile.y.to(dtype)) for tile in tiles])


# --- damaged bytes


def outcome(name: str, section: Planned, data: bytes, tokens: int, at: slice | None = None) -> Any:
    """What decoding gives: the tile, or the class and the message of the error."""
    try:
        return decode(name, coding_of([section]), [(0, data)], tokens, at)
    except FormatError as error:
        return type(error), str(error)


def agree(section: Planned, data: bytes, tokens: int, exact: bool = True) -> Any:
    """Both decoders give the same; if several streams are damaged, they may name different ones of them.

    Where indices are checked only the compiled one is asked, whose IndexError nobody catches: that it gives what the
    reference gives is seen without the checks.
    """
    got = outcome("numba", section, data, tokens)
    if BOUNDS_CHECKED:
        return got
    want = outcome("reference", section, data, tokens)
    if isinstance(got, list) and isinstance(want, list):
        same(got, want)
    elif exact:
        assert got == want
    else:
        assert isinstance(got, tuple) and isinstance(want, tuple), (got, want)
        names = [re.sub(r"^(entropy-coded stream) \d+", r"\1 N", message) for message in (got[1], want[1])]
        assert got[0] is want[0] and names[0] == names[1]
    return got


def offsets_of(section: Planned, data: bytes, tokens: int) -> dict[str, range]:
    """Where the parts of a section lie."""
    part = read_part(memoryview(data), section.plan, section.classed, tokens)
    count, classed = len(part.streams.states), part.classes is not None
    planes = int(section.classed.planes.max()) if classed else section.plan.planes
    wide = 2 if planes * part.tokens_per_stream <= 0xFFFF else 4
    sizes = {
        "words": 4, "escapes": 4, "log2": 1, "mode": 1, "reserved": 2,
        "class words": 4 * classed, "class state": 4 * classed, "states": 4 * count, "lengths": wide * count,
        "class stream": 0 if part.classes is None else 2 * len(part.classes.words),
        "stream": 2 * len(part.streams.words),
    }  # fmt: skip
    at, found = 0, {}
    for name, size in sizes.items():
        found[name] = range(at, at + size)
        at += size
    found["padding"] = range(at, at + -at % 4)
    at += -at % 4
    for name in ("index", "value"):
        found[name] = range(at, at + 4 * len(part.escapes.index))
        at = found[name].stop
    assert at == len(data)
    return found


DAMAGED = [(name, kind) for name in ("deep", "blocks", "few") for kind in KINDS]


@pytest.mark.parametrize(("name", "kind"), DAMAGED)
def test_every_damaged_byte_is_found_alike(name: str, kind: str) -> None:
    section, data, _, _ = coded(name, kind, 257)
    places = offsets_of(section, data, 257)
    rng = np.random.default_rng(3)
    outcomes = {}
    for part, where in places.items():
        few = list(where) if len(where) <= 16 else sorted(rng.choice(list(where), 16, replace=False).tolist())
        for at in few:
            for flip in (0x01, 0x80, 0xFF):
                bad = bytearray(data)
                bad[at] ^= flip
                # Lengths, and classes, tell all streams after them where to begin.
                several = part not in {"states", "stream"}
                outcomes[part, at, flip] = agree(section, bytes(bad), 257, exact=not several)
    for (part, at, flip), result in outcomes.items():
        # What an escape stands for is taken as it is, and so are low bits, whose tables are flat.
        if part != "value" and not (part == "stream" and name == "blocks"):
            assert isinstance(result, tuple), (part, at, flip)
    if name != "few":
        assert any(CorruptError in result for result in outcomes.values() if isinstance(result, tuple))


@pytest.mark.parametrize(("name", "kind"), DAMAGED)
def test_sections_of_another_length_are_refused_alike(name: str, kind: str) -> None:
    section, data, _, _ = coded(name, kind, 257)
    places = offsets_of(section, data, 257)
    ends = {0, 1, 11, 12, 13, 19, 20, 21, len(data) - 1, len(data) - 4, len(data) - 8}
    ends |= {edge for where in places.values() for edge in (where.start - 1, where.start, where.stop - 1)}
    for end in sorted(end for end in ends if 0 <= end < len(data)):
        kind_of, message = agree(section, data[:end], 257)
        assert kind_of is FormatError and "too early" in message
    for tail in (b"\0", bytes(4), bytes(8), b"\xff" * 5):
        kind_of, message = agree(section, data + tail, 257)
        assert kind_of is FormatError and "too many" in message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["missing", "extra", "beyond", "outside", "unsorted", "twice", "none", "elsewhere"])
def test_escape_lists_that_do_not_match_are_refused_alike(kind: str, change: str) -> None:
    section, data, _, classes = coded("blocks", kind, 257)
    part = read_part(memoryview(data), section.plan, section.classed, 257)
    rows = len(section.plan.shift) if classes is None else int(section.classed.rows.max())
    index, value = part.escapes.index.tolist(), part.escapes.value.tolist()
    free = next(i for i in range(257) if i not in index)
    middle = len(index) // 2
    assert middle > 3
    if change == "missing":
        del index[middle], value[middle]
    elif change == "extra":
        index, value = sorted([*index, free]), [*value, 1]
    elif change == "beyond":
        index, value = [*index, rows * 257], [*value, 1]
    elif change == "outside":
        index, value = [*index, 0xFFFFFFFF], [*value, 1]
    elif change == "unsorted":
        index[middle], index[middle + 1] = index[middle + 1], index[middle]
    elif change == "twice":
        index[middle] = index[middle + 1]
    elif change == "none":
        index, value = [], []
    else:
        index = sorted([free, *index[:middle], *index[middle + 1 :]])
    listed = Escapes(np.array(index, np.uint32), np.array(value, np.int32))
    planes = section.plan.planes if classes is None else int(section.classed.planes.max())
    bad = write_streams(part.streams, listed, planes, part.tokens_per_stream, part.classes)
    kind_of, message = agree(section, bad, 257)
    if change in {"beyond", "outside", "unsorted", "twice"}:
        assert kind_of is FormatError and "section: has escapes out of order or out of range" in message
    else:
        assert kind_of is CorruptError and "escape list does not match" in message


def test_an_escape_where_there_are_no_components_is_refused_alike() -> None:
    section, data, _, _ = coded("none", "classes", 257)
    part = read_part(memoryview(data), section.plan, section.classed, 257)
    one = Escapes(np.zeros(1, np.uint32), np.zeros(1, np.int32))
    bad = write_streams(part.streams, one, 0, part.tokens_per_stream, part.classes)
    expected = (FormatError, "section: has escapes out of order or out of range")
    assert agree(section, bad, 257) == expected
    plain, data, _, _ = coded("none", "plain", 257)
    part = read_part(memoryview(data), plain.plan, None, 257)
    assert agree(plain, write_streams(part.streams, one, 0, part.tokens_per_stream), 257) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-(2**31), -(2**31) + 1, 2**31 - 1, 1 << 24, 0, 1, -1, -128])
def test_hostile_escape_values_come_out_alike(kind: str, value: int) -> None:
    for name in ("blocks", "wide"):
        section, data, _, classes = coded(name, kind, 257)
        part = read_part(memoryview(data), section.plan, section.classed, 257)
        hostile = Escapes(part.escapes.index, np.full_like(part.escapes.value, value))
        planes = section.plan.planes if classes is None else int(section.classed.planes.max())
        bad = write_streams(part.streams, hostile, planes, part.tokens_per_stream, part.classes)
        for dtype in (torch.float32, torch.bfloat16):
            tiles = [decode(one, coding_of([section]), [(0, bad)], 257, dtype=dtype) for one in ("numba", "reference")]
            same(*tiles)


@pytest.mark.parametrize("kind", KINDS)
def test_the_damaged_one_of_several_sections_is_named(kind: str) -> None:
    """Whatever is wrong with one section, the other ones do not hide it."""
    made = [coded(name, kind, 257) for name in ("few", "deep", "blocks")]
    coding = coding_of([section for section, *_ in made])
    for number in range(3):
        section, data, _, _ = made[number]
        for part, where in offsets_of(section, data, 257).items():
            if part == "value" or not len(where):
                continue
            bad = bytearray(data)
            bad[where[len(where) // 2]] ^= 0x55
            parts = [(i, bytes(bad) if i == number else own) for i, (_, own, _, _) in enumerate(made)]
            messages = []
            for name in ("numba", "reference"):
                with pytest.raises(FormatError) as caught:
                    decode(name, coding, parts, 257)
                messages.append((type(caught.value), re.sub(r"stream \d+", "stream N", str(caught.value))))
            assert messages[0] == messages[1]


def test_a_tile_names_streams_of_the_section() -> None:
    """The compiled decoder counts streams from the section's first; the reference, which has no others, the tile's."""
    section, data, _, _ = coded("deep", "plain", 513)
    part = read_part(memoryview(data), section.plan, section.classed, 513)
    n, count = part.tokens_per_stream, len(part.streams.states)
    stream = WINDOW // n + 2
    bad = bytearray(data)
    at = offsets_of(section, data, 513)["stream"].start + 2 * (int(part.streams.lengths[:stream].sum()) + 1)
    bad[at] ^= 0x10
    at_tile = slice(WINDOW, 2 * WINDOW)
    assert outcome("numba", section, bytes(bad), 513, at_tile) == (
        CorruptError, f"entropy-coded stream {stream} of {count} does not end where it must: the bytes are damaged",
    )  # fmt: skip
    assert outcome("reference", section, bytes(bad), 513, at_tile) == (
        CorruptError,
        f"entropy-coded stream 2 of {WINDOW // n} does not end where it must: the bytes are damaged",
    )
    assert isinstance(outcome("numba", section, bytes(bad), 513, slice(0, WINDOW)), list)
    assert isinstance(outcome("numba", section, bytes(bad), 513, slice(2 * WINDOW, 513)), list)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["few", "uneven", "none", "blocks"]),
    kind=st.sampled_from(KINDS),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.floats(0, 1),
)
def test_any_bytes_are_judged_alike(name: str, kind: str, changes: list[tuple[float, int]], cut: float | None) -> None:
    section, data, _, _ = coded(name, kind, 33)
    bad = bytearray(data)
    for place, byte in changes:
        # Half of them in the header, which is a small part of the bytes.
        at = int(place * 2 * min(len(bad), 24)) if place < 0.5 else int((place - 0.5) * 2 * len(bad))
        bad[at] = byte
    got = bytes(bad[: int(cut * len(bad))] if cut is not None else bad)
    agree(section, got, 33, exact=False)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_word_of_a_blob_is_read_and_no_more(kind: str) -> None:
    """A section without escapes, whose words end where the bytes end, in a buffer that ends there, too."""
    tokens = 257
    while True:
        section = planned(((30, 20, 10),))
        rng = np.random.default_rng(tokens)
        y = rng.uniform(-1, 1, (3, tokens)).astype(np.float32)
        if kind == "classes":
            classes = np.full(tokens, 8, np.uint8)
            coder = CoefficientCoder(get_stages("numba"), FAMILY, 0)
            classed = ClassedSection([(classes, classes, y)], section.classed, section.class_table)
            (data,) = coder.encode_classes([classed], tokens)
        else:
            data = encode_plain(section, y)
        places = offsets_of(section, data, tokens)
        if places["stream"].stop == len(data):
            break
        tokens += 1
    assert not len(places["padding"]) and not len(places["index"])
    coding = coding_of([section])
    want = decode("reference", coding, [(0, data)], tokens)
    for view in (memoryview(b"before" + data)[6:], memoryview(bytearray(data))):
        stages = get_stages("numba")
        index = stages.index_sections(coding, [(0, view)], tokens)
        tiles = stages.decode_sections(index, slice(0, tokens), torch.float32)
        same(tiles, want)
    # The last stream asks for a word beyond the last: it gets what the next section begins with, and is found out.
    bad = bytearray(data)
    at, length = places["lengths"].stop, 0
    while not length:
        at -= 2
        (length,) = struct.unpack_from("<H", bad, at)
    struct.pack_into("<H", bad, at, length - 1)
    (words,) = struct.unpack_from("<I", bad)
    struct.pack_into("<I", bad, 0, words - 1)
    short = bytes(bad[:-2]) + bytes(-(len(bad) - 2) % 4)
    agree(section, short, tokens)
    assert isinstance(outcome("numba", section, short, tokens), tuple)


@pytest.mark.slow
def test_compiled_loops_stay_within_their_arrays() -> None:
    """The tests of damaged bytes again, where Numba checks every index."""
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        # Its code is other code under the same name: it must never be taken for that of everybody else.
        "NUMBA_CACHE_DIR": str(ROOT / ".numba_cache" / "boundscheck"),
    }
    chosen = "damaged or another_length or escape or judged_alike or all_sections"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
