"""Measure the cache of a model from its configuration alone.

    configuration --meta device--> the model without weights: what its layers hold, at their true sizes
                  --shrunk-------> a small model of the same class with random weights: how keys depend on positions

What plays no part in positions shrinks: widths, experts, vocabulary, heads. Head sizes, rotary settings and the pattern
of layers stay. A small model whose layers are not like those of the true one proves nothing: they stay bound.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cuvee.codec.errors import CuveeError, UnsupportedModelError, allocations
from cuvee.codec.models.probe import MeasuredLayer, ProbeError, first_line, measure, structure

_MAX_LAYERS = 4096
_MAX_SKIPPED = 8
_WIDTH = 128
# What shrinks: parts of an entry's name, the first that fit, and the most that the entry may be.
_AT_MOST = (
    (("vocab_size",), 64),
    (("_token_id",), 63),
    (("intermediate", "ffn", "_inner", "expert_size"), 64),
    (("experts_per", "moe_topk", "top_k_experts", "moe_k"), 2),
    (("experts",), 4),
    (("n_group", "topk_group"), 1),
    (("q_lora_rank",), 32),
)
_SMALL = 2_000_000  # parameters of a model that is measured as it is
_LARGEST = 100_000_000  # parameters of a stand-in: 0.4 GB
_IGNORED = ("_name_or_path", "architectures", "dtype", "transformers_version", "quantization_config")

_of_configs: dict[bytes, tuple[MeasuredLayer, ...]] = {}


def measure_config(config: Any) -> tuple[MeasuredLayer, ...]:
    """Return what the cache of a model of this configuration holds, layer by layer. Results are kept in memory.

    Raises:
        UnsupportedModelError: transformers cannot build the model, or it does not run, or it keeps no cache.
        OutOfMemoryError: there is no memory for a stand-in.
    """
    digest = _digest(config)
    if digest not in _of_configs:
        with torch.device("cpu"):  # whatever the surrounding context
            _of_configs[digest] = _measured(config)
    return _of_configs[digest]


def _digest(config: Any) -> bytes:
    entries = {name: value for name, value in config.to_dict().items() if name not in _IGNORED}
    text = json.dumps(entries, sort_keys=True, default=str)
    return hashlib.blake2b(f"{type(config).__qualname__} {text}".encode()).digest()


def _measured(config: Any) -> tuple[MeasuredLayer, ...]:
    name = config.model_type
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is int and layers > _MAX_LAYERS:
        raise UnsupportedModelError(f"{name}: num_hidden_layers must be at most {_MAX_LAYERS}, got {layers}")
    plain = _plain(config)
    bare = _build(plain, "meta", name)
    if _parameters(bare) <= _SMALL:
        return measure(_build(plain, "cpu", name), name)
    true = _structure(bare, name)
    if any(layer.beyond for layer in true):  # there is no layout, whatever the rule of the other layers
        return true
    head_dim = next((layer.head_dim for layer in true if layer.kv_heads), 1)
    why = ""
    for width in (2 * head_dim, _WIDTH, None):
        try:
            with _building(name):
                small = _shrink(plain, width)
            parameters = _parameters(_build(small, "meta", name))
            if parameters > _LARGEST:
                why = f"a small one has {parameters} parameters"
                continue
            found = measure(_build(small, "cpu", name), name)
        except ProbeError as error:
            why = str(error)
            continue
        if [_likeness(layer) for layer in found] == [_likeness(layer) for layer in true]:
            return tuple(
                replace(layer, kv_heads=own.kv_heads, others=own.others) for layer, own in zip(found, true, strict=True)
            )
        why = "layers of a small one hold something else"
    return tuple(replace(layer, why=f"no small model of this type could be measured: {why}") for layer in true)


def _likeness(layer: MeasuredLayer) -> tuple[Any, ...]:
    """Return what a layer of a small model and of the true one must have in common; latents may be swapped."""
    return layer.kind, {layer.head_dim, layer.value_dim}, layer.sliding_window, [name for name, _ in layer.others]


def _plain(config: Any) -> Any:
    """Return a copy of a configuration that every release of transformers can run on a CPU."""
    plain = copy.deepcopy(config)
    # An engine's configuration may name kernels that are not installed, and grouped products need a device's dtypes.
    plain._attn_implementation = plain._experts_implementation = "eager"
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    padding = getattr(plain, "pad_token_id", None)
    if type(padding) is int and not 0 <= padding < plain.vocab_size:  # nothing is padded
        plain.pad_token_id = 0
    return plain


def _build(config: Any, device: str, name: str) -> Any:
    """Return transformers' model of a configuration, with random weights, in eval mode."""
    from transformers import AutoModel, AutoModelForCausalLM

    copied = copy.deepcopy(config)
    with _building(name), torch.device(device), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        factory: Any
        # Without a head, the decoder of an encoder-decoder comes with its encoder, which would see all tokens.
        alone = getattr(config, "is_decoder", False)
        for factory in (AutoModelForCausalLM, AutoModel) if alone else (AutoModel, AutoModelForCausalLM):
            if type(config) in factory._model_mapping:
                return factory.from_config(copied, dtype=torch.float32).eval()
        return _class_of(config)._from_config(copied, dtype=torch.float32).eval()


