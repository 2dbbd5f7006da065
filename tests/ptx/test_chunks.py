"""Whole chunks by compiled kernels against the CPU, at ragged lengths, for every scheme, group and element type.

Lossless blobs are those of the CPU, byte for byte. Of the others, all that follows the transform is: the sums before it
are in another order than the CPU's. So the blobs of the kernels are compared with those of the plain references, from
the same coefficients, byte for byte; and with the CPU's within the rounding of sums.

CUVEE_PTX_LENGTHS=all takes every length from 1 to 300.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests import conftest
from tests.emulation import KERNELS_RUN_ON
from tests.kernels.coding import codecs, use_references
from tests.ptx import scenarios

from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks

pytestmark = pytest.mark.skipif(KERNELS_RUN_ON != "ptx", reason=f"kernels run on: {KERNELS_RUN_ON}")
ALL = os.environ.get("CUVEE_PTX_LENGTHS") == "all"
LENGTHS = list(range(1, 301)) if ALL else [1, 2, 5, 15, 16, 17, 33, 63, 64, 65, 100, 127, 129, 250, 257, 300]
FEW = LENGTHS if ALL else [1, 17, 63, 129, 300]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
TOGETHER = 8  # chunks of a call
# Axes of a cache in memory: blocks, tokens, heads, dimensions.
ORDERS = ("bthd", "bhtd", "tbhd", "bhdt", "hbtd", "bdht")


def pages(layout: KVLayout, slots: int, order: str, element: torch.dtype, seed: int) -> PagedCache:
    """A cache of blocks of 16 tokens, filled with what a cache may hold."""
    blocks, draw = -(-slots // 16), torch.Generator().manual_seed(seed)
    scales = [0.5 + 0.25 * k for k in range(layout.num_layers)] if element in FP8 else None

    def unit(heads: int, dim: int) -> torch.Tensor:
        sizes = {"b": blocks, "t": 16, "h": heads, "d": dim}
        values = torch.randn(blocks, 16, heads, dim, generator=draw) * 0.8 ** torch.arange(dim) + 1
        memory = torch.zeros([sizes[axis] for axis in order], dtype=element)
        view = memory.permute([order.index(axis) for axis in "bthd"])
        view.copy_(values.to(element))
        return view

    keys = [unit(layer.kv_heads, layer.head_dim) for layer in layout.layers]
    values = [unit(layer.kv_heads, layer.value_dim) for layer in layout.layers]
    return PagedCache(layout, keys, values, scales, scales)


def some_slots(lengths: list[int], total: int, seed: int) -> list[torch.Tensor]:
    mixed = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    return list(mixed[: sum(lengths)].split(lengths))


@pytest.mark.parametrize("scheme", scenarios.SCHEMES)
def test_every_target(target: str, scheme: str) -> None:
    scenarios.decodes(scheme)
    scenarios.encodes(scheme)


def calls(lengths: list[int]) -> list[list[int]]:
    return [lengths[k : k + TOGETHER] for k in range(0, len(lengths), TOGETHER)]


ELEMENTS = [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("gqa", torch.float32),
            ("irregular", torch.float32), ("bfloat16", FP8[0]), ("float16", FP8[1])]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS if ALL else ("bthd", "bhdt"))
@pytest.mark.parametrize(("name", "element"), ELEMENTS)
def test_lossless_blobs_are_the_same_bytes(name: str, element: torch.dtype, order: str) -> None:
    layout = conftest.LAYOUTS[name]
    cpu, gpu = codecs(name, "lossless")
    for number, lengths in enumerate(calls(LENGTHS)):
        total = sum(lengths) + 40
        cache, slots = pages(layout, total, order, element, number), some_slots(lengths, total, number)
        starts = [7 * k for k in range(len(lengths))]
        blobs = gpu.encode(PagedChunks(cache, slots, starts))
        assert blobs == cpu.encode(PagedChunks(cache, slots, starts))
        got, want = (pages(layout, total, order, element, 99) for _ in range(2))
        for codec, to in ((gpu, got), (cpu, want)):
            codec.decode_paged(blobs, to, slots).check()
        for a, b in zip([*got.keys, *got.values], [*want.keys, *want.values], strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


LOSSY = [
    ("bfloat16", "layer"), ("float16", "head"), ("gqa", "unit"), ("irregular", "layers:2"), ("mqa", "all"),
    ("bfloat16", "layer classes"), ("interleaved", "layer classes"), ("float16", "layer tokens"),
    ("irregular", "layer tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme"), LOSSY)
def test_lossy_chunks_are_those_of_the_cpu_but_for_the_order_of_sums(name: str, scheme: str) -> None:
    for tokens in FEW:
        scenarios.decodes(scheme, name, tokens)
        mine = scenarios.encodes(scheme, name, tokens)
        # All behind the transform is the same bytes.
        with pytest.MonkeyPatch.context() as patch:
            assert use_references(patch) >= 5
            assert codecs(name, scheme)[1].encode(scenarios.example(scheme, name, tokens)[0]) == mine, tokens
