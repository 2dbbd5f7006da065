"""A blob is never much larger than a lossless one, whatever a profile expects of the chunk."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.conftest import LAYOUTS, fitted_to, synthetic_chunk
from tests.predicting import VOCABULARY, predicting

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.format.container import Header, read_header
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile

TOKENS = 60
LAYOUT = LAYOUTS["bfloat16"]


def misled() -> Profile:
    """A profile whose predictions are far from all values, as those from the ids of another text."""
    own = predicting(fitted_to(LAYOUT))
    learned = []
    for section in own.learned:
        assert section.token_map is not None
        learned.append(replace(section, token_map=replace(section.token_map, scale=section.token_map.scale * 1e4)))
    return Profile(
        own.layout, own.group, own.source, own.family, tuple(learned), min_step_index=own.min_step_index,
        token_table=own.token_table,
    )  # fmt: skip


def chunk(seed: int = 0, scale: float = 1.0, ids: bool = True) -> KVChunk:
    whole = synthetic_chunk(LAYOUT, TOKENS, seed)
    keys, values = ([unit * scale for unit in units] for units in (whole.keys, whole.values))
    tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(seed)) if ids else None
    return KVChunk(keys, values, LAYOUT, 0, tokens)


def headers(parts: tuple[bytes, ...]) -> list[Header]:
    return [read_header(part) for part in parts]


def size(parts: tuple[bytes, ...]) -> int:
    return sum(map(len, parts))


@pytest.mark.parametrize("refinements", [0, 1])
def test_a_chunk_is_coded_without_ids_that_mislead(refinements: int) -> None:
    codec = Codec(misled(), step=0.5, refinements=refinements)
    given, plain = codec.encode_parts(chunk()), codec.encode_parts(chunk(ids=False))
    assert given == plain and len(given) == 1 + refinements
    assert not headers(given)[0].token_id_bytes and not headers(given)[0].lossless
    assert codec.open(given[0], expected=Expected(TOKENS, 0, "bfloat16")).tokens == TOKENS


@pytest.mark.parametrize("refinements", [0, 1])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.usefixtures("untold")
def test_a_chunk_that_fits_no_profile_is_coded_without_loss(
    ids: bool, refinements: int, caplog: pytest.LogCaptureFixture
) -> None:
    codec, exact = Codec(misled(), step=0.5, refinements=refinements), Codec(misled(), "lossless")
    strange = [chunk(seed, scale=1000, ids=ids) for seed in range(2)]
    with caplog.at_level(logging.WARNING, logger="cuvee.codec.coding.encoding"):
        coded = [codec.encode_parts(each) for each in strange]
    assert coded == [(exact.encode(each),) for each in strange]
    assert len([record for record in caplog.records if "coded without loss" in record.message]) == 1
    opened = codec.open(coded[0][0], expected=Expected(TOKENS, 0, "bfloat16"))
    assert torch.equal(codec.decode(opened).keys[1], strange[0].keys[1])


@pytest.mark.parametrize("backend", ["reference", "numba"])
def test_chunks_of_pages_are_coded_alike(backend: str) -> None:
    check_pages(Codec(misled(), step=0.5, backend=backend), torch.device("cpu"))


def test_chunks_of_pages_are_coded_alike_on_a_device(device: torch.device) -> None:
    check_pages(Codec(misled(), step=0.5, backend="triton"), device)


def check_pages(codec: Codec, where: torch.device) -> None:
    """One of three chunks is strange, one has no ids: each is coded as by itself."""
    chunks = [chunk(0), chunk(1, scale=1000), chunk(2, ids=False)]
    alone = [Codec(misled(), step=0.5).encode(each) for each in chunks]
    assert [read_header(blob).lossless for blob in alone] == [False, True, False]
    keys, values = (
        [torch.cat(units)[None].to(where) for units in zip(*each, strict=True)]
        for each in ([own.keys for own in chunks], [own.values for own in chunks])
    )
    cache = PagedCache(LAYOUT, keys, values)
    slots = list(torch.arange(3 * TOKENS, device=where).view(3, TOKENS))
    paged = PagedChunks(cache, slots, [0] * 3, tokens=[own.token_ids for own in chunks], following=[0] * 3)
    blobs = codec.encode(paged)
    assert [len(blob) for blob in blobs] == [len(blob) for blob in alone]
    assert blobs[1] == alone[1]
    empty = [[torch.zeros_like(unit) for unit in units] for units in (keys, values)]
    into = PagedCache(LAYOUT, empty[0], empty[1])
    codec.decode_paged([codec.open(blob) for blob in blobs], into, slots).check()
    assert torch.equal(into.chunk(slots[1], 0).values[0].cpu(), chunks[1].values[0])


def few_values(kind: str, layout: KVLayout, tokens: int) -> KVChunk:
    """A cache that few bytes hold without loss, and that no profile expects."""
    noise = torch.Generator().manual_seed(7)

    if kind == "usual":
        return synthetic_chunk(layout, tokens)

    def unit(layer: int, heads: int, size: int) -> torch.Tensor:
        shape, row = (tokens, heads, size), torch.randn(1, heads, size, generator=noise)
        if kind == "zeros" or (kind == "most layers" and layer != 1):
            return torch.zeros(shape)
        if kind == "two tokens":
            return torch.where(torch.arange(tokens)[:, None, None] % 2 > 0, row, -row)
        if kind == "signs":
            return torch.randint(0, 2, shape, generator=noise) * 2.0 - 1
        if kind == "padding":
            return torch.randn(shape, generator=noise) * (torch.arange(tokens) < tokens // 16)[:, None, None]
        return torch.randn(shape, generator=noise) * (torch.rand(shape, generator=noise) < 0.02)

    made = [
        [unit(index, layer.kv_heads, size).to(layout.torch_dtype) for index, layer in enumerate(layout.layers)]
        for size in (layout.layers[0].head_dim, layout.layers[0].value_dim)
    ]
    ids = torch.randint(0, VOCABULARY, (tokens,), generator=noise)
    return KVChunk(made[0], made[1], layout, 0, ids)


FEW = ["zeros", "two tokens", "signs", "padding", "sparse", "most layers"]


def wide(dtype: str) -> KVLayout:
    """Many layers, of which a sample must not see only some kinds."""
    return KVLayout("wide", LAYOUT.layers[:1] * 12, dtype, LAYOUT.max_positions)


@cache
def codec_of(dtype: str, **arguments: Any) -> Codec:
    return Codec(predicting(fitted_to(wide(dtype))), **arguments)


def lossless_size(chunk: KVChunk) -> int:
    return len(codec_of(chunk.layout.dtype, quality="lossless").encode(chunk))


@pytest.mark.parametrize(
    ("kind", "dtype", "refinements"),
    [(kind, ("bfloat16", "float16", "float32")[number % 3], number % 2) for number, kind in enumerate(FEW)],
)
def test_a_blob_is_not_larger_than_one_without_loss(kind: str, dtype: str, refinements: int) -> None:
    shorter = False
    for tokens, step in ((20, 2.0), (150, 0.25)):
        chunk = few_values(kind, wide(dtype), tokens)
        for given in (chunk, chunk.with_token_ids(None)):
            parts = codec_of(dtype, step=step, refinements=refinements).encode_parts(given)
            shorter |= headers(parts)[0].lossless
            assert size(parts) <= 1.01 * lossless_size(given), (tokens, step)
    assert shorter or dtype == "float32", "some of them, or this kind shows nothing"


def test_pages_that_repeat_values_are_coded_alike() -> None:
    check_repeating_pages(codec_of("bfloat16", step=0.25, backend="numba"), torch.device("cpu"), KINDS)


def test_pages_that_repeat_values_are_coded_alike_on_a_device(device: torch.device) -> None:
    check_repeating_pages(codec_of("bfloat16", step=0.25, backend="triton"), device, KINDS[:3])


KINDS = ["usual", "zeros", "signs", *FEW]


def check_repeating_pages(codec: Codec, where: torch.device, kinds: list[str]) -> None:
    """Chunks of several lengths in scattered slots of blocks, with usual ones among them."""
    lengths = [17 + 16 * number for number in range(len(kinds))]
    chunks = [few_values(kind, wide("bfloat16"), tokens) for kind, tokens in zip(kinds, lengths, strict=True)]
    alone = [codec_of("bfloat16", step=0.25).encode(each) for each in chunks]
    assert [read_header(blob).lossless for blob in alone][:3] == [False, True, True]
    mixed = torch.randperm(sum(lengths) + 15, generator=torch.Generator().manual_seed(0))
    slots = list(mixed[: sum(lengths)].split(lengths))
    pages = [torch.zeros(len(mixed) // 16 + 1, 16, 2, 16, dtype=torch.bfloat16, device=where) for _ in range(24)]
    cache = PagedCache(wide("bfloat16"), pages[:12], pages[12:])
    for each, at in zip(chunks, slots, strict=True):
        cache.write(each.keys, each.values, at.to(where))
    ids = [each.token_ids for each in chunks]
    blobs = codec.encode(PagedChunks(cache, [at.to(where) for at in slots], [0] * len(kinds), tokens=ids))
    assert [len(blob) for blob in blobs] == [len(blob) for blob in alone]


def test_a_chunk_of_usual_size_is_coded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Codec(predicting(fitted_to(LAYOUT)), step=1.0)
    calls: list[int] = []
    backend = type(codec._backends.of("cpu"))
    encode = backend.encode

    def counted(*given: Any) -> Any:
        calls.append(1)
        return encode(*given)

    monkeypatch.setattr(backend, "encode", counted)
    codec.encode(chunk())
    assert calls == [1]
