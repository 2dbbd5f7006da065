"""Where decoded tokens go: one row per token, in a dense tensor or in the pages of a cache.

Both look alike to the stages: memory, and for each token the place where its row begins. So the stages decode straight
into pages, without a copy in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.support.arrays import I64


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the keys or the values of one layer, on the CPU.

    Attributes:
        memory: one-dimensional view that spans all rows.
        begins: int64 `[T]`, where in `memory` the row of each token begins; -1 for a token that is not written.
        head_stride: from head to head.
        dim_stride: from dimension to dimension of a head: 1, but where an engine keeps tokens innermost.
    """

    memory: torch.Tensor
    begins: I64
    head_stride: int
    heads: int
    size: int
    dim_stride: int = 1

    def write(self, x: torch.Tensor, at: slice) -> None:
        """Write the tokens `at`, `[t, H, D]` of any dtype; values are rounded to the memory's dtype."""
        begins = torch.from_numpy(self.begins[at])
        there = begins >= 0
        offsets = torch.arange(self.heads)[:, None] * self.head_stride + torch.arange(self.size) * self.dim_stride
        self.memory[begins[there, None, None] + offsets] = x[there].to(self.memory.dtype)

    def take(self, part: slice) -> Rows:
        """Return the rows of some of the tokens."""
        return replace(self, begins=self.begins[part])


def dense_rows(tensor: torch.Tensor) -> Rows:
    """Return the rows of a tensor `[T, H, D]` whose last dimension is adjacent."""
    count, heads, size = tensor.shape
    return Rows(all_memory(tensor), np.arange(count) * tensor.stride(0), tensor.stride(1), heads, size)


def has_rows(cache: PagedCache) -> bool:
    """Return whether the stages can write to a cache: its values lie at fixed strides, and have no scales."""
    return not cache.scaled and not cache.permuted


def cache_rows(
    cache: PagedCache, slots: torch.Tensor | None, layers: range
) -> tuple[list[Rows | None], list[Rows | None]]:
    """Return rows of a cache for the tokens at `slots`: keys and values per layer, None for layers not in `layers`.

    Args:
        cache: receives the tokens; `has_rows` must hold.
        slots: int64 `[T]`, -1 for tokens that are not written; None for all rows of a dense cache.

    Raises:
        InputError: a slot that the cache does not have.
    """
    if slots is None:
        numbers = np.arange(cache.pages(layers.start)[0].shape[1])
    else:
        cache.check_range(slots, layers)
        numbers = slots.numpy()
    begins: dict[tuple[int, int, int], I64] = {}  # of the layers that are arranged alike
    rows: tuple[list[Rows | None], list[Rows | None]] = ([], [])
    for index, units in enumerate(zip(cache.keys, cache.values, strict=True)):
        for unit, out in zip(units, rows, strict=True):
            if index not in layers:
                out.append(None)
                continue
            (_, block_tokens, heads, size), (block_stride, token_stride, head_stride, dim_stride) = (
                unit.shape, unit.stride()
            )  # fmt: skip
            key = block_tokens, block_stride, token_stride
            if key not in begins:
                block, token = np.divmod(numbers, max(block_tokens, 1))
                begins[key] = np.where(numbers == NOWHERE, -1, block * block_stride + token * token_stride)
            stride = 1 if size == 1 else dim_stride
            out.append(Rows(all_memory(unit), begins[key], head_stride, heads, size, stride))
    return rows


def all_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of everything between a tensor's first value and its last."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not tensor.numel():
        return tensor.flatten()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))
