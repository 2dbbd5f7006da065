"""A small model, its cache, and a profile with which ids and positions are recognized."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cuvee
from cuvee.codec.chunk import KVChunk
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import prefill
from cuvee.codec.profiles.profile import Profile

VOCABULARY, TOKENS, LIMIT = 3000, 300, 4096


def small_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A model of three layers with four heads of keys and values."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LIMIT, "pad_token_id": 0,
    }  # fmt: skip
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    return model


def text(sequences: int, length: int, seed: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Ids `[sequences, length]`."""
    return torch.randint(vocabulary, (sequences, length), generator=torch.Generator().manual_seed(seed))


def cached(model: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> KVChunk:
    """The cache of the TOKENS tokens whose ids `ids_of` returns."""
    with torch.no_grad():
        (chunk,) = prefill(model, text(1, TOKENS, 3), KVLayout.from_config(model.config, dtype=dtype))
    return chunk


def ids_of(at: range) -> list[int]:
    """The ids of these of the tokens."""
    return [int(own) for own in text(1, TOKENS, 3)[0, at.start : at.stop]]


@cache
def learned_profile() -> Profile:
    """A profile of `small_model()`, which can be cut for ranks."""
    return cuvee.calibrate(small_model(), text(30, 64, 1), "heads:2", more_text=text(200, 64, 2), progress=False)
