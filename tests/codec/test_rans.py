"""The entropy coder: every backend against the reference, against damaged bytes, and against constriction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuvee.codec.entropy.coding_plan import ESCAPE, Escapes
from cuvee.codec.entropy.coefficients import tokens_per_stream
from cuvee.codec.entropy.family import coding_plan, default_family, scale_codes, scale_index
from cuvee.codec.entropy.streams import Streams, stream_count
from cuvee.codec.entropy.tables import SYMBOLS, EntropyTables, normalize_counts, raw_bit_tables
from cuvee.codec.errors import CorruptError
from cuvee.codec.format.coded_part import CodedPart, write_streams
from cuvee.codec.format.part_index import IndexedPart
from cuvee.codec.stages.compiled.coder_steps import decode_alike_steps, decode_steps
from cuvee.codec.stages.compiled.compiler import compiled
from cuvee.codec.stages.implementations import Stages, get_stages, stage_names
from cuvee.codec.stages.reference import rans
from cuvee.codec.support.arrays import U8, U16

TOKENS = (1, 15, 63, 64, 65, 257)
PER_STREAM = (1, 2, 8, 128)


@pytest.fixture(params=stage_names())
def backend(request: pytest.FixtureRequest) -> Stages:
    return get_stages(request.param)


@dataclass(frozen=True)
class Case:
    """A matrix of symbols that follow their tables, and how it is to be coded."""

    symbols: U8
    which: U16
    tables: EntropyTables
    per_stream: int

    @property
    def tokens(self) -> int:
        tokens: int = self.symbols.shape[1]
        return tokens

    def reference(self) -> Streams:
        return rans.rans_encode(self.symbols, self.which, self.tables, self.per_stream)

    def encode(self, backend: Stages) -> Streams:
        return backend.rans_encode(self.symbols, self.which, self.tables, self.per_stream)

    def decode(self, backend: Stages, streams: Streams) -> U8:
        return backend.rans_decode(streams, self.which, self.tables, self.per_stream, self.tokens)


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


def make_case(steps: int, tokens: int, per_stream: int, prob_bits: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    tables = tables_of(prob_bits)
    which = rng.integers(0, len(tables), steps).astype(np.uint16)
    slot = rng.integers(0, 1 << prob_bits, (steps, tokens))
    symbols = (tables.slots[which[:, None], slot] >> 24).astype(np.uint8)
    return Case(symbols, which, tables, per_stream)


def assert_same(got: Streams, want: Streams) -> None:
    for name, dtype in (("states", np.uint32), ("lengths", np.uint32), ("words", np.uint16)):
        a, b = getattr(got, name), getattr(want, name)
        assert a.dtype == dtype and a.shape == b.shape and a.tobytes() == b.tobytes(), name


# --- every backend is the reference


@pytest.mark.parametrize("prob_bits", [8, 10, 12])
@pytest.mark.parametrize("per_stream", PER_STREAM)
@pytest.mark.parametrize("tokens", TOKENS)
def test_bytes_are_those_of_the_reference_and_decode_to_the_input(
    backend: Stages, tokens: int, per_stream: int, prob_bits: int
) -> None:
    case = make_case(9, tokens, per_stream, prob_bits, seed=tokens)
    want = case.reference()
    assert len(want.states) == stream_count(tokens, per_stream) == len(want.lengths)
    assert_same(case.encode(backend), want)
    np.testing.assert_array_equal(case.decode(backend, want), case.symbols)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(0, 6),
    tokens=st.integers(1, 70),
    per_stream=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    prob_bits=st.integers(8, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_matrix_comes_back_from_every_backend(
    steps: int, tokens: int, per_stream: int, prob_bits: int, seed: int
) -> None:
    case = make_case(steps, tokens, per_stream, prob_bits, seed)
    want = case.reference()
    for name in stage_names():
        assert_same(case.encode(get_stages(name)), want)
        np.testing.assert_array_equal(case.decode(get_stages(name), want), case.symbols)


@pytest.mark.parametrize("tokens", [1, 65])
def test_no_steps_leave_nothing_but_states(backend: Stages, tokens: int) -> None:
    case = make_case(0, tokens, 8, 12)
    streams = case.encode(backend)
    assert (streams.states == 1 << 16).all() and not streams.lengths.any() and not len(streams.words)
    assert case.decode(backend, streams).shape == (0, tokens)


def test_the_rarest_symbols_make_at_most_one_word_each(backend: Stages) -> None:
    tables = tables_of(12)
    which = np.full(5, 2, np.uint16)  # byte 250 has frequency 1
    case = Case(np.full((5, 70), 250, np.uint8), which, tables, 8)
    streams = case.encode(backend)
    assert_same(streams, case.reference())
    assert int(streams.lengths.max()) <= 5 * 8
    np.testing.assert_array_equal(case.decode(backend, streams), case.symbols)


def test_results_do_not_depend_on_what_memory_held_before(backend: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(7, 65, 8, 12, seed=3)
    empty: Callable[..., np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = np.empty
    results = []
    for poison in (0x00, 0xA5, 0xFF):

        def poisoned(
            *args: object, poison: int = poison, **options: object
        ) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
            out = empty(*args, **options)
            out.view(np.uint8).fill(poison)
            return out

        monkeypatch.setattr(np, "empty", poisoned)
        streams = case.encode(backend)
        results.append((streams.states.tobytes(), streams.lengths.tobytes(), streams.words.tobytes()))
        np.testing.assert_array_equal(case.decode(backend, streams), case.symbols)
    assert results[0] == results[1] == results[2]


def test_arguments_stay_as_they_were(backend: Stages) -> None:
    case = make_case(7, 65, 8, 12, seed=4)
    symbols = case.symbols.copy()
    streams = case.encode(backend)
    kept = Streams(streams.states.copy(), streams.lengths.copy(), streams.words.copy())
    case.decode(backend, streams)
    np.testing.assert_array_equal(case.symbols, symbols)
    assert_same(streams, kept)


@pytest.mark.parametrize(("first", "end"), [(0, 1), (3, 5), (8, 9), (0, 9)])
def test_a_run_of_streams_decodes_alone(backend: Stages, first: int, end: int) -> None:
    case = make_case(6, 70, 8, 12, seed=5)
    at = slice(first * 8, min(end * 8, 70))
    none = Escapes(np.empty(0, np.uint32), np.empty(0, np.int32))
    part, _ = IndexedPart(CodedPart(case.reference(), none, 8), 70).select(at)
    got = backend.rans_decode(part, case.which, case.tables, 8, at.stop - at.start)
    np.testing.assert_array_equal(got, case.symbols[:, at])


# --- the very words: they may not change without a new format version


def test_fixed_input_gives_these_words(backend: Stages) -> None:
    freq = np.zeros((2, SYMBOLS), np.uint16)
    freq[0, [0, 1, 2, 255]] = 2048, 1024, 512, 512
    freq[1, [7, 9]] = 4095, 1
    tables = EntropyTables(freq, 12)
    which = np.array([1, 0, 0, 0], np.uint16)
    symbols = np.array(
        [
            [7, 7, 7, 9, 9, 9, 7],
            [1, 2, 255, 0, 0, 1, 1],
            [255, 0, 1, 2, 2, 0, 255],
            [255, 255, 2, 1, 0, 0, 2],
        ],
        np.uint8,
    )
    case = Case(symbols, which, tables, 4)
    streams = case.encode(backend)
    assert [hex(x) for x in streams.states] == ["0x20e1c02", "0x2039fff"]
    assert streams.lengths.tolist() == [2, 2]
    assert [hex(x) for x in streams.words] == ["0x1700", "0x9400", "0x75ff", "0x8a1c"]
    np.testing.assert_array_equal(case.decode(backend, streams), symbols)


def test_a_state_at_the_very_limit_gives_up_a_word(backend: Stages) -> None:
    # Byte 0 of one raw bit doubles the state: 2**16 becomes 2**31 in 15 steps, and that is frequency << 20 exactly.
    for steps, state, words in ((15, 1 << 31, []), (16, 1 << 16, [0]), (31, 1 << 31, [0]), (32, 1 << 16, [0, 0])):
        bit = np.full(steps, 4, np.uint16)
        case = Case(np.zeros((steps, 1), np.uint8), bit, tables_of(12), 1)
        streams = case.encode(backend)
        assert (streams.states.tolist(), streams.words.tolist()) == ([state], words)
        np.testing.assert_array_equal(case.decode(backend, streams), case.symbols)


# --- damaged bytes


def damaged(case: Case) -> dict[str, Streams]:
    good = case.reference()
    states, lengths, words = good.states, good.lengths, good.words
    longest = int(lengths.argmax())

    def changed(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], at: int, value: int) -> object:
        copy = array.copy()
        copy[at] = value
        return copy

    def make(states: object = states, lengths: object = lengths, words: object = words) -> Streams:
        return Streams(states, lengths, words)  # type: ignore[arg-type]

    moved = lengths.copy()
    moved[0] -= 1
    moved[1] += 1
    end = int(lengths[: longest + 1].sum())
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


DAMAGED = damaged(make_case(8, 37, 4, 12, seed=6))


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_streams_are_found_out(backend: Stages, name: str) -> None:
    case = make_case(8, 37, 4, 12, seed=6)
    with pytest.raises(CorruptError):
        case.decode(backend, DAMAGED[name])


def test_the_damaged_stream_is_named(backend: Stages) -> None:
    case = make_case(8, 37 * 20, 4, 12, seed=7)
    good = case.reference()
    states = good.states.copy()
    states[[131, 150]] ^= 1 << 20
    with pytest.raises(CorruptError, match="stream 131 of 185"):
        case.decode(backend, Streams(states, good.lengths, good.words))


def test_every_flipped_bit_is_noticed_or_changes_the_symbols(backend: Stages) -> None:
    # rANS is a bijection: a flip among equally likely symbols gives another valid stream (checksums are the
    # container's), but never the same symbols.
    case = make_case(4, 6, 3, 12, seed=8)
    good = case.reference()
    raised = 0
    for which in ("states", "words"):
        array = getattr(good, which)
        for at in range(len(array)):
            for bit in range(8 * array.itemsize):
                flipped = array.copy()
                flipped[at] ^= 1 << bit
                parts = {"states": good.states, "lengths": good.lengths, "words": good.words, which: flipped}
                try:
                    assert not np.array_equal(case.decode(backend, Streams(**parts)), case.symbols)
                except CorruptError:
                    raised += 1
    assert raised > 4 * (len(good.states) + len(good.words))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_streams_decode_to_the_right_shape_or_raise(data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    case = make_case(4, 19, 4, 12, seed=9)
    lengths = rng.integers(0, 9, 5).astype(np.uint32)
    states = rng.integers(0, 1 << 32, 5, dtype=np.uint32)
    words = rng.integers(0, 1 << 16, int(lengths.sum()), dtype=np.uint16)
    outcomes = set()
    for name in stage_names():
        try:
            out = case.decode(get_stages(name), Streams(states, lengths, words))
            assert out.shape == (4, 19)
            outcomes.add(out.tobytes())
        except CorruptError as error:
            outcomes.add(str(error).encode())
    assert len(outcomes) == 1


# --- how good the code is


@dataclass(frozen=True)
class Workload:
    """Symbols of 256 components of falling scale, as a profile's section has them."""

    case: Case
    ideal_bits: float  # of the coded symbols, by the tables
    total_bytes: int  # everything `write_streams` writes


