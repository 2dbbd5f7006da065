"""Where decoded tokens go: one row per token, in a dense tensor or in the pages of a cache.

Both look alike to the stages: memory, and for each token the place where its row begins. So the stages decode straight
into pages, without a copy in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.codec.pages import PermutedPages
from cuvee.codec.support.arrays import I64

_NO_OFFSETS, _NO_KINDS = np.empty((0, 0, 0), np.int64), np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the keys or the values of one layer, on the CPU.

    Attributes:
        memory: one-dimensional view that spans all rows.
        begins: int64 `[T]`, where in `memory` the row of each token begins; -1 for a token that is not written.
        head_stride: from head to head. The dimensions of a head are adjacent.
        offsets: int64 `[K, H, D]`, from the begin of a row to each of its values, for K kinds of rows; `[0, 0, 0]` if
            strides describe the rows.
        kinds: int64 `[T]`, the kind of each token's row; not read without `offsets`.
    """

    memory: torch.Tensor
    begins: I64
    head_stride: int
    heads: int
    size: int
    offsets: I64 = field(default_factory=lambda: _NO_OFFSETS)
    kinds: I64 = field(default_factory=lambda: _NO_KINDS)

    def write(self, x: torch.Tensor, at: slice) -> None:
        """Write the tokens `at`, `[t, H, D]` of any dtype; values are rounded to the memory's dtype."""
        begins = torch.from_numpy(self.begins[at])
        there = begins >= 0
        if len(self.offsets):
            offsets = torch.from_numpy(self.offsets[self.kinds[at]])[there]
        else:
            offsets = torch.arange(self.heads)[:, None] * self.head_stride + torch.arange(self.size)
        self.memory[begins[there, None, None] + offsets] = x[there].to(self.memory.dtype)

    def take(self, part: slice) -> Rows:
        """Return the rows of some of the tokens."""
        return Rows(
            self.memory, self.begins[part], self.head_stride, self.heads, self.size, self.offsets, self.kinds[part]
        )


def dense_rows(tensor: torch.Tensor, tokens: I64 | None = None) -> Rows:
    """Return the rows of a tensor `[T, H, D]` whose last dimension is adjacent; of these of its tokens, if given."""
    count, heads, size = tensor.shape
    numbers = np.arange(count, dtype=np.int64) if tokens is None else tokens
    return Rows(all_memory(tensor), numbers * tensor.stride(0), tensor.stride(1), heads, size)


def has_rows(cache: PagedCache) -> bool:
    """Return whether the stages can write to a cache: it has no scales."""
    return not cache.scaled


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
    known: dict[tuple[int, int, int], tuple[I64, I64]] = {}
    orders: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[I64, I64]] = {}
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
            elif unit.stride(3) == 1 or size == 1:
                out.append(Rows(all_memory(unit), begins, unit.stride(2), heads, size))
            else:  # vLLM's keys on a CPU: a dimension of all tokens of a block, then the next
                key = unit.shape[2:], unit.stride()[2:]
                if key not in orders:
                    orders[key] = (
                        np.arange(heads)[:, None] * unit.stride(2) + np.arange(size) * unit.stride(3)
                    )[None], np.zeros(len(numbers), np.int64)  # fmt: skip
                out.append(Rows(all_memory(unit), begins, 0, heads, size, *orders[key]))
    return rows


def all_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of everything between a tensor's first value and its last."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not tensor.numel():
        return tensor.flatten()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))
