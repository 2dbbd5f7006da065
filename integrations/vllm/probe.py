"""How a serving engine lays out its pages: found out by writing through the engine's own writer, never assumed.

    number every value -> engine writes them into a block -> where did each number land? -> strides of K and V

A page is a permutation of the values of a block's tokens: vLLM's GPU backends keep K beside V for each token, its CPU
backend keeps K transposed and V after it. Whatever it is, if token, head and dimension each advance by a fixed stride,
K and V are strided views of the engine's tensor, and the codec reads and writes through those. If not, we refuse: a
layout that is only nearly known corrupts silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cuvee.codec.errors import UnsupportedModel

_BASE = 128  # numbers are written in digits of this base: exact in every floating-point dtype of a cache
_UNWRITTEN = -1.0

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys `[T, H, D]`, values `[T, H, D]` to slots, int64 `[T]`, of one layer, as the engine's model does."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where a value lies, in elements from the start of its block: offset + token, head and dimension x stride."""

    block_tokens: int
    heads: int
    dim: int
    key_offset: int
    key_strides: tuple[int, int, int]
    value_offset: int
    value_strides: tuple[int, int, int]

    def views(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[blocks, block_tokens, heads, dim]` of a layer's tensor, without a copy."""
        size = (tensor.shape[0], self.block_tokens, self.heads, self.dim)
        start = tensor.storage_offset()
        return (
            tensor.as_strided(size, (tensor.stride(0), *self.key_strides), start + self.key_offset),
            tensor.as_strided(size, (tensor.stride(0), *self.value_strides), start + self.value_offset),
        )


def find_page_layout(tensor: torch.Tensor, write: Writer, heads: int, dim: int) -> PageLayout:
    """Find the layout of a layer's pages. Blocks 0 and the last one are written, and restored.

    Args:
        tensor: the layer's cache, blocks first, any strides, not in use yet.
        write: the engine's writer for this layer.
        heads: KV heads.
        dim: size of a head, of keys and of values.

    Raises:
        UnsupportedModel: the pages are not strided views of K and V.
    """
    block_tokens, rest = divmod(tensor[0].numel(), heads * 2 * dim)
    if rest or not block_tokens:
        raise UnsupportedModel(
            f"a block of the engine's cache has {tensor[0].numel()} values, not a multiple of K and V of "
            f"{heads} heads of {dim}: this attention backend is not supported"
        )
    with _restored(tensor):
        layout = _find(tensor, write, block_tokens, heads, dim)
        _verify(tensor, write, layout)
    return layout


def verify_page_layout(tensor: torch.Tensor, write: Writer, layout: PageLayout) -> None:
    """Whether a layer's pages are laid out as those of another. Blocks 0 and the last one are written, and restored.

    Raises:
        UnsupportedModel: they are not.
    """
    with _restored(tensor):
        _verify(tensor, write, layout)


@contextmanager
def _restored(tensor: torch.Tensor) -> Iterator[None]:
    kept = tensor[0].clone(), tensor[-1].clone()
    try:
        yield
    finally:
        tensor[0], tensor[-1] = kept


def _verify(tensor: torch.Tensor, write: Writer, layout: PageLayout) -> None:
    """Write random tokens into the first and the last block and read them back through the views."""
    shape = (2 * layout.block_tokens, layout.heads, layout.dim)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator).to(tensor.device, tensor.dtype) for _ in range(2))
    first = torch.arange(layout.block_tokens, device=tensor.device)
    write(keys, values, torch.cat([first, first + (tensor.shape[0] - 1) * layout.block_tokens]))
    for view, wrote, name in zip(layout.views(tensor), (keys, values), ("keys", "values"), strict=True):
        if not torch.equal(torch.cat([view[0], view[-1]]), wrote):
            raise UnsupportedModel(
                f"the engine's {name} are not where its first block says: this attention backend's cache is not "
                "supported"
            )


def _find(tensor: torch.Tensor, write: Writer, block_tokens: int, heads: int, dim: int) -> PageLayout:
    shape = (block_tokens, heads, dim)
    count = block_tokens * heads * dim
    numbers = torch.arange(2 * count)
    found = torch.zeros(tensor[0].shape, dtype=torch.int64)
    slots = torch.arange(block_tokens, device=tensor.device)
    scale = 1
    while scale < 2 * count:
        digits = (numbers // scale % _BASE).to(tensor.device, tensor.dtype)
        tensor[0] = _UNWRITTEN
        write(digits[:count].view(shape), digits[count:].view(shape), slots)
        page = tensor[0].double().cpu()
        if not torch.equal(page.flatten().sort().values, digits.double().cpu().sort().values):
            raise UnsupportedModel("the engine's writer changes values or leaves holes: its cache is not supported")
        found += page.long() * scale
        scale *= _BASE
    order = found.flatten()
    if not torch.equal(order.sort().values, numbers):
        raise UnsupportedModel("the engine's pages are no permutation of their tokens: its cache is not supported")
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True):
        places = places[..., None] + torch.arange(size) * stride
    offsets = torch.empty_like(numbers)
    offsets[order] = places.flatten()
    key_offset, key_strides = _strides(offsets[:count].view(shape), "keys")
    value_offset, value_strides = _strides(offsets[count:].view(shape), "values")
    return PageLayout(block_tokens, heads, dim, key_offset, key_strides, value_offset, value_strides)


def _strides(offsets: torch.Tensor, name: str) -> tuple[int, tuple[int, int, int]]:
    """Offset of the first value and the strides of `[T, H, D]`; raises where they are not fixed."""
    start = int(offsets[0, 0, 0])
    token, head, step = (
        int(offsets.select(axis, 1).flatten()[0]) - start if offsets.shape[axis] > 1 else 0 for axis in range(3)
    )
    ranges = [torch.arange(size) for size in offsets.shape]
    expected = start + ranges[0][:, None, None] * token + ranges[1][:, None] * head + ranges[2] * step
    if not torch.equal(offsets, expected):
        raise UnsupportedModel(
            f"the engine packs its {name} in tiles, not by fixed strides: this attention backend's cache is not "
            "supported"
        )
    return start, (token, head, step)
