"""What the connector refuses when an engine starts: settings, layers and pages, by name, with what to set instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from cuvee.codec.dtypes import TORCH_DTYPES
from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.codec.layout import KVLayout
from cuvee.integrations.core.refusals import refuse
from cuvee.integrations.vllm.blending.blend_options import BlendOptions
from cuvee.integrations.vllm.connector_config import Options
from cuvee.integrations.vllm.pages.layer_groups import CachedLayers, LayerGroup, is_latent

_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_BLENDED = ("llama", "mistral", "qwen2", "qwen3")  # model types whose layers were checked against vLLM's prefill
_DRAFTS = ("ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp")  # how tokens are drafted
_MESSAGE = "CuveeConnector does not support {}"


def refuse_features(vllm_config: Any) -> None:
    """Refuse what would not be right, by the name of the setting, with what to set instead."""
    parallel, model, speculative = vllm_config.parallel_config, vllm_config.model_config, vllm_config.speculative_config
    dtype = str(vllm_config.cache_config.cache_dtype)
    method = str(getattr(speculative, "method", ""))
    contexts = parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
    refused = {
        "an encoder-decoder model: serve it without CuveeConnector": model.is_encoder_decoder,
        f"a {model.runner_type!r} model: only generation is supported (--runner generate)": (
            model.runner_type != "generate"
        ),
        f'speculative decoding by {method!r}: set "method" in --speculative-config to one of {", ".join(_DRAFTS)}': (
            speculative is not None and method not in _DRAFTS
        ),
        f"kv_cache_dtype={dtype!r}: set --kv-cache-dtype to auto, {', '.join((*TORCH_DTYPES, *_FP8))}": (
            dtype not in ("auto", *TORCH_DTYPES, *_FP8)
        ),
        "external_launcher with several ranks, each with a scheduler of its own: set "
        "--distributed-executor-backend mp": (
            parallel.distributed_executor_backend == "external_launcher" and parallel.tensor_parallel_size > 1
        ),
        "context parallelism: set --decode-context-parallel-size and --prefill-context-parallel-size to 1": (
            max(contexts) > 1
        ),
        "pipeline parallelism: set --pipeline-parallel-size to 1 and --tensor-parallel-size to the number of GPUs": (
            parallel.pipeline_parallel_size > 1
        ),
    }
    refuse(refused, _MESSAGE)


def check_windows(groups: Sequence[LayerGroup], chunk_tokens: int, block: int) -> None:
    """Refuse chunks of which the engine drops a part before it has computed the rest."""
    for window, chunked in {(group.window, group.chunked) for group in groups}:
        if window is None:
            continue
        if chunked and window % chunk_tokens:
            raise InputError(
                f"chunk_tokens: must divide the {window} tokens of a chunk of the model's attention, because the "
                f"engine drops all of them at its end, got {chunk_tokens}: set it to {math.gcd(window, chunk_tokens)}"
            )
        if chunk_tokens > window:
            most = window // block * block
            raise InputError(
                f"chunk_tokens: must be at most the {window} tokens of the model's sliding window, because the engine "
                f"drops the start of a longer chunk before its end is computed, got {chunk_tokens}: "
                + (f"set it to {most}" if most else f"pass --block-size {window} or less to vLLM, and set it to that")
            )


def codes_of_cache(vllm_config: Any, specs: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype of an fp8 cache; None if the cache holds values."""
    name = str(vllm_config.cache_config.cache_dtype)
    if name not in _FP8:
        return None
    other = sorted({str(spec.dtype) for spec in specs} - {"torch.uint8", str(_FP8[name])})
    if other:
        raise UnsupportedModelError(
            f"CuveeConnector does not support a KV cache whose layers are partly {' and '.join(other)} with "
            f"kv_cache_dtype={name!r} (kv_cache_dtype_skip_layers): give all layers one dtype"
        )
    return _FP8[name]


def dtype_of_cache(specs: Sequence[Any]) -> str:
    """Return the dtype of a cache that holds values.

    Raises:
        UnsupportedModelError: layers have several, or one that cuvee does not code.
    """
    names = sorted({str(spec.dtype).removeprefix("torch.") for spec in specs})
    if len(names) != 1 or names[0] not in TORCH_DTYPES:
        raise UnsupportedModelError(
            f"CuveeConnector does not support a KV cache of {' and '.join(names)} (use one of "
            f"{', '.join(TORCH_DTYPES)})"
        )
    return names[0]


