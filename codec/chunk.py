"""A run of tokens of one sequence's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout


@dataclass(frozen=True, slots=True, init=False, eq=False)
class KVChunk:
    """A run of adjacent tokens of one sequence's KV cache, keys as the model cached them (after RoPE).

    Args:
        keys: tensor [L, T, H, D], or a sequence of L tensors [T, H_l, D_l]; dtype `layout.dtype`.
        values: the same with the value size of each layer.
        layout: layout of the model.
        start: position of the first token.

    The tensors are kept as views: nothing is copied.

    Raises:
        InputError: wrong count, shape, dtype or device, no tokens, or positions the model does not have.

    Example:
        >>> from cuvee import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> chunk = KVChunk(torch.zeros(3, 10, 2, 8), torch.zeros(3, 10, 2, 8), layout, start=100)
        >>> chunk.slice(4, 10).start
        104
    """

    keys: tuple[torch.Tensor, ...] = field(repr=False)
    values: tuple[torch.Tensor, ...] = field(repr=False)
    layout: KVLayout = field(repr=False)
    start: int
    tokens: int

    def __init__(
        self,
        keys: torch.Tensor | Sequence[torch.Tensor],
        values: torch.Tensor | Sequence[torch.Tensor],
        layout: KVLayout,
        start: int = 0,
    ) -> None:
        if not isinstance(layout, KVLayout):
            raise InputError(f"layout must be a KVLayout, got {layout!r}")
        key_layers = _per_layer("keys", keys, layout)
        value_layers = _per_layer("values", values, layout)
        tokens, device = key_layers[0].shape[0], key_layers[0].device
        if tokens == 0:
            raise InputError("keys hold no tokens (T = 0): a chunk needs at least one")
        for index, layer in enumerate(layout.layers):
            for name, tensor, size in (
                ("keys", key_layers[index], layer.head_dim),
                ("values", value_layers[index], layer.value_dim),
            ):
                expected = (tokens, layer.kv_heads, size)
                if tuple(tensor.shape) != expected:
                    raise InputError(
                        f"{name} of layer {index} must have shape [T, H, D] = {list(expected)}, "
                        f"got {list(tensor.shape)}"
                    )
                if tensor.dtype != layout.torch_dtype:
                    raise InputError(_wrong_dtype(f"{name} of layer {index}", tensor.dtype, layout.dtype))
                if tensor.device != device:
                    raise InputError(
                        f"{name} of layer {index} are on {tensor.device}, keys of layer 0 on {device}: "
                        "move all layers to one device"
                    )
        if type(start) is not int or start < 0:
            raise InputError(f"start must be an int >= 0, got {start!r}")
        if layout.max_positions is not None and start + tokens > layout.max_positions:
            raise InputError(
                f"start + tokens = {start} + {tokens} is beyond the {layout.max_positions} positions of the "
                f"model ({layout.model_type}, KVLayout.max_positions)"
            )
        object.__setattr__(self, "keys", key_layers)
        object.__setattr__(self, "values", value_layers)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "tokens", tokens)

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, uncompressed."""
        return self.tokens * self.layout.bytes_per_token

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.keys[0].device

    def slice(self, t0: int, t1: int) -> KVChunk:
        """Tokens t0 <= t < t1 of this chunk (views), at their own positions.

        Raises:
            InputError: not 0 <= t0 < t1 <= tokens.
        """
        if type(t0) is not int or type(t1) is not int or not 0 <= t0 < t1 <= self.tokens:
            raise InputError(f"slice needs 0 <= t0 < t1 <= {self.tokens}, got t0={t0!r}, t1={t1!r}")
        return KVChunk(
            [keys[t0:t1] for keys in self.keys],
            [values[t0:t1] for values in self.values],
            self.layout,
            self.start + t0,
        )

    @classmethod
    def concat(cls, chunks: Sequence[KVChunk]) -> KVChunk:
        """One chunk out of adjacent ones (copies).

        Raises:
            InputError: no chunks, a gap or overlap, or chunks of different layouts.
        """
        if not chunks:
            raise InputError("concat needs at least one chunk")
        layout = chunks[0].layout
        for index in range(1, len(chunks)):
            if chunks[index].layout.fingerprint != layout.fingerprint:
                raise InputError(f"chunks[{index}] has another layout than chunks[0]")
            if chunks[index].start != chunks[index - 1].end:
                raise InputError(
                    f"chunks[{index}] starts at {chunks[index].start}, but chunks[{index - 1}] "
                    f"ends at {chunks[index - 1].end}: pass adjacent chunks in order"
                )
        return cls(
            [torch.cat(layer) for layer in zip(*(chunk.keys for chunk in chunks), strict=True)],
            [torch.cat(layer) for layer in zip(*(chunk.values for chunk in chunks), strict=True)],
            layout,
            chunks[0].start,
        )


def _per_layer(name: str, tensors: torch.Tensor | Sequence[torch.Tensor], layout: KVLayout) -> tuple[torch.Tensor, ...]:
    if isinstance(tensors, torch.Tensor):
        if tensors.ndim != 4:
            raise InputError(f"{name} must have shape [L, T, H, D], got {list(tensors.shape)}")
        layers = tensors.unbind(0)
    else:
        layers = tuple(tensors)
        for index, tensor in enumerate(layers):
            shape = getattr(tensor, "shape", type(tensor).__name__)
            if isinstance(shape, str) or len(shape) != 3:
                raise InputError(f"{name} of layer {index} must be a tensor [T, H, D], got {shape}")
    if len(layers) != layout.num_layers:
        raise InputError(f"{name} have {len(layers)} layers, the layout ({layout.model_type}) {layout.num_layers}")
    return tuple(layer.detach() for layer in layers)  # a chunk is data: no graph hangs on to it


def _wrong_dtype(what: str, got: torch.dtype, expected: str) -> str:
    if got in (torch.uint8, torch.int8) or str(got).startswith("torch.float8"):
        return (
            f"{what} are {got}: an fp8 or int8 cache must be dequantized by value with its scales "
            f"to {expected} first, never reinterpreted"
        )
    return f"{what} are {got}, the layout says {expected}: convert them, or build the layout with that dtype"
