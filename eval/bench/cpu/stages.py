"""Where the time of one encode and one decode goes, on one core."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cuvee.codec.codec import Codec
from cuvee.codec.container import inspect, read_header, read_section, write_blob
from cuvee.codec.family import step_value
from cuvee.codec.profile import Profile
from cuvee.codec.schemes import Target
from cuvee.codec.schemes.transform import TransformScheme
from cuvee.codec.stages import Stages, get_stages
from cuvee.codec.transform import Rotation, gather, synthesize, tile_tokens, tiles
from cuvee.eval.bench.cpu.cases import BACKEND, make_chunk
from cuvee.eval.timing import Effort, Timing

__all__ = ["measure_stages"]


class _Stopwatch:
    """Adds up the time spent in wrapped functions, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds[name] += time.perf_counter() - began

        return timed

    def backend(self, backend: Stages) -> Stages:
        """The backend with a watch on its stages."""
        return replace(
            backend,
            rans_encode=self.wrap("rans", backend.rans_encode),
            rans_decode=self.wrap("rans", backend.rans_decode),
            quantize=self.wrap("quantize and pack", backend.quantize),
            dequantize=self.wrap("quantize and pack", backend.dequantize),
            predict=self.wrap("quantize and pack", backend.predict),
            unpredict=self.wrap("quantize and pack", backend.unpredict),
            pack=self.wrap("quantize and pack", backend.pack),
            unpack=self.wrap("quantize and pack", backend.unpack),
            place=self.wrap("place", backend.place),
        )


def measure_stages(effort: Effort, profile: Profile, tokens: int) -> dict[str, Any]:
    """Seconds of each stage for one chunk, section by section. `other` is the time that no stage accounts for."""
    step = Codec(profile, "balanced").step
    layout, chunk = profile.layout, make_chunk(profile.layout, tokens)
    watch = _Stopwatch()
    scheme = TransformScheme(profile, step, watch.backend(get_stages(BACKEND)))
    cpu, sections = torch.device("cpu"), range(len(profile.sections))
    unrotation = Rotation(layout, 0, tokens, cpu, inverse=True)
    rotation = Rotation(layout, 0, tokens, cpu)
    coded = [scheme.encode(chunk, i, unrotation) for i in sections]
    plans = [learned.plan(step) for learned in profile.learned]
    symbols = sum(plan.planes for _, plan in plans) * tokens

    def wrapped() -> bytes:
        return write_blob(
            scheme_id, layout.dtype, tokens, 0, step, layout.values_per_token, layout.fingerprint, profile.id,
            coded, None,
        )  # fmt: skip

    scheme_id = read_header(Codec(profile, step=step_value(step)).encode(chunk)).scheme
    blob = wrapped()

    def unwrapped() -> None:
        header = read_header(blob)
        for index in sections:
            read_section(blob, header, index)

    def analyzed() -> None:
        for section, learned, (ranks, _) in zip(profile.sections, profile.learned, plans, strict=True):
            for at in tiles(tokens, tile_tokens(section, layout)):
                learned.basis.analyze(gather(chunk, section, unrotation, at), 0, at, ranks)

    fast = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    maps, coefficients = [], []
    for learned, (ranks, _) in zip(profile.learned, plans, strict=True):
        pairs = zip(learned.basis.inverse, ranks, strict=True)
        maps.append(tuple(matrix[:, :rank].T.to(fast).contiguous() for matrix, rank in pairs))
        coefficients.append(torch.randn(sum(ranks), tokens).to(fast))

    def synthesized() -> None:
        for section, y, inverse in zip(profile.sections, coefficients, maps, strict=True):
            for at in tiles(tokens, tile_tokens(section, layout)):
                synthesize(y[:, at], inverse)

    def encoded() -> None:
        for index in sections:
            scheme.encode(chunk, index, unrotation)

    keys = [torch.empty_like(k) for k in chunk.keys]
    values = [torch.empty_like(v) for v in chunk.values]
    target = Target(layout, keys, values, slice(0, tokens), tokens, 0, 0)

    def decoded() -> None:
        for index in sections:
            scheme.decode(memoryview(coded[index]), index, target, rotation)

    def split(call: Callable[[], None], alone: Callable[[], None], container: Callable[[], object]) -> dict[str, Any]:
        call()
        runs: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(max(effort.least, min(effort.most, 20))):
            watch.seconds.clear()
            began = time.perf_counter()
            call()
            total = time.perf_counter() - began
            for name, seconds in watch.seconds.items():
                runs[name].append(seconds)
            runs["rest"].append(total - sum(watch.seconds.values()))
        timings = {name: Timing.of(seconds) for name, seconds in runs.items()}
        transform, blob_time = effort.measure(alone), effort.measure(container)
        rest = timings.pop("rest")
        medians = {name: timing.median for name, timing in timings.items()} | {
            "transform": transform.median,
            "container": blob_time.median,
            "other": max(rest.median - transform.median, 0.0),
        }
        return {
            "seconds": medians,
            "gb_per_s": {name: chunk.nbytes / s / 1e9 for name, s in medians.items() if s and name != "other"},
            "rans_msymbols_per_s": timings["rans"].per_second(symbols / 1e6),
        }

    return {
        "tokens": tokens,
        "raw_bytes": chunk.nbytes,
        "bits_per_value": inspect(blob).bits_per_value,
        "symbols": symbols,
        "encode": split(encoded, analyzed, wrapped),
        "decode": split(decoded, synthesized, unwrapped),
    }
