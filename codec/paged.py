"""The KV cache of a serving engine: blocks of tokens in any physical order, addressed by slots.

    slot s of a layer = token s % block_tokens of block s // block_tokens

`PagedCache` describes existing tensors; it owns nothing and copies nothing. A dense cache is one whose single block
holds all tokens, so code that reads or writes a `PagedCache` serves both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
NOWHERE = -1  # the slot of a token that is left out


class PagedCache:
    """Where the KV cache of a model lies in memory.

    Args:
        layout: layout of the model. Its dtype is the dtype of the values; an fp8 cache holds them divided by a scale.
        keys: per layer `[blocks, block_tokens, heads, head_dim]`, keys post-RoPE. Strides are free: give a view of the
            engine's tensor in this logical order (`kv[..., :D]`, `.permute(...)`), with K and V packed or apart.
        values: per layer `[blocks, block_tokens, heads, value_dim]`, in the same way.
        key_scales: per layer, for fp8: a key is the stored number times its scale. Default 1.
        value_scales: the same for values.

    Raises:
        InputError: the tensors do not have the layout's shapes, or not all of them have one dtype and one device.

    Example:
        >>> from cuvee import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> pages = [torch.zeros(100, 16, 2, 8) for _ in range(3)]  # 100 blocks of 16 tokens
        >>> cache = PagedCache(layout, pages, [torch.zeros_like(p) for p in pages])
        >>> cache.read(torch.tensor([160, 161, 32]), start=0).tokens  # of block 10, and of block 2
        3
    """

    def __init__(
        self,
        layout: KVLayout,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        key_scales: Sequence[float] | None = None,
        value_scales: Sequence[float] | None = None,
    ) -> None:
        for name, given in (
            ("keys", keys), ("values", values), ("key_scales", key_scales), ("value_scales", value_scales)
        ):  # fmt: skip
            if given is not None and len(given) != layout.num_layers:
                raise InputError(f"{name} has {len(given)} layers, the layout {layout.num_layers}")
        self.layout = layout
        self.keys = tuple(keys)
        self.values = tuple(values)
        self._rows: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None
        self.key_scales = _scales("key_scales", key_scales, layout)
        self.value_scales = _scales("value_scales", value_scales, layout)
        first = self.keys[0]
        self.device, self.dtype = first.device, first.dtype
        if self.dtype not in (*TORCH_DTYPES.values(), *FP8_DTYPES):
            raise InputError(f"keys are {self.dtype}: a cache must be {', '.join(TORCH_DTYPES)} or fp8 (e4m3fn, e5m2)")
        for index, layer in enumerate(layout.layers):
            for name, tensor, size in (
                ("keys", self.keys[index], layer.head_dim),
                ("values", self.values[index], layer.value_dim),
            ):
                shape = tensor.shape
                if len(shape) != 4 or shape[2] != layer.kv_heads or shape[3] != size:
                    raise InputError(
                        f"{name} of layer {index} must have shape [blocks, block_tokens, {layer.kv_heads}, {size}], "
                        f"got {list(shape)}"
                    )
                if tensor.dtype != self.dtype or tensor.device != self.device:
                    raise InputError(
                        f"{name} of layer {index} are {tensor.dtype} on {tensor.device}, keys of layer 0 {self.dtype} "
                        f"on {self.device}: all must be alike"
                    )
        if not self.scaled and any(scale != 1.0 for scale in self.key_scales + self.value_scales):
            raise InputError(f"a {self.dtype} cache has no scales: key_scales and value_scales are for fp8")

    @classmethod
    def dense(cls, layout: KVLayout, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> PagedCache:
        """A cache of tensors `[T, H, D]` per layer, each of them one block: slot t is token t."""
        cache = cls(layout, [tensor[None] for tensor in keys], [tensor[None] for tensor in values])
        cache._rows = keys, values
        return cache

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values `[T, H, D]` of a layer of a dense cache; None where its tokens lie in several blocks."""
        if self._rows is not None:
            return self._rows[0][layer], self._rows[1][layer]
        keys, values = self.keys[layer], self.values[layer]
        return (keys[0], values[0]) if len(keys) == len(values) == 1 else None

    @property
    def scaled(self) -> bool:
        """Whether the stored numbers are fp8 and have to be multiplied by a scale."""
        return self.dtype in FP8_DTYPES

    def check_slots(self, slots: torch.Tensor, tokens: int | None = None) -> torch.Tensor:
        """`slots`, if it is int64 [T] on the cache's device (with T = `tokens`, if given); else raise InputError."""
        if slots.ndim != 1 or slots.dtype != torch.int64 or slots.device != self.device:
            raise InputError(
                f"slots must be int64 [T] on {self.device}, got {slots.dtype} {list(slots.shape)} on {slots.device}"
            )
        if tokens is not None and len(slots) != tokens:
            raise InputError(f"slots name {len(slots)} tokens, the blob holds {tokens}: use -1 for those to leave out")
        return slots

    def run(self, slots: torch.Tensor, layers: range | None = None) -> slice | None:
        """The tokens at `slots`, int64 `[T]`, as rows of a dense cache; None where they are no run of its rows.

        Args:
            slots: of adjacent tokens, or of any.
            layers: the layers whose tensors must have those rows; default all.
        """
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

    def chunk(self, slots: torch.Tensor, start: int) -> KVChunk:
        """The tokens at `slots` as a chunk: views of a dense cache of the layout's dtype, a copy of any other.

        Raises:
            InputError: a slot that the cache does not have.
        """
        self.check_slots(slots)
        rows = self.run(slots) if self.dtype == self.layout.torch_dtype else None
        if rows is None:
            return self.read(slots, start)
        return KVChunk([k[0, rows] for k in self.keys], [v[0, rows] for v in self.values], self.layout, start)

    def read(self, slots: torch.Tensor, start: int) -> KVChunk:
        """A copy of the tokens at `slots`, int64 `[T]`, as a chunk that begins at position `start`.

        Raises:
            InputError: a slot that the cache does not have.
        """
        self.check_slots(slots)
        dtype = self.layout.torch_dtype
        places = self._places(slots, range(self.layout.num_layers), least=0)
        out: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
        for name, tensors, scales in (
            ("keys", self.keys, self.key_scales),
            ("values", self.values, self.value_scales),
        ):
            for tensor, scale in zip(tensors, scales, strict=True):
                part = tensor[places[tensor.shape[:2]]]
                out[name].append((part.float() * scale).to(dtype) if self.scaled else part.to(dtype))
        return KVChunk(out["keys"], out["values"], self.layout, start)

    def write(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        slots: torch.Tensor,
        layers: range | None = None,
    ) -> None:
        """Write tokens `[T, H, D]` per layer to `slots`, int64 `[T]`. The slot -1 leaves a token out.

        Args:
            keys: one tensor for each of `layers`.
            values: the same for values.
            slots: where the tokens go.
            layers: which layers; default: all.

        Raises:
            InputError: the cache does not have one of the slots. Nothing is written then.
        """
        self.check_slots(slots)
        layers = layers or range(self.layout.num_layers)
        self._places(slots, layers, least=NOWHERE)
        wanted = slots != NOWHERE
        whole = bool(wanted.all())
        places = self._places(slots if whole else slots[wanted], layers, least=0)
        for given, tensors, scales in (
            (keys, self.keys, self.key_scales),
            (values, self.values, self.value_scales),
        ):
            for layer, source in zip(layers, given, strict=True):
                tensor = tensors[layer]
                part = source if whole else source[wanted]
                if self.scaled:
                    limit = torch.finfo(self.dtype).max
                    part = (part.float() / scales[layer]).clamp(-limit, limit)
                tensor[places[tensor.shape[:2]]] = part.to(self.dtype)

    def _places(
        self, slots: torch.Tensor, layers: range, least: int
    ) -> dict[torch.Size, tuple[torch.Tensor, torch.Tensor]]:
        """Block and token of each slot, for every size `[blocks, block_tokens]` that tensors of these layers have."""
        places: dict[torch.Size, tuple[torch.Tensor, torch.Tensor]] = {}
        lowest, highest = (int(slots.min()), int(slots.max())) if len(slots) else (0, -1)
        for layer in layers:
            for tensor in (self.keys[layer], self.values[layer]):
                size = tensor.shape[:2]
                if size in places:
                    continue
                if len(slots) and not least <= lowest <= highest < size[0] * size[1]:
                    raise InputError(
                        f"slots reach from {lowest} to {highest}, layer {layer} has {size[0] * size[1]} slots"
                    )
                block = torch.div(slots, max(size[1], 1), rounding_mode="floor")
                places[size] = block, slots - block * size[1]
        return places


def _scales(name: str, scales: Sequence[float] | None, layout: KVLayout) -> tuple[float, ...]:
    given = (1.0,) * layout.num_layers if scales is None else tuple(float(scale) for scale in scales)
    if not all(0.0 < scale < float("inf") for scale in given):
        raise InputError(f"{name} must be positive and finite, got {given}")
    return given
