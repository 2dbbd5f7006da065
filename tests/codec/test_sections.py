"""Coded sections to coefficients: the compiled decoder against the reference, also with damaged bytes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.planned import Planned, coding_of, decode, planned, same

from cuvee.codec.entropy.coding_plan import MAX_LEVEL
from cuvee.codec.entropy.family import default_family
from cuvee.codec.entropy.token_classes import CLASSES, NEUTRAL
from cuvee.codec.errors import CorruptError, FormatError, InputError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.streams import WINDOW, Escapes
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.schemes.coefficients import CoefficientCoder
from cuvee.codec.stages.implementations import get_stages, stage_names
from cuvee.codec.stages.reference.sections import Coefficients, check_classes, read_part
from cuvee.codec.stages.reference.symbols import class_runs
from cuvee.codec.stages.reference.token_order import coding_order
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
KINDS = ("classes", "neutral")  # tokens of many classes, and all of the neutral one
# In the process of `test_compiled_loops_stay_within_their_arrays`.
BOUNDS_CHECKED = os.environ.get("NUMBA_BOUNDSCHECK") == "1"


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
    pieces = [(classes[at], columns[at], np.ascontiguousarray(y[:, at])) for at in tiles_of(len(classes), WINDOW)]
    coder = CoefficientCoder(get_stages(name), FAMILY)
    return coder.encode([(cast(SectionCoding, section), pieces)], len(classes))[0]


@cache
def coded(name: str, kind: str, tokens: int) -> tuple[Planned, bytes, F32, U8]:
    """A section, its bytes, what they hold (columns in coding order), and the classes of the tokens."""
    section = planned(SCALES[name])
    rng = np.random.default_rng(tokens)
    classes = np.full(tokens, NEUTRAL, np.uint8)
    if kind == "classes":
        classes = np.clip(np.rint(rng.normal(8, 3, tokens)), section.classed.finest, CLASSES - 1).astype(np.uint8)
    y = columns_of(section, classes[coding_order(classes)], SCALES[name], tokens)
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
    part = read_part(memoryview(data), section.classed, tokens)
    count = len(part.streams.states)
    wide = 2 if int(section.classed.planes.max()) * part.tokens_per_stream <= 0xFFFF else 4
    sizes = {
        "words": 4, "escapes": 4, "log2": 1, "reserved": 3, "class words": 4, "class state": 4, "states": 4 * count,
        "lengths": wide * count, "class stream": 2 * len(part.classes.words), "stream": 2 * len(part.streams.words),
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


def rewritten(section: Planned, part: CodedPart, **changes: Any) -> bytes:
    """The section with another stream, escape list or classes."""
    return write_coded(replace(part, **changes), int(section.classed.planes.max()))


DAMAGED = [("deep", "classes"), ("blocks", "classes"), *(("few", kind) for kind in KINDS)]


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
    taken = {key for key, result in outcomes.items() if not isinstance(result, tuple)}
    # What an escape stands for is taken as it is, and so are some states and words of low bits, whose tables are flat.
    assert {part for part, _, _ in taken} <= {"value", "states", "stream"}
    others = [key for key in outcomes if key[0] in {"states", "stream"}]
    assert len(taken.intersection(others)) <= (0 if name == "few" else len(others) // 4)
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


def test_classes_that_the_profile_cannot_serve_are_refused_alike() -> None:
    section = planned((tuple(range(500, -300, -80)),), step=-300)
    check_classes(np.array([12, 15], np.uint8), section.classed)
    for bad in (11, 16, 255):
        with pytest.raises(FormatError, match="outside 12 … 15"):
            check_classes(np.array([12, bad], np.uint8), section.classed)
    classes = np.random.default_rng(0).integers(12, CLASSES, 300).astype(np.uint8)
    data = encoded(section, classes, np.zeros((10, 300), np.float32))
    part = read_part(memoryview(data), section.classed, 300)
    for token, bad in ((0, 11), (299, 11), (150, 0)):
        other = classes.copy()
        other[token] = bad
        forged = rewritten(section, part, classes=get_stages("numba").encode_classes(other, section.class_table))
        expected = (FormatError, "section: must have token classes 12 … 15, got token classes outside 12 … 15")
        assert agree(section, forged, 300) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-(2**31), -(2**31) + 1, 2**31 - 1, 1 << 24, 0, 1, -1, -128])
def test_hostile_escape_values_come_out_alike(kind: str, value: int) -> None:
    for name in ("blocks", "wide"):
        section, data, _, _ = coded(name, kind, 257)
        part = read_part(memoryview(data), section.classed, 257)
        hostile = Escapes(part.escapes.index, np.full_like(part.escapes.value, value))
        bad = rewritten(section, part, escapes=hostile)
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
