"""Token classes: the order of the columns, the coder, the planes, the coded part of a section; every backend alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.planned import EMPTY, coded_part, coding_of, decode, one_block, same

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL, CodingPlan, Escapes
from cuvee.codec.entropy.coefficients import ClassedSection, CoefficientCoder
from cuvee.codec.entropy.family import coding_plan, default_family, scale_codes, step_value
from cuvee.codec.entropy.streams import Streams, stream_count
from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import (
    CLASS_UNITS,
    CLASSES,
    NEUTRAL,
    WINDOW,
    ClassedPlan,
    class_frequencies,
    class_step_index,
    class_table,
    default_class_frequencies,
)
from cuvee.codec.errors import CorruptError, FormatError, InputError, ProfileError
from cuvee.codec.format.coded_part import CodedPart, Reader, read_coded, write_streams
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.stages.implementations import Stages, get_stages
from cuvee.codec.stages.reference.rans_by_class import ClassedPlanes, rans_decode_classes, stream_rows
from cuvee.codec.stages.reference.sections import Coefficients, check_classes, read_part
from cuvee.codec.stages.reference.symbols_by_class import class_runs, from_planes
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.support.arrays import F32, U8

FAMILY = default_family()
TABLE = class_table(default_class_frequencies())
SIZES = (1, 2, 63, 255, 256, 257, 700)
BACKENDS = ("reference", "numba")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Stages:
    return get_stages(request.param)


def plan_of(rows: int, step: int = 0, widest: int = 300) -> ClassedPlan:
    """Components whose scales fall from `widest` (several of them wide at fine steps) to far below the step."""
    scale = np.linspace(widest, -300, rows).astype(np.int16)
    plans: list[CodingPlan | None] = []
    for k in range(CLASSES):
        codes = scale_codes(scale, class_step_index(step, k))
        try:
            plans.append(coding_plan(codes[codes >= 0]))
        except ProfileError:
            plans.append(None)
    return ClassedPlan(plans, step)


def classes_of(tokens: int, plan: ClassedPlan, seed: int = 0) -> U8:
    """Classes of columns: any that are served, rising within each window."""
    classes = np.random.default_rng(seed).integers(plan.finest, CLASSES, tokens).astype(np.uint8)
    return classes[coding_order(classes)]


def coefficients(rows: int, classes: U8, plan: ClassedPlan, seed: int = 0, widest: int = 300) -> F32:
    rng = np.random.default_rng(seed)
    spread = np.exp2(np.linspace(widest, -300, rows) / 64)[:, None]
    y: F32 = (rng.standard_normal((rows, len(classes))) * spread).astype(np.float32)
    if len(classes) > 2:
        y[0, len(classes) // 2] = 1000 * spread[0, 0]  # escapes
        y[min(3, rows - 1), 0] = -300 * spread[min(3, rows - 1), 0]
    return y


# --- order


def test_a_stream_lies_in_one_window() -> None:
    """Streams hold up to 128 tokens; the coders count on it."""
    assert all(WINDOW % (1 << log2) == 0 for log2 in range(8))


def test_columns_are_sorted_by_class_within_windows() -> None:
    classes = np.random.default_rng(1).integers(0, CLASSES, 700).astype(np.uint8)
    order = coding_order(classes)
    assert sorted(order.tolist()) == list(range(700))
    for start in range(0, 700, WINDOW):
        own = order[start : start + WINDOW]
        assert own.min() >= start and own.max() < start + WINDOW
        columns = classes[own]
        assert np.all(np.diff(columns.astype(int)) >= 0)
        for k in range(CLASSES):
            assert np.all(np.diff(own[columns == k]) > 0), "tokens of one class keep their order"


@pytest.mark.parametrize("tokens", [0, 1, 63, 256, 257, 1000])
@pytest.mark.parametrize(("rows", "known"), [(0, 3), (5, None), (5, 0), (5, 3), (5, 5), (3, 5)])
def test_backends_arrange_tokens_alike(tokens: int, rows: int, known: int | None) -> None:
    rng = np.random.default_rng(tokens)
    for classes in (rng.integers(0, CLASSES, tokens).astype(np.uint8), np.full(tokens, CLASSES - 1, np.uint8)):
        x = torch.from_numpy(rng.normal(size=(tokens, 7)).astype(np.float32))
        leading = None if known is None else torch.from_numpy(rng.normal(size=(known, tokens)).astype(np.float32))
        order = coding_order(classes)
        for name in BACKENDS:
            columns, ordered, y = get_stages(name).arrange(classes, x.clone(), leading, rows)
            assert columns.dtype == np.uint8 and np.array_equal(columns, classes[order])
            assert torch.equal(ordered, x[order]) and y.shape == (rows, tokens)
            for got, want in zip(y, () if leading is None else leading[:, order], strict=False):
                assert torch.equal(got, want)
            y.fill_(7)
            assert torch.equal(ordered, x[order]), "coefficients have room of their own"


def encoded(stages: Stages, planes: U8, columns: U8, plan: ClassedPlan, n: int) -> Streams:
    """The streams of one section's planes."""
    ((streams, _),) = stages.encode_classed([ClassedPlanes(planes, columns, columns, plan, TABLE, n)], FAMILY.tables)
    return streams


