"""Bases and refinements: every prefix decodes, on every backend to the same bits, and only with its own parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tests.classed import with_classes
from tests.codec.forging import reseal, sections_of, with_section
from tests.conftest import decoded_layers
from tests.predicting import VOCABULARY, predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec, ExpectedPart, OpenBlob
from cuvee.codec.entropy.coding_plan import MAX_LEVEL
from cuvee.codec.entropy.family import OCTAVE, default_family, fit_family
from cuvee.codec.entropy.nested import (
    CONTEXTS,
    ESCAPED,
    MAX_REFINEMENTS,
    NestedFamily,
    default_nested_family,
    fit_nested,
)
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError, KeyMismatchError
from cuvee.codec.format.container import inspect, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint

TOKENS = 300  # more than a window
# Most classes, in no order, so that columns of several classes share a row; one token is worth nothing.
WEIGHTS = [0.0 if t == 100 else 2.0 ** (7 * t % 12 - 6) for t in range(TOKENS)]
GROUPS = ("layer", "head", "all")
KEY = bytes(range(16))


@pytest.fixture(scope="module")
def chunk(layouts: dict[str, KVLayout], make_chunk: Callable[..., KVChunk]) -> KVChunk:
    """A chunk with outliers, which components of small scale cannot code without the largest symbols."""
    made = make_chunk(layouts["gqa"], TOKENS, seed=5, start=20)
    made.values[1][7] *= 20
    made.keys[0][150] *= 5
    return made


@pytest.fixture(scope="module")
def tame(layouts: dict[str, KVLayout], make_chunk: Callable[..., KVChunk]) -> KVChunk:
    """A chunk like those that the profiles were learned from."""
    return make_chunk(layouts["gqa"], TOKENS, seed=5, start=20)


def parts_of(profile: Profile, chunk: KVChunk, backend: str = "numba", **options: Any) -> tuple[bytes, ...]:
    codec = Codec(profile, step=0.05, refinements=options.pop("refinements", 2), backend=backend)
    return codec.encode_parts(chunk, **options)


def decoded(profile: Profile, parts: Sequence[bytes], backend: str = "numba", **options: Any) -> KVChunk:
    return Codec(profile, step=0.05, backend=backend).decode(parts[0], refinements=parts[1:], **options)


def error(left: KVChunk, right: KVChunk) -> float:
    pairs = zip((*left.keys, *left.values), (*right.keys, *right.values), strict=True)
    return sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)


def same(left: KVChunk, right: KVChunk) -> bool:
    pairs = zip((*left.keys, *left.values), (*right.keys, *right.values), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# --- what parts are


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("refinements", [1, 2])
def test_backends_agree(fitted: Callable[[str, str], Profile], chunk: KVChunk, group: str, refinements: int) -> None:
    profile = with_classes(fitted("gqa", group), WEIGHTS, 20)
    parts = parts_of(profile, chunk, refinements=refinements)
    assert parts == parts_of(profile, chunk, "reference", refinements=refinements)
    assert len(parts) == 1 + refinements
    for known in range(1 + refinements):
        ours, reference = (decoded(profile, parts[: 1 + known], name) for name in ("numba", "reference"))
        # Products may round differently; levels and coefficients are compared where the reference is decoded below.
        assert error(ours, reference) <= 1e-8 * error(ours, chunk)


def test_coefficients_are_the_references_bit_for_bit(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    from cuvee.codec.format.container import read_section
    from cuvee.codec.profiles.nested_coding import NestedCoding
    from cuvee.codec.stages.implementations import get_stages

    for group in GROUPS:
        profile = with_classes(fitted("gqa", group), WEIGHTS, 20)
        parts = parts_of(profile, chunk)
        headers = [read_header(part) for part in parts]
        coding = NestedCoding(profile.learned, profile.nested, headers[0].step_index, MAX_REFINEMENTS)
        sections = [
            (index, [read_section(part, header, index) for part, header in zip(parts, headers, strict=True)])
            for index in range(len(profile.sections))
        ]
        for at in (slice(0, TOKENS), slice(256, TOKENS)):
            for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
                found = []
                for name in ("reference", "numba"):
                    stages = get_stages(name)
                    tiles = stages.decode_refined(stages.index_refined(coding, sections, TOKENS), at, dtype)
                    found.append([(tile.order, tile.classes, tile.y.clone()) for tile in tiles])
                for (order, classes, y), (other_order, other_classes, other_y) in zip(*found, strict=True):
                    np.testing.assert_array_equal(order, other_order)
                    np.testing.assert_array_equal(classes, other_classes)
                    assert torch.equal(y.view(bits), other_y.view(bits))


@pytest.mark.parametrize("backend", ["numba", "reference"])
def test_each_refinement_cuts_the_error_to_a_third_or_less(
    fitted: Callable[[str, str], Profile], tame: KVChunk, backend: str
) -> None:
    profile = fitted("gqa", "layer")
    parts = parts_of(profile, tame, backend)
    errors = [error(decoded(profile, parts[: 1 + known], backend), tame) for known in range(3)]
    assert all(finer < coarser / 3 for coarser, finer in pairwise(errors))


def test_all_parts_have_the_error_of_one_blob(fitted: Callable[[str, str], Profile], make_chunk: Any) -> None:
    """And they are hardly larger. Without outliers, of which a whole blob's escapes lose nothing."""
    profile = fitted("gqa", "layer")
    plain = make_chunk(profile.layout, 2000, seed=9)
    whole = Codec(profile, step=0.05)
    blob, parts = whole.encode(plain), parts_of(profile, plain)
    assert error(decoded(profile, parts), plain) == pytest.approx(error(whole.decode(blob), plain), rel=0.05)
    assert sum(map(len, parts)) < 1.04 * len(blob)