def check_layers(layout: KVLayout, cached: CachedLayers) -> None:
    """Refuse layers other than the model's."""
    count = len(cached.names)
    if count != layout.num_layers:
        raise UnsupportedModelError(
            f"the engine caches {count} layers, the model has {layout.num_layers} that cache: layers of an unknown "
            "drafter are not supported; serve this model without CuveeConnector"
        )


def check_heads(layout: KVLayout, cached: CachedLayers, shards: int) -> None:
    """Refuse pages whose heads differ from the model's configuration."""
    for index, (layer, spec) in enumerate(zip(layout.shard(0, shards).layers, cached.specs, strict=True)):
        value_dim = getattr(spec, "head_size_v", None) or spec.head_size
        found = [spec.num_kv_heads, spec.head_size, value_dim]
        expected = [layer.kv_heads, layer.head_dim, layer.value_dim]
        if layer.latent:  # a token's page is one vector
            found, expected = found[:2], [1, layer.head_dim + layer.value_dim]
        if found != expected or layer.latent != is_latent(spec):
            kinds = ["latents" if latent else "heads" for latent in (is_latent(spec), layer.latent)]
            raise UnsupportedModelError(
                f"layer {index}: the engine caches {spec.num_kv_heads} {kinds[0]} of {spec.head_size}, the model's "
                f"configuration says {expected[0]} {kinds[1]} of {expected[1]}: serve this model without CuveeConnector"
            )


def check_recurrent(vllm_config: Any) -> None:
    """Refuse settings with which the engine's tables of blocks do not tell where states are."""
    cache = vllm_config.cache_config
    refused = {
        "speculative decoding with recurrent layers: leave --speculative-config out": (
            vllm_config.speculative_config is not None
        ),
        "prefix_match_unit with recurrent layers: leave --prefix-match-unit out": (cache.prefix_match_unit is not None),
        "use_replayssm: leave --use-replayssm out": cache.use_replayssm,
    }
    refuse(refused, _MESSAGE)


def check_latents(vllm_config: Any, layout: KVLayout, options: Options) -> None:
    """Refuse latents behind which the engine does not compute, and profiles of another order of dimensions."""
    if not (vllm_config.scheduler_config.enable_chunked_prefill or vllm_config.cache_config.enable_prefix_caching):
        raise UnsupportedModelError(
            "multi-head latent attention (MLA) without chunked prefill and prefix caching is not supported, because "
            "the engine then does not attend to what is loaded: pass --enable-prefix-caching to vLLM; its CPU engine "
            "switches both off on CPUs without AMX"
        )
    rope = layout.layers[0].rope
    if options.profile is not None and rope is not None and not rope.interleaved:
        raise UnsupportedModelError(
            "profile: is of keys whose rotated dimensions lie in another order than in vLLM's latents; remove it to "
            "store losslessly"
        )


def check_blend(vllm_config: Any, layout: KVLayout, codes: torch.dtype | None, blend: BlendOptions) -> None:
    """Refuse to blend where that is not known to be right, or where no prompt is long enough."""
    longest = vllm_config.model_config.max_model_len
    if blend.min_position + blend.min_reused >= longest:
        raise InputError(
            f"blend.segment_tokens: must be at most {3 * (max(longest - 1, 0) // 5) + 2}, or no prompt within "
            f"--max-model-len {longest} is long enough to be blended, got {blend.segment_tokens}"
        )
    family = vllm_config.model_config.hf_text_config.model_type
    if family not in _BLENDED:
        raise UnsupportedModelError(
            f"blend: must be used with one of {', '.join(_BLENDED)}, got {family}, which was not checked in vLLM; "
            "remove the option"
        )
    refused = {
        "models with sliding windows": any(layer.sliding_window is not None for layer in layout.layers),
        "fp8 caches": codes is not None,
        "prompts of engines with speculative decoding": vllm_config.speculative_config is not None,
    }
    refuse(refused, "blend: {} cannot be blended; remove the option")
