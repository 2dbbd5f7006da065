"""Other cache quantizers, written from their descriptions, so that a report can measure them in the same run.

| method | keys | values | bits per value |
|---|---|---|---|
| `Uncompressed` | as they are | as they are | 8 x the dtype's bytes |
| `Destroyed` | zeros | zeros | 0 |
| `Float8` | e4m3, each value alone, or scaled by unit or head and chunk | the same | 8, and scales if any |
| `Int8` | absmax by unit and chunk | the same | 8 + a scale |
| `Kivi` | min/max by channel, 32 tokens per group | min/max by token, 32 channels per group | b + 32 per group |
| `CacheGen` | absmax by token over all heads, 5 or 4 bits | the same | entropy + tables + scales |

All of them work on the keys as they are cached, after RoPE. None makes the bytes it counts, so their speed would say
nothing and is not reported.

References: KIVI, arXiv:2402.02750; CacheGen, arXiv:2310.07240, as shipped in LMCache 0.5.6: no anchor tokens, one
frequency table per channel stored with every chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.eval.baselines.simulated import Simulated

__all__ = ["CacheGen", "Destroyed", "Float8", "Int8", "Kivi", "Uncompressed", "cachegen_bins"]


def _map(chunk: KVChunk, code: Callable[[str, int, torch.Tensor], tuple[torch.Tensor, float]]) -> tuple[KVChunk, float]:
    """Send every unit (K or V of a layer) through `code(kind, layer, [T, C] float32)`, and add up the bits."""
    bits = 0.0
    out: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
    for kind, tensors in (("keys", chunk.keys), ("values", chunk.values)):
        for layer, tensor in enumerate(tensors):
            back, size = code(kind, layer, tensor.flatten(1).float())
            out[kind].append(back.to(tensor.dtype).view_as(tensor))
            bits += size
    return KVChunk(out["keys"], out["values"], chunk.layout, chunk.start), bits


@dataclass(frozen=True)
class Uncompressed(Simulated):
    """The unchanged cache.

    Example:
        >>> import torch
        >>> from cuvee.codec.chunk import KVChunk
        >>> from cuvee.codec.layout import KVLayout, LayerLayout
        >>> layout = KVLayout("llama", (LayerLayout(1, 4, 4, None),), "bfloat16", None)
        >>> chunk = KVChunk([torch.ones(3, 1, 4).bfloat16()], [torch.ones(3, 1, 4).bfloat16()], layout)
        >>> stored, bits = Uncompressed().encode(chunk)
        >>> bits / (3 * 8)
        16.0
    """

    counts: str = "the values"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        return chunk, 8.0 * chunk.nbytes


@dataclass(frozen=True)
class Destroyed(Simulated):
    """A cache of zeros, which shows the predictions without any cached information."""

    counts: str = "nothing is kept"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        return _map(chunk, lambda kind, layer, x: (torch.zeros_like(x), 0.0))


@dataclass(frozen=True)
class Float8(Simulated):
    """FP8 e4m3. Without scales it is what engines call an fp8 KV cache; values beyond the range, up to 448, saturate.

    Args:
        scale: `"none"`, or what has a scale of 16 bits in each chunk, which moves its largest magnitude to the end of
            the range: a `"unit"` (K or V of a layer: a tensor, in the words of engines) or a `"head"`.

    Raises:
        InputError: another scale.
    """

    scale: str = "none"

    def __post_init__(self) -> None:
        if self.scale not in _SCALES:
            raise InputError(f"scale: must be one of {', '.join(_SCALES)}, got {self.scale!r}")

    @property
    def counts(self) -> str:
        """See `Method.counts`."""
        return "the values; there are no scales" if self.scale == "none" else f"values, 16 bits per {self.scale}"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        dtype = torch.float8_e4m3fn
        limit = torch.finfo(dtype).max  # the cast itself would turn larger values into NaN or infinities

        def code(kind: str, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            if self.scale == "none":
                return x.clamp(-limit, limit).to(dtype).float(), 8.0 * x.numel()
            parts = x.unflatten(1, (chunk.layout.layers[layer].kv_heads if self.scale == "head" else 1, -1))
            scale = (parts.abs().amax((0, 2), keepdim=True) / limit).clamp_min(1e-30).bfloat16().float()
            back = (parts / scale).clamp(-limit, limit).to(dtype).float() * scale
            return back.flatten(1), 8.0 * x.numel() + 16.0 * scale.numel()

        return _map(chunk, code)


_SCALES = ("none", "unit", "head")


@dataclass(frozen=True)
class Int8(Simulated):
    """Levels -127 … 127 with a single scale for each unit of a chunk: its largest magnitude over 127."""

    counts: str = "8 bits per value, 16 bits of scale per unit (K or V of a layer) and chunk"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        return _map(chunk, self._code)

    def _code(self, kind: str, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        # Rounding the scale to 16 bits can make it smaller, so the largest level is held at 127.
        scale = (x.abs().amax() / 127).clamp_min(1e-30).bfloat16().float()
        return (x / scale).round().clamp(-127, 127) * scale, 8.0 * x.numel() + 16.0


@dataclass(frozen=True)
class Kivi(Simulated):
    """Min/max quantization in groups: keys by channel over tokens, values by token over channels.

    Unlike in KIVI itself, no recent tokens stay at 16 bits: all are coded, and all bits are counted.

    Args:
        bits: there are `2**bits` levels.
        group: how many values share a minimum and a scale of 16 bits each. The last group may be smaller.
    """

    bits: int
    group: int = 32
    counts: str = "levels, and 2 x 16 bits per group for minimum and scale"

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8 or self.group < 1:
            raise InputError(f"bits: must lie in 1 … 8 and group be at least 1, got {self.bits} and {self.group}")

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""

        def code(kind: str, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, float]:
            return self._code(x, dim=0 if kind == "keys" else 1)

        return _map(chunk, code)

    def _code(self, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, float]:
        """Quantize `[T, C]` in groups along `dim`."""
        back, size = [], float(self.bits * x.numel())
        for part in x.split(self.group, dim):
            low, high = part.amin(dim, keepdim=True), part.amax(dim, keepdim=True)
            scale = ((high - low) / (2**self.bits - 1)).clamp_min(1e-8)
            back.append(((part - low) / scale).round() * scale + low)
            size += 32.0 * low.numel()
        return torch.cat(back, dim), size


def cachegen_bins(layers: int) -> tuple[int, ...]:
    """Bins of each unit, K before V: 32 in the first 10/32 of the layers for K and 2/32 for V, and 16 in all others.

    That is what CacheGen does with models of 32 layers, scaled to the depth.
    """
    fine_keys, fine_values = layers * 10 / 32, max(1.0, layers * 2 / 32)
    return tuple(32 if fine else 16 for layer in range(layers) for fine in (layer < fine_keys, layer < fine_values))


@dataclass(frozen=True)
class CacheGen(Simulated):
    """CacheGen as LMCache 0.5.6 ships it. The entropy coder is taken to be ideal, which favors it.

    There is one scale per token and unit, over all heads and dimensions. Levels are `-M … M` with `M = bins / 2 - 1`,
    and the bins are those of `cachegen_bins`. Each channel of each chunk has its own frequency table.

    Args:
        count_tables: False leaves out the tables, without which nothing can be decoded: a bound on the idea itself.
    """

    count_tables: bool = True

    @property
    def counts(self) -> str:
        """See `Method.counts`."""
        tables = "a table of 33 x 16 + 32 bits per channel and chunk" if self.count_tables else "NO tables"
        return f"ideal entropy, {tables}, 16 bits of scale per token and unit"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        bins = cachegen_bins(chunk.layout.num_layers)
        return _map(chunk, lambda kind, layer, x: self._code(x, bins[2 * layer + (kind == "values")]))

    def _code(self, x: torch.Tensor, bins: int) -> tuple[torch.Tensor, float]:
        tokens, channels = x.shape
        top = bins // 2 - 1
        peak = x.abs().amax(1, keepdim=True).clamp_min(1e-30)
        level = (x * (top / peak)).round()
        counts = torch.zeros(channels, 2 * top + 1, dtype=torch.float64, device=x.device)
        index = (level.T + top).long()
        counts.scatter_add_(1, index, torch.ones_like(index, dtype=torch.float64))
        entropy = -(counts * (counts / tokens).clamp_min(1e-30).log2()).sum().item()
        tables = channels * (33 * 16 + 32) if self.count_tables else 0
        return level * (peak / top), entropy + tables + 16.0 * tokens
