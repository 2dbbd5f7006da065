"""The engine's pages where groups of layers have tables of blocks of their own: a token has a slot in every group.

A save copies a token from its slot in each group into dense tensors; a load decodes into such tensors and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cuvee.codec.paged import NOWHERE, PagedCache
from cuvee.integrations.vllm.layer_groups import LayerGroup


class GroupedPages:
    """Copies tokens out of pages and writes them back.

    Args:
        cache: the pages of all layers.
        groups: of the layers; each layer is in one of them.
    """

    def __init__(self, cache: PagedCache, groups: Sequence[LayerGroup]) -> None:
        self._cache = cache
        self._groups = groups

    def copy(self, slots: Sequence[torch.Tensor]) -> PagedCache:
        """Copy tokens into a dense cache.

        Args:
            slots: of the tokens in each group, int64 `[T]` on the cache's device, all of them the cache's: checking
                them would wait for the device.
        """
        read: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, each in zip(self._groups, slots, strict=True):
            reader = self._cache.reader(each)
            read.update((layer, reader(layer)) for layer in group.layers)
        pairs = [read[layer] for layer in range(self._cache.layout.num_layers)]
        return PagedCache.dense(self._cache.layout, [keys for keys, _ in pairs], [values for _, values in pairs])

    def write(self, dense: PagedCache, slots: Sequence[torch.Tensor]) -> None:
        """Write the tokens of a dense cache to their slots in each group, int64 `[T]`; `NOWHERE` leaves a token out of
        a group.
        """
        for group, each in zip(self._groups, slots, strict=True):
            wanted = each != NOWHERE
            writer = self._cache.writer(each[wanted])
            for layer in group.layers:
                keys, values = (pages[0] for pages in (dense.keys[layer], dense.values[layer]))
                writer(layer, keys[wanted], values[wanted])