@pytest.mark.parametrize("tokens", SIZES)
def test_sections_coded_together_are_the_same_words(tokens: int) -> None:
    """Sections of different depths, streams and class tables; one of them codes nothing."""
    rng = np.random.default_rng(tokens)
    sections = []
    for rows, n, widest in ((24, 8, 60), (3, 1, 5), (0, 128, 60), (40, 128, 500), (12, 16, 60)):
        plan = plan_of(rows, widest=widest) if rows else ClassedPlan([EMPTY] * CLASSES, 0)
        classes = rng.integers(plan.finest, CLASSES, tokens).astype(np.uint8)
        columns = classes[coding_order(classes)]
        y = coefficients(rows, columns, plan) if rows else np.empty((0, tokens), np.float32)
        planes, _ = get_stages("reference").to_planes(y, columns, plan, FAMILY.quantizer, FAMILY.tables)
        counts = np.bincount(classes, minlength=CLASSES)
        table = class_table(class_frequencies(counts)) if n > 1 else TABLE
        sections.append(ClassedPlanes(planes, columns, classes, plan, table, n))
    one, other = (get_stages(name).encode_classed(sections, FAMILY.tables) for name in BACKENDS)
    alone = [get_stages("numba").encode_classed([section], FAMILY.tables)[0] for section in sections]
    for pairs in zip(one, other, alone, strict=True):
        for want, *got in zip(*pairs, strict=True):
            for streams in got:
                for name in ("states", "lengths", "words"):
                    a, b = getattr(streams, name), getattr(want, name)
                    assert a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("tokens", [1, 8, 255, 256, 257, 600])
@pytest.mark.parametrize("n", [1, 8, 128])
def test_rows_hold_every_column_once_and_streams_stay_in_a_window(tokens: int, n: int) -> None:
    seen: dict[int, int] = {}
    for streams, columns in stream_rows(tokens, n):
        assert streams.stop - streams.start == columns.stop - columns.start
        for stream, column in zip(range(streams.start, streams.stop), range(columns.start, columns.stop), strict=True):
            assert column not in seen
            seen[column] = stream
    assert sorted(seen) == list(range(tokens))
    assert set(seen.values()) == set(range(stream_count(tokens, n)))
    for column, stream in seen.items():
        assert stream * n // WINDOW == column // WINDOW
    assert max(np.bincount(list(seen.values()))) <= n


