"""Opaque pages: whatever an engine hands over comes back bit for bit, or is refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.integrations.pages.forging import forge
from tests.integrations.stores.dict_store import DictStore
from tests.waiting import PATIENCE

from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.states import States
from cuvee.integrations.pages import Counts, OpaquePage, PageStore
from cuvee.integrations.pages.opaque import LAYOUT, decode_opaque, encode_opaque
from cuvee.naming.identity import Identity, PageNames, Scope

CODEC = Codec.without_profile(LAYOUT, threads=1)
DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2, torch.complex64,
    torch.float8_e8m0fnu,
)  # fmt: skip


def raw(page: OpaquePage) -> list[bytes]:
    return [each.reshape(-1).view(torch.uint8).numpy().tobytes() for each in page.regions]


def region(dtype: torch.dtype, count: int, seed: int, smooth: bool = True) -> torch.Tensor:
    """Bytes of an engine: exponents that are alike and noise, or anything at all."""
    generator = torch.Generator().manual_seed(seed)
    if (smooth and dtype.is_floating_point and dtype.itemsize > 1) or dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return torch.randn(count, generator=generator).to(dtype)
    made = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (made % 2 if dtype == torch.bool else made).view(dtype)


def blank(page: OpaquePage) -> OpaquePage:
    """Memory like a page's, with other contents."""
    return OpaquePage(page.kind, [(each.view(torch.uint8) * 0).view(each.dtype) for each in page.regions])


def test_hundreds_of_pages_of_any_description_come_back_bit_for_bit() -> None:
    draw = random.Random(65)
    for number in range(300):
        count = draw.choice([0, 1, 3, 31, 32, 33, 500, 512, 513, 2048, 2**12 + 1])
        dtypes = draw.choices(DTYPES, k=draw.choice([1, 1, 2, 5]))
        page = OpaquePage("any", [region(each, count, number, number % 3 > 0) for each in dtypes])
        tokens, into = draw.randrange(1, 1 << 20), blank(page)
        blob = encode_opaque(CODEC, page, tokens, b"")
        assert len(blob) <= page.nbytes + 500
        decode_opaque(CODEC, blob, into, tokens, b"")
        assert raw(into) == raw(page), (number, count, dtypes)


def test_one_region_is_coded_where_it_lies() -> None:
    page = OpaquePage("any", [region(torch.bfloat16, 4096, 1)])
    given: list[torch.Tensor] = []
    into, codec = blank(page), Codec.without_profile(LAYOUT, threads=1)
    encode, decode = codec.encode_states, codec.decode_states

    def encoded(states: States, **options: bytes) -> bytes:
        given.extend(states.tensors.values())
        return encode(states, **options)

    def decoded(blob: bytes, **options: Any) -> States:
        states = decode(blob, **options)
        given.extend(states.tensors.values())
        return states

    codec.encode_states, codec.decode_states = encoded, decoded  # type: ignore[assignment, method-assign]
    decode_opaque(codec, encode_opaque(codec, page, 16, b""), into, 16, b"")
    memory = [each.regions[0].data_ptr() for each in (page, into)]
    assert [each.data_ptr() for each in given if len(each)] == memory and raw(into) == raw(page)


def test_a_region_may_begin_anywhere() -> None:
    whole = region(torch.uint8, 8195, 1)
    for first in (1, 2):
        target = torch.zeros_like(whole)
        page, into = OpaquePage("any", [whole[first:]]), OpaquePage("any", [target[first:]])
        decode_opaque(CODEC, encode_opaque(CODEC, page, 16, b""), into, 16, b"")
        assert raw(into) == raw(page) and not target[:first].any()


@pytest.mark.parametrize(
    ("dtype", "ratio"), [(torch.bfloat16, 1.45), (torch.float8_e4m3fn, 1.15), (torch.float32, 1.15)]
)
def test_smooth_pages_are_smaller(dtype: torch.dtype, ratio: float) -> None:
    page = OpaquePage("any", [region(dtype, 1 << 17, 1)])
    assert page.nbytes / len(encode_opaque(CODEC, page, 1, b"")) > ratio


def test_memory_of_another_description_takes_nothing() -> None:
    page = OpaquePage("any", [region(torch.bfloat16, 1024, 1)])
    blob = encode_opaque(CODEC, page, 16, b"")
    others = {
        "dtype": ([torch.zeros(1024, dtype=torch.float16)], 16),
        "shape": ([torch.zeros(2, 512, dtype=torch.bfloat16)], 16),
        "size": ([torch.zeros(1023, dtype=torch.bfloat16)], 16),
        "regions": ([torch.zeros(512, dtype=torch.bfloat16)] * 2, 16),
        "tokens": ([torch.zeros(1024, dtype=torch.bfloat16)], 15),
    }
    for name, (regions, tokens) in others.items():
        with pytest.raises(CuveeError, match="page: must hold") as caught:
            decode_opaque(CODEC, blob, OpaquePage("any", regions), tokens, b"")
        assert caught.value.blames_blob and not any(each.any() for each in regions), name


