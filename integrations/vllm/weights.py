"""Finds an engine's model, and tells whether its weights have changed: then what was stored before is of others."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from cuvee.integrations.guard import Once

logger = logging.getLogger(__name__)

Digest = tuple[object, ...]

_WORDS = 1 << 20  # of 8 bytes, summed at a time: 8 MB of the device's memory
_BASE = 6364136223846793005


def _owners_of(layer: torch.nn.Module | None) -> list[Any]:
    """Return the models that own a layer, because vLLM does not pass its model to connectors."""
    return [
        each
        for each in gc.get_objects()
        # The type alone: some objects warn when their class is read.
        if issubclass(type(each), torch.nn.Module)
        and hasattr(type(each), "compute_logits")
        and any(layer is part for part in each.modules())
    ]


def named_weights(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Return a model's parameters as vLLM enumerates them for its own checksums: some hold others."""
    from vllm.model_executor.model_loader.weight_checksum import _weights

    named: Iterable[tuple[str, torch.Tensor]] = _weights(model)
    return named


class Weights:
    """The weights of the models that own a layer, adapters apart.

    To be made when pages are registered: later vLLM freezes its garbage collector, which hides the models.

    Args:
        layer: of the model.
        parameters: yields the names and tensors of a model's parameters.
    """

    def __init__(self, layer: torch.nn.Module | None, parameters: Callable[[torch.nn.Module], Any]) -> None:
        self._models = [weakref.ref(model) for model in _owners_of(layer)]
        self._parameters = parameters
        self._once = Once(logger, logging.INFO)

    @property
    def models(self) -> list[Any]:
        """The models that are still there."""
        return [model for ref in self._models if (model := ref()) is not None]

    def digest(self) -> Digest | None:
        """Return what is equal as long as the weights are; None, logged once: that cannot be told.

        Every byte counts, because a step of training leaves most bfloat16 weights as they were. Sums on the device
        read them at the speed of its memory, where a cryptographic digest would take seconds for each gigabyte.
        """
        try:
            digest = tuple(part for model in self.models for part in _digest(model, self._parameters))
            if digest:
                return digest
            raise LookupError("the engine's model was not found")
        except Exception as error:
            self._once(
                "unknown", "cuvee: it cannot be told whether weights have changed, so nothing that was stored before a "
                "sleep is found after it (%s: %s)", type(error).__name__, error,
            )  # fmt: skip
            return None


def _digest(model: torch.nn.Module, parameters: Callable[[torch.nn.Module], Any]) -> list[object]:
    # On a CPU vLLM packs the weights of a linear layer into this function, and makes another one for other weights.
    modules = model.named_modules()
    packed = {name: weakref.ref(part.cpu_linear) for name, part in modules if hasattr(part, "cpu_linear")}
    digest: list[object] = [*packed.items()]
    factors: dict[torch.device, torch.Tensor] = {}
    for name, tensor in parameters(model):
        if tensor.device.type == "cpu" and not tensor.numel() and name.rpartition(".")[0] not in packed:
            raise LookupError(f"{name} is packed")
        if tensor.device not in factors:
            factors[tensor.device] = _factors().to(tensor.device)
        digest.append((name, tensor.dtype, tuple(tensor.shape), int(_sum(tensor.detach(), factors[tensor.device]))))
    return digest


def _factors() -> torch.Tensor:
    """Return odd numbers, always the same: the product with one of them tells all words apart."""
    return torch.randint(2**63 - 1, (_WORDS,), generator=torch.Generator().manual_seed(0)).bitwise_or(1)


def _sum(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return an int64 that changes if one word does, and fails to with a chance of 2^-63 if several do."""
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))  # spares copies
    data = dense.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for piece in data.split(8 * _WORDS):
        aligned = piece
        if piece.storage_offset() % 8 or len(piece) % 8:
            aligned = torch.cat((piece, piece.new_zeros(-len(piece) % 8)))
        words = aligned.view(torch.int64)
        total = total * _BASE + (words * factors[: len(words)]).sum()  # modulo 2^64
    return total
