"""The engine's pages where they are not what the codec codes: they are copied into dense tensors first, and from them.

    groups of layers    a token has a slot in each group's table of blocks
    fp8 codes           pairs of adjacent codes of a head are 16-bit words of the codec, bit for bit
    fp8 values          codes times the engine's scale; a load divides by it and rounds again

A save copies a token from its slot in each group; a load decodes into such tensors and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.errors import UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.dtypes import saturated
from cuvee.codec.open_blob import OpenBlob
from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.vllm.layer_groups import LayerGroup
from cuvee.kernels.devices import Mark


class CopiedPages:
    """Copies tokens out of pages and writes them back.

    Args:
        cache: the pages of all layers.
        groups: of the layers; each layer is in one of them.
        layout: of what is coded. Its heads are half as wide as the cache's where it holds pairs of codes.

    Attributes:
        layout: as given.
    """

    def __init__(self, cache: PagedCache, groups: Sequence[LayerGroup], layout: KVLayout) -> None:
        self.layout = layout
        self._cache = cache
        self._groups = groups
        self._pairs = cache.scaled and layout.layers[0].head_dim < cache.layout.layers[0].head_dim

    def copy(self, slots: Sequence[torch.Tensor]) -> PagedCache:
        """Copy tokens into a dense cache.

        Args:
            slots: of the tokens in each group, int64 `[T]` on the cache's device, all of them the cache's: checking
                them would wait for the device.
        """
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, each in zip(self._groups, slots, strict=True):
            if not group.layers:
                continue
            reader = self._cache.reader(each)
            read.update((layer, reader(layer)) for layer in group.layers)
        units: list[list[torch.Tensor]] = [
            [self._opened(read[layer][unit], scales[layer]) for layer in range(self.layout.num_layers)]
            for unit, scales in enumerate((self._cache.key_scales, self._cache.value_scales))
        ]
        return PagedCache.dense(self.layout, units[0], units[1])

    def write(self, dense: PagedCache, slots: Sequence[torch.Tensor]) -> None:
        """Write the tokens of a dense cache to their slots in each group, int64 `[T]`; `NOWHERE` leaves a token out of
        a group.
        """
        for group, each in zip(self._groups, slots, strict=True):
            if not group.layers:
                continue
            wanted = each != NOWHERE
            writer = self._cache.writer(each[wanted])
            for layer in group.layers:
                keys = self._closed(dense.keys[layer][0][wanted], self._cache.key_scales[layer])
                values = self._closed(dense.values[layer][0][wanted], self._cache.value_scales[layer])
                writer(layer, keys, values)

    def restore(self, codec: Codec, blob: OpenBlob, slots: Sequence[torch.Tensor], start: int | None = None) -> None:
        """Decode a blob to its slots in each group, from this position on.

        Raises:
            CuveeError: the blob is damaged.
        """
        device = self._cache.device
        dense = PagedCache.empty(self.layout, blob.tokens, range(self.layout.num_layers), device)
        at = torch.arange(blob.tokens, device=device)
        codec.decode_paged([blob], dense, [at], None if start is None else [start]).check()
        self.write(dense, slots)
        Mark(device).wait()  # the engine reads the pages on another stream once it hears that the load is over

    def _opened(self, stored: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what is coded of stored numbers `[T, H, D]`."""
        if not self._cache.scaled:
            return stored
        if self._pairs:
            return stored.contiguous().view(self.layout.torch_dtype)
        return (stored.float() * scale).to(self.layout.torch_dtype)

    def _closed(self, coded: torch.Tensor, scale: float) -> torch.Tensor:
        """Invert `_opened`."""
        if not self._cache.scaled:
            return coded
        if self._pairs:
            return coded.contiguous().view(self._cache.dtype)
        return saturated(coded.float() / scale, self._cache.dtype)


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
