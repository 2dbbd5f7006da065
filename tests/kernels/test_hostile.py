"""The device backend on hostile bytes: it refuses the blobs that the CPU refuses, and accepts those that it accepts.

Forged blobs have right checksums. Whatever they say, no write leaves the cache: an out-of-bounds access of Triton's
interpreter ends the process, and guards lie around the cache.
"""

from __future__ import annotations

import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.forging import reseal, sections_of, with_section
from tests.conftest import decoded_layers

from cuvee.codec.backends import Coding, get_backend
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.entropy.token_classes import class_table
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError
from cuvee.codec.format.container import Scheme, read_header
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.paged import NOWHERE, PagedCache, PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.schemes import coefficients, lossless
from cuvee.codec.stages.reference import rans

# The interpreter computes with NumPy, which warns where damaged numbers overflow.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")

ROPE = Rope((1.0, 0.1))
LAYOUT = KVLayout("tiny", (LayerLayout(1, 4, 3, ROPE), LayerLayout(2, 4, 3, ROPE)), "float32", 4096)
WIDE = KVLayout("wide", (LayerLayout(1, 260, 260, None),), "float32", 4096)
START = 3
TOKENS = {"lossless": 24, "transform": 7, "classes": 7}  # the lossless scheme codes only what pays
PER_STREAM = {"lossless": 16, "transform": 4, "classes": 4}
SCHEMES = ("lossless", "transform")
LOSSY = SCHEMES[1:]
CLASSES = "classes"  # of tokens: `transform` with classes by their positions
ROUNDING = 2.0**-14  # of sums and products, relative to the largest value of a unit


