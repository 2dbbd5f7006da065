"""The KV cache of a serving engine: blocks of tokens in any physical order, addressed by slots.

    slot s of a layer = token s % block_tokens of block s // block_tokens
    its values        = a strided view (a tensor), or places listed in a table (`PermutedPages`, on the CPU)

`PagedCache` describes existing tensors; it owns nothing and copies nothing. A dense cache is a cache whose single block
holds all tokens, so code that reads or writes a `PagedCache` serves both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.dtypes import TORCH_DTYPES, saturated
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.pages import PageOrder, Pages, PermutedPages
from cuvee.codec.support.arrays import I64

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
NOWHERE = -1  # the slot of a token that is left out


class PagedCache:
    """The memory of a model's KV cache.

    Args:
        layout: layout of the model. Its dtype is the dtype of the values; an fp8 cache holds them divided by a scale.
        keys: per layer `[blocks, block_tokens, heads, head_dim]`, keys post-RoPE. Strides are free: give a view of the
            engine's tensor in this logical order (`kv[..., :D]`, `.permute(...)`), with K and V packed or apart; or
            `PermutedPages`.
        values: per layer `[blocks, block_tokens, heads, value_dim]`, in the same way.
        key_scales: per layer, for fp8: a key is the stored number times its scale. Default 1.
        value_scales: the same for values.

    Raises:
        InputError: the tensors do not have the layout's shapes, or they differ in dtype or device.

    Example:
        >>> from cuvee import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> pages = [torch.zeros(100, 16, 2, 8) for _ in range(3)]  # 100 blocks of 16 tokens
        >>> cache = PagedCache(layout, pages, [torch.zeros_like(p) for p in pages])
        >>> cache.read(torch.tensor([160, 161, 32]), start=0).tokens  # two of block 10, one of block 2
        3
    """

    def __init__(
        self,
        layout: KVLayout,
        keys: Sequence[Pages],
        values: Sequence[Pages],
        key_scales: Sequence[float] | None = None,
        value_scales: Sequence[float] | None = None,
    ) -> None:
        for name, entries in (
            ("keys", keys), ("values", values), ("key_scales", key_scales), ("value_scales", value_scales)
        ):  # fmt: skip
            if entries is not None and len(entries) != layout.num_layers:
                raise InputError(f"{name}: must have the {layout.num_layers} layers of the layout, got {len(entries)}")
        self._hold(
            layout, keys, values, _scales("key_scales", key_scales, layout),
            _scales("value_scales", value_scales, layout),
        )  # fmt: skip
        if self.dtype not in (*TORCH_DTYPES.values(), *FP8_DTYPES):
            raise InputError(f"keys: must be {', '.join(TORCH_DTYPES)} or fp8 (e4m3fn, e5m2), got {self.dtype}")
        for index, layer in enumerate(layout.layers):
            for name, tensor, size in (
                (f"keys[{index}]", self._keys[index], layer.head_dim),
                (f"values[{index}]", self._values[index], layer.value_dim),
            ):
                shape = tensor.shape
                if len(shape) != 4 or shape[2] != layer.kv_heads or shape[3] != size:
                    raise InputError(
                        f"{name}: must have shape [blocks, block_tokens, {layer.kv_heads}, {size}], got {list(shape)}"
                    )
                if tensor.dtype != self.dtype or tensor.device != self.device:
                    raise InputError(
                        f"{name}: must be {self.dtype} on {self.device} like keys[0], got {tensor.dtype} on "
                        f"{tensor.device}"
                    )
        if not self.scaled and any(scale != 1.0 for scale in self.key_scales + self.value_scales):
            raise InputError(f"key_scales, value_scales: must be 1 unless the cache is fp8, got a {self.dtype} cache")

    def _hold(
        self,
        layout: KVLayout,
        keys: Sequence[Pages],
        values: Sequence[Pages],
        key_scales: tuple[float, ...],
        value_scales: tuple[float, ...],
    ) -> None:
        layout.need_layers()
        self.layout = layout
        self._keys, self._values = tuple(keys), tuple(values)
        self.key_scales, self.value_scales = key_scales, value_scales
        self.device, self.dtype = self._keys[0].device, self._keys[0].dtype

    @classmethod
    def dense(cls, layout: KVLayout, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> PagedCache:
        """Make a cache of tensors `[T, H, D]` per layer, each of which is one block: slot t is token t."""
        return cls(layout, [tensor[None] for tensor in keys], [tensor[None] for tensor in values])

    @classmethod
    def of_chunk(cls, chunk: KVChunk) -> PagedCache:
        """Make a dense cache of a chunk's tensors, which are not validated again."""
        return cls._unchecked(chunk.layout, chunk.keys, chunk.values)

    @classmethod
    def empty(cls, layout: KVLayout, tokens: int, layers: range, device: torch.device) -> PagedCache:
        """Make a dense cache of uninitialized tensors: `[tokens, H, D]` in `layers`, `[0, H, D]` in other layers."""
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for index, layer in enumerate(layout.layers):
            rows = tokens if index in layers else 0
            for tensors, size in ((keys, layer.head_dim), (values, layer.value_dim)):
                tensors.append(torch.empty(rows, layer.kv_heads, size, dtype=layout.torch_dtype, device=device))
        return cls._unchecked(layout, keys, values)

    @classmethod
    def _unchecked(cls, layout: KVLayout, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> PagedCache:
        cache = cls.__new__(cls)
        scales = (1.0,) * layout.num_layers
        cache._hold(layout, [tensor[None] for tensor in keys], [tensor[None] for tensor in values], scales, scales)
        return cache

    @property
    def permuted(self) -> bool:
        """Whether some layers are `PermutedPages`, which `keys` and `values` cannot return."""
        return any(isinstance(pages, PermutedPages) for pages in self._keys + self._values)

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """Per layer `[blocks, block_tokens, heads, head_dim]`: views of the engine's memory.

        Raises:
            UnsupportedModelError: the cache is `permuted`.
        """
        return _strided(self._keys)

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """The same for values, `[blocks, block_tokens, heads, value_dim]`."""
        return _strided(self._values)

    def pages(self, layer: int) -> tuple[Pages, Pages]:
        """Return keys and values of a layer, `[blocks, block_tokens, heads, dim]`, of either kind."""
        return self._keys[layer], self._values[layer]

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return keys and values `[T, H, D]` of a layer if they are one block of strided values; None otherwise."""
        keys, values = self.pages(layer)
        if isinstance(keys, PermutedPages) or isinstance(values, PermutedPages):
            return None
        return (keys[0], values[0]) if len(keys) == len(values) == 1 else None

    @property
    def scaled(self) -> bool:
        """Whether the stored numbers are fp8 and have to be multiplied by a scale."""
        return self.dtype in FP8_DTYPES

    def check_slots(self, slots: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """Return `slots` if it is int64 [T] on the cache's device, T = `tokens` if given; else raise InputError."""
        if slots.ndim != 1 or slots.dtype != torch.int64 or slots.device != self.device:
            raise InputError(
                f"slots: must be int64 [T] on {self.device}, got {slots.dtype} {list(slots.shape)} on {slots.device}"
            )
        if tokens is not None and len(slots) != tokens:
            raise InputError(
                f"slots: must name the {tokens} tokens of the blob, got {len(slots)}: use -1 for tokens to leave out"
            )
        return slots

    def run(self, slots: torch.Tensor, layers: range | None = None) -> slice | None:
        """Return a slice if `slots` are consecutive rows of a dense cache, else None."""
        first, last = (int(slots[0]), int(slots[-1])) if len(slots) else (0, -1)
        if first < 0 or last - first + 1 != len(slots):
            return None
        for index in layers or range(self.layout.num_layers):
            rows = self.rows(index)
            if rows is None or last >= min(map(len, rows)):
                return None
        if not torch.equal(slots, torch.arange(first, last + 1, device=slots.device)):
            return None
        return slice(first, last + 1)

    def chunk(
        self, slots: torch.Tensor | None, start: int, token_ids: I64 | None = None, following: int = 0
    ) -> KVChunk:
        """Return the tokens at `slots` as a chunk: views of a dense cache of the layout's dtype, copies of another.

        Without slots, all rows of a dense cache. InputError for a slot that the cache does not have.
        """
        run = slice(None)
        if slots is not None:
            found = self.run(slots) if self.dtype == self.layout.torch_dtype else None
            if found is None:
                return self._read(slots, start, token_ids, following)
            run = found
        keys, values = ([pages[0, run].detach() for pages in unit] for unit in (self.keys, self.values))
        return KVChunk.unchecked(keys, values, self.layout, start, token_ids, following)

    def read(self, slots: torch.Tensor, start: int) -> KVChunk:
        """Return a copy of the tokens at `slots`, int64 `[T]`, as a chunk that begins at position `start`.

        Raises:
            InputError: a slot that the cache does not have.
        """
        chunk = self._read(self.check_slots(slots), start)
        return KVChunk(chunk.keys, chunk.values, self.layout, start)

    def _read(self, slots: torch.Tensor, start: int, token_ids: I64 | None = None, following: int = 0) -> KVChunk:
        layers = range(self.layout.num_layers)
        self.check_range(slots, layers, least=0)
        units = zip(*map(self.reader(slots), layers), strict=True)
        keys, values = (
            [
                _converted(part.detach().float() * scale if self.scaled else part.detach(), self.layout.torch_dtype)
                for part, scale in zip(parts, scales, strict=True)
            ]
            for parts, scales in zip(units, (self.key_scales, self.value_scales), strict=True)
        )
        return KVChunk.unchecked(keys, values, self.layout, start, token_ids, following)

    def layer(self, index: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies `[T, H, D]` of a layer's keys and values at `slots`: see `reader`."""
        return self.reader(slots)(index)

    def reader(self, slots: torch.Tensor) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function that copies the stored keys and values `[T, H, D]` of a layer at `slots`, int64 `[T]`.

        Their places are computed once for all layers. The slots must be the cache's: checking them would wait for the
        device.
        """
        indices = self._indices(slots)

        def read(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = self.pages(index)
            return _take(keys, indices), _take(values, indices)

        return read

    def writer(self, slots: torch.Tensor) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
        """Return a function that replaces the stored keys and values `[T, H, D]` of a layer at `slots`.

        Everything that `reader` says of slots holds here, too.
        """
        indices = self._indices(slots)

        def write(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            for pages, part in zip(self.pages(index), (keys, values), strict=True):
                _put(pages, indices, part)

        return write

    def copy(self, slots: torch.Tensor) -> PagedCache:
        """Copy the tokens at `slots`, int64 `[T]`, into the one block of a dense cache: the numbers as stored.

        The slots must be the cache's: checking them would wait for the device.
        """
        units = zip(*map(self.reader(slots), range(self.layout.num_layers)), strict=True)
        keys, values = ([part[None] for part in parts] for parts in units)
        return PagedCache(self.layout, keys, values, self.key_scales, self.value_scales)

    def write(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        slots: torch.Tensor,
        layers: range | None = None,
    ) -> None:
        """Write tokens `[T, H, D]` per layer, for each of `layers`, to `slots`, int64 `[T]`; -1 leaves a token out.

        Finite values stay finite, and what is NaN or infinite stays so; in float8_e4m3fn, which has no infinities,
        those become the largest number.

        Raises:
            InputError: the cache does not have one of the slots. Nothing is written then.
        """
        self.check_slots(slots)
        layers = layers or range(self.layout.num_layers)
        self.check_range(slots, layers)
        wanted = slots != NOWHERE
        whole = bool(wanted.all())
        put = self.writer(slots if whole else slots[wanted])
        for layer, *units in zip(layers, keys, values, strict=True):
            parts = []
            for unit, scale in zip(units, (self.key_scales[layer], self.value_scales[layer]), strict=True):
                part = unit if whole else unit[wanted]
                if self.scaled:
                    finite = ~part.isinf() if self.dtype == torch.float8_e5m2 else None
                    part = saturated(part.float() / scale, self.dtype, finite)
                parts.append(_converted(part, self.dtype))
            put(layer, *parts)

    def check_range(self, slots: torch.Tensor, layers: range, least: int = NOWHERE) -> None:
        """Raise InputError unless all of `slots` are at least `least` and each of the layers has them."""
        if not len(slots):
            return
        lowest, highest = int(slots.min()), int(slots.max())
        for layer in layers:
            for tensor in self.pages(layer):
                size = tensor.shape[0] * tensor.shape[1]
                if not least <= lowest <= highest < size:
                    raise InputError(f"slots: must be {least} … {size - 1} in layer {layer}, got {lowest} … {highest}")

    def _indices(self, slots: torch.Tensor) -> _Indices:
        """Return the places of the tokens at these slots, for every kind of pages."""
        indices: _Indices = {}
        for tensor in self._keys + self._values:
            kind = _kind(tensor)
            if kind in indices:
                continue
            tokens = max(tensor.shape[1], 1)
            block = torch.div(slots, tokens, rounding_mode="floor")
            token = slots - block * tokens
            indices[kind] = (kind.index(block, token),) if isinstance(kind, PageOrder) else (block, token)
        return indices


# By kind of pages: block and token of each slot, or the index of its values.
_Indices = dict[PageOrder | torch.Size, tuple[torch.Tensor, ...]]


def _strided(pages: Sequence[Pages]) -> tuple[torch.Tensor, ...]:
    tensors = tuple(each for each in pages if isinstance(each, torch.Tensor))
    if len(tensors) < len(pages):
        raise UnsupportedModelError(
            "cache: must have values at fixed strides for the backend 'triton', got permuted pages: use a backend of "
            "the CPU, which reads and writes such pages value by value"
        )
    return tensors


def _kind(pages: Pages) -> PageOrder | torch.Size:
    """Return what places depend on: the order, or the size `[blocks, block_tokens]`."""
    return pages.order if isinstance(pages, PermutedPages) else pages.shape[:2]


def _take(pages: Pages, indices: _Indices) -> torch.Tensor:
    """Return a copy `[T, H, D]` of the tokens at their places."""
    index = indices[_kind(pages)]
    if isinstance(pages, PermutedPages):
        return pages.take(index[0])
    return _plain(pages)[index].view(pages.dtype)


def _put(pages: Pages, indices: _Indices, part: torch.Tensor) -> None:
    """Write tokens `[T, H, D]` to their places."""
    index = indices[_kind(pages)]
    if isinstance(pages, PermutedPages):
        pages.put(index[0], part)
    else:
        _plain(pages)[index] = _plain(part)


def _converted(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in another dtype. Finite ones stay finite; infinite ones stay infinite, as nothing is lost here."""
    return part if part.dtype == dtype else saturated(part, dtype, ~part.isinf())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return fp8 values as bytes, because torch before 2.9 cannot index fp8 on a CPU; others as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def _scales(name: str, scales: Sequence[float] | None, layout: KVLayout) -> tuple[float, ...]:
    values = (1.0,) * layout.num_layers if scales is None else tuple(float(scale) for scale in scales)
    if not all(0.0 < scale < float("inf") for scale in values):
        raise InputError(f"{name}: must be positive and finite, got {values}")
    return values
