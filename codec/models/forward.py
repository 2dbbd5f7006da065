"""Forward passes of transformers models: fill a cache, and predict after a cache.

Per token and layer, a cache of multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434) holds one latent
vector, from which the keys and values of all heads are computed, and one rotated vector, which is a part of all heads'
keys. In a `KVLayout` the rotated vector is the key and the latent is the value, of one head each: the codec takes the
rotation out of keys, and there is none in the latent.

    KVLayout      keys [T, 1, qk_rope_head_dim]      values [T, 1, kv_lora_rank]
    transformers  layer.values                       layer.keys
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout, LayerLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HEAD_VALUES = 1 << 24  # values of a head that are float32 at a time: the copy of a whole one may take a gigabyte


def check_tokens(model: PreTrainedModel, token_ids: torch.Tensor, prefix: int | None) -> int:
    """Validate calibration text and return the length of the prefix.

    Raises:
        InputError: `token_ids` or `prefix` has the wrong shape, dtype or range.
    """
    if token_ids.ndim != 2 or token_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"token_ids: must be an integer tensor [N, T], got {token_ids.dtype} {list(token_ids.shape)}")
    length = token_ids.shape[1]
    if token_ids.shape[0] < 1 or length < 8:
        raise InputError(f"token_ids: must hold sequences of at least 8 tokens, got {list(token_ids.shape)}")
    vocabulary = len(cast(torch.nn.Embedding, model.get_input_embeddings()).weight)
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocabulary:
        raise InputError(f"token_ids: must lie in the vocabulary 0 … {vocabulary - 1}, got {low if low < 0 else high}")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise InputError(
            f"token_ids: must be at most {limit} long, the model's positions, got {length}: cut them shorter"
        )
    prefix = 3 * length // 4 if prefix is None else prefix
    if not 1 <= prefix <= length - 2:
        raise InputError(f"prefix: must lie in 1 … {length - 2}, to leave two tokens to score, got {prefix}")
    return prefix


def coded_layout(model: PreTrainedModel | PreTrainedConfig) -> KVLayout:
    """Return the layout of a model (or configuration) that goes on from keys and values, whatever else its layers hold.

    Raises:
        UnsupportedModelError: no layer holds keys and values, or an encoder's output is needed.
    """
    layout = KVLayout.of(model, states=True)
    if not layout.layers or getattr(getattr(model, "config", model), "is_encoder_decoder", False):
        what = "no layer of it holds keys and values" if not layout.layers else "its decoder goes on from an encoder"
        raise UnsupportedModelError(
            f"{layout.model_type}: must be a decoder with attention to learn or measure a profile, but {what}: "
            "encode_cache with Codec.without_profile(model) keeps its cache"
        )
    return layout


def empty_cache(model: PreTrainedModel | None = None, layout: KVLayout | None = None) -> Any:
    """Return a transformers cache that keeps every token, also in sliding-window layers.

    The model is needed if its layers hold states beside keys and values, as the layout says.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if model is None or layout is None or not layout.states:
        return DynamicCache()
    cache: Any = DynamicCache(config=model.config)
    windows = (type(layer) is DynamicSlidingWindowLayer for layer in cache.layers)
    cache.layers = [DynamicLayer() if window else layer for window, layer in zip(windows, cache.layers, strict=True)]
    return cache


def unit_layers(cache: Any, layout: KVLayout) -> list[int]:
    """Return the indices of a cache's layers that hold keys and values; of all, if the layout has no states."""
    if not layout.states:
        return list(range(len(cache.layers)))
    indices = []
    for index, layer in enumerate(cache.layers):
        units = [getattr(layer, name, None) for name in ("keys", "values")]
        if layout.layers and all(isinstance(unit, torch.Tensor) and unit.ndim == 4 for unit in units):
            indices.append(index)
    return indices


