"""`Codec.open`: a blob is verified once, by the codec that decodes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.chunks import same
from tests.conftest import LAYOUTS, decoded_layers, make_codec, synthetic_chunk

from cuvee.codec.chunk import KVChunk
from cuvee.codec.coding import opening as module
from cuvee.codec.coding.open_blob import Expected
from cuvee.codec.errors import CorruptError, FormatError, InputError, KeyMismatchError
from cuvee.codec.format.container import inspect, read_header
from cuvee.codec.paged import PagedCache

KEY = b"sixteen bytes of it"


@pytest.fixture
def chunk() -> KVChunk:
    return synthetic_chunk(LAYOUTS["gqa"], 40, start=7)


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_a_blob_may_lie_in_any_memory(chunk: KVChunk, scheme: str) -> None:
    """In every n-th byte, in items that are no bytes, in several dimensions: bytes are bytes."""
    codec = make_codec("gqa", scheme, key=KEY, **({} if scheme == "lossless" else {"step": 0.1}))
    blob = codec.encode(chunk)
    spread = bytearray(2 * len(blob))
    spread[::2] = blob
    views: list[Any] = [memoryview(spread)[::2], memoryview(blob[::-1])[::-1], memoryview(bytearray(blob)).cast("c")]
    if len(blob) % 4 == 0:
        views += [memoryview(blob).cast("I"), memoryview(blob).cast("B", (4, len(blob) // 4))]
    for view in views:
        assert same(codec.decode(view), chunk if scheme == "lossless" else codec.decode(blob))
        assert codec.open(view, expected=Expected(40, 7, "float32")).tokens == 40
        assert inspect(view) == inspect(blob) and read_header(view) == read_header(blob)
    with pytest.raises(FormatError, match="too few"):
        codec.decode(memoryview(b""))


@pytest.mark.parametrize("bad", [None, 7, "a blob", [1, 2]])
def test_what_holds_no_bytes_is_no_blob(bad: Any) -> None:
    codec = make_codec("gqa", "lossless")
    for call in (codec.decode, codec.open, inspect, read_header):
        with pytest.raises(InputError, match=r"^blob: must be bytes or a memoryview, got"):
            call(bad)


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_every_decode_takes_it_and_verifies_nothing_again(
    chunk: KVChunk, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = make_codec("gqa", scheme, key=KEY, **({} if scheme == "lossless" else {"step": 0.1}))
    blob = codec.encode(chunk, associated_data=b"here")
    plain = codec.decode(blob, associated_data=b"here")
    opened = codec.open(blob, associated_data=b"here")
    monkeypatch.setattr(module, "verify_tag", lambda *_: pytest.fail("the tag was verified again"))
    monkeypatch.setattr(module, "read_header", lambda *_: pytest.fail("the header was read again"))
    assert same(codec.decode(opened), plain)
    assert same(codec.decode(opened, tokens=range(3, 9)), plain.slice(3, 9))
    keys, values = decoded_layers(codec, opened, range(1, 2))
    assert torch.equal(keys[0], plain.keys[1]) and torch.equal(values[0], plain.values[1])
    cache = PagedCache.dense(chunk.layout, [torch.zeros_like(k) for k in plain.keys], list(plain.values))
    codec.decode_paged([opened], cache, [torch.arange(40)]).check()
    assert all(torch.equal(a[0], b) for a, b in zip(cache.keys, plain.keys, strict=True))


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_all_sections_can_be_verified_before_any_is_decoded(chunk: KVChunk, scheme: str) -> None:
    codec = make_codec("gqa", scheme, **({} if scheme == "lossless" else {"step": 0.1}))
    blob = codec.encode(chunk)
    codec.verify(codec.open(blob))
    opened = codec.open(blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.raises(CorruptError, match=r"^section 2: its checksum"):
        codec.verify(opened)


def test_only_the_codec_that_opened_it_takes_it(chunk: KVChunk) -> None:
    """A codec without a key would otherwise vouch for bytes to one that has a key."""
    trusting, keyed = make_codec("gqa", "lossless"), make_codec("gqa", "lossless", key=KEY)
    forged = trusting.open(trusting.encode(chunk))
    for other in (keyed, make_codec("gqa", "lossless"), copy.copy(keyed)):
        with pytest.raises(InputError, match=r"^blob: must be opened by this codec"):
            other.decode(forged)
    with pytest.raises(KeyMismatchError):
        keyed.open(trusting.encode(chunk))


def test_a_run_of_a_dense_cache_is_read_without_a_copy(chunk: KVChunk) -> None:
    cache = PagedCache.dense(chunk.layout, chunk.keys, chunk.values)
    part = cache.chunk(torch.arange(5, 20), 12)
    assert part.keys[1].data_ptr() == chunk.keys[1][5:].data_ptr() and part.start == 12
    assert same(part, chunk.slice(5, 20))
    for slots in ([5, 7, 6], [3, 3], [9, 8]):
        copied = cache.chunk(torch.tensor(slots), 0)
        assert torch.equal(copied.keys[0], chunk.keys[0][slots])
    with pytest.raises(InputError, match=r"^slots: must be 0 … 39 in layer 0, got 38 … 40"):
        cache.chunk(torch.arange(38, 41), 0)
