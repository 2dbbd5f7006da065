"""Find how a serving engine lays out its pages, by writing through the engine's own writer.

    number every value -> the engine writes them into a block -> read where each is -> strides of K and V, or a table

A page is a permutation of the values of a block's tokens: vLLM's GPU backends keep K beside V for each token; its CPU
backend keeps K transposed and V after it, or, with AMX, both in tiles. If token, head and dimension each advance by a
fixed stride, K and V are strided views of the engine's tensor, and the codec reads and writes through these views.
Otherwise it uses a table of all places, on the CPU only. The layout of one block must hold in other blocks, and for
tokens written in any way: all at once, from the middle of a block to the middle of another, one by one. If it does not,
the engine is refused, because a layout that is only nearly right corrupts silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.pages import PageOrder, Pages, PermutedPages

_BASE = 128  # numbers are written in digits of this base: exact in every floating-point dtype of a cache
_UNWRITTEN = -1.0

Writer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values `[T, H, D]` to slots, int64 `[T]`, of one layer, as the engine's model does."""


@dataclass(frozen=True, slots=True)
class Strides:
    """K or V of a block at fixed strides of token, head and dimension from an offset, in elements from its start."""

    offset: int
    strides: tuple[int, int, int]

    def pages(self, tensor: torch.Tensor, size: tuple[int, int, int]) -> torch.Tensor:
        """Return the view `[blocks, *size]` of a layer's tensor."""
        start = tensor.storage_offset() + self.offset
        return tensor.as_strided((tensor.shape[0], *size), (tensor.stride(0), *self.strides), start)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The places of a block's values, the same in every block of tensors with one shape and strides."""

    block_tokens: int
    heads: int
    dim: int
    keys: Strides | PageOrder
    values: Strides | PageOrder

    def views(self, tensor: torch.Tensor) -> tuple[Pages, Pages]:
        """Return K and V `[blocks, block_tokens, heads, dim]` of a layer's tensor, without a copy.

        Raises:
            UnsupportedModelError: they have no fixed strides, and the tensor is on a device.
        """
        return self._view(tensor, self.keys), self._view(tensor, self.values)

    def _view(self, tensor: torch.Tensor, places: Strides | PageOrder) -> Pages:
        if isinstance(places, Strides):
            return places.pages(tensor, (self.block_tokens, self.heads, self.dim))
        if (tensor.shape[0], tensor.stride(0)) != (places.blocks, places.block_stride):
            raise UnsupportedModelError(
                f"{tensor.shape[0]} blocks {tensor.stride(0)} apart, where {places} was found: this attention "
                "backend's cache is not supported"
            )
        return PermutedPages(tensor.as_strided((places.span,), (1,)), places)


def find_page_layout(tensor: torch.Tensor, write: Writer, heads: int, dim: int) -> PageLayout:
    """Find the layout of a layer's pages. Writes some blocks and restores them.

    Args:
        tensor: the layer's cache, blocks first, any strides, not yet in use.
        write: the engine's writer for this layer.
        heads: number of KV heads.
        dim: size of a head, of keys and of values.

    Raises:
        UnsupportedModelError: the pages are not a permutation of K and V, or differ between blocks, or lie on a device
            without fixed strides.
    """
    block_tokens, rest = divmod(tensor[0].numel(), heads * 2 * dim)
    if rest or not block_tokens:
        raise UnsupportedModelError(
            f"a block of the engine's cache has {tensor[0].numel()} values, not a multiple of K and V of "
            f"{heads} heads of {dim}: this attention backend is not supported"
        )
    with _restored(tensor):
        layout = _find(tensor, write, block_tokens, heads, dim)
        _verify(tensor, write, layout)
    return layout


def verify_page_layout(tensor: torch.Tensor, write: Writer, layout: PageLayout) -> None:
    """Check that a layer's pages have this layout. Writes some blocks and restores them.

    Raises:
        UnsupportedModelError: they have another layout.
    """
    with _restored(tensor):
        _verify(tensor, write, layout)


def _tried(tensor: torch.Tensor) -> torch.Tensor:
    """Return the blocks to write: the first, the last, and two between them."""
    last = tensor.shape[0] - 1
    return torch.tensor(sorted({0, last // 3, last - last // 3, last}), device=tensor.device)


@contextmanager
def _restored(tensor: torch.Tensor) -> Iterator[None]:
    blocks = _tried(tensor)
    kept = tensor[blocks]
    try:
        yield
    finally:
        tensor[blocks] = kept


def _verify(tensor: torch.Tensor, write: Writer, layout: PageLayout) -> None:
    """Write random tokens into several blocks, in each of the ways that an engine does, and check all of them."""
    blocks, tokens = _tried(tensor), layout.block_tokens
    first = torch.arange(tokens, device=tensor.device)
    slots = (blocks[:, None] * tokens + first).flatten()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(slots), generator=generator)
    # Writing about every other token shows whether a write changes tokens that it must not touch.
    ways = (
        ("all at once", [torch.arange(len(slots))]),
        ("in part", [torch.arange(tokens // 2, len(slots) - tokens // 3)]),
        ("one by one", list(order[: -(-len(slots) // 2), None])),
    )
    shape = (len(slots), layout.heads, layout.dim)
    wrote = [torch.zeros(shape, dtype=tensor.dtype, device=tensor.device) for _ in range(2)]
    views = layout.views(tensor)
    for how, parts in ways:
        for part in parts:
            at = part.to(tensor.device)
            drawn = [torch.randn(len(part), *shape[1:], generator=generator).to(tensor) for _ in wrote]
            write(drawn[0], drawn[1], slots[at])
            for held, new in zip(wrote, drawn, strict=True):
                held[at] = new
        for pages, held, name in zip(views, wrote, ("keys", "values"), strict=True):
            if not torch.equal(_tokens(pages, blocks, first), held):
                raise UnsupportedModelError(
                    f"the engine's {name} are not where its first block says, written {how}: this attention backend's "
                    "cache is not supported"
                )


def _tokens(pages: Pages, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Copy these blocks' tokens, `[T, H, D]`."""
    if not isinstance(pages, PermutedPages):
        return pages[blocks].flatten(0, 1)
    block, token = torch.meshgrid(blocks, tokens, indexing="ij")
    return pages.take(pages.order.index(block.flatten(), token.flatten()))


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
            raise UnsupportedModelError(
                "the engine's writer changes values or leaves holes: its cache is not supported"
            )
        found += page.long() * scale
        scale *= _BASE
    order = found.flatten()
    if not torch.equal(order.sort().values, numbers):
        raise UnsupportedModelError("the engine's pages are no permutation of their tokens: its cache is not supported")
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True):
        places = places[..., None] + torch.arange(size) * stride
    offsets = torch.empty_like(numbers)
    offsets[order] = places.flatten()
    keys, values = (
        _strides(part) or PageOrder(part, tensor.shape[0], tensor.stride(0))
        for part in (offsets[:count].view(shape), offsets[count:].view(shape))
    )
    return PageLayout(block_tokens, heads, dim, keys, values)


def _strides(offsets: torch.Tensor) -> Strides | None:
    """Return the strides of offsets `[T, H, D]`; None if they are not fixed."""
    start = int(offsets[0, 0, 0])
    token, head, step = (
        int(offsets.select(axis, 1).flatten()[0]) - start if offsets.shape[axis] > 1 else 0 for axis in range(3)
    )
    ranges = [torch.arange(size) for size in offsets.shape]
    expected = start + ranges[0][:, None, None] * token + ranges[1][:, None] * head + ranges[2] * step
    return Strides(start, (token, head, step)) if torch.equal(offsets, expected) else None
