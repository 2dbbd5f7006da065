"""`LMCacheOptions`: the options of the L2 adapter, in `adapter_params`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError
from cuvee.integrations.options import CodingOptions, limited


@dataclass(frozen=True, slots=True, repr=False)
class LMCacheOptions(CodingOptions):
    """Options of the adapter, by the names of the JSON that sets them: those of `CodingOptions`, and its own.

    LMCache tells neither the ids nor the positions of a chunk's tokens. Lossy coding needs positions, because it takes
    the rotation out of keys. So it wants a learned profile, which recognizes both
    (`cuvee.integrations.pages.recognition`).

    Attributes:
        chunk_tokens: tokens per chunk: LMCache's `--chunk-size`.
        model: folder or hub id of the served checkpoint; required.
        revision: of the checkpoint, if `model` is a hub id; default: `main`.
        model_name: the engine's name of the model; default: `model`.
        dtype: of the engine's cache; default: that of the checkpoint.
        servers: LMCache servers that one engine's ranks are divided among (`lmcache.mp.server_urls`). LMCache numbers
            ranks in every server from 0.
        server_index: number of this server among them, from 0, in their order there.
        max_gb: 10^9 bytes that LMCache's eviction may fill; None: it evicts nothing, and the store's own budget
            applies.
        max_pending_gb: budget for chunks that wait to be stored, in 10^9 bytes; LMCache keeps them in memory meanwhile,
            and beyond it chunks are not stored.
        load_timeout: seconds that the store may take for anything but a lookup, and after which a waiting chunk is
            given up. Twice that must be well below LMCache's `--l1-read-ttl-seconds` (300), because LMCache may then
            use the chunk's memory for another.
    """

    SOURCE: ClassVar[str] = "adapter_params"

    chunk_tokens: int = 256
    model: str | None = None
    revision: str | None = None
    model_name: str | None = None
    dtype: str | None = limited(None, choices=tuple(TORCH_DTYPES))
    servers: int = 1
    server_index: int = limited(0, least=0)
    max_gb: float | None = None
    max_pending_gb: float = 8.8

    def __post_init__(self) -> None:
        CodingOptions.__post_init__(self)  # `super()` does not know a class with slots
        if self.model is None:
            raise InputError("model: must be the folder or hub id of the served checkpoint, got none")
        if self.server_index >= self.servers:
            raise InputError(
                f"server_index: must be below servers ({self.servers}), got {self.server_index}: set servers to the "
                "number of LMCache servers that one engine's ranks are divided among"
            )
