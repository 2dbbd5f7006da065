"""The blob's header, checksums and tag, byte by byte as `FORMAT.md` has them."""

from __future__ import annotations

import hashlib
import pickle
import struct
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import pytest
import torch
import xxhash
from tests.conftest import fitted_to

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, KeyMismatchError, VersionError
from cuvee.codec.format.container import (
    MAX_TOKENS,
    Contents,
    Kind,
    Scheme,
    inspect,
    read_header,
    read_section,
    write_blob,
)
from cuvee.codec.format.keys import MIN_KEY_BYTES, Key, make_keys, verify_tag
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import Quality

KEY = b"0123456789abcdef"
SECTIONS = (b"first section", b"", b"the third one\x00")
FIXED = "<4sBBBBIIIiII16s16s16sQ"  # written here a second time, from FORMAT.md
LAYOUT_ID, PROFILE_ID, BASE_ID = bytes(range(16)), bytes(range(100, 116)), bytes(range(200, 216))


@dataclass(frozen=True)
class Fields:
    """The header's fields in order; `seal` makes a blob of them, with right checksums whatever they say."""

    magic: bytes = b"cuve"
    version: int = 4
    kind: int = 0
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
    refines: bytes = bytes(16)
    total: int | None = None
    lengths: tuple[int, ...] | None = None
    schemes: tuple[int, ...] = (2, 2, 2)

    def seal(
        self, sections: tuple[bytes, ...] = SECTIONS, key: bytes | None = None, associated_data: bytes = b""
    ) -> bytes:
        total = 88 + 13 * len(sections) + 8 + sum(map(len, sections)) + (24 if key else 0)
        head = struct.pack(
            FIXED, self.magic, self.version, self.kind, self.dtype, self.flags | bool(key), self.tokens, self.start,
            self.values, self.step, self.count, self.reserved, self.layout, self.profile, self.refines,
            total if self.total is None else self.total,
        )  # fmt: skip
        lengths = self.lengths or tuple(map(len, sections))
        for length, scheme, section in zip(lengths, self.schemes, sections, strict=True):
            head += struct.pack("<IBQ", length, scheme, xxhash.xxh3_64_intdigest(section))
        blob = head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + b"".join(sections)
        if key:
            blob += hashlib.blake2b(key=key, digest_size=8, person=b"cuvee-key-id").digest()
            bound = struct.pack("<Q", len(associated_data)) + associated_data + blob
            blob += hashlib.blake2b(bound, key=key, digest_size=16, person=b"cuvee-tag").digest()
        return blob


GOOD = Fields()


CONTENTS = Contents(
    dtype="bfloat16", tokens=77, start=1234, values_per_token=96, step_index=-65, schemes=(Scheme.TRANSFORM,) * 3,
    layout=LAYOUT_ID, profile=PROFILE_ID,
)  # fmt: skip
LOSSLESS: dict[str, Any] = {"schemes": (Scheme.LOSSLESS,) * 3, "step_index": 0, "profile": bytes(16)}
REFINEMENT: dict[str, Any] = {"kind": Kind.REFINEMENT, "refines": BASE_ID}


def written(key: bytes | None = None, associated_data: bytes = b"", **changes: Any) -> bytes:
    contents, own = replace(CONTENTS, **changes), None if key is None else Key.of(key)
    return write_blob(contents, SECTIONS, key=own, associated_data=associated_data)


@pytest.mark.parametrize("key", [None, KEY])
def test_the_bytes_are_those_of_the_specification(key: bytes | None) -> None:
    assert written(key) == GOOD.seal(key=key)
    assert written(key, **REFINEMENT) == replace(GOOD, kind=1, refines=BASE_ID).seal(key=key)
    assert written(key, **LOSSLESS) == replace(GOOD, step=0, profile=bytes(16), schemes=(1, 1, 1)).seal(key=key)
    if key:
        assert written(key, associated_data=b"its place") == GOOD.seal(key=key, associated_data=b"its place")


@pytest.mark.parametrize(
    ("changes", "dtype", "key"), [({}, "bfloat16", KEY), (LOSSLESS, "float16", None), (REFINEMENT, "float32", KEY)]
)
def test_header_round_trip(changes: dict[str, Any], dtype: str, key: bytes | None) -> None:
    blob, contents = written(key, dtype=dtype, **changes), replace(CONTENTS, dtype=dtype, **changes)
    header = read_header(blob)
    assert {own.name: getattr(header, own.name) for own in fields(Contents)} == asdict(contents)
    assert header.lossless == (changes is LOSSLESS)
    assert header.section_bytes == (13, 0, 14) and header.tagged == (key is not None)
    assert header.total_bytes == len(blob)
    for index, section in enumerate(SECTIONS):
        at = header.section_offset(index)
        assert bytes(read_section(blob, header, index)) == section == blob[at : at + len(section)]
    assert read_header(memoryview(blob)) == header


