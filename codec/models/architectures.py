"""Supported transformers models, and the cache layouts in their configurations.

A family is listed once its cached keys were checked against transformers. All others are refused by name: a wrong
layout would silently decode to wrong keys.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.models.dtypes import TORCH_DTYPES


def _every_layer(config: Any, index: int) -> bool:
    return True


def _listed_layers(config: Any, index: int) -> bool:
    listed = config.no_rope_layers  # in spite of its name, 1 for each layer with RoPE
    if len(listed) != config.num_hidden_layers:
        raise InputError(
            f"hf_config.no_rope_layers: must have an entry for each of {config.num_hidden_layers} layers, got "
            f"{len(listed)}: correct the model's config.json"
        )
    return bool(listed[index])


def _windows_only(config: Any, index: int) -> bool:
    return config.sliding_window is not None and config.layer_types[index] == "sliding_attention"


def _windows_if_any(config: Any, index: int) -> bool:
    return config.sliding_window is None or config.layer_types[index] == "sliding_attention"


class _Family(NamedTuple):
    """A model family whose cached keys were checked against transformers.

    rotary: "module.Class" of its rotary embedding; None for absolute positions.
    rotates: whether a layer of a configuration rotates its keys.
    grouped: whether the model reads num_key_value_heads and head_dim; other models ignore these entries.
    latent: "module.Class" of its attention, if that is multi-head latent attention (`cuvee.codec.models.latents`).
    """

    rotary: str | None
    interleaved: bool = False
    grouped: bool = True
    latent: str | None = None
    rotates: Callable[[Any, int], bool] = _every_layer


_FAMILIES: dict[str, _Family] = {
    "apertus": _Family("apertus.ApertusRotaryEmbedding"),
    "arcee": _Family("arcee.ArceeRotaryEmbedding"),
    "bitnet": _Family("bitnet.BitNetRotaryEmbedding"),
    "cohere": _Family("cohere.CohereRotaryEmbedding", interleaved=True),
    "cohere2": _Family("cohere2.Cohere2RotaryEmbedding", interleaved=True, rotates=_windows_only),
    # The second version keeps the pairs of its weights, the third sorts them before it rotates.
    "deepseek_v2": _Family(
        "deepseek_v2.DeepseekV2RotaryEmbedding", interleaved=True, latent="deepseek_v2.DeepseekV2Attention"
    ),
    "deepseek_v3": _Family("deepseek_v3.DeepseekV3RotaryEmbedding", latent="deepseek_v3.DeepseekV3Attention"),
    "dots1": _Family("dots1.Dots1RotaryEmbedding"),
    "ernie4_5": _Family("ernie4_5.Ernie4_5RotaryEmbedding", interleaved=True),
    "ernie4_5_moe": _Family("ernie4_5_moe.Ernie4_5_MoeRotaryEmbedding", interleaved=True),
    "exaone4": _Family("exaone4.Exaone4RotaryEmbedding", rotates=_windows_if_any),
    "gemma": _Family("gemma.GemmaRotaryEmbedding"),
    "gemma2": _Family("gemma2.Gemma2RotaryEmbedding"),
    "gemma3_text": _Family("gemma3.Gemma3RotaryEmbedding"),
    "glm": _Family("glm.GlmRotaryEmbedding", interleaved=True),
    "glm4": _Family("glm4.Glm4RotaryEmbedding", interleaved=True),
    "glm4_moe": _Family("glm4_moe.Glm4MoeRotaryEmbedding"),
    "gpt2": _Family(None, grouped=False),
    "gpt_neox": _Family("gpt_neox.GPTNeoXRotaryEmbedding", grouped=False),
    "gpt_oss": _Family("gpt_oss.GptOssRotaryEmbedding"),
    "granite": _Family("granite.GraniteRotaryEmbedding"),
    "granitemoe": _Family("granitemoe.GraniteMoeRotaryEmbedding"),
    "helium": _Family("helium.HeliumRotaryEmbedding", interleaved=True),
    "llama": _Family("llama.LlamaRotaryEmbedding"),
    "minimax_m2": _Family("minimax_m2.MiniMaxM2RotaryEmbedding"),
    "ministral": _Family("ministral.MinistralRotaryEmbedding"),
    "ministral3": _Family("ministral3.Ministral3RotaryEmbedding"),
    "mistral": _Family("mistral.MistralRotaryEmbedding"),
    "mixtral": _Family("mixtral.MixtralRotaryEmbedding"),
    "nemotron": _Family("nemotron.NemotronRotaryEmbedding"),
    "olmo": _Family("olmo.OlmoRotaryEmbedding"),
    "olmo2": _Family("olmo2.Olmo2RotaryEmbedding"),
    "olmo3": _Family("olmo3.Olmo3RotaryEmbedding"),
    "olmoe": _Family("olmoe.OlmoeRotaryEmbedding"),
    "opt": _Family(None, grouped=False),
    "phi": _Family("phi.PhiRotaryEmbedding"),
    "phi3": _Family("phi3.Phi3RotaryEmbedding"),
    "qwen2": _Family("qwen2.Qwen2RotaryEmbedding"),
    "qwen2_moe": _Family("qwen2_moe.Qwen2MoeRotaryEmbedding"),
    "qwen3": _Family("qwen3.Qwen3RotaryEmbedding"),
    "qwen3_moe": _Family("qwen3_moe.Qwen3MoeRotaryEmbedding"),
    "seed_oss": _Family("seed_oss.SeedOssRotaryEmbedding"),
    "smollm3": _Family("smollm3.SmolLM3RotaryEmbedding", rotates=_listed_layers),
    "stablelm": _Family("stablelm.StableLmRotaryEmbedding"),
    "starcoder2": _Family("starcoder2.Starcoder2RotaryEmbedding"),
}

# Model types whose checkpoints are DeepSeek-V3's under another name, and whose configuration comes as code.
_AS_DEEPSEEK_V3 = ("kimi_k2",)
_DEEPSEEK_V3_SIZES = (
    "kv_lora_rank", "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
# Entries of DeepSeek-V3's own configurations that transformers has no field for.
_DEEPSEEK_V3_OTHERS = frozenset(
    (
        *("auto_map", "aux_loss_alpha", "ep_size", "moe_layer_freq", "norm_topk_prob", "num_nextn_predict_layers"),
        *("pretraining_tp", "quantization_config", "rope_scaling", "rope_theta", "scoring_func", "seq_aux"),
        *("topk_method", "torch_dtype", "transformers_version"),
    )
)

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SEQUENCE_DEPENDENT_ROPE = {"dynamic": "dynamic NTK RoPE", "longrope": "LongRoPE"}
_ATTENTION_LAYERS = ("full_attention", "sliding_attention")

_RECURRENT = frozenset(
    (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
        *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2"),
    )
)


def describe_cache(config: Any, dtype: str | torch.dtype | None) -> dict[str, Any]:
    """Read the input of `KVLayout.from_dict` from a transformers configuration.

    Raises:
        UnsupportedModelError, InputError, ImportError: as `KVLayout.from_config`.
    """
    try:
        from transformers import PreTrainedConfig
    except ImportError as error:
        raise ImportError("KVLayout.from_config needs transformers 5 or later: pip install transformers") from error
    if not isinstance(config, PreTrainedConfig):
        raise InputError(f"hf_config: must be a transformers PreTrainedConfig, got {type(config).__name__}")
    if config.model_type in _AS_DEEPSEEK_V3:
        config = as_deepseek_v3(config.to_dict())
    _refuse_unsupported(config)
    max_positions = _max_positions(config)
    dtype_name = _dtype_name(config.dtype if dtype is None else dtype)
    family = _FAMILIES[config.model_type]
    layers = [(layer_type, family.rotates(config, index)) for index, layer_type in enumerate(_layer_types(config))]
    kinds = list(dict.fromkeys(layers))
    ropes = _ropes(config, family, [layer_type for layer_type, rotates in kinds if rotates])
    heads = config.num_attention_heads
    kv_heads = (family.grouped and getattr(config, "num_key_value_heads", None)) or heads
    head_dim = (family.grouped and getattr(config, "head_dim", None)) or config.hidden_size // heads
    value_dim = head_dim
    if family.latent is not None:
        kv_heads, head_dim, value_dim = 1, config.qk_rope_head_dim, config.kv_lora_rank
    return {
        "model_type": config.model_type,
        "kinds": [
            {
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "value_dim": value_dim,
                "rope": ropes[layer_type] if rotates else None,
                "sliding_window": config.sliding_window if layer_type == "sliding_attention" else None,
            }
            for layer_type, rotates in kinds
        ],
        "layers": [kinds.index(layer) for layer in layers],
        "dtype": dtype_name,
        "max_positions": max_positions,
    }


def is_deepseek_v3(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` has a model type that stands for DeepSeek-V3 and is unknown to transformers."""
    return config.get("model_type") in _AS_DEEPSEEK_V3


