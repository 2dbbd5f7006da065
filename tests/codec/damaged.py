"""A corpus of blobs whose checksums are right and whose contents are not: what breaks each rule, by name.

`test_hostile.py` shows each to every backend. They are made when they are asked for, of the format as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from tests.codec.forging import (
    START,
    TOKENS,
    codec_of,
    correlated_chunk,
    learned,
    reseal,
    sections_of,
    with_section,
)
from tests.codec.reference.rans import decode_classes, encode_classes
from tests.codec.reference.sections import read_part

from cuvee.codec.entropy.tables import EntropyTables
from cuvee.codec.entropy.token_classes import CLASSES, ClassedPlan, class_table
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, ProfileError, ProfileMismatchError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.container import read_header
from cuvee.codec.format.streams import NO_ESCAPES, Escapes
from cuvee.codec.support.arrays import U8, U16

SCHEMES = ("lossless", "classes")
Pairs = list[tuple[int, int]]


@cache
def blob_of(scheme: str) -> bytes:
    """With escapes where the scheme has them: token 10 is an outlier."""
    chunk = correlated_chunk(50, TOKENS, START, outlier=0.0 if scheme == "lossless" else 300.0)
    return codec_of(scheme, "reference").encode(chunk)  # the loops that encode are not compiled to check their bounds


@dataclass(frozen=True)
class Damage:
    """A damaged blob.

    Attributes:
        scheme: of the codec that must refuse it.
        error: how.
        forge: makes it.
        in_header: whether no backend sees it.
    """

    scheme: str
    error: type[CuveeError] | tuple[type[CuveeError], ...]
    forge: Callable[[], bytes]
    in_header: bool = False


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


def coded_offset(scheme: str, section: bytes) -> int:
    """Where the coded part of section 0 begins."""
    if scheme != "lossless":
        return 0
    head, stored = lossless_head(section)
    at = head + -head % 4 + stored
    return at + -at % 4


def with_field(scheme: str, offset: int, fmt: str, value: int) -> bytes:
    """The blob with one field of its first coded part changed."""
    section = bytearray(sections_of(blob_of(scheme))[0])
    struct.pack_into(fmt, section, coded_offset(scheme, bytes(section)) + offset, value)
    return with_section(blob_of(scheme), bytes(section))


def with_counts(scheme: str, **more: int) -> bytes:
    """The blob with the numbers of its first coded part changed, and its bytes as they are."""
    section = bytearray(sections_of(blob_of(scheme))[0])
    at = coded_offset(scheme, bytes(section))
    for name, by in more.items():
        place, fmt = at + COUNTS.index(name) * 4, "<B" if name == "log2" else "<I"
        struct.pack_into(fmt, section, place, struct.unpack_from(fmt, section, place)[0] + by)
    return with_section(blob_of(scheme), bytes(section))


def with_padding(scheme: str) -> bytes:
    """The blob with a bit set in the padding of a coded part: of the first section that has some."""
    index = int(scheme != "lossless")
    section = bytearray(sections_of(blob_of(scheme))[index])
    at = 0 if index else coded_offset(scheme, bytes(section))
    words, _, log2, class_words = struct.unpack_from("<4I", section, at)
    end = 20 + 6 * -(-TOKENS >> log2) + 2 * (class_words + words)
    assert end % 4 == 2
    section[at + end + 1] = 0x80
    return with_section(blob_of(scheme), bytes(section), index)


COUNTS = ("words", "escapes", "log2", "class_words")
MISCOUNTED: dict[str, dict[str, int]] = {
    "a word more": {"words": 1},
    "a word less": {"words": -1},
    "an escape more": {"escapes": 1},
    "an escape less": {"escapes": -1},
    "words that are an escape": {"words": 4, "escapes": -1},  # as long: streams and lists tell
    "a class word more": {"class_words": 1},
    "a class word less": {"class_words": -1},
    "twice the streams": {"log2": -1},
}
FIELDS: dict[str, tuple[int, str, int]] = {
    "words": (0, "<I", 2**32 - 1),
    "escapes": (4, "<I", 2**32 - 1),
    "words and escapes": (0, "<Q", 2**64 - 1),
    "2**63 tokens per stream": (8, "<B", 63),
    "256 tokens per stream": (8, "<B", 8),
    "reserved byte": (9, "<B", 1),
    "reserved byte, all bits": (9, "<B", 255),
    "reserved word": (10, "<H", 1),
    "class words": (12, "<I", 2**32 - 1),
    "class state": (16, "<I", 0xFFFF),
    "first state": (20, "<I", 0xFFFF),
}
ONE_CLASS: dict[str, tuple[int, str, int]] = {
    "an escape": (4, "<I", 1),
    "a class word": (12, "<I", 1),
    "a class state": (16, "<I", (1 << 16) + 1),
}


def plan_of() -> ClassedPlan:
    """How section 0 of the blob whose tokens have many classes is coded."""
    return learned().learned[0].classed_plan(read_header(blob_of("classes")).step_index)


def part_of() -> CodedPart:
    """That section."""
    return read_part(memoryview(sections_of(blob_of("classes"))[0]), plan_of(), TOKENS)


def with_parts(**changes: Any) -> bytes:
    """The blob with other streams, escapes or classes in that section."""
    return with_section(blob_of("classes"), write_coded(replace(part_of(), **changes), int(plan_of().planes.max())))


def table_of() -> EntropyTables:
    return class_table(learned().learned[0].class_freq)


def classes_of_blob() -> U8:
    """The classes of the tokens."""
    return decode_classes(part_of().classes, table_of(), TOKENS)


def with_classes(classes: U8) -> bytes:
    """The blob with these classes, well coded, and the streams as they are."""
    return with_parts(classes=encode_classes(classes, table_of()))


def with_class_words(words: U16) -> bytes:
    """The blob with other words in the stream of classes."""
    return with_parts(classes=replace(part_of().classes, words=words, lengths=np.array([len(words)], np.uint32)))


def with_class_word(word: int) -> bytes:
    """One word of the class stream changed."""
    words = part_of().classes.words.copy()
    words[word] ^= 0x10
    return with_class_words(words)


def with_more_class_words(count: int) -> bytes:
    return with_class_words(np.append(part_of().classes.words, np.zeros(count, np.uint16)))


def with_other_classes(other: Callable[[U8], U8]) -> bytes:
    """Well-coded classes that the streams were not made for."""
    return with_classes(other(classes_of_blob()).astype(np.uint8))


def with_last_escape(beyond: int) -> bytes:
    """The last escape at a row that the finest class codes, and the column of a coarse token does not; or beyond it."""
    escapes, rows = part_of().escapes, int(plan_of().rows.max())
    assert int(plan_of().rows[classes_of_blob().max()]) < rows and len(escapes.index)
    index = np.append(escapes.index[:-1], np.uint32(rows * TOKENS - 1 + beyond))
    return with_parts(escapes=Escapes(index, escapes.value))


ListChange = Callable[[list[int], list[int]], object]


def with_listed(change: ListChange) -> bytes:
    """The blob with its list of escapes, places and values, changed in place; the planes are as they were."""
    listed = part_of().escapes
    index, value = listed.index.tolist(), listed.value.tolist()
    change(index, value)
    return with_parts(escapes=Escapes(np.array(index, np.uint32), np.array(value, np.int32)))


def _one_more(index: list[int], value: list[int]) -> None:
    """Where the planes have none."""
    index.insert(4, index[4] - 1)
    value.insert(4, 1)


ESCAPE_LISTS: dict[str, tuple[type[CuveeError], ListChange]] = {
    "an escape missing": (CorruptError, lambda index, value: (index.pop(4), value.pop(4))),
    "an escape too many": (CorruptError, _one_more),
    "an escape elsewhere": (CorruptError, lambda index, value: index.__setitem__(4, index[4] + 1)),
    "an escape of another row": (CorruptError, lambda index, value: index.__setitem__(-1, index[-1] + TOKENS)),
    "an escape twice": (FormatError, lambda index, value: index.__setitem__(4, index[5])),
    "escapes out of order": (FormatError, lambda index, value: index.__setitem__(4, index[5] + 1)),
    "an escape outside": (FormatError, lambda index, value: index.__setitem__(-1, 0xFFFFFFFF)),
}
CLASS_FIELDS: dict[str, tuple[int, str, int]] = {
    "class words beyond the section": (12, "<I", 1 << 20),
    "no class words": (12, "<I", 0),
    "no class state": (16, "<I", 0),
    "another class state": (16, "<I", 2**32 - 1),
    "a stream per token": (8, "<B", 0),
}
OTHER_CLASSES: dict[str, Callable[[U8], U8]] = {
    "the finest class": np.zeros_like,
    "the coarsest class": lambda classes: np.full_like(classes, CLASSES - 1),
    "each class finer by one": lambda classes: np.maximum(classes, 1) - 1,
}


def lossless_table(change: Callable[[Pairs], Pairs]) -> bytes:
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
    return with_section(blob, head + bytes(-len(head) % 4) + section[old_head + -old_head % 4 :])


TABLES: dict[str, Callable[[Pairs], Pairs]] = {
    "an empty table": lambda t: [],
    "a falling table": lambda t: t[::-1],
    "a symbol twice": lambda t: [t[0], *t],
    "no frequency": lambda t: [(t[0][0], 0), *t[1:]],
    "a sum too large": lambda t: [(t[0][0], t[0][1] + 1), *t[1:]],
    "a certain symbol": lambda t: [(7, 4096)],
    "huge frequencies": lambda t: [(s, 0xFFFF) for s, _ in t],
    "many symbols": lambda t: t * 1000,
}


def with_swapped_sections(scheme: str) -> bytes:
    return reseal(blob_of(scheme), sections_of(blob_of(scheme))[::-1])


def with_whole_sections(scheme: str, count: int) -> bytes:
    return reseal(blob_of(scheme), (sections_of(blob_of(scheme)) * 3)[:count], None, count=count)


def with_tail(scheme: str, tail: bytes) -> bytes:
    return with_section(blob_of(scheme), sections_of(blob_of(scheme))[0] + tail)


def resealed(scheme: str, **fields: int) -> bytes:
    return reseal(blob_of(scheme), None, None, **fields)


def with_scheme(scheme: str, number: int) -> bytes:
    return reseal(blob_of(scheme), None, number)


def _of_any(scheme: str) -> Iterator[tuple[str, Damage]]:
    for name, field in FIELDS.items():
        yield name, Damage(scheme, FormatError, partial(with_field, scheme, *field))
    for name, more in MISCOUNTED.items():
        # A lossless part has no escapes and no class words, and one stream here, however many tokens it may have.
        if scheme != "lossless" or ("log2" not in more and min(more.values()) > 0) or name == "a word less":
            yield name, Damage(scheme, FormatError, partial(with_counts, scheme, **more))
    yield "padding", Damage(scheme, FormatError, partial(with_padding, scheme))
    yield "swapped sections", Damage(scheme, FormatError, partial(with_swapped_sections, scheme))
    for tail in (b"\0", bytes(4), b"\xff" * 64):
        yield f"{len(tail)} bytes more", Damage(scheme, FormatError, partial(with_tail, scheme, tail))
    for tokens in (1, TOKENS - 1, TOKENS + 1, 128):
        yield f"{tokens} tokens", Damage(scheme, (FormatError, InputError), partial(resealed, scheme, tokens=tokens))
    header: list[tuple[str, Any, Callable[[], bytes]]] = [
        (f"{tokens} tokens", FormatError, partial(resealed, scheme, tokens=tokens))
        for tokens in (0, 1 << 20, 1 << 24, (1 << 24) + 1, 2**32 - 1)
    ]
    header += [(f"{n} sections", FormatError, partial(resealed, scheme, count=n)) for n in (0, 1, 3, 2**16, 2**32 - 1)]
    header += [(f"{n} whole sections", FormatError, partial(with_whole_sections, scheme, n)) for n in (1, 3, 5)]
    header += [(f"{n} values", FormatError, partial(resealed, scheme, values=n)) for n in (1, 95, 97, 2**32 - 1)]
    header += [
        (f"position {start}", InputError, partial(resealed, scheme, start=start))
        for start in (4096 - TOKENS + 1, 4096, 2**32 - 1)
    ]
    mismatch = (FormatError, ProfileMismatchError)
    other = 2 if scheme == "lossless" else 1
    header += [(f"scheme {n}", mismatch, partial(with_scheme, scheme, n)) for n in (0, other, 3, 255)]
    header += [(f"kind {n}", FormatError, partial(resealed, scheme, kind=n)) for n in (1, 2, 255)]
    header += [(f"dtype {n}", ProfileMismatchError, partial(resealed, scheme, dtype=n)) for n in (1, 2)]
    for name, error, forge in header:
        yield name, Damage(scheme, error, forge, in_header=True)


def _of_lossless() -> Iterator[tuple[str, Damage]]:
    for name, field in ONE_CLASS.items():
        yield name, Damage("lossless", FormatError, partial(with_field, "lossless", *field))
    for name, change in TABLES.items():
        yield name, Damage("lossless", FormatError, partial(lossless_table, change))


def _of_classes() -> Iterator[tuple[str, Damage]]:
    for name, field in CLASS_FIELDS.items():
        yield name, Damage("classes", FormatError, partial(with_field, "classes", *field))
    yield "no escapes", Damage("classes", FormatError, lambda: with_parts(escapes=NO_ESCAPES))
    for name, (error, change) in ESCAPE_LISTS.items():
        yield name, Damage("classes", error, partial(with_listed, change))
    yield "class stream cut off", Damage("classes", FormatError, lambda: with_class_words(np.empty(0, np.uint16)))
    for name, other in OTHER_CLASSES.items():
        yield name, Damage("classes", CorruptError, partial(with_other_classes, other))
    for word in range(3):
        yield f"class word {word} changed", Damage("classes", FormatError, partial(with_class_word, word))
    for count in (1, 2):
        yield f"{count} class words more", Damage("classes", FormatError, partial(with_more_class_words, count))
    yield "escape below its column", Damage("classes", CorruptError, partial(with_last_escape, 0))
    yield "escape beyond the matrix", Damage("classes", FormatError, partial(with_last_escape, 1))
    # Four octaves below a step that is itself the profile's finest, the widest components are out of reach.
    yield (
        "classes finer than served",
        Damage("classes", FormatError, lambda: resealed("classes", step=learned().min_step_index)),
    )
    for step in (-(2**31), -513, 513, 2**31 - 1):
        forge = partial(resealed, "classes", step=step)
        yield f"step {step}", Damage("classes", (FormatError, ProfileError), forge, in_header=True)


def corpus() -> dict[str, Damage]:
    """Return the corpus by name; making it makes no blob."""
    found = {f"{scheme}: {name}": damage for scheme in SCHEMES for name, damage in _of_any(scheme)}
    return found | {f"{own.scheme}: {name}": own for of in (_of_lossless, _of_classes) for name, own in of()}
