"""Bases and refinements: damaged, forged, of other chunks, bound to each other again.

A case is a byte for the subject, a byte for the number of parts, their lengths, and the parts.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import xxhash
from tests.classed import with_classes
from tests.codec.forging import correlated_chunk, reseal, sections_of
from tests.fuzz.blobs import MAX_TOKENS, Subject, small_chunk, small_profile, with_field
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.format.container import header_digest, read_header
from cuvee.codec.learning.calibrate import fit
from cuvee.codec.profiles.profile import Profile

REFERENCE_EVERY = 5  # cases that the reference decodes, too


@dataclass(frozen=True)
class PartsSubject:
    """Good parts, and who decodes them."""

    name: str
    parts: tuple[bytes, ...]
    codec: Callable[[str], Codec]


def _codec(profile: Profile, step: float, backend: str) -> Codec:
    return Codec(profile, step=step, backend=backend, threads=1)


@cache
def parts_subjects() -> tuple[PartsSubject, ...]:
    """Return subjects of one block and of several per section."""
    weights = [2.0 ** (11 * t % 20 - 10) for t in range(20)]
    correlated = [correlated_chunk(seed, 60, 20 * seed) for seed in range(7)]
    given = [
        (group, with_classes(fit(correlated[0].layout, correlated, group), weights, 3), 0.02)
        for group in ("layer", "head")
    ]
    found = []
    for name, profile, step in (*given, ("small", small_profile(), 0.05)):
        chunk = small_chunk(9, 9) if name == "small" else correlated_chunk(50, 20, 3, outlier=300.0)
        parts = Codec(profile, step=step, refinements=1, threads=1).encode_parts(chunk)
        found.append(PartsSubject(name, parts, cache(partial(_codec, profile, step))))
    return tuple(found)


def packed(subject: int, parts: Sequence[bytes]) -> bytes:
    """The bytes of a case."""
    lengths = b"".join(struct.pack("<I", len(part)) for part in parts)
    return bytes([subject, len(parts)]) + lengths + b"".join(parts)


def unpacked(data: bytes) -> tuple[PartsSubject, list[bytes]]:
    """The subject and the parts of a case; parts of a damaged one are empty."""
    subject = parts_subjects()[data[0] % len(parts_subjects())]
    count = min(data[1], 3)
    at, parts = 2 + 4 * count, []
    for number in range(count):
        length = int.from_bytes(data[2 + 4 * number : 6 + 4 * number], "little")
        parts.append(data[at : at + length])
        at += length
    return subject, parts


def bound(parts: Sequence[bytes]) -> list[bytes]:
    """The parts, of which each refinement names the first, whatever both hold."""
    base, *others = parts
    name = header_digest(base)
    return [base, *(reseal(part[:64] + name + part[80:], sections_of(part)) for part in others)]


class PartsTarget:
    """Parts that a codec opens and decodes."""

    name = "parts"
    weight = 1.0

    def warm_up(self) -> None:
        """Check that every subject decodes."""
        for at, subject in enumerate(parts_subjects()):
            for known in range(1, len(subject.parts) + 1):
                if self.check(packed(at, subject.parts[:known])) != "decoded":
                    raise Finding(f"the good parts {subject.name!r} do not decode")

    def memory(self, data: bytes) -> int:
        """Allow the largest restored cache with its working copies, and the tokens that empty streams can hold."""
        return (24 << 20) + 2048 * len(data)

    def make(self, dice: Dice) -> bytes:
        """Change a section, a field of the header, or the order of the parts."""
        at = dice.number(0, len(parts_subjects()) - 1)
        parts = list(parts_subjects()[at].parts[: dice.number(1, 2)])
        which = dice.number(0, len(parts) - 1)
        own, others = parts[which], [part for other in parts_subjects() for part in other.parts]
        kind = dice.number(0, 9)
        if kind == 0:
            parts[which] = dice.damaged(own, others)
            return packed(at, parts)
        if kind == 1:
            parts[which] = dice.pick(others)
        elif kind == 2:
            parts = parts[::-1] if dice.chance(0.5) else parts + parts[1:]
        elif kind == 3:
            name = dice.pick(("tokens", "start", "step", "values", "kind", "dtype"))
            near = {"tokens": read_header(own).tokens, "step": read_header(own).step_index}
            parts[which] = reseal(
                own, None, **{name: dice.odd(1 if name in ("kind", "dtype") else 4, near.get(name, 0))}
            )
            return packed(at, parts)
        else:
            sections = sections_of(own)
            index = dice.number(0, len(sections) - 1)
            changed = dice.damaged(sections[index])
            if dice.chance(0.8):
                changed = with_field(dice, Subject("part", own, parts_subjects()[at].codec), sections[index], index)
            sections[index] = changed
            parts = bound([*parts[:which], reseal(own, sections), *parts[which + 1 :]])
        return packed(at, bound(parts) if dice.chance(0.5) else parts)

    def check(self, data: bytes) -> str:
        """Decode by the compiled loops, and sometimes by the reference, which must agree."""
        if len(data) < 2 or not data[1]:
            return "empty"
        subject, parts = unpacked(data)
        outcome, chunk = _decoded(subject, parts, "numba")
        draw = xxhash.xxh3_64_intdigest(data)
        if draw % REFERENCE_EVERY == 0 and (chunk is None or chunk.tokens < 1000):
            _, other = _decoded(subject, parts, "reference")
            if (other is None) != (chunk is None):
                raise Finding(f"the reference {'refuses' if other is None else 'decodes'} what numba does not")
        if chunk is not None and draw % 3 == 0:
            first = draw // 3 % chunk.tokens
            some = subject.codec("numba").decode(
                parts[0], refinements=parts[1:], tokens=range(first, chunk.tokens), max_tokens=MAX_TOKENS
            )
            if some.start != chunk.start + first or some.tokens != chunk.tokens - first:
                raise Finding(f"tokens from {first} on differ from those of the whole")
        return outcome


def _decoded(subject: PartsSubject, parts: Sequence[bytes], backend: str) -> tuple[str, KVChunk | None]:
    try:
        chunk = subject.codec(backend).decode(parts[0], refinements=parts[1:], max_tokens=MAX_TOKENS)
    except CuveeError as error:
        return type(error).__name__, None
    header = read_header(parts[0])
    if chunk.tokens != header.tokens or chunk.start != header.start:
        raise Finding(f"{backend}: {chunk.tokens} tokens from {chunk.start} on differ from the header")
    return "decoded", chunk
