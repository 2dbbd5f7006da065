"""The device backend on hostile bytes and slots: no write leaves the cache, and every error names what is wrong.

`tests/codec/damaged.py` breaks each rule of a blob, and `tests/codec/test_hostile.py` shows that to every backend; the
kernels' own checks are those of `test_rans.py` and `test_symbols.py`. Here are what only the device has: caches in
pages, and many blobs in one call.
"""

from __future__ import annotations

import struct
from functools import cache

import pytest
import torch
from tests.codec import forging
from tests.codec.forging import START, correlated_chunk, reseal, sections_of, with_section
from tests.conftest import decoded_layers
from tests.kernels.coding import Pages

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CorruptError, CuveeError, FormatError, InputError
from cuvee.codec.format.container import Scheme, read_header
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.schemes import coefficients, lossless

ROPE = Rope((1.0, 0.1))
LAYOUT = KVLayout("tiny", (LayerLayout(1, 4, 3, ROPE), LayerLayout(2, 4, 3, ROPE)), "float32", 4096)
WIDE = KVLayout("wide", (LayerLayout(1, 260, 260, None),), "float32", 4096)
SCHEMES = ("lossless", "transform")
ROUNDING = 2.0**-14  # of sums and products, relative to the largest value of a unit


def chunk_of(tokens: int, seed: int, layout: KVLayout = LAYOUT) -> KVChunk:
    return correlated_chunk(seed, tokens, START, layout)


def codec_of(scheme: str, backend: str = "numba", step: float = 0.02, layout: KVLayout = LAYOUT) -> Codec:
    return forging.codec_of(scheme, backend, step, layout)