def test_inspect_tells_every_field_without_a_profile() -> None:
    info = inspect(written(KEY, dtype="float32"))
    assert (info.kind, info.scheme, info.version, info.dtype) == ("chunk", "transform", 4, "float32")
    assert (info.tokens, info.start, info.values_per_token) == (77, 1234, 96)
    assert info.step == pytest.approx(2 ** (-65 / 64))
    assert (info.layout_fingerprint, info.profile_id, info.refines) == (LAYOUT_ID.hex(), PROFILE_ID.hex(), None)
    assert (info.section_bytes, info.header_bytes) == ((13, 0, 14), 88 + 39 + 8)
    assert info.total_bytes == 135 + 27 + 24 and info.authenticated
    assert info.raw_bytes == 77 * 96 * 4
    assert info.bits_per_value == pytest.approx(8 * 186 / (77 * 96))
    assert info.ratio == pytest.approx(77 * 96 * 4 / 186)


@pytest.mark.parametrize("step", [-(2**31), -513, 1024, 70_000, 2**31 - 1])
def test_inspect_survives_any_step(step: int) -> None:
    with suppress(FormatError):  # it may well refuse one that is out of range
        told = inspect(replace(GOOD, step=step).seal()).step
        assert told is not None and (told == 2.0 ** (step / 64) if step < 1 << 16 else told > 1e300)


