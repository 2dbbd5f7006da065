"""The step `model`: a trained model on the device. Its profile, the cache of a long prompt, KL, restoring it.

The model is SmolLM2 where its files are available, or else the bundled one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

import cuvee
from cuvee.calibration.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS, TEXTS, bundled_text
from cuvee.calibration.corpus import load_bundled_model, load_model, load_tokenizer
from cuvee.calibration.real_model import REAL_MODEL, ModelUnavailableError
from cuvee.codec.codec import Codec
from cuvee.codec.models.forward import prefill
from cuvee.codec.models.frozen import frozen
from cuvee.codec.paged import PagedCache
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.gpu.cases import Effort
from cuvee.eval.bench.gpu.speed import Clock
from cuvee.eval.bench.timing import spread
from cuvee.eval.quality import CodecMethod, QualityBench, spans

__all__ = ["ModelScope", "measure_model", "run_step"]

QUALITY = "balanced"


@dataclass(frozen=True, slots=True)
class ModelScope:
    """What is measured.

    Attributes:
        length, sequences: of the text that the profile is learned from.
        prefix: tokens in the cache, at most; the model's positions and the text may allow fewer.
        scored: tokens after it.
        chunk_tokens: tokens coded together.
        effort: how long a timing may take.
    """

    length: int = 512
    sequences: int = 24
    prefix: int = 4096
    scored: int = 256
    chunk_tokens: int = 256
    effort: Effort = field(default=Effort(1.0, 5, 30))


# The first layers alone: the emulator decodes a thousand values in a second.
_REHEARSAL = ModelScope(128, 16, 64, 32, 32, Effort(0.0, 1, 1))
_LAYERS = 1


def run_step(device: torch.device, save: Callable[[object], None]) -> None:
    """Measure and save."""
    rehearsed = device.type != "cuda"
    model, texts, title = _load(rehearsed)
    if rehearsed:
        model.model.layers = model.model.layers[:_LAYERS]
        model.config.num_hidden_layers = _LAYERS
        title += "; rehearsed on the first of them"
    measure_model(model, texts, title, _REHEARSAL if rehearsed else ModelScope(), device, save)


def _load(small: bool) -> tuple[Any, dict[str, torch.Tensor], str]:
    """A model in float32, the ids of the bundled texts, and what it is."""
    title = "books-3m, the bundled model"
    model, tokenizer = load_bundled_model()
    if not small:
        try:
            model, tokenizer = load_model(REAL_MODEL, "float32"), load_tokenizer(REAL_MODEL)
            title = "SmolLM2-135M-Instruct"
        except (ImportError, ModelUnavailableError) as error:
            print(f"the bundled model stands in for SmolLM2: {error}")
    return model, {name: torch.tensor(tokenizer(bundled_text(name)).input_ids) for name in TEXTS}, title


def measure_model(
    model: Any, texts: dict[str, torch.Tensor], title: str, scope: ModelScope, device: torch.device,
    save: Callable[[object], None],
) -> dict[str, Any]:  # fmt: skip
    """Calibrate on the device; code the cache of a prompt there; compare its KL with the CPU's, and restore it.

    Args:
        model: in float32, on the CPU.
        texts: ids of tokens by the names of the bundled texts.
        title: of the model.
        scope: sizes.
        device: where kernels run.
        save: called with the report whenever it has grown.
    """
    clock = Clock(device, scope.effort)
    prompt = torch.cat([texts[name] for name in EVALUATION_TEXTS])
    prefix = min(scope.prefix, model.config.max_position_embeddings - scope.scored, len(prompt) - scope.scored)
    report: dict[str, Any] = {"model": title, "prefix": prefix, "quality": QUALITY, "group": "head"}
    learned = torch.cat([texts[name] for name in CALIBRATION_TEXTS])
    count = min(scope.sequences, len(learned) // scope.length)
    sequences = learned[: count * scope.length].view(count, scope.length)
    model.to(device)
    began = time.perf_counter()
    profile = cuvee.calibrate(model, sequences, "head", progress=False)
    report["calibrate"] = {"sequences": count, "length": scope.length, "seconds": time.perf_counter() - began}
    save(report)
    tokens = prompt[None, : prefix + scope.scored]
    report["device"] = _quality(model, tokens, prefix, profile, scope, "triton", device)
    save(report)
    report["restore"] = _restore(clock, model, tokens[:, :prefix], profile, scope)
    save(report)
    report["cpu"] = _quality(model.to("cpu"), tokens, prefix, profile, scope, "numba", torch.device("cpu"))
    report["kl_difference"] = report["device"]["kl"] - report["cpu"]["kl"]
    save(report)
    return report


def _quality(
    model: Any, tokens: torch.Tensor, prefix: int, profile: Profile, scope: ModelScope, backend: str,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """The KL and the size after the cache was coded where the model is."""
    bench = QualityBench(model, tokens, prefix, dtype="bfloat16", device=device)
    method = CodecMethod(Codec(profile, QUALITY, backend=backend))
    found = bench.run(QUALITY, method, scope.chunk_tokens).to_dict()
    kept = ("kl", "nll", "top1", "bits_per_value", "ratio", "encode_seconds", "decode_seconds")
    return {name: found[name] for name in kept}


def _restore(clock: Clock, model: Any, tokens: torch.Tensor, profile: Profile, scope: ModelScope) -> dict[str, Any]:
    """Seconds to encode and to decode the cache of `tokens [1, T]` in place, and to compute it again in bfloat16."""
    model = deepcopy(model)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay as they are
        parameter.data = parameter.data.bfloat16()
    layout = replace(profile.layout, dtype="bfloat16")
    tokens = tokens.to(clock.device)
    with frozen(model), torch.no_grad():
        (chunk,) = prefill(model, tokens, layout, clock.device)
        compute = spread(clock.whole(partial(prefill, model, tokens, layout, clock.device)))
    cut = spans(chunk.tokens, scope.chunk_tokens)
    cache = PagedCache.of_chunk(chunk)
    slots = [torch.arange(begin, end, device=clock.device) for begin, end in cut]
    starts = [begin for begin, _ in cut]
    codec = Codec(profile, QUALITY, backend="triton")
    blobs = codec.encode(PagedChunks(cache, slots, starts))
    encode = spread(clock.whole(lambda: codec.encode(PagedChunks(cache, slots, starts))))
    decode = spread(clock.whole(lambda: codec.decode_paged(blobs, cache, slots, starts).check()))
    return {
        "tokens": chunk.tokens,
        "raw_bytes": chunk.nbytes,
        "compressed_bytes": sum(map(len, blobs)),
        "encode_seconds": encode,
        "decode_seconds": decode,
        "recompute_seconds": compute,
        "recompute_over_restore": compute["median"] / decode["median"],
    }
