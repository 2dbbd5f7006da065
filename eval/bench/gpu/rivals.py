"""What else could be done to the same cache on the device: copies, casts to FP8 and back, nvCOMP's ANS."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cuvee.codec.errors import CuveeError
from cuvee.eval.bench.gpu.cases import GpuScope, Pages
from cuvee.eval.bench.gpu.clock import Clock, turns
from cuvee.eval.bench.timing import Timing

__all__ = ["measure_rivals"]


def measure_rivals(clock: Clock, scope: GpuScope, pages: Pages, l2: int) -> list[dict[str, Any]]:
    """Time them on as many bytes of the filled cache as each number of chunks has.

    Returns:
        per rival and number of chunks: `encode` and `decode` in GB/s of bfloat16, and `bits_per_value`; or the `error`
        by which the rival could not be measured.
    """
    flat = pages.rows.view(-1)
    out: list[dict[str, Any]] = []
    for count in scope.chunks:
        values = flat.numel() * count // len(pages.slots)
        sets = turns(2 * values, l2, flat.numel() // values)
        sources = [flat[index * values : (index + 1) * values] for index in range(sets)]
        for name, measure in (("memcpy", _copy), ("FP8 cast", _cast), ("nvCOMP ANS", _ans)):
            entry: dict[str, Any] = {"rival": name, "chunks": count, "tokens": count * scope.tokens}
            try:
                encode, decode, bits = measure(clock, sources)
            except Exception as error:  # of any class: it is not ours, and what is ours must be measured all the same
                out.append({**entry, "error": f"{type(error).__name__}: {error}"})
                continue
            size = 2 * values / 1e9
            rates = {"encode": encode.per_second(size), "decode": decode.per_second(size)}
            out.append({**entry, **rates, "bits_per_value": bits})
    return out


def _copy(clock: Clock, sources: Sequence[torch.Tensor]) -> tuple[Timing, Timing, float]:
    target = torch.empty_like(sources[0])
    timing = clock.inside([partial(target.copy_, source) for source in sources])
    return timing, timing, 16.0


def _cast(clock: Clock, sources: Sequence[torch.Tensor]) -> tuple[Timing, Timing, float]:
    small = [source.to(torch.float8_e4m3fn) for source in sources]
    target, back = torch.empty_like(small[0]), torch.empty_like(sources[0])
    encode = clock.inside([partial(target.copy_, source) for source in sources])
    return encode, clock.inside([partial(back.copy_, source) for source in small]), 8.0


def _ans(clock: Clock, sources: Sequence[torch.Tensor]) -> tuple[Timing, Timing, float]:
    nvcomp: Any = importlib.import_module("nvidia.nvcomp")
    stream = torch.cuda.current_stream(clock.device).cuda_stream if clock.device.type == "cuda" else 0
    codec = nvcomp.Codec(algorithm="ANS", data_type="|u1", device_id=clock.device.index or 0, cuda_stream=stream)
    raw = [nvcomp.as_array(source.view(torch.uint8), cuda_stream=stream) for source in sources]
    coded = [codec.encode(array) for array in raw]
    clock.synchronize()
    back = torch.utils.dlpack.from_dlpack(codec.decode(coded[0]))
    if not torch.equal(back.view(torch.uint8).flatten(), sources[0].view(torch.uint8)):
        raise CuveeError("nvCOMP gives back other bytes")
    size = sum(array.buffer_size for array in coded) / sum(source.numel() for source in sources)
    encodes: list[Callable[[], object]] = [partial(codec.encode, array) for array in raw]
    decodes: list[Callable[[], object]] = [partial(codec.decode, array) for array in coded]
    return clock.whole(encodes), clock.whole(decodes), 8 * size
