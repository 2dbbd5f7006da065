"""What the tier refuses, and the configuration of the engine by which it does."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

import vllm
from vllm import envs
from vllm.platforms import current_platform

from cuvee.codec.errors import InputError, UnsupportedModelError
from cuvee.integrations.identity.checkpoint import read_config
from cuvee.integrations.vllm_tier.tier_options import TierOptions

_FULL = "full_attention"


_WATCHED = "_cuvee_watches"  # attribute of a step that is
_tiers: weakref.WeakSet[Any] = weakref.WeakSet()


def of_connector(name: str) -> Any:
    """Return an argument of vLLM's connector, which makes the tier and tells it less than it knows; None: unknown."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_locals.get(name) is None:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def watch_steps(engine_core: Any, tier: Any) -> None:
    """Call `tier.step_failed` when a step of vLLM raises: it may offer what the step computed in part, if it goes on.

    Args:
        engine_core: vLLM's class `EngineCore`.
        tier: forgotten with its last other reference.
    """
    _tiers.add(tier)
    for name in ("step", "step_with_batch_queue"):
        step = getattr(engine_core, name)
        if not hasattr(step, _WATCHED):  # vLLM may wrap its own
            setattr(engine_core, name, _watched(step))


def _watched(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def watched(self: Any) -> Any:
        try:
            return step(self)
        except BaseException:
            for tier in list(_tiers):
                tier.step_failed()
            raise

    setattr(watched, _WATCHED, True)
    return watched


def refuse_names(engine: Any, options: TierOptions) -> None:
    """Refuse an engine in which vLLM's names of chunks do not tell what the chunks hold.

    Raises:
        InputError: the user must say what the names do not, in `model_id`.
        UnsupportedModelError: images, which clients may name, and which vLLM counts if nothing else needs their names;
            a vLLM that tells nothing of the engine (`of_connector`).
    """
    if engine is None:
        raise UnsupportedModelError(
            "CuveeTier does not support this vLLM, which tells it nothing of the engine: use 0.32 or 0.33"
        )
    algorithm = str(engine.cache_config.prefix_caching_hash_algo)
    if "xxhash" in algorithm:
        raise InputError(
            f"prefix_caching_hash_algo: must be sha256 or sha256_cbor, since clients can make others collide, got "
            f"{algorithm}: a store outlives the engine's own cache"
        )
    if engine.model_config.supports_multimodal_inputs:
        raise UnsupportedModelError(
            "CuveeTier does not support images and other media, whose names clients may choose: pass "
            "--language-model-only to vLLM, or use CuveeConnector"
        )
    if engine.lora_config is not None and options.model_id is None:
        raise InputError(
            "model_id: must be a name that changes with the adapters' files, of which vLLM tells a tier only names and "
            "paths, got none: set it, or do not serve adapters (enable_lora)"
        )


def drafter_of(engine: Any) -> tuple[str, str | None] | None:
    """Return the checkpoint and revision of a drafter with weights of its own."""
    drafts, served = getattr(engine.speculative_config, "draft_model_config", None), engine.model_config
    if drafts is None or (drafts.model, drafts.revision) == (served.model, served.revision):
        return None
    return str(drafts.model), drafts.revision


def options_of_bytes(engine: Any) -> dict[str, Any]:
    """Return how vLLM arranges the bytes of its pages, as far as it tells: what else names rows that are stored as they
    are. Each attention backend orders tokens and heads in its way, and vLLM chooses it by the device.
    """
    attention, speculative, capability = engine.attention_config, engine.speculative_config, None
    if current_platform.device_type != "cpu":
        capability = current_platform.get_device_capability()
    options: dict[str, Any] = {
        "vllm": ".".join(vllm.__version__.split(".")[:2]),
        "device": [current_platform.device_type, str(capability)],
        "attention": [str(attention.backend), str(getattr(attention, "backend_per_kind", None))],
        "context_parallel_interleave": engine.parallel_config.cp_kv_cache_interleave_size,
        "variables": [str(envs.VLLM_SSM_CONV_STATE_LAYOUT), str(envs.VLLM_PP_LAYER_PARTITION)],
    }
    if speculative is not None:
        drafts = speculative.draft_model_config
        options["speculative"] = [
            str(speculative.method), speculative.num_speculative_tokens,  # which recurrent states have room for
            str(getattr(drafts, "dtype", None)), str(getattr(drafts, "quantization", None)),
        ]  # fmt: skip
        if speculative.method == "extract_hidden_states":
            options["hidden_states"] = repr(drafts.hf_config)
    return options


def check_model(path: str, revision: str | None = None) -> None:
    """Tell a model with windows: its chunks may lack blocks that no window reaches any more.

    Raises:
        UnsupportedModelError: some layer has a sliding window.
    """
    config = read_config(path, revision=revision)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = {"sliding_attention"}
    if kinds - {_FULL}:
        raise UnsupportedModelError(
            f"CuveeTier codes keys and values of {_FULL} only, got layers of {', '.join(sorted(kinds - {_FULL}))}"
        )
