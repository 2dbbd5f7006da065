"""Finds an engine's model, and tells whether its weights have changed: then what was stored before is of others.

    digest    reads every byte: what names weights that are in no checkpoint, and equal weights in every process
    changed   reads a few megabytes, others each time: finds a change of which nobody tells

Both sum pieces of the tensors on their device. The first pieces that are read are of many tensors: an update of all
weights is found at once, that of a single row when its piece comes round.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cuvee.codec.support.once import Once
from cuvee.kernels.devices import Mark

logger = logging.getLogger(__name__)

# Words of 8 bytes that are summed at a time, and how many such pieces a look reads: what takes less than 1 ms.
_WORDS, _HOST_WORDS = 1 << 20, 1 << 17
_PIECES, _HOST_PIECES = 16, 4
_PAUSE = 0.05  # seconds between two looks, at least
_MOST_PRODUCTS = 10**11  # that reading the packed weights of a CPU may take, of all layers together: about a second


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


@dataclass(slots=True)
class _Piece:
    """A part of a tensor that is summed at once: its words from `first` on, and the sum that they had."""

    tensor: weakref.ref[torch.Tensor]
    device: torch.device
    first: int
    words: int
    total: int = 0


class Weights:
    """The weights of the models that own a layer, adapters apart.

    To be made when pages are registered: later vLLM freezes its garbage collector, which hides the models.

    Args:
        layer: of the model.
        parameters: yields the names and tensors of a model's parameters.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        layer: torch.nn.Module | None,
        parameters: Callable[[torch.nn.Module], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models = [weakref.ref(model) for model in _owners_of(layer)]
        self._parameters = parameters
        self._clock = clock
        self._once = Once(logger, logging.INFO)
        self._factors: dict[torch.device, torch.Tensor] = {}
        # Of the last digest:
        self._pieces: list[_Piece] = []
        self._packed: list[tuple[weakref.ref[torch.nn.Module], weakref.ref[Any]]] = []
        self._next = 0  # the piece that is read next
        self._looked = float("-inf")
        self._under_way: tuple[list[_Piece], torch.Tensor, Mark] | None = None  # sums that a device computes

    @property
    def models(self) -> list[Any]:
        """The models that are still there."""
        return [model for ref in self._models if (model := ref()) is not None]

    def digest(self) -> bytes | None:
        """Return 16 bytes that are equal if the weights are, in every process; None, logged once: that cannot be told.

        Every byte counts, because a step of training leaves most bfloat16 weights as they were. Sums on the device
        read them at the speed of its memory, where a cryptographic digest would take seconds for each gigabyte. Of the
        layers that vLLM packs on a CPU, at most `_MOST_PRODUCTS` allow, some columns are read.
        """
        self._pieces, self._packed, self._under_way, self._next = [], [], None, 0
        try:
            models = self.models
            if not models:
                raise LookupError("the engine's model was not found")
            digest = hashlib.blake2b(digest_size=16, person=b"cuvee-live-wgts")
            for model in models:
                self._read(model, digest)
            self._pieces = [piece for piece in self._pieces if piece.tensor() is not None]
            self._pieces.sort(key=lambda piece: piece.first)  # many tensors first, then their second pieces, and so on
            return digest.digest()
        except Exception as error:
            self._pieces, self._packed = [], []
            self._once(
                "unknown", "cuvee: it cannot be told whether weights have changed, so nothing that was stored before a "
                "reset is found after it (%s: %s)", type(error).__name__, error,
            )  # fmt: skip
            return None

    def changed(self) -> bool:
        """Return whether weights are known to be others than at the last digest; False as well if there was none.

        Reads a part of them, another one each time, and at most every `_PAUSE` seconds. What a device has summed is
        compared at the next call, so no call waits for it.
        """
        now = self._clock()
        if now - self._looked < _PAUSE:
            return False
        self._looked = now
        if any((part := module()) is None or vars(part).get("cpu_linear") is not own() for module, own in self._packed):
            return True
        if self._under_way is not None:
            pieces, totals, ready = self._under_way
            if not ready.over:
                return False
            self._under_way = None
            if any(total != piece.total for piece, total in zip(pieces, totals.tolist(), strict=True)):
                return True
        pieces = self._take()
        tensors = [piece.tensor() for piece in pieces]
        try:
            found = [
                self._sum(_bytes_of(tensor), piece.first, piece.words)
                for piece, tensor in zip(pieces, tensors, strict=True)
                if tensor is not None
            ]
        except Exception:  # a tensor has another size now
            return True
        if len(found) < len(pieces):  # others have their places
            return True
        if not found:
            return False
        totals = torch.stack(found)
        if totals.device.type == "cpu":
            return bool(totals.tolist() != [piece.total for piece in pieces])
        held = torch.empty(len(pieces), dtype=torch.int64, pin_memory=True).copy_(totals, non_blocking=True)
        self._under_way = pieces, held, Mark(totals.device)
        return False

    def _take(self) -> list[_Piece]:
        """Return the pieces whose turn it is, on one device."""
        batch: list[_Piece] = []
        while len(batch) < len(self._pieces):
            piece = self._pieces[self._next]
            most = _HOST_PIECES if piece.device.type == "cpu" else _PIECES
            if len(batch) >= most or (batch and piece.device != batch[0].device):
                break
            batch.append(piece)
            self._next = (self._next + 1) % len(self._pieces)
        return batch

    def _read(self, model: torch.nn.Module, digest: Any) -> None:
        """Add a model's weights to a digest, and note their pieces.

        Raises:
            LookupError: weights that cannot be read.
        """
        # On a CPU vLLM packs the weights of a linear layer into this function, and makes another one for other weights.
        packed = {name: part for name, part in model.named_modules() if "cpu_linear" in vars(part)}
        self._packed += [(weakref.ref(part), weakref.ref(vars(part)["cpu_linear"])) for part in packed.values()]
        read: list[tuple[str, torch.Tensor, list[_Piece]]] = []
        for name, tensor in self._parameters(model):
            held = tensor.detach()
            hidden = held.device.type == "cpu" and not held.numel()
            if hidden:
                part = packed.get(name.rpartition(".")[0])
                if part is None:
                    raise LookupError(f"{name} is packed")
                held = torch.cat(list(_columns(part, tensor.dtype, _MOST_PRODUCTS // len(packed))))
            data, words = _bytes_of(held), self._words(held.device)
            pieces = [
                _Piece(weakref.ref(tensor), held.device, at, words)
                for at in range(0, max(-(-len(data) // 8), 1), words)
            ]
            totals = torch.stack([self._sum(data, piece.first, words) for piece in pieces])
            read.append((f"{name} {tensor.dtype} {tuple(held.shape)}", totals, [] if hidden else pieces))
        if not read:
            raise LookupError("the engine's model has no weights")
        for label, totals, pieces in read:  # only now: a device has been given all of its work
            values = totals.tolist()
            digest.update(repr((label, values)).encode())
            for piece, total in zip(pieces, values, strict=False):
                piece.total = total
            self._pieces += pieces

    @staticmethod
    def _words(device: torch.device) -> int:
        return _HOST_WORDS if device.type == "cpu" else _WORDS

    def _sum(self, data: torch.Tensor, first: int, words: int) -> torch.Tensor:
        """Return an int64 that changes if one word does, and fails to with a chance of 2^-63 if several do."""
        if data.device not in self._factors:
            self._factors[data.device] = _factors(self._words(data.device)).to(data.device)
        piece = data[8 * first : 8 * (first + words)]
        if piece.storage_offset() % 8 or len(piece) % 8:
            piece = torch.cat((piece, piece.new_zeros(-len(piece) % 8)))
        values = piece.view(torch.int64)
        return (values * self._factors[data.device][: len(values)]).sum()  # modulo 2^64


def _factors(words: int) -> torch.Tensor:
    """Return odd numbers, always the same: the product with one of them tells all words apart."""
    return torch.randint(2**63 - 1, (words,), generator=torch.Generator().manual_seed(0)).bitwise_or(1)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, as they lie in memory if that has no gaps."""
    tensor = tensor.detach()
    dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True))
    return dense.contiguous().view(-1).view(torch.uint8)


def _columns(part: torch.nn.Module, dtype: torch.dtype, most: int) -> Iterator[torch.Tensor]:
    """Yield columns of the weights that vLLM has packed into a function, whose products with unit vectors they are.

    Args:
        part: a layer.
        dtype: of its weights.
        most: products that this may take; from then on, columns at equal distances.

    Raises:
        LookupError: the layer does not tell its size.
    """
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    size = next((got for name in names if (got := getattr(part, name, 0))), 0)
    if not size:
        raise LookupError(f"a {type(part).__name__} is packed")
    linear, weight = vars(part)["cpu_linear"], getattr(part, "weight", None)
    unit = torch.zeros(1, size, dtype=dtype)
    unit[0, 0] = 1
    with torch.inference_mode():
        rows = linear(unit, weight, None).shape[-1]
        count = min(max(most // (size * rows), 1), size)
        chosen = torch.arange(count) * size // count
        for several in chosen.split(64):
            units = torch.zeros(len(several), size, dtype=dtype)
            units[torch.arange(len(several)), several] = 1
            yield linear(units, weight, None).contiguous().clone()