def workload(tokens: int, scale: float, decay: float) -> Workload:
    rng = np.random.default_rng(tokens)
    family = default_family()
    deviation = scale * np.exp(-np.arange(256) / decay)
    codes = scale_codes(scale_index(deviation), 0)
    codes = codes[codes >= 0]
    plan = coding_plan(codes)
    unit = rng.logistic(0, np.sqrt(3) / np.pi, (len(codes), tokens))
    y = (unit * deviation[: len(codes), None]).astype(np.float32)
    backend = get_stages("numba")
    per_stream = tokens_per_stream(plan.planes, float(family.tables.entropy[plan.tables].sum()))
    levels = backend.quantize(y, 1.0, plan, family.quantizer)
    planes, escapes = backend.pack(levels, plan, family.tables)
    case = Case(planes, plan.tables, family.tables, per_stream)
    ideal = float(family.tables.bits[plan.tables[:, None], planes].sum(dtype=np.float64)) + 64 * len(escapes.index)
    size = len(write_streams(case.encode(backend), escapes, plan.planes, per_stream))
    assert (planes[: len(codes)] == ESCAPE).sum() == len(escapes.index)
    return Workload(case, ideal, size)


# Deviations at a moderate step of a small model's section: few steps, most of them below one.
MODERATE = [(4.0, 90.0), (2.0, 60.0), (8.0, 120.0)]


