"""The stages that turn coefficients into streams: order, planes, rANS. Each implementation against the reference."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.codec.planned import TABLE, rans_decode, same_escapes, same_streams, section_plan

from cuvee.codec.entropy.coding_plan import ESCAPE, MAX_LEVEL, MAX_SHIFT, CodingPlan, Quantizer
from cuvee.codec.entropy.family import TABLES, coding_plan, default_family
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, normalize_counts, raw_bit_tables
from cuvee.codec.entropy.token_classes import (
    CLASS_UNITS,
    CLASSES,
    NEUTRAL,
    ClassedPlan,
    ColumnPlan,
    SectionPlanes,
    class_frequencies,
    class_table,
    default_class_frequencies,
    one_class,
)
from cuvee.codec.errors import CorruptError, InputError, ProfileError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.format.streams import ONE_CLASS, WINDOW, Escapes, Streams, stream_count
from cuvee.codec.schemes.coefficients import tokens_per_stream
from cuvee.codec.stages.compiled.coder_steps import decode_alike_steps, decode_steps
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.compiled.rans import decode_class_stream
from cuvee.codec.stages.implementations import Stages, get_stages, stage_names
from cuvee.codec.stages.reference import rans, symbols
from cuvee.codec.stages.reference.symbols import class_runs, from_planes
from cuvee.codec.stages.reference.token_order import coding_order
from cuvee.codec.support.arrays import F32, I32, U8, U16
from cuvee.codec.support.steps import step_value

FAMILY = default_family()
TOKENS = (1, 15, 63, 255, 256, 257, 700)
WIDEST = TABLES - 1 + 4 * MAX_SHIFT
Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


@pytest.fixture(params=stage_names())
def stages(request: pytest.FixtureRequest) -> Stages:
    return get_stages(request.param)


def sorted_classes(tokens: int, seed: int, finest: int = 0) -> U8:
    """Classes of columns: any, rising within each window."""
    classes = np.random.default_rng(seed).integers(finest, CLASSES, tokens).astype(np.uint8)
    return classes[coding_order(classes)]


WITHOUT_A_COMPILER = """
import sys, torch
from cuvee import Codec, KVChunk, KVLayout, LayerLayout, Profile
from cuvee.codec.learning.calibrate import fit
layout = KVLayout("tiny", (LayerLayout(1, 4, 4, None),), "float32", None)
chunks = [KVChunk(*torch.randn(2, 1, 60, 1, 4), layout) for _ in range(2)]
for profile, quality in ((Profile.unlearned(layout), "lossless"), (fit(layout, chunks, "layer"), "balanced")):
    codec = Codec(profile, quality, backend="reference")
    assert codec.decode(codec.encode(chunks[0])).tokens == 60
