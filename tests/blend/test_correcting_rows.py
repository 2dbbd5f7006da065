"""`Correction.correct_rows` in every kind of pages, against `estimate` between a reader and an adder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from cuvee.blend.adding import adder, rows_to_add_to
from cuvee.blend.correction import Correction, Window, prepare
from cuvee.codec.layout import KVLayout, LayerLayout, Rope
from cuvee.codec.paged import PagedCache
from cuvee.codec.pages import PageOrder, Pages, PermutedPages

BLOCKS, BLOCK, HEADS = 12, 16, 2
TOKENS = 150
WHOLE = Rope(tuple(0.7**i for i in range(20)))
PARTIAL = Rope(tuple(0.5**i for i in range(16)), attention_scaling=1.3)
CPU = torch.device("cpu")


def pages(kind: str, dtype: torch.dtype, size: int, generator: torch.Generator) -> Pages:
    if kind == "permuted":
        offsets = torch.randperm(BLOCK * HEADS * size, generator=generator).view(BLOCK, HEADS, size)
        order = PageOrder(offsets, BLOCKS, BLOCK * HEADS * size + 3)
        return PermutedPages(torch.randn(order.span, generator=generator).to(dtype), order)
    if kind == "tokens last":
        return torch.randn(BLOCKS, HEADS, size, BLOCK, generator=generator).to(dtype).permute(0, 3, 1, 2)
    return torch.randn(BLOCKS, BLOCK, HEADS, 2 * size, generator=generator).to(dtype)[..., :size]


def make_cache(kind: str, dtype: torch.dtype, rope: Rope | None, sizes: tuple[int, int]) -> PagedCache:
    layout = KVLayout(
        "mine", (LayerLayout(HEADS, *sizes, rope),) * 2, str(dtype).removeprefix("torch."), max_positions=None
    )
    generator = torch.Generator().manual_seed(1)
    keys, values = ([pages(kind, dtype, size, generator) for _ in range(2)] for size in sizes)
    return PagedCache(layout, keys, values)


def slices() -> list[list[Window]]:
    """Windows of two blocks: a chunk that goes on in the second one, two tokens, one token, and one with none left."""
    generator = torch.Generator().manual_seed(2)
    at = torch.randperm(90, generator=generator)
    chosen = at[:21].sort().values
    early, late = chosen[chosen < 50], chosen[chosen >= 50]
    others = at[21:].sort().values
    carried: dict[int, torch.Tensor] = {}
    first = [
        Window(torch.tensor([92, 94, 95]), torch.tensor([93]), 91),
        Window(early, others[others < 50], 0, goes_on=True, changes=carried),
    ]
    then = [
        Window(late, others[others >= 50], 0, earlier=early, changes=carried),
        Window(torch.tensor([100]), torch.tensor([101, 140]), 97),
        Window(torch.tensor([142, 143]), torch.tensor([], dtype=torch.int64), 141, goes_on=True),
    ]
    return [first, then]


def correct_in(cache: PagedCache, compiled: bool, slots: torch.Tensor, new_of: Sequence[torch.Tensor]) -> None:
    """Correct both blocks by new KV `[H, TOKENS, D]`."""
    for windows in slices():
        correction = Correction(cache.layout, windows, CPU)
        block = torch.arange(1, TOKENS)
        new = [part[:, 1:] for part in new_of]
        rows = torch.searchsorted(block, correction.observed)
        for layer in range(2):
            if compiled:
                places = rows_to_add_to(cache, slots[torch.cat((correction.observed, correction.corrected))])
                assert places is not None
                correction.correct_rows(layer, new[0], new[1], rows, places)
                continue
            old = cache.layer(layer, slots[correction.observed])
            changes = [x[:, rows].transpose(0, 1).float() - y.float() for x, y in zip(new, old, strict=True)]
            adder(cache, slots[correction.corrected])(layer, *correction.estimate(layer, *changes))


@pytest.mark.parametrize(
    ("rope", "sizes"),
    [(None, (8, 8)), (WHOLE, (40, 24)), (PARTIAL, (80, 64)), (Rope((1.0, 0.1)), (5, 3))],
    ids=["no rope", "whole", "partial and scaled", "small"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["plain", "tokens last", "permuted"])
def test_compiled_corrections_are_those_of_torch(
    kind: str, dtype: torch.dtype, rope: Rope | None, sizes: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(3)
    slots = torch.randperm(BLOCKS, generator=generator).repeat_interleave(BLOCK)[:TOKENS] * BLOCK
    slots += torch.arange(TOKENS) % BLOCK
    before, expected, found = (make_cache(kind, dtype, rope, sizes) for _ in range(3))
    new = []
    for part in before.layer(0, slots):  # changes are alike, but not in the second head
        change = torch.randn(part.shape, generator=generator)
        change[:, 0] += 2
        new.append((part.float() + change).to(dtype).transpose(0, 1))
    correct_in(expected, False, slots, new)
    correct_in(found, True, slots, new)
    every = torch.arange(BLOCKS * BLOCK)
    unlike = torch.ones(len(every), dtype=torch.bool)
    unlike[slots[torch.cat([window.corrected for windows in slices() for window in windows])]] = False
    for layer in range(2):
        for old, x, y in zip(*(cache.layer(layer, every) for cache in (before, expected, found)), strict=True):
            assert torch.equal(y[unlike], old[unlike]), "other tokens are left as they were"
            assert not torch.equal(y, old)
            if dtype == torch.float32:
                assert torch.allclose(x, y, rtol=0, atol=2e-5)
            else:  # a sum close to the middle between two numbers may be rounded to either
                assert torch.allclose(x.float(), y.float(), rtol=2**-7, atol=1e-5)
                assert (x != y).float().mean() < 0.01


def test_what_is_carried_is_what_torch_carries() -> None:
    windows = slices()[0]
    correction = Correction(make_cache("plain", torch.float32, WHOLE, (40, 24)).layout, windows, CPU)
    cache = make_cache("plain", torch.float32, WHOLE, (40, 24))
    slots, rows = torch.arange(TOKENS), correction.observed
    new = [torch.randn(HEADS, TOKENS, size, generator=torch.Generator().manual_seed(4)) for size in (40, 24)]
    old = cache.layer(1, slots[correction.observed])
    correction.estimate(1, *(x[:, rows].transpose(0, 1) - y for x, y in zip(new, old, strict=True)))
    expected = windows[1].changes.pop(1)
    places = rows_to_add_to(cache, torch.cat((correction.observed, correction.corrected)))
    assert places is not None
    correction.correct_rows(1, new[0], new[1], rows, places)
    assert torch.allclose(windows[1].changes[1], expected, atol=1e-5)
    assert windows[1].changes[1].untyped_storage().nbytes() == 4 * expected.numel()


def test_new_kv_may_be_wider_than_the_pages() -> None:
    """Float32 beside bfloat16 pages is not rounded before it is compared."""
    found, expected = (make_cache("plain", torch.bfloat16, None, (16, 16)) for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    new = [
        old.float().transpose(0, 1) + 1 + 0.001 * torch.randn(HEADS, TOKENS, 16, generator=generator)
        for old in found.layer(0, torch.arange(TOKENS))
    ]
    correct_in(expected, False, torch.arange(TOKENS), new)
    correct_in(found, True, torch.arange(TOKENS), new)
    for x, y in zip(expected.layer(0, torch.arange(TOKENS)), found.layer(0, torch.arange(TOKENS)), strict=True):
        assert torch.allclose(x.float(), y.float(), rtol=2**-7, atol=1e-5) and (x != y).float().mean() < 0.01


def test_interleaved_keys_and_float16_are_left_to_torch() -> None:
    rope = Rope((1.0, 0.1), interleaved=True)
    cache = make_cache("plain", torch.bfloat16, rope, (8, 8))
    assert not Correction(cache.layout, slices()[0], CPU).compilable
    assert Correction(make_cache("plain", torch.bfloat16, WHOLE, (40, 8)).layout, slices()[0], CPU).compilable
    assert rows_to_add_to(make_cache("plain", torch.float16, None, (8, 8)), torch.arange(3)) is None
    fp8 = KVLayout("mine", (LayerLayout(HEADS, 8, 8, None),), "bfloat16", max_positions=None)
    tensor = torch.zeros(BLOCKS, BLOCK, HEADS, 8).to(torch.float8_e4m3fn)
    assert rows_to_add_to(PagedCache(fp8, [tensor], [tensor.clone()]), torch.arange(3)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rope", [None, WHOLE, Rope((1.0, 0.1), interleaved=True)])
def test_preparing_touches_no_page(dtype: torch.dtype, rope: Rope | None) -> None:
    cache, before = (make_cache("tokens last", dtype, rope, (40, 24)) for _ in range(2))
    prepare(cache)
    every = torch.arange(BLOCKS * BLOCK)
    assert all(torch.equal(x, y) for x, y in zip(cache.layer(0, every), before.layer(0, every), strict=True))
