"""A thousand random configurations of vLLM: each starts, or is refused with the name of a setting and what to set."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from tests.integrations.vllm import test_setup as engines

from cuvee.codec.errors import CuveeError
from cuvee.integrations.vllm.setup import Setup

COUNT = 1000
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
DTYPES = (
    *FP8, "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla", "turboquant_k8v4", "ultraquant_4bit", "int4_per_token_head",
    "int8_per_token_head", "fp8_per_token_head", "nvfp4",
)  # fmt: skip
DRAFTS = (
    "ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash",
    "dspark", "extract_hidden_states", "custom_class",
)  # fmt: skip
KINDS = (
    "FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "MambaSpec", "ChunkedLocalAttentionSpec", "RSWASpec",
    "CrossAttentionSpec", "SinkFullAttentionSpec", "HiSparseHotSpec", "SlidingWindowMLASpec", "CircularBufferSpec",
)  # fmt: skip
# Of each model: its configuration, the class and the fields of what its layers cache. That of the last has others, too.
MODELS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "llama": (engines.CONFIG, "FullAttentionSpec", {}),
    "mistral": (engines.WINDOWED, "SlidingWindowSpec", {}),
    "deepseek": (engines.LATENTS, "MLAAttentionSpec", {"num_kv_heads": 1, "head_size": 20, "head_size_v": 0}),
    "lfm2": (engines.HYBRID, "FullAttentionSpec", {}),
}
# Most options are the usual ones, or nothing would start.
OTHERS: dict[str, tuple[Any, ...]] = {
    "cache__enable_prefix_caching": (False,),
    "scheduler__enable_chunked_prefill": (False,),
    "parallel__tensor_parallel_size": (2, 3, 4),
    "parallel__pipeline_parallel_size": (2,),
    "parallel__decode_context_parallel_size": (2,),
    "parallel__prefill_context_parallel_size": (2,),
    "parallel__distributed_executor_backend": ("mp", "ray", "external_launcher"),
    "model__runner_type": ("pooling", "draft"),
    "model__is_encoder_decoder": (True,),
    "layers": (1, 3, 0),
    "speculative": tuple(map(engines._drafts, DRAFTS)),
}
EXTRA: tuple[dict[str, Any], ...] = (
    {"blend": {}},
    {"kl": 1},
    {"quality": "small"},
    {"refinements": 1},
    {"nonsense": 1},
    {"deadline_ms": 1},
)
REMEDY = re.compile(r"\b(set|pass|use|serve|remove|give|leave|must|only|supported: |there are)")


def drawn(rng: random.Random) -> dict[str, Any]:
    """Options of an engine."""

    def pick(usual: Any, others: Any, odds: float = 0.12) -> Any:
        return rng.choice(others) if rng.random() < odds else usual

    config, own, fields = rng.choice(list(MODELS.values()))
    dtype = pick("auto", DTYPES, 0.2)
    kind = pick(own, KINDS)
    window = {"SlidingWindowSpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}.get(kind)
    spec = engines._spec(
        type(kind, (engines.FullAttentionSpec,), {}), block_size=pick(32, (8, 16, 48, 128)),
        dtype=torch.bfloat16 if dtype == "auto" else torch.uint8, **fields, **({window: 64} if window else {}),
    )  # fmt: skip
    states = engines._spec(
        engines.MambaSpec, block_size=64, shapes=((2, 32),), dtypes=(torch.bfloat16,),
        mamba_cache_mode=pick("align", ("none", "all")),
    )  # fmt: skip
    return {
        "specs": [states, spec] if config is engines.HYBRID else [spec],
        "model__hf_text_config": config,
        "cache__cache_dtype": dtype,
        "extra": {"chunk_tokens": pick(64, (32, 48, 96, 256, 4096)), **pick({}, EXTRA)},
        **{name: rng.choice(others) for name, others in OTHERS.items() if rng.random() < 0.06},
    }


@pytest.mark.parametrize("seed", range(4))
def test_every_configuration_starts_or_is_refused_by_name(seed: int) -> None:
    """Those that start have a codec of the first rank, and the layout of its pages."""
    rng, started, refusals = random.Random(seed), 0, set()
    for _ in range(COUNT // 4):
        try:
            made = Setup.of_engine(*engines._engine(**drawn(rng)))
            made.codec(0)
            made.layout_of_pages(0)
            started += 1
        except CuveeError as error:
            refusals.add(re.sub(r"\d+|'.*?'", "", str(error)))
    assert not [refusal for refusal in refusals if not REMEDY.search(refusal)]
    assert started > 20 and len(refusals) > 10, "otherwise the draw is lopsided"
