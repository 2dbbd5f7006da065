"""Fingerprints of a model's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SAMPLES = 256  # values of each parameter tensor that enter the fingerprint
# What wrappers put into the names of parameters: torch.compile, FSDP, checkpointing of activations, PEFT; and before
# them: DistributedDataParallel, PEFT.
_INSIDE = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
_BEFORE = ("module.", "base_model.model.")


def sampled_positions(values: int) -> torch.Tensor:
    """Return the indices, int64, of the values that enter the fingerprint: evenly spread, at most 256."""
    count = min(_SAMPLES, values)
    # Integers, because float32 cannot hold the last index of a large tensor, and CPUs round its steps differently.
    return torch.arange(count) * (values - 1) // max(count - 1, 1)


def fingerprint_samples(parameters: Iterable[tuple[str, tuple[int, ...], torch.Tensor]]) -> str:
    """Return the fingerprint of parameters given as name, shape, and the values at `sampled_positions`, in order.

    A model in a wrapper, such as a compiled one, has the fingerprint of the model.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"cuvee-model")
    for name, shape, values in parameters:
        digest.update(f"{_unwrapped(name)} {shape}".encode())
        digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return the fingerprint of the weights: hexadecimal BLAKE2b over each parameter's name, shape and 256 values.

    It does not hash every byte, since a 70B model has 140 GB. Two fine-tunes differ in almost every value. An adapter
    of PEFT that is not merged counts: its weights, its scaling, and whether it is active.
    """
    weights = (
        (name, tuple(p.shape), p.detach().reshape(-1)[sampled_positions(p.numel()).to(p.device)])
        for name, p in model.named_parameters()
    )
    return fingerprint_samples((*weights, *_adapter_states(model)))


def _unwrapped(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    name = ".".join(part for part in name.split(".") if part not in _INSIDE)
    while prefix := next((prefix for prefix in _BEFORE if name.startswith(prefix)), ""):
        name = name.removeprefix(prefix)
    return name


def _adapter_states(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Yield what PEFT's layers do with their adapters, which is in no parameter, as names of empty parameters."""
    for name, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
            scaling = sorted(getattr(module, "scaling", {}).items())
            state = module.active_adapters, module.disable_adapters, module.merged_adapters, scaling
            yield f"{name}: {state}", (), torch.empty(0, dtype=torch.float32)