@pytest.mark.parametrize(("scale", "decay"), MODERATE)
@pytest.mark.parametrize(("tokens", "limit"), [(256, 0.03), (64, 0.06)])
def test_overhead_over_the_ideal_code_length(scale: float, decay: float, tokens: int, limit: float) -> None:
    work = workload(tokens, scale, decay)
    assert work.total_bytes * 8 >= work.ideal_bits
    assert work.total_bytes * 8 <= work.ideal_bits * (1 + limit)


@pytest.mark.parametrize("per_stream", [1, 8, 64])
def test_sizes_agree_with_constriction(per_stream: int) -> None:
    import constriction  # here, so that `-m gpu` collects on a machine without it

    case = workload(256, 4.0, 90.0).case
    case = Case(case.symbols, case.which, case.tables, per_stream)
    ours = get_stages("numba").rans_encode(case.symbols, case.which, case.tables, per_stream)
    probabilities = case.tables.freq.astype(np.float64) / (1 << case.tables.prob_bits)
    coder = constriction.stream.stack.AnsCoder()
    models = [constriction.stream.model.Categorical(p, perfect=False) for p in probabilities]
    for step in reversed(range(len(case.which))):
        coder.encode_reverse(case.symbols[step].astype(np.int32), models[int(case.which[step])])
    theirs = coder.get_compressed().nbytes
    for step in range(len(case.which)):
        back = coder.decode(models[int(case.which[step])], case.tokens)
        np.testing.assert_array_equal(back, case.symbols[step])
    streams = len(ours.states)
    assert theirs * 0.99 <= ours.words.nbytes + 6 * streams
    assert ours.words.nbytes + 4 * streams <= theirs * 1.01 + 6 * streams


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
