"""The blob's header, checksums and tag, and the coded part of a section, byte by byte as `FORMAT.md` has them."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from cuvee.codec.codec import Codec
from cuvee.codec.container import (
    MAX_TOKENS,
    MIN_KEY_BYTES,
    Reader,
    Scheme,
    inspect,
    read_header,
    read_section,
    read_streams,
    verify_tag,
    write_blob,
    write_streams,
)
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, VersionError
from cuvee.codec.layout import KVChunk, KVLayout, LayerLayout
from cuvee.codec.profile import Profile
from cuvee.codec.rans import Streams
from cuvee.codec.symbols import Escapes

KEY = b"0123456789abcdef"
SECTIONS = (b"first section", b"", b"the third one\x00")
FIXED = "<4sBBBBIIIiII16s16sQ"  # written here a second time, from FORMAT.md
LAYOUT_ID, PROFILE_ID = bytes(range(16)), bytes(range(100, 116))


@dataclass(frozen=True)
class Fields:
    """The header's fields in order; `seal` makes a blob of them, with right checksums whatever they say."""

    magic: bytes = b"cuve"
    version: int = 1
    scheme: int = 1
    dtype: int = 0
    flags: int = 0
    tokens: int = 77
    start: int = 1234
    values: int = 96
    step: int = -65
    count: int = 3
    reserved: int = 0
    layout: bytes = LAYOUT_ID
    profile: bytes = PROFILE_ID
    total: int | None = None
    lengths: tuple[int, ...] | None = None

    def seal(self, sections: tuple[bytes, ...] = SECTIONS, key: bytes | None = None) -> bytes:
        total = 72 + 12 * len(sections) + 8 + sum(map(len, sections)) + (16 if key else 0)
        head = struct.pack(
            FIXED, self.magic, self.version, self.scheme, self.dtype, self.flags | bool(key), self.tokens, self.start,
            self.values, self.step, self.count, self.reserved, self.layout, self.profile,
            total if self.total is None else self.total,
        )  # fmt: skip
        lengths = self.lengths or tuple(map(len, sections))
        for length, section in zip(lengths, sections, strict=True):
            head += struct.pack("<IQ", length, xxhash.xxh3_64_intdigest(section))
        blob = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + b"".join(sections)
        if key:
            blob += hashlib.blake2b(blob, key=key, digest_size=16, person=b"cuvee-blob").digest()
        return blob


GOOD = Fields()


def written(key: bytes | None = None, **changes: Any) -> bytes:
    arguments: dict[str, Any] = {
        "scheme": Scheme.TRANSFORM, "dtype": "bfloat16", "tokens": 77, "start": 1234, "step": -65,
        "values_per_token": 96, "layout": LAYOUT_ID, "profile": PROFILE_ID, "sections": SECTIONS, "key": key,
    }  # fmt: skip
    return write_blob(**{**arguments, **changes})


# --- header


@pytest.mark.parametrize("key", [None, KEY])
def test_the_bytes_are_those_of_the_specification(key: bytes | None) -> None:
    assert written(key) == GOOD.seal(key=key)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", [Scheme.TRANSFORM, Scheme.GENERIC])
def test_header_round_trip(scheme: Scheme, dtype: str, key: bytes | None) -> None:
    blob = written(key, scheme=scheme, dtype=dtype)
    header = read_header(blob)
    assert (header.scheme, header.dtype, header.tokens, header.start, header.step) == (scheme, dtype, 77, 1234, -65)
    assert (header.values_per_token, header.layout, header.profile) == (96, LAYOUT_ID, PROFILE_ID)
    assert header.section_bytes == (13, 0, 14) and header.tagged == (key is not None)
    assert header.total_bytes == len(blob)
    for index, section in enumerate(SECTIONS):
        at = header.section_offset(index)
        assert bytes(read_section(blob, header, index)) == section == blob[at : at + len(section)]
    assert read_header(memoryview(blob)) == header


def test_inspect_tells_every_field_without_a_profile() -> None:
    info = inspect(written(KEY, dtype="float32"))
    assert (info.scheme, info.version, info.dtype) == ("transform", 1, "float32")
    assert (info.tokens, info.start, info.values_per_token) == (77, 1234, 96)
    assert info.step == pytest.approx(2 ** (-65 / 64))
    assert (info.layout_fingerprint, info.profile_id) == (LAYOUT_ID.hex(), PROFILE_ID.hex())
    assert (info.section_bytes, info.header_bytes) == ((13, 0, 14), 72 + 36 + 8)
    assert info.total_bytes == 116 + 27 + 16 and info.authenticated
    assert info.raw_bytes == 77 * 96 * 4
    assert info.bits_per_value == pytest.approx(8 * 159 / (77 * 96))
    assert info.ratio == pytest.approx(77 * 96 * 4 / 159)


