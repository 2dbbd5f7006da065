"""The target for blobs whose checksums are right and whose contents are not."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from tests.classed import with_classes
from tests.codec.forging import ENTRY, HEADER, OFFSETS, codec_of, correlated_chunk, reseal, reseal_header, sections_of
from tests.codec.reference import get_stages
from tests.codec.reference.byte_planes import read_model
from tests.codec.reference.coded_part import Reader
from tests.codec.reference.token_order import coding_order
from tests.codec.vectors import FOLDER as GOLDEN
from tests.codec.vectors import KEY, golden_codec
from tests.conftest import decoded_layers
from tests.fuzz.dice import Dice
from tests.fuzz.engine import Finding
from tests.kernels.emulation import KERNELS_RUN_ON

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import OpenBlob
from cuvee.codec.entropy.coding_plan import ESCAPE
from cuvee.codec.entropy.tables import SYMBOLS, TOTAL, EntropyTables, normalize_counts
from cuvee.codec.entropy.token_classes import CLASSES, SectionPlanes, one_class
from cuvee.codec.errors import CuveeError
from cuvee.codec.format.coded_part import CodedPart, write_coded
from cuvee.codec.format.container import inspect, read_header, write_blob
from cuvee.codec.format.keys import Key
from cuvee.codec.format.streams import NO_ESCAPES, ONE_CLASS, Escapes, Streams
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.step_coding import SectionCoding
from cuvee.codec.stages.byte_planes import write_model
from cuvee.codec.stages.products import Products, products_for
from cuvee.codec.support.arrays import U8
from cuvee.learning.calibrate import fit

MAX_TOKENS = 1 << 12  # tokens that a case may restore
SMALL = KVLayout(
    "small",
    (LayerLayout(1, 4, 3, Rope((1.0, 0.1))), LayerLayout(2, 4, 3, Rope((1.0, 0.1)))),
    "float32",
    4096,
)
# One case in this many is compared with the reference, which takes thirty times as long, and with the kernels without a
# GPU, which take a hundred times as long.
REFERENCE_EVERY, DEVICE_EVERY = 24, 400
DEVICE_TOKENS = 40


@dataclass(frozen=True)
class Subject:
    """A good blob and its codecs.

    Attributes:
        name: the name in messages.
        blob: the blob from which cases are made.
        codec: makes a codec for a backend.
        key: the secret of the blob's tag; None without a tag.
        base: of a refinement, the blob that it refines.
    """

    name: str
    blob: bytes
    codec: Callable[[str], Codec]
    key: bytes | None = None
    base: bytes | None = None

    @property
    def lossless(self) -> bool:
        return read_header(self.blob).lossless

    @property
    def profile(self) -> Profile:
        return self.codec("numba").profile

    def whole(self, codec: Codec, blob: bytes | memoryview) -> bytes | memoryview | OpenBlob:
        """What a codec decodes: the blob, or the base with the blob as its refinement."""
        return blob if self.base is None else codec.open(self.base, refinements=[blob])


def _cached(make: Callable[[str], Codec]) -> Callable[[str], Codec]:
    return cache(make)


@cache
def small_profile() -> Profile:
    return fit(SMALL, [small_chunk(seed, 40) for seed in range(7)], "layer")


def small_chunk(seed: int, tokens: int, start: int = 5) -> KVChunk:
    noise = torch.Generator().manual_seed(seed)
    keys = [torch.randn(tokens, layer.kv_heads, 4, generator=noise) for layer in SMALL.layers]
    values = [torch.randn(tokens, layer.kv_heads, 3, generator=noise).cumsum(0) for layer in SMALL.layers]
    return KVChunk(keys, values, SMALL, start)


@cache
def subjects() -> tuple[Subject, ...]:
    """Return subjects of every scheme and dtype, with and without classes and tags.

    Corpus files depend on their order.
    """
    found = []
    for scheme in ("lossless", "transform", "classes"):
        chunk = correlated_chunk(50, 20, 3, outlier=0.0 if scheme == "lossless" else 300.0)
        make = _cached(partial(codec_of, scheme))
        found.append(Subject(f"correlated {scheme}", make("numba").encode(chunk), make))
    for scheme in ("lossless", "transform", "classes"):
        profile = small_profile() if scheme in ("transform", "classes") else Profile.unlearned(SMALL)
        profile = with_classes(profile, [float(t * t) for t in range(9)]) if scheme == "classes" else profile
        quality = {"quality": "lossless"} if scheme == "lossless" else {}

        def small(backend: str, profile: Profile = profile, lossless: bool = bool(quality)) -> Codec:
            if lossless:
                return Codec(profile, "lossless", backend=backend, threads=1)
            return Codec(profile, step=0.05, backend=backend, threads=1)

        make = _cached(small)
        found.append(Subject(f"small {scheme}", make("numba").encode(small_chunk(9, 9)), make))
    profile = Profile.load(GOLDEN / "profile.safetensors")
    for name in ("lossless-float16", "transform-float32", "classes-float16", "classes-bfloat16"):
        make = _cached(partial(golden_codec, name, profile))
        key = KEY if name.endswith("-float16") else None
        found.append(Subject(f"golden {name}", Path(GOLDEN / f"{name}.bin").read_bytes(), make, key))
    for group in ("layer", "head"):
        samples, weights = (
            [correlated_chunk(n, 60, 20 * n) for n in range(7)],
            [2.0 ** (11 * t % 20 - 10) for t in range(20)],
        )
        profile = with_classes(fit(samples[0].layout, samples, group), weights, 3)
        make = _cached(partial(_refined, profile))
        base, finer = make("numba").encode_parts(correlated_chunk(50, 20, 3, outlier=300.0))
        found.append(Subject(f"refinement {group}", finer, make, base=base))
    return tuple(found)


def _refined(profile: Profile, backend: str) -> Codec:
    return Codec(profile, step=0.02, refinements=1, backend=backend, threads=1)


# --- making cases


def coded_at(subject: Subject, section: bytes, index: int) -> int:
    """Return where the coded part of a section begins; its end if it has none."""
    header = read_header(subject.blob)
    reader = Reader(memoryview(section))
    try:
        if header.lossless:
            layout = subject.profile.layout
            item = 2 if header.dtype != "float32" else 4
            layer = layout.layers[index]
            channels = [size for size in (layer.key_values, layer.value_values) for _ in range(item)]
            models = [read_model(reader, size) for size in channels]
            reader.skip_padding()
            reader.take(sum(size * header.tokens for size, model in zip(channels, models, strict=True) if not model))
            reader.skip_padding()
    except CuveeError:
        return len(section)
    return len(section) - reader.left


def with_field(dice: Dice, subject: Subject, section: bytes, index: int) -> bytes:
    """Return a section with one field of its coded part changed, or two fields whose sum stays the same."""
    at = coded_at(subject, section, index)
    if len(section) - at < 20:
        return dice.damaged(section)
    out = bytearray(section)
    words, escapes, log2 = struct.unpack_from("<IIB", out, at)
    streams = -(-read_header(subject.blob).tokens >> min(log2, 7))
    states, lengths = at + 20, at + 20 + 4 * streams
    fields = [(at, 4), (at + 4, 4), (at + 8, 1), (at + 9, 1), (at + 10, 2), *[(at + 12, 4), (at + 16, 4)] * 2]
    fields += [(states + 4 * dice.number(0, streams), 4), (lengths + 2 * dice.number(0, streams), 2)]
    fields += [(lengths + 2 * streams + 2 * dice.number(0, max(words, 1) - 1), 2)] * 3
    if escapes and 8 * escapes <= len(out) - at:
        index_at = len(out) - 8 * escapes
        fields += [(index_at + 4 * dice.number(0, 2 * escapes - 1), 4)] * 3
    if dice.chance(0.2) and lengths + 2 * streams <= len(out):
        # Move words from one stream to another.
        lost, won = (lengths + 2 * dice.number(0, streams - 1) for _ in range(2))
        count = dice.small(4)
        for where, by in ((lost, -count), (won, count)):
            value = struct.unpack_from("<H", out, where)[0]
            struct.pack_into("<H", out, where, (value + by) & 0xFFFF)
        return bytes(out)
    where, width = dice.pick(fields)
    if where + width <= len(out):
        value = int.from_bytes(out[where : where + width], "little")
        out[where : where + width] = dice.odd(width, value).to_bytes(width, "little")
    return bytes(out)


def _symbols(dice: Dice, tables: EntropyTables, which: npt.NDArray[np.integer], escapes: float) -> U8:
    """Draw a symbol from each table, with some escapes where the table has one."""
    slots = dice.rng.integers(0, TOTAL, which.shape)
    if dice.chance(0.3):  # the rarest symbols, at the end of the tables
        slots[dice.rng.random(which.shape) < 0.5] = TOTAL - 1
    out: U8 = (tables.slots[which, slots] >> np.uint32(24)).astype(np.uint8)
    chosen = (dice.rng.random(which.shape) < escapes) & (tables.freq[which, ESCAPE] > 0)
    out[chosen] = ESCAPE
    return out


def _values(dice: Dice, count: int) -> npt.NDArray[np.int32]:
    kind = dice.number(0, 2)
    if kind == 0:
        return dice.rng.integers(-(1 << 31), 1 << 31, count).astype(np.int32)
    if kind == 1:
        return np.full(count, dice.pick((-(1 << 31), (1 << 31) - 1, 0, -1, 1 << 24)), np.int32)
    return dice.rng.integers(-300, 300, count).astype(np.int32)


def _escape_list(dice: Dice, index: npt.NDArray[np.integer]) -> Escapes:
    """Return the escapes that belong to the planes, or nearly so."""
    listed = index.astype(np.int64)
    if dice.trick(0.15) and len(listed):
        listed = np.delete(listed, dice.number(0, len(listed) - 1))
    elif dice.trick(0.15):
        listed = np.sort(np.append(listed, dice.number(0, int(listed.max(initial=0)) + 5)))
    elif dice.trick(0.1) and len(listed):
        listed[dice.number(0, len(listed) - 1)] += dice.number(-2, 2)
    return Escapes((listed & 0xFFFFFFFF).astype(np.uint32), _values(dice, len(listed)))


def _coded_part(dice: Dice, coding: SectionCoding, tables: EntropyTables, tokens: int) -> bytes:
    """Make a coded part with sound streams, symbols that no encoder chooses, and perhaps other classes than theirs."""
    plan, n = coding.classed, 1 << dice.number(0, 7)
    kind = dice.number(0, 3)
    low = plan.finest
    if kind == 0:
        classes = np.full(tokens, dice.number(low, CLASSES - 1), np.uint8)
    elif kind == 1:
        classes = dice.rng.choice([low, CLASSES - 1], tokens).astype(np.uint8)
    else:
        classes = dice.rng.integers(low, CLASSES, tokens).astype(np.uint8)
    own = classes[coding_order(classes)]
    planes = np.zeros((max(int(plan.planes[own].max()), 1), tokens), np.uint8)
    which = plan.tables[own].T[: len(planes)]
    planes[:] = _symbols(dice, tables, which, dice.pick((0.0, 0.02, 0.5)))
    rows = np.arange(len(planes))[:, None]
    planes[rows >= plan.planes[own][None]] = 0
    index = np.flatnonzero((planes == ESCAPE) & (rows < plan.rows[own][None]))
    listed = classes
    if dice.trick(0.3):  # classes that differ from the streams, and may be invalid
        listed = classes.copy()
        for _ in range(dice.small(4)):
            listed[dice.number(0, tokens - 1)] = dice.number(0, CLASSES - 1)
    (streams,) = get_stages("numba").rans_encode([SectionPlanes(planes, own, plan, n)], tables)
    of_classes = get_stages("numba").encode_classes(listed, coding.class_table)
    if dice.trick(0.1):
        of_classes = Streams(of_classes.states, of_classes.lengths, np.append(of_classes.words, np.uint16(0)))
    return write_coded(CodedPart(streams, _escape_list(dice, index), n, of_classes), int(plan.planes.max()))


def _lossless_section(dice: Dice, layer: LayerLayout, item: int, tokens: int) -> bytes:
    head, stored = bytearray(), bytearray()
    freqs: list[npt.NDArray[np.uint16]] = []
    sizes = []
    for size in (layer.key_values, layer.value_values):
        for _ in range(item):
            coded = dice.chance(0.6)
            head.append(coded)
            if not coded:
                stored += dice.junk(size * tokens)
                continue
            counts = np.zeros(SYMBOLS)
            used = dice.rng.integers(0, SYMBOLS, dice.small(80))
            counts[used] = dice.rng.integers(1, 1 << dice.number(1, 20), len(used))
            freqs.append(normalize_counts(counts))
            sizes.append(size)
            head += write_model(np.frombuffer(dice.junk(size), np.uint8), freqs[-1])
    head += bytes(-len(head) % 4)
    stored += bytes(-len(stored) % 4)
    if not freqs:
        return bytes(head + stored)
    tables = EntropyTables(np.stack(freqs))
    which = np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes)
    n = 1 << dice.number(0, 7)
    symbols = _symbols(dice, tables, np.repeat(which[:, None], tokens, 1), 0.0)
    section = SectionPlanes(symbols, np.zeros(tokens, np.uint8), one_class(which), n)
    (streams,) = get_stages("numba").rans_encode([section], tables)
    return bytes(head + stored) + write_coded(CodedPart(streams, NO_ESCAPES, n, ONE_CLASS), len(which))


@cache
def _coding(subject: int, section: int) -> SectionCoding:
    found = subjects()[subject]
    return SectionCoding(found.profile.learned[section], read_header(found.blob).step_index)


def forged(dice: Dice, at: int) -> bytes:
    """Make a blob with sound header and streams and contents that no encoder writes."""
    subject = subjects()[at]
    header, profile = read_header(subject.blob), subject.profile
    dice.mischief = dice.chance(0.4)
    tokens = dice.pick((1, 2, 5, header.tokens, dice.small(60), dice.small(600)))
    tables = profile.family.tables
    parts = []
    for index in range(len(header.section_bytes)):
        if header.lossless:
            layer = profile.layout.layers[index]
            part = _lossless_section(dice, layer, 2 if header.dtype != "float32" else 4, tokens)
        else:
            part = _coded_part(dice, _coding(at, index), tables, tokens)
        parts.append(part)
    dice.mischief = True
    key = Key.of(subject.key) if subject.key is not None else None
    start = dice.pick((0, header.start, 4096 - tokens))
    return write_blob(replace(header, tokens=tokens, start=start), parts, key=key)


def _sealed(subject: Subject, blob: bytes, sections: list[bytes], **fields: int) -> bytes:
    """Return the blob with these sections and fields, signed if the subject has a key."""
    if subject.key is None:
        return reseal(blob, sections, **fields)
    header = read_header(blob)
    step = fields.get("step", header.step_index)
    changed = replace(
        header, tokens=min(fields.get("tokens", header.tokens), 1 << 24), start=fields.get("start", header.start),
        values_per_token=fields.get("values", header.values_per_token), schemes=header.schemes[:1] * len(sections),
        step_index=step - (1 << 32) if step >= 1 << 31 else step,
    )  # fmt: skip
    return write_blob(changed, sections, key=Key.of(subject.key))


class BlobTarget:
    """Decoding by all backends and in all ways."""

    name = "blob"
    weight = 8.0

    def warm_up(self) -> None:
        for at, subject in enumerate(subjects()):
            if self.check(bytes([at]) + subject.blob) != "decoded":
                raise Finding(f"the good blob {subject.name!r} does not decode")

    def memory(self, data: bytes) -> int:
        """Allow the largest restored cache with its working copies, and the tokens that empty streams can hold."""
        return (24 << 20) + 2048 * len(data)

    def make(self, dice: Dice) -> bytes:
        at = dice.number(0, len(subjects()) - 1)
        subject = subjects()[at]
        blob = subject.blob
        kind = dice.number(0 if subject.base is None else 8, 19)  # forged refinements would have other classes
        if kind <= 7:
            blob = forged(dice, at)
        if kind <= 4:
            return bytes([at]) + blob
        if kind == 19:
            return bytes([at]) + dice.damaged(blob, [other.blob for other in subjects()])
        if kind == 18:
            return bytes([at]) + self._header(dice, subject, blob)
        plain = replace(subject, blob=blob)
        sections = sections_of(blob)
        index = dice.number(0, len(sections) - 1)
        fields: dict[str, int] = {}
        if kind in (5, 6, 8, 9, 10):
            sections[index] = with_field(dice, plain, sections[index], index)
        elif kind in (7, 11, 12):
            sections[index] = dice.damaged(
                sections[index], [s for other in subjects() for s in sections_of(other.blob)]
            )
        elif kind == 13:
            sections[index] = dice.pick(sections_of(dice.pick(subjects()).blob))
        elif kind == 14:
            sections[index] = sections[index][: dice.number(0, len(sections[index]))]
        elif kind == 15:
            sections[index] += dice.pick((b"\0", bytes(4), dice.junk(dice.small(64))))
        elif kind == 16:
            sections = sections[::-1] if dice.chance(0.3) else sections[: dice.number(0, 3)] * dice.number(0, 3)
        if kind == 17 or dice.chance(0.15):
            name = dice.pick(("tokens", "tokens", "start", "step", "values"))
            near = {"tokens": read_header(blob).tokens, "step": read_header(blob).step_index}.get(name, 0)
            fields[name] = dice.odd(4, near)
        return bytes([at]) + _sealed(plain, blob, sections, **fields)

    def _header(self, dice: Dice, subject: Subject, blob: bytes) -> bytes:
        """Change a field of the header or the table of contents, and correct the header's checksum."""
        out = bytearray(blob)
        count = len(read_header(blob).section_bytes)
        end = HEADER + ENTRY * count
        for _ in range(dice.small(3)):
            if dice.chance(0.5):
                more = [(7, 1), (28, 4), (64, 8), (80, 8), (HEADER + 4, 1)]
                where, width = dice.pick([(where, 1) for where in OFFSETS.values()] + more)
            else:
                where, width = dice.number(4, end - 8), dice.pick((1, 4, 8))
            value = int.from_bytes(out[where : where + width], "little")
            out[where : where + width] = dice.odd(width, value).to_bytes(width, "little")
        return reseal_header(bytes(out), count)

    def check(self, data: bytes) -> str:
        """Decode by the compiled backend, and sometimes by the others, in parts, and into pages."""
        if not data:
            return "empty"
        subject, blob = subjects()[data[0] % len(subjects())], data[1:]
        draw = xxhash.xxh3_64_intdigest(data)
        with suppress(CuveeError):
            inspect(blob)
        outcome, chunk = _decoded(subject, blob, "numba")
        tokens = chunk.tokens if chunk is not None else 0
        if draw % REFERENCE_EVERY == 0 or (chunk is not None and len(blob) < 600 and tokens < 12 and draw % 6 == 0):
            _compare(subject, blob, chunk, "reference")
        if draw // 16 % DEVICE_EVERY == 0 and tokens <= DEVICE_TOKENS and KERNELS_RUN_ON != "nowhere":
            _compare(subject, blob, chunk, "triton")
        if chunk is not None:
            self._check_parts(subject, blob, chunk, draw)
        elif draw % 4 == 0:
            with suppress(CuveeError):  # a blob that fails as a whole may have good parts
                codec = subject.codec("numba")
                codec.decode(subject.whole(codec, blob), tokens=range(1), max_tokens=MAX_TOKENS)
        return outcome

    def _check_parts(self, subject: Subject, blob: bytes, chunk: KVChunk, draw: int) -> None:
        codec = subject.codec("numba")
        whole = subject.whole(codec, blob)
        if draw % 3 == 0:
            first = draw // 3 % chunk.tokens
            end = first + 1 + draw // 5 % (chunk.tokens - first)
            part = codec.decode(whole, tokens=range(first, end), max_tokens=MAX_TOKENS)
            if part.start != chunk.start + first or not _same(part, chunk, slice(first, end)):
                raise Finding(f"tokens {first} … {end} differ from those of the whole")
        elif draw % 3 == 1:
            layer = draw // 3 % chunk.layout.num_layers
            keys, values = decoded_layers(codec, whole, range(layer, layer + 1))
            if not (_equal(keys[0], chunk.keys[layer]) and _equal(values[0], chunk.values[layer])):
                raise Finding(f"layer {layer} differs from that of the whole")
        else:
            _check_pages(codec, whole, chunk)


