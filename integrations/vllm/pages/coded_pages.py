"""The engine's pages, and the codec that codes them: tokens are copied out of them to be stored, and put back.

Where pages are not what the codec codes, a load decodes into dense tensors first:

    groups of layers    a token has a slot in each group's table of blocks
    fp8 codes           pairs of adjacent codes of a head are 16-bit words of the codec, bit for bit
    fp8 values          codes times the engine's scale; a load divides by it and rounds again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.coding.open_blob import OpenBlob
from cuvee.codec.dtypes import saturated
from cuvee.codec.errors import CuveeError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.core.chunk_io import ChunkIO, Stored
from cuvee.integrations.stores.threads import ThreadPool
from cuvee.integrations.vllm.pages.layer_groups import LayerGroup
from cuvee.kernels.devices import Mark, send


class CodedPages:
    """The pages of some layers. Safe to call from several threads.

    Args:
        cache: the pages of all these layers.
        groups: of the layers; each layer is in one of them. Empty: there is one group.
        layout: of what is coded. Its heads are half as wide as the cache's where it holds pairs of codes.
        codec: of the layout.
        coders: threads that open, and on the CPU decode, several entries at once.

    Attributes:
        cache, layout, codec: as given.
        direct: whether the codec itself reads and writes the pages.
        io: codes them.
    """

    def __init__(
        self, cache: PagedCache, groups: Sequence[LayerGroup], layout: KVLayout, codec: Codec, coders: ThreadPool
    ) -> None:
        self.cache, self.layout, self.codec = cache, layout, codec
        self.direct = len(groups) <= 1 and layout.layers == cache.layout.layers
        self.io = ChunkIO(codec, coders)
        self._groups = groups
        self._pairs = cache.scaled and layout.layers[0].head_dim < cache.layout.layers[0].head_dim

    @property
    def bytes_per_token(self) -> int:
        """Size of a token in the pages."""
        return self.cache.layout.values_per_token * self.cache.dtype.itemsize

    def copy(self, slots: Sequence[torch.Tensor]) -> PagedCache:
        """Copy tokens into a dense cache.

        Args:
            slots: of the tokens in each group, int64 `[T]` on the cache's device, all of them the cache's: checking
                them would wait for the device.
        """
        if self.direct:
            return self.cache.copy(*slots)
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, each in zip(self._groups, slots, strict=True):
            if not group.layers:
                continue
            reader = self.cache.reader(each)
            read.update((layer, reader(layer)) for layer in group.layers)
        units: list[list[torch.Tensor]] = [
            [self._opened(read[layer][unit], scales[layer]) for layer in range(self.layout.num_layers)]
            for unit, scales in enumerate((self.cache.key_scales, self.cache.value_scales))
        ]
        return PagedCache.dense(self.layout, units[0], units[1])

    def restore(
        self,
        entries: Sequence[Stored],
        slots: Sequence[Sequence[torch.Tensor]],
        starts: Sequence[int] | None = None,
    ) -> tuple[list[OpenBlob], CuveeError | None]:
        """Decode entries into the pages, as `ChunkIO.restore`.

        Args:
            entries: as the store has them.
            slots: of each entry in each group, int64 `[T]` on the CPU: they are sent in one transfer.
            starts: of each entry, the position that its first token gets; default: that at which it was encoded.
        """
        if not entries:
            return [], None
        flat = [at for each in slots for at in each]
        sent = iter(send(torch.cat(flat), self.cache.device).split([len(at) for at in flat]))
        there = [[next(sent) for _ in each] for each in slots]
        return self.io.restore(self.cache, entries, there, starts, None if self.direct else self._restore)

    def _write(self, dense: PagedCache, slots: Sequence[torch.Tensor]) -> None:
        """Write the tokens of a dense cache to their slots in each group; `NOWHERE` leaves a token out of a group."""
        for group, each in zip(self._groups, slots, strict=True):
            if not group.layers:
                continue
            wanted = each != NOWHERE
            writer = self.cache.writer(each[wanted])
            for layer in group.layers:
                keys = self._closed(dense.keys[layer][0][wanted], self.cache.key_scales[layer])
                values = self._closed(dense.values[layer][0][wanted], self.cache.value_scales[layer])
                writer(layer, keys, values)

    def _restore(self, blob: OpenBlob, slots: Sequence[torch.Tensor], start: int | None) -> None:
        """Decode a blob to its slots in each group, from this position on, on the way of dense tensors.

        Raises:
            CuveeError: the blob is damaged.
        """
        device = self.cache.device
        dense = PagedCache.empty(self.layout, blob.tokens, range(self.layout.num_layers), device)
        at = torch.arange(blob.tokens, device=device)
        self.codec.decode_paged([blob], dense, [at], None if start is None else [start]).check()
        self._write(dense, slots)
        Mark(device).wait()  # the engine reads the pages on another stream once it hears that the load is over

    def _opened(self, stored: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what is coded of stored numbers `[T, H, D]`."""
        if not self.cache.scaled:
            return stored
        if self._pairs:
            return stored.contiguous().view(self.layout.torch_dtype)
        return (stored.float() * scale).to(self.layout.torch_dtype)

    def _closed(self, coded: torch.Tensor, scale: float) -> torch.Tensor:
        """Invert `_opened`."""
        if not self.cache.scaled:
            return coded
        if self._pairs:
            return coded.contiguous().view(self.cache.dtype)
        return saturated(coded.float() / scale, self.cache.dtype)


def pairs_of_codes(layout: KVLayout, codes: torch.dtype) -> KVLayout:
    """Return the layout of pairs of adjacent fp8 codes, as 16-bit words: nothing moves, and no word has a value.

    Raises:
        UnsupportedModelError: heads of odd size.
    """
    layers = []
    for index, layer in enumerate(layout.layers):
        if layer.head_dim % 2 or layer.value_dim % 2:
            raise UnsupportedModelError(
                f"layer {index}: heads of {layer.head_dim} and {layer.value_dim} fp8 codes are not supported, because "
                "codes are stored in pairs: set --kv-cache-dtype auto"
            )
        layers.append(replace(layer, head_dim=layer.head_dim // 2, value_dim=layer.value_dim // 2, rope=None))
    name = str(codes).removeprefix("torch.")
    return replace(layout, model_type=f"{layout.model_type}, pairs of {name}", layers=tuple(layers), dtype="float16")