def test_hostile_blobs_are_refused_by_name_and_write_nothing() -> None:
    draw = random.Random(1)
    page = OpaquePage("any", [region(torch.bfloat16, 1 << 14, 1), region(torch.float8_e4m3fn, 777, 2)])
    blob = encode_opaque(CODEC, page, 16, b"")
    refused = 0
    for _ in range(300):
        data = bytearray(blob)
        for _ in range(draw.choice([1, 1, 4])):
            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        data = data[: draw.choice([len(data), len(data), draw.randrange(len(data))])]
        into = blank(page)
        try:
            decode_opaque(CODEC, bytes(data), into, 16, b"")
        except CuveeError:
            refused += 1
            assert not any(any(each) for each in raw(into))
        else:
            assert raw(into) == raw(page)
    assert refused == 300


SECRET = bytes(range(16))


def stores(store: DictStore, counts: Counts, secret: bytes | None = None, layout: bytes = b"windows") -> PageStore:
    codec = Codec.without_profile(LAYOUT, threads=1, key=secret)
    names = PageNames(Identity("m", "", layout, b"", "lossless"), Scope(), "mine", 16)
    return PageStore(codec, store, names, counts=counts, lookup_timeout=PATIENCE)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_store_keeps_opaque_pages_and_counts_their_kinds(secret: bytes | None) -> None:
    store, counts = DictStore(), Counts()
    pages, names = stores(store, counts, secret), [b"a", b"b", b"c"]
    memory = [
        OpaquePage(kind, [region(torch.float32, 5000, at)]) for at, kind in enumerate(["state", "state", "window"])
    ]
    assert pages.save_opaque(memory, names) == [True] * 3 == pages.stored(names)
    assert pages.save_opaque(memory, names) == [True] * 3
    into = [blank(each) for each in memory]
    assert pages.load_opaque(into, names) == [True] * 3
    assert [raw(each) for each in into] == [raw(each) for each in memory]
    assert pages.load_opaque(into[:1], [b"none"]) == [False]
    got = counts.snapshot()
    assert (got["saved_pages"], got["kept_pages"], got["loaded_pages"], got["missed_pages"]) == (3, 3, 3, 1)
    assert got["raw_bytes"] == got["loaded_raw_bytes"] == 60000
    assert got["blob_bytes"] == got["loaded_blob_bytes"] == sum(map(len, store.entries.values())) < 55000
    assert (got["opaque_pages{state}"], got["opaque_pages{window}"]) == (6, 3)
    assert stores(store, counts, secret, b"other").stored(names) == [False] * 3
    pages.close()


def test_a_damaged_or_foreign_entry_is_deleted_and_ends_the_load() -> None:
    store, counts = DictStore(), Counts()
    pages, names = stores(store, counts, SECRET), [b"a", b"b", b"c"]
    memory = [OpaquePage("state", [region(torch.bfloat16, 4096, at)]) for at in range(3)]
    for page, name in zip(memory, names, strict=True):  # several of one call are put in any order
        assert pages.save_opaque([page], [name]) == [True]
    keys = list(store.entries)
    store.entries[keys[1]] = store.entries[keys[0]]  # a sound entry, of another page
    assert pages.load_opaque([blank(each) for each in memory], names) == [True, False, False]
    assert counts.snapshot()["failures{decode}"] == 1 and keys[1] not in store.entries
    assert pages.save_opaque(memory, names) == [True] * 3 and len(store.entries) == 3
    pages.close()


def test_a_forged_entry_is_not_loaded_whatever_it_has_written() -> None:
    store, counts = DictStore(), Counts()
    pages, names = stores(store, counts), [b"a", b"b"]
    memory = [OpaquePage("state", [region(torch.bfloat16, 4096, at)]) for at in range(2)]
    for page, name in zip(memory, names, strict=True):
        assert pages.save_opaque([page], [name]) == [True]
    first, _ = forge(store)
    into = [blank(each) for each in memory]
    assert pages.load_opaque(into, names) == [False, False] and first not in store.entries
    assert any(raw(into[0])[0]), "a part is written"
    assert counts.snapshot()["failures{decode}"] == 1 and "loaded_pages" not in counts.snapshot()
    assert pages.save_opaque(memory[:1], names[:1]) == [True] == pages.load_opaque(into[:1], names[:1])
    assert raw(into[0]) == raw(memory[0])
    pages.close()