def test_inspect_of_lossless_has_neither_step_nor_profile() -> None:
    info = inspect(written(scheme=Scheme.LOSSLESS, profile=bytes(16), step=0))
    assert (info.scheme, info.step, info.profile_id, info.authenticated) == ("lossless", None, None, False)
    assert info.raw_bytes == 77 * 96 * 2


@pytest.mark.parametrize("step", [-(2**31), -513, 1024, 70_000, 2**31 - 1])
def test_inspect_survives_any_step(step: int) -> None:
    with suppress(FormatError):  # it may well refuse one that is out of range
        told = inspect(replace(GOOD, step=step).seal()).step
        assert told is not None and (told == 2.0 ** (step / 64) if step < 1 << 16 else told > 1e300)


BROKEN: dict[str, Fields] = {
    "another magic": replace(GOOD, magic=b"cuvE"),
    "scheme 3": replace(GOOD, scheme=3),
    "scheme 255": replace(GOOD, scheme=255),
    "dtype 3": replace(GOOD, dtype=3),
    "reserved": replace(GOOD, reserved=1),
    "reserved, high bit": replace(GOOD, reserved=1 << 31),
    "no tokens": replace(GOOD, tokens=0),
    "a token too many": replace(GOOD, tokens=MAX_TOKENS + 1),
    "all the tokens": replace(GOOD, tokens=2**32 - 1),
    "no values": replace(GOOD, values=0),
    "no sections": replace(GOOD, count=0),
    "2**32 - 1 sections": replace(GOOD, count=2**32 - 1),
    "2**16 sections": replace(GOOD, count=1 << 16),
    "total one less": replace(GOOD, total=142),
    "total one more": replace(GOOD, total=144),
    "total huge": replace(GOOD, total=2**64 - 1),
    "section too long": replace(GOOD, lengths=(13, 0, 15)),
    "section of 4 GiB": replace(GOOD, lengths=(2**32 - 1, 0, 14)),
    "section of 4 GiB, total agrees": replace(GOOD, lengths=(2**32 - 1, 0, 14), total=116 + 2**32 + 13),
    "sections shorter": replace(GOOD, lengths=(12, 0, 14)),
    "a profile where lossless has none": replace(GOOD, scheme=0, step=0),
    "a step where lossless has none": replace(GOOD, scheme=0, profile=bytes(16)),
} | {f"flag {bit}": replace(GOOD, flags=1 << bit) for bit in range(1, 8)}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_refused_though_checksums_match(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_header(BROKEN[name].seal())
    assert not isinstance(caught.value, VersionError)
    if BROKEN[name].count == 3:
        assert not isinstance(caught.value, CorruptError), "refused by a checksum, not by the rule"


@pytest.mark.parametrize("tokens", [1, MAX_TOKENS])
def test_the_limits_themselves_are_allowed(tokens: int) -> None:
    assert read_header(replace(GOOD, tokens=tokens).seal()).tokens == tokens


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_versions_are_refused_as_such(version: int) -> None:
    with pytest.raises(VersionError, match=str(version)):
        read_header(replace(GOOD, version=version).seal())


def test_another_version_is_named_whatever_follows() -> None:
    with pytest.raises(VersionError, match="2"):
        read_header(b"cuve\x02" + b"\xff" * 200)


@pytest.mark.parametrize("junk", [b"", b"cuve", b"cuve\x01", bytes(79), b"PK\x03\x04" + bytes(300)])
def test_what_is_not_a_blob_is_refused(junk: bytes) -> None:
    with pytest.raises(FormatError):
        read_header(junk)


@pytest.mark.parametrize("key", [None, KEY])
def test_every_truncation_and_any_tail_is_refused(key: bytes | None) -> None:
    blob = written(key)
    for length in range(len(blob)):
        with pytest.raises(FormatError):
            read_header(blob[:length])
    with pytest.raises(FormatError, match="tail"):
        read_header(blob + b"\0")


def test_the_header_checksum_covers_header_and_contents() -> None:
    blob = written()
    for at in range(72 + 36 + 8):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(blob)
            changed[at] ^= flip
            with pytest.raises(FormatError):
                read_header(bytes(changed))
    changed = bytearray(blob)
    changed[12] ^= 1  # start: every value is legal
    with pytest.raises(CorruptError, match="header"):
        read_header(bytes(changed))


def test_section_checksums_name_the_section() -> None:
    blob = bytearray(written())
    blob[-1] ^= 1
    header = read_header(bytes(blob))
    assert bytes(read_section(bytes(blob), header, 0)) == SECTIONS[0]
    with pytest.raises(CorruptError, match="section 2"):
        read_section(bytes(blob), header, 2)


def test_writing_refuses_what_reading_would() -> None:
    with pytest.raises(InputError, match="tokens"):
        written(tokens=MAX_TOKENS + 1)
    with pytest.raises(CuveeError):
        written(sections=[b""] * ((1 << 16) + 1))


# --- the keyed tag


def verified(blob: bytes, key: bytes | None) -> None:
    verify_tag(blob, read_header(blob), key)


def test_the_right_key_verifies() -> None:
    verified(written(KEY), KEY)
    verified(written(KEY * 4), KEY * 4)
    verified(written(), None)


@pytest.mark.parametrize("key", [KEY[:-1] + b"!", KEY + b"\0", KEY * 2])
def test_another_key_does_not(key: bytes) -> None:
    with pytest.raises(CorruptError, match="tag"):
        verified(written(KEY), key)


def test_a_missing_key_or_tag_is_refused() -> None:
    with pytest.raises(InputError, match="key="):
        verified(written(KEY), None)
    with pytest.raises(InputError, match="no authentication tag"):
        verified(written(), KEY)


def test_a_stripped_tag_does_not_make_a_blob_trusted() -> None:
    stripped = GOOD.seal()
    assert read_header(stripped).total_bytes == len(written(KEY)) - 16
    with pytest.raises(InputError):
        verified(stripped, KEY)


def test_tampering_with_right_checksums_is_found_by_the_tag() -> None:
    tag = written(KEY)[-16:]
    for fields, sections in (
        (replace(GOOD, start=1235), SECTIONS),
        (replace(GOOD, profile=bytes(16)), SECTIONS),
        (GOOD, (b"fIrst section", *SECTIONS[1:])),
        (GOOD, (SECTIONS[0][:-1], SECTIONS[0][-1:], SECTIONS[2])),
    ):
        forged = fields.seal(sections, KEY)[:-16] + tag
        read_header(forged)
        with pytest.raises(CorruptError, match="tag"):
            verified(forged, KEY)


def test_every_bit_of_the_tag_counts() -> None:
    blob = written(KEY)
    for bit in range(128):
        changed = bytearray(blob)
        changed[len(blob) - 16 + bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError, match="tag"):
            verified(bytes(changed), KEY)


LAYOUT = KVLayout("tiny", (LayerLayout(1, 4, 4, None),) * 2, "float32", None)


def chunk(tokens: int = 9) -> KVChunk:
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, tokens, 1, 4, generator=generator) for _ in range(2))
    return KVChunk(keys, values, LAYOUT)


