"""The step `model`: a trained model on the device. Its profile, the cache of a long prompt, KL, restoring it.

The model is SmolLM2 where its files are available, or else the bundled one. A rehearsal takes the bundled one's first
layer alone: the emulator decodes a thousand values in a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import cuvee
from cuvee.calibration.bundled import CALIBRATION_TEXTS, EVALUATION_TEXTS, bundled_text
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

__all__ = ["run_step"]

QUALITY, GROUP = "balanced", "head"


def run_step(device: torch.device, save: Callable[[object], None]) -> None:
    """Calibrate on the device; code the cache of a prompt there; compare its KL with the CPU's, and restore it.

    Args:
        device: where kernels run; the CPU rehearses.
        save: called with the report whenever it has grown.
    """
    model, tokenizer, title = _load(device)
    if device.type == "cuda":
        length, sequences, prefix, scored, chunk_tokens, effort = 512, 24, 4096, 256, 256, Effort(1.0, 5, 30)
    else:
        length, sequences, prefix, scored, chunk_tokens, effort = 128, 16, 64, 32, 32, Effort(0.0, 1, 1)
    learned, prompt = (
        torch.cat([torch.tensor(tokenizer(bundled_text(name)).input_ids) for name in names])
        for names in (CALIBRATION_TEXTS, EVALUATION_TEXTS)
    )
    prefix = min(prefix, model.config.max_position_embeddings - scored, len(prompt) - scored)
    report: dict[str, Any] = {"model": title, "prefix": prefix, "quality": QUALITY, "group": GROUP}
    count = min(sequences, len(learned) // length)
    model.to(device)
    began = time.perf_counter()
    profile = cuvee.calibrate(model, learned[: count * length].view(count, length), GROUP, progress=False)
    report["calibrate"] = {"sequences": count, "length": length, "seconds": time.perf_counter() - began}
    print(f"{title}: learned in {report['calibrate']['seconds']:.1f} s; a cache of {prefix:,} tokens", flush=True)
    save(report)
    tokens = prompt[None, : prefix + scored]
    report["device"] = _quality(model, tokens, prefix, Codec(profile, QUALITY, backend="triton"), chunk_tokens, device)
    save(report)
    report["restore"] = _restore(Clock(device, effort), model, tokens[:, :prefix], profile, chunk_tokens)
    save(report)
    codec, cpu = Codec(profile, QUALITY, backend="numba"), torch.device("cpu")
    report["cpu"] = _quality(model.to("cpu"), tokens, prefix, codec, chunk_tokens, cpu)
    report["kl_difference"] = report["device"]["kl"] - report["cpu"]["kl"]
    save(report)


def _load(device: torch.device) -> tuple[Any, Any, str]:
    """A model in float32, its tokenizer, and what it is."""
    model, tokenizer = load_bundled_model()
    if device.type != "cuda":
        model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1
        return model, tokenizer, "books-3m, the bundled model; rehearsed on its first layer"
    try:
        return load_model(REAL_MODEL, "float32"), load_tokenizer(REAL_MODEL), "SmolLM2-135M-Instruct"
    except (ImportError, ModelUnavailableError) as error:
        print(f"the bundled model stands in for SmolLM2: {error}")
        return model, tokenizer, "books-3m, the bundled model"


def _quality(
    model: Any, tokens: torch.Tensor, prefix: int, codec: Codec, chunk_tokens: int, device: torch.device
) -> dict[str, Any]:
    """The KL and the size after the cache was coded where the model is."""
    bench = QualityBench(model, tokens, prefix, dtype="bfloat16", device=device)
    found = bench.run(QUALITY, CodecMethod(codec), chunk_tokens).to_dict()
    print(f"coded on {device}: KL {found['kl']:.5f}, {found['bits_per_value']:.3f} bits per value", flush=True)
    kept = ("kl", "nll", "top1", "bits_per_value", "ratio", "encode_seconds", "decode_seconds")
    return {name: found[name] for name in kept}


def _restore(clock: Clock, model: Any, tokens: torch.Tensor, profile: Profile, chunk_tokens: int) -> dict[str, Any]:
    """Seconds to encode and to decode the cache of `tokens [1, T]` in place, and to compute it again in bfloat16."""
    model = deepcopy(model)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay as they are
        parameter.data = parameter.data.bfloat16()
    layout, tokens = replace(profile.layout, dtype="bfloat16"), tokens.to(clock.device)
    with frozen(model), torch.no_grad():
        (chunk,) = prefill(model, tokens, layout, clock.device)
        compute = spread(clock.whole(partial(prefill, model, tokens, layout, clock.device)))
    cache, cut = PagedCache.of_chunk(chunk), spans(chunk.tokens, chunk_tokens)
    slots = [torch.arange(begin, end, device=clock.device) for begin, end in cut]
    starts = [begin for begin, _ in cut]
    codec = Codec(profile, QUALITY, backend="triton")
    blobs = codec.encode(PagedChunks(cache, slots, starts))
    encode = spread(clock.whole(lambda: codec.encode(PagedChunks(cache, slots, starts))))
    decode = spread(clock.whole(lambda: codec.decode_paged(blobs, cache, slots, starts).check()))
    timed = {"encode": encode, "decode": decode, "recompute": compute}
    print(*(f"{name}: {1e3 * one['median']:.2f} ms" for name, one in timed.items()), sep=", ", flush=True)
    return {
        "tokens": chunk.tokens,
        "raw_bytes": chunk.nbytes,
        "compressed_bytes": sum(map(len, blobs)),
        "encode_seconds": encode,
        "decode_seconds": decode,
        "recompute_seconds": compute,
        "recompute_over_restore": compute["median"] / decode["median"],
    }
