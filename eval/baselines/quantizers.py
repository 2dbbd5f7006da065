"""What others do to a cache, written from their descriptions, so that a report can show them in the same run.

| method | keys | values | bits per value |
|---|---|---|---|
| `Identity` | as they are | as they are | 8 x the dtype's bytes |
| `Destroyed` | zeros | zeros | 0 |
| `Float8` | e4m3 or e5m2, by value | the same | 8; no scales |
| `Int8` | absmax by unit and chunk | the same | 8 + a scale |
| `Kivi` | min/max by channel, 32 tokens per group | min/max by token, 32 channels a group | b + 32 per group |
| `CacheGen` | absmax by token over all heads, 5 or 4 bits | the same | entropy + tables + scales |

All work on the keys as cached, after RoPE. `Kivi` and `CacheGen` count their bits and do not make the bytes: their
speed would say nothing, so it is not reported.

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

__all__ = ["CacheGen", "Destroyed", "Float8", "Identity", "Int8", "Kivi"]


def _map(chunk: KVChunk, code: Callable[[str, int, torch.Tensor], tuple[torch.Tensor, float]]) -> tuple[KVChunk, float]:
    """Send every unit (K or V of a layer) through `code(kind, layer, [T, C] float32)`."""
    bits = 0.0
    out: dict[str, list[torch.Tensor]] = {"keys": [], "values": []}
    for kind, tensors in (("keys", chunk.keys), ("values", chunk.values)):
        for layer, tensor in enumerate(tensors):
            back, size = code(kind, layer, tensor.flatten(1).float())
            out[kind].append(back.to(tensor.dtype).view_as(tensor))
            bits += size
    return KVChunk(out["keys"], out["values"], chunk.layout, chunk.start), bits


class _Simulated:
    """A method whose stored form is the decoded chunk itself."""

    timed = False

    def decode(self, stored: Any) -> KVChunk:
        """See `Method.decode`."""
        chunk: KVChunk = stored
        return chunk

    def layer_bits(self, stored: Any) -> list[float] | None:
        """See `Method.layer_bits`: not counted apart."""
        return None


@dataclass(frozen=True)
class Identity(_Simulated):
    """The cache as it is."""

    counts: str = "the values"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        return chunk, 8.0 * chunk.nbytes


@dataclass(frozen=True)
class Destroyed(_Simulated):
    """A cache of zeros: what predictions are worth when nothing of it is left."""

    counts: str = "nothing is kept"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        return _map(chunk, lambda kind, layer, x: (torch.zeros_like(x), 0.0))


@dataclass(frozen=True)
class Float8(_Simulated):
    """FP8 by value, without scales: what engines call an fp8 KV cache. Values beyond the format's range saturate.

    Args:
        format: `"e4m3"` (3 bits of mantissa, up to 448) or `"e5m2"` (2 bits, up to 57,344).

    Raises:
        InputError: another format.
    """

    format: str = "e4m3"
    counts: str = "the values; there are no scales"

    def __post_init__(self) -> None:
        if self.format not in _FLOAT8:
            raise InputError(f"format: must be one of {', '.join(_FLOAT8)}, got {self.format!r}")

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        dtype = _FLOAT8[self.format]
        limit = torch.finfo(dtype).max  # the cast itself makes NaN or infinities of what lies beyond
        return _map(chunk, lambda kind, layer, x: (x.clamp(-limit, limit).to(dtype).float(), 8.0 * x.numel()))


_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Int8(_Simulated):
    """Levels -127 … 127 under one scale for all of a unit's values in a chunk: its largest magnitude over 127."""

    counts: str = "8 bits per value, 16 bits of scale per unit (K or V of a layer) a chunk"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        return _map(chunk, self._code)

    def _code(self, kind: str, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        # Rounding the scale to 16 bits can make it smaller: the largest level is held at 127.
        scale = (x.abs().amax() / 127).clamp_min(1e-30).bfloat16().float()
        return (x / scale).round().clamp(-127, 127) * scale, 8.0 * x.numel() + 16.0


@dataclass(frozen=True)
class Kivi(_Simulated):
    """Min/max quantization in groups: keys by channel over tokens, values by token over channels.

    Unlike KIVI itself no recent tokens stay at 16 bits: all are coded, and all bits are counted.

    Args:
        bits: levels are `2**bits`.
        group: values that share a minimum and a scale of 16 bits each; the last group may be shorter.
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


@dataclass(frozen=True)
class CacheGen(_Simulated):
    """CacheGen as LMCache 0.5.6 ships it; the entropy coder is taken as ideal, which favors it.

    One scale per token and unit, over all heads and dimensions. Levels `-M … M` with `M = bins / 2 - 1`; 32 bins for
    the first 10/32 of the key layers and the first 2/32 of the value layers, 16 for the others (what it does with
    models of 32 layers, scaled to the depth). Each channel of each chunk has a frequency table of its own.

    Args:
        count_tables: False leaves the tables out, which no decoder can do without: a bound for the idea itself.
    """

    count_tables: bool = True

    @property
    def counts(self) -> str:
        """See `Method.counts`."""
        tables = "a table of 33 x 16 + 32 bits per channel a chunk" if self.count_tables else "NO tables"
        return f"ideal entropy, {tables}, 16 bits of scale per token and unit"

    def encode(self, chunk: KVChunk) -> tuple[Any, float]:
        """See `Method.encode`."""
        layers = chunk.layout.num_layers
        fine = {"keys": layers * 10 / 32, "values": max(1.0, layers * 2 / 32)}
        return _map(chunk, lambda kind, layer, x: self._code(x, 32 if layer < fine[kind] else 16))

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