BROKEN: dict[str, Fields] = {
    "another magic": replace(GOOD, magic=b"cuvE"),
    "states with values": replace(GOOD, kind=2),
    "kind 3": replace(GOOD, kind=3),
    "kind 255": replace(GOOD, kind=255),
    "a refinement of nothing": replace(GOOD, kind=1),
    "a refinement without loss": replace(GOOD, kind=1, refines=BASE_ID, step=0, profile=bytes(16), schemes=(1, 1, 1)),
    "a chunk that refines": replace(GOOD, refines=BASE_ID),
    "scheme 0": replace(GOOD, schemes=(0, 0, 0)),
    "scheme 3": replace(GOOD, schemes=(3, 3, 3)),
    "scheme 255 in the last section": replace(GOOD, schemes=(2, 2, 255)),
    "sections of two schemes": replace(GOOD, schemes=(2, 1, 2)),
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
    "total one less": replace(GOOD, total=161),
    "total one more": replace(GOOD, total=163),
    "total huge": replace(GOOD, total=2**64 - 1),
    "section too long": replace(GOOD, lengths=(13, 0, 15)),
    "section of 4 GiB": replace(GOOD, lengths=(2**32 - 1, 0, 14)),
    "section of 4 GiB, total agrees": replace(GOOD, lengths=(2**32 - 1, 0, 14), total=135 + 2**32 + 13),
    "sections shorter": replace(GOOD, lengths=(12, 0, 14)),
    "a profile where lossless has none": replace(GOOD, schemes=(1, 1, 1), step=0),
    "a step where lossless has none": replace(GOOD, schemes=(1, 1, 1), profile=bytes(16)),
    "no profile": replace(GOOD, profile=bytes(16)),
} | {f"flag {bit}": replace(GOOD, flags=1 << bit) for bit in range(2, 8)}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rules_are_refused_though_checksums_match(name: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_header(BROKEN[name].seal())
    assert not isinstance(caught.value, VersionError)
    if BROKEN[name].count == 3:
        assert not isinstance(caught.value, CorruptError), "refused by a checksum, not by the rule"


def test_a_section_ends_below_two_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = replace(GOOD, lengths=(2**31, 0, 14), total=135 + 2**31 + 14)
    with pytest.raises(FormatError, match="not below 2 GiB"):
        read_header(longest.seal())
    with pytest.raises(FormatError) as caught:
        read_header(replace(longest, lengths=(2**31 - 1, 0, 14), total=135 + 2**31 + 13).seal())
    assert "2 GiB" not in str(caught.value)  # but the bytes that are missing
    monkeypatch.setattr("cuvee.codec.format.container.MAX_SECTION_BYTES", 13)
    with pytest.raises(InputError, match="encode fewer tokens at a time"):
        written()


@pytest.mark.parametrize("tokens", [1, MAX_TOKENS])
def test_the_limits_themselves_are_allowed(tokens: int) -> None:
    assert read_header(replace(GOOD, tokens=tokens).seal()).tokens == tokens


@pytest.mark.parametrize("version", [0, 1, 2, 3, 5, 255])
def test_other_versions_are_refused_as_such(version: int) -> None:
    remedy = "encode the chunk again" if version < 4 else "read it with the cuvee that wrote it"
    with pytest.raises(VersionError, match=f"version {version}; this build reads version 4: {remedy}"):
        read_header(replace(GOOD, version=version).seal())


@pytest.mark.parametrize("rest", [0, 67, 200])
def test_another_version_is_named_whatever_follows(rest: int) -> None:
    with pytest.raises(VersionError, match="version 3"):
        read_header(b"cuve\x03" + b"\xff" * rest)


@pytest.mark.parametrize("junk", [b"", b"cuve", b"cuve\x04", bytes(95), b"PK\x03\x04" + bytes(300)])
def test_bytes_that_are_no_blob_are_refused(junk: bytes) -> None:
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


def test_writing_refuses_what_reading_would() -> None:
    with pytest.raises(InputError, match="tokens"):
        written(tokens=MAX_TOKENS + 1)
    with pytest.raises(CuveeError):
        write_blob(CONTENTS, [b""] * ((1 << 16) + 1))


def verified(blob: bytes, *keys: bytes, associated_data: bytes = b"") -> None:
    verify_tag(blob, read_header(blob), make_keys(keys or None), associated_data)


def test_no_byte_moves_between_the_blob_and_what_it_is_bound_to() -> None:
    """Without the length in front, a tag over `associated_data` and blob would also be one over another cut of both."""
    blob = written(KEY, associated_data=b"x")
    header = read_header(blob)
    with pytest.raises(CorruptError):
        verify_tag(b"x" + blob, header, make_keys(KEY), b"")


def test_a_key_id_that_was_changed_does_not_verify() -> None:
    """An attacker who rewrites the key id still lacks the secret."""
    blob, other = written(KEY), KEY[::-1]
    forged = blob[:-24] + make_keys(other)[0].id + blob[-16:]
    with pytest.raises(CorruptError, match="tag"):
        verified(forged, other)


def test_tampering_with_right_checksums_is_found_by_the_tag() -> None:
    tag = written(KEY)[-16:]
    for changed, sections in (
        (replace(GOOD, start=1235), SECTIONS),
        (replace(GOOD, profile=BASE_ID), SECTIONS),
        (GOOD, (b"fIrst section", *SECTIONS[1:])),
        (GOOD, (SECTIONS[0][:-1], SECTIONS[0][-1:], SECTIONS[2])),
    ):
        forged = changed.seal(sections, KEY)[:-16] + tag
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
    profile = Profile.unlearned(LAYOUT)
    plain, keyed, other = (Codec(profile, "lossless", key=key) for key in (None, KEY, KEY[::-1]))
    blob = keyed.encode(chunk())
    assert torch.equal(keyed.decode(blob).keys[1], chunk().keys[1])
    for codec, message in ((plain, "carries an"), (other, f"was made with the key of id {keyed.key_ids[0].hex()}, ")):
        with pytest.raises(KeyMismatchError, match=f"^blob: {message}"):
            codec.decode(blob)
    with pytest.raises(KeyMismatchError):
        keyed.decode(plain.encode(chunk()))


def test_a_codec_with_a_key_is_not_pickled() -> None:
    """The bytes would hold the secret, and travel."""
    profile = Profile.unlearned(LAYOUT)
    keyed = Codec(profile, "lossless", key=KEY)
    for write in (pickle.dumps, deepcopy, lambda codec: pickle.dumps(vars(codec))):
        with pytest.raises(InputError, match=r"^key: must not be pickled.* that process's environment"):
            write(keyed)
    assert KEY.decode() not in repr(vars(keyed))
    plain = pickle.loads(pickle.dumps(Codec(profile, "lossless")))
    assert plain.decode(plain.encode(chunk())).tokens == 9


def test_a_codec_with_several_keys_writes_with_the_first_and_reads_all() -> None:
    profile = Profile.unlearned(LAYOUT)
    old, new, both = (Codec(profile, "lossless", key=key) for key in (KEY, KEY[::-1], [KEY[::-1], KEY, KEY]))
    assert both.key_ids == new.key_ids + old.key_ids
    assert both.encode(chunk()) == new.encode(chunk())
    for codec in (old, new):
        assert torch.equal(both.decode(codec.encode(chunk())).keys[1], chunk().keys[1])
    with pytest.raises(KeyMismatchError):
        old.decode(both.encode(chunk()))


def test_a_codec_binds_a_blob_to_its_place() -> None:
    codec = Codec(Profile.unlearned(LAYOUT), "lossless", key=KEY)
    blob = codec.encode(chunk(), associated_data=b"here")
    assert torch.equal(codec.decode(blob, associated_data=b"here").keys[1], chunk().keys[1])
    assert codec.open(blob, associated_data=b"here").tokens == chunk().tokens
    cache = PagedCache.dense(LAYOUT, chunk().keys, chunk().values)
    slots = [torch.arange(chunk().tokens)] * 2
    blobs = codec.encode(PagedChunks(cache, slots, [0, 0]), associated_data=[b"here", b"there"])
    assert blobs[0] == blob
    codec.decode_paged(blobs, cache, slots, associated_data=[b"here", b"there"]).check()
    for wrong in (b"", b"there"):
        for call in (
            lambda wrong=wrong: codec.decode(blob, associated_data=wrong),
            lambda wrong=wrong: codec.open(blob, associated_data=wrong),
            lambda: codec.decode_paged(blobs[::-1], cache, slots, associated_data=[b"here", b"there"]),
        ):
            with pytest.raises(CorruptError, match="belong somewhere else"):
                call()


def test_associated_data_without_a_key_is_refused() -> None:
    """Without a key nothing would be bound, and nobody would notice."""
    plain = Codec(Profile.unlearned(LAYOUT), "lossless")
    for call in (
        lambda: plain.encode(chunk(), associated_data=b"here"),
        lambda: plain.decode(plain.encode(chunk()), associated_data=b"here"),
        lambda: plain.open(plain.encode(chunk()), associated_data=b"here"),
    ):
        with pytest.raises(InputError, match="key="):
            call()
    keyed = Codec(Profile.unlearned(LAYOUT), "lossless", key=KEY)
    with pytest.raises(InputError, match=r"^associated_data: must be bytes, got str"):
        keyed.encode(chunk(), associated_data="here")  # type: ignore[call-overload]
    cache = PagedCache.dense(LAYOUT, chunk().keys, chunk().values)
    with pytest.raises(InputError, match=r"^associated_data: must be one for each of the 1 chunks, got 2"):
        keyed.encode(PagedChunks(cache, [torch.arange(3)], [0]), associated_data=[b"", b""])
    with pytest.raises(InputError, match=r"^associated_data: must be one for each of the 1 chunks, got 0"):
        keyed.decode_paged([keyed.encode(chunk())], cache, [torch.arange(chunk().tokens)], associated_data=[])


def test_a_blob_of_another_quality_is_not_the_codecs_own() -> None:
    profile = fitted_to(LAYOUT)
    codec = Codec(profile, step=0.1)
    assert codec.open(codec.encode(chunk()), expected=Expected(9, 0, "float32")).tokens == 9
    lossless, other = (Codec(profile, quality).encode(chunk()) for quality in ("lossless", Quality(step=0.2)))
    assert codec.decode(other).tokens == 9, "any quality decodes"
    with pytest.raises(CorruptError, match=r"^blob: must hold .*, got .*step index"):
        codec.open(other, expected=Expected(9, 0, "float32"))
    assert codec.open(lossless, expected=Expected(9, 0, "float32")).tokens == 9, "nothing is lost"
    moved = KVChunk(chunk().keys, chunk().values, LAYOUT, 5)
    opened = codec.open(codec.encode(moved), expected=Expected(9, None, "float32"))
    assert (opened.start, opened.tokens) == (5, 9), "wherever it was made"
    for tokens, start, dtype in ((8, 5, "float32"), (9, 1, "float32"), (9, 5, "float16"), (8, None, "float32")):
        with pytest.raises(CorruptError, match=r"^blob: must hold .*, got 9 tokens from 5 on in float32"):
            codec.open(codec.encode(moved), expected=Expected(tokens, start, dtype))


@pytest.mark.parametrize("key", [b"", b"short", b"x" * (MIN_KEY_BYTES - 1), b"x" * 65, "a" * 16, [], [KEY, b"short"]])
def test_weak_keys_are_refused(key: Any) -> None:
    with pytest.raises(InputError, match="key"):
        Codec(Profile.unlearned(LAYOUT), "lossless", key=key)