def _spread(blob: bytes) -> memoryview:
    spread = bytearray(2 * len(blob))
    spread[::2] = blob
    return memoryview(spread)[::2]


def _decoded(subject: Subject, blob: bytes, backend: str) -> tuple[str, KVChunk | None]:
    codec = subject.codec(backend)
    try:
        # One backend gets contiguous bytes, the others every second byte of a buffer.
        given = blob if backend == "numba" else _spread(blob)
        chunk = codec.decode(subject.whole(codec, given), max_tokens=MAX_TOKENS)
    except CuveeError as error:
        return type(error).__name__, None
    header = read_header(blob)
    if chunk.tokens != header.tokens or chunk.start != header.start or chunk.layout.dtype != header.dtype:
        raise Finding(f"{backend}: {chunk.tokens} tokens from {chunk.start} on differ from the header")
    for layer, keys, values in zip(chunk.layout.layers, chunk.keys, chunk.values, strict=True):
        shapes = (header.tokens, layer.kv_heads, layer.head_dim), (header.tokens, layer.kv_heads, layer.value_dim)
        dtype = chunk.layout.torch_dtype
        if (keys.shape, values.shape) != shapes or keys.dtype != dtype or values.dtype != dtype:
            raise Finding(f"{backend}: tensors of the wrong shape or dtype")
    return "decoded", chunk


