"""A decoder and bytes that were made to hurt it: an error of ours or a chunk of the right shape, and nothing else."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.forging import (
    HEADER,
    LAYOUT,
    START,
    TOKENS,
    WEIGHTS,
    codec_of,
    correlated_chunk,
    learned,
    reseal,
    reseal_header,
    sections_of,
    with_section,
)
from tests.cpus import multiply

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import MAX_DECODED_TOKENS, Codec
from cuvee.codec.entropy.token_classes import CLASSES, class_table
from cuvee.codec.errors import (
    CorruptError,
    CuveeError,
    FormatError,
    InputError,
    OutOfMemoryError,
    ProfileError,
    ProfileMismatchError,
    allocations,
)
from cuvee.codec.format.container import read_header
from cuvee.codec.format.streams import Streams
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.stages.implementations import stage_names
from cuvee.codec.stages.products import Products
from cuvee.codec.stages.reference.rans import decode_classes, encode_classes
from cuvee.codec.support.arrays import U8

SCHEMES = ("lossless", "transform", "classes")  # the last: learned, and tokens have classes
LOSSY = SCHEMES[1:]
# The interpreter of the device backend computes with NumPy, which warns where damaged numbers overflow.
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")])
BACKENDS = [*stage_names(), TRITON]


@cache
def blob_of(scheme: str) -> bytes:
    """With escapes where the scheme has them: token 10 is an outlier."""
    chunk = correlated_chunk(50, TOKENS, START, outlier=0.0 if scheme == "lossless" else 300.0)
    return codec_of(scheme).encode(chunk)


def coded_offset(scheme: str, section: bytes) -> int:
    """Where the coded part of section 0 begins."""
    if scheme in ("transform", "classes"):
        return 0
    head, stored = lossless_head(section)
    at = head + -head % 4 + stored
    return at + -at % 4


def lossless_head(section: bytes) -> tuple[int, int]:
    """Bytes of the modes, references and tables of section 0, and of its stored planes."""
    at = stored = 0
    for _ in range(4):
        mode = section[at]
        at += 1
        if mode:
            at += 8
            at += 2 + 3 * int.from_bytes(section[at : at + 2], "little")
        else:
            stored += 8 * TOKENS
    return at, stored


def decode(scheme: str, blob: bytes, backend: str = "auto") -> KVChunk:
    """On the CPU, but where `triton` has a GPU."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    return codec_of(scheme, backend).decode(blob, device=device)


def attempt(scheme: str, blob: bytes, backend: str = "auto", tokens: int = TOKENS) -> bool:
    """Decode; True if that gave a chunk. Anything but a chunk of the right shape or an error of ours fails the test."""
    try:
        chunk = decode(scheme, blob, backend)
    except CuveeError:
        return False
    for layer, keys, values in zip(LAYOUT.layers, chunk.keys, chunk.values, strict=True):
        assert keys.shape == values.shape == (tokens, layer.kv_heads, 8)
    return True


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# --- the material is what it should be


def test_the_blobs_exercise_what_they_should(scheme: str) -> None:
    blob = blob_of(scheme)
    assert attempt(scheme, blob)
    assert reseal(blob) == blob
    for index, section in enumerate(sections_of(blob)):
        if index == 0:
            words, escapes, log2 = struct.unpack_from("<IIB", section, coded_offset(scheme, section))
            assert words and log2 <= 7 and (escapes > 0) == (scheme != "lossless")
    if scheme != "lossless":
        assert codec_of(scheme).decode(blob).keys[0].float().abs().max() > 100, "the outlier is there"


# --- accidents: checksums find them


def test_every_truncation_is_refused(scheme: str) -> None:
    blob = blob_of(scheme)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            codec_of(scheme).decode(blob[:length])


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_changed_byte_is_refused(scheme: str, flip: int) -> None:
    blob = blob_of(scheme)
    for at in range(len(blob)):
        changed = bytearray(blob)
        changed[at] ^= flip
        with pytest.raises(FormatError):
            codec_of(scheme).decode(bytes(changed))


def test_random_bytes_are_refused(scheme: str) -> None:
    source = random.Random(0)
    blob = blob_of(scheme)
    for length in [*range(0, 300, 7), 5000]:
        for junk in (
            source.randbytes(length),
            blob[:5] + source.randbytes(length),
            blob[:HEADER] + source.randbytes(length),
        ):
            with pytest.raises(FormatError):
                codec_of(scheme).decode(junk)