def as_deepseek_v3(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of DeepSeek-V3 for a `config.json` of Kimi K2, without running its code.

    Args:
        config: the entries of the file.

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
    for name in _DEEPSEEK_V3_SIZES:
        if type(config.get(name)) is not int or config[name] < 1:
            raise UnsupportedModelError(f"{kind}: must have {name}, as DeepSeek-V3 does, got {config.get(name)!r}")
    unknown = sorted(config.keys() - DeepseekV3Config().to_dict().keys() - _DEEPSEEK_V3_OTHERS)
    if unknown:
        raise UnsupportedModelError(
            f"{kind}: must have no other entries than DeepSeek-V3 has, got {', '.join(unknown)}"
        )
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    return DeepseekV3Config.from_dict({**kept, "model_type": "deepseek_v3"})


def _refuse_unsupported(config: Any) -> None:
    kind = config.model_type
    rope_dicts = _rope_dicts(config)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError(f"{kind}: encoder-decoder and cross-attention caches are not supported")
    if getattr(config, "text_config", None) is not None:
        raise InputError(
            f"hf_config: must be that of a text decoder, got a multimodal wrapper ({kind}); pass "
            "hf_config.get_text_config()"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        _refuse_unknown_latents(kind)
    if kind in _RECURRENT:
        raise UnsupportedModelError(f"{kind}: recurrent, state-space and hybrid models are not supported")
    if kind in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{kind}: ALiBi positions are not supported")
    if any("mrope_section" in parameters for parameters in rope_dicts):
        raise UnsupportedModelError(f"{kind}: multimodal RoPE (M-RoPE, mrope_section) is not supported")
    if kind not in _FAMILIES:
        raise UnsupportedModelError(
            f"{kind or type(config).__name__}: not among the model types checked against transformers "
            f"({', '.join(_FAMILIES)}); if you know its cache, build KVLayout by hand"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{kind}: bidirectional attention has no KV cache to continue from")
    for parameters in rope_dicts:
        rope_type = parameters.get("rope_type", parameters.get("type", "default"))
        if rope_type in _SEQUENCE_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{kind}: {_SEQUENCE_DEPENDENT_ROPE[rope_type]} (rope_type {rope_type!r}) is not supported: "
                "its frequencies change with the sequence length, which cached keys do not record"
            )
        if rope_type not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"{kind}: rope_type {rope_type!r} is not supported (supported: {', '.join(_ROPE_TYPES)})"
            )


def _refuse_unknown_latents(kind: str) -> None:
    attention = _FAMILIES[kind].latent if kind in _FAMILIES else None
    if attention is None:
        known = ", ".join(name for name, family in _FAMILIES.items() if family.latent)
        raise UnsupportedModelError(
            f"{kind}: multi-head latent attention (MLA, kv_lora_rank) is supported in {known} only"
        )
    if not hasattr(_class_of(attention), "expand_kv"):
        raise UnsupportedModelError(
            f"{kind}: multi-head latent attention (MLA) needs a release of transformers that caches latents, not the "
            "keys and values of all heads: upgrade transformers"
        )


def _class_of(name: str) -> Any:
    """Return "module.Class" of a model family of transformers."""
    module_name, class_name = name.split(".")
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    return getattr(module, class_name)


def _rope_dicts(config: Any) -> list[Mapping[str, Any]]:
    """Return the RoPE parameters of the config: one dict, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return nested or [parameters]


def _max_positions(config: Any) -> int:
    """Return the number of positions that the model can address.

    With linear scaling, `max_position_embeddings` counts positions before scaling, in transformers and vLLM. With Llama
    3's scaling, and in Gemma 3 with any scaling, it counts positions after scaling. With YaRN some models count
    positions before scaling (Qwen's cards), others after (DeepSeek): the frequencies serve `factor` times
    `original_max_position_embeddings` either way.
    """
    positions: int = config.max_position_embeddings
    if config.model_type.startswith("gemma3"):
        return positions
    longest = float(positions)
    for parameters in _rope_dicts(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        factor: Any = parameters.get("factor")
        if kind not in ("linear", "yarn") or (kind == "yarn" and factor is None):  # then transformers derives it
            continue
        if type(factor) not in (int, float) or not 0 < factor < math.inf:
            raise InputError(
                f"hf_config.rope_parameters: must have a factor for {kind} RoPE, a finite number above 0, "
                f"got {factor!r}: correct the model's config.json"
            )
        if kind == "linear":
            longest = positions * factor
        else:
            longest = max(longest, (parameters.get("original_max_position_embeddings") or positions) * factor)
    return int(longest)


def _layer_types(config: Any) -> list[str]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        return ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    for index, layer_type in enumerate(layer_types):
        if layer_type not in _ATTENTION_LAYERS:
            raise UnsupportedModelError(
                f"{config.model_type}: layer {index} is {layer_type!r} (supported: {', '.join(_ATTENTION_LAYERS)})"
            )
    return list(layer_types)


def _ropes(config: Any, family: _Family, layer_types: list[str]) -> dict[str, dict[str, Any] | None]:
    if family.rotary is None:
        return dict.fromkeys(layer_types)
    make = _class_of(family.rotary)
    # A surrounding `torch.device` context (meta, cuda) must not affect how the table is computed.
    with torch.device("cpu"):
        rotary = make(config)
    ropes: dict[str, dict[str, Any] | None] = {}
    for layer_type in layer_types:
        prefix = "" if hasattr(rotary, "inv_freq") else f"{layer_type}_"
        inv_freq: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        ropes[layer_type] = {
            "inv_freq": inv_freq.tolist(),
            "attention_scaling": float(getattr(rotary, f"{prefix}attention_scaling")),
            "interleaved": family.interleaved,
        }
    return ropes


def _dtype_name(dtype: Any) -> str:
    if dtype is None:
        raise InputError("dtype: must be given, since hf_config names none; for example dtype=model.dtype")
    name = str(dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise InputError(
            f"dtype: must be one of {', '.join(TORCH_DTYPES)}, got {dtype!r}: dequantize other caches by value first"
        )
    return name
