"""The states of recurrent layers in the engine's blocks: copied out, stored exactly, and put back.

    block of a recurrent group    one state of each of its layers: the tensors of convolutions and of recurrences
    entry "state"                 the states of all groups after the same token, one named tensor each

A block holds the state after its last token (`layer_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from cuvee.codec.errors import CorruptError, UnsupportedModelError
from cuvee.codec.states import States
from cuvee.integrations.vllm.messages import Entry
from cuvee.integrations.vllm.pages.layer_groups import NULL_BLOCK, RecurrentLayer


class StatePages:
    """The engine's states.

    Args:
        layers: that keep states.
        caches: of each layer, the engine's tensors of all blocks, `[blocks, …]` each.
        dtype: name of the dtype of the model's keys and values.

    Raises:
        UnsupportedModelError: a layer's tensors are others than its description says.
    """

    def __init__(
        self, layers: Sequence[RecurrentLayer], caches: Mapping[str, Sequence[torch.Tensor]], dtype: str
    ) -> None:
        self._layers = layers
        self._caches = {layer.name: list(caches[layer.name]) for layer in layers}
        self._dtype = dtype
        for layer in layers:
            found = [(tuple(each.shape[1:]), each.dtype) for each in self._caches[layer.name]]
            if found != list(zip(layer.shapes, layer.dtypes, strict=True)):
                raise UnsupportedModelError(
                    f"{layer.name}: the engine keeps states of {found}, its description says {layer.shapes} of "
                    f"{layer.dtypes}: serve this model without CuveeConnector"
                )

    def copy(self, entry: Entry) -> States:
        """Copy the states after an entry's last token, behind what the engine's stream has to do."""
        return States(entry.end, {name: page.clone() for name, page in self._pages(entry)}, self._dtype)

    def write(self, entry: Entry, states: States) -> None:
        """Put states into an entry's blocks.

        Raises:
            CorruptError: they are those after another token, or of other layers.
        """
        pages = dict(self._pages(entry))
        if states.tokens != entry.end:
            raise CorruptError(f"state: must be that after {entry.end} tokens, got that after {states.tokens}")
        if {name: (each.shape, each.dtype) for name, each in states.tensors.items()} != {
            name: (page.shape, page.dtype) for name, page in pages.items()
        }:
            raise CorruptError(f"state: must be of {len(pages)} tensors of this engine's layers, got others")
        for name, page in pages.items():
            page.copy_(states.tensors[name])

    def _pages(self, entry: Entry) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of an entry's states by name."""
        for layer in self._layers:
            block = entry.tables[layer.group][-1]
            if block == NULL_BLOCK:
                raise LookupError(f"the engine keeps no state of {layer.name} after {entry.end} tokens")
            for number, cache in enumerate(self._caches[layer.name]):
                yield f"{layer.name}.{number}", cache[block]