print([name for name in sys.modules if name.split(".")[0] == "numba" or ".stages.compiled" in name])
"""


def test_the_reference_needs_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_A_COMPILER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# --- the order of the columns


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
def test_tokens_are_arranged_in_that_order(stages: Stages, tokens: int, rows: int, known: int | None) -> None:
    rng = np.random.default_rng(tokens)
    for classes in (rng.integers(0, CLASSES, tokens).astype(np.uint8), np.full(tokens, CLASSES - 1, np.uint8)):
        x = torch.from_numpy(rng.normal(size=(tokens, 7)).astype(np.float32))
        leading = None if known is None else torch.from_numpy(rng.normal(size=(known, tokens)).astype(np.float32))
        order = coding_order(classes)
        columns, ordered, y = stages.arrange(classes, x.clone(), leading, rows)
        assert columns.dtype == np.uint8 and np.array_equal(columns, classes[order])
        assert torch.equal(ordered, x[order]) and y.shape == (rows, tokens)
        for got, want in zip(y, () if leading is None else leading[:, order], strict=False):
            assert torch.equal(got, want)
        y.fill_(7)
        assert torch.equal(ordered, x[order]), "coefficients have room of their own"


@pytest.mark.parametrize("tokens", [1, 8, 255, 256, 257, 600])
@pytest.mark.parametrize("n", [1, 8, 128])
def test_rows_hold_every_column_once_and_streams_stay_in_a_window(tokens: int, n: int) -> None:
    seen: dict[int, int] = {}
    for streams, columns in rans.stream_rows(tokens, n):
        assert streams.stop - streams.start == columns.stop - columns.start
        for stream, column in zip(range(streams.start, streams.stop), range(columns.start, columns.stop), strict=True):
            assert column not in seen
            seen[column] = stream
    assert sorted(seen) == list(range(tokens))
    assert set(seen.values()) == set(range(stream_count(tokens, n)))
    assert all(stream * n // WINDOW == column // WINDOW for column, stream in seen.items())
    assert max(np.bincount(list(seen.values()))) <= n


def test_a_plan_has_no_deeper_columns_than_finer_ones() -> None:
    plan = section_plan(40)
    assert plan.finest == 0 and np.all(np.diff(plan.rows) <= 0) and np.all(np.diff(plan.planes) <= 0)
    assert plan.rows[0] > plan.rows[NEUTRAL] > plan.rows[-1] and plan.planes[0] > plan.rows[0]
    assert plan.steps[NEUTRAL] == 1.0 and plan.steps[NEUTRAL + 2] == 2.0
    assert np.array_equal(plan.tables[3, : plan.planes[3]], plan.of(3).tables)


def test_a_plan_leaves_out_classes_that_are_too_fine() -> None:
    plan = section_plan(10, step=-300, widest=500)
    assert plan.finest == 12 and plan.plans[11] is None and plan.plans[12] is not None
    assert np.all(plan.rows[:12] == 0)
    with pytest.raises(ProfileError, match="class 11, which is finer"):
        plan.of(11)
    with pytest.raises(ProfileError, match="too small"):
        section_plan(10, step=-900, widest=500)


def test_runs_of_classes() -> None:
    found = list(class_runs(np.array([3, 3, 5, 9, 9], np.uint8)))
    assert found == [(slice(0, 2), 3), (slice(2, 3), 5), (slice(3, 5), 9)]
    assert list(class_runs(np.empty(0, np.uint8))) == []


# --- the entropy coder


@cache
def tables_of(prob_bits: int) -> EntropyTables:
    """A flat, a steep, a nearly certain, and a two-symbol table, then raw bits."""
    level = np.abs(np.arange(SYMBOLS, dtype=np.int8).astype(np.float64))
    certain = np.zeros(SYMBOLS)
    certain[[9, 250]] = 10**6, 1
    two = np.zeros(SYMBOLS)
    two[[0, 255]] = 1
    rows = [np.ones(SYMBOLS), np.exp2(-level / 2), certain, two]
    own = EntropyTables(np.stack([normalize_counts(r, prob_bits) for r in rows]), prob_bits)
    return own.extended(raw_bit_tables(prob_bits))


@dataclass(frozen=True)
class Case:
    """Symbols that follow their tables, and how they are to be coded."""

    section: SectionPlanes
    tables: EntropyTables

    def encode(self, stages: Stages) -> Streams:
        return stages.rans_encode([self.section], self.tables)[0]

    def decode(self, stages: Stages, streams: Streams) -> U8:
        own = self.section
        return rans_decode(stages.name, streams, own.columns, own.plan, self.tables, own.tokens_per_stream)

    def check(self, planes: U8) -> None:
        """These are the planes of the case; what is below a column's last one does not count."""
        own = self.section
        coded = np.arange(len(planes))[:, None] < own.plan.planes[own.columns]
        assert planes.shape == own.planes.shape and np.array_equal(planes[coded], own.planes[coded])


def make_case(depths: list[int], tokens: int, n: int, prob_bits: int = 12, seed: int = 0) -> Case:
    """Columns of as many classes as there are depths, which fall from class to class."""
    rng = np.random.default_rng(seed)
    tables = tables_of(prob_bits)
    plan = ColumnPlan(
        np.array(depths, np.int32), rng.integers(0, len(tables), (len(depths), depths[0])).astype(np.uint16)
    )
    classes = rng.integers(0, len(depths), tokens).astype(np.uint8)
    columns = classes[coding_order(classes)]
    slot = rng.integers(0, 1 << prob_bits, (depths[0], tokens))
    planes = (tables.slots[plan.tables[columns].T, slot] >> 24).astype(np.uint8)
    return Case(SectionPlanes(planes, columns, plan, n), tables)


DEPTHS = ([9], [9, 7, 7, 4, 0], [3, 0])


@pytest.mark.parametrize("prob_bits", [8, 12])
@pytest.mark.parametrize("n", [1, 8, 128])
@pytest.mark.parametrize("tokens", TOKENS)
def test_streams_are_those_of_the_reference_and_decode_to_the_input(
    stages: Stages, tokens: int, n: int, prob_bits: int
) -> None:
    for depths in DEPTHS:
        case = make_case(depths, tokens, n, prob_bits, seed=tokens)
        want = case.encode(get_stages("reference"))
        assert len(want.states) == stream_count(tokens, n) == len(want.lengths)
        same_streams(case.encode(stages), want)
        case.check(case.decode(stages, want))


