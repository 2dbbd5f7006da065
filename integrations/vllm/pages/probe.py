"""Find how a serving engine lays out its pages, by writing through the engine's own writer.

    number every value -> the engine writes them into a block -> read where each is -> strides of K and V, or a table

A page is a permutation of the values of a block's tokens: vLLM's GPU backends keep K beside V for each token; its CPU
backend keeps K transposed and V after it, or, with AMX, both in tiles; a latent (V here) has the rotated part of the
keys behind it. If token, head and dimension each advance by a
fixed stride, K and V are strided views of the engine's tensor, and the codec reads and writes through these views.
Otherwise it uses a table of all places, on the CPU only. The layout of one block must hold in other blocks, and for
tokens written in any way: all at once, from the middle of a block to the middle of another, one by one. If it does not,
the engine is refused, because a layout that is only nearly right corrupts silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch

from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.paged import FP8_DTYPES
from cuvee.codec.pages import PageOrder, Pages, PermutedPages

_BASE = 128  # numbers are written in digits of this base: exact in bfloat16 and in dtypes of more bits
_FP8_BASE = 8  # likewise in fp8 of two bits of mantissa
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
    key_dim: int
    value_dim: int
    keys: Strides | PageOrder
    values: Strides | PageOrder

    def views(self, tensor: torch.Tensor) -> tuple[Pages, Pages]:
        """Return K and V `[blocks, block_tokens, heads, key_dim or value_dim]` of a layer's tensor, without a copy.

        Raises:
            UnsupportedModelError: they have no fixed strides, and the tensor is on a device.
        """
        return self._view(tensor, self.keys, self.key_dim), self._view(tensor, self.values, self.value_dim)

    def _view(self, tensor: torch.Tensor, places: Strides | PageOrder, dim: int) -> Pages:
        if isinstance(places, Strides):
            return places.pages(tensor, (self.block_tokens, self.heads, dim))
        if (tensor.shape[0], tensor.stride(0)) != (places.blocks, places.block_stride):
            raise UnsupportedModelError(
                f"{tensor.shape[0]} blocks {tensor.stride(0)} apart, where {places} was found: this attention "
                "backend's cache is not supported"
            )
        return PermutedPages(tensor.as_strided((places.span,), (1,)), places)


def find_page_layout(
    tensor: torch.Tensor, write: Writer, heads: int, key_dim: int, value_dim: int | None = None
) -> PageLayout:
    """Find the layout of a layer's pages. Writes some blocks and restores them.

    Args:
        tensor: the layer's cache, blocks first, any strides, not yet in use.
        write: the engine's writer for this layer, of what the tensor is to hold.
        heads: number of KV heads.
        key_dim: size of a head of keys.
        value_dim: the same for values; None: as of keys.

    Raises:
        UnsupportedModelError: the pages are not a permutation of K and V, or differ between blocks, or lie on a device
            without fixed strides.
    """
    value_dim = key_dim if value_dim is None else value_dim
    block_tokens, rest = divmod(tensor[0].numel(), heads * (key_dim + value_dim))
    if rest or not block_tokens:
        raise UnsupportedModelError(
            f"a block of the engine's cache has {tensor[0].numel()} values, not a multiple of K and V of "
            f"{heads} heads of {key_dim} and {value_dim}: this attention backend is not supported"
        )
    with _restored(tensor):
        layout = _find(tensor, write, (block_tokens, heads, key_dim), (block_tokens, heads, value_dim))
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return fp8 codes as bytes, because torch compares and indexes few of them; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def _drawn(shape: tuple[int, ...], generator: torch.Generator, like: torch.Tensor) -> torch.Tensor:
    """Return random numbers of a tensor's dtype, not too near to zero, where engines round fp8 in different ways."""
    noise = torch.randn(shape, generator=generator, dtype=torch.float32)
    return (noise + noise.sign() / 2).to(like)


@contextmanager
def _restored(tensor: torch.Tensor) -> Iterator[None]:
    blocks, held = _tried(tensor), _bits(tensor)
    kept = held[blocks]
    try:
        yield
    finally:
        held[blocks] = kept


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
    shapes = [(layout.heads, dim) for dim in (layout.key_dim, layout.value_dim)]
    wrote = [
        torch.zeros(len(slots), *shape, device=tensor.device, dtype=torch.float32).to(tensor.dtype) for shape in shapes
    ]
    views = layout.views(tensor)
    for how, parts in ways:
        for part in parts:
            at = part.to(tensor.device)
            drawn = [_drawn((len(part), *shape), generator, tensor) for shape in shapes]
            write(drawn[0], drawn[1], slots[at])
            for held, new in zip(wrote, drawn, strict=True):
                _bits(held)[at] = _bits(new)
        for pages, held, name in zip(views, wrote, ("keys", "values"), strict=True):
            if not torch.equal(_bits(_tokens(pages, blocks, first)), _bits(held)):
                raise UnsupportedModelError(
                    f"the engine's {name} are not where its first block says, written {how}: this attention backend's "
                    "cache is not supported"
                )


def _tokens(pages: Pages, blocks: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Copy these blocks' tokens, `[T, H, D]`."""
    if not isinstance(pages, PermutedPages):
        return _bits(pages)[blocks].view(pages.dtype).flatten(0, 1)
    block, token = torch.meshgrid(blocks, tokens, indexing="ij")
    return pages.take(pages.order.index(block.flatten(), token.flatten()))


def _find(
    tensor: torch.Tensor, write: Writer, key_shape: tuple[int, int, int], value_shape: tuple[int, int, int]
) -> PageLayout:
    block_tokens, heads, key_dim = key_shape
    count, total = prod(key_shape), prod(key_shape) + prod(value_shape)
    base = _FP8_BASE if tensor.dtype in FP8_DTYPES else _BASE
    numbers = torch.arange(total)
    found = torch.zeros(tensor[0].shape, dtype=torch.int64)
    slots = torch.arange(block_tokens, device=tensor.device)
    scale = 1
    while scale < total:
        digits = (numbers // scale % base).float().to(tensor.device, tensor.dtype)
        tensor[0] = _UNWRITTEN
        write(digits[:count].view(key_shape), digits[count:].view(value_shape), slots)
        page = tensor[0].double().cpu()
        if not torch.equal(page.flatten().sort().values, digits.double().cpu().sort().values):
            raise UnsupportedModelError(
                "the engine's writer changes values or leaves holes: its cache is not supported"
            )
        found += page.long() * scale
        scale *= base
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
        for part in (offsets[:count].view(key_shape), offsets[count:].view(value_shape))
    )
    return PageLayout(block_tokens, heads, key_dim, value_shape[2], keys, values)


def _strides(offsets: torch.Tensor) -> Strides | None:
    """Return the strides of offsets `[T, H, D]`; None if they are not fixed."""
    start = int(offsets[0, 0, 0])
    token, head, step = (
        int(offsets.select(axis, 1).flatten()[0]) - start if offsets.shape[axis] > 1 else 0 for axis in range(3)
    )
    ranges = [torch.arange(size) for size in offsets.shape]
    expected = start + ranges[0][:, None, None] * token + ranges[1][:, None] * head + ranges[2] * step
    return Strides(start, (token, head, step)) if torch.equal(offsets, expected) else None
