"""Tiny random models of every decoder type that transformers knows, and what cuvee does with their caches.

A type works if a model continues from `decode_cache(encode_cache(...))` at lossless as it does from its own cache.

    python -m tests.every_model [TYPE...]     a line per type, then counts
"""

from __future__ import annotations

import collections
import copy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import cuvee

TOKENS = 40
LARGEST = 60_000_000
LIMIT = 90  # seconds to build a model and run it
TYPES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}))

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "lm_head_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k", "num_key_value_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("head_dim", "global_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "dim_head"), 16),
    **dict.fromkeys(("sliding_window", "attention_window", "attention_chunk_size", "index_topk"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "time_step_rank", "laurel_rank", "mamba_n_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads", "mamba_expand", "num_experts_per_token"), 2),
    "hidden_size_per_layer_input": 16,
    "qk_head_dim": 24,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("mamba_num_heads", "n_mamba_heads"), 8),
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "attn_hidden_size": 64,
    "num_heads": 4,
    "n_heads": 4,
    "lru_width": 64,
    "num_attention_groups": 2,
}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers")
# Where a configuration lists no kinds of layers, or no experts, and a model needs some.
_KINDS = {"lfm2_moe": ("conv", "full_attention"), "granitemoehybrid": ("linear_attention", "full_attention")}


class Verdict(NamedTuple):
    """What became of a type: "works", "refused", "wrong" or "not built", and why."""

    name: str
    why: str


def shrink(config: Any, layers: int, sections: bool) -> Any:
    """Make a configuration small, and keep a layer of each kind that it lists; `sections`: of M-RoPE, not named."""
    entries = config.to_dict()
    depth = next((entries[name] for name in _DEPTHS if entries.get(name)), 2)
    for name, value in _SIZES.items():
        if entries.get(name) is not None and not isinstance(entries[name], list | dict):
            setattr(config, name, value)
    for name in _DEPTHS:
        if entries.get(name):
            setattr(config, name, layers)
    for name, listed in entries.items():
        if isinstance(listed, list) and len(listed) == depth and name != "architectures":
            kinds = list({str(each): each for each in listed}.values())[:layers]
            setattr(config, name, kinds + [listed[-1]] * (layers - len(kinds)))
    if "head_dim" in entries and entries["head_dim"] is None:
        config.head_dim = 16
    if "num_key_value_heads" in entries and entries["num_key_value_heads"] is None:
        config.num_key_value_heads = 2
    if entries.get("kv_lora_rank"):
        config.num_key_value_heads = 4
        if "head_dim" in entries:
            config.head_dim = 8
    if "num_experts_per_tok" in entries and entries["num_experts_per_tok"] is None:
        config.num_experts_per_tok = 2
    if config.model_type in _KINDS:
        config.layer_types = [_KINDS[config.model_type][layer % 2] for layer in range(layers)]
    if "attn_layer_indices" in entries:
        config.attn_layer_indices = [1]
    if config.model_type == "mamba2":
        config.num_heads = 8
    if "is_decoder" in entries:
        config.is_decoder = True
    if entries.get("num_kv_shared_layers"):
        config.num_kv_shared_layers = 1
    if entries.get("first_k_dense_replace"):
        config.first_k_dense_replace = 1
    if entries.get("activation_sparsity_pattern"):
        config.activation_sparsity_pattern = [0.0] * layers
    parameters = getattr(config, "rope_parameters", None) or {}
    for each in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if isinstance(each.get("mrope_section"), list) or sections:
            each["mrope_section"] = [4, 2, 2]
    return config


def make(config: Any) -> Any:
    factory: Any
    for factory in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in factory._model_mapping:
            return factory.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    raise ValueError(f"no model is registered for {type(config).__name__}")


def config_of(name: str) -> Any:
    """Return the default configuration of a type's text decoder, which has the entries of its encoder, if any."""
    # Transformers' own class: an engine in the same process registers others under some of these names.
    whole = getattr(transformers, CONFIG_MAPPING._mapping[name])()
    return copy.deepcopy(whole if whole.is_encoder_decoder else whole.get_text_config(decoder=True))


