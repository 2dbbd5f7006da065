"""Shared fixtures: tiny random models of every supported family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

MAX_POSITIONS = 4096

_SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_SLIDING = {"sliding_window": 8}
_HEAD = {"head_dim": 12}
_MOE = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("CohereConfig", {}),
    "gemma": ("GemmaConfig", _HEAD),
    "gemma2": ("Gemma2Config", {**_HEAD, **_SLIDING}),
    "gemma3-full-first": (
        "Gemma3TextConfig",
        {**_HEAD, **_SLIDING, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "gemma3-sliding-first": (
        "Gemma3TextConfig",
        {
            **_HEAD,
            **_SLIDING,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt2": ("GPT2Config", {}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "llama": ("LlamaConfig", _HEAD),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama-llama3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
                "rope_theta": 1e4,
            }
        },
    ),
    "llama-yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 512,
                "rope_theta": 1e4,
            }
        },
    ),
    "mistral": ("MistralConfig", _SLIDING),
    "mixtral": ("MixtralConfig", {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 16}),
    "qwen3": ("Qwen3Config", _HEAD),
    "qwen3_moe": ("Qwen3MoeConfig", {**_HEAD, **_MOE}),
}


@pytest.fixture(params=sorted(_FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Each supported family in turn."""
    name: str = request.param
    return name


@pytest.fixture
def tiny_config() -> Callable[..., Any]:
    """tiny_config(family, **changes) -> transformers config."""

    def make(family: str, **changes: Any) -> Any:
        class_name, extra = _FAMILIES[family]
        return getattr(transformers, class_name)(**{**_SMALL, **extra, **changes})

    return make


@pytest.fixture
def tiny_model(tiny_config: Callable[..., Any]) -> Callable[..., Any]:
    """tiny_model(family, dtype=torch.float32, **changes) -> random causal LM with two layers."""

    def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        torch.manual_seed(0)
        config = tiny_config(family, **changes)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    return make