def _class_of(config: Any) -> Any:
    """Return the class of a part of a multimodal model, which transformers' registries do not name."""
    from transformers import PreTrainedModel

    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, PreTrainedModel)]
    of_config = [
        each for each in classes if each.config_class is type(config) and not each.__name__.endswith("PreTrainedModel")
    ]
    if not of_config:
        raise ValueError(f"no class of {module.__name__} takes a {type(config).__name__}")
    return min(of_config, key=lambda each: len(each.__name__))


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Turn whatever a model's code raises for a configuration into `ProbeError`."""
    try:
        with allocations(f"{name}: building a model"):
            yield
    except CuveeError:
        raise
    except Exception as error:  # whatever the code of a model raises for a configuration
        raise ProbeError(
            f"{name}: transformers must be able to build the model of hf_config, but it raised {type(error).__name__}: "
            f"{first_line(error)}; correct the model's config.json, upgrade transformers, or pass the loaded model to "
            "KVLayout.of"
        ) from error


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _structure(model: Any, name: str) -> tuple[MeasuredLayer, ...]:
    """Return what the layers of a model on the meta device hold.

    Modules whose work depends on values, as that of experts on the tokens routed to them, return their input.
    """
    model.warn_if_padding_and_no_attention_mask = lambda *_: None  # it looks for padding among the tokens
    running: list[torch.nn.Module] = []
    hooks = [module.register_forward_pre_hook(lambda called, _: running.append(called)) for module in model.modules()]
    hooks += [module.register_forward_hook(lambda called, _, out: _left(running)) for module in model.modules()]
    try:
        for _ in range(_MAX_SKIPPED):
            running.clear()
            try:
                return structure(model, name)
            except ProbeError as error:
                if "meta" not in str(error):
                    raise
                if len(running) < 2:
                    break
                _avoid_values(model, type(running[-1]))
        raise ProbeError(
            f"{name}: must run without weights to be known by its configuration, but what it does depends on values; "
            "pass the loaded model to KVLayout.of"
        )
    finally:
        for hook in hooks:
            hook.remove()


def _left(running: list[torch.nn.Module]) -> None:
    running.pop()


def _avoid_values(model: torch.nn.Module, kind: Any) -> None:
    """Let the modules of a class return their first argument, or not adapt frequencies to the length."""
    module: Any
    for module in model.modules():
        if type(module) is not kind:
            continue
        scaling = getattr(module, "rope_type", None)
        if scaling is None:
            module.forward = lambda *args, **options: (*args, *options.values())[0]
        else:
            module.rope_type = dict.fromkeys(scaling, "default") if isinstance(scaling, dict) else "default"


def _shrink(config: Any, width: int | None) -> Any:
    """Return a copy with two heads and this width, small experts and a small vocabulary; None keeps heads and width.

    Heads without a size of their own share the width, others (latents) do with any.
    """
    small = copy.deepcopy(config)
    entries = {key: value for key, value in vars(small).items() if type(value) is int}
    for key, value in vars(config).items():
        most = next((most for parts, most in _AT_MOST if any(part in key for part in parts)), None)
        if most is None or "shared" in key:
            continue
        if type(value) is int:
            setattr(small, key, min(value, most))
        elif isinstance(value, list) and all(type(each) is int for each in value):  # by layer, or by kind of token
            setattr(small, key, [min(each, most) for each in value])
    if width is not None:
        for key in ("num_attention_heads", "num_key_value_heads"):
            if small.attribute_map.get(key, key) in entries:
                setattr(small, key, 2)
        small.hidden_size = 2 * entries.get("head_dim", width // 2)
    return small