def build(name: str) -> tuple[Any, torch.Tensor, Any]:
    """Build a model of a type; return it, its tokens `[1, 40]`, and its cache of them. Raise whatever it raises."""
    problem: Exception = ValueError("no depth fits")
    for layers, sections in ((4, False), (2, False), (6, False), (4, True)):
        try:
            config = shrink(config_of(name), layers, sections)
            with torch.device("meta"):
                size = sum(own.numel() for own in make(config).parameters())
            if size > LARGEST:
                raise ValueError(f"{size} parameters are too many")
            torch.manual_seed(0)
            model = make(config)
            ids = torch.randint(3, 200, (1, TOKENS))
            with torch.no_grad():
                output = model(ids, use_cache=True)
            names = ("past_key_values", "cache", "cache_params")
            cache = next((own for each in names if (own := getattr(output, each, None)) is not None), None)
            if cache is None:
                raise ValueError("no cache")
        except Exception as error:  # whatever a model raises for a configuration that was shrunk crudely
            problem = error
        else:
            return model, ids, cache
    raise problem


class _Slow(BaseException):
    """A model took longer than the limit. Building catches every `Exception`, and must not catch this."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise `_Slow` in the main thread after so many seconds: some layers have no fast code for a CPU."""

    def stop(*_: object) -> None:
        raise _Slow(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _continued(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return the logits of five more tokens after a cache."""
    parameters = signature(model.forward).parameters
    name = next(each for each in ("past_key_values", "cache", "cache_params") if each in parameters)
    following = torch.randint(3, 200, (1, 5), generator=torch.Generator().manual_seed(1))
    if model.config.model_type == "cpmant":  # it takes all tokens again, and leaves out those of the cache by itself
        following = torch.cat([ids, following], 1)
    steps = following.split(1, 1) if model.config.model_type.startswith("prophetnet") else [following]
    with torch.no_grad():
        for step in steps:
            output = model(step, use_cache=True, **{name: cache})  # which appends to the cache
    logits: torch.Tensor = output[0]
    return logits


def judge(name: str) -> Verdict:
    """Tell what cuvee does with the cache of a model of this type."""
    try:
        with limited(LIMIT):
            model, ids, cache = build(name)
            own = _continued(model, ids, copy.deepcopy(cache))
    except (Exception, _Slow) as error:
        return Verdict("not built", f"{type(error).__name__}: {str(error)[:90]}".replace("\n", " "))
    kinds = " ".join(sorted({type(layer).__name__ for layer in getattr(cache, "layers", [])}) or [type(cache).__name__])
    try:
        codec = cuvee.Codec.without_profile(model)
        back = cuvee.decode_cache(codec, cuvee.encode_cache(codec, cache, ids), model)
    except cuvee.CuveeError as error:
        return Verdict("refused", f"{error} | {kinds}")
    ours = _continued(model, ids, back)
    far = float((own - ours).abs().max())
    return Verdict("works" if far <= 1e-4 else "wrong", f"{far:.0e} {kinds}")


def main() -> None:
    counts: collections.Counter[str] = collections.Counter()
    seen: set[str] = set()
    for name in sys.argv[1:] or TYPES:
        try:
            kind = config_of(name).model_type
        except Exception as error:
            verdict = Verdict("not built", f"{type(error).__name__}: its configuration needs arguments")
        else:
            if kind in seen:
                continue
            seen.add(kind)
            verdict = judge(name)
        counts[verdict.name] += 1
        print(f"{name:26} {verdict.name:10} {verdict.why[:260]}", flush=True)
    built = sum(counts.values()) - counts["not built"]
    print(f"transformers {transformers.__version__}: {counts['works']} of {built} types work", dict(counts))


if __name__ == "__main__":
    main()