def test_a_plan_has_no_deeper_columns_than_finer_ones() -> None:
    plan = plan_of(40)
    assert plan.finest == 0 and np.all(np.diff(plan.rows) <= 0) and np.all(np.diff(plan.planes) <= 0)
    assert plan.rows[0] > plan.rows[NEUTRAL] > plan.rows[-1] and plan.planes[0] > plan.rows[0]
    assert plan.steps[NEUTRAL] == 1.0 and plan.steps[NEUTRAL + 2] == 2.0
    assert np.array_equal(plan.tables[3, : plan.planes[3]], plan.of(3).tables)


def test_a_plan_leaves_out_classes_that_are_too_fine() -> None:
    plan = plan_of(10, step=-300, widest=500)
    assert plan.finest == 12 and plan.plans[11] is None and plan.plans[12] is not None
    assert np.all(plan.rows[:12] == 0)
    with pytest.raises(ProfileError, match="class 11, which is finer"):
        plan.of(11)
    with pytest.raises(ProfileError, match="too small"):
        plan_of(10, step=-900, widest=500)


@pytest.mark.parametrize("counts", [np.zeros(16), np.eye(16)[3] * 1e6, np.arange(16.0)])
def test_class_tables_can_code_every_class(counts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    freq = class_frequencies(counts)
    assert freq.dtype == np.uint16 and freq.sum() == 4096 and freq.min() >= 1
    assert len(class_table(freq)) == 1


# --- the entropy coder


@pytest.mark.parametrize("n", [1, 4, 128])
@pytest.mark.parametrize("tokens", SIZES)
def test_backends_code_the_same_bytes(tokens: int, n: int) -> None:
    plan = plan_of(24)
    classes = classes_of(tokens, plan, tokens)
    one, other = (get_stages(name) for name in BACKENDS)
    planes, escapes = one.to_planes(coefficients(24, classes, plan), classes, plan, FAMILY.quantizer, FAMILY.tables)
    want = encoded(one, planes, classes, plan, n)
    got = encoded(other, planes, classes, plan, n)
    for name in ("states", "lengths", "words"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    back = rans_decode_classes(want, classes, plan, FAMILY.tables, n)
    for t, k in enumerate(classes):
        depth = plan.planes[k]
        np.testing.assert_array_equal(back[:depth, t], planes[:depth, t])
    y = from_planes(planes, classes, escapes, plan, FAMILY.quantizer, int(plan.rows[classes].max()))
    data = coded_part(want, escapes, classes, plan, n)
    for name in BACKENDS:
        (tile,) = decode(name, coding_of([one_block(plan)]), [(0, data)], tokens)
        check_tile(tile, classes, y)


def check_tile(tile: Coefficients, classes: U8, y: torch.Tensor) -> None:
    """The tile holds `y` of columns that were in order."""
    assert tile.classes is not None and np.array_equal(tile.classes, classes)
    assert tile.order.tolist() == list(range(len(classes)))
    (got,) = tile.y
    assert len(got) >= len(y) and torch.equal(got[: len(y)], y) and not got[len(y) :].any()


@pytest.mark.parametrize("at", [slice(0, 256), slice(256, 512), slice(512, 700), slice(256, 700)])
def test_windows_decode_alone(backend: Stages, at: slice) -> None:
    plan = plan_of(24)
    classes = classes_of(700, plan)
    y = coefficients(24, classes, plan)
    planes, escapes = backend.to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
    streams = encoded(backend, planes, classes, plan, 8)
    part, _ = IndexedPart(CodedPart(streams, escapes, 8), 700).select(at)
    back = rans_decode_classes(part, classes[at], plan, FAMILY.tables, 8)
    for column, k in enumerate(classes[at]):
        np.testing.assert_array_equal(back[: plan.planes[k], column], planes[: plan.planes[k], at.start + column])
    whole = from_planes(planes, classes, escapes, plan, FAMILY.quantizer, int(plan.rows[classes].max()))
    data = coded_part(streams, escapes, classes, plan, 8)
    (tile,) = decode(backend.name, coding_of([one_block(plan)]), [(0, data)], 700, at)
    check_tile(tile, classes[at], whole[: int(plan.rows[classes[at]].max()), at])


@pytest.mark.parametrize("change", ["word", "state", "length"])
def test_damaged_streams_are_found(backend: Stages, change: str) -> None:
    plan = plan_of(24)
    classes = classes_of(300, plan)
    y = coefficients(24, classes, plan)
    planes, escapes = backend.to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
    good = encoded(backend, planes, classes, plan, 8)
    states, lengths, words = good.states.copy(), good.lengths.copy(), good.words.copy()
    if change == "word":
        words[len(words) // 2 :][:20] ^= 0x9D7B
    elif change == "state":
        states[5] ^= 1 << 20
    else:
        lengths[3] += 1
        lengths[4] -= 1
    bad = Streams(states, lengths, words)
    with pytest.raises(CorruptError, match=r"stream .* does not end where it must"):
        rans_decode_classes(bad, classes, plan, FAMILY.tables, 8)
    data = coded_part(bad, escapes, classes, plan, 8)
    with pytest.raises(CorruptError, match=r"stream .* does not end where it must"):
        decode(backend.name, coding_of([one_block(plan)]), [(0, data)], 300)


@pytest.mark.parametrize("wrong", ["finer", "coarser", "shuffled"])
def test_classes_that_are_not_those_of_the_streams_are_found(backend: Stages, wrong: str) -> None:
    plan = plan_of(24)
    classes = classes_of(256, plan)
    y = coefficients(24, classes, plan)
    planes, escapes = backend.to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
    good = encoded(backend, planes, classes, plan, 8)
    other = {
        "finer": np.zeros_like(classes),
        "coarser": np.full_like(classes, CLASSES - 1),
        "shuffled": classes[::-1].copy(),
    }[wrong]
    with pytest.raises(CorruptError):
        rans_decode_classes(good, other, plan, FAMILY.tables, 8)
    if wrong == "shuffled":  # a section's columns are sorted whatever its classes are
        other = np.random.default_rng(1).permutation(CLASSES).astype(np.uint8)[classes]
    with pytest.raises(CorruptError, match="does not end where it must"):
        decode(backend.name, coding_of([one_block(plan)]), [(0, coded_part(good, escapes, other, plan, 8))], 256)


# --- planes


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("tokens", [1, 15, 63, 257])
def test_a_table_may_leave_gaps_between_the_values_that_it_codes(every: bool, tokens: int) -> None:
    """What falls in a gap escapes, and counts once; `every` table has gaps, or every other one."""
    freq = FAMILY.tables.freq.copy()
    gapped = freq if every else freq[::2]
    for value in (2, 256 - 3):
        gapped[:, 0] += gapped[:, value]
        gapped[:, value] = 0
    tables = EntropyTables(freq, FAMILY.tables.prob_bits)
    assert (tables.reach[:, 0] > tables.reach[:, 1]).any()
    plan = plan_of(30)
    classes = classes_of(tokens, plan, tokens)
    y = coefficients(30, classes, plan)
    one, other = (get_stages(name).to_planes(y, classes, plan, FAMILY.quantizer, tables) for name in BACKENDS)
    np.testing.assert_array_equal(one[1].index, other[1].index)
    np.testing.assert_array_equal(one[1].value, other[1].value)
    assert tokens == 1 or np.isin([2, -3], one[1].value).all()
    for t, k in enumerate(classes):
        np.testing.assert_array_equal(one[0][: plan.planes[k], t], other[0][: plan.planes[k], t])


@pytest.mark.parametrize("tokens", SIZES)
@pytest.mark.parametrize("step", [-100, 0, 130])
def test_planes_come_back_within_half_a_step(tokens: int, step: int) -> None:
    plan = plan_of(30, step)
    classes = classes_of(tokens, plan, tokens)
    y = coefficients(30, classes, plan)
    one, other = (get_stages(name) for name in BACKENDS)
    planes, escapes = one.to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
    again, listed = other.to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
    np.testing.assert_array_equal(escapes.index, listed.index)
    np.testing.assert_array_equal(escapes.value, listed.value)
    assert tokens < 3 or len(escapes.index)
    for t, k in enumerate(classes):
        np.testing.assert_array_equal(planes[: plan.planes[k], t], again[: plan.planes[k], t])
    rows = int(plan.rows[classes].max())
    wide = from_planes(planes, classes, escapes, plan, FAMILY.quantizer, rows, torch.float32)
    streams = encoded(other, again, classes, plan, 8)
    data = coded_part(streams, listed, classes, plan, 8)
    for dtype in (torch.float32, torch.bfloat16):
        mine = from_planes(planes, classes, listed, plan, FAMILY.quantizer, rows, dtype)
        assert mine.dtype == dtype and torch.equal(mine, wide.to(dtype))
        for name in BACKENDS:
            (tile,) = decode(name, coding_of([one_block(plan)], step), [(0, data)], tokens, dtype=dtype)
            check_tile(tile, classes, wide.to(dtype))
    back = wide.numpy()
    for t, k in enumerate(classes):
        depth = plan.rows[k]
        assert np.all(back[depth:, t] == 0)
        off = np.abs(back[:depth, t] - y[:depth, t]) / plan.steps[k]
        # The dead zone of the default family is 0.6; float32 cannot hold more of a large level.
        assert np.all(off <= 0.65 + 1e-6 * np.abs(y[:depth, t]) / plan.steps[k])


def test_each_class_is_coded_as_its_own_step_codes_it() -> None:
    plan = plan_of(20)
    for k in (0, NEUTRAL, CLASSES - 1):
        classes = np.full(100, k, np.uint8)
        y = coefficients(20, classes, plan)
        own = plan.of(k)
        planes, escapes = get_stages("numba").to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
        usual = get_stages("reference")
        step = step_value(CLASS_UNITS * (k - NEUTRAL))
        levels = usual.quantize(np.ascontiguousarray(y[: len(own.shift)]), step, own, FAMILY.quantizer)
        want, listed = usual.pack(levels, own, FAMILY.tables)
        np.testing.assert_array_equal(planes, want)
        np.testing.assert_array_equal(escapes.index, listed.index)
        np.testing.assert_array_equal(escapes.value, listed.value)


@pytest.mark.parametrize("change", ["missing", "extra", "elsewhere", "below the column"])
def test_escapes_that_do_not_match_are_found(backend: Stages, change: str) -> None:
    plan = plan_of(20)
    classes = classes_of(256, plan)
    y = coefficients(20, classes, plan)
    planes, escapes = backend.to_planes(y, classes, plan, FAMILY.quantizer, FAMILY.tables)
    index, value = escapes.index.tolist(), escapes.value.tolist()
    free = next(i for i in range(256) if planes[0, i] != ESCAPE)
    if change == "missing":
        index, value = index[:-1], value[:-1]
    elif change == "extra":
        index, value = sorted([*index, free]), [*value, 1]
    elif change == "elsewhere":
        index = sorted([free, *index[1:]])
    else:
        index, value = sorted([*index, int(plan.rows[classes[-1]]) * 256 + 255]), [*value, 1]
    listed = Escapes(np.array(index, np.uint32), np.array(value, np.int32))
    with pytest.raises(CorruptError, match="escape"):
        from_planes(planes, classes, listed, plan, FAMILY.quantizer, int(plan.rows[classes].max()), torch.float32)
    streams = encoded(backend, planes, classes, plan, 8)
    with pytest.raises(CorruptError, match="escape"):
        decode(backend.name, coding_of([one_block(plan)]), [(0, coded_part(streams, listed, classes, plan, 8))], 256)


def test_runs_of_classes() -> None:
    assert list(class_runs(np.array([3, 3, 5, 9, 9], np.uint8))) == [
        (slice(0, 2), 3), (slice(2, 3), 5), (slice(3, 5), 9)
    ]  # fmt: skip
    assert list(class_runs(np.empty(0, np.uint8))) == []


# --- the coded part


def pieces_of(classes: U8, columns: U8, y: F32) -> list[tuple[U8, U8, F32]]:
    """Tiles of one window: classes of the tokens, of the columns, coefficients."""
    tiles = [slice(at, at + WINDOW) for at in range(0, len(classes), WINDOW)]
    return [(classes[at], columns[at], np.ascontiguousarray(y[:, at])) for at in tiles]


def tiles_of(tokens: int, size: int = WINDOW) -> list[slice]:
    return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]


def section(backend: Stages, plan: ClassedPlan, tokens: int, seed: int = 0, rows: int = 24) -> tuple[bytes, U8, F32]:
    rng = np.random.default_rng(seed)
    classes = rng.integers(plan.finest, CLASSES, tokens).astype(np.uint8)
    columns = classes[coding_order(classes)]
    y = coefficients(rows, columns, plan, seed)
    coder = CoefficientCoder(backend, FAMILY, plan.step_index)
    return coder.encode_classes([ClassedSection(pieces_of(classes, columns, y), plan, TABLE)], tokens)[0], classes, y


@pytest.mark.parametrize("tokens", SIZES)
def test_sections_are_the_same_bytes_and_come_back(tokens: int) -> None:
    plan = plan_of(24)
    one, other = (get_stages(name) for name in BACKENDS)
    data, classes, _ = section(one, plan, tokens)
    assert section(other, plan, tokens)[0] == data
    backs, coding = [], coding_of([one_block(plan)])
    for name in BACKENDS:
        tiles = [decode(name, coding, [(0, data)], tokens, at)[0] for at in tiles_of(tokens)]
        backs.append(tiles)
        columns = [tile.classes for tile in tiles if tile.classes is not None]
        assert np.array_equal(np.concatenate(columns), classes[coding_order(classes)])
    same(*backs)


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 600), seed=st.integers(0, 1000), low=st.integers(0, 15), width=st.integers(1, 16))
def test_any_classes_come_back(tokens: int, seed: int, low: int, width: int) -> None:
    plan = plan_of(6)
    rng = np.random.default_rng(seed)
    classes = np.minimum(low + rng.integers(0, width, tokens), CLASSES - 1).astype(np.uint8)
    columns = classes[coding_order(classes)]
    y = coefficients(6, columns, plan, seed)
    coder = CoefficientCoder(get_stages("numba"), FAMILY, 0)
    (data,) = coder.encode_classes([ClassedSection(pieces_of(classes, columns, y), plan, TABLE)], tokens)
    coding = coding_of([one_block(plan)])
    for at in tiles_of(tokens, 512):
        (tile,) = decode("numba", coding, [(0, data)], tokens, at)
        same([tile], decode("reference", coding, [(0, data)], tokens, at))
        want, (back,) = columns[at], tile.y.numpy()
        assert tile.classes is not None
        assert np.array_equal(tile.classes, want) and np.array_equal(classes[at][tile.order], want)
        rows = int(plan.rows[want].max())
        assert not back[rows:].any()
        off = np.abs(back[:rows] - y[:rows, at])
        served = np.arange(rows)[:, None] < plan.rows[want][None, :]
        limit = 0.65 * plan.steps[want] + 1e-6 * np.abs(y[:rows, at])
        assert np.all((off <= limit) | ~served) and not back[:rows][~served].any()