def encoded(scheme: str, chunk: KVChunk, per_stream: int, step: float = 0.02) -> bytes:
    """Return a blob whose streams have this many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (coefficients, lossless):
            patch.setattr(module, "tokens_per_stream", lambda *_: per_stream)
        return codec_of(scheme, step=step, layout=chunk.layout).encode(chunk)


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


def test_sections_without_room_for_a_stream_header_are_refused(device: torch.device) -> None:
    # The last thing in what goes to the device, where no other bytes follow: 16 bytes are its granule.
    blob = encoded("transform", chunk_of(3, 57), 128, 0.5)
    sections = sections_of(blob)
    first = sections[0] + bytes(8 + -len(sections[0]) % 16)
    for length in range(1, 20):
        with pytest.raises(FormatError):
            codec_of("transform", "triton", 0.5).decode(reseal(blob, [first, sections[1][:length]]), device=device)


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


def test_sections_without_a_component(device: torch.device) -> None:
    step = 128.0
    blob = encoded("transform", chunk_of(1, 50), 128, step)
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
    blob = encoded(scheme, chunk_of(tokens, 51), per_stream, step)
    assert assert_agree(scheme, blob, device, step) is not None


def test_lengths_of_four_bytes(device: torch.device) -> None:
    step = 0.06
    blob = encoded("transform", chunk_of(2, 52, WIDE), 128, step)
    section = bytearray(sections_of(blob)[0])
    length = 20 + 4
    words, _, log2 = struct.unpack_from("<III", section)
    assert log2 == 7 and struct.unpack_from("<I", section, length) == (words,)
    assert assert_agree("transform", blob, device, step, WIDE) is not None
    for wrong in (words + (1 << 16), 2**32 - 1):
        struct.pack_into("<I", section, length, wrong)
        assert assert_agree("transform", with_section(blob, bytes(section)), device, step, WIDE) is None


# --- caches


BLOCKS, BLOCK_TOKENS = 4, 4
SLOTS = BLOCKS * BLOCK_TOKENS


def guarded(layout: KVLayout, device: torch.device | str, blocks: int = BLOCKS) -> Pages:
    """A small cache."""
    return Pages(layout, torch.device(device), None, blocks, BLOCK_TOKENS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_slots_beyond_the_cache_are_refused_and_not_written(scheme: str, device: torch.device) -> None:
    blob = encoded(scheme, chunk_of(4, 53), 4)
    codec = codec_of(scheme, "triton")
    for wrong in (SLOTS, -2, 2**32 + 1, -(2**63), 2**63 - 1):
        pages = guarded(LAYOUT, device)
        slots = torch.tensor([1, 9, wrong, 4], device=device)
        pending = codec.decode_paged([blob], pages.cache, [slots])
        for _ in range(2):
            with pytest.raises(InputError, match="beyond the cache for chunk 0, layers 0 … 0"):
                pending.check()
        assert pages.unharmed([1, 9, 4])
    for wrong in (SLOTS, NOWHERE - 1):
        with pytest.raises(InputError, match="beyond the cache"):
            codec.encode(PagedChunks(pages.cache, [torch.tensor([0, wrong], device=device)], [0]))


def test_a_slot_given_twice_gets_one_of_its_tokens(device: torch.device) -> None:
    blob = encoded("lossless", chunk_of(3, 54), 4)
    pages = guarded(LAYOUT, device)
    codec_of("lossless", "triton").decode_paged([blob], pages.cache, [torch.tensor([5, 5, 2], device=device)]).check()
    values = codec_of("lossless").decode(blob).values[1]
    assert torch.equal(pages.by_slot(3)[2], values[2])
    assert all(bool((pages.by_slot(3)[5] == values[:2]).any(0)[h].all()) for h in range(2))
    assert pages.unharmed([5, 2])


@pytest.mark.parametrize(("blocks", "block_tokens"), [(0, 4), (4, 0)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cache_without_slots(scheme: str, blocks: int, block_tokens: int, device: torch.device) -> None:
    blob = encoded(scheme, chunk_of(2, 55), 4)
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


def damaged(blob: bytes, section: int) -> bytes:
    """A word of a section without escapes, or its first state, changed: only its streams tell."""
    forged = bytearray(sections_of(blob)[section])
    forged[-3 if read_header(blob).schemes[0] is Scheme.LOSSLESS else 20] ^= 1
    return with_section(blob, bytes(forged), section)


PLACES = ([3, 0, 7, 12], [8, 15, 1, 2], [4, 9, 10, 6])


@pytest.mark.parametrize(("scheme", "section"), [("transform", 1), ("lossless", 0)])
def test_a_damaged_chunk_beside_good_ones_is_named(scheme: str, section: int, device: torch.device) -> None:
    tokens = 20 if scheme == "lossless" else 4
    places = torch.randperm(64, generator=torch.Generator().manual_seed(0))[: 3 * tokens].split(tokens)
    chunks = [chunk_of(tokens, seed) for seed in (60, 61, 62)]
    blobs = [encoded(scheme, chunk, 32) for chunk in chunks]
    pages, expected = guarded(LAYOUT, device, 16), guarded(LAYOUT, "cpu", 16)
    codec_of(scheme).decode_paged(blobs, expected.cache, places).check()
    bad = [blobs[0], damaged(blobs[1], section), blobs[2]]
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


def test_numbers_count_all_blobs_of_a_call_whatever_their_schemes(device: torch.device) -> None:
    schemes = ("transform", "lossless", "transform")
    blobs = [encoded(scheme, chunk_of(4, 60), 32) for scheme in schemes]
    slots = [torch.tensor(at, device=device) for at in PLACES]
    cache, codec = guarded(LAYOUT, device).cache, codec_of("transform", "triton")
    with pytest.raises(CorruptError, match=r"^chunk 2, layers 1"):
        codec.decode_paged([*blobs[:2], damaged(blobs[2], 1)], cache, slots).check()
    grown = with_section(blobs[2], sections_of(blobs[2])[0] + bytes(8))
    with pytest.raises(FormatError, match="section 0 of blob 2: "):
        codec.decode_paged([*blobs[:2], grown], cache, slots)


def test_only_the_layers_asked_for_are_read(device: torch.device) -> None:
    codec, blob = codec_of("transform", "triton"), encoded("transform", chunk_of(4, 63), 32)
    forged = damaged(blob, 1)
    decoded_layers(codec, forged, range(1), device=device)
    with pytest.raises(CorruptError, match=r"^chunk 0, layers 1 … 1: its streams"):
        decoded_layers(codec, forged, range(1, 2), device=device)
