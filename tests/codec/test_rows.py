"""Rows: tokens written straight into a cache land where `PagedCache.write` puts them."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from tests.codec.test_paged import ORDERS, PERMUTED, poisoned, scattered, tensors, written
from tests.conftest import LAYOUTS, make_codec, synthetic_chunk

from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.pages import PermutedPages
from cuvee.codec.stages.rows import cache_rows, has_rows

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
MEMORY = [*ORDERS, PERMUTED, *JOINED]


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


KINDS = [
    ("bfloat16", "layer"), ("bfloat16", "lossless"), ("bfloat16", "head"), ("irregular", "layer"), ("float16", "unit"),
    ("narrow-values", "lossless"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("order", "name", "scheme", "backend"),
    [(order, *KINDS[(number + other) % 6], "numba") for number, order in enumerate(MEMORY) for other in (0, 3)]
    + [(order, *KINDS[number % 2], "reference") for number, order in enumerate(MEMORY)],
)
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
