"""The time of each stage of one encode and one decode, on one core."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from cuvee.codec.backends import DecodeRequest
from cuvee.codec.codec import Codec
from cuvee.codec.format.container import Scheme, inspect, read_header, read_section, write_blob
from cuvee.codec.paged import PagedCache
from cuvee.codec.profiles.profile import Profile
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.stages.implementations import Stages, get_stages
from cuvee.codec.stages.rotation import Rotation
from cuvee.codec.stages.rows import cache_rows
from cuvee.eval.bench.cpu.cases import BACKEND, make_chunk
from cuvee.eval.timing import Effort, Timing

__all__ = ["STAGE_FUNCTIONS", "measure_stages"]


# What each row of the table adds up, by the names in `Stages`.
STAGE_FUNCTIONS = {
    "gather": ("gather_centered",),
    "product": ("analyze", "synthesize"),
    "quantize and pack": ("quantize", "pack", "to_planes"),
    "entropy coding": ("rans_encode", "encode_classed"),
    "entropy decoding, dequantize": ("index_sections", "decode_sections"),
    "place": ("place",),
}


class _Stopwatch:
    """Adds up the time spent in wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            with self.time(name):
                return function(*args)

        return timed

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Count the time until this is left."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - began

    def stages(self, stages: Stages) -> Stages:
        """The stages with a watch on each."""
        watched: dict[str, Any] = {
            function: self.wrap(name, getattr(stages, function))
            for name, functions in STAGE_FUNCTIONS.items()
            for function in functions
        }
        return replace(stages, **watched)


def measure_stages(effort: Effort, profile: Profile, tokens: int) -> dict[str, Any]:
    """Seconds of each stage for one chunk at the preset `balanced`. `other` is the time that no stage accounts for."""
    codec = Codec(profile, "balanced", backend=BACKEND, threads=1)
    layout, chunk = profile.layout, make_chunk(profile.layout, tokens)
    watch = _Stopwatch()
    scheme = TransformScheme(profile, codec.step_index, False, watch.stages(get_stages(BACKEND)))
    cpu, sections = torch.device("cpu"), range(len(profile.sections))
    unrotation, rotation = Rotation(layout, 0, tokens, cpu, inverse=True), Rotation(layout, 0, tokens, cpu)
    blob = codec.encode(chunk)
    layers = range(layout.num_layers)
    cache = PagedCache.empty(layout, tokens, layers, cpu)
    request = DecodeRequest(blob, read_header(blob), layout, range(tokens), layers, cache, None, 0)
    keys, values = cache_rows(cache, None, layers)

    def encoded() -> None:
        coded = scheme.encode(chunk, sections, unrotation)
        with watch.time("container"):
            write_blob(
                Scheme.TRANSFORM, layout.dtype, tokens, 0, codec.step_index, layout.values_per_token,
                layout.fingerprint, profile.id, coded, None,
            )  # fmt: skip

    def decoded() -> None:
        with watch.time("container"):
            header = read_header(blob)
            parts = [(index, read_section(blob, header, index)) for index in sections]
        scheme.decode(parts, request, keys, values, rotation)

    def split(call: Callable[[], None]) -> dict[str, Any]:
        call()
        runs: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(max(effort.least, min(effort.most, 20))):
            watch.seconds.clear()
            began = time.perf_counter()
            with torch.no_grad():
                call()
            total = time.perf_counter() - began
            for name, seconds in watch.seconds.items():
                runs[name].append(seconds)
            runs["other"].append(total - sum(watch.seconds.values()))
        medians = {name: Timing.of(seconds).median for name, seconds in runs.items()}
        return {
            "seconds": medians,
            "share_of_other": medians["other"] / sum(medians.values()),
            "gb_per_s": {name: chunk.nbytes / s / 1e9 for name, s in medians.items() if s and name != "other"},
        }

    with torch.no_grad():
        return {
            "tokens": tokens,
            "raw_bytes": chunk.nbytes,
            "bits_per_value": inspect(blob).bits_per_value,
            "encode": split(encoded),
            "decode": split(decoded),
        }