def _compare(subject: Subject, blob: bytes, chunk: KVChunk | None, backend: str) -> None:
    _, other = _decoded(subject, blob, backend)
    if (other is None) != (chunk is None):
        raise Finding(f"{backend} {'refuses' if other is None else 'decodes'} what numba does not")
    if chunk is None or other is None:
        return
    if read_header(blob).lossless:
        alike = _same(other, chunk, slice(0, chunk.tokens))
    else:
        alike = backend != "reference" or agree(subject.profile, other, chunk)
    if not alike:
        raise Finding(f"{backend} and numba decode different values")


def agree(profile: Profile, one: KVChunk, other: KVChunk) -> bool:
    """Whether two decoded chunks differ no more than sums in another order do, or products of 16-bit integers.

    Their terms may be larger than the sums: by how much, the profile's maps say.
    """
    error = 1e-3 if products_for(one.layout) is Products.INT16 else 1e-6
    pairs = list(zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True))
    finite = [unit[unit.isfinite()].double().abs() for pair in pairs for unit in pair]
    largest = max((float(unit.max()) for unit in finite if unit.numel()), default=0.0)
    grown = 1.0
    for learned in profile.learned:
        largest = max(largest, float(learned.basis.mean.abs().max()))
        for inverse, forward in zip(learned.basis.inverse, learned.basis.forward, strict=True):
            grown = max(grown, float((inverse.double().abs() @ forward.double().abs()).sum(1).max()))
    for a, b in ((a.double(), b.double()) for a, b in pairs):
        near = (a - b).abs() <= error * grown * largest + 2 * torch.finfo(pairs[0][0].dtype).eps * b.abs()
        if not bool((near | (a == b) | ~(a.isfinite() | b.isfinite())).all()):
            return False
    return True


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit, except for the payloads of NaNs."""
    return bool(torch.equal(a, b)) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _same(part: KVChunk, whole: KVChunk, rows: slice) -> bool:
    pairs = zip([*part.keys, *part.values], [*whole.keys, *whole.values], strict=True)
    return all(len(a) == rows.stop - rows.start and _equal(a, b[rows]) for a, b in pairs)


def _check_pages(codec: Codec, blob: bytes | memoryview | OpenBlob, chunk: KVChunk) -> None:
    """Decode into pages: the requested slots must hold the chunk, and the others stay unchanged."""
    room = chunk.tokens + 4
    layout = chunk.layout
    guard = 7.5
    keys = [torch.full((room, layer.kv_heads, layer.head_dim), guard).to(layout.torch_dtype) for layer in layout.layers]
    values = [
        torch.full((room, layer.kv_heads, layer.value_dim), guard).to(layout.torch_dtype) for layer in layout.layers
    ]
    if codec.profile.layout.dtype != layout.dtype:
        return
    slots = torch.arange(2, chunk.tokens + 2)
    slots[chunk.tokens // 2] = NOWHERE
    cache_ = PagedCache.dense(layout, keys, values)
    codec.decode_paged([blob], cache_, [slots]).check()
    for mine, theirs in zip([*keys, *values], [*chunk.keys, *chunk.values], strict=True):
        want = torch.full_like(mine, guard)
        want[2 : chunk.tokens + 2] = theirs
        want[chunk.tokens // 2 + 2] = guard
        if not _equal(mine, want):
            raise Finding("pages differ from the chunk, or other slots were written")
