"""Where decoded tokens go: a row for each of them, in a dense tensor or in the pages of a cache.

Both look alike to whoever writes: memory, and for each token the place where its row begins. So pages are written as
the tokens are decoded, without a copy in between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.paged import NOWHERE, PagedCache

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for the keys or the values of one layer, on the CPU.

    Attributes:
        memory: one-dimensional view of everything that the rows lie in.
        begins: int64 `[T]`, where in it the row of each token begins; -1 for a token that is not to be written.
        head_stride: from head to head. The dimensions of a head are adjacent.
        heads, size: heads, and dimensions of each.
    """

    memory: torch.Tensor
    begins: I64
    head_stride: int
    heads: int
    size: int

    def write(self, x: torch.Tensor, at: slice) -> None:
        """Write the tokens `at`, `[t, H, D]` of any dtype; values are rounded to that of the memory."""
        begins = torch.from_numpy(self.begins[at])
        there = begins >= 0
        heads = torch.arange(self.heads) * self.head_stride
        places = begins[there, None, None] + heads[:, None] + torch.arange(self.size)
        self.memory[places] = x[there].to(self.memory.dtype)

    def take(self, part: slice) -> Rows:
        """The rows of some of the tokens."""
        return Rows(self.memory, self.begins[part], self.head_stride, self.heads, self.size)


def dense_rows(tensor: torch.Tensor) -> Rows:
    """The rows of a tensor `[T, H, D]`, whose last dimension is adjacent."""
    tokens, heads, size = tensor.shape
    begins = np.arange(tokens, dtype=np.int64) * tensor.stride(0)
    return Rows(all_memory(tensor), begins, tensor.stride(1), heads, size)


def paged_rows(
    cache: PagedCache, slots: torch.Tensor, layers: range
) -> tuple[list[Rows | None], list[Rows | None]] | None:
    """Rows of a cache for the tokens at `slots`: keys and values by layer, None for layers that are not asked for.

    None if what is decoded cannot be written there as it is: fp8 takes a scale, and compiled code takes strides and
    adjacent dimensions.

    Raises:
        InputError: a slot that the cache does not have.
    """
    if cache.scaled or cache.permuted:
        return None
    units = [unit for index in layers for unit in (cache.keys[index], cache.values[index])]
    if any(unit.stride(3) != 1 and unit.shape[3] > 1 for unit in units):
        return None
    cache.check_range(slots, layers)
    numbers = slots.numpy()
    left_out = numbers == NOWHERE
    known: dict[tuple[int, ...], I64] = {}
    rows: tuple[list[Rows | None], list[Rows | None]] = ([], [])
    for index in range(cache.layout.num_layers):
        for tensor, out in zip((cache.keys[index], cache.values[index]), rows, strict=True):
            if index not in layers:
                out.append(None)
                continue
            _, block_tokens, heads, size = tensor.shape
            kind = (block_tokens, tensor.stride(0), tensor.stride(1))
            if kind not in known:
                block, token = np.divmod(numbers, max(block_tokens, 1))
                known[kind] = np.where(left_out, -1, block * tensor.stride(0) + token * tensor.stride(1))
            out.append(Rows(all_memory(tensor), known[kind], tensor.stride(2), heads, size))
    return rows


def all_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Everything between a tensor's first value and its last."""
    if not tensor.numel():
        return tensor.flatten()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,))
