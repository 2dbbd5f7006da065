"""Fingerprints of a model's weights: XXH3 over every value; and a digest of what else decides what it computes.

    name, shape ─┐
    values ──────┴─> as float32 ──XXH3, 128 bits──> "w2-" and 32 hex digits

Values count as float32, so a model has one fingerprint in every dtype that holds its values. Fingerprints without the
prefix are of cuvee before 0.4, which took 256 values of each parameter: whether they agree with weights is unknown.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import xxhash

from cuvee.codec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PREFIX = "w2-"
SAMPLED = "it was made by the sampled fingerprint of cuvee before 0.4: learn it again, and this can be told"
_PIECE = 1 << 18  # values that are converted at a time: what a core's cache holds
_ON_DEVICE = 1 << 24  # likewise, copied from a device at a time
# What wrappers put into the names of parameters: torch.compile, FSDP, checkpointing of activations, PEFT; and before
# them: DistributedDataParallel, PEFT.
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
_BEFORE = ("module.", "base_model.model.")
# Entries of a configuration about its writer and origin, and the path of an adapter's base model.
VOLATILE = frozenset(
    {"transformers_version", "_name_or_path", "_commit_hash", "peft_version", "base_model_name_or_path", "revision"}
)
_MET: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()  # by model: fingerprints compared with it
_SAVED = VOLATILE | {"architectures", "dtype", "torch_dtype"}  # likewise what saving a model writes into its own


class WeightHash:
    """Hashes parameters, given one after the other, each in pieces. A wrapper does not change a parameter's name."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self._buffer = torch.empty(_PIECE, dtype=torch.float32)

    def begin(self, name: str, shape: tuple[int, ...]) -> None:
        """Begin the next parameter."""
        self._hash.update(f"{_unwrapped(name)} {shape}".encode())

    def add(self, values: torch.Tensor) -> None:
        """Add the next values of the parameter, `[N]`, in any dtype and on any device."""
        for part in values.split(_ON_DEVICE):
            for piece in part.cpu().split(_PIECE):
                if piece.is_floating_point():  # as float32: float64 is rounded
                    same = piece.dtype is torch.float32 and piece.is_contiguous()
                    piece = piece if same else self._buffer[: len(piece)].copy_(piece)  # noqa: PLW2901
                self._hash.update(piece.contiguous().view(torch.uint8).numpy())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of what was added."""
        return PREFIX + self._hash.hexdigest()


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of the weights: of the name, shape and values of all that is stored with a model.

    Reads all of them: 1.5 billion float32 values take about a second on one core. An adapter of PEFT that is not merged
    counts: its weights, its scaling, and whether it is active.

    Raises:
        InputError: weights are on the device meta, which holds none.
    """
    weights = WeightHash()
    for name, tensor in stored_tensors(model):
        weights.begin(name, tuple(tensor.shape))
        weights.add(_held(model, name, tensor).reshape(-1))
    for state in _adapter_states(model):
        weights.begin(state, ())
    return weights.fingerprint


def function_digest(model: PreTrainedModel) -> str:
    """Return a digest of what a model computes with its weights: 32 hex digits.

    It covers the configuration, without entries about its origin, and float buffers that are not stored, such as
    frequencies of RoPE, to four digits. It does not see forward hooks, nor attributes of modules that were set by hand.
    """
    buffers = WeightHash()
    for name, buffer in _unstored_buffers(model):
        buffers.begin(name, tuple(buffer.shape))
        buffers.add(_rounded(_held(model, name, buffer).reshape(-1)))
    text = f"{buffers.fingerprint} {_configuration(model)}"
    return hashlib.blake2b(text.encode(), digest_size=16, person=b"cuvee-function").hexdigest()


