"""Pages whose values lie at no fixed strides, as those of some attention backends on CPUs."""

from __future__ import annotations

import torch

from cuvee.codec.errors import InputError, UnsupportedModelError

# By size in bytes: dtypes that stand in for values which are copied and never computed with.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PageOrder:
    """The places of a block's values where no strides describe them; the same in every block.

    Args:
        offsets: int64 `[block_tokens, heads, dim]`, elements from the start of the block.
        blocks: number of blocks.
        block_stride: elements from the start of a block to the start of the next.

    Attributes:
        span: elements from the start of the first block to the last value of the last one.

    Raises:
        InputError: two values at one place, or a place before the start of the block.
    """

    def __init__(self, offsets: torch.Tensor, blocks: int, block_stride: int) -> None:
        if offsets.ndim != 3 or offsets.dtype != torch.int64 or not offsets.numel() or int(offsets.min()) < 0:
            raise InputError(
                "offsets: must be int64 [block_tokens, heads, dim] of at least 0, "
                f"got {offsets.dtype} {list(offsets.shape)}"
            )
        if blocks < 1 or block_stride < 1:
            raise InputError(f"blocks, block_stride: must be at least 1, got {blocks}, {block_stride}")
        # Two values share a place, in one block or in two, if their offsets differ by fewer than `blocks` strides.
        rest, stride = offsets.flatten() % block_stride, offsets.flatten() // block_stride
        places = (rest * (int(stride.max()) + blocks) + stride).sort().values
        if bool((places.diff() < blocks).any()):
            raise InputError("offsets: must be a permutation, got two values of the cache at one place")
        self.offsets = offsets.contiguous()
        self.blocks = blocks
        self.block_stride = block_stride
        self.span = (blocks - 1) * block_stride + int(offsets.max()) + 1

    def __repr__(self) -> str:
        tokens, heads, dim = self.offsets.shape
        return f"PageOrder({self.blocks} blocks {self.block_stride} apart, {tokens} tokens of {heads} x {dim} permuted)"

    def index(self, block: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """Return the places of some tokens' values, int64 `[T * heads * dim]`; block and token are int64 `[T]`."""
        return (self.offsets[token] + (block * self.block_stride)[:, None, None]).flatten()


class PermutedPages:
    """K or V of one layer, `[blocks, block_tokens, heads, dim]`, in a `PageOrder`. On the CPU only.

    Args:
        memory: `[order.span]` contiguous, from the start of the first block on; not copied.
        order: shared by all layers with this arrangement of pages.

    Attributes:
        memory, order: as given.
        device, dtype: of the memory.
        shape: `[blocks, block_tokens, heads, dim]`.

    Raises:
        InputError: memory of another size.
        UnsupportedModelError: memory of a device, whose kernels take strides.
    """

    def __init__(self, memory: torch.Tensor, order: PageOrder) -> None:
        if memory.device.type != "cpu":
            raise UnsupportedModelError(
                f"memory: must be on the CPU if its values lie at no fixed strides, got {memory.device}: the cache of "
                "this attention backend is not supported"
            )
        if memory.shape != (order.span,) or not memory.is_contiguous():
            raise InputError(f"memory: must be contiguous [{order.span}], got {list(memory.shape)}")
        self.memory = memory
        self.order = order
        self.device, self.dtype = memory.device, memory.dtype
        self.shape = torch.Size((order.blocks, *order.offsets.shape))
        self._bits = memory.view(_BITS[memory.element_size()])

    def take(self, index: torch.Tensor) -> torch.Tensor:
        """Return a copy of the values at `order.index(...)`, `[T, heads, dim]`."""
        return self._bits.index_select(0, index).view(self.dtype).view(-1, *self.shape[2:])

    def put(self, index: torch.Tensor, part: torch.Tensor) -> None:
        """Write `[T, heads, dim]` of the cache's dtype to `order.index(...)`."""
        self._bits.scatter_(0, index, part.reshape(-1).view(self._bits.dtype))


Pages = torch.Tensor | PermutedPages
"""K or V of one layer, `[blocks, block_tokens, heads, dim]`."""