def test_a_component_that_the_base_does_not_code_keeps_its_outliers(
    fitted: Callable[[str, str], Profile], make_chunk: Any
) -> None:
    """They are escapes of the first refinement that codes it."""
    profile = fitted("gqa", "layer")
    wild = make_chunk(profile.layout, 40, seed=3)
    for values in wild.values:
        values[5] *= 3000
    parts = parts_of(profile, wild)
    assert parts == parts_of(profile, wild, "reference")
    counts = [sum(int.from_bytes(own[4:8], "little") for own in sections_of(part)) for part in parts]
    assert all(counts)
    whole = Codec(profile, step=0.05)
    for backend in ("numba", "reference"):
        errors = [error(decoded(profile, parts[: 1 + known], backend), wild) for known in range(3)]
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 1.2 * error(whole.decode(whole.encode(wild)), wild)
    for index, section in enumerate(sections_of(parts[2])):
        if int.from_bytes(section[4:8], "little"):
            for value in (4 * MAX_LEVEL + 1, -(2**31)):
                forged = section[:-4] + (value & 0xFFFFFFFF).to_bytes(4, "little")
                said = problems(profile, [*parts[:2], with_section(parts[2], forged, index)])
                assert said == f"CorruptError: section: has a level beyond {MAX_LEVEL} steps: the bytes are damaged"
            few = section[:4] + bytes(4) + section[8 : -8 * int.from_bytes(section[4:8], "little")]
            assert "escape list" in problems(profile, [*parts[:2], with_section(parts[2], few, index)])