def test_a_run_of_tokens_touches_only_its_windows(backend: Stages) -> None:
    plan = plan_of(24)
    data, classes, _ = section(backend, plan, 1000)
    coding = coding_of([one_block(plan)])
    (whole,) = decode(backend.name, coding, [(0, data)], 1000)
    (some,) = decode(backend.name, coding, [(0, data)], 1000, slice(256, 768))
    assert whole.classes is not None and some.classes is not None
    np.testing.assert_array_equal(some.classes, whole.classes[256:768])
    np.testing.assert_array_equal(some.order + 256, whole.order[256:768])
    assert torch.equal(some.y, whole.y[:, : some.y.shape[1], 256:768])
    # Words of other windows may be anything.
    part = read_part(memoryview(data), plan.of(NEUTRAL), plan, 1000)
    streams, n = part.streams, part.tokens_per_stream
    first, end = (int(streams.lengths[: window * WINDOW // n].sum()) for window in (1, 2))
    streams.words[:first] ^= 0x5555
    streams.words[end:] ^= 0x5555
    damaged = coded_part(streams, part.escapes, classes, plan, n)
    assert len(damaged) == len(data)
    (again,) = decode(backend.name, coding, [(0, damaged)], 1000, slice(256, 512))
    assert torch.equal(again.y, whole.y[:, : again.y.shape[1], 256:512])
    with pytest.raises(CorruptError, match="does not end where it must"):
        decode(backend.name, coding, [(0, damaged)], 1000)


def forged(data: bytes, at: int, value: bytes) -> bytes:
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (9, b"\x02", "stream header"),  # mode
        (10, b"\x01", "stream header"),  # reserved
        (8, b"\x08", "stream header"),  # tokens per stream
        (12, b"\xff\xff\xff\xff", "too early"),  # words of the class stream
        (12, b"\x00\x00\x00\x00", "padding|too many"),
        (16, b"\x00\x00\x00\x00", "lower bound"),  # its state
    ],
)
def test_hostile_headers_are_refused(backend: Stages, at: int, value: bytes, message: str) -> None:
    plan = plan_of(24)
    data, _, _ = section(get_stages("numba"), plan, 300, seed=4)
    with pytest.raises(FormatError, match=message):
        decode(backend.name, coding_of([one_block(plan)]), [(0, forged(data, at, value))], 300)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_damaged_class_stream_is_found(name: str) -> None:
    plan = plan_of(24)
    data, _, _ = section(get_stages(name), plan, 300)
    part = read_part(memoryview(data), plan.of(NEUTRAL), plan, 300)
    assert part.classes is not None
    part.classes.words[0] ^= 0x0101
    damaged = write_streams(part.streams, part.escapes, int(plan.planes.max()), part.tokens_per_stream, part.classes)
    assert len(damaged) == len(data)
    with pytest.raises(CorruptError, match="class stream of a section does not end where it must"):
        decode(name, coding_of([one_block(plan)]), [(0, damaged)], 300)


def test_classes_where_there_may_be_none_are_refused() -> None:
    plan = plan_of(24)
    data, _, _ = section(get_stages("numba"), plan, 300)
    with pytest.raises(FormatError, match="has token classes"):
        read_coded(Reader(memoryview(data)), plan.of(NEUTRAL).planes, 24, 300)
    nothing = Streams(np.full(1, 1 << 16, np.uint32), np.zeros(1, np.uint32), np.empty(0, np.uint16))
    plain = write_streams(nothing, Escapes(np.empty(0, np.uint32), np.empty(0, np.int32)), 0, 128)
    assert read_coded(Reader(memoryview(plain)), 0, 0, 100, (5, 5)).classes is None
    # The other way round it is a section of tokens without classes: these have no components.
    coarse = replace(one_block(plan), plan=EMPTY, ranks=(0,))
    for name in BACKENDS:
        (tile,) = decode(name, coding_of([coarse]), [(0, plain)], 100)
        assert tile.classes is None and tile.y.shape == (1, 0, 128)
        with pytest.raises(CorruptError, match="stream 0 of 1 does not end where it must"):
            decode(name, coding_of([one_block(plan)]), [(0, plain)], 100)


def test_classes_that_the_profile_cannot_serve_are_refused() -> None:
    plan = plan_of(10, step=-300, widest=500)
    check_classes(np.array([12, 15], np.uint8), plan)
    for bad in (11, 16, 255):
        with pytest.raises(FormatError, match="outside 12 … 15"):
            check_classes(np.array([12, bad], np.uint8), plan)
    data, classes, _ = section(get_stages("numba"), plan, 300, rows=10)
    part = read_part(memoryview(data), EMPTY, plan, 300)
    for token, bad in ((0, 11), (299, 11), (150, 0)):
        other = classes.copy()
        other[token] = bad
        forged = coded_part(part.streams, part.escapes, other, plan, part.tokens_per_stream)
        for name in BACKENDS:
            with pytest.raises(FormatError, match="token classes outside 12 … 15"):
                decode(name, coding_of([one_block(plan)], -300), [(0, forged)], 300)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 2.0 * MAX_LEVEL])