def layer_units(layer: Any, layout: LayerLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values `[B, H, T, D]`, as a layout names them, of a layer of a transformers cache."""
    return (layer.values, layer.keys) if layout.latent else (layer.keys, layer.values)


def append_units(cache: Any, keys: torch.Tensor, values: torch.Tensor, index: int, layout: LayerLayout) -> None:
    """Append keys and values `[B, H, T, D]`, as a layout names them, to a layer of a transformers cache."""
    first, second = (values, keys) if layout.latent else (keys, values)
    cache.update(first, second, index)


@dataclass(frozen=True, slots=True)
class Filled:
    """A cache of several sequences: keys and values, as the layout names them, and all else that its layers hold.

    Attributes:
        units: keys and values `[B, H, T, D]` of each layer.
        template: the cache without them; None if its layers hold nothing else.
        indices: the layers of `template` that they belong to.
    """

    layout: KVLayout
    units: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    template: Any
    indices: tuple[int, ...]

    @classmethod
    def of(cls, cache: Any, layout: KVLayout, tokens: int) -> Filled:
        """Take a cache of this many tokens per sequence apart; it is unusable afterwards.

        Raises:
            UnsupportedModelError: its layers do not hold what the layout says, for every token.
        """
        indices = unit_layers(cache, layout)
        layers = [cache.layers[index] for index in indices]
        lengths = [layer.keys.shape[-2] for layer in layers]
        if lengths != [tokens] * layout.num_layers:
            raise UnsupportedModelError(
                f"{layout.model_type}: must hold keys and values of all {tokens} tokens in {layout.num_layers} layers, "
                f"got {lengths} by layer (virtual tokens, or a window that cannot be turned off)"
            )
        units = tuple(layer_units(*pair) for pair in zip(layers, layout.layers, strict=True))
        if layout.states:
            for layer in layers:
                layer.keys = layer.values = None
        return cls(layout, units, cache if layout.states else None, tuple(indices))

    def cache(self, units: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Make a transformers cache with these keys and values in place of its own, and all else as it was."""
        cache = empty_cache() if self.template is None else copy.deepcopy(self.template)
        for index, (layer_layout, (keys, values)) in enumerate(zip(self.layout.layers, units, strict=True)):
            if self.template is None:
                append_units(cache, keys, values, index, layer_layout)
            else:
                layer = cache.layers[self.indices[index]]
                layer.keys, layer.values = (values, keys) if layer_layout.latent else (keys, values)
        return cache

    def chunks(self, tokens: torch.Tensor, device: torch.device | str = "cpu") -> list[KVChunk]:
        """Return keys and values of `tokens [B, T]`, a chunk per sequence, on `device` and in the layout's dtype."""
        dtype = self.layout.torch_dtype
        return [
            KVChunk(
                [keys[row].transpose(0, 1).to(device, dtype) for keys, _ in self.units],
                [values[row].transpose(0, 1).to(device, dtype) for _, values in self.units],
                self.layout,
                token_ids=tokens[row],
            )
            for row in range(len(tokens))
        ]


def cache_argument(module: torch.nn.Module, cache: object) -> dict[str, Any]:
    """Return the keyword argument by which a model or a decoder layer takes a cache.

    It is `cache` in transformers releases that deprecate the old name, `past_key_values`.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=8, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> list(cache_argument(model, None)) in (["cache"], ["past_key_values"])
        True
    """
    return {"cache" if "cache" in signature(module.forward).parameters else "past_key_values": cache}


def fill(model: PreTrainedModel, tokens: torch.Tensor, layout: KVLayout) -> Filled:
    """Return the cache of `tokens [B, T]`, on the model's device."""
    cache = empty_cache(model, layout)
    # The logits of all tokens of a long prompt would take more memory than its cache.
    model(input_ids=tokens, **cache_argument(model, cache), use_cache=True, logits_to_keep=1)
    return Filled.of(cache, layout, tokens.shape[1])


def prefill(
    model: PreTrainedModel, tokens: torch.Tensor, layout: KVLayout, device: torch.device | str = "cpu"
) -> list[KVChunk]:
    """Return the keys and values of `tokens [B, T]`, one chunk per sequence, on `device` and in the layout's dtype."""
    return fill(model, tokens, layout).chunks(tokens, device)


def cache_of(model: PreTrainedModel, chunks: Sequence[KVChunk], filled: Filled | None = None) -> Any:
    """Return a transformers cache of these chunks of one length, a sequence each; `filled` as in `score`."""
    layout = chunks[0].layout
    if filled is None and layout.states:
        raise InputError(f"filled: must be given for {layout.model_type}, whose layers hold states beside the chunks")
    units = []
    for index, device in enumerate(cache_devices(model, layout.num_layers, filled)):
        keys = torch.stack([chunk.keys[index] for chunk in chunks]).transpose(1, 2)
        values = torch.stack([chunk.values[index] for chunk in chunks]).transpose(1, 2)
        units.append((keys.to(device, model.dtype), values.to(device, model.dtype)))
    return (filled or Filled(layout, (), None, ())).cache(units)


def score(
    model: PreTrainedModel, chunks: Sequence[KVChunk], tokens: torch.Tensor, filled: Filled | None = None
) -> torch.Tensor:
    """Return log-probabilities `[B, T - 1, V]` float32 of `tokens [B, T]` after these caches.

    `filled` is needed if the model's layers hold states beside keys and values: those that the chunks belong to.
    """
    cache = cache_of(model, chunks, filled)
    with _float32_head(model):
        logits: torch.Tensor = model(input_ids=tokens, **cache_argument(model, cache)).logits[:, :-1].float()
    for row in logits:
        row.copy_(row.log_softmax(-1))
    return logits


@contextmanager
def _float32_head(model: PreTrainedModel) -> Iterator[None]:
    """Compute a model's logits in float32, whatever its own dtype.

    In bfloat16 a logit of 20 is rounded to a sixteenth, which alone moves predictions by a KL of about 1e-4.
    """
    head: Any = model.get_output_embeddings()
    # Weights of other dtypes are codes of a quantized head; on the device meta, they are loaded by their own forward.
    rounds = isinstance(head, torch.nn.Linear) and head.weight.dtype in (torch.bfloat16, torch.float16)
    if not rounds or head.weight.is_meta:
        yield
        return

    def exact(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        states = inputs[0].float()
        logits = states.new_empty(*output.shape)
        rows = max(_HEAD_VALUES // states.shape[-1], 1)
        for part, weight in zip(logits.split(rows, -1), module.weight.split(rows), strict=True):
            part.copy_(states @ weight.float().T)
        return logits if module.bias is None else logits.add_(module.bias.float())

    hook = head.register_forward_hook(exact)
    try:
        yield
    finally:
        hook.remove()


def cache_devices(model: PreTrainedModel, layers: int, filled: Filled | None = None) -> list[torch.device]:
    """Return the device of each layer's keys and values, which `device_map=` may spread."""
    if filled is not None:
        return [keys.device for keys, _ in filled.units]
    if not getattr(model, "hf_device_map", None):
        return [model.device] * layers
    # The map does not tell where offloaded modules run, so a forward pass does.
    cache = empty_cache()
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), **cache_argument(model, cache))
    return [layer.keys.device for layer in cache.layers]
