"""Alternatives to cuvee, measured on the same bytes of a bfloat16 cache.

| method | what is stored |
|---|---|
| memcpy | the unchanged cache: no other method can be faster |
| FP8 e4m3 | one byte a value, and a scale for each head of each unit, its largest magnitude over 448 |
| zstd, lz4 | the values' high bytes, then their low bytes, compressed as one buffer |
| constriction | the high bytes in an ANS coder, under one distribution; the low bytes as they are |

All of them restore into tensors that exist already, so none pays for new memory. What torch does it shares out among
threads itself; of the others each thread takes a run of layers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError
from cuvee.codec.layout import KVLayout
from cuvee.codec.stages.compiled.compiler import compiled

__all__ = [
    "ALTERNATIVES",
    "MEMCPY",
    "ZSTD_METHOD",
    "Alternative",
    "Coder",
    "FlatCache",
    "Part",
    "merge_bytes",
    "split_bytes",
]

MEMCPY = "memcpy"
ZSTD_LEVEL = 1  # on these bytes smaller and faster than 3, the default
ZSTD_METHOD = f"zstd -{ZSTD_LEVEL}, byte planes"
FP8_LARGEST = 448.0  # of e4m3: beyond it the cast makes NaN

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a cache, one after the other.

    Attributes:
        values: all of them, bfloat16 `[N]`.
        runs: the same as units, which are the keys or the values of a layer: views `[U, T, H, D]` of adjacent units of
            one shape.
    """

    values: torch.Tensor
    runs: tuple[torch.Tensor, ...]

    @property
    def words(self) -> U16:
        """The bits of the values, `[N]`, sharing their memory."""
        words: U16 = self.values.view(torch.int16).numpy().view(np.uint16)
        return words


class FlatCache:
    """A cache in bfloat16 whose layers lie in one tensor, keys before values.

    Args:
        layout: of the model.
        tokens: how many.
        start: position of the first one.

    Raises:
        InputError: the layout is not in bfloat16.
    """

    def __init__(self, layout: KVLayout, tokens: int, start: int = 0) -> None:
        if layout.dtype != "bfloat16":
            raise InputError(f"layout: the alternatives are compared in bfloat16, got {layout.dtype}")
        self.values = torch.empty(tokens * layout.values_per_token, dtype=torch.bfloat16)
        shapes = [
            (tokens, layer.kv_heads, size) for layer in layout.layers for size in (layer.head_dim, layer.value_dim)
        ]
        sizes = [tokens * heads * size for _, heads, size in shapes]
        units = [unit.view(shape) for unit, shape in zip(self.values.split(sizes), shapes, strict=True)]
        self.chunk = KVChunk(units[::2], units[1::2], layout, start)

    @classmethod
    def copy_of(cls, chunk: KVChunk) -> FlatCache:
        """A copy of a chunk."""
        cache = cls(chunk.layout, chunk.tokens, chunk.start)
        for own, other in zip(cache.chunk.keys + cache.chunk.values, chunk.keys + chunk.values, strict=True):
            own.copy_(other)
        return cache

    def parts(self, count: int) -> list[Part]:
        """Return the cache as this many runs of layers, or as one run per layer if there are fewer."""
        layers, layout = self.chunk.layout.num_layers, self.chunk.layout
        count = min(count, layers)
        out, first = [], 0
        for index in range(count):
            span = range(index * layers // count, (index + 1) * layers // count)
            shapes = [
                (self.chunk.tokens, layout.layers[at].kv_heads, size)
                for at in span
                for size in (layout.layers[at].head_dim, layout.layers[at].value_dim)
            ]
            runs, begin = [], first
            for shape, alike in groupby(shapes):
                number = len(list(alike))
                end = first + number * shape[0] * shape[1] * shape[2]
                runs.append(self.values[first:end].view(number, *shape))
                first = end
            out.append(Part(self.values[begin:first], tuple(runs)))
        return out


class Coder(Protocol):
    """A method at work on one part, which keeps what it stored."""

    def encode(self) -> None:
        """Make what is stored."""
        ...

    def decode(self) -> None:
        """Restore it into the target."""
        ...

    def stored_bytes(self) -> int:
        """Return its size."""
        ...


@dataclass(frozen=True, slots=True)
class Alternative:
    """A method by name.

    Attributes:
        name: in tables and reports.
        exact: whether every bit comes back.
        make: the method for a source and a target of the same shape.
        by_torch: whether torch shares the work out among threads. If not, each thread gets a part of its own.
        module: what has to be installed for it; None for nothing beyond cuvee's own dependencies.
        package: of that module, as pip names it.
    """

    name: str
    exact: bool
    make: Callable[[Part, Part], Coder]
    by_torch: bool = False
    module: str | None = None
    package: str | None = None

    def missing(self) -> str | None:
        """Return why it cannot run here and the remedy, or None if it can."""
        if self.module is None:
            return None
        try:
            importlib.import_module(self.module)
        except ImportError:
            return f"{self.package} is not installed: pip install {self.package}"
        return None


class _Memcpy:
    def __init__(self, source: Part, target: Part) -> None:
        self._source, self._target = source.values, target.values
        self._stored = torch.empty_like(source.values)

    def encode(self) -> None:
        self._stored.copy_(self._source)

    def decode(self) -> None:
        self._target.copy_(self._stored)

    def stored_bytes(self) -> int:
        return self._stored.nbytes


class _Float8:
    """torch's cast to float8_e4m3fn and back."""

    def __init__(self, source: Part, target: Part) -> None:
        self._source, self._target = source.runs, target.runs
        self._stored: list[tuple[torch.Tensor, torch.Tensor]] = []

    def encode(self) -> None:
        self._stored = [self._scaled(run) for run in self._source]

    def _scaled(self, run: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = run.abs().amax(1, keepdim=True).amax(3, keepdim=True)  # of each head; faster than both at once
        scale = (largest / FP8_LARGEST).clamp_min_(1e-30)
        # Rounding the scale to bfloat16 can make it smaller, and then a value passes the largest.
        return (run / scale).clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn), scale

    def decode(self) -> None:
        for (codes, scale), run in zip(self._stored, self._target, strict=True):
            torch.mul(self._wide(codes), scale, out=run)

    def _wide(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.bfloat16)

    def stored_bytes(self) -> int:
        return sum(codes.nbytes + scale.nbytes for codes, scale in self._stored)


class _Float8Table(_Float8):
    """The same, read back through a table of all 256 values: torch's own cast is slower on a CPU."""

    _VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.bfloat16)

    def _wide(self, codes: torch.Tensor) -> torch.Tensor:
        return self._VALUES.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def split_bytes(words: U16, planes: U8) -> None:
    """Write the high bytes of `words [N]`, then their low bytes, to `planes [2 N]`."""
    planes[: len(words)] = words >> 8
    planes[len(words) :] = words  # the cast keeps the low byte


