"""Ways to keep an engine's pages: copies, a general compressor, and cuvee, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.identity import Identity, PageNames, Scope
from cuvee.codec.paged import PagedCache
from cuvee.eval.bench.cpu.alternatives import ZSTD_LEVEL, merge_bytes, split_bytes
from cuvee.integrations.pages import Counts, PageStore
from cuvee.integrations.stores.memory import MemoryStore

__all__ = ["ARRANGEMENTS", "CopiedPages", "HostPages", "PageMethod", "StoredPages", "zstd_pages"]

# By SGLang's name: the shape of its host memory without the leading 2, given pages, tokens per page, and layers.
ARRANGEMENTS: dict[str, Callable[[int, int, int], tuple[int, ...]]] = {
    "layer_first": lambda pages, tokens, layers: (layers, pages, tokens),
    "page_first": lambda pages, tokens, layers: (pages, tokens, layers),
    "page_first_direct": lambda pages, tokens, layers: (pages, layers, tokens),
}
_MEMORY_BYTES = 8 * 10**9


class HostPages:
    """A chunk in the memory of an engine, page by page, bfloat16.

    Args:
        chunk: what it holds; whole pages of a model whose layers are alike.
        page_tokens: tokens per page.
        arrangement: one of `ARRANGEMENTS`.

    Attributes:
        cache: the memory as a `PagedCache`.
        slots: int64 `[tokens]`, of the chunk's tokens in order.
        pages: per page, the two tensors of its keys and of its values, `[layers, tokens, heads, dim]` in any order.
    """

    def __init__(self, chunk: KVChunk, page_tokens: int, arrangement: str) -> None:
        layout = chunk.layout
        heads, dim = chunk.keys[0].shape[1:]
        pages = chunk.tokens // page_tokens
        shape = ARRANGEMENTS[arrangement](pages, page_tokens, layout.num_layers)
        self._memory = torch.empty(2, *shape, heads, dim, dtype=layout.torch_dtype)
        by_layer = {
            "layer_first": self._memory,
            "page_first": self._memory.permute(0, 3, 1, 2, 4, 5),
            "page_first_direct": self._memory.transpose(1, 2),
        }[arrangement]
        self.cache = PagedCache(layout, list(by_layer[0]), list(by_layer[1]))
        self.slots = torch.arange(chunk.tokens)
        self.pages = [tuple(by_layer[unit][:, page] for unit in range(2)) for page in range(pages)]
        self.cache.write(chunk.keys, chunk.values, self.slots)

    def erase(self) -> None:
        """Forget the contents."""
        self._memory.zero_()


class PageMethod(Protocol):
    """A way to keep pages."""

    def clear(self) -> None:
        """Forget what was saved."""
        ...

    def save(self) -> None:
        """Store all pages."""
        ...

    def load(self) -> None:
        """Restore all pages."""
        ...

    def stored_bytes(self) -> int:
        """Return how much is stored."""
        ...


class CopiedPages:
    """Pages as bytes in RAM.

    Args:
        host: the engine's memory.
        pack: makes what is stored of a page's bytes.
        unpack: inverts `pack`.
    """

    def __init__(
        self,
        host: HostPages,
        pack: Callable[[memoryview], bytes] = bytes,
        unpack: Callable[[bytes], bytes] = lambda data: data,
    ) -> None:
        self._host, self._pack, self._unpack = host, pack, unpack
        self._stored: dict[tuple[int, int], bytes] = {}

    def clear(self) -> None:
        """See `PageMethod`."""
        self._stored.clear()

    def save(self) -> None:
        """See `PageMethod`."""
        for page, units in enumerate(self._host.pages):
            for unit, tensor in enumerate(units):
                words = tensor.contiguous().view(torch.int16).numpy()
                self._stored[page, unit] = self._pack(words.reshape(-1).view(np.uint8).data)

    def load(self) -> None:
        """See `PageMethod`."""
        for page, units in enumerate(self._host.pages):
            for unit, tensor in enumerate(units):
                data = bytearray(self._unpack(self._stored[page, unit]))
                tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))

    def stored_bytes(self) -> int:
        """See `PageMethod`."""
        return sum(map(len, self._stored.values()))


def zstd_pages(host: HostPages) -> CopiedPages:
    """Keep pages in zstd at its fastest level, over byte planes."""
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()

    def pack(data: memoryview) -> bytes:
        planes = np.empty(len(data), np.uint8)
        split_bytes(np.frombuffer(data, np.uint16), planes)
        return bytes(compressor.compress(planes.data))

    def unpack(data: bytes) -> bytes:
        planes = np.frombuffer(decompressor.decompress(data), np.uint8)
        words = np.empty(len(planes) // 2, np.uint16)
        merge_bytes(planes, words)
        return words.tobytes()

    return CopiedPages(host, pack, unpack)


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Pages in a `PageStore` in RAM, coded on one thread.

    Attributes:
        host: the engine's memory.
        pages: the store.
        memory: what it writes to.
        start: position of the first token.
        call_pages: pages that a call saves. A call does not know what follows its last page.
    """

    host: HostPages
    pages: PageStore
    memory: MemoryStore
    start: int
    call_pages: int

    @classmethod
    def open(
        cls, host: HostPages, codec: Codec, page_tokens: int, run_pages: int, start: int, call_pages: int | None = None
    ) -> StoredPages:
        """Make an empty store for a codec whose `threads` is 1. By default, one call saves all pages."""
        layout = codec.profile.layout
        identity = Identity("bench", "", layout.fingerprint, b"" if codec.lossless else b"profile", codec.quality_name)
        memory = MemoryStore(_MEMORY_BYTES)
        names = PageNames(identity, Scope(), "bench", page_tokens)
        pages = PageStore(codec, memory, names, counts=Counts(), run_pages=run_pages, threads=1)
        return cls(host, pages, memory, start, call_pages or len(host.pages))

    @property
    def _names(self) -> list[bytes]:
        return [b"%064d" % number for number in range(len(self.host.pages))]

    def clear(self) -> None:
        """See `PageMethod`."""
        self.pages.delete_all()

    def save(self) -> None:
        """See `PageMethod`."""
        names, tokens = self._names, len(self.host.slots) // len(self.host.pages)
        for first in range(0, len(names), self.call_pages):
            own = names[first : first + self.call_pages]
            slots = self.host.slots[first * tokens : (first + len(own)) * tokens]
            self.pages.save(self.host.cache, slots, own, self.start + first * tokens)

    def load(self) -> None:
        """See `PageMethod`."""
        self.pages.stored(self._names)  # as an engine asks before it loads
        self.pages.load(self.host.cache, self.host.slots, self._names, self.start)

    def stored_bytes(self) -> int:
        """See `PageMethod`."""
        return self.memory.counters()["memory"].bytes or 0
