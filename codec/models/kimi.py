"""Kimi K2's configuration, which comes as code: its checkpoints are DeepSeek-V3's under another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuvee.codec.errors import UnsupportedModelError

_AS_DEEPSEEK_V3 = ("kimi_k2",)
_SIZES = (
    "kv_lora_rank", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
# Entries of DeepSeek-V3's own configurations that transformers has no field for.
_OTHERS = frozenset(
    (
        *("auto_map", "aux_loss_alpha", "ep_size", "moe_layer_freq", "norm_topk_prob", "num_nextn_predict_layers"),
        *("pretraining_tp", "quantization_config", "rope_scaling", "rope_theta", "scoring_func", "seq_aux"),
        *("topk_method", "torch_dtype", "transformers_version"),
    )
)


def is_deepseek_v3(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` has a model type that stands for DeepSeek-V3 and is unknown to transformers."""
    return config.get("model_type") in _AS_DEEPSEEK_V3


def as_deepseek_v3(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of DeepSeek-V3 for a `config.json` of Kimi K2, without running its code.

    Raises:
        UnsupportedModelError: another architecture, or entries that DeepSeek-V3 does not have, which may change what is
            cached.
    """
    from transformers import DeepseekV3Config

    kind = config["model_type"]
    if config.get("architectures") != ["DeepseekV3ForCausalLM"]:
        raise UnsupportedModelError(
            f"{kind}: must have architectures ['DeepseekV3ForCausalLM'], got {config.get('architectures')}"
        )
    for name in _SIZES:
        if type(config.get(name)) is not int or config[name] < 1:
            raise UnsupportedModelError(f"{kind}: must have {name}, as DeepSeek-V3 does, got {config.get(name)!r}")
    unknown = sorted(config.keys() - DeepseekV3Config().to_dict().keys() - _OTHERS)
    if unknown:
        raise UnsupportedModelError(
            f"{kind}: must have no other entries than DeepSeek-V3 has, got {', '.join(unknown)}"
        )
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    return DeepseekV3Config.from_dict({**kept, "model_type": "deepseek_v3"})