@compiled
def merge_bytes(planes: U8, words: U16) -> None:
    """The inverse of `split_bytes`. Compiled: NumPy takes four times as long."""
    n = len(words)
    for i in range(n):
        words[i] = (np.uint16(planes[i]) << np.uint16(8)) | np.uint16(planes[n + i])


class _Shuffled:
    """A compressor of bytes over byte planes."""

    def __init__(
        self, source: Part, target: Part, compress: Callable[[U8], bytes], decompress: Callable[[bytes], bytes]
    ) -> None:
        self._source, self._target = source.words, target.words
        self._compress, self._decompress = compress, decompress
        self._planes = np.empty(2 * len(self._source), np.uint8)
        self._stored = b""

    def encode(self) -> None:
        split_bytes(self._source, self._planes)
        self._stored = self._compress(self._planes)

    def decode(self) -> None:
        merge_bytes(np.frombuffer(self._decompress(self._stored), np.uint8), self._target)

    def stored_bytes(self) -> int:
        return len(self._stored)


def _zstd(source: Part, target: Part) -> Coder:
    import zstandard

    # One for each part: two threads must not use either object at the same time.
    compressor, decompressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
    return _Shuffled(source, target, lambda planes: compressor.compress(planes.data), decompressor.decompress)


def _lz4(source: Part, target: Part) -> Coder:
    import lz4.block

    return _Shuffled(source, target, lz4.block.compress, lz4.block.decompress)


class _Constriction:
    """constriction's AnsCoder over the high bytes."""

    def __init__(self, source: Part, target: Part) -> None:
        import constriction

        self._stream: Any = constriction.stream
        self._source, self._target = source.words, target.words
        self._stored: tuple[npt.NDArray[Any], ...] = ()

    def _model(self, shares: npt.NDArray[np.float32]) -> Any:
        return self._stream.model.Categorical(shares.astype(np.float64), perfect=False)

    def encode(self) -> None:
        high = self._source >> 8
        shares = (np.bincount(high, minlength=256) / len(high)).astype(np.float32)
        coder = self._stream.stack.AnsCoder()
        coder.encode_reverse(high.astype(np.int32), self._model(shares))
        self._stored = (coder.get_compressed(), shares, self._source.astype(np.uint8))

    def decode(self) -> None:
        compressed, shares, low = self._stored
        high = self._stream.stack.AnsCoder(compressed).decode(self._model(shares), len(low))
        np.left_shift(high, 8, out=self._target, casting="unsafe")
        self._target |= low

    def stored_bytes(self) -> int:
        return sum(array.nbytes for array in self._stored)


ALTERNATIVES = (
    Alternative(MEMCPY, True, _Memcpy, by_torch=True),
    Alternative("FP8, torch's cast", False, _Float8, by_torch=True),
    Alternative("FP8, by table", False, _Float8Table, by_torch=True),
    Alternative("lz4, byte planes", True, _lz4, module="lz4.block", package="lz4"),
    Alternative(ZSTD_METHOD, True, _zstd, module="zstandard", package="zstandard"),
    Alternative("constriction ANS", True, _Constriction, module="constriction", package="constriction"),
)