def smooth_chunk(layout: KVLayout, tokens: int, seed: int, start: int = START, outlier: float = 0.0) -> KVChunk:
    """Correlated channels around means; tokens resemble the one before, but for one value."""
    noise, fixed = (torch.Generator().manual_seed(s) for s in (seed, 999))
    units: list[list[torch.Tensor]] = [[], []]
    for layer in layout.layers:
        for out, size in zip(units, (layer.head_dim, layer.value_dim), strict=True):
            width = layer.kv_heads * size
            spread = torch.logspace(0.5, -1.5, width)
            x = torch.randn(tokens, width, generator=noise)
            for t in range(1, tokens):
                x[t] = 0.9 * x[t - 1] + 0.44 * x[t]
            x = x * spread + torch.randn(width, generator=fixed)
            x[tokens // 2, :2] += outlier
            out.append(x.unflatten(1, (layer.kv_heads, size)).to(layout.torch_dtype))
    return KVChunk(units[0], units[1], layout, start)


@cache
def learned(layout: KVLayout = LAYOUT) -> Profile:
    tokens = 2 * layout.values_per_token // layout.num_layers
    return fit(layout, [smooth_chunk(layout, max(64, tokens), seed, 7 * seed) for seed in range(7)], "layer")


@cache
def codec_of(scheme: str, backend: str = "numba", step: float = 0.02, layout: KVLayout = LAYOUT) -> Codec:
    if scheme == "lossless":
        return Codec(Profile.unlearned(layout), "lossless", backend=backend, threads=1)
    profile = learned(layout)
    profile = with_classes(profile, 4.0 ** torch.arange(TOKENS[CLASSES]), START) if scheme == CLASSES else profile
    return Codec(profile, step=step, backend=backend, threads=1)


def encoded(scheme: str, chunk: KVChunk, per_stream: int, step: float = 0.02) -> bytes:
    """Return a blob whose streams have this many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (coefficients, lossless):
            patch.setattr(module, "tokens_per_stream", lambda *_: per_stream)
        codec = codec_of(scheme, step=step, layout=replace(chunk.layout, dtype="float32"))
        return codec.encode(chunk)


@cache
def blob_of(scheme: str) -> bytes:
    """Two streams per section, and escapes where the scheme has them."""
    chunk = smooth_chunk(LAYOUT, TOKENS[scheme], 50, outlier=0.0 if scheme == "lossless" else 300.0)
    return encoded(scheme, chunk, PER_STREAM[scheme])


@dataclass
class Coded:
    """The first section of a blob in its parts, to be forged: counts and padding are written as they stand here."""

    side: bytes
    log2: int
    reserved: int
    states: list[int]
    lengths: list[int]
    words: list[int]
    padding: bytes
    index: list[int]
    value: list[int]
    word_count: int
    escape_count: int
    class_state: int = 0
    class_count: int = 0
    class_words: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, scheme: str, blob: bytes) -> Coded:
        section, tokens = sections_of(blob)[0], read_header(blob).tokens
        at = side_bytes(scheme, section, tokens)
        words, escapes, log2, low, high, class_count, class_state = struct.unpack_from("<IIBBHII", section, at)
        streams = -(-tokens // (1 << log2))
        side, at = section[:at], at + 20

        def take(code: str, count: int) -> list[int]:
            nonlocal at
            found = struct.unpack_from(f"<{count}{code}", section, at)
            at += struct.calcsize(f"<{count}{code}")
            return list(found)

        states, lengths, listed = take("I", streams), take("H", streams), take("H", class_count)
        coded = take("H", words)
        padding = bytes(-at % 4)
        at += len(padding)
        index, value = take("I", escapes), take("i", escapes)
        assert at == len(section)
        return cls(
            side, log2, low | high << 8, states, lengths, coded, padding, index, value, words, escapes, class_state,
            class_count, listed,
        )  # fmt: skip

    def counted(self) -> None:
        """Make the counts and the padding right."""
        self.word_count, self.escape_count = len(self.words), len(self.index)
        self.class_count = len(self.class_words)
        self.padding = bytes(2 * ((len(self.lengths) + len(self.class_words) + len(self.words)) % 2))

    def section(self) -> bytes:
        return b"".join(
            [
                self.side,
                struct.pack("<III", self.word_count, self.escape_count, self.log2 | self.reserved << 8),
                struct.pack("<II", self.class_count, self.class_state),
                struct.pack(f"<{len(self.states)}I", *self.states),
                struct.pack(f"<{len(self.lengths)}H", *self.lengths),
                struct.pack(f"<{len(self.class_words)}H", *self.class_words),
                struct.pack(f"<{len(self.words)}H", *self.words),
                self.padding,
                struct.pack(f"<{len(self.index)}I", *self.index),
                struct.pack(f"<{len(self.value)}i", *self.value),
            ]
        )


def lossless_head(section: bytes, tokens: int) -> tuple[int, int]:
    """Bytes of the modes, references and tables of the first section, and of its stored planes."""
    at = stored = 0
    for size in (4, 4, 4, 4, 3, 3, 3, 3):
        coded = section[at]
        at += 1
        if coded:
            at += size
            at += 2 + 3 * int.from_bytes(section[at : at + 2], "little")
        else:
            stored += size * tokens
    return at, stored


def side_bytes(scheme: str, section: bytes, tokens: int) -> int:
    """Where the coded part of the first section begins."""
    if scheme in ("transform", CLASSES):
        return 0
    head, stored = lossless_head(section, tokens)
    at = head + -head % 4 + stored
    return at + -at % 4


Outcome = list[torch.Tensor] | None


def outcome(codec: Codec, blob: bytes, device: torch.device | str = "cpu") -> Outcome:
    """The tensors of the first layer, or None for an error of ours. Any other error fails the test."""
    tokens, layer = read_header(blob).tokens, codec.profile.layout.layers[0]
    try:
        keys, values = decoded_layers(codec, blob, range(1), device=device)
    except CuveeError:
        return None
    assert keys[0].shape == (tokens, layer.kv_heads, layer.head_dim)
    assert values[0].shape == (tokens, layer.kv_heads, layer.value_dim)
    return [keys[0].cpu(), values[0].cpu()]


def assert_agree(
    scheme: str, blob: bytes, device: torch.device, step: float = 0.02, layout: KVLayout = LAYOUT
) -> Outcome:
    """Both backends refuse a blob, or both decode it to the same tensors; returns what the CPU says."""
    want = outcome(codec_of(scheme, step=step, layout=layout), blob)
    got = outcome(codec_of(scheme, "triton", step, layout), blob, device)
    assert (got is None) == (want is None)
    for a, b in zip(got or [], want or [], strict=True):
        if scheme == "lossless":
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        elif bool(b.isfinite().all()):
            assert float((a.double() - b.double()).abs().max()) <= ROUNDING * float(b.double().abs().max())
    return want


# --- every field of the coded part


Forge = Callable[[Coded], None]


def _set(name: str, value: int) -> Forge:
    return lambda coded: setattr(coded, name, value)


def _add(name: str, at: int, value: int) -> Forge:
    def change(coded: Coded) -> None:
        numbers = getattr(coded, name)
        numbers[at] += value

    return change


def _flip(name: str, at: int, value: int) -> Forge:
    def change(coded: Coded) -> None:
        numbers = getattr(coded, name)
        numbers[at] ^= value

    return change


def _many(*changes: Forge) -> Forge:
    def change(coded: Coded) -> None:
        for one in changes:
            one(coded)

    return change


def _counts(words: int, escapes: int) -> Forge:
    def change(coded: Coded) -> None:
        coded.word_count += words
        coded.escape_count += escapes

    return change


def _log2(change: int) -> Forge:
    return lambda coded: setattr(coded, "log2", coded.log2 + change)


def _put(name: str, at: int | slice, value: int) -> Forge:
    def change(coded: Coded) -> None:
        numbers = getattr(coded, name)
        for i in range(len(numbers))[at] if isinstance(at, slice) else [at]:
            numbers[i] = value

    return change


def _word_too_many(coded: Coded) -> None:
    coded.words.append(0)
    coded.counted()


def _word_of_the_last_stream(coded: Coded) -> None:
    coded.words.append(0)
    coded.lengths[-1] += 1
    coded.counted()


def _word_missing(coded: Coded) -> None:
    coded.words.pop()
    coded.lengths[-1] -= 1
    coded.counted()


def _no_words(coded: Coded) -> None:
    coded.words, coded.lengths = [], [0] * len(coded.lengths)
    coded.counted()


def _padding(coded: Coded) -> None:
    """Where there is none, a word of the first stream makes it necessary."""
    if not coded.padding:
        coded.words.append(0)
        coded.counted()
        coded.lengths[-1] += 1
    coded.padding = b"\0\1"


STREAMS: dict[str, Forge] = {
    "one word too few": _counts(-1, 0),
    "one word too many": _counts(1, 0),
    "two words too many": _counts(2, 0),  # what padding there is lies elsewhere then
    "words that are an escape": _counts(4, -1),
    "an escape that is words": _counts(-4, 1),
    "one escape too many": _counts(0, 1),
    "all words": _set("word_count", 2**32 - 1),
    "all escapes": _set("escape_count", 2**32 - 1),
    "half of all escapes": _set("escape_count", 2**29),
    "streams twice as long": _log2(1),
    "streams half as long": _log2(-1),
    "streams of one token": _set("log2", 0),
    "streams of 256 tokens": _set("log2", 8),
    "a byte that is 0": _set("reserved", 1),
    "reserved word": _set("reserved", 1 << 23),
    "first state": _flip("states", 0, 1),
    "first state, high bit": _flip("states", 0, 1 << 31),
    "last state": _flip("states", -1, 1 << 20),
    "a state of 0": _put("states", 0, 0),
    "a state below its bound": _put("states", -1, (1 << 16) - 1),
    "a state at its bound": _put("states", 0, 1 << 16),
    "a word of the next stream": _many(_add("lengths", 0, 1), _add("lengths", -1, -1)),
    "a word of the stream before": _many(_add("lengths", 0, -1), _add("lengths", -1, 1)),
    "the first length": _add("lengths", 0, 1),
    "the last length": _add("lengths", -1, 1),
    "the longest length": _put("lengths", 0, 0xFFFF),
    "the longest lengths": _put("lengths", slice(None), 0xFFFF),
    "lengths of 0": _put("lengths", slice(None), 0),
    "the first word": _flip("words", 0, 1),
    "the last word": _flip("words", -1, 0x8000),
    "a word more than the lengths say": _word_too_many,
    "a word more than the last stream reads": _word_of_the_last_stream,
    "a word missing": _word_missing,
    "no words": _no_words,
    "padding": _padding,
}


# rANS is no checksum: where little of a stream follows a changed word, the stream may still end as it must.
BY_CHANCE = {"the first word", "the last word"}


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("scheme", [*SCHEMES, CLASSES])
def test_streams_that_lie_are_refused(scheme: str, device: torch.device) -> None:
    blob = blob_of(scheme)
    assert Coded.of(scheme, blob).section() == sections_of(blob)[0]
    assert len(Coded.of(scheme, blob).states) == 2
    assert assert_agree(scheme, blob, device) is not None
    for name, forge in STREAMS.items():
        coded = Coded.of(scheme, blob)
        if name == "words that are an escape" and not coded.escape_count:
            continue
        forge(coded)
        found = assert_agree(scheme, with_section(blob, coded.section()), device)
        assert found is None or name in BY_CHANCE, name


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("scheme", LOSSY)
def test_stream_headers_out_of_range_are_refused_where_all_else_fits(scheme: str, device: torch.device) -> None:
    blob = encoded(scheme, smooth_chunk(LAYOUT, 3, 56), 128, 0.5)
    for head in (1 << 8, 1 << 31, 8, 31, 64, 255):
        coded = Coded.of(scheme, blob)
        coded.log2, coded.reserved = head & 0xFF, head >> 8
        assert assert_agree(scheme, with_section(blob, coded.section()), device, 0.5) is None, head


def test_sections_without_room_for_a_stream_header_are_refused(device: torch.device) -> None:
    # The last thing in what goes to the device, where no other bytes follow: 16 bytes are its granule.
    blob = encoded("transform", smooth_chunk(LAYOUT, 3, 57), 128, 0.5)
    sections = sections_of(blob)
    first = sections[0] + bytes(8 + -len(sections[0]) % 16)
    for length in range(1, 20):
        with pytest.raises(FormatError):
            codec_of("transform", "triton", 0.5).decode(reseal(blob, [first, sections[1][:length]]), device=device)


@pytest.mark.parametrize("scheme", [*SCHEMES, CLASSES])
def test_the_kernels_say_which_streams_are_damaged(scheme: str, device: torch.device) -> None:
    """The kernels of the entropy coder themselves, on a whole blob and with a state and a word that are not its own."""
    blob = blob_of(scheme)
    assert assert_agree(scheme, blob, device) is not None
    for forge in (STREAMS["first state"], STREAMS["a word missing"]):
        coded = Coded.of(scheme, blob)
        forge(coded)
        assert assert_agree(scheme, with_section(blob, coded.section()), device) is None


def _class_words(count: int) -> Forge:
    """Return the part with this many more words, which its count includes."""

    def change(coded: Coded) -> None:
        coded.class_words = (coded.class_words + [0] * count)[: len(coded.class_words) + count]
        coded.counted()

    return change


CLASS_STREAMS: dict[str, Forge] = {
    "a state of 0": _set("class_state", 0),
    "a state below its bound": _set("class_state", (1 << 16) - 1),
    "a state at its bound": _set("class_state", 1 << 16),
    "another state": lambda coded: setattr(coded, "class_state", coded.class_state ^ 1),
    "the largest state": _set("class_state", 2**32 - 1),
    "a word too many": _class_words(1),
    "two words too many": _class_words(2),
    "a word missing": _class_words(-1),
    "a count of none": _set("class_count", 0),
    "a count too large": lambda coded: setattr(coded, "class_count", coded.class_count + 1),
    "a count far too large": _set("class_count", 2**32 - 1),
    "a word that is one of the streams'": _many(
        lambda coded: setattr(coded, "class_count", coded.class_count + 1), _counts(-1, 0)
    ),
}


@pytest.mark.usefixtures("plain_coder")
def test_class_streams_that_lie_are_refused(device: torch.device) -> None:
    blob = blob_of(CLASSES)
    assert Coded.of(CLASSES, blob).section() == sections_of(blob)[0]
    assert Coded.of(CLASSES, blob).class_count > 0 and Coded.of(CLASSES, blob).reserved == 0
    assert assert_agree(CLASSES, blob, device) is not None
    for name, forge in CLASS_STREAMS.items():
        coded = Coded.of(CLASSES, blob)
        forge(coded)
        assert assert_agree(CLASSES, with_section(blob, coded.section()), device) is None, name


def class_stream(classes: Sequence[int], section: int = 0) -> tuple[int, list[int]]:
    """State and words of a stream of these classes."""
    table = class_table(learned().learned[section].class_freq)
    streams = rans.encode_classes(np.array(classes, np.uint8), table)
    return int(streams.states[0]), streams.words.tolist()


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("classes", [[0] * 7, [15] * 7, [15, 0, 8, 12, 9, 15, 0]], ids=["finest", "coarsest", "mixed"])
def test_classes_that_lie_are_refused(classes: list[int], device: torch.device) -> None:
    """Whole class streams of other classes: they decode, and the streams of the planes do not fit."""
    coded = Coded.of(CLASSES, blob_of(CLASSES))
    coded.class_state, coded.class_words = class_stream(classes)
    coded.counted()
    assert assert_agree(CLASSES, with_section(blob_of(CLASSES), coded.section()), device) is None


@pytest.mark.usefixtures("plain_coder")
def test_classes_that_the_profile_does_not_serve_are_refused(device: torch.device) -> None:
    step = 2.0**-8
    finest = learned().learned[0].classed_plan(codec_of(CLASSES, step=step).step_index).finest
    assert finest > 0
    blob = encoded(CLASSES, smooth_chunk(LAYOUT, 3, 58), 128, step)
    assert assert_agree(CLASSES, blob, device, step) is not None
    coded = Coded.of(CLASSES, blob)
    coded.class_state, coded.class_words = class_stream([finest, finest - 1, 15])
    coded.counted()
    assert assert_agree(CLASSES, with_section(blob, coded.section()), device, step) is None


@pytest.mark.usefixtures("plain_coder")
def test_classes_where_the_scheme_has_none_are_refused(device: torch.device) -> None:
    blob = blob_of("lossless")
    coded = Coded.of("lossless", blob)
    coded.class_state, coded.class_words = class_stream([8] * TOKENS["lossless"])
    coded.counted()
    assert assert_agree("lossless", with_section(blob, coded.section()), device) is None


def test_a_class_stream_at_the_end_of_what_goes_to_the_device(device: torch.device) -> None:
    # Of the header of the last section there is less than it says.
    sections = sections_of(blob_of(CLASSES))
    for length in range(10, 21):
        with pytest.raises(FormatError):
            codec_of(CLASSES, "triton").decode(
                reseal(blob_of(CLASSES), [*sections[:-1], sections[-1][:length]]), device=device
            )  # fmt: skip


# --- escapes


def _without(at: int) -> Forge:
    def change(coded: Coded) -> None:
        del coded.index[at], coded.value[at]
        coded.counted()

    return change


def _twice(coded: Coded) -> None:
    coded.index.insert(0, coded.index[0])
    coded.value.insert(0, coded.value[0])
    coded.counted()


def _swapped(coded: Coded) -> None:
    coded.index[:2] = coded.index[1::-1]


def _none(coded: Coded) -> None:
    coded.index, coded.value = [], []
    coded.counted()


def _one_more(index: int) -> Forge:
    def change(coded: Coded) -> None:
        coded.index.append(index)
        coded.value.append(5)
        coded.counted()

    return change


ESCAPES: dict[str, Forge] = {
    "the first left out": _without(0),
    "the last left out": _without(-1),
    "one twice": _twice,
    "one in place of another": lambda coded: coded.index.__setitem__(1, coded.index[0]),
    "two swapped": _swapped,
    "one elsewhere": _add("index", 0, 1),
    "one just beyond": _put("index", -1, 7 * 16),
    "one far beyond": _put("index", -1, 2**32 - 1),
    "none": _none,
    "one more beyond": _one_more(7 * 16),
    "one more far beyond": _one_more(2**31),
}


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("scheme", [*LOSSY, CLASSES])
def test_escapes_that_lie_are_refused(scheme: str, device: torch.device) -> None:
    blob = blob_of(scheme)
    assert Coded.of(scheme, blob).escape_count > 1
    for name, forge in ESCAPES.items():
        coded = Coded.of(scheme, blob)
        forge(coded)
        assert assert_agree(scheme, with_section(blob, coded.section()), device) is None, name


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("scheme", [*LOSSY, CLASSES])
def test_escapes_of_any_value_decode_alike(scheme: str, device: torch.device) -> None:
    blob = blob_of(scheme)
    for value in (-(2**31), -(2**31) + 1, 2**31 - 1, 1 << 24, 0, -128):
        coded = Coded.of(scheme, blob)
        coded.value = [value] * len(coded.value)
        assert assert_agree(scheme, with_section(blob, coded.section()), device) is not None, value


def test_a_lossless_section_has_no_escapes(device: torch.device) -> None:
    coded = Coded.of("lossless", blob_of("lossless"))
    _one_more(0)(coded)
    assert assert_agree("lossless", with_section(blob_of("lossless"), coded.section()), device) is None


# --- what precedes the coded part


Table = list[tuple[int, int]]


def with_table(change: Callable[[Table], Table], mode: int = 1) -> bytes:
    """The lossless blob with another table for its first coded plane."""
    blob = blob_of("lossless")
    section = sections_of(blob)[0]
    plane = 0
    while not section[plane]:
        plane += 1
    assert plane < 4, "one of four channels"
    at = plane + 1 + 4
    count = int.from_bytes(section[at : at + 2], "little")
    table = [struct.unpack_from("<BH", section, at + 2 + 3 * i) for i in range(count)]
    pairs = change([(symbol, frequency) for symbol, frequency in table])
    old, _ = lossless_head(section, read_header(blob).tokens)
    head = section[:plane] + bytes([mode]) + section[plane + 1 : at] + struct.pack("<H", len(pairs))
    head += b"".join(struct.pack("<BH", *pair) for pair in pairs) + section[at + 2 + 3 * count : old]
    return with_section(blob, head + bytes(-len(head) % 4) + section[old + -old % 4 :])


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: [], id="empty"),
        pytest.param(lambda t: t[::-1], id="falling"),
        pytest.param(lambda t: [(t[0][0], 0), *t[1:]], id="no-frequency"),
        pytest.param(lambda t: [(t[0][0], t[0][1] + 1), *t[1:]], id="sum-too-large"),
        pytest.param(lambda t: [(7, 4096)], id="certain"),
        pytest.param(lambda t: [(s, 0xFFFF) for s, _ in t], id="huge"),
        pytest.param(lambda t: t * 1000, id="many"),
        pytest.param(lambda t: [(3, 1), (7, 4095)], id="another"),
    ],
)
def test_tables_that_lie_are_refused(change: Callable[[Table], Table], device: torch.device) -> None:
    assert with_table(lambda table: table) == blob_of("lossless")
    assert assert_agree("lossless", with_table(change), device) is None


@pytest.mark.usefixtures("plain_coder")
def test_modes_references_and_stored_planes(device: torch.device) -> None:
    blob = blob_of("lossless")
    section = sections_of(blob)[0]
    head, stored = lossless_head(section, read_header(blob).tokens)
    first = next(at for at in range(4) if section[at])
    assert stored
    for at, flip, decodes in (
        (0, 1, False),  # the mode of a stored plane: what follows is no table
        (first, 1, False),  # of a coded one
        (first, 2, False),
        (first + 1, 0xFF, True),  # a reference
        (first + 4, 1, True),
        (head + -head % 4, 0xFF, True),  # the first stored byte
        (head + -head % 4 + stored - 1, 0xFF, True),
    ):
        changed = bytearray(section)
        changed[at] ^= flip
        assert (assert_agree("lossless", with_section(blob, bytes(changed)), device) is not None) == decodes, at


# --- shapes at the edge


@cache
def stored_blob() -> bytes:
    """Lossless, so few tokens of so much noise that no plane is coded."""
    noise = torch.Generator().manual_seed(1)
    units = [[torch.randn(2, n.kv_heads, d, generator=noise) for n in LAYOUT.layers] for d in (4, 3)]
    return codec_of("lossless").encode(KVChunk(units[0], units[1], LAYOUT, START))


def test_a_section_that_only_stores(device: torch.device) -> None:
    blob = stored_blob()
    section = sections_of(blob)[0]
    assert section[:8] == bytes(8) and len(section) == 8 + 4 * 7 * 2
    assert assert_agree("lossless", blob, device) is not None
    for forged in (section[:-1], section[:-4], section + bytes(1), section + bytes(4), section + bytes(20)):
        assert assert_agree("lossless", with_section(blob, forged), device) is None


def nothing_coded(section: bytes, *fields: int) -> bytes:
    """One stream without a symbol: words, escapes, its state and length, and the class stream of `section`."""
    words, escapes, state, length = fields or (0, 0, 1 << 16, 0)
    head = struct.pack("<III", words, escapes, 7) + section[12:20]
    listed = section[26 : 26 + 2 * struct.unpack_from("<I", section, 12)[0]]
    coded = head + struct.pack("<IH", state, length) + listed + bytes(2 * words)
    return coded + bytes(-len(coded) % 4) + bytes(8 * escapes)


EMPTY = {
    "an escape": (0, 1, 1 << 16, 0), "a word": (1, 0, 1 << 16, 1), "a length": (0, 0, 1 << 16, 1),
    "a state": (0, 0, 1 << 17, 0),
}  # fmt: skip


@pytest.mark.usefixtures("plain_coder")
def test_sections_without_a_component(device: torch.device) -> None:
    step = 16.0
    blob = encoded("transform", smooth_chunk(LAYOUT, 1, 50, outlier=9.0), 128, step)
    section = sections_of(blob)[0]
    assert assert_agree("transform", with_section(blob, nothing_coded(section)), device, step) is not None
    for name, forged in EMPTY.items():
        assert assert_agree("transform", with_section(blob, nothing_coded(section, *forged)), device, step) is None, (
            name
        )


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("tokens", "per_stream"), [(70, 1), (130, 128)], ids=["more-streams-than-lanes", "long"])
def test_any_streams_a_blob_may_have(scheme: str, tokens: int, per_stream: int, device: torch.device) -> None:
    step = 0.5
    blob = encoded(scheme, smooth_chunk(LAYOUT, tokens, 51), per_stream, step)
    coded = Coded.of(scheme, blob)
    assert len(coded.states) == -(-tokens // per_stream) and coded.log2 == per_stream.bit_length() - 1
    assert assert_agree(scheme, blob, device, step) is not None
    if per_stream == 1:
        coded.states[-1] ^= 1
        assert assert_agree(scheme, with_section(blob, coded.section()), device, step) is None


@pytest.mark.usefixtures("plain_coder")
def test_lengths_of_four_bytes(device: torch.device) -> None:
    step = 0.06
    blob = encoded("transform", smooth_chunk(WIDE, 2, 52), 128, step)
    section = bytearray(sections_of(blob)[0])
    length = 20 + 4
    words, _, log2 = struct.unpack_from("<III", section)
    assert log2 == 7 and struct.unpack_from("<I", section, length) == (words,)
    assert assert_agree("transform", blob, device, step, WIDE) is not None
    for wrong in (words + (1 << 16), 2**32 - 1):
        struct.pack_into("<I", section, length, wrong)
        assert assert_agree("transform", with_section(blob, bytes(section)), device, step, WIDE) is None


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("start", [4096 - 7, 4096 - 6, 2**31, 2**63])
def test_positions_end_where_those_of_the_model_do(start: int, device: torch.device) -> None:
    blob = blob_of("transform")
    want, got = codec_of("transform"), codec_of("transform", "triton")
    target = Guarded(LAYOUT, device)
    slots = torch.arange(7, device=device)
    if start + 7 <= 4096:
        a, b = want.decode(blob, start), got.decode(blob, start, device=device)
        for x, y in zip(a.keys, b.keys, strict=True):
            assert float((x - y.cpu()).abs().max()) <= ROUNDING * float(x.abs().max())
        got.decode_paged([blob], target.cache, [slots], [start]).check()
        return
    for refused in (
        lambda: got.decode(blob, start, device=device),
        lambda: got.decode_paged([blob], target.cache, [slots], [start]),
        lambda: got.encode(PagedChunks(target.cache, [slots], [start])),
    ):
        with pytest.raises(InputError, match=r"^start(s\[0\])?: must"):
            refused()
    assert target.unharmed()


# --- caches


BLOCKS, BLOCK_TOKENS = 4, 4
SLOTS = BLOCKS * BLOCK_TOKENS


class Guarded:
    """A cache of sevens, with a block before the first and one after the last that nobody may touch."""

    def __init__(
        self, layout: KVLayout, device: torch.device | str, blocks: int = BLOCKS, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        shapes = [(n.kv_heads, size) for n in layout.layers for size in (n.head_dim, n.value_dim)]
        kind = layout.torch_dtype
        self.units = [torch.full((blocks + 2, block_tokens, *shape), 7.0).to(kind).to(device) for shape in shapes]
        inner = [unit[1:-1] for unit in self.units]
        self.cache = PagedCache(layout, inner[::2], inner[1::2])

    def by_slot(self, unit: int) -> torch.Tensor:
        """`[slots, H, D]`, on the CPU."""
        return self.units[unit][1:-1].cpu().float().flatten(0, 1)

    def unharmed(self, slots: Sequence[int] = ()) -> bool:
        """Whether all but these slots are still sevens, the guards among them."""
        free = torch.ones(self.units[0].shape[0] * self.units[0].shape[1], dtype=torch.bool)
        free[torch.tensor([*slots], dtype=torch.int64) + self.units[0].shape[1]] = False
        return all(bool((unit.cpu().float().flatten(0, 1)[free] == 7).all()) for unit in self.units)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_slots_beyond_the_cache_are_refused_and_not_written(scheme: str, device: torch.device) -> None:
    blob = encoded(scheme, smooth_chunk(LAYOUT, 4, 53), 4)
    codec = codec_of(scheme, "triton")
    for wrong in (SLOTS, -2, 2**32 + 1, -(2**63), 2**63 - 1):
        pages = Guarded(LAYOUT, device)
        slots = torch.tensor([1, 9, wrong, 4], device=device)
        pending = codec.decode_paged([blob], pages.cache, [slots])
        for _ in range(2):
            with pytest.raises(InputError, match="beyond the cache for chunk 0, layers 0 … 0"):
                pending.check()
        assert pages.unharmed([1, 9, 4])
    for wrong in (SLOTS, NOWHERE - 1):
        with pytest.raises(InputError, match="beyond the cache"):
            codec.encode(PagedChunks(pages.cache, [torch.tensor([0, wrong], device=device)], [0]))


@pytest.mark.usefixtures("plain_coder")
def test_a_slot_given_twice_gets_one_of_its_tokens(device: torch.device) -> None:
    blob = encoded("lossless", smooth_chunk(LAYOUT, 3, 54), 4)
    pages = Guarded(LAYOUT, device)
    codec_of("lossless", "triton").decode_paged([blob], pages.cache, [torch.tensor([5, 5, 2], device=device)]).check()
    values = codec_of("lossless").decode(blob).values[1]
    assert torch.equal(pages.by_slot(3)[2], values[2])
    assert all(bool((pages.by_slot(3)[5] == values[:2]).any(0)[h].all()) for h in range(2))
    assert pages.unharmed([5, 2])


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 4), (4, 0)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_without_slots(scheme: str, blocks: int, block_tokens: int, device: torch.device) -> None:
    blob = encoded(scheme, smooth_chunk(LAYOUT, 2, 55), 4)
    codec = codec_of(scheme, "triton")
    shapes = [[(blocks, block_tokens, n.kv_heads, d) for n in LAYOUT.layers] for d in (4, 3)]
    for inside in (0, 1 << 20):
        # Without slots there is no memory, or some that is not the cache's.
        memory = torch.full((inside + 1,), 7.0, device=device)
        keys, values = ([memory[:0].view(shape) for shape in unit] for unit in shapes)
        cache = PagedCache(LAYOUT, keys, values)
        codec.decode_paged([blob], cache, [torch.full((2,), NOWHERE, device=device)]).check()
        with pytest.raises(InputError, match="beyond the cache"):
            codec.decode_paged([blob], cache, [torch.tensor([NOWHERE, 0], device=device)]).check()
        with pytest.raises(InputError, match="beyond the cache"):
            codec.encode(PagedChunks(cache, [torch.tensor([0], device=device)], [0]))
        assert bool((memory == 7).all())


def damaged(scheme: str, blob: bytes, section: int) -> bytes:
    """The first state of a section changed: only its streams tell."""
    forged = bytearray(sections_of(blob)[section])
    at = side_bytes(scheme, bytes(forged), read_header(blob).tokens) if section == 0 else 0
    forged[at + 20] ^= 1
    return with_section(blob, bytes(forged), section)


@pytest.fixture(params=[1, 1 << 30], ids=["a-chunk-a-batch", "one-batch"])
def workspace(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch for one chunk at a time, or for all."""
    monkeypatch.setattr(get_backend("triton", device.type), "workspace_bytes", request.param)


PLACES = ([3, 0, 7, 12], [8, 15, 1, 2], [4, 9, 10, 6])


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(("scheme", "section"), [("transform", 1), ("lossless", 0)])
def test_a_damaged_chunk_beside_good_ones_is_named(scheme: str, section: int, device: torch.device) -> None:
    tokens = 20 if scheme == "lossless" else 4
    places = torch.randperm(64, generator=torch.Generator().manual_seed(0))[: 3 * tokens].split(tokens)
    chunks = [smooth_chunk(LAYOUT, tokens, seed) for seed in (60, 61, 62)]
    blobs = [encoded(scheme, chunk, 32) for chunk in chunks]
    pages, expected = Guarded(LAYOUT, device, 16), Guarded(LAYOUT, "cpu", 16)
    codec_of(scheme).decode_paged(blobs, expected.cache, places).check()
    bad = [blobs[0], damaged(scheme, blobs[1], section), blobs[2]]
    slots = [at.to(device) for at in places]
    pending = codec_of(scheme, "triton").decode_paged(bad, pages.cache, slots)
    for _ in range(2):
        with pytest.raises(CorruptError, match=rf"^chunk 1, layers {section} … {section}: its streams"):
            pending.check()
    for good in (0, 2):
        for unit in range(4):
            got, want = pages.by_slot(unit)[places[good]], expected.by_slot(unit)[places[good]]
            assert float((got - want).abs().max()) <= ROUNDING * float(want.abs().max())
    # What the host finds out has the same number.
    grown = with_section(blobs[1], sections_of(blobs[1])[section] + bytes(8), section)
    with pytest.raises(FormatError, match=f"section {section} of blob 1: "):
        codec_of(scheme, "triton").decode_paged([blobs[0], grown, blobs[2]], pages.cache, slots)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.usefixtures("workspace")
def test_numbers_count_all_blobs_of_a_call_whatever_their_schemes(device: torch.device) -> None:
    schemes = ("transform", "lossless", "transform")
    blobs = [encoded(scheme, smooth_chunk(LAYOUT, 4, 60), 32) for scheme in schemes]
    slots = [torch.tensor(at, device=device) for at in PLACES]
    cache, codec = Guarded(LAYOUT, device).cache, codec_of("transform", "triton")
    with pytest.raises(CorruptError, match=r"^chunk 2, layers 1"):
        codec.decode_paged([*blobs[:2], damaged("transform", blobs[2], 1)], cache, slots).check()
    grown = with_section(blobs[2], sections_of(blobs[2])[0] + bytes(8))
    with pytest.raises(FormatError, match="section 0 of blob 2: "):
        codec.decode_paged([*blobs[:2], grown], cache, slots)


@pytest.mark.parametrize("scheme", LOSSY)
def test_only_the_layers_asked_for_are_read(scheme: str, device: torch.device) -> None:
    codec, blob = codec_of(scheme, "triton"), encoded(scheme, smooth_chunk(LAYOUT, 4, 63), 32)
    forged = damaged(scheme, blob, 1)
    decoded_layers(codec, forged, range(1), device=device)
    with pytest.raises(CorruptError, match=r"^chunk 0, layers 1 … 1: its streams"):
        decoded_layers(codec, forged, range(1, 2), device=device)


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("cached", ["bfloat16", "float32"])
@pytest.mark.usefixtures("workspace")
def test_blobs_of_several_dtypes_and_schemes_in_one_call(cached: str, device: torch.device) -> None:
    layout = replace(LAYOUT, dtype=cached)
    kinds = [("transform", "bfloat16"), ("lossless", "float32"), ("transform", "float32"), ("lossless", "float16")]
    chunks = [smooth_chunk(replace(LAYOUT, dtype=kind), 4, 70 + i) for i, (_, kind) in enumerate(kinds)]
    blobs = [encoded(scheme, chunk, 16) for (scheme, _), chunk in zip(kinds, chunks, strict=True)]
    places = [torch.tensor(at) for at in (*PLACES, [5, 11, 13, 14])]
    starts = [0, START, 100, 3000]
    pages, expected = Guarded(layout, device), Guarded(layout, "cpu")
    codec_of("transform").decode_paged(blobs, expected.cache, places, starts).check()
    slots = [at.to(device) for at in places]
    codec_of("transform", "triton").decode_paged(blobs, pages.cache, slots, starts).check()
    for number, at in enumerate(places):
        # A float32 cache gets what a bfloat16 blob says without the rounding of a bfloat16 chunk in between.
        rounding = 2.0**-6 if cached == "bfloat16" or kinds[number][1] == "bfloat16" else 2.0**-9
        for unit in range(4):
            want = expected.by_slot(unit)[at]
            error = float((pages.by_slot(unit)[at] - want).abs().max())
            assert error <= rounding * float(want.abs().max()), (number, unit)
            if kinds[number] == ("lossless", "float32"):
                assert error == 0
    assert pages.unharmed(torch.cat(places).tolist())


@pytest.mark.usefixtures("plain_coder")
@pytest.mark.parametrize("group", ["layer", "lossless"])
def test_heads_of_odd_sizes_in_pages(
    device: torch.device, layouts: dict[str, KVLayout], make_chunk: Callable[..., KVChunk],
    make_codec: Callable[..., Codec], group: str,
) -> None:  # fmt: skip
    layout = layouts["irregular"]
    quality = {} if group == "lossless" else {"step": 0.25}
    cpu = make_codec("irregular", group, **quality)
    blob = cpu.encode(make_chunk(layout, 4))
    pages, expected = Guarded(layout, device), Guarded(layout, "cpu")
    at = torch.tensor([13, 0, 6, 15])
    cpu.decode_paged([blob], expected.cache, [at]).check()
    codec = make_codec("irregular", group, backend="triton", **quality)
    codec.decode_paged([blob], pages.cache, [at.to(device)]).check()
    for unit in range(2 * layout.num_layers):
        got, want = pages.by_slot(unit), expected.by_slot(unit)
        assert float((got - want).abs().max()) <= ROUNDING * float(want.abs().max())
    assert pages.unharmed(at.tolist())


class Hesitant(OrderedDict[object, object]):
    """Lets another thread in between two accesses."""

    def move_to_end(self, key: object, last: bool = True) -> None:
        time.sleep(1e-4)
        super().move_to_end(key, last)


def test_threads_share_the_schemes_that_are_kept(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip("cuvee.kernels.backend")
    backend = kernels.TritonBackend(interpreted=True)
    monkeypatch.setattr(kernels, "MAX_SCHEMES", 1)
    monkeypatch.setattr(backend, "_make", lambda coding, cache, product: coding.step_index)
    monkeypatch.setattr(backend, "_schemes", Hesitant())
    cache, profile = Guarded(LAYOUT, device).cache, Profile.unlearned(LAYOUT)

    def use(step: int) -> bool:
        coding = Coding(profile, Scheme.TRANSFORM, step, "float32")
        return all(backend._scheme(coding, cache) == step for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(use, range(4)))
