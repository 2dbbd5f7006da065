"""`DenseKV`: a prompt's KV in dense tensors, as recomputation reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cuvee.blend.recompute import KVExchange, Observer
from cuvee.codec.models.dtypes import saturated


class DenseKV:
    """The prompt's KV `[H, T, D]` per layer, in dense tensors."""

    def __init__(self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        self._keys = keys
        self._values = values

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a layer."""
        return self._keys[index], self._values[index]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self._keys[0].device

    def reader(self, positions: torch.Tensor) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
        """Return what reads keys and values `[T, H, D]` of a layer at these positions."""
        at = positions.to(self.device)

        def read(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self._keys[index][:, at].transpose(0, 1), self._values[index][:, at].transpose(0, 1)

        return read

    def adder(self, positions: torch.Tensor) -> Callable[[int, torch.Tensor, torch.Tensor], None]:
        """Return what adds to keys and values of a layer at these positions."""
        at = positions.to(self.device)

        def add(index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            for kv, more in ((self._keys[index], keys), (self._values[index], values)):
                kv[:, at] = saturated(kv[:, at].float() + more.transpose(0, 1), kv.dtype)

        return add

    def exchange(self, index: int, positions: torch.Tensor, end: int, observer: Observer | None) -> KVExchange:
        """Return what attention reads and replaces of a layer, up to position `end`."""
        return KVExchange(self._keys[index][:, :end], self._values[index][:, :end], positions, observer)
