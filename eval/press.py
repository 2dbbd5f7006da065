"""A press for NVIDIA's kvpress, whose pipeline and evaluation can then measure cuvee (docs/guides/reports.md).

Other presses drop tokens, layer by layer. This one keeps all, and replaces the whole cache by what its blobs decode
to. So it cannot be part of a `ComposedPress`. kvpress is not imported: its pipeline calls this context manager alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from cuvee.codec.codec import Codec
from cuvee.codec.errors import InputError
from cuvee.integrations.transformers.caches import decode_cache, encode_cache

__all__ = ["CuveePress"]


@dataclass
class CuveePress:
    """Encode and decode the cache of each context that a model prefills.

        >>> import torch
        >>> from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        >>> model, cache = LlamaForCausalLM(config).eval(), DynamicCache()
        >>> press = CuveePress(Codec.without_profile(model))
        >>> with press(model), torch.no_grad():
        ...     _ = model.model(input_ids=torch.arange(40)[None], past_key_values=cache)
        >>> cache.get_seq_length(), 0 < press.compression_ratio < 1
        (40, True)

    Args:
        codec: of the model's profile.

    Attributes:
        raw_bytes: of the keys and values of all contexts so far.
        stored_bytes: of their blobs.
    """

    codec: Codec
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def compression_ratio(self) -> float:
        """Share of the bytes that blobs have saved so far, 0 to 1. It is measured: setting it does nothing but warn."""
        return 1 - self.stored_bytes / self.raw_bytes if self.raw_bytes else 0.0

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:  # kvpress's evaluation sets that of every press that has one
        logging.getLogger(__name__).warning("compression_ratio: is measured, %s is ignored: choose a quality", value)

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[None]:
        """Compress what `model` prefills meanwhile; an InputError if the cache was not empty before."""

        def hook(_: Any, args: tuple[Any, ...], given: dict[str, Any], output: Any) -> None:
            cache, ids = given["past_key_values"], given["input_ids"]
            if (held := cache.get_seq_length()) != (tokens := ids.shape[1]):
                remedy = "prefill it in one call, from an empty cache"
                raise InputError(f"past_key_values: must hold the context's {tokens} tokens, got {held}: {remedy}")
            blobs = encode_cache(self.codec, cache, ids)
            # Not of the model, which decode_cache may run to measure its cache: this hook would see that.
            decoded: Any = decode_cache(self.codec, blobs, model.config, cache.layers[0].keys.device)
            for layer, again in zip(cache.layers, decoded.layers, strict=True):
                self.raw_bytes += layer.keys.nbytes + layer.values.nbytes
                layer.keys, layer.values = again.keys, again.values
            self.stored_bytes += sum(map(len, blobs))

        handle = model.model.register_forward_hook(hook, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