def test_values_too_large_for_their_class_are_refused(value: float) -> None:
    plan = plan_of(8)
    classes = np.array([0, NEUTRAL], np.uint8)
    y = np.zeros((8, 2), np.float32)
    y[0, 1] = value
    for name in BACKENDS:
        coder = CoefficientCoder(get_stages(name), FAMILY, 0)
        with pytest.raises(InputError, match="lossless"):
            coder.encode_classes([ClassedSection([(classes, classes, y)], plan, TABLE)], 2)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38, 1.0 * MAX_LEVEL])
def test_values_too_large_are_found_wherever_they_are_coded(backend: Stages, value: float) -> None:
    plan = plan_of(24)
    rng = np.random.default_rng(0)
    classes = rng.integers(7, CLASSES, 300).astype(np.uint8)
    columns = classes[coding_order(classes)]
    last = np.flatnonzero(columns == NEUTRAL)[[0, -1]]
    y = coefficients(24, columns, plan)
    for row, column in ((0, 0), (3, int(last[0])), (int(plan.rows[NEUTRAL]) - 1, int(last[1]))):
        bad = y.copy()
        bad[row, column] = value * (plan.steps[columns[column]] if abs(value) < 1e9 else 1)
        with pytest.raises(InputError, match="quantizer steps: encode"):
            backend.to_planes(bad, columns, plan, FAMILY.quantizer, FAMILY.tables)
    # What is below a column's last component is not looked at.
    coarse = int(np.argmin(plan.rows[columns]))
    assert plan.rows[columns[coarse]] < 24
    below = y.copy()
    below[plan.rows[columns[coarse]] :, coarse] = value
    planes, escapes = backend.to_planes(below, columns, plan, FAMILY.quantizer, FAMILY.tables)
    want, listed = backend.to_planes(y, columns, plan, FAMILY.quantizer, FAMILY.tables)
    coded = np.arange(len(planes))[:, None] < plan.planes[columns]
    assert np.array_equal(planes[coded], want[coded]) and np.array_equal(escapes.index, listed.index)


def test_a_section_costs_little_more_than_its_ideal_code() -> None:
    plan = plan_of(120, widest=100)
    rng = np.random.default_rng(0)
    classes = np.clip(np.rint(rng.normal(NEUTRAL, 2, 256)), 0, 15).astype(np.uint8)
    columns = classes[coding_order(classes)]
    y = coefficients(120, columns, plan, widest=100)
    y[0, 128], y[3, 0] = 0, 0
    numba = get_stages("numba")
    table = class_table(class_frequencies(np.bincount(classes, minlength=16)))
    section = ClassedSection([(classes, columns, y)], plan, table)
    (data,) = CoefficientCoder(numba, FAMILY, 0).encode_classes([section], 256)
    planes, escapes = numba.to_planes(y, columns, plan, FAMILY.quantizer, FAMILY.tables)
    ideal = 64.0 * len(escapes.index) + float(table.bits[0, classes].sum())
    for t, k in enumerate(columns):
        depth = plan.planes[k]
        ideal += float(FAMILY.tables.bits[plan.tables[k, :depth], planes[:depth, t]].sum())
    assert ideal <= 8 * len(data) <= 1.03 * ideal
