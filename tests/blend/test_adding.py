"""`adder`: the same sums in every kind of pages, compiled and by torch."""

from __future__ import annotations

import pytest
import torch

from cuvee.blend import adding
from cuvee.blend.adding import adder
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout, LayerLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.pages import PageOrder, PermutedPages

BLOCKS, BLOCK, HEADS, KEY, VALUE = 6, 4, 2, 8, 5
SLOTS = torch.tensor([5, 0, 23, 6, 17])


def pages(kind: str, dtype: torch.dtype, size: int, generator: torch.Generator) -> torch.Tensor | PermutedPages:
    if kind == "permuted":
        offsets = torch.randperm(BLOCK * HEADS * size, generator=generator).view(BLOCK, HEADS, size)
        order = PageOrder(offsets, BLOCKS, BLOCK * HEADS * size + 3)
        return PermutedPages(torch.randn(order.span, generator=generator).to(dtype), order)
    if kind == "heads first":
        return torch.randn(BLOCKS, HEADS, BLOCK, size, generator=generator).to(dtype).transpose(1, 2)
    return torch.randn(BLOCKS, BLOCK, HEADS, 2 * size, generator=generator).to(dtype)[..., :size]


def make_cache(kind: str, dtype: torch.dtype) -> PagedCache:
    layout = KVLayout(
        "mine", (LayerLayout(HEADS, KEY, VALUE, None),) * 2, str(dtype).removeprefix("torch."), max_positions=None
    )
    generator = torch.Generator().manual_seed(1)
    keys, values = ([pages(kind, dtype, size, generator) for _ in range(2)] for size in (KEY, VALUE))
    return PagedCache(layout, keys, values)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "heads first", "permuted"])
def test_sums_are_rounded_once(kind: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(adding, "has_rows", lambda cache: False)
    cache, before = make_cache(kind, dtype), make_cache(kind, dtype)
    more = [torch.randn(5, HEADS, size, generator=torch.Generator().manual_seed(2)) for size in (KEY, VALUE)]
    adder(cache, SLOTS)(1, *(part.transpose(0, 1).contiguous().transpose(0, 1) for part in more))
    every = torch.arange(BLOCKS * BLOCK)
    for layer in range(2):
        for new, old, added in zip(cache.layer(layer, every), before.layer(layer, every), more, strict=True):
            expected = old.clone()
            if layer == 1:
                expected[SLOTS] = (old[SLOTS].float() + added).to(dtype)
                assert not torch.equal(expected, old)
            assert torch.equal(new, expected)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["plain", "permuted"])
def test_sums_stay_in_range(kind: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(adding, "has_rows", lambda cache: False)
    cache, limit = make_cache(kind, dtype), torch.finfo(dtype).max
    for sign in (1, 1, -1, -1, -1):
        adder(cache, SLOTS)(0, *(torch.full((5, HEADS, size), 0.9 * sign * limit) for size in (KEY, VALUE)))
        keys, values = cache.layer(0, SLOTS)
        assert bool(keys.isfinite().all()) and bool(values.isfinite().all())
    assert bool((keys == -limit).all()) and bool((values == -limit).all())


@pytest.mark.parametrize("kind", ["plain", "permuted"])
def test_tokens_without_a_slot_are_left_out(kind: str) -> None:
    cache, before = make_cache(kind, torch.bfloat16), make_cache(kind, torch.bfloat16)
    adder(cache, torch.tensor([-1, 7]))(0, torch.ones(2, HEADS, KEY), torch.ones(2, HEADS, VALUE))
    every = torch.arange(BLOCKS * BLOCK)
    changed = (cache.layer(0, every)[0] != before.layer(0, every)[0]).flatten(1).any(1)
    assert changed.nonzero()[:, 0].tolist() == [7]


def test_preparing_touches_no_page() -> None:
    cache, before = make_cache("plain", torch.bfloat16), make_cache("plain", torch.bfloat16)
    adding.prepare(cache)
    every = torch.arange(BLOCKS * BLOCK)
    assert torch.equal(cache.layer(0, every)[0], before.layer(0, every)[0])


def test_a_slot_that_is_not_the_caches_is_refused() -> None:
    with pytest.raises(InputError, match=r"slots: must be -1 … 23 in layer 0"):
        adder(make_cache("plain", torch.bfloat16), torch.tensor([3, 24]))