@settings(max_examples=40, deadline=None)
@given(
    depths=st.lists(st.integers(0, 6), min_size=1, max_size=16),
    tokens=st.integers(1, 300),
    n=st.sampled_from([1 << log2 for log2 in range(8)]),
    prob_bits=st.integers(8, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_columns_come_back(depths: list[int], tokens: int, n: int, prob_bits: int, seed: int) -> None:
    case = make_case(sorted(depths, reverse=True), tokens, n, prob_bits, seed)
    want = case.encode(get_stages("reference"))
    for name in stage_names():
        same_streams(case.encode(get_stages(name)), want)
        case.check(case.decode(get_stages(name), want))


@pytest.mark.parametrize("tokens", [1, 256, 600])
def test_sections_coded_together_are_the_same_words(stages: Stages, tokens: int) -> None:
    """Sections of different depths, classes and streams; one of them codes nothing."""
    made = [([24, 20, 3], 8), ([3], 1), ([0], 128), ([40, 40, 39, 1, 0, 0], 128), ([12], 16)]
    cases = [make_case(depths, tokens, n, seed=number) for number, (depths, n) in enumerate(made)]
    together = stages.rans_encode([case.section for case in cases], tables_of(12))
    for case, streams in zip(cases, together, strict=True):
        same_streams(streams, case.encode(get_stages("reference")))
    assert not len(together[2].words) and (together[2].states == 1 << 16).all()


def test_the_rarest_symbols_make_at_most_one_word_each(stages: Stages) -> None:
    plan = one_class(np.full(5, 2, np.uint16))  # byte 250 has frequency 1
    case = Case(SectionPlanes(np.full((5, 70), 250, np.uint8), np.zeros(70, np.uint8), plan, 8), tables_of(12))
    streams = case.encode(stages)
    same_streams(streams, case.encode(get_stages("reference")))
    assert int(streams.lengths.max()) <= 5 * 8
    case.check(case.decode(stages, streams))


def test_results_do_not_depend_on_what_memory_held_before(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([7, 6, 2], 65, 8, seed=3)
    empty: Callable[..., Array] = np.empty
    results = []
    for poison in (0x00, 0xA5, 0xFF):

        def poisoned(*args: object, poison: int = poison, **options: object) -> Array:
            out = empty(*args, **options)
            out.view(np.uint8).fill(poison)
            return out

        monkeypatch.setattr(np, "empty", poisoned)
        streams = case.encode(stages)
        results.append((streams.states.tobytes(), streams.lengths.tobytes(), streams.words.tobytes()))
        case.check(case.decode(stages, streams))
    assert results[0] == results[1] == results[2]


def test_arguments_stay_as_they_were(stages: Stages) -> None:
    case = make_case([7, 5], 65, 8, seed=4)
    planes = case.section.planes.copy()
    streams = case.encode(stages)
    kept = Streams(streams.states.copy(), streams.lengths.copy(), streams.words.copy())
    case.decode(stages, streams)
    np.testing.assert_array_equal(case.section.planes, planes)
    same_streams(streams, kept)


@pytest.mark.parametrize("at", [slice(0, 256), slice(256, 512), slice(512, 700), slice(256, 700)])
def test_windows_decode_alone(stages: Stages, at: slice) -> None:
    case = make_case([6, 4, 4, 1], 700, 8, seed=5)
    none = Escapes(np.empty(0, np.uint32), np.empty(0, np.int32))
    part, _ = IndexedPart(CodedPart(case.encode(stages), none, 8, ONE_CLASS), 700).select(at)
    own = replace(case.section, planes=case.section.planes[:, at], columns=case.section.columns[at])
    run = Case(own, case.tables)
    run.check(run.decode(stages, part))


def test_fixed_input_gives_these_words(stages: Stages) -> None:
    """They may not change without a new format version."""
    freq = np.zeros((2, SYMBOLS), np.uint16)
    freq[0, [0, 1, 2, 255]] = 2048, 1024, 512, 512
    freq[1, [7, 9]] = 4095, 1
    planes = np.array(
        [
            [7, 7, 7, 9, 9, 9, 7],
            [1, 2, 255, 0, 0, 1, 1],
            [255, 0, 1, 2, 2, 0, 255],
            [255, 255, 2, 1, 0, 0, 2],
        ],
        np.uint8,
    )
    plan = ColumnPlan(np.array([4, 3], np.int32), np.array([[1, 0, 0, 0]] * 2, np.uint16))
    case = Case(SectionPlanes(planes, np.array([0] * 5 + [1] * 2, np.uint8), plan, 4), EntropyTables(freq, 12))
    streams = case.encode(stages)
    assert [hex(x) for x in streams.states] == ["0x41fea2", "0x107ce7b"]
    assert streams.lengths.tolist() == [2, 2]
    assert [hex(x) for x in streams.words] == ["0xd83c", "0x5403", "0x9480", "0xfff"]
    case.check(case.decode(stages, streams))


def test_a_state_at_the_very_limit_gives_up_a_word(stages: Stages) -> None:
    # Byte 0 of one raw bit doubles the state: 2**16 becomes 2**31 in 15 steps, and that is frequency << 20 exactly.
    for steps, state, words in ((15, 1 << 31, []), (16, 1 << 16, [0]), (31, 1 << 31, [0]), (32, 1 << 16, [0, 0])):
        plan = one_class(np.full(steps, 4, np.uint16))
        case = Case(SectionPlanes(np.zeros((steps, 1), np.uint8), np.zeros(1, np.uint8), plan, 1), tables_of(12))
        streams = case.encode(stages)
        assert (streams.states.tolist(), streams.words.tolist()) == ([state], words)
        case.check(case.decode(stages, streams))


# --- classes


@pytest.mark.parametrize("counts", [np.zeros(16), np.eye(16)[3] * 1e6, np.arange(16.0)])
def test_class_tables_can_code_every_class(counts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    freq = class_frequencies(counts)
    assert freq.dtype == np.uint16 and freq.sum() == 4096 and freq.min() >= 1
    assert len(class_table(freq)) == 1


def test_neutral_classes_cost_next_to_nothing_without_a_predictor(stages: Stages) -> None:
    freq = default_class_frequencies()
    assert freq.sum() == 4096 and freq.min() == 1
    stream = stages.encode_classes(np.full(2048, NEUTRAL, np.uint8), class_table(freq))
    assert len(stream.words) <= 1


@pytest.mark.parametrize("tokens", TOKENS)
def test_classes_are_one_stream(stages: Stages, tokens: int) -> None:
    classes = np.random.default_rng(tokens).integers(0, CLASSES, tokens).astype(np.uint8)
    for table in (TABLE, class_table(class_frequencies(np.bincount(classes, minlength=CLASSES)))):
        stream = stages.encode_classes(classes, table)
        same_streams(stream, rans.encode_classes(classes, table))
        np.testing.assert_array_equal(rans.decode_classes(stream, table, tokens), classes)
        out, data = np.empty(tokens, np.uint8), stream.words.astype("<u2").view(np.uint8)
        arguments = data, 0, len(stream.words), int(stream.states[0]), table.slots[0], table.prob_bits, out
        assert decode_class_stream(*arguments) and np.array_equal(out, classes)
        bad = Streams(stream.states ^ np.uint32(1 << 17), stream.lengths, stream.words)
        with pytest.raises(CorruptError, match="class stream of a section does not end where it must"):
            rans.decode_classes(bad, table, tokens)
        assert not decode_class_stream(data, 0, len(stream.words), int(bad.states[0]), *arguments[4:])


# --- damaged streams


def damaged(good: Streams) -> dict[str, Streams]:
    states, lengths, words = good.states, good.lengths, good.words
    longest = int(lengths.argmax())
    end = int(lengths[: longest + 1].sum())

    def changed(array: Array, at: int, value: int) -> object:
        copy = array.copy()
        copy[at] = value
        return copy

    def make(states: object = states, lengths: object = lengths, words: object = words) -> Streams:
        return Streams(states, lengths, words)  # type: ignore[arg-type]

    moved = lengths.copy()
    moved[0] -= 1
    moved[1] += 1
    return {
        "state zero": make(states=changed(states, 0, 0)),
        "state below the bound": make(states=changed(states, 0, 0xFFFF)),
        "state all ones": make(states=changed(states, 1, 0xFFFFFFFF)),
        "states swapped": make(states=states[::-1].copy()),
        "a word less, length adjusted": make(
            lengths=changed(lengths, longest, int(lengths[longest]) - 1), words=np.delete(words, end - 1)
        ),
        "a word more, length adjusted": make(
            lengths=changed(lengths, longest, int(lengths[longest]) + 1), words=np.insert(words, end, 0)
        ),
        "a word moved to the next stream": make(lengths=moved),
        "no words": make(lengths=np.zeros_like(lengths), words=words[:0]),
        "too few words": make(words=words[: len(words) // 2]),
        "the last word missing": make(words=words[:-1]),
        "no words, lengths kept": make(words=words[:0]),
        "lengths beyond everything": make(lengths=changed(lengths, len(lengths) - 1, 0xFFFFFFFF)),
    }


HURT = make_case([8], 37, 4, seed=6)
DAMAGED = damaged(HURT.encode(get_stages("reference")))


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_streams_are_found_out(stages: Stages, name: str) -> None:
    with pytest.raises(CorruptError):
        HURT.decode(stages, DAMAGED[name])


def test_the_damaged_stream_is_named(stages: Stages) -> None:
    case = make_case([8, 3], 37 * 20, 4, seed=7)
    good = case.encode(stages)
    states = good.states.copy()
    states[[131, 150]] ^= 1 << 20
    with pytest.raises(CorruptError, match="stream 131 of 185"):
        case.decode(stages, Streams(states, good.lengths, good.words))


@pytest.mark.parametrize("wrong", ["finer", "coarser", "shuffled"])
def test_classes_that_are_not_those_of_the_streams_are_found(stages: Stages, wrong: str) -> None:
    case = make_case(list(range(32, 0, -2)), 256, 8, seed=8)
    columns = case.section.columns
    other = {
        "finer": np.zeros_like(columns),
        "coarser": np.full_like(columns, CLASSES - 1),
        "shuffled": np.sort(np.random.default_rng(1).permutation(CLASSES).astype(np.uint8)[columns]),
    }[wrong]
    with pytest.raises(CorruptError):
        Case(replace(case.section, columns=other), case.tables).decode(stages, case.encode(stages))


def test_every_flipped_bit_is_noticed_or_changes_the_symbols(stages: Stages) -> None:
    # rANS is a bijection: a flip among equally likely symbols gives another valid stream (checksums are the
    # container's), but never the same symbols.
    case = make_case([4], 6, 4, seed=8)
    good = case.encode(stages)
    raised = 0
    for which in ("states", "words"):
        array = getattr(good, which)
        for at in range(len(array)):
            for bit in range(8 * array.itemsize):
                flipped = array.copy()
                flipped[at] ^= 1 << bit
                parts = {"states": good.states, "lengths": good.lengths, "words": good.words, which: flipped}
                try:
                    assert not np.array_equal(case.decode(stages, Streams(**parts)), case.section.planes)
                except CorruptError:
                    raised += 1
    assert raised > 4 * (len(good.states) + len(good.words))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_streams_decode_alike_or_raise_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = make_case([4, 2], 19, 4, seed=9)
    lengths = rng.integers(0, 9, 5).astype(np.uint32)
    states = rng.integers(0, 1 << 32, 5, dtype=np.uint32)
    words = rng.integers(0, 1 << 16, int(lengths.sum()), dtype=np.uint16)
    outcomes = set()
    for name in stage_names():
        try:
            outcomes.add(case.decode(get_stages(name), Streams(states, lengths, words)).tobytes())
        except CorruptError as error:
            outcomes.add(str(error).encode())
    assert len(outcomes) == 1


_first, _second = decode_steps
_first_alike, _second_alike = decode_alike_steps


@compiled
def _two_steps(x, at, ahead, base, slots, words, count, table, out):  # type: ignore[no-untyped-def]
    """Decode two symbols per lane, with a table of its own or the same table."""
    if table < 0:
        _first(x, at, ahead, 0, base, slots, words, 4, count, 12, 16, out, 0)
        _second(x, at, ahead, 0, base, slots, words, 4, count, 12, 16, out, 16)
    else:
        _first_alike(x, at, ahead, 0, table, slots, words, 4, count, 12, 16, out, 0)
        _second_alike(x, at, ahead, 0, table, slots, words, 4, count, 12, 16, out, 16)


@pytest.mark.parametrize("table", [-1, 0])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_no_word_is_read_beyond_the_last(table: int, count: int) -> None:
    """Damaged streams ask for words that are not there: whatever follows must not be read."""
    slots = np.full(1 << 12, 1 << 12, np.uint32)  # symbols of one slot each, so that both steps take a word
    for place in (*range(max(count - 2, 0), count + 3), 1000, 2**30):
        states = []
        for beyond in (0, 0xFFFF):
            x, at = np.full(16, 1 << 16, np.uint32), np.full(16, place, np.uint32)
            words = np.full(2048, beyond, np.uint16)
            words[: 2 + count] = np.arange(2 + count)  # four bytes come first
            _two_steps(
                x, at, np.empty(16, np.uint32), np.zeros(16, np.uint32), slots, words.view(np.uint8), count, table,
                np.zeros(32, np.uint8),
            )  # fmt: skip
            assert (at == place + 2).all(), "the lanes took two words"
            states.append(x)
        np.testing.assert_array_equal(states[0], states[1])
        if place + 2 <= count:
            # A state moves by its upper bits, then takes a word as its lower ones.
            assert (states[0] == (((16 << 16 | place + 2) >> 12) << 16 | place + 3)).all()


# --- how good the code is


def workload(tokens: int, scale: float, decay: float) -> tuple[Case, float, int]:
    """Symbols of components of falling scale, as a section has them; their ideal bits; and the bytes of a section."""
    rng = np.random.default_rng(tokens)
    deviation = scale * np.exp(-np.arange(256) / decay)
    plan = section_plan(256, scales=np.rint(64 * np.log2(deviation)).astype(np.int16))
    classes = np.clip(np.rint(rng.normal(NEUTRAL, 1, tokens)), 0, CLASSES - 1).astype(np.uint8)
    columns = classes[coding_order(classes)]
    y = (rng.logistic(0, np.sqrt(3) / np.pi, (256, tokens)) * deviation[:, None]).astype(np.float32)
    numba = get_stages("numba")
    planes, escapes = numba.to_planes(y, columns, plan, FAMILY.quantizer, FAMILY.tables)
    share = np.bincount(classes, minlength=CLASSES) / tokens
    n = tokens_per_stream(int(share @ plan.planes), float(share @ plan.entropy(FAMILY.tables)))
    table = class_table(class_frequencies(np.bincount(classes, minlength=CLASSES)))
    case = Case(SectionPlanes(planes, columns, plan, n), FAMILY.tables)
    ideal = 64.0 * len(escapes.index) + float(table.bits[0, classes].sum())
    for k, own in zip(columns, planes.T, strict=True):
        ideal += float(FAMILY.tables.bits[plan.tables[k, : plan.planes[k]], own[: plan.planes[k]]].sum())
    part = CodedPart(case.encode(numba), escapes, n, numba.encode_classes(classes, table))
    return case, ideal, len(write_coded(part, int(plan.planes.max())))


@pytest.mark.parametrize(("scale", "decay"), [(4.0, 90.0), (2.0, 60.0), (8.0, 120.0)])
@pytest.mark.parametrize(("tokens", "limit"), [(256, 0.03), (64, 0.06)])
def test_overhead_over_the_ideal_code_length(scale: float, decay: float, tokens: int, limit: float) -> None:
    """At a moderate step of a small model's section: deviations of few steps, most of them below one."""
    _, ideal, size = workload(tokens, scale, decay)
    assert ideal <= 8 * size <= ideal * (1 + limit)


@pytest.mark.parametrize("n", [1, 8, 64])
def test_sizes_agree_with_constriction(n: int) -> None:
    import constriction  # here, so that `-m gpu` collects on a machine without it

    case = make_case([60], 256, n, seed=1)
    ours, which = case.encode(get_stages("numba")), case.section.plan.tables[0]
    coder = constriction.stream.stack.AnsCoder()
    models = [
        constriction.stream.model.Categorical(f / (1 << 12), perfect=False) for f in case.tables.freq.astype(float)
    ]
    for step in reversed(range(len(which))):
        coder.encode_reverse(case.section.planes[step].astype(np.int32), models[which[step]])
    theirs = coder.get_compressed().nbytes
    for step in range(len(which)):
        np.testing.assert_array_equal(coder.decode(models[which[step]], 256), case.section.planes[step])
    streams = len(ours.states)
    assert theirs * 0.99 <= ours.words.nbytes + 6 * streams
    assert ours.words.nbytes + 4 * streams <= theirs * 1.01 + 6 * streams


# --- coefficients to planes and back


def test_levels_leave_room_in_32_bits() -> None:
    """A level plus half a range of low bits stays inside int32, which the compiled loops count in."""
    assert MAX_LEVEL < 1 << 30


def quantizer(seed: int = 0) -> Quantizer:
    """Different thresholds and reconstructions for every table."""
    rng = np.random.default_rng(seed)
    rounding = rng.uniform(0.25, 0.5, TABLES).astype(np.float32)
    dead = (1 - rounding + rng.uniform(0, 0.2, TABLES)).astype(np.float32)
    return Quantizer(dead, rounding, rng.uniform(-0.25, 0.25, (TABLES, 2)).astype(np.float32))


def same_plan(codes: list[int], tables: U16 | None = None) -> ClassedPlan:
    """A plan in which the neutral class has components of these scale codes, and the only one: its step is 1."""
    own = coding_plan(np.array(codes, np.int32))
    own = own if tables is None else CodingPlan(own.level_table, own.shift, tables)
    return ClassedPlan([None] * NEUTRAL + [own] * (CLASSES - NEUTRAL), 0)


def coefficients(plan: ClassedPlan, columns: U8, seed: int = 0) -> F32:
    """Values on and next to thresholds, both zeros, tiny and huge ones, among ordinary ones."""
    rng = np.random.default_rng(seed)
    y = (rng.laplace(0, 3, (int(plan.rows.max()), len(columns))) * plan.steps[columns]).astype(np.float32)
    special = np.array([0.0, -0.0, 1e-40, -1e-40, 0.5, -0.5, 0.6, 1.0, -1.0, 1.6, 127.5, -128.5, 3e4, -1e6], np.float32)
    where = rng.permutation(y.size)[: len(special)]
    y.ravel()[where] = special[: len(where)] * plan.steps[columns][where % len(columns)]
    return y


def to_planes(
    stages: Stages, levels: list[list[int]], plan: ClassedPlan, tables: EntropyTables = FAMILY.tables
) -> tuple[U8, Escapes]:
    """Planes and escapes of levels at step 1: of columns of the neutral class."""
    y = np.array(levels, np.float32)
    return stages.to_planes(y, np.full(y.shape[1], NEUTRAL, np.uint8), plan, FAMILY.quantizer, tables)


@pytest.mark.parametrize("step", [-100, 0, 130])
@pytest.mark.parametrize("tokens", TOKENS)
def test_planes_are_those_of_the_reference_and_come_back(stages: Stages, tokens: int, step: int) -> None:
    plan, own = section_plan(30, step), quantizer()
    columns = sorted_classes(tokens, tokens, plan.finest)
    y = coefficients(plan, columns)
    kept = y.copy()
    planes, escapes = stages.to_planes(y, columns, plan, own, FAMILY.tables)
    want, listed = symbols.to_planes(y, columns, plan, own, FAMILY.tables)
    coded = np.arange(len(want))[:, None] < plan.planes[columns]
    assert planes.shape == want.shape and np.array_equal(planes[coded], want[coded])
    same_escapes(escapes, listed)
    np.testing.assert_array_equal(y, kept)
    assert (FAMILY.tables.freq[plan.tables[columns].T[: len(planes)][coded], planes[coded]] > 0).all()
    back = from_planes(planes, columns, escapes, plan, own, len(y))
    assert torch.equal(from_planes(planes, columns, escapes, plan, own, len(y), torch.bfloat16), back.bfloat16())
    # A magnitude in [m - rounding, m + 1 - rounding) comes back as m - shrink; below the dead zone it comes back as 0.
    for t, k in enumerate(columns):
        rows, unit = int(plan.rows[k]), float(plan.steps[k])
        dead, rounding, shrink = (a[plan.level_table[k, :rows]] for a in (own.dead_zone, own.rounding, own.shrink))
        above, below = (1 - rounding)[:, None] + shrink, rounding[:, None] - shrink
        got, put = back[:rows, t].numpy(), y[:rows, t]
        bound = np.maximum(dead, np.maximum(above, below).max(1))
        assert (np.abs(put - got) <= unit * bound + 1e-6 * np.abs(put) + 1e-4 * unit).all()
        assert not (got * put < 0).any() and not back[rows:, t].any()


def test_the_thresholds_themselves_are_quantized_alike(stages: Stages) -> None:
    own, plan = quantizer(1), same_plan(np.linspace(0, WIDEST, 57).round().astype(int).tolist())
    table = plan.of(NEUTRAL).level_table
    edge = np.stack([own.dead_zone, 1 - own.rounding, 2 - own.rounding, 7 - own.rounding], axis=1)[table]
    below, above = np.nextafter(edge, np.float32(0)), np.nextafter(edge, np.float32(9))
    y = np.concatenate([edge, below, above, -edge, -below], axis=1)
    columns = np.full(y.shape[1], NEUTRAL, np.uint8)
    planes, escapes = stages.to_planes(y, columns, plan, own, FAMILY.tables)
    want, listed = symbols.to_planes(y, columns, plan, own, FAMILY.tables)
    np.testing.assert_array_equal(planes, want)
    same_escapes(escapes, listed)
    levels = symbols.unpack(planes, escapes, plan.of(NEUTRAL))
    assert (levels[:, 0] == 1).all() and (levels[:, 4] == 0).all()
    np.testing.assert_array_equal(levels[:, 12:], -levels[:, :8])


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(1 - MAX_LEVEL, MAX_LEVEL - 1) | st.integers(-140, 140), min_size=1, max_size=40),
    code=st.integers(0, WIDEST),
)
def test_any_levels_come_back(values: list[int], code: int) -> None:
    plan = same_plan([code, 0])
    for name in stage_names():
        planes, escapes = to_planes(get_stages(name), [values, values[::-1]], plan)
        got: I32 = symbols.unpack(planes, escapes, plan.of(NEUTRAL))
        assert got.tolist() == [values, values[::-1]]


def test_each_class_is_coded_as_its_own_step_codes_it(stages: Stages) -> None:
    plan = section_plan(20)
    for k in (0, NEUTRAL, CLASSES - 1):
        columns, own = np.full(100, k, np.uint8), plan.of(k)
        y = coefficients(plan, columns)
        planes, escapes = stages.to_planes(y, columns, plan, FAMILY.quantizer, FAMILY.tables)
        step = step_value(CLASS_UNITS * (k - NEUTRAL))
        levels = symbols.quantize(y[: len(own.shift)], step, own, FAMILY.quantizer)
        want, listed = symbols.pack(levels, own, FAMILY.tables)
        np.testing.assert_array_equal(planes, want)
        same_escapes(escapes, listed)


@pytest.mark.parametrize("shift", range(1, MAX_SHIFT + 1))
def test_wide_components_split_into_high_and_low(stages: Stages, shift: int) -> None:
    plan = same_plan([TABLES - 1 + 4 * shift])
    own = plan.of(NEUTRAL)
    assert own.shift.tolist() == [shift] and own.wide.tolist() == [0] and own.planes == 2
    q = [0, 1, -1, 50 << shift, -(50 << shift), (1 << shift) // 2, -(1 << shift) // 2 - 1]
    planes, escapes = to_planes(stages, [q], plan)
    assert not len(escapes.index)
    high, low = planes[0].view(np.int8).astype(np.int64), planes[1].astype(np.int64)
    assert (low < 1 << shift).all()
    assert ((high << shift) + low - (1 << shift - 1)).tolist() == q
    np.testing.assert_array_equal(high, [0, int(shift == 1), 0, 50, -50, 1, -1])


@pytest.mark.parametrize("value", [128, -128, -129, 255, 256, MAX_LEVEL - 1, 1 - MAX_LEVEL])
def test_values_beyond_a_byte_escape(stages: Stages, value: int) -> None:
    q = np.zeros((2, 9), int)
    q[1, 4] = value
    planes, escapes = to_planes(stages, q.tolist(), same_plan([20, 20]))
    assert planes[1, 4] == ESCAPE and (planes == ESCAPE).sum() == 1
    assert escapes.index.tolist() == [13] and escapes.value.tolist() == [value]


def test_what_a_table_cannot_code_escapes(stages: Stages) -> None:
    freq = np.zeros((3, 256), np.uint16)
    freq[:, 0] = 4094
    freq[:, ESCAPE] = 1
    freq[[0, 1], [1, 255]] = 1  # table 0 knows 1, table 1 knows -1, table 2 knows 2
    freq[2, 2] = 1
    plan = same_plan([0, 0, 0], np.arange(3, dtype=np.uint16))
    planes, escapes = to_planes(stages, [[1, -1, 2, 0]] * 3, plan, EntropyTables(freq, 12))
    assert planes.tolist() == [[1, ESCAPE, ESCAPE, 0], [ESCAPE, 255, ESCAPE, 0], [ESCAPE, ESCAPE, 2, 0]]
    assert escapes.index.tolist() == [1, 2, 4, 6, 8, 9] and escapes.value.tolist() == [-1, 2, 1, 2, 1, -1]


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("tokens", [1, 15, 63, 257])
def test_a_table_may_leave_gaps_between_the_values_that_it_codes(stages: Stages, every: bool, tokens: int) -> None:
    """What falls in a gap escapes, and counts once; `every` table has gaps, or every other one."""
    freq = FAMILY.tables.freq.copy()
    gapped = freq if every else freq[::2]
    for value in (2, 256 - 3):
        gapped[:, 0] += gapped[:, value]
        gapped[:, value] = 0
    tables = EntropyTables(freq, FAMILY.tables.prob_bits)
    assert (tables.reach[:, 0] > tables.reach[:, 1]).any()
    plan = section_plan(30)
    columns = sorted_classes(tokens, tokens)
    y = coefficients(plan, columns)
    planes, escapes = stages.to_planes(y, columns, plan, FAMILY.quantizer, tables)
    want, listed = symbols.to_planes(y, columns, plan, FAMILY.quantizer, tables)
    same_escapes(escapes, listed)
    assert tokens == 1 or np.isin([2, -3], escapes.value).all()
    coded = np.arange(len(want))[:, None] < plan.planes[columns]
    np.testing.assert_array_equal(planes[coded], want[coded])


@pytest.mark.parametrize(
    "index",
    [[], [1], [1, 11], [11, 12], [1, 11, 12, 13], [0, 1, 11, 12], [2, 11, 12], [1, 10, 12], [1, 11, 0xFFFFFFFF]],
)
def test_escapes_that_do_not_match_are_found_out(stages: Stages, index: list[int]) -> None:
    plan = same_plan([10, 50, 10])
    q = np.zeros((3, 6), int)
    q[[0, 1, 2], [1, 5, 0]] = 1000, 1 << 22, -1000
    planes, escapes = to_planes(stages, q.tolist(), plan)
    assert escapes.index.tolist() == [1, 11, 12]
    listed = Escapes(np.array(index, np.uint32), np.zeros(len(index), np.int32))
    with pytest.raises(CorruptError, match="escape"):
        symbols.unpack(planes, listed, plan.of(NEUTRAL))
    with pytest.raises(CorruptError, match="escape"):
        from_planes(planes, np.full(6, NEUTRAL, np.uint8), listed, plan, FAMILY.quantizer, 3)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan"), 3e38, 1.0 * MAX_LEVEL])
def test_values_too_large_are_found_wherever_they_are_coded(stages: Stages, value: float) -> None:
    plan = section_plan(24)
    columns = sorted_classes(300, 0, 7)
    last = np.flatnonzero(columns == NEUTRAL)[[0, -1]]
    y = coefficients(plan, columns)
    for row, column in ((0, 0), (3, int(last[0])), (int(plan.rows[NEUTRAL]) - 1, int(last[1]))):
        bad = y.copy()
        bad[row, column] = value * (plan.steps[columns[column]] if abs(value) < 1e9 else 1)
        with pytest.raises(InputError, match="quantizer steps: encode"):
            stages.to_planes(bad, columns, plan, FAMILY.quantizer, FAMILY.tables)
    # What is below a column's last component is not looked at.
    coarse = int(np.argmin(plan.rows[columns]))
    assert plan.rows[columns[coarse]] < 24
    below = y.copy()
    below[plan.rows[columns[coarse]] :, coarse] = value
    planes, escapes = stages.to_planes(below, columns, plan, FAMILY.quantizer, FAMILY.tables)
    want, listed = stages.to_planes(y, columns, plan, FAMILY.quantizer, FAMILY.tables)
    coded = np.arange(len(planes))[:, None] < plan.planes[columns]
    assert np.array_equal(planes[coded], want[coded]) and np.array_equal(escapes.index, listed.index)
