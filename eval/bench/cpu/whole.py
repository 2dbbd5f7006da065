"""`Codec.encode` and `Codec.decode` as a caller sees them, with any number of threads."""

from __future__ import annotations

import math
from typing import Any

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.format.container import inspect
from cuvee.codec.profiles.profile import Profile
from cuvee.eval.bench.cpu.cases import BACKEND, make_chunk
from cuvee.eval.machine import torch_threads
from cuvee.eval.timing import Effort

__all__ = ["measure_whole"]


def measure_whole(effort: Effort, profile: Profile, tokens: int, threads: int) -> dict[str, Any]:
    """Encode and decode one chunk at the preset `balanced`."""
    codec = Codec(profile, "balanced", backend=BACKEND, threads=threads)
    chunk = make_chunk(profile.layout, tokens)
    # The codec's threads share out the sections; torch must not start a second set of threads below them.
    with torch_threads(1):
        blob = codec.encode(chunk)
        back = codec.decode(blob)
        error = _relative_error(chunk, back)
        if not error < 0.2 or codec.encode(chunk) != blob:
            raise CuveeError(f"a chunk of {tokens} tokens came back with a relative error of {error:.3g}")
        encode = effort.measure(lambda: codec.encode(chunk))
        decode = effort.measure(lambda: codec.decode(blob))
    return {
        "tokens": tokens,
        "threads": threads,
        "raw_bytes": chunk.nbytes,
        "bits_per_value": inspect(blob).bits_per_value,
        "encode_gb_per_s": encode.per_second(chunk.nbytes / 1e9),
        "decode_gb_per_s": decode.per_second(chunk.nbytes / 1e9),
    }


def _relative_error(chunk: KVChunk, back: KVChunk) -> float:
    """The root of squared error over squared values."""
    error = energy = 0.0
    for exact, other in zip(chunk.keys + chunk.values, back.keys + back.values, strict=True):
        error += float((exact.float() - other.float()).square().sum())
        energy += float(exact.float().square().sum())
    return math.sqrt(error / energy)
