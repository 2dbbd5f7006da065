"""The layout probe against writers of known layouts, of tiles that no strides describe, and of what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.pages import PageOrder, Pages, PermutedPages
from cuvee.integrations.vllm.pages.engine_pages import find_pages
from cuvee.integrations.vllm.pages.probe import Strides, Writer, find_page_layout, verify_page_layout

BLOCKS, TOKENS, HEADS, DIM = 5, 6, 3, 4
SLOTS = BLOCKS * TOKENS


def _beside(tensor: torch.Tensor) -> Writer:
    """K beside V for each token, `[B, H, N, 2D]`: vLLM's GPU backends."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            tensor[slot // TOKENS, :, slot % TOKENS, :DIM] = keys[token]
            tensor[slot // TOKENS, :, slot % TOKENS, DIM:] = values[token]

    return write


def _transposed(tensor: torch.Tensor) -> Writer:
    """Each (block, head) page is K^T `[D, N]`, then V `[N, D]`: vLLM's CPU backend."""
    pages = tensor.view(BLOCKS, HEADS, 2 * TOKENS * DIM)
    keys_at = pages[..., : TOKENS * DIM].view(BLOCKS, HEADS, DIM, TOKENS)
    values_at = pages[..., TOKENS * DIM :].view(BLOCKS, HEADS, TOKENS, DIM)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            keys_at[slot // TOKENS, :, :, slot % TOKENS] = keys[token]
            values_at[slot // TOKENS, :, slot % TOKENS] = values[token]

    return write


def _tiled(tensor: torch.Tensor) -> Writer:
    """Tiles as matrix units want them: keys `[N/3, D/2, 3, 2]`, values `[D/2, N/2, 2, 2]`; no strides describe them."""
    pages = tensor.reshape(BLOCKS, HEADS, 2, TOKENS * DIM)
    assert pages.data_ptr() == tensor.data_ptr()
    keys_at = pages[:, :, 0].view(BLOCKS, HEADS, TOKENS // 3, DIM // 2, 3, 2)
    values_at = pages[:, :, 1].view(BLOCKS, HEADS, DIM // 2, TOKENS // 2, 2, 2)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, TOKENS)
            keys_at[block, :, at // 3, :, at % 3] = keys[token].view(HEADS, DIM // 2, 2)
            values_at[block, :, :, at // 2, :, at % 2] = values[token].view(HEADS, DIM // 2, 2)

    return write


def _swizzled(tensor: torch.Tensor) -> Writer:
    """All values of a block, keys among values, in an order without any pattern, wherever the block's memory is."""
    order = torch.randperm(HEADS * TOKENS * 2 * DIM, generator=torch.Generator().manual_seed(1)).view(TOKENS, -1)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            at = torch.unravel_index(order[slot % TOKENS], tensor.shape[1:])
            tensor[slot // TOKENS][at] = torch.cat([keys[token].flatten(), values[token].flatten()])

    return write


def _cache(order: str = "BHNC", dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A cache `[B, H, N, 2D]` whose memory is in another order, between other data."""
    sizes = {"B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    flat = torch.randn(17 + BLOCKS * HEADS * TOKENS * 2 * DIM).to(dtype)[17:]
    return flat.view([sizes[axis] for axis in order]).permute([order.index(axis) for axis in "BHNC"])


PERMUTED = {"tiles": ("BHNC", _tiled), "tokens first": ("BNHC", _swizzled), "heads outermost": ("HBNC", _swizzled)}
STRIDED = {"beside": ("BHNC", _beside), "beside, tokens first": ("BNHC", _beside), "transposed": ("BHNC", _transposed)}
KINDS, DTYPES = {**STRIDED, **PERMUTED}, [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize(("kind", "dtype"), [*zip(KINDS, 2 * DTYPES, strict=True)])
def test_restored_pages_are_the_engines_to_the_last_bit(kind: str, dtype: torch.dtype) -> None:
    """Read from one cache, written to another at other slots: the bytes that the engine itself would have left."""
    order, writer = KINDS[kind]
    source, target, expected = caches = [_cache(order, dtype) for _ in range(3)]
    before = source.clone()
    layout = find_page_layout(source, writer(source), HEADS, DIM)
    assert torch.equal(source, before), "the probe must restore what it wrote over"
    verify_page_layout(source, writer(source), layout)
    assert isinstance(layout.keys, PageOrder) == isinstance(layout.values, PageOrder) == (kind in PERMUTED)
    assert layout.views(source)[0].shape == (BLOCKS, TOKENS, HEADS, DIM)
    for cache in caches:
        cache.fill_(-1)
    name = str(dtype).removeprefix("torch.")
    kv = KVLayout("synthetic", (LayerLayout(HEADS, DIM, DIM, None),), name, max_positions=None)
    pages = [PagedCache(kv, [keys], [values]) for keys, values in (layout.views(source), layout.views(target))]
    keys, values = torch.randn(2, 11, HEADS, DIM).to(dtype)
    keys[0, 0, 0], values[1, 1, 1] = torch.nan, -0.0
    slots, other = torch.randperm(SLOTS)[:11], torch.arange(SLOTS - 11, SLOTS)
    writer(source)(keys, values, slots)
    writer(expected)(keys, values, other)
    chunk = pages[0].read(slots, start=0)
    assert torch.equal(chunk.keys[0].nan_to_num(7), keys.nan_to_num(7)) and torch.equal(chunk.values[0], values)
    pages[1].write(chunk.keys, chunk.values, other)
    assert torch.equal(target.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("writer", "dtype"), [(_transposed, torch.float8_e4m3fn), (_tiled, torch.float8_e5m2)])
def test_pages_of_fp8_codes_are_found(writer: Callable[[torch.Tensor], Writer], dtype: torch.dtype) -> None:
    codes = torch.randint(100, (BLOCKS, HEADS, TOKENS, 2 * DIM), dtype=torch.uint8)
    before = codes.clone()
    put = writer(codes)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        put(keys.view(torch.uint8), values.view(torch.uint8), slots)

    layout = find_page_layout(codes.view(dtype), write, HEADS, DIM)
    assert torch.equal(codes, before)
    keys, values = torch.randint(100, (2, 7, HEADS, DIM), dtype=torch.uint8)
    slots = torch.tensor([0, 29, 13, 7, 8, 21, 2])
    put(keys, values, slots)
    for view, wrote in zip(layout.views(codes), (keys, values), strict=True):
        assert torch.equal(_at(view, slots), wrote)


def test_pages_of_latents_are_found() -> None:
    """A latent, and behind it the rotated part of the keys, which is narrower."""
    tensor = torch.randn(BLOCKS, TOKENS, 12)

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        tensor[slots // TOKENS, slots % TOKENS] = torch.cat([values, keys], -1)[:, 0]

    layout = find_page_layout(tensor, write, 1, 4, 8)
    assert (layout.keys, layout.values) == (Strides(8, (12, 0, 1)), Strides(0, (12, 0, 1)))
    verify_page_layout(tensor, write, layout)
    keys, values = layout.views(tensor)
    write(torch.ones(1, 1, 4), torch.full((1, 1, 8), 2.0), torch.tensor([9]))
    assert (_at(keys, torch.tensor([9])) == 1).all() and (_at(values, torch.tensor([9])) == 2).all()


def _at(pages: Pages, slots: torch.Tensor) -> torch.Tensor:
    block, token = slots // TOKENS, slots % TOKENS
    if isinstance(pages, PermutedPages):
        return pages.take(pages.order.index(block, token))
    return pages[block, token]


def _turned_by_block(plain: Writer, tensor: torch.Tensor) -> Writer:
    return lambda k, v, s: plain(k, v, s - s % TOKENS + (s + s // TOKENS) % TOKENS)


def _one_elsewhere(plain: Writer, tensor: torch.Tensor) -> Writer:
    """Puts a token that comes alone elsewhere."""
    return lambda k, v, s: plain(k, v, s if len(s) > 1 else s - s % TOKENS + (s + 1) % TOKENS)


def _fills_up(plain: Writer, tensor: torch.Tensor) -> Writer:
    """Fills a tile of two tokens up where it is given one of them."""

    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        missing = torch.tensor(sorted({slot ^ 1 for slot in slots.tolist()} - set(slots.tolist())), dtype=torch.int64)
        nothing = torch.zeros(len(missing), HEADS, DIM, dtype=keys.dtype)
        plain(torch.cat([keys, nothing]), torch.cat([values, nothing]), torch.cat([slots, missing]))

    return write


def _two_in_one_place(plain: Writer, tensor: torch.Tensor) -> Writer:
    def write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        plain(keys, values, slots)
        tensor[slots // TOKENS, 0, 0, 0] = tensor[slots // TOKENS, 0, 0, 1]

    return write


def _mixed_between_calls(plain: Writer, tensor: torch.Tensor) -> Writer:
    calls = iter([False, True])
    return lambda k, v, s: plain(k, v, s.flip(0) if next(calls, False) else s)


@pytest.mark.parametrize(
    ("writer", "odd", "message"),
    [
        (_beside, _turned_by_block, "not where its first block says, written all at once"),
        (_beside, _one_elsewhere, "not where its first block says, written one by one"),
        (_tiled, _one_elsewhere, "not where its first block says, written one by one"),
        (_tiled, _fills_up, "not where its first block says, written"),
        (_tiled, _two_in_one_place, "changes values or leaves holes"),
        (_beside, lambda plain, _: lambda k, v, s: plain(k / 2, v, s), "changes values"),
        (_beside, lambda plain, _: lambda k, v, s: plain(k[1:], v[1:], s[1:]), "leaves holes"),
        (_beside, _mixed_between_calls, "no permutation"),
    ],
)
def test_writers_whose_pages_cannot_be_told_are_refused(
    writer: Callable[[torch.Tensor], Writer], odd: Callable[[Writer, torch.Tensor], Writer], message: str
) -> None:
    tensor = _cache()
    before = tensor.clone()
    with pytest.raises(UnsupportedModelError, match=message):
        find_page_layout(tensor, odd(writer(tensor), tensor), HEADS, DIM)
    assert torch.equal(tensor, before), "a refusal must leave the cache as it was"


def test_pages_of_another_shape_place_or_layer_are_refused() -> None:
    tensor = _cache()
    before = tensor.clone()
    with pytest.raises(UnsupportedModelError, match="keys are not where"):
        verify_page_layout(tensor, _transposed(tensor), find_page_layout(tensor, _beside(tensor), HEADS, DIM))
    assert torch.equal(tensor, before)
    tiles = find_page_layout(tensor, _tiled(tensor), HEADS, DIM)
    with pytest.raises(UnsupportedModelError, match="4 blocks 144 apart, where PageOrder"):
        tiles.views(tensor[1:])
    with pytest.raises(UnsupportedModelError, match=r"^memory: must be on the CPU .*, got meta"):
        tiles.views(torch.empty_like(tensor, device="meta"))
    more = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM + 1)
    with pytest.raises(UnsupportedModelError, match="not a multiple"):
        find_page_layout(more, _beside(more), HEADS, DIM)


@pytest.mark.parametrize(("dtype", "rounds"), [(torch.uint8, torch.round), (torch.float8_e4m3fn, torch.trunc)])
def test_values_of_fp8_pages_are_codes_times_the_layers_scales(
    dtype: torch.dtype, rounds: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Whether the engine's writer rounds to the nearest code or towards zero."""
    scales, tensor = (0.37, 3.0), torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM, dtype=torch.uint8)

    class Writer:
        def do_kv_cache_update(self, layer: Any, k: torch.Tensor, v: torch.Tensor, cache: Any, slots: Any) -> None:
            keys, values = (_codes(part, scale, rounds) for part, scale in zip((k, v), scales, strict=True))
            _beside(cache.view(torch.uint8))(keys.view(torch.uint8), values.view(torch.uint8), slots)

    attention = SimpleNamespace(impl=Writer(), _k_scale=torch.tensor(scales[0]), _v_scale=torch.tensor(scales[1]))
    layout = KVLayout("m", (LayerLayout(HEADS, DIM, DIM, None),), "bfloat16", None)
    cache = find_pages(layout, {"0": attention}, {"0": tensor.view(dtype)}, torch.float8_e4m3fn)
    assert cache.key_scales == pytest.approx(scales[:1])
    assert cache.value_scales == pytest.approx(scales[1:])
    tensor[:] = 0x38  # the code of 1
    chunk = cache.read(torch.arange(SLOTS), 0)
    assert torch.equal(chunk.keys[0], torch.full((SLOTS, HEADS, DIM), scales[0]).bfloat16())
    assert torch.equal(chunk.values[0], torch.full((SLOTS, HEADS, DIM), scales[1]).bfloat16())
    attention._k_scale = torch.ones(HEADS)
    with pytest.raises(UnsupportedModelError, match=r"0: fp8 scales of each head .*or set --kv-cache-dtype auto"):
        find_pages(layout, {"0": attention}, {"0": tensor.view(dtype)}, torch.float8_e4m3fn)


def _codes(part: torch.Tensor, scale: float, rounds: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The fp8 codes of values, three bits of mantissa, as a writer rounds them."""
    mantissa, exponent = torch.frexp(part.float() / scale)
    return torch.ldexp(rounds(mantissa * 16), exponent - 4).to(torch.float8_e4m3fn)
