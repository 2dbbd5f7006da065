"""A thousand random configurations of vLLM: each starts, or is refused with the name of a setting and what to set."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
import torch
from tests.integrations.vllm import test_setup as engines

from cuvee.codec.errors import CuveeError
from cuvee.integrations.vllm.setup import Setup

COUNT = 1000
DTYPES = (
    "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "ultraquant_4bit", "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4",
)  # fmt: skip
DRAFTS = (
    "ngram", "ngram_gpu", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash",
    "dspark", "extract_hidden_states", "custom_class",
)  # fmt: skip
KINDS = (
    "FullAttentionSpec", "SlidingWindowSpec", "MLAAttentionSpec", "MambaSpec", "ChunkedLocalAttentionSpec", "RSWASpec",
    "CrossAttentionSpec", "SinkFullAttentionSpec", "HiSparseHotSpec", "SlidingWindowMLASpec", "CircularBufferSpec",
)  # fmt: skip
WINDOWS = {"SlidingWindowSpec": "sliding_window", "ChunkedLocalAttentionSpec": "attention_chunk_size"}
REMEDY = re.compile(r"\b(set|pass|use|serve|remove|give|leave|must|only|supported: |there are)")
MODELS = {
    "llama": engines.CONFIG, "mistral": engines.WINDOWED, "deepseek": engines.LATENTS, "lfm2": engines.HYBRID,
}  # fmt: skip
STATES = 64  # tokens of a block of recurrent layers


def drawn(rng: random.Random) -> tuple[dict[str, Any], bool]:
    """Options of an engine, and whether all of them are served. Most are the usual ones, or nothing would start."""
    served = True

    def pick(usual: Any, others: Any, odds: float = 0.12) -> Any:
        return rng.choice(others) if rng.random() < odds else usual

    model = rng.choice(list(MODELS))
    dtype = pick("auto", DTYPES, 0.3)
    held = {"float16": torch.float16}.get(dtype, torch.bfloat16 if dtype in ("auto", "bfloat16") else torch.uint8)
    served &= dtype in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
    own = {"mistral": "SlidingWindowSpec", "deepseek": "MLAAttentionSpec"}.get(model, "FullAttentionSpec")
    kind, heads = pick(own, KINDS), 1 if model == "deepseek" else 2
    size = 20 if model == "deepseek" else 8
    served &= kind == own or (model != "deepseek" and kind in ("FullAttentionSpec", *WINDOWS))
    served &= kind != "MLAAttentionSpec" or model == "deepseek"
    tensor, pipeline = pick(1, (2, 3, 4)), pick(1, (2,))
    heads_there = 1 if model == "deepseek" else max(heads // tensor, 1)
    served &= model == "deepseek" or tensor != 3
    block, chunk = pick(32, (8, 16, 48, 128)), pick(64, (32, 48, 96, 256, 4096))
    hybrid = model == "lfm2"
    whole = math.lcm(block, STATES) if hybrid else block
    served &= chunk % whole == 0 and chunk <= 256 and not (kind == "SlidingWindowSpec" and chunk > 64)
    served &= not (kind == "ChunkedLocalAttentionSpec" and 64 % chunk)
    extra: dict[str, Any] = {"chunk_tokens": chunk}
    option = pick(None, ("blend", "kl", "quality", "refinements", "nonsense", "deadline_ms"), 0.2)
    extra |= {} if option is None else {option: {"blend": {}, "quality": "small"}.get(option, 1)}
    method = pick(None, DRAFTS, 0.3)
    served &= method is None or method in DRAFTS[:7]
    mode = pick("align", ("none", "all"))
    served &= not hybrid or (mode == "align" and method is None)
    targets = option == "deadline_ms" and not hybrid
    served &= option is None or option == "blend" or (targets and kind not in WINDOWS)
    fp8 = held is torch.uint8
    served &= option != "blend" or not (model != "llama" or fp8 or method)
    served &= pipeline == 1
    layers = 2 if hybrid else pick(2, (1, 3, 0))
    served &= layers == 2 or (layers == 3 and method is not None)
    chunked, prefix = pick(True, (False,)), pick(True, (False,))
    served &= model != "deepseek" or chunked or prefix
    decode, prefill = pick(1, (2,), 0.05), pick(1, (2,), 0.05)
    served &= decode == prefill == 1
    executor = pick("uni" if tensor * pipeline == 1 else "mp", ("mp", "ray", "external_launcher"))
    served &= executor != "external_launcher" or tensor * pipeline == 1
    runner, encodes = pick("generate", ("pooling", "draft"), 0.05), pick(False, (True,), 0.05)
    served &= runner == "generate" and not encodes
    spec_class = type(kind, (engines.FullAttentionSpec,), {})
    fields = {WINDOWS[kind]: 64} if kind in WINDOWS else {}
    latent = {"head_size_v": 0} if model == "deepseek" else {}
    spec = engines._spec(
        spec_class, block_size=block, num_kv_heads=heads_there, head_size=size, dtype=held, **fields, **latent
    )
    states = engines._spec(
        engines.MambaSpec, block_size=STATES, shapes=((2, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode=mode
    )
    return {
        "specs": [states, spec] if hybrid else [spec], "layers": layers, "extra": extra,
        "model__hf_text_config": MODELS[model],
        "cache__cache_dtype": dtype, "cache__enable_prefix_caching": prefix,
        "scheduler__enable_chunked_prefill": chunked, "speculative": method and engines._drafts(method),
        "parallel__tensor_parallel_size": tensor, "parallel__pipeline_parallel_size": pipeline,
        "parallel__decode_context_parallel_size": decode, "parallel__prefill_context_parallel_size": prefill,
        "parallel__distributed_executor_backend": executor, "model__runner_type": runner,
        "model__is_encoder_decoder": encodes,
    }, served  # fmt: skip


def refused(options: dict[str, Any]) -> str | None:
    """Why an engine with these options does not start; None: it does, and its first rank finds its codec and pages."""
    try:
        made = Setup.of_engine(*engines._engine(**options))
        made.codec(0)
        made.layout_of_pages(0)
    except CuveeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(4))
def test_every_configuration_starts_or_is_refused_by_name(seed: int) -> None:
    rng, started, refusals = random.Random(seed), 0, set()
    for _ in range(COUNT // 4):
        options, served = drawn(rng)
        refusal = refused(options)
        assert served == (refusal is None), (refusal, options)
        if refusal is None:
            started += 1
        else:
            assert REMEDY.search(refusal), f"no remedy in {refusal}"
            refusals.add(re.sub(r"\d+|'.*?'", "", refusal))
    assert started > 20 and len(refusals) > 10, "otherwise the draw is lopsided"
