"""A base and its refinement: both implementations make the same bytes, and decode them only with one another."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.chunks import error, same
from tests.classed import with_classes
from tests.codec.forging import correlated_chunk, reseal, sections_of
from tests.conftest import LAYOUTS, decoded_layers, fitted_profile, synthetic_chunk
from tests.predicting import VOCABULARY, predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CorruptError, FormatError, InputError, KeyMismatchError
from cuvee.codec.format.container import header_digest, inspect, read_header
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.profiles.quality import CurvePoint
from cuvee.codec.support.steps import OCTAVE
from cuvee.learning.calibrate import fit

BACKENDS = ("numba", "reference")
TOKENS, STEP = 300, 0.05  # more than a window
# Most classes, in no order, so that columns of several classes share a row; one token is worth nothing.
WEIGHTS = [0.0 if t == 100 else 2.0 ** (7 * t % 12 - 6) for t in range(TOKENS)]
KEY = bytes(range(16))


@pytest.fixture(scope="module")
def chunk() -> KVChunk:
    """A chunk with outliers, which are escapes of components of small scale."""
    made = synthetic_chunk(LAYOUTS["gqa"], TOKENS, seed=5, start=20)
    made.values[1][7] *= 20
    made.keys[0][150] *= 5
    return made


def parts_of(profile: Profile, chunk: KVChunk, backend: str = "numba") -> tuple[bytes, ...]:
    return Codec(profile, step=STEP, refinements=1, backend=backend).encode_parts(chunk)


def decoded(profile: Profile, parts: Sequence[bytes], backend: str = "numba") -> KVChunk:
    return Codec(profile, step=STEP, backend=backend).decode(parts[0], refinements=parts[1:])


@pytest.mark.parametrize(("group", "dtype"), [("layer", "float32"), ("head", "bfloat16"), ("all", "bfloat16")])
def test_backends_agree(chunk: KVChunk, group: str, dtype: str) -> None:
    layout = replace(chunk.layout, dtype=dtype)
    keys, values = ([own.to(layout.torch_dtype) for own in units] for units in (chunk.keys, chunk.values))
    cast = KVChunk(keys, values, layout, chunk.start)
    profile = with_classes(fitted_profile("gqa", group), WEIGHTS, 20)
    parts = parts_of(profile, cast)
    assert parts == parts_of(profile, cast, "reference") and len(parts) == 2
    base_step = 2.0 ** (read_header(parts[0]).step_index / OCTAVE)
    assert parts[0] == Codec(profile, step=base_step).encode(cast), "a base is a blob like any other"
    for known in (1, 2):
        ours, reference = (decoded(profile, parts[:known], name) for name in BACKENDS)
        assert ours.keys[0].dtype == layout.torch_dtype
        assert error(ours, reference) <= 1e-3 * error(ours, cast)  # products round differently


def test_both_parts_have_the_error_of_one_blob_and_are_little_larger() -> None:
    learned = [correlated_chunk(seed, 1000, 0) for seed in range(3)]
    profile, plain = fit(learned[0].layout, learned, "layer"), correlated_chunk(9, 3000, 0)
    whole, refined = Codec(profile, step=STEP), Codec(profile, step=STEP, refinements=1)
    single, parts = whole.encode(plain), refined.encode_parts(plain)
    coarse = Codec(profile, step=STEP * 4).encode(plain)
    both = error(whole.decode(parts[0], refinements=parts[1:]), plain)
    assert both == pytest.approx(error(whole.decode(single), plain), rel=0.05)
    assert both < error(whole.decode(parts[0]), plain) / 4
    assert sum(map(len, parts)) < 1.08 * len(single), "measured: 1.03 to 1.05, and the classes once more"
    assert len(parts[0]) < 1.02 * len(coarse)


def test_a_component_that_the_base_does_not_code_keeps_its_outliers() -> None:
    """They are escapes of the refinement."""
    profile = fitted_profile("gqa", "layer")
    wild = synthetic_chunk(profile.layout, 40, seed=3)
    for values in wild.values:
        values[5] *= 3000
    parts = parts_of(profile, wild)
    assert parts == parts_of(profile, wild, "reference")
    assert all(sum(int.from_bytes(own[4:8], "little") for own in sections_of(part)) for part in parts)
    whole = Codec(profile, step=STEP)
    for backend in BACKENDS:
        assert error(decoded(profile, parts, backend), wild) < 1.2 * error(whole.decode(whole.encode(wild)), wild)


def test_token_ids_predict_parts_too() -> None:
    profile, ids = predicting(fitted_profile("gqa", "layer")), np.arange(TOKENS) * 7 % VOCABULARY
    tame = synthetic_chunk(profile.layout, TOKENS, seed=5, start=20)
    parts = parts_of(profile, tame.with_token_ids(ids))
    assert parts == parts_of(profile, tame.with_token_ids(ids), "reference")
    assert [inspect(part).token_id_bytes for part in parts] == [2 * TOKENS, 0]
    np.testing.assert_array_equal(decoded(profile, parts).token_ids, ids)
    assert error(decoded(profile, parts), tame) < error(decoded(profile, parts[:1]), tame) / 4


@pytest.mark.parametrize("step", ["finest", 2.0**8])
def test_steps_at_the_ends_of_the_range(chunk: KVChunk, step: Any) -> None:
    profile = fitted_profile("gqa", "layer")
    codec = Codec(profile, step=2.0 ** (profile.min_step_index / OCTAVE) if step == "finest" else step, refinements=1)
    parts = codec.encode_parts(chunk)
    assert error(codec.decode(parts[0], refinements=parts[1:]), chunk) <= error(codec.decode(parts[0]), chunk)


def test_tokens_layers_and_positions(chunk: KVChunk) -> None:
    profile = with_classes(fitted_profile("gqa", "layer"), WEIGHTS, 20)
    parts = parts_of(profile, chunk)
    codec = Codec(profile, step=STEP)
    whole, opened = codec.decode(parts[0], refinements=parts[1:]), codec.open(parts[0], refinements=parts[1:])
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


def test_pages(chunk: KVChunk) -> None:
    """Out of pages with associated data of their own, and blobs of several kinds into pages by one call."""
    profile = fitted_profile("gqa", "layer")
    codec, refined = Codec(profile, step=STEP, key=KEY), Codec(profile, step=STEP, refinements=1, key=KEY)
    cache, halves = PagedCache.of_chunk(chunk), [torch.arange(100), torch.arange(100, TOKENS)]
    found = refined.encode_parts(PagedChunks(cache, halves, [20, 120]), associated_data=[b"a", b"b"])
    for own, (first, end), data in zip(found, ((0, 100), (100, TOKENS)), (b"a", b"b"), strict=True):
        piece = chunk.slice(first, end)
        alone = KVChunk(piece.keys, piece.values, piece.layout, piece.start)
        assert own == refined.encode_parts(alone, associated_data=data)
    with pytest.raises(InputError, match="starts: must be one for each"):
        refined.encode_parts(PagedChunks(cache, halves, [20]))
    parts, whole = refined.encode_parts(chunk), codec.encode(chunk)
    pages = PagedCache.empty(chunk.layout, 3 * TOKENS, range(chunk.layout.num_layers), torch.device("cpu"))
    slots = [torch.arange(TOKENS) + TOKENS * number for number in range(3)]
    codec.decode_paged([parts[0], whole, codec.open(parts[0], refinements=parts[1:])], pages, slots).check()
    for at, (blob, *finer) in zip(slots, (parts[:1], (whole,), parts), strict=True):
        assert same(pages.chunk(at, chunk.start), codec.decode(blob, refinements=finer))


def test_a_codec_says_what_its_parts_are(chunk: KVChunk) -> None:
    profile = fitted_profile("gqa", "layer")
    refined, single = Codec(profile, step=STEP, refinements=1), Codec(profile, step=STEP)
    assert (
        single.settings.part_count(ids=True),
        refined.settings.part_count(ids=True),
        refined.settings.part_count(ids=False),
    ) == (1, 2, 2)
    at_its_step = Codec(profile, step=2.0 ** (refined.step_index / OCTAVE))
    assert refined.quality_name == f"{at_its_step.quality_name},parts:2" != single.quality_name
    parts = refined.encode_parts(chunk)
    infos = [inspect(part) for part in parts]
    assert [(info.kind, info.scheme, info.refines is None) for info in infos] == [
        ("chunk", "transform", True), ("refinement", "transform", False),
    ]  # fmt: skip
    assert infos[0].profile_id == infos[1].profile_id == profile.id.hex()
    assert infos[0].step == 4 * infos[1].step  # type: ignore[operator]
    expected = Expected(TOKENS, chunk.start, "float32")
    assert len(refined.open(parts[0], refinements=parts[1:], expected=expected).refinements) == 1
    for codec, blob in ((single, parts[0]), (refined, single.encode(chunk))):
        with pytest.raises(CorruptError, match="must hold"):
            codec.open(blob, expected=expected)


def test_chunks_without_ids_that_are_lossless_are_one_part(chunk: KVChunk) -> None:
    """Their curve does not reach the KL, but that of chunks with ids does."""
    points = [CurvePoint(at, 4.0 - at / 64, 0.1, kl=10.0 ** (at / 64 - 3)) for at in (-128, -64, 0)]
    points += [CurvePoint(at, 5.0 - at / 64, 0.1, kl=10.0 ** (at / 64 - 1), plain=True) for at in (-64, 0)]
    codec = Codec(predicting(fitted_profile("gqa", "layer")).with_curve(points), kl=3e-4, refinements=1)
    assert codec.quality_name.endswith("plain:lossless,parts:2")
    assert codec.described_quality.endswith(" in 2 parts (lossless without token ids)")
    assert (codec.settings.part_count(ids=True), codec.settings.part_count(ids=False)) == (2, 1)
    (blob,) = codec.encode_parts(chunk)
    assert inspect(blob).scheme == "lossless" and same(codec.decode(blob), chunk)
    assert len(codec.encode_parts(chunk.with_token_ids(np.arange(TOKENS) % VOCABULARY))) == 2


def test_requests(chunk: KVChunk) -> None:
    profile = fitted_profile("gqa", "layer")
    for wrong in (-1, 2, True, 1.0):
        with pytest.raises(InputError, match=r"^refinements: must be 0 … 1"):
            Codec(profile, step=STEP, refinements=wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must be 0 with an unlearned profile"):
        Codec(Profile.unlearned(chunk.layout), step=STEP, refinements=1)
    with pytest.raises(InputError, match="must be 0 without loss"):
        Codec(profile, "lossless", refinements=1)
    codec, single = Codec(profile, step=STEP, refinements=1), Codec(profile, step=STEP)
    pages = PagedChunks(PagedCache.of_chunk(chunk), [torch.arange(chunk.tokens)], [chunk.start])
    for source in (chunk, pages):
        with pytest.raises(InputError, match=r"call encode_parts\(\)"):
            codec.encode(source)
    assert single.encode_parts(chunk) == (single.encode(chunk),) == single.encode_parts(pages)[0]


def test_parts_of_others(chunk: KVChunk) -> None:
    profile = fitted_profile("gqa", "layer")
    codec = Codec(profile, step=STEP)
    base, finer = parts_of(profile, chunk)
    other = parts_of(profile, synthetic_chunk(profile.layout, TOKENS, seed=6, start=20))
    whole = codec.encode(chunk)
    again = parts_of(with_classes(profile, WEIGHTS, 20, keep_id=True), chunk)[0]  # and it is not the same
    for given, refinement in ((base, other[1]), (base, base), (base, whole), (again, finer)):
        with pytest.raises(CorruptError, match="refinement: must be of this base"):
            codec.open(given, refinements=[refinement])
    lossless = Codec(Profile.unlearned(chunk.layout), "lossless").encode(chunk)
    for given, most, refinements in ((base, 1, [finer, finer]), (lossless, 0, [finer])):
        with pytest.raises(InputError, match=f"must be at most {most} of this blob, got {len(refinements)}"):
            codec.open(given, refinements=refinements)
    with pytest.raises(FormatError, match="is a refinement, which decodes only with its base"):
        codec.decode(finer)
    with pytest.raises(InputError, match="must be empty for an OpenBlob"):
        codec.decode(codec.open(base), refinements=[finer])


def test_tags(chunk: KVChunk) -> None:
    codec = Codec(fitted_profile("gqa", "layer"), step=STEP, refinements=1, key=KEY)
    base, finer = codec.encode_parts(chunk, associated_data=b"here")
    other = codec.encode_parts(chunk, associated_data=b"there")
    assert codec.open(base, refinements=[finer], associated_data=b"here").tokens == TOKENS
    with pytest.raises(CorruptError, match="authentication tag"):
        codec.open(base, refinements=[other[1]], associated_data=b"here")
    untagged = reseal(finer[:7] + bytes([0]) + finer[8:], sections_of(finer))
    with pytest.raises(KeyMismatchError, match="carries no authentication tag"):
        codec.open(base, refinements=[untagged], associated_data=b"here")


def changed(blob: bytes, at: int, value: bytes) -> bytes:
    """The blob with other bytes in its header, resealed."""
    return reseal(blob[:at] + value + blob[at + len(value) :], sections_of(blob))


def with_field(field: str, value: int) -> Callable[[bytes], bytes]:
    return lambda blob: reseal(blob, None, None, **{field: value})


def rebound(base: bytes, refinement: bytes) -> bytes:
    """The refinement of another base, bound to this one."""
    return changed(refinement, 64, header_digest(base))


@pytest.mark.parametrize(
    "forge",
    [
        *(
            with_field(field, value)
            for field, value in (("tokens", TOKENS - 1), ("start", 3), ("step", -300), ("dtype", 0), ("values", 7))
        ),
        lambda blob: changed(blob, 32, bytes(range(16))),  # layout
        lambda blob: changed(blob, 48, bytes(range(16))),  # profile
        lambda blob: reseal(blob, sections_of(blob)[:1], count=1),
    ],
)
def test_a_refinement_of_another_shape(chunk: KVChunk, forge: Callable[[bytes], bytes]) -> None:
    profile = fitted_profile("gqa", "layer")
    base, finer = parts_of(profile, chunk)
    with pytest.raises(FormatError, match="refinement: must have the tokens, layout and profile of its base"):
        Codec(profile, step=STEP).open(base, refinements=[forge(finer)])


# --- damaged and forged sections: both implementations say the same


def outcome(profile: Profile, parts: Sequence[bytes]) -> str | None:
    """What both implementations say of a base and a refinement that is bound to it; None: they decode."""
    said: list[str | None] = []
    for backend in BACKENDS:
        codec = Codec(profile, step=STEP, backend=backend)
        opened = codec.open(parts[0])
        try:
            codec.decode(replace(opened, refinements=((parts[1], read_header(parts[1])),)))
            said.append(None)
        except (CorruptError, FormatError) as found:
            # The reference counts the streams of a tile.
            said.append(f"{type(found).__name__}: {re.sub(r'stream [0-9]+ of [0-9]+', 'stream', str(found))}")
    assert said[0] == said[1]
    return said[0]


def test_a_refinement_with_other_classes(chunk: KVChunk) -> None:
    """One token's class differs, or all: what the base left over of a token is coded at the step of its class."""
    profile = fitted_profile("gqa", "layer")
    weights = [list(WEIGHTS) for _ in range(3)]
    weights[1][1], weights[2][290] = 2.0**9, 2.0**9
    made = [parts_of(with_classes(profile, own, 20, keep_id=True), chunk) for own in (*weights, [1.0] * TOKENS)]
    assert outcome(profile, made[0]) is None
    for _, other in made[1:]:
        said = outcome(profile, (made[0][0], rebound(made[0][0], other)))
        assert said == (
            "CorruptError: refinement: must have the token classes of its base, got other ones: the bytes are damaged"
        )