def test_a_codec_with_a_key_takes_its_own_blobs_only() -> None:
    profile = Profile.generic(LAYOUT)
    plain, keyed, other = (Codec(profile, "lossless", key=key) for key in (None, KEY, KEY[::-1]))
    blob = keyed.encode(chunk())
    assert torch.equal(keyed.decode(blob).keys[1], chunk().keys[1])
    for codec, error in ((plain, InputError), (other, CorruptError)):
        with pytest.raises(error):
            codec.decode(blob)
        with pytest.raises(error):
            codec.decode_layers(blob, 0, 1)
    with pytest.raises(InputError):
        keyed.decode(plain.encode(chunk()))


@pytest.mark.parametrize("key", [b"", b"short", b"x" * (MIN_KEY_BYTES - 1), b"x" * 65, "a" * 16])
def test_weak_keys_are_refused(key: Any) -> None:
    with pytest.raises(InputError, match="key"):
        Codec(Profile.generic(LAYOUT), "lossless", key=key)


# --- a reported size is proved true


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("quality", ["lossless", "balanced"])
def test_the_reported_size_is_what_decoding_needs(quality: str, key: bytes | None) -> None:
    codec = Codec(Profile.generic(LAYOUT), quality, key=key)
    blob = codec.encode(chunk())
    info = inspect(blob)
    assert info.header_bytes + sum(info.section_bytes) + (16 if key else 0) == info.total_bytes
    padded = blob + bytes(100)
    want, got = codec.decode(blob), codec.decode(padded[: info.total_bytes])
    assert all(torch.equal(a, b) for a, b in zip(want.keys, got.keys, strict=True))
    with pytest.raises(FormatError):
        codec.decode(blob[: info.total_bytes - 1])


# --- the coded part of a section


def coded(words: int = 5, escapes: int = 2) -> tuple[Streams, Escapes]:
    lengths = np.array([words - 2, 2, 0], np.uint32)
    states = np.array([1 << 16, 0xFFFFFFFF, 70000], np.uint32)
    index = np.array([3, 40], np.uint32)[:escapes]
    value = np.array([-(2**31), 2**31 - 1], np.int32)[:escapes]
    return Streams(states, lengths, np.arange(words, dtype=np.uint16)), Escapes(index, value)


