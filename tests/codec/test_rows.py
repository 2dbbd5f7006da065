"""Rows: tokens written straight into a cache land where `PagedCache.write` puts them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from tests.codec.test_paged import ORDERS, PERMUTED, poisoned, scattered, tensors, written
from tests.conftest import LAYOUTS, make_codec, synthetic_chunk

from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.pages import PermutedPages
from cuvee.codec.profiles.sections import partition
from cuvee.codec.stages import transform
from cuvee.codec.stages.compiled import transform as transform_numba
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import Rows, cache_rows, dense_rows, has_rows
from cuvee.codec.stages.transform import Centers

BLOCKS, BLOCK_TOKENS = 5, 16
CPU = torch.device("cpu")


def joined(layout: KVLayout, order: str) -> tuple[PagedCache, list[torch.Tensor]]:
    """A cache whose keys and values share memory, as engines have it; and that memory, layer by layer."""
    memory, keys, values = [], [], []
    for layer in layout.layers:
        heads, size, other = layer.kv_heads, max(layer.head_dim, layer.value_dim), layer.value_dim
        if order == "keys, then values":
            whole = torch.full((2, BLOCKS, BLOCK_TOKENS, heads, size), 7.0).to(layout.torch_dtype)
            k, v = whole[0], whole[1]
        elif order == "in each block":
            whole = torch.full((BLOCKS, 2, BLOCK_TOKENS, heads, size), 7.0).to(layout.torch_dtype)
            k, v = whole[:, 0], whole[:, 1]
        elif order == "in each block, head-major":
            whole = torch.full((BLOCKS, 2, heads, BLOCK_TOKENS, size), 7.0).to(layout.torch_dtype)
            k, v = whole[:, 0].transpose(1, 2), whole[:, 1].transpose(1, 2)
        else:  # "in each head"
            whole = torch.full((BLOCKS, BLOCK_TOKENS, heads, size + other + 3), 7.0).to(layout.torch_dtype)
            k, v = whole[..., 1 : size + 1], whole[..., size + 1 :]
        memory.append(whole)
        keys.append(k[..., : layer.head_dim])
        values.append(v[..., :other])
    return PagedCache(layout, keys, values), memory


JOINED = ["keys, then values", "in each block", "in each block, head-major", "in each head"]


def make(layout: KVLayout, order: str) -> tuple[PagedCache, list[torch.Tensor]]:
    if order in JOINED:
        return joined(layout, order)
    cache = poisoned(layout, order)
    if order == PERMUTED:
        units = [unit for index in range(layout.num_layers) for unit in cache.pages(index)]
        return cache, [unit.memory for unit in units if isinstance(unit, PermutedPages)]
    return cache, [*cache.keys, *cache.values]


def alike(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("module", [transform, transform_numba])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_place_takes_blocks_one_after_the_other(module: Any, x_dtype: torch.dtype) -> None:
    layout = LAYOUTS["bfloat16"]
    rotation = Rotation(500, 30, CPU)
    order = np.random.default_rng(0).permutation(30)
    for group in ("head", "unit", "layer"):
        for section in partition(layout, group):
            generator = torch.Generator().manual_seed(section.first_layer)
            x = torch.randn(30, section.values, generator=generator).to(x_dtype)
            mean = torch.randn(1, section.values, generator=generator)
            results = []
            blocks = x.unflatten(1, (len(section.blocks), -1)).transpose(0, 1).contiguous()
            for values, by in ((x, transform), (blocks, module)):
                units = [torch.full((30, 2, 16), 7.0, dtype=torch.bfloat16) for _ in range(6)]
                rows: list[Rows | None] = [dense_rows(unit) for unit in units]
                by.scatter(values, Centers(mean), section, layout, rotation, slice(0, 30), rows[:3], rows[3:], order)
                results.append(units)
            assert alike(*results)


def test_rows_of_a_part_are_those_of_its_tokens() -> None:
    tensor = torch.zeros(9, 2, 4)
    rows = dense_rows(tensor)
    rows.take(slice(3, 6)).write(torch.ones(3, 2, 4), slice(0, 3))
    assert tensor[3:6].eq(1).all() and tensor.sum() == 24
    assert dense_rows(torch.zeros(0, 2, 4)).begins.shape == (0,)
    # A part of a larger tensor, in another order: only its own values change.
    large = torch.zeros(9, 3, 10, dtype=torch.bfloat16)
    part = large[1::2, 1:, 2:6]
    dense_rows(part).write(torch.ones(4, 2, 4), slice(0, 4))
    assert part.eq(1).all() and large.float().sum() == 32
    turned = torch.zeros(2, 5, 4).transpose(0, 1)
    dense_rows(turned).write(torch.arange(40.0).view(5, 2, 4), slice(0, 5))
    assert torch.equal(turned, torch.arange(40.0).view(5, 2, 4))


KINDS = [
    ("bfloat16", "layer"), ("bfloat16", "lossless"), ("bfloat16", "head"), ("irregular", "layer"), ("float16", "unit"),
    ("narrow-values", "lossless"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "scheme", "backend"),
    [(*kind, "numba") for kind in KINDS] + [(*kind, "reference") for kind in KINDS[:2]],
)
@pytest.mark.parametrize("order", [*ORDERS, PERMUTED, *JOINED])
def test_every_order_of_memory_gets_the_same(
    order: str, name: str, scheme: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bytes of the memory are compared: also those between keys and values, and of other slots."""
    layout, quality = LAYOUTS[name], {} if scheme == "lossless" else {"step": 0.5}
    codec = make_codec(name, scheme, backend=backend, **quality)
    blob = make_codec(name, scheme, **quality).encode(synthetic_chunk(layout, 37, start=11))
    used: list[bool] = []

    def spied(cache: PagedCache) -> bool:
        used.append(has_rows(cache))
        return used[-1]

    monkeypatch.setattr("cuvee.codec.cpu.backend.has_rows", spied)
    slots = scattered(37)
    slots[3], slots[0], slots[-1] = NOWHERE, NOWHERE, NOWHERE
    kept = slots != NOWHERE
    for start in (11, 100):
        cache, memory = make(layout, order)
        for rows in chain(*cache_rows(cache, slots, range(layout.num_layers))) if order != PERMUTED else ():
            assert rows is not None and (rows.begins[~kept.numpy()] == -1).all()
        codec.decode_paged([blob], cache, [slots], [start]).check()
        assert used.pop() == (order != PERMUTED)  # else by a copy
        want = codec.decode(blob, start)
        used.clear()
        same, expected = make(layout, order)
        same.write(want.keys, want.values, slots)
        assert alike(memory, expected)
        for got, unit in zip(written(cache, slots[kept]), tensors(want), strict=True):
            assert torch.equal(got, unit[kept])


@pytest.mark.parametrize("scheme", ["layer", "lossless"])
@pytest.mark.parametrize("first", [0, 16, 21])
def test_adjacent_tokens_of_a_transposed_cache_are_written_channel_by_channel(first: int, scheme: str) -> None:
    """As vLLM holds keys on a CPU. Tokens that begin within a block are adjacent in parts of it only."""
    codec = make_codec("bfloat16", scheme, **({} if scheme == "lossless" else {"step": 0.5}))
    chunk = synthetic_chunk(LAYOUTS["bfloat16"], 53)
    blob, slots = codec.encode(chunk), torch.arange(first, first + 53)
    slots[40] = NOWHERE
    cache, memory = make(chunk.layout, "transposed")
    codec.decode_paged([blob], cache, [slots]).check()
    want = codec.decode(blob)
    same, expected = make(chunk.layout, "transposed")
    same.write(want.keys, want.values, slots)
    assert alike(memory, expected)
