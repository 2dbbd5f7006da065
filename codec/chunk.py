"""A run of tokens of one sequence's KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.support.arrays import I64
from cuvee.codec.token_ids import as_token_ids


@dataclass(frozen=True, slots=True, init=False, eq=False)
class KVChunk:
    """A run of adjacent tokens of one sequence's KV cache, with keys as the model cached them (after RoPE).

    Args:
        keys: tensor [L, T, H, D], or a sequence of L tensors [T, H_l, D_l]; dtype `layout.dtype`.
        values: the same, with each layer's value size.
        layout: layout of the model.
        start: position of the first token.
        token_ids: ids of the tokens, `[T]` integers, `cuvee.NO_TOKEN` for a token without one; None if unknown. With
            them, a profile with a token table makes smaller blobs.
        following: number of tokens that follow the last one in the same cache. The nearer a token is to the end of the
            cache, the more the next tokens depend on it, so calibrated profiles code the last tokens finer. `slice`
            counts them.

    The chunk keeps views of the tensors and copies nothing.

    Raises:
        InputError: wrong count, shape, dtype or device, no tokens, positions that the model does not have, negative
            token ids, or `following` below zero.

    Example:
        >>> from cuvee import LayerLayout
        >>> layout = KVLayout("mine", (LayerLayout(2, 8, 8, None),) * 3, "float32", max_positions=None)
        >>> chunk = KVChunk(torch.zeros(3, 10, 2, 8), torch.zeros(3, 10, 2, 8), layout, start=100)
        >>> chunk.slice(4, 8).start, chunk.slice(4, 8).following
        (104, 2)
    """

    keys: tuple[torch.Tensor, ...] = field(repr=False)
    values: tuple[torch.Tensor, ...] = field(repr=False)
    layout: KVLayout = field(repr=False)
    start: int
    token_ids: I64 | None = field(repr=False)
    following: int

    def __init__(
        self,
        keys: torch.Tensor | Sequence[torch.Tensor],
        values: torch.Tensor | Sequence[torch.Tensor],
        layout: KVLayout,
        start: int = 0,
        token_ids: object = None,
        following: int = 0,
    ) -> None:
        if not isinstance(layout, KVLayout):
            raise InputError(f"layout: must be a KVLayout, got {layout!r}")
        layout.need_layers()
        key_layers = _per_layer("keys", keys, layout)
        value_layers = _per_layer("values", values, layout)
        tokens, device = key_layers[0].shape[0], key_layers[0].device
        if tokens == 0:
            raise InputError("keys: must hold at least one token, got T = 0")
        for index, layer in enumerate(layout.layers):
            for name, tensor, size in (
                (f"keys[{index}]", key_layers[index], layer.head_dim),
                (f"values[{index}]", value_layers[index], layer.value_dim),
            ):
                expected = (tokens, layer.kv_heads, size)
                if tuple(tensor.shape) != expected:
                    raise InputError(f"{name}: must have shape [T, H, D] = {list(expected)}, got {list(tensor.shape)}")
                if tensor.dtype != layout.torch_dtype:
                    raise _dtype_error(name, tensor.dtype, layout.dtype)
                if tensor.device != device:
                    raise InputError(
                        f"{name}: must be on {device} like keys[0], got {tensor.device}: move all layers to one device"
                    )
        layout.check_positions(start, tokens)
        ids = None if token_ids is None else as_token_ids(token_ids, tokens, "token_ids")
        check_following(following)
        self._hold(key_layers, value_layers, layout, start, ids, following)

    def _hold(self, *values: object) -> None:
        for attribute, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, attribute.name, value)

    @classmethod
    def unchecked(
        cls,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        layout: KVLayout,
        start: int,
        token_ids: I64 | None = None,
        following: int = 0,
    ) -> KVChunk:
        """Make a chunk of tensors that are known to fit: nothing is validated."""
        chunk = cls.__new__(cls)
        chunk._hold(tuple(keys), tuple(values), layout, start, token_ids, following)
        return chunk

    def with_token_ids(self, token_ids: object) -> KVChunk:
        """Return the chunk with other ids, `[T]` integers or None; errors as for the class."""
        if token_ids is self.token_ids:
            return self
        ids = None if token_ids is None else as_token_ids(token_ids, self.tokens, "token_ids")
        return KVChunk.unchecked(self.keys, self.values, self.layout, self.start, ids, self.following)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.keys[0])

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.tokens

    @property
    def nbytes(self) -> int:
        """Uncompressed size of keys and values, in bytes."""
        return self.tokens * self.layout.bytes_per_token

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.keys[0].device

    def slice(self, t0: int, t1: int) -> KVChunk:
        """Return the tokens t0 <= t < t1 of this chunk, at their own positions, as views.

        Raises:
            InputError: not 0 <= t0 < t1 <= tokens.
        """
        if type(t0) is not int or type(t1) is not int or not 0 <= t0 < t1 <= self.tokens:
            raise InputError(f"t0, t1: must be 0 <= t0 < t1 <= {self.tokens}, got {t0!r}, {t1!r}")
        keys, values = ([layer[t0:t1] for layer in unit] for unit in (self.keys, self.values))
        ids = None if self.token_ids is None else self.token_ids[t0:t1]
        return KVChunk.unchecked(keys, values, self.layout, self.start + t0, ids, self.following + self.tokens - t1)

    @classmethod
    def concat(cls, chunks: Sequence[KVChunk]) -> KVChunk:
        """Join adjacent chunks into one, which holds copies. It has token ids if all chunks have them.

        Raises:
            InputError: no chunks, a gap or overlap, or chunks of different layouts.
        """
        if not chunks:
            raise InputError("chunks: must be at least one, got none")
        layout = chunks[0].layout
        for index in range(1, len(chunks)):
            if chunks[index].layout.fingerprint != layout.fingerprint:
                raise InputError(f"chunks[{index}]: must have the layout of chunks[0], got another one")
            if chunks[index].start != chunks[index - 1].end:
                raise InputError(
                    f"chunks[{index}]: must start at {chunks[index - 1].end}, where chunks[{index - 1}] ends, got "
                    f"{chunks[index].start}: pass adjacent chunks in order"
                )
        ids = [chunk.token_ids for chunk in chunks if chunk.token_ids is not None]
        return cls(
            [torch.cat(layer) for layer in zip(*(chunk.keys for chunk in chunks), strict=True)],
            [torch.cat(layer) for layer in zip(*(chunk.values for chunk in chunks), strict=True)],
            layout,
            chunks[0].start,
            np.concatenate(ids) if len(ids) == len(chunks) else None,
            chunks[-1].following,
        )


def check_following(following: object) -> int:
    """Return a number of tokens that follow a chunk; raise InputError if it is not one."""
    if type(following) is not int or following < 0:
        raise InputError(f"following: must be an int of at least 0, got {following!r}")
    return following


def _per_layer(name: str, tensors: torch.Tensor | Sequence[torch.Tensor], layout: KVLayout) -> tuple[torch.Tensor, ...]:
    if isinstance(tensors, torch.Tensor):
        if tensors.ndim != 4:
            raise InputError(f"{name}: must have shape [L, T, H, D], got {list(tensors.shape)}")
        layers = tensors.unbind(0)
    else:
        layers = tuple(tensors)
        for index, tensor in enumerate(layers):
            shape = getattr(tensor, "shape", type(tensor).__name__)
            if isinstance(shape, str) or len(shape) != 3:
                raise InputError(f"{name}[{index}]: must be a tensor [T, H, D], got {shape}")
    if len(layers) != layout.num_layers:
        raise InputError(
            f"{name}: must have the {layout.num_layers} layers of the layout ({layout.model_type}), got {len(layers)}"
        )
    return tuple(layer.detach() for layer in layers)  # a chunk is data: it must keep no graph alive


def _dtype_error(name: str, got: torch.dtype, expected: str) -> InputError:
    if got in (torch.uint8, torch.int8) or str(got).startswith("torch.float8"):
        return InputError(
            f"{name}: must be {expected}, got {got}: dequantize an fp8 or int8 cache by value with its scales first, "
            "never reinterpret it"
        )
    return InputError(
        f"{name}: must be {expected} as the layout says, got {got}: convert the tensors, or build the layout with that "
        "dtype"
    )