# --- attacks: whoever changes a byte can make the checksums right


def resealed_flips(blob: bytes) -> Iterator[bytes]:
    sections = sections_of(blob)
    for index, section in enumerate(sections):
        for at in range(len(section)):
            for flip in (0x01, 0x80, 0xFF):
                changed = bytearray(section)
                changed[at] ^= flip
                yield reseal(blob, [*sections[:index], bytes(changed), *sections[index + 1 :]])


def test_every_byte_of_the_sections_changed_with_right_checksums(scheme: str) -> None:
    decoded = [attempt(scheme, forged) for forged in resealed_flips(blob_of(scheme))]
    # Many must be found out by the entropy coder's own checks even so.
    assert decoded.count(False) > len(decoded) // 10
    assert not all(decoded) and any(decoded)


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_sections_cut_or_grown_with_right_checksums(scheme: str, backend: str) -> None:
    blob = blob_of(scheme)
    sections = sections_of(blob)
    for length in range(len(sections[0])):
        with pytest.raises(FormatError):
            decode(scheme, reseal(blob, [sections[0][:length], *sections[1:]]), backend)
    for tail in (b"\0", bytes(4), b"\xff" * 64):
        with pytest.raises(FormatError):
            decode(scheme, reseal(blob, [sections[0] + tail, *sections[1:]]), backend)


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_sections_of_random_bytes_with_right_checksums(scheme: str, backend: str) -> None:
    source = random.Random(1)
    blob = blob_of(scheme)
    for length in (*range(1, 200, 3), 1000):
        attempt(scheme, reseal(blob, [source.randbytes(length), sections_of(blob)[1]]), backend)
        attempt(scheme, reseal(blob, [bytes(length), sections_of(blob)[1]]), backend)


def test_header_fields_changed_with_right_checksums(scheme: str) -> None:
    blob = blob_of(scheme)
    for at in range(4, HEADER):
        for flip in (0x01, 0x40, 0x80, 0xFF):
            changed = bytearray(blob)
            changed[at] ^= flip
            tokens = int.from_bytes(changed[8:12], "little")
            attempt(scheme, reseal_header(bytes(changed), 2), tokens=tokens)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_agrees_about_forged_sections(scheme: str, backend: str) -> None:
    every = 1741 if backend == "triton" else 67  # its interpreter takes a second or two per blob
    for number, forged in enumerate(resealed_flips(blob_of(scheme))):
        if number % every == 0:
            assert attempt(scheme, forged, backend) == attempt(scheme, forged, "numba")


EXTREMES = (-(2**31), 2**31 - 1)
# Triton's interpreter takes seconds for each, and 0 and 1 are nothing special to it.
ESCAPES: list[Any] = [(value, backend) for value in (*EXTREMES, 0, 1) for backend in stage_names()]
ESCAPES += [pytest.param(value, "triton", marks=TRITON.marks) for value in EXTREMES]


