"""Where decoded tokens go: a row for each of them, in a dense tensor or in the pages of a cache.

Both look alike to whoever writes: memory, and for each token the place where its row begins. So pages are written as
the tokens are decoded, without a copy in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cuvee.codec.paged import NOWHERE, PagedCache, Pages, PermutedPages
from cuvee.codec.support.arrays import I64


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the keys or the values of one layer, on the CPU.

    Attributes:
        memory: one-dimensional view of everything that the rows lie in.
        begins: int64 `[T]`, where in it the row of each token begins; -1 for a token that is not to be written.
        head_stride: from head to head. The dimensions of a head are adjacent.
        heads, size: heads, and dimensions of each.
        offsets: int64 `[K, H, D]`, from where a row begins to each of its values, where no strides describe that; else
            `[0, 0, 0]`. There are K kinds of rows.
        kinds: int64 `[T]`, the kind of each token's row; not read without `offsets`.
    """

    memory: torch.Tensor
    begins: I64
    head_stride: int
    heads: int
    size: int
    offsets: I64 = field(default_factory=lambda: np.empty((0, 0, 0), np.int64))
    kinds: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    def write(self, x: torch.Tensor, at: slice) -> None:
        """Write the tokens `at`, `[t, H, D]` of any dtype; values are rounded to that of the memory."""
        begins = torch.from_numpy(self.begins[at])
        there = begins >= 0
        if len(self.offsets):
            offsets = torch.from_numpy(self.offsets[self.kinds[at]])[there]
        else:
            offsets = torch.arange(self.heads)[:, None] * self.head_stride + torch.arange(self.size)
        self.memory[begins[there, None, None] + offsets] = x[there].to(self.memory.dtype)

    def take(self, part: slice) -> Rows:
        """The rows of some of the tokens."""
        return replace(self, begins=self.begins[part], kinds=self.kinds[part])


def dense_rows(tensor: torch.Tensor) -> Rows:
    """The rows of a tensor `[T, H, D]`, whose last dimension is adjacent."""
    tokens, heads, size = tensor.shape
    begins = np.arange(tokens, dtype=np.int64) * tensor.stride(0)
    return Rows(all_memory(tensor), begins, tensor.stride(1), heads, size)


def paged_rows(
    cache: PagedCache, slots: torch.Tensor, layers: range
) -> tuple[list[Rows | None], list[Rows | None]] | None:
    """Rows of a cache for the tokens at `slots`: keys and values by layer, None for layers that are not asked for.

    None if what is decoded cannot be written there as it is: fp8 takes a scale, and compiled code takes adjacent
    dimensions or `PermutedPages`.

    Raises:
        InputError: a slot that the cache does not have.
    """
    if cache.scaled or not all(map(_direct, (unit for index in layers for unit in cache.pages(index)))):
        return None
    cache.check_range(slots, layers)
    numbers = slots.numpy()
    known: dict[tuple[int, int, int], tuple[I64, I64]] = {}
    rows: tuple[list[Rows | None], list[Rows | None]] = ([], [])
    for index in range(cache.layout.num_layers):
        for unit, out in zip(cache.pages(index), rows, strict=True):
            if index not in layers:
                out.append(None)
                continue
            _, block_tokens, heads, size = unit.shape
            if isinstance(unit, PermutedPages):
                strides = unit.order.block_stride, 0
            else:
                strides = unit.stride(0), unit.stride(1)
            kind = (block_tokens, *strides)
            if kind not in known:
                block, token = np.divmod(numbers, max(block_tokens, 1))
                known[kind] = np.where(numbers == NOWHERE, -1, block * strides[0] + token * strides[1]), token
            begins, tokens = known[kind]
            if isinstance(unit, PermutedPages):
                out.append(Rows(unit.memory, begins, 0, heads, size, unit.order.offsets.numpy(), tokens))
            else:
                out.append(Rows(all_memory(unit), begins, unit.stride(2), heads, size))
    return rows


def _direct(unit: Pages) -> bool:
    """Whether compiled code can write there."""
    return isinstance(unit, PermutedPages) or unit.stride(3) == 1 or unit.shape[3] == 1


def all_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Everything between a tensor's first value and its last."""
    if not tensor.numel():
        return tensor.flatten()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))
