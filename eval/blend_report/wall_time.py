"""The time a blend takes, over that of a full prefill, as prompts grow.

It is measured on the CPU with a Llama of random weights, so no model is needed. Prompts are chunks of 256 tokens, each
computed alone, and 64 tokens of text. In each round everything runs once, in turn, and ratios are taken within a round,
so that a machine that slows down slows both sides. Nothing is reported unless the blend that recomputes everything has
the logits of the prefill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from cuvee.blend import Blender, Segment
from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.layout import KVLayout
from cuvee.codec.models.forward import cache_argument, empty_cache, prefill
from cuvee.eval.blend_report.selectors import COMPARED, CORRECTED, DEFAULT, NOTHING, SELECTORS
from cuvee.eval.timing import Timing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LEAST_TOKENS", "measure_wall_time"]

CHUNK, SUFFIX = 256, 64  # tokens
LEAST_TOKENS = 4 * SUFFIX  # in a shorter prompt the default selector cannot do its looking around for 15 %
TIMED = ((NOTHING, 0.0), *((key, cost) for cost in COMPARED for key in ("boundary", DEFAULT)), ("boundary", 1.0))
ROUNDS = (3, 9)  # at least three; up to nine while they take less than …
SECONDS = 8.0  # … this for one prompt length
TOLERANCE = 1e-3  # difference of a logit at cost 1
RANDOM_LLAMA: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 16384,
}


@torch.no_grad()
def measure_wall_time(lengths: Sequence[int], seed: int, step: Callable[[str], None]) -> dict[str, Any]:
    """Measure the seconds of a full prefill and of blends as prompts grow.

    Args:
        lengths: tokens in the prompts.
        seed: of weights and tokens.
        step: called with what comes next.

    Raises:
        CuveeError: the blend that recomputes everything has other logits than the full prefill.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    step("wall time: a model and its chunks")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**RANDOM_LLAMA)).eval()
        text = torch.randint(RANDOM_LLAMA["vocab_size"], (max(lengths),))
    layout = KVLayout.from_config(model.config, dtype=model.dtype)
    codec = Codec.without_profile(layout)
    # All lengths have the same chunks, except that the last one may be shorter.
    pieces = text[: max(lengths) - SUFFIX].split(CHUNK)
    chunks = list(chain.from_iterable(prefill(model, piece[None], layout) for piece in pieces))
    measured = []
    for length in lengths:
        step(f"wall time: {length} tokens")
        measured.append(_wall_time(model, codec, chunks, text[:length]))
    return {
        "model": {**RANDOM_LLAMA, "parameters": sum(p.numel() for p in model.parameters()), "dtype": layout.dtype},
        "threads": torch.get_num_threads(),
        "chunk_tokens": CHUNK,
        "suffix": SUFFIX,
        "decoded": "lossless",
        "lengths": measured,
    }


def _wall_time(model: PreTrainedModel, codec: Codec, chunks: Sequence[KVChunk], tokens: torch.Tensor) -> dict[str, Any]:
    cached = len(tokens) - SUFFIX
    pieces = tokens[:cached].split(CHUNK)
    own = [chunk.slice(0, len(piece)) for chunk, piece in zip(chunks, pieces, strict=False)]
    blobs = [codec.encode(chunk) for chunk in own]
    segments = [Segment(piece, chunk) for piece, chunk in zip(pieces, own, strict=True)] + [Segment(tokens[cached:])]
    blenders = {correct: Blender(model, correct=correct) for correct in (False, True)}
    full: list[float] = []
    decoding: list[float] = []
    blending: list[list[float]] = [[] for _ in TIMED]
    spent = [0.0] * len(TIMED)
    began = time.perf_counter()
    while len(full) < ROUNDS[0] or (len(full) < ROUNDS[1] and time.perf_counter() - began < SECONDS):
        expected = _timed(partial(_prefill, model, tokens), full)
        _timed(lambda: [codec.decode(blob) for blob in blobs], decoding)
        for index, (key, cost) in enumerate(TIMED):
            selector = SELECTORS[key][1](cost, 0)
            result = _timed(partial(blenders[key in CORRECTED].blend, segments, selector=selector), blending[index])
            spent[index] = result.record.cost
            error = float((result.logits - expected).abs().max())
            if cost == 1 and error > TOLERANCE:
                raise CuveeError(f"a blend that recomputes everything is off by {error:.3g} in a logit: not timed")
    return {
        "tokens": len(tokens),
        "cached": cached,
        "rounds": len(full),
        "full": _quantiles(full),
        "decode": {**_quantiles(decoding), "bytes": sum(map(len, blobs)), "ratio": _over(decoding, full)},
        "blends": [
            {
                "selector": key,
                "label": SELECTORS[key][0],
                "cost": cost,
                "spent": share,
                **_quantiles(seconds),
                "ratio": _over(seconds, full),
            }
            for (key, cost), share, seconds in zip(TIMED, spent, blending, strict=True)
        ],
    }


def _prefill(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits `[1, V]` after the last token."""
    logits: torch.Tensor = model(
        input_ids=tokens[None], **cache_argument(model, empty_cache()), use_cache=True, logits_to_keep=1
    ).logits[0]
    return logits


def _timed(call: Callable[[], Any], taken: list[float]) -> Any:
    began = time.perf_counter()
    result = call()
    taken.append(time.perf_counter() - began)
    return result


def _quantiles(seconds: Sequence[float]) -> dict[str, Any]:
    timing = Timing.of(seconds)
    return {"seconds": list(seconds), "median": timing.median, "p20": timing.p20, "p80": timing.p80}


def _over(seconds: Sequence[float], full: Sequence[float]) -> dict[str, Any]:
    found = _quantiles(np.divide(seconds, full).tolist())
    del found["seconds"]
    return found