def test_token_ids_predict_parts_too(fitted: Callable[[str, str], Profile], tame: KVChunk) -> None:
    profile = predicting(fitted("gqa", "layer"))
    ids = np.arange(TOKENS) * 7 % VOCABULARY
    parts = parts_of(profile, tame, tokens=ids)
    assert parts == parts_of(profile, tame, "reference", tokens=ids)
    assert [inspect(part).token_id_bytes for part in parts] == [2 * TOKENS, 0, 0]
    np.testing.assert_array_equal(decoded(profile, parts).token_ids, ids)
    errors = [error(decoded(profile, parts[: 1 + known]), tame) for known in range(3)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


# --- decoding some of it


def test_tokens_layers_and_positions(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    profile = with_classes(fitted("gqa", "layer"), WEIGHTS, 20)
    parts = parts_of(profile, chunk)
    codec = Codec(profile, step=0.05)
    whole = codec.decode(parts[0], refinements=parts[1:])
    opened = codec.open(parts[0], refinements=parts[1:])
    for span in (range(3, 40), range(250, 300), range(299, 300)):
        some = codec.decode(opened, tokens=span)
        for own, every in zip((*some.keys, *some.values), (*whole.keys, *whole.values), strict=True):
            torch.testing.assert_close(own, every[span.start : span.stop], rtol=0, atol=1e-5)
    keys, values = decoded_layers(codec, opened, range(1, 2))
    torch.testing.assert_close(keys[0], whole.keys[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(values[0], whole.values[1], rtol=0, atol=1e-5)
    moved = codec.decode(opened, start=77)
    assert moved.start == 77 and not torch.equal(moved.keys[0], whole.keys[0])
    torch.testing.assert_close(moved.values[0], whole.values[0], rtol=0, atol=1e-5)


def test_pages(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    """Blobs of several kinds in one call, and a refinement of a cache that is in pages already."""
    from cuvee.codec.paged import PagedCache

    profile = fitted("gqa", "layer")
    codec = Codec(profile, step=0.05)
    parts, whole = parts_of(profile, chunk), codec.encode(chunk)
    cache = PagedCache.empty(chunk.layout, 3 * TOKENS, range(chunk.layout.num_layers), torch.device("cpu"))
    slots = [torch.arange(TOKENS) + TOKENS * number for number in range(3)]
    codec.decode_paged([parts[0], whole, codec.open(parts[0], refinements=parts[1:2])], cache, slots).check()
    for at, known in ((slots[0], parts[:1]), (slots[2], parts[:2])):
        assert same(cache.chunk(at, chunk.start), decoded(profile, known))
    assert same(cache.chunk(slots[1], chunk.start), codec.decode(whole))
    codec.decode_paged([codec.open(parts[0], refinements=parts[1:])], cache, slots[:1]).check()
    assert same(cache.chunk(slots[0], chunk.start), decoded(profile, parts))


def test_parts_out_of_pages(fitted: Callable[[str, str], Profile], tame: KVChunk) -> None:
    from cuvee.codec.paged import PagedCache

    codec = Codec(fitted("gqa", "layer"), step=0.05, refinements=2, key=KEY)
    cache = PagedCache.of_chunk(tame)
    slots = [torch.arange(100), torch.arange(100, TOKENS)]
    found = codec.encode_parts_paged(cache, slots, [20, 120], associated_data=[b"a", b"b"])
    for own, (first, end), data in zip(found, ((0, 100), (100, TOKENS)), (b"a", b"b"), strict=True):
        piece = tame.slice(first, end)
        alone = KVChunk(piece.keys, piece.values, piece.layout, piece.start)
        assert own == codec.encode_parts(alone, associated_data=data)
    with pytest.raises(InputError, match="starts: must be one for each"):
        codec.encode_parts_paged(cache, slots, [20])


def test_chunks_without_ids_that_are_lossless_are_one_part(
    fitted: Callable[[str, str], Profile], tame: KVChunk
) -> None:
    """Their curve does not reach the KL, but that of chunks with ids does."""
    from cuvee.codec.profiles.quality import CurvePoint

    ids = np.arange(TOKENS) % VOCABULARY
    points = [CurvePoint(at, 4.0 - at / 64, 0.1, kl=10.0 ** (at / 64 - 3)) for at in (-128, -64, 0)]
    points += [CurvePoint(at, 5.0 - at / 64, 0.1, kl=10.0 ** (at / 64 - 1), plain=True) for at in (-64, 0)]
    profile = predicting(fitted("gqa", "layer")).with_curve(points)
    codec = Codec(profile, kl=3e-4, refinements=1)
    assert codec.quality_name.endswith("plain:lossless,parts:2")
    (blob,) = codec.encode_parts(tame)
    assert inspect(blob).scheme == "lossless" and same(codec.decode(blob), tame)
    assert len(codec.encode_parts(tame, tokens=ids)) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(fitted: Callable[[str, str], Profile], tame: KVChunk, dtype: str) -> None:
    layout = replace(tame.layout, dtype=dtype)
    kind = layout.torch_dtype
    cast = KVChunk([k.to(kind) for k in tame.keys], [v.to(kind) for v in tame.values], layout, tame.start)
    profile = fitted("gqa", "layer")
    parts = parts_of(profile, cast)
    back = decoded(profile, parts)
    assert back.keys[0].dtype == kind and error(back, cast) < error(decoded(profile, parts[:1]), cast) / 5


# --- names and tags


def test_qualities_have_names_of_their_own(fitted: Callable[[str, str], Profile]) -> None:
    profile = fitted("gqa", "layer")
    names = [Codec(profile, step=0.05, refinements=number).quality_name for number in range(3)]
    assert len(set(names)) == 3 and names[1].endswith(",parts:2") and names[2].endswith(",parts:3")


def test_open_expected_tells_bases_from_blobs(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    profile = fitted("gqa", "layer")
    nested, single = Codec(profile, step=0.05, refinements=2), Codec(profile, step=0.05)
    parts = nested.encode_parts(chunk)
    expected: dict[str, Any] = {"tokens": TOKENS, "start": chunk.start, "dtype": "float32"}
    assert len(nested.open_expected(parts[0], refinements=parts[1:], **expected).refinements) == 2
    at_its_step = Codec(profile, step=2.0 ** (nested.step_index / OCTAVE))
    for codec, blob in ((at_its_step, parts[0]), (nested, at_its_step.encode(chunk)), (single, parts[0])):
        with pytest.raises(CorruptError, match="must hold"):
            codec.open_expected(blob, **expected)


def test_a_base_says_that_it_is_one(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    parts = parts_of(fitted("gqa", "layer"), chunk)
    infos = [inspect(part) for part in parts]
    assert [info.scheme for info in infos] == ["transform", "refinement", "refinement"]
    assert [info.is_base for info in infos] == [True, False, False]
    assert [info.profile_id is None for info in infos] == [False, True, True]
    assert infos[0].step == 2 * infos[1].step == 4 * infos[2].step  # type: ignore[operator]


def test_tags(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    codec = Codec(fitted("gqa", "layer"), step=0.05, refinements=2, key=KEY)
    base, first, second = codec.encode_parts(chunk, associated_data=b"here")
    other = codec.encode_parts(chunk, associated_data=b"there")
    assert codec.open(base, refinements=[first, second], associated_data=b"here").tokens == TOKENS
    with pytest.raises(CorruptError, match="authentication tag"):
        codec.open(base, refinements=[other[1]], associated_data=b"here")
    untagged = reseal(first[:5] + first[5:7] + bytes([0]) + first[8:], sections_of(first))
    with pytest.raises(KeyMismatchError, match="carries no authentication tag"):
        codec.open(base, refinements=[untagged], associated_data=b"here")


# --- parts that do not belong together


def test_parts_of_others(fitted: Callable[[str, str], Profile], chunk: KVChunk, make_chunk: Any) -> None:
    profile = fitted("gqa", "layer")
    codec = Codec(profile, step=0.05)
    base, first, second = parts_of(profile, chunk)
    other = parts_of(profile, make_chunk(profile.layout, TOKENS, seed=6, start=20))
    whole = codec.encode(chunk)
    cases: list[tuple[list[bytes], str]] = [
        ([other[1]], "refinement 1: must be of the part before it"),  # replayed from another prompt
        ([second], "refinement 1: must be of the part before it"),  # one is missing
        ([second, first], "refinement 1: must be of the part before it"),  # swapped
        ([first, other[2]], "refinement 2: must be of the part before it"),
        ([first, first], "refinement 2: must be of the part before it"),  # refined twice
        ([base], "refinement 1: must be of the part before it"),
        ([whole], "refinement 1: must be of the part before it"),
    ]
    for refinements, message in cases:
        with pytest.raises(CorruptError, match=message):
            codec.open(base, refinements=refinements)
    # The base was encoded again, and is not the same.
    replaced = parts_of(with_classes(profile, WEIGHTS, 20, keep_id=True), chunk)[0]
    with pytest.raises(CorruptError, match="refinement 1: must be of the part before it"):
        codec.open(replaced, refinements=[first])
    with pytest.raises(InputError, match="at most 2 for a base, got 3"):
        codec.open(base, refinements=[first, second, second])
    with pytest.raises(InputError, match="none for a blob that is no base"):
        codec.open(whole, refinements=[first])
    with pytest.raises(FormatError, match="is a refinement, which decodes only with its base"):
        codec.decode(first)
    opened = codec.open(base)
    with pytest.raises(InputError, match="must be empty for an OpenBlob"):
        codec.decode(opened, refinements=[first])
    assert isinstance(opened, OpenBlob)


@pytest.mark.parametrize(
    ("field", "value"), [("tokens", TOKENS - 1), ("start", 3), ("step", -300), ("dtype", 0), ("values", 7)]
)
def test_a_refinement_of_another_shape(
    fitted: Callable[[str, str], Profile], chunk: KVChunk, field: str, value: int
) -> None:
    profile = fitted("gqa", "layer")
    base, first, _ = parts_of(profile, chunk)
    with pytest.raises(FormatError, match="refinement 1: must have the tokens of its base at half the step"):
        Codec(profile, step=0.05).open(base, refinements=[reseal(first, None, **{field: value})])


def test_flags_that_contradict(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    profile = fitted("gqa", "layer")
    _, first, _ = parts_of(profile, chunk)
    for blob in (first, Codec(Profile.unlearned(chunk.layout), "lossless").encode(chunk)):
        with pytest.raises(FormatError, match="which has no refinements"):
            read_header(reseal(blob[:7] + bytes([4]) + blob[8:], sections_of(blob)))
    # A blob that says it is a base is read with other tables, and its streams do not end as they must.
    whole = Codec(with_classes(profile, WEIGHTS, 20, keep_id=True), step=0.05).encode(chunk)
    with pytest.raises(CuveeError):
        Codec(profile, step=0.05).decode(reseal(whole[:7] + bytes([4]) + whole[8:], sections_of(whole)))


# --- damaged and forged sections: both implementations say the same


def unnumbered(message: str) -> str:
    """A message without the number of a stream: the reference counts those of a tile."""
    return re.sub(r"stream \d+ of \d+", "stream", message)


def problems(profile: Profile, parts: Sequence[bytes]) -> str:
    """What both implementations say of parts, whose bindings are right."""
    said = []
    for backend in ("numba", "reference"):
        codec = Codec(profile, step=0.05, backend=backend)
        opened = codec.open(parts[0])
        refinements = tuple((part, read_header(part)) for part in parts[1:])
        with pytest.raises((CorruptError, FormatError)) as found:
            codec.decode(replace(opened, refinements=refinements))
        said.append(unnumbered(f"{found.type.__name__}: {found.value}"))
    assert said[0] == said[1]
    return said[0]


def test_forged_sections(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    profile = with_classes(fitted("gqa", "layer"), WEIGHTS, 20)
    base, first, second = parts_of(profile, chunk)
    section = sections_of(first)[0]
    log2 = section[8]
    assert log2 > 0

    def forged(data: bytes) -> list[bytes]:
        return [base, with_section(first, data), second]

    assert "ends" in problems(profile, forged(section[:-4]))
    assert "too many" in problems(profile, forged(section + bytes(4)))
    assert "has token classes" in problems(profile, forged(sections_of(base)[0]))
    bare = section[: len(section) - 8 * int.from_bytes(section[4:8], "little")]
    listed = bare[:4] + (1).to_bytes(4, "little") + bare[8:]
    last = (TOKENS - 1).to_bytes(4, "little")  # of the first row, whose symbols are never escapes
    assert "escape list" in problems(profile, forged(listed + last + bytes(4)))
    assert "out of order or out of range" in problems(profile, forged(listed + b"\xff\xff\xff\xff" + bytes(4)))
    words = bytearray(section)
    words[len(bare) - 8] ^= 0x55
    assert "does not end where it must" in problems(profile, forged(bytes(words)))


def test_other_tokens_per_stream(fitted: Callable[[str, str], Profile], chunk: KVChunk, monkeypatch: Any) -> None:
    from cuvee.codec.entropy import coefficients

    profile = fitted("gqa", "layer")
    parts = parts_of(profile, chunk)
    monkeypatch.setattr(coefficients, "tokens_per_stream", lambda *_: 1)
    others = parts_of(profile, chunk)
    assert re.search(
        "must have 32 tokens per stream, as what it refines, got 1", problems(profile, [parts[0], others[1]])
    )


def test_tokens_without_classes(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    """A fitted profile codes blobs without classes; such sections in a base decode alone, and have no refinements."""
    profile = fitted("gqa", "layer")
    parts = parts_of(profile, chunk)
    step = 2.0 ** (read_header(parts[0]).step_index / OCTAVE)
    plain = sections_of(Codec(profile, step=step).encode(chunk))
    assert "must have token classes in a base that is refined" in problems(
        profile, [with_section(parts[0], plain[0]), *parts[1:]]
    )


def test_levels_beyond_all_bounds(fitted: Callable[[str, str], Profile], make_chunk: Any) -> None:
    """Levels double with each refinement: a forged one must not overflow, whatever it says."""
    profile = fitted("gqa", "layer")
    wild = make_chunk(profile.layout, 40, seed=3)
    wild.values[0][5] *= 3000
    parts = parts_of(profile, wild)
    for index, section in enumerate(sections_of(parts[0])):
        if int.from_bytes(section[4:8], "little"):
            for value in (MAX_LEVEL + 1, -MAX_LEVEL - 1, 2**31 - 1, -(2**31)):
                forged = section[:-4] + (value & 0xFFFFFFFF).to_bytes(4, "little")
                said = problems(profile, [with_section(parts[0], forged, index), *parts[1:]])
                assert said == f"CorruptError: section: has a level beyond {MAX_LEVEL} steps: the bytes are damaged"
            elsewhere = bytearray(section)
            at = len(section) - 8 * int.from_bytes(section[4:8], "little")
            elsewhere[at : at + 4] = (0).to_bytes(4, "little")
            assert "escape list" in problems(profile, [with_section(parts[0], bytes(elsewhere), index), *parts[1:]])
            return
    pytest.fail("no section has an escape")


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_told_or_harmless(fitted: Callable[[str, str], Profile], chunk: KVChunk, seed: int) -> None:
    """Sections with right checksums and random damage: an error of the format, and the same one on both backends."""
    profile, random = fitted("gqa", "head"), np.random.default_rng(seed)
    parts = list(parts_of(profile, chunk))
    which = int(random.integers(3))
    sections = sections_of(parts[which])
    index = int(random.integers(len(sections)))
    data = bytearray(sections[index])
    for _ in range(3):
        data[int(random.integers(len(data)))] = int(random.integers(256))
    parts[which] = with_section(parts[which], bytes(data), index)
    said: list[str | None] = []
    for backend in ("numba", "reference"):
        codec = Codec(profile, step=0.05, backend=backend)
        try:
            opened = codec.open(parts[0])
            codec.decode(replace(opened, refinements=tuple((part, read_header(part)) for part in parts[1:])))
            said.append(None)
        except (CorruptError, FormatError) as problem:
            said.append(unnumbered(str(problem)))
    assert said[0] == said[1]


# --- asking for it


def test_requests(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    profile = fitted("gqa", "layer")
    for wrong in (-1, 3, True, 1.0):
        with pytest.raises(InputError, match=r"^refinements: must be 0 … 2"):
            Codec(profile, step=0.05, refinements=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be 0 with an unlearned profile"):
        Codec(Profile.unlearned(chunk.layout), step=0.05, refinements=1)
    with pytest.raises(InputError, match="must be 0 without loss"):
        Codec(profile, "lossless", refinements=1)
    codec, single = Codec(profile, step=0.05, refinements=1), Codec(profile, step=0.05)
    with pytest.raises(InputError, match=r"call encode_parts\(\)"):
        codec.encode(chunk)
    with pytest.raises(InputError, match=r"or encode_parts_paged\(\)"):
        codec.encode_paged(None, [], [])  # type: ignore[arg-type]
    for call in (lambda: single.encode_parts(chunk), lambda: single.encode_parts_paged(None, [], [])):  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"call encode\(\) or encode_paged\(\)"):
            call()


def test_steps_at_the_ends_of_the_range(fitted: Callable[[str, str], Profile], chunk: KVChunk) -> None:
    profile = fitted("gqa", "layer")
    for step in (2.0 ** (profile.min_step_index / OCTAVE), 2.0**8):
        codec = Codec(profile, step=step, refinements=2)
        parts = codec.encode_parts(chunk)
        assert error(codec.decode(parts[0], refinements=parts[1:]), chunk) <= error(codec.decode(parts[0]), chunk)


# --- tables


def laplacian(rows: int = 40, tokens: int = 4000) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    scale = np.linspace(300, -200, rows).astype(np.int16)
    spread = 2.0 ** (scale / OCTAVE) / np.sqrt(2)
    return (np.random.default_rng(0).laplace(size=(rows, tokens)) * spread[:, None]).astype(np.float32), scale


def test_learned_tables_fit_better() -> None:
    """Learned on half of the tokens; on the other half their symbols take fewer bits than by the parametric tables."""
    y, scale = laplacian()
    family = fit_family([(y[:, ::2], scale)], range(-128, 65, 64))
    learned = fit_nested([(y[:, ::2], scale)], (-64, 0), family)
    # Coarser steps lose more, and so do wider cells around zero.
    assert learned.offsets[0] > learned.offsets[2]
    again = fit_nested([(y[:, 1::2], scale)], (-64, 0), family)
    for ours, parametric, seen in zip(
        learned.refinements, default_nested_family().refinements, again.refinements, strict=True
    ):
        with np.errstate(divide="ignore"):
            bits = [np.where(seen.freq > 0, -np.log2(own.freq / 4096), 0) for own in (ours, parametric)]
        costs = [float((seen.freq * np.minimum(own, 16)).sum()) for own in bits]
        assert costs[0] < costs[1]


def test_parametric_tables_are_the_same_on_every_machine() -> None:
    family = default_nested_family()
    again = default_nested_family.__wrapped__()
    for ours, other in zip(family.arrays().values(), again.arrays().values(), strict=True):
        np.testing.assert_array_equal(ours, other)


def test_the_profile_keeps_its_nested_family(fitted: Callable[[str, str], Profile], tmp_path: Any) -> None:
    profile = fitted("gqa", "layer")
    profile.save(tmp_path / "p")
    loaded = Profile.load(tmp_path / "p")
    assert loaded.id == profile.id
    for name, array in profile.nested.arrays().items():
        np.testing.assert_array_equal(array, loaded.nested.arrays()[name])
    for other in (profile.with_curve(()), profile.shard(0, 1), profile.plain):
        assert other.nested is profile.nested


def test_tables_that_break_a_rule() -> None:
    good = default_nested_family()
    tables = good.refinements[0]

    def freq(table: int, context: int, symbols: dict[int, int]) -> np.ndarray[Any, Any]:
        out = tables.freq.copy()
        out[table, context] = 0
        for symbol, count in symbols.items():
            out[table, context, symbol - ESCAPED] = count
        return out

    for table, context, symbols in (
        (5, 1, {0: 4000, -1: 96}), (5, 1, {0: 4000, 1: 95, -1: 1}), (5, CONTEXTS - 1, {0: 4000, 1: 95, 2: 1}),
        (0, 0, {0: 4000, 1: 48, -1: 48}), (7, 0, {0: 4000, 1: 95, ESCAPED: 1}),
    ):  # fmt: skip
        with pytest.raises(FormatError, match="must be above zero for the symbols that can occur"):
            replace(tables, freq=freq(table, context, symbols))
    with pytest.raises(FormatError, match="must add up"):
        _ = NestedFamily(good.base, [replace(tables, freq=freq(5, 1, {0: 4000, 1: 95})), tables], good.offsets).coders
    for changes in ({"zone": tables.zone + 3}, {"shrink": tables.shrink * np.float32("nan")}):
        with pytest.raises(FormatError, match="must lie within"):
            replace(tables, **changes)
    with pytest.raises(FormatError, match=r"must be float32 \[25\]"):
        replace(tables, zone=tables.zone.astype(np.float64))
    with pytest.raises(FormatError, match="must have 2 refinements"):
        NestedFamily(good.base, [tables], good.offsets)
    with pytest.raises(FormatError, match="must be 3 int16 numbers"):
        NestedFamily(good.base, good.refinements, good.offsets * 100)
    with pytest.raises(FormatError, match="so that all cells are one step wide"):
        NestedFamily(default_family(), good.refinements, good.offsets)
    assert len(NestedFamily(good.base, [tables, good.refinements[1]], good.offsets).coders) == 2


def test_what_to_expect_of_parts_is_that_of_blobs_of_their_error(fitted: Callable[[str, str], Profile]) -> None:
    curve = [CurvePoint(64 * k, 4.0 - k, 1e-2 * 4.0**k, 1e-3 * 4.0**k) for k in range(-5, 5)]
    profile = fitted("gqa", "layer").with_curve(curve)
    whole, parts = Codec(profile, "balanced"), Codec(profile, "balanced", refinements=2)
    (single,) = whole.expected_parts()
    base, middle, finest = parts.expected_parts()
    assert finest == single and finest.kl is not None and middle.kl is not None and base.kl is not None
    offsets = profile.nested.offsets
    assert base.kl / finest.kl == pytest.approx(4.0 ** (2 + (offsets[0] - offsets[2]) / OCTAVE), rel=0.02)
    assert base.bits is not None and middle.bits is not None and finest.bits is not None
    assert base.bits < middle.bits < finest.bits
    worst = parts.expected_parts(worst=True)
    assert [part.kl for part in worst] == [base.kl, middle.kl, finest.kl], "the curve knows one kind"
    assert Codec(profile, "lossless").expected_parts() == (ExpectedPart(0.0, None),)
    unknown = Codec(fitted("gqa", "layer").with_curve([]), step=0.5, refinements=1).expected_parts()
    assert unknown == (ExpectedPart(None, None),) * 2


def test_part_count_says_that_chunks_without_ids_may_be_whole(fitted: Callable[[str, str], Profile]) -> None:
    codec = Codec(fitted("gqa", "layer"), step=0.5, refinements=2)
    assert codec.part_count(ids=True) == codec.part_count(ids=False) == 3
    assert Codec(fitted("gqa", "layer"), step=0.5).part_count(ids=True) == 1