# 4 components and 2 planes of low bits, 20 tokens in streams of 8.
ROWS, PLANES, TOKENS = 4, 6, 20


def parse(data: bytes, planes: int = PLANES) -> tuple[Streams, Escapes, int]:
    reader = Reader(memoryview(data))
    out = read_streams(reader, planes, ROWS, TOKENS)
    reader.finish()
    return out


@pytest.mark.parametrize("planes", [PLANES, 8191, 8192])
@pytest.mark.parametrize("words", [2, 5, 6, 7])
def test_streams_round_trip(words: int, planes: int) -> None:
    streams, escapes = coded(words)
    data = write_streams(streams, escapes, planes, 8)
    wide = planes * 8 > 0xFFFF
    assert len(data) == 12 + 3 * 4 + -(-(3 * (4 if wide else 2) + 2 * words) // 4) * 4 + 2 * 8
    back, back_escapes, per_stream = parse(data, planes)
    assert per_stream == 8
    for a, b in (
        (back.states, streams.states), (back.lengths, streams.lengths), (back.words, streams.words),
        (back_escapes.index, escapes.index), (back_escapes.value, escapes.value),
    ):  # fmt: skip
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_streams_are_laid_out_as_specified() -> None:
    streams, escapes = coded(5)
    data = write_streams(streams, escapes, PLANES, 8)
    assert struct.unpack_from("<IIBBH", data) == (5, 2, 3, 0, 0)
    assert struct.unpack_from("<3I3H5H", data, 12) == (1 << 16, 2**32 - 1, 70000, 3, 2, 0, 0, 1, 2, 3, 4)
    assert struct.unpack_from("<2I2i", data, 40) == (3, 40, -(2**31), 2**31 - 1)
    assert len(data) == 56


def damage(offset: int, fmt: str, value: int) -> bytes:
    data = bytearray(write_streams(*coded(6), PLANES, 8))
    struct.pack_into(fmt, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("offset", "fmt", "value"),
    [
        pytest.param(0, "<I", 7, id="a word too many"),
        pytest.param(0, "<I", 5, id="a word too few"),
        pytest.param(0, "<I", 2**32 - 1, id="words overflow"),
        pytest.param(4, "<I", 3, id="an escape too many"),
        pytest.param(4, "<I", 1, id="an escape too few"),
        pytest.param(4, "<I", 2**32 - 1, id="escapes overflow"),
        pytest.param(8, "<B", 2, id="more streams"),
        pytest.param(8, "<B", 4, id="fewer streams"),
        pytest.param(8, "<B", 8, id="256 tokens a stream"),
        pytest.param(8, "<B", 255, id="2**255 tokens a stream"),
        pytest.param(9, "<B", 1, id="reserved byte"),
        pytest.param(10, "<H", 1, id="reserved word"),
        pytest.param(10, "<H", 0x8000, id="reserved word, high bit"),
        pytest.param(12, "<I", 0xFFFF, id="a state below its bound"),
        pytest.param(24, "<H", 5, id="a length more"),
        pytest.param(24, "<H", 0xFFFF, id="a length far too much"),
        pytest.param(42, "<B", 1, id="padding"),
        pytest.param(43, "<B", 0x80, id="padding, last byte"),
        pytest.param(44, "<I", 40, id="escape twice"),
        pytest.param(44, "<I", 41, id="escapes out of order"),
        pytest.param(48, "<I", ROWS * TOKENS, id="escape beyond the matrix"),
        pytest.param(48, "<I", 2**32 - 1, id="escape far beyond"),
    ],
)
def test_streams_that_break_a_rule_are_refused(offset: int, fmt: str, value: int) -> None:
    assert parse(damage(48, "<I", ROWS * TOKENS - 1))[1].index[-1] == ROWS * TOKENS - 1
    with pytest.raises(FormatError):
        parse(damage(offset, fmt, value))


def test_truncated_or_longer_streams_are_refused() -> None:
    data = write_streams(*coded(5), PLANES, 8)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            parse(data[:length])
    with pytest.raises(FormatError, match="too many"):
        parse(data + b"\0")


def test_no_escape_fits_where_there_are_no_rows() -> None:
    data = write_streams(*coded(6), 0, 8)
    with pytest.raises(FormatError, match="escapes"):
        read_streams(Reader(memoryview(data)), 0, 0, TOKENS)


def test_reader_refuses_to_read_past_the_end() -> None:
    reader = Reader(memoryview(b"abcd"))
    assert bytes(reader.take(3)) == b"abc"
    for count in (2, 1 << 40):
        with pytest.raises(FormatError, match="too early"):
            reader.take(count)
    with pytest.raises(FormatError, match="1 bytes too many"):
        reader.finish()
    assert bytes(reader.take(1)) == b"d"
    reader.finish()