def weights_state(model: PreTrainedModel) -> list[object]:
    """Return what is another once torch knows that what `model_fingerprint` or `function_digest` reads has changed, in
    about a millisecond.

    Torch counts no edits through `.data`, and none of tensors that were made in inference mode.
    """
    tensors = (
        (name, tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version, tensor.dtype)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    return [*tensors, *_adapter_states(model), _configuration(model)]


def stored_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a model's parameters, the buffers that are stored with it, and what else its modules store, such as the
    packed weights and the scales of quantized layers.
    """
    yield from model.named_parameters()
    yield from _buffers(model, stored=True)
    for prefix, module in model.named_modules():
        stored: dict[str, Any] = {}
        module._save_to_state_dict(stored, f"{prefix}." if prefix else "", keep_vars=True)
        for name, value in stored.items():
            if name.rpartition(".")[2] not in {**module._parameters, **module._buffers}:
                yield from _tensors(name, value)


def _tensors(name: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a value; a quantized one by its values, and what is no tensor by its name."""
    if isinstance(value, torch.Tensor):
        yield name, value.dequantize() if value.is_quantized else value
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _tensors(f"{name}.{number}", each)
    elif isinstance(value, str | bytes | int | float | torch.dtype):
        yield f"{name}: {value!r}", torch.empty(0, dtype=torch.float32, device="cpu")


def canonical_config(config: Any, left_out: Collection[str] = VOLATILE) -> str:
    """Return a configuration's JSON in one spelling, without entries that differ between copies of a model.

    Args:
        config: JSON values.
        left_out: names of entries, at any depth.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {str(key): clean(item) for key, item in value.items() if key not in left_out}
        if "torch_dtype" in kept:  # the name until transformers 5
            kept.setdefault("dtype", kept.pop("torch_dtype"))
        return kept

    return json.dumps(clean(config), sort_keys=True, default=str)


def are_others(recorded: str | None, model: PreTrainedModel | str) -> bool:
    """Return whether a profile's fingerprint is of other weights than a model's, or than those of another fingerprint;
    log if that cannot be told.
    """
    if recorded is None:
        return False
    if not recorded.startswith(PREFIX):
        logger.warning("cuvee: is the profile of this model's weights? Unknown: %s", SAMPLED)
        return False
    return recorded != (model if isinstance(model, str) else model_fingerprint(model))


def warn_of_others(recorded: str | None, model: PreTrainedModel | str) -> None:
    """Log if a profile is used where its promise does not hold, as `are_others` tells."""
    if are_others(recorded, model):
        logger.warning(
            "cuvee: the profile was learned from other weights than the model's, or from the same in another dtype: "
            "the KL of its curve is not promised here"
        )


def warn_of_others_once(recorded: str | None, model: PreTrainedModel) -> None:
    """As `warn_of_others`, the first time that a profile meets a model: reading all weights for each call would take
    too long, and training changes them between calls. Weights on the device meta are not compared.
    """
    met = _MET.setdefault(model, set())
    if recorded is None or recorded in met:
        return
    met.add(recorded)
    with suppress(InputError):
        warn_of_others(recorded, model)


def _configuration(model: PreTrainedModel) -> str:
    """Return a model's configuration, apart from its dtype, which its layout has."""
    return canonical_config(model.config.to_dict(), _SAVED)


def _unstored_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the float buffers that are not stored with a model."""
    return ((name, buffer) for name, buffer in _buffers(model, stored=False) if buffer.is_floating_point())


def _held(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values, which Accelerate has elsewhere if `device_map=` leaves no room for them."""
    if tensor.is_meta:
        place, _, own = name.rpartition(".")
        offloaded = getattr(getattr(model.get_submodule(place), "_hf_hook", None), "weights_map", None)
        if offloaded is None:
            raise InputError(f"model: must hold its weights, got {name} on the device meta: load them onto another one")
        tensor = offloaded[own]
    return tensor.detach()


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Return values to 14 bits: the last bit of float32 `pow` differs between the CPUs of a fleet."""
    mantissa, exponent = torch.frexp(values.float())
    return torch.ldexp((mantissa * 2**14).round(), exponent)


def _buffers(model: torch.nn.Module, stored: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if stored is (name.rpartition(".")[2] not in module._non_persistent_buffers_set):
                yield name, buffer


def _unwrapped(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    name = ".".join(part for part in name.split(".") if part not in _INSIDE)
    while prefix := next((prefix for prefix in _BEFORE if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _adapter_states(model: torch.nn.Module) -> Iterable[str]:
    """Yield what PEFT's layers do with their adapters, which is in no parameter."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
            scaling = sorted(getattr(module, "scaling", {}).items())
            state = module.active_adapters, module.disable_adapters, module.merged_adapters, scaling
            yield f"{name}: {state}"
