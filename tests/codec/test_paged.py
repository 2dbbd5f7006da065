"""`PagedCache` and the paged half of `Codec`, on the CPU: any physical order, any slots, fp8 by value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.conftest import LAYOUTS, make_codec, synthetic_chunk

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import CorruptError, InputError, ProfileMismatchError, UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.pages import PageOrder, Pages, PermutedPages

BLOCKS, BLOCK_TOKENS = 5, 16
SLOTS = BLOCKS * BLOCK_TOKENS

# Logical order [blocks, tokens, heads, dims]; the permutation is that of the memory. The last is K^T pages.
ORDERS = {
    "blocks-tokens-heads": (0, 1, 2, 3),
    "blocks-heads-tokens": (0, 2, 1, 3),
    "heads-blocks-tokens": (2, 0, 1, 3),
    "transposed": (0, 2, 3, 1),
}
ORDERED = "blocks-tokens-heads"
PERMUTED = "permuted"  # keys and values of a block mixed, in no order, with a gap before the next block
GAP = 3


def poisoned(
    layout: KVLayout,
    order: str = ORDERED,
    dtype: torch.dtype | None = None,
    key_scales: list[float] | None = None,
    value_scales: list[float] | None = None,
) -> PagedCache:
    """A cache full of sevens, its units in the physical order named."""
    if order == PERMUTED:
        pairs = [permuted(layer, dtype or layout.torch_dtype) for layer in layout.layers]
        return PagedCache(layout, [k for k, _ in pairs], [v for _, v in pairs], key_scales, value_scales)
    permutation = ORDERS[order]

    def unit(heads: int, size: int) -> torch.Tensor:
        shape = (BLOCKS, BLOCK_TOKENS, heads, size)
        memory = torch.full([shape[axis] for axis in permutation], 7.0).to(dtype or layout.torch_dtype)
        return memory.permute([permutation.index(axis) for axis in range(4)])

    keys = [unit(layer.kv_heads, layer.head_dim) for layer in layout.layers]
    values = [unit(layer.kv_heads, layer.value_dim) for layer in layout.layers]
    return PagedCache(layout, keys, values, key_scales, value_scales)


def permuted(
    layer: LayerLayout, dtype: torch.dtype, blocks: int = BLOCKS, block_tokens: int = BLOCK_TOKENS
) -> tuple[Pages, Pages]:
    """K and V of a layer in one memory; every call makes an order of its own, always the same."""
    heads, sizes = layer.kv_heads, (layer.head_dim, layer.value_dim)
    count = block_tokens * heads * sum(sizes)
    places = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    parts = places.split([block_tokens * heads * size for size in sizes])
    memory = torch.full([blocks * (count + GAP)], 7.0).to(dtype)
    orders = [
        PageOrder(part.view(block_tokens, heads, size), blocks, count + GAP)
        for part, size in zip(parts, sizes, strict=True)
    ]
    keys, values = (PermutedPages(memory[: order.span], order) for order in orders)
    return keys, values


def scattered(tokens: int, seed: int = 0) -> torch.Tensor:
    """Distinct slots in no order."""
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:tokens]


def written(cache: PagedCache, slots: torch.Tensor) -> list[torch.Tensor]:
    """What lies at `slots`, keys and values of each layer in turn: `[T, H, D]`."""
    block, token = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    if cache.permuted:
        cache, block, token = cache.copy(slots), torch.zeros_like(slots), torch.arange(len(slots))
    units = [unit for pair in zip(cache.keys, cache.values, strict=True) for unit in pair]
    # torch before 2.9 cannot index fp8 on a CPU.
    return [
        unit.view(torch.uint8)[block, token].view(unit.dtype) if cache.scaled else unit[block, token] for unit in units
    ]


def tensors(chunk: KVChunk) -> list[torch.Tensor]:
    """Keys and values of each layer in turn."""
    return [unit for pair in zip(chunk.keys, chunk.values, strict=True) for unit in pair]


@pytest.mark.parametrize("order", [*ORDERS, PERMUTED])
@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_paged_equals_dense(order: str, scheme: str) -> None:
    """`test_rows.py` decodes into each order."""
    layout = LAYOUTS["bfloat16"]
    codec = make_codec("bfloat16", scheme, **({} if scheme == "lossless" else {"step": 0.5}))
    chunk = synthetic_chunk(layout, 37, start=11)
    slots = scattered(37)
    cache = poisoned(layout, order)
    cache.write(chunk.keys, chunk.values, slots)
    (blob,) = codec.encode(PagedChunks(cache, [slots], [11]))
    assert blob == codec.encode(chunk)


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
def test_a_damaged_blob_is_refused_even_where_no_token_is_wanted(scheme: str) -> None:
    """As on a GPU, which decodes all of a chunk."""
    codec = make_codec("gqa", scheme, **({} if scheme == "lossless" else {"step": 0.5}))
    blob = bytearray(codec.encode(synthetic_chunk(LAYOUTS["gqa"], 20)))
    cache, nowhere = poisoned(LAYOUTS["gqa"]), torch.full((20,), NOWHERE)
    codec.decode_paged([bytes(blob)], cache, [nowhere]).check()
    blob[-30] ^= 1
    with pytest.raises(CorruptError):
        codec.decode_paged([bytes(blob)], cache, [nowhere]).check()
    assert all(bool((unit == 7).all()) for unit in written(cache, torch.arange(SLOTS)))


@pytest.mark.parametrize("order", [ORDERED, PERMUTED])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_is_transcoded_by_value(dtype: torch.dtype, order: str) -> None:
    layout = LAYOUTS["bfloat16"]
    scales = [0.5, 0.25, 2.0], [1.0, 0.125, 0.5]
    chunk = synthetic_chunk(layout, 24, start=3)
    slots = scattered(24)
    cache = poisoned(layout, order, dtype, *scales)
    cache.write(chunk.keys, chunk.values, slots)
    read = cache.read(slots, 3)
    for index, (got, want) in enumerate(zip(tensors(read), tensors(chunk), strict=True)):
        scale = scales[index % 2][index // 2]
        torch.testing.assert_close(got.float(), (want.float() / scale).to(dtype).float() * scale)
    codec = make_codec("bfloat16", "lossless")
    (blob,) = codec.encode(PagedChunks(cache, [slots], [3]))
    again = poisoned(layout, order, dtype, *scales)
    codec.decode_paged([blob], again, [slots]).check()
    for got, want in zip(written(again, slots), written(cache, slots), strict=True):
        torch.testing.assert_close(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("order", [ORDERED, PERMUTED])
def test_finite_values_stay_finite_in_pages_of_another_dtype(order: str) -> None:
    chunk, slots = synthetic_chunk(LAYOUTS["bfloat16"], 24), scattered(24)
    chunk.values[1][3, 0, :2] = torch.tensor([1e5, -1e30])
    chunk.values[1][5, 0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    cache = poisoned(LAYOUTS["bfloat16"], order, torch.float16)
    codec = make_codec("bfloat16", "lossless")
    codec.decode_paged([codec.encode(chunk)], cache, [slots]).check()
    values = written(cache, slots)[3]
    assert values[3, 0, :2].tolist() == [65504, -65504] and values[5, 0, :2].tolist() == [torch.inf, -torch.inf]
    assert bool(values[5, 0, 2].isnan()) and int(values.isfinite().logical_not().sum()) == 3
    # What fp8 times its scale is beyond the range of the layout's dtype.
    scaled = poisoned(LAYOUTS["float16"], order, torch.float8_e5m2, value_scales=[2.0] * 3)
    large = synthetic_chunk(LAYOUTS["float16"], 24)
    large.values[2][:] = 65504
    scaled.write(large.keys, [2 * large.values[0].float(), large.values[1], 3 * large.values[2].float()], slots)
    assert scaled.read(slots, 0).values[2].unique().tolist() == [65504]


@pytest.mark.parametrize("order", [*ORDERS, PERMUTED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_copy_is_dense_and_holds_what_is_stored(dtype: torch.dtype, order: str) -> None:
    layout = LAYOUTS["bfloat16"]
    scales = ([0.5, 0.25, 2.0], [1.0, 0.125, 0.5]) if dtype == torch.float8_e4m3fn else (None, None)
    cache, slots = poisoned(layout, order, dtype, *scales), scattered(24)
    chunk = synthetic_chunk(layout, 24)
    cache.write(chunk.keys, chunk.values, slots)
    copy = cache.copy(slots)
    assert (copy.dtype, copy.key_scales, copy.value_scales) == (dtype, cache.key_scales, cache.value_scales)
    assert all(copy.rows(index) is not None for index in range(layout.num_layers))
    for got, want in zip(tensors(copy.read(torch.arange(24), 0)), tensors(cache.read(slots, 0)), strict=True):
        assert torch.equal(got, want)
    cache.write([torch.zeros_like(k) for k in chunk.keys], [torch.zeros_like(v) for v in chunk.values], slots)
    assert float(copy.read(torch.arange(24), 0).keys[0].float().abs().max()) > 0


def test_a_permuted_cache_has_no_tensors_to_show() -> None:
    layout = LAYOUTS["gqa"]
    strided, mixed = poisoned(layout), poisoned(layout, PERMUTED)
    assert mixed.permuted and not strided.permuted
    mixed = PagedCache(layout, strided.keys, [permuted(layer, strided.dtype)[1] for layer in layout.layers])
    assert mixed.permuted and mixed.rows(0) is None and len(mixed.keys) == 3
    with pytest.raises(UnsupportedModelError, match=r"at fixed strides for the backend 'triton', got permuted pages"):
        mixed.values  # noqa: B018


def test_an_order_is_checked() -> None:
    offsets = torch.arange(24).view(2, 3, 4)
    order = PageOrder(offsets, 5, 24)
    assert order.span == 5 * 24
    with pytest.raises(InputError, match=r"^memory: must be contiguous \[120\], got \[121\]"):
        PermutedPages(torch.zeros(121), order)
    with pytest.raises(
        UnsupportedModelError, match=r"^memory: must be on the CPU if its values lie at no fixed strides, got meta"
    ):
        PermutedPages(torch.zeros(120, device="meta"), order)
    # A block that reaches into the next: what comes between belongs to it, or does not.
    interleaved = (torch.arange(24) // 4 * 20 + torch.arange(24) % 4).view(2, 3, 4)
    assert PageOrder(interleaved, 5, 4).span == 5 * 20 + 4 * 4 + 4
    for wrong, blocks, stride in (
        (offsets.clone().fill_(1), 1, 24), (offsets // 2, 1, 24), (offsets, 2, 23), (offsets, 5, 1),
        (interleaved, 6, 4), (offsets * 2, 13, 4),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"^offsets: must be a permutation"):
            PageOrder(wrong, blocks, stride)
    for wrong in (offsets.int(), offsets[0], offsets - 1, offsets[:0]):
        with pytest.raises(InputError, match=r"offsets: must be int64 \[block_tokens, heads, dim\] of at least 0"):
            PageOrder(wrong, 5, 24)
    with pytest.raises(InputError, match="blocks, block_stride: must be at least 1"):
        PageOrder(offsets, 0, 24)


def test_shapes_and_dtypes_are_checked() -> None:
    layout = LAYOUTS["gqa"]
    good = poisoned(layout)
    keys, values = good.keys, good.values
    with pytest.raises(InputError, match=r"^keys\[1\]: must have shape"):
        PagedCache(layout, [keys[0], keys[1][..., :3], keys[2]], values)
    with pytest.raises(InputError, match=r"^keys\[1\]: must have shape"):
        PagedCache(layout, [keys[0], permuted(LayerLayout(2, 3, 3, None), keys[1].dtype)[0], keys[2]], values)
    with pytest.raises(InputError, match=r"^values\[2\]: must be .*, got torch\.float16"):
        PagedCache(layout, keys, [values[0], values[1], values[2].half()])
    with pytest.raises(InputError, match=r"^values: must have the 3 layers of the layout, got 2"):
        PagedCache(layout, good.keys, good.values[:2])
    with pytest.raises(InputError, match=r"must be bfloat16, .* or fp8"):
        PagedCache(layout, [k.to(torch.uint8) for k in keys], [v.to(torch.uint8) for v in values])
    with pytest.raises(InputError, match="key_scales: must be positive"):
        PagedCache(layout, good.keys, good.values, key_scales=[1.0, 0.0, 1.0])
    with pytest.raises(InputError, match=r"^key_scales, value_scales: must be 1"):
        PagedCache(layout, good.keys, good.values, key_scales=[2.0] * 3)


@pytest.mark.parametrize("order", [ORDERED, PERMUTED])
def test_slots_are_checked(order: str) -> None:
    layout = LAYOUTS["gqa"]
    codec, cache, chunk = make_codec("gqa", "layer", step=0.5), poisoned(layout, order), synthetic_chunk(layout, 5)
    blob = codec.encode(chunk)
    with pytest.raises(InputError, match="79 in layer 0"):
        codec.encode(PagedChunks(cache, [torch.tensor([1, 80])], [0]))
    with pytest.raises(InputError, match="79 in layer 0"):
        codec.decode_paged([blob], cache, [torch.tensor([0, 1, 2, 3, 80])])
    assert all(bool((unit == 7).all()) for unit in written(cache, torch.arange(SLOTS)))  # nothing was half-written
    with pytest.raises(InputError, match=r"^slots: must name the 5 tokens of the blob, got 4"):
        codec.decode_paged([blob], cache, [torch.arange(4)])
    with pytest.raises(InputError, match=r"^slots: must be int64 \[T\] on cpu"):
        codec.decode_paged([blob], cache, [torch.arange(5, dtype=torch.int32)])
    with pytest.raises(InputError, match="at least one token per chunk"):
        codec.encode(PagedChunks(cache, [torch.arange(0)], [0]))


def test_arguments_are_checked() -> None:
    layout = LAYOUTS["gqa"]
    codec, cache = make_codec("gqa", "layer", step=0.5), poisoned(layout)
    blob = codec.encode(synthetic_chunk(layout, 5))
    slots = torch.arange(5)
    with pytest.raises(InputError, match="each of the 1 blobs"):
        codec.decode_paged([blob], cache, [slots, slots])
    with pytest.raises(InputError, match="each of the 1 chunks in slots, got 2"):
        codec.encode(PagedChunks(cache, [slots], [0, 1]))
    with pytest.raises(InputError, match=r"start: must be .*, got -1"):
        codec.encode(PagedChunks(cache, [slots], [-1]))
    with pytest.raises(InputError, match=r"start: .* below 2\*\*32 - 5, got 18446744073709551616"):
        codec.decode_paged([blob], cache, [slots], [1 << 64])
    with pytest.raises(InputError, match="among the 4096 positions"):
        codec.decode_paged([blob], cache, [slots], [4095])
    with pytest.raises(InputError, match=r"^layers: must lie within the 3 .* not be empty, got range\(0, 0\)"):
        codec.decode_paged([blob], cache, [slots], layers=range(0))
    with pytest.raises(ProfileMismatchError):
        codec.encode(PagedChunks(poisoned(replace(layout, layers=layout.layers[:2])), [slots], [0]))
    assert codec.encode(PagedChunks(cache, [], [])) == []
    codec.decode_paged([], cache, []).check()