@pytest.mark.parametrize(("value", "backend"), ESCAPES)
@pytest.mark.parametrize("lossy", LOSSY)
def test_escapes_of_any_value_decode(lossy: str, value: int, backend: str) -> None:
    blob = blob_of(lossy)
    section = bytearray(sections_of(blob)[0])
    escapes = struct.unpack_from("<I", section, coded_offset(lossy, bytes(section)) + 4)[0]
    for index in range(escapes):
        struct.pack_into("<i", section, len(section) - 4 * (index + 1), value)
    assert attempt(lossy, with_section(blob, bytes(section)), backend)


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        pytest.param(0, "<I", 2**32 - 1, id="words"),
        pytest.param(4, "<I", 2**32 - 1, id="escapes"),
        pytest.param(0, "<Q", 2**64 - 1, id="words and escapes"),
        pytest.param(8, "<B", 63, id="tokens per stream"),
        pytest.param(8, "<B", 8, id="tokens per stream, one too far"),
        pytest.param(9, "<B", 1, id="reserved byte"),
        pytest.param(9, "<B", 255, id="reserved byte, all bits"),
        pytest.param(10, "<H", 1, id="reserved word"),
        pytest.param(12, "<I", 2**32 - 1, id="class words"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_counts_that_overflow_are_refused(scheme: str, offset: int, fmt: str, value: int, backend: str) -> None:
    blob = blob_of(scheme)
    section = bytearray(sections_of(blob)[0])
    struct.pack_into(fmt, section, coded_offset(scheme, bytes(section)) + offset, value)
    with pytest.raises(FormatError):
        decode(scheme, with_section(blob, bytes(section)), backend)


# --- token classes


@dataclass(frozen=True)
class Classed:
    """The parts of section 0 of the blob whose tokens have classes."""

    words: int
    escapes: int
    log2: int
    class_words: int
    class_state: int
    states: bytes
    lengths: bytes
    stream: bytes  # class words
    rest: bytes  # words, padding and escapes

    @classmethod
    def parse(cls) -> Classed:
        section = sections_of(blob_of("classes"))[0]
        words, escapes, log2, count, state = struct.unpack_from("<IIB3xII", section)
        streams = -(-TOKENS >> log2)
        at = [20, 20 + 4 * streams, 20 + 6 * streams, 20 + 6 * streams + 2 * count]
        states, lengths, stream = (section[a:b] for a, b in pairwise(at))
        return cls(words, escapes, log2, count, state, states, lengths, stream, section[at[-1] :])

    def blob(self, **fields: int) -> bytes:
        """The blob with this for section 0, padded as it must be."""
        head = struct.pack(
            "<IIB3xII", self.words, self.escapes, self.log2, self.class_words, self.class_state
        )  # fmt: skip
        body = head + self.states + self.lengths + self.stream + self.rest[: 2 * self.words]
        body += bytes(-len(body) % 4) + (self.rest[-8 * self.escapes :] if self.escapes else b"")
        return reseal(blob_of("classes"), [body, sections_of(blob_of("classes"))[1]], **fields)

    def with_classes(self, classes: U8) -> Classed:
        """With the classes of the tokens coded anew, and the streams as they are."""
        listed = encode_classes(classes, class_table(learned().learned[0].class_freq))
        return replace(
            self, class_words=len(listed.words), class_state=int(listed.states[0]),
            stream=listed.words.astype("<u2").tobytes(),
        )  # fmt: skip


def classes_of_blob() -> U8:
    """The classes of the tokens in section 0."""
    part = Classed.parse()
    words = np.frombuffer(part.stream, "<u2").astype(np.uint16)
    listed = Streams(np.array([part.class_state], np.uint32), np.array([len(words)], np.uint32), words)
    return decode_classes(listed, class_table(learned().learned[0].class_freq), TOKENS)


def test_the_classes_are_where_they_should_be() -> None:
    classes = classes_of_blob()
    assert Classed.parse().blob() == blob_of("classes")
    assert Classed.parse().with_classes(classes).blob() == blob_of("classes")
    assert classes[-1] == 0 and len(set(classes.tolist())) > 5


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_classes_are_found_out(backend: str) -> None:
    """Well-coded classes that the streams were not made for."""
    classes, part = classes_of_blob(), Classed.parse()
    for other in (np.zeros_like(classes), np.full_like(classes, CLASSES - 1), np.maximum(classes, 1) - 1):
        with pytest.raises(CorruptError):
            decode("classes", part.with_classes(other.astype(np.uint8)).blob(), backend)
    # The same columns dealt out to other tokens: nothing tells, but the tag of a blob that has one.
    assert attempt("classes", part.with_classes(classes[::-1].copy()).blob(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_classes_finer_than_served_are_refused(backend: str) -> None:
    """Four octaves below a step that is itself the profile's finest, the widest components are out of reach."""
    step = learned().min_step_index
    assert learned().learned[0].classed_plan(step).finest > 0 == classes_of_blob()[-1]
    with pytest.raises(FormatError) as caught:
        decode("classes", reseal(blob_of("classes"), step=step), backend)
    if backend != "triton":
        assert "token classes outside" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"class_words": 2**32 - 1}, id="class words overflow"),
        pytest.param({"class_words": 1 << 20}, id="class words beyond the section"),
        pytest.param({"class_words": 0}, id="no class words"),
        pytest.param({"class_state": 0}, id="no class state"),
        pytest.param({"class_state": (1 << 16) - 1}, id="class state below its bound"),
        pytest.param({"class_state": 2**32 - 1}, id="another class state"),
        pytest.param({"stream": b"", "class_words": 0}, id="class stream cut off"),
        pytest.param({"escapes": 0}, id="no escapes"),
        pytest.param({"log2": 0}, id="a stream per token"),
        pytest.param({"log2": 8}, id="streams beyond a window"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_class_fields_that_do_not_fit_are_refused(changes: dict[str, Any], backend: str) -> None:
    with pytest.raises(FormatError):
        decode("classes", replace(Classed.parse(), **changes).blob(), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_class_word_counts(backend: str) -> None:
    part = Classed.parse()
    assert part.class_words >= 3
    for word in range(part.class_words):
        stream = bytearray(part.stream)
        stream[2 * word] ^= 0x10
        with pytest.raises(FormatError):
            decode("classes", replace(part, stream=bytes(stream)).blob(), backend)
        if backend == "triton":
            break
    for count in (1, 2):
        longer = replace(part, stream=part.stream + bytes(2 * count), class_words=part.class_words + count)
        with pytest.raises(FormatError):
            decode("classes", longer.blob(), backend)


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        pytest.param(4, "<I", 1, id="an escape"),
        pytest.param(12, "<I", 1, id="a class word"),
        pytest.param(16, "<I", (1 << 16) + 1, id="a class state"),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_lossless_section_has_neither_classes_nor_escapes(offset: int, fmt: str, value: int, backend: str) -> None:
    blob = blob_of("lossless")
    section = bytearray(sections_of(blob)[0])
    struct.pack_into(fmt, section, coded_offset("lossless", bytes(section)) + offset, value)
    with pytest.raises(FormatError) as caught:
        decode("lossless", with_section(blob, bytes(section)), backend)
    if backend != "triton":
        assert "all of its tokens have one class" in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_escapes_below_a_column_are_refused(backend: str) -> None:
    """A row that the finest class codes, and the column of a coarse token does not."""
    part = Classed.parse()
    plan = learned().learned[0].classed_plan(read_header(blob_of("classes")).step_index)
    rows, coarsest = int(plan.rows.max()), int(plan.rows[classes_of_blob().max()])
    assert coarsest < rows and part.escapes
    escapes = bytearray(part.rest[-8 * part.escapes :])
    struct.pack_into("<I", escapes, 4 * (part.escapes - 1), rows * TOKENS - 1)
    forged = replace(part, rest=part.rest[: -8 * part.escapes] + bytes(escapes))
    with pytest.raises(CorruptError):
        decode("classes", forged.blob(), backend)
    struct.pack_into("<I", escapes, 4 * (part.escapes - 1), rows * TOKENS)
    with pytest.raises(FormatError):
        decode("classes", replace(part, rest=part.rest[: -8 * part.escapes] + bytes(escapes)).blob(), backend)


# --- counts


@pytest.mark.parametrize("tokens", [0, 1, TOKENS - 1, TOKENS + 1, 128, 1 << 20, 1 << 24, (1 << 24) + 1, 2**32 - 1])
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_other_numbers_of_tokens_are_refused(scheme: str, tokens: int, backend: str) -> None:
    with pytest.raises((FormatError, InputError)):
        decode(scheme, reseal(blob_of(scheme), tokens=tokens), backend)


@pytest.mark.parametrize("count", [0, 1, 3, 2**16, 2**32 - 1])
def test_other_numbers_of_sections_are_refused(scheme: str, count: int) -> None:
    with pytest.raises(FormatError):
        codec_of(scheme).decode(reseal(blob_of(scheme), count=count))
    sections = sections_of(blob_of(scheme))
    with pytest.raises(FormatError):
        codec_of(scheme).decode(reseal(blob_of(scheme), (sections * 3)[: min(count, 5) or 3], count=min(count, 5) or 3))


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_swapped_sections_are_refused(scheme: str, backend: str) -> None:
    with pytest.raises(FormatError):
        decode(scheme, reseal(blob_of(scheme), sections_of(blob_of(scheme))[::-1]), backend)


@pytest.mark.parametrize("values", [1, 95, 97, 2**32 - 1])
def test_other_numbers_of_values_are_refused(scheme: str, values: int) -> None:
    with pytest.raises(FormatError):
        codec_of(scheme).decode(reseal(blob_of(scheme), values=values))


@pytest.mark.parametrize("start", [4096 - TOKENS + 1, 4096, 2**32 - 1])
def test_positions_beyond_the_model_are_refused(scheme: str, start: int) -> None:
    assert attempt(scheme, reseal(blob_of(scheme), start=4096 - TOKENS))
    with pytest.raises(InputError):
        codec_of(scheme).decode(reseal(blob_of(scheme), start=start))


@pytest.mark.parametrize("step", [-(2**31), -513, 513, 2**31 - 1])
@pytest.mark.parametrize("lossy", LOSSY)
def test_steps_out_of_range_are_refused(lossy: str, step: int) -> None:
    with pytest.raises((FormatError, ProfileError)):
        codec_of(lossy).decode(reseal(blob_of(lossy), step=step))


@pytest.mark.parametrize("lossy", LOSSY)
def test_any_other_step_is_refused_or_decodes(lossy: str) -> None:
    for step in range(-512, 513, 31):
        attempt(lossy, reseal(blob_of(lossy), step=step))


# --- tables of the lossless scheme


def lossless_table(change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]]) -> bytes:
    """The lossless blob with another table for its first coded plane."""
    blob = blob_of("lossless")
    section = sections_of(blob)[0]
    at = 0
    while not section[at]:
        at += 1
    at += 1 + 8
    count = int.from_bytes(section[at : at + 2], "little")
    head_end = at + 2 + 3 * count
    pairs = [struct.unpack_from("<BH", section, at + 2 + 3 * i) for i in range(count)]
    changed = change([(symbol, freq) for symbol, freq in pairs])
    table = struct.pack("<H", len(changed)) + b"".join(struct.pack("<BH", *pair) for pair in changed)
    old_head, _ = lossless_head(section)
    head = section[:at] + table + section[head_end:old_head]
    return reseal(blob, [head + bytes(-len(head) % 4) + section[old_head + -old_head % 4 :], sections_of(blob)[1]])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: [], id="empty"),
        pytest.param(lambda t: t[::-1], id="falling"),
        pytest.param(lambda t: [t[0], *t], id="twice"),
        pytest.param(lambda t: [(t[0][0], 0), *t[1:]], id="no frequency"),
        pytest.param(lambda t: [(t[0][0], t[0][1] + 1), *t[1:]], id="sum too large"),
        pytest.param(lambda t: [(7, 4096)], id="certain"),
        pytest.param(lambda t: [(s, 0xFFFF) for s, _ in t], id="huge"),
        pytest.param(lambda t: t * 1000, id="many"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_lossless_tables_that_break_a_rule_are_refused(
    change: Callable[[list[tuple[int, int]]], list[tuple[int, int]]], backend: str
) -> None:
    assert lossless_table(lambda t: t) == blob_of("lossless")
    with pytest.raises(FormatError):
        decode("lossless", lossless_table(change), backend)


# --- blobs of others


def test_blobs_of_another_profile_are_refused() -> None:
    other = fit(LAYOUT, [correlated_chunk(seed, 64, 0) for seed in range(30, 37)], "layer")
    with pytest.raises(ProfileMismatchError, match="profile"):
        Codec(other, step=0.02).decode(blob_of("transform"))
    for scheme in LOSSY:
        with pytest.raises(ProfileMismatchError):
            codec_of("lossless").decode(blob_of(scheme))


def test_blobs_of_another_model_are_refused(scheme: str) -> None:
    for layout in (
        replace(LAYOUT, layers=LAYOUT.layers[::-1]),
        replace(LAYOUT, model_type="other"),
        replace(LAYOUT, layers=(LAYOUT.layers[0], LayerLayout(2, 8, 8, Rope((1.0, 0.2, 0.01, 0.001))))),
    ):
        with pytest.raises(ProfileMismatchError, match="model"):
            Codec(Profile.unlearned(layout), "lossless").decode(blob_of(scheme))


@pytest.mark.parametrize(
    ("scheme", "other"),
    [("lossless", 2), ("transform", 1), ("lossless", 0), ("transform", 0), ("transform", 3), ("transform", 255)],
)
def test_another_scheme_in_the_header_is_refused(scheme: str, other: int) -> None:
    with pytest.raises((FormatError, ProfileMismatchError)):
        codec_of(scheme).decode(reseal(blob_of(scheme), scheme=other))


@pytest.mark.parametrize("dtype", [1, 2])
def test_another_dtype_in_the_header_is_another_model(scheme: str, dtype: int) -> None:
    with pytest.raises(ProfileMismatchError):
        codec_of(scheme).decode(reseal(blob_of(scheme), dtype=dtype))


def test_one_codec_reads_the_dtype_from_the_blob(scheme: str) -> None:
    for dtype in ("float16", "float32"):
        chunk = correlated_chunk(51, TOKENS, START, replace(LAYOUT, dtype=dtype))
        back = codec_of(scheme).decode(codec_of(scheme).encode(chunk))
        assert back.layout.dtype == dtype and back.keys[1].dtype == chunk.keys[1].dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_reads_the_blob(scheme: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply(Products.FLOAT32, monkeypatch)
    want, got = codec_of(scheme, "reference").decode(blob_of(scheme)), decode(scheme, blob_of(scheme), backend)
    # Only the device backend sums in another order: a last bit of bfloat16, at the size of the largest value.
    rounding = 2.0**-6 if backend == "triton" and scheme != "lossless" else 0.0
    for a, b in zip([*want.keys, *want.values], [*got.keys, *got.values], strict=True):
        assert (a.float() - b.cpu().float()).abs().max() <= rounding * a.float().abs().max()


def test_an_error_in_one_thread_is_raised(scheme: str) -> None:
    blob = bytearray(blob_of(scheme))
    blob[-1] ^= 1
    with pytest.raises(CorruptError, match="section 1"):
        Codec(codec_of(scheme).profile, "lossless", threads=2).decode(bytes(blob))


# --- memory

# Decodes the blobs whose paths it is given with no more than 96 MiB left to allocate. What is counted is address
# space, so that no allocator (NumPy's, torch's, a compiled kernel's) goes around it.
LIMITED = """
import resource, sys
from pathlib import Path
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.profiles.profile import Profile
good, *forged = (Path(p).read_bytes() for p in sys.argv[2:])
profile = Profile.load(sys.argv[1])
codec = Codec(profile, step=0.02, threads=1)
codec.decode(good)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
try:
    bytearray(128 << 20)
except MemoryError:
    print("limited")
for blob in forged:
    try:
        codec.decode(blob)
        print("decoded")
    except CuveeError as error:
        print(type(error).__name__)
"""


@dataclass(frozen=True)
class Bomb:
    """Header and section fields that ask for a lot."""

    tokens: int
    section: bytes


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_bounded_by_the_length_of_the_blob(tmp_path: Path) -> None:
    # No limit on positions here: the number of tokens is all that could stop it.
    layout = replace(LAYOUT, max_positions=None)
    fitted = learned()
    profile = Profile(layout, fitted.group, fitted.source, fitted.family, fitted.learned)
    codec = Codec(profile, step=0.02, threads=1)
    good = codec.encode(correlated_chunk(50, TOKENS, START, layout, outlier=300.0))
    sections = sections_of(good)
    forged = [reseal(good, tokens=tokens) for tokens in (1 << 24, 1 << 23, 1 << 20, 1 << 16)]
    for offset, fmt in ((0, "<I"), (4, "<I"), (0, "<Q"), (8, "<B")):
        section = bytearray(sections[0])
        struct.pack_into(fmt, section, offset, (1 << 8 * struct.calcsize(fmt)) - 1)
        forged.append(reseal(good, [bytes(section), sections[1]]))
        forged.append(reseal(good, [bytes(section), sections[1]], tokens=1 << 24))
    # All the tokens that sections of this length can promise, and not one stream of them.
    forged.append(reseal(good, [bytes(2048)] * 2, tokens=2048 * 128))
    # The same with a class for each, in a stream of its own that has no words.
    many = struct.pack("<IIB3xII", 0, 0, 7, 0, 1 << 16) + struct.pack("<I", 1 << 16) * 340 + bytes(2 * 340)
    forged.append(reseal(good, [many] * 2, tokens=340 * 128))
    classes = Codec(with_classes(codec.profile, WEIGHTS, START, keep_id=True), step=0.02)
    classed = classes.encode(correlated_chunk(50, TOKENS, START, layout, outlier=300.0))
    parts = sections_of(classed)
    for tokens in (1 << 24, 1 << 20):
        forged.append(reseal(classed, tokens=tokens))
    for count in (2**32 - 1, 1 << 26):
        section = bytearray(parts[0])
        struct.pack_into("<I", section, 12, count)
        forged.append(reseal(classed, [bytes(section), parts[1]]))
        forged.append(reseal(classed, [bytes(section), parts[1]], tokens=1 << 24))
    forged.append(reseal(good, count=1 << 16))
    profile.save(tmp_path / "profile.safetensors")
    paths = []
    for number, blob in enumerate([good, *forged]):
        paths.append(tmp_path / f"{number}.bin")
        paths[-1].write_bytes(blob)
    command = [sys.executable, "-W", "error", "-c", LIMITED, str(tmp_path / "profile.safetensors"), *map(str, paths)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    limited, *outcomes = result.stdout.split()
    assert limited == "limited" and len(outcomes) == len(forged)
    assert set(outcomes) <= {"FormatError", "CorruptError"}, outcomes


# --- blobs that claim a huge cache

SMALL = KVLayout("small", (LayerLayout(1, 4, 4, None),), "bfloat16", None)


@cache
def bomb() -> bytes:
    """Zeros compress to next to nothing: a whole, undamaged blob."""
    tokens = MAX_DECODED_TOKENS + 1
    zeros = torch.zeros(1, tokens, 1, 4, dtype=torch.bfloat16)
    return Codec(Profile.unlearned(SMALL), "lossless").encode(KVChunk(list(zeros), list(zeros), SMALL))


def test_a_small_blob_that_claims_a_huge_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blob = Codec(Profile.unlearned(SMALL), "lossless"), bomb()
    assert len(blob) < 32_000
    with monkeypatch.context() as patch:
        patch.setattr(PagedCache, "empty", lambda *_: pytest.fail("something was allocated"))
        limits: list[dict[str, Any]] = [{}, {"max_tokens": MAX_DECODED_TOKENS}, {"max_tokens": 1}]
        for limit in limits:
            with pytest.raises(InputError, match=r"^max_tokens: must be at least 131073 to restore"):
                codec.decode(blob, **limit)
        with pytest.raises(InputError, match=r"^max_tokens: must be at least 5 to restore these tokens, got 4"):
            codec.decode(blob, tokens=range(10, 15), max_tokens=4)
        wrongs: tuple[Any, ...] = (0, -1, 1.5, True, "7")
        for wrong in wrongs:
            with pytest.raises(InputError, match=r"^max_tokens: must be at least 1, or None"):
                codec.decode(blob, max_tokens=wrong)
    for enough in (None, MAX_DECODED_TOKENS + 1):
        assert codec.decode(blob, max_tokens=enough).tokens == MAX_DECODED_TOKENS + 1
    assert codec.decode(blob, tokens=range(10, 15)).tokens == 5, "what is restored counts"


HUGE = 1 << 52  # more bytes than any machine can address


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(HUGE, dtype=torch.uint8),
        lambda: torch.empty((1 << 40, 1 << 40), dtype=torch.uint8),
        lambda: np.empty(HUGE, np.uint8),
    ],
    ids=["torch", "torch-overflow", "numpy"],
)
def test_memory_that_is_not_there_is_our_error(allocate: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    codec, blob = codec_of("lossless"), blob_of("lossless")
    chunk = codec.decode(blob)
    pages = PagedCache.dense(LAYOUT, chunk.keys, chunk.values)
    other = PagedCache.dense(LAYOUT, [k.float() for k in chunk.keys], [v.float() for v in chunk.values])
    assert other.dtype != chunk.keys[0].dtype
    monkeypatch.setattr("cuvee.codec.cpu.backend.cache_rows", lambda *_: allocate())
    monkeypatch.setattr(PagedCache, "empty", lambda *_: allocate())
    for call in (
        lambda: codec.decode(blob),
        lambda: codec.decode_paged([blob], pages, [torch.arange(TOKENS)]),
        lambda: codec.decode_paged([blob], other, [torch.arange(TOKENS)]),
    ):
        with pytest.raises(OutOfMemoryError, match=f"decoding {TOKENS} tokens: not enough memory: "):
            call()
    assert issubclass(OutOfMemoryError, CuveeError) and issubclass(OutOfMemoryError, MemoryError)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    for error in (RuntimeError("a bug"), CorruptError("damaged"), InputError("wrong")):
        with pytest.raises(type(error), match=str(error)) as caught, allocations("decoding"):
            raise error
        assert caught.value is error
