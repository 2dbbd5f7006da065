"""The CacheGen-style decoder (`cuvee.eval.baselines.cachegen`) on the chunks that the codec is measured on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.errors import CuveeError
from cuvee.eval.baselines import cachegen
from cuvee.eval.bench.gpu.cases import GpuScope, Pages
from cuvee.eval.bench.gpu.ceilings import Link
from cuvee.eval.bench.gpu.clock import Clock, turns
from cuvee.eval.timing import Timing

__all__ = ["measure_incumbent"]


def measure_incumbent(
    clock: Clock,
    name: str,
    chunk: KVChunk,
    scope: GpuScope,
    pages: Pages,
    link: Link,
    raw: Mapping[int, Timing],
    l2: int,
) -> dict[str, Any]:
    """Time the CacheGen-style decoder on copies of one chunk. Arguments: see `measure_case`.

    Raises:
        CuveeError: it does not reproduce the coded symbols.
    """
    device, regions = clock.device, len(pages.slots)
    began = time.perf_counter()
    one = cachegen.encode(chunk)
    encode_seconds = time.perf_counter() - began
    coded = one.to(device).repeat(regions)
    size = one.nbytes
    slots = torch.stack(pages.slots)
    shape = (regions, coded.units, coded.tokens, coded.channels)
    out = torch.empty(shape, dtype=torch.uint8, device=device)

    def entropy(at: slice) -> None:
        cachegen.decode(coded.part(at.start, at.stop), out[at])

    def scale(at: slice) -> None:
        cachegen.dequantize(coded.part(at.start, at.stop), out[at], slots[at], pages.rows)

    def both(at: slice) -> None:
        entropy(at)
        scale(at)

    levels = cachegen.quantize(chunk)[0].to(device)
    expected = torch.empty_like(pages.rows[:, : scope.tokens])
    own = torch.arange(scope.tokens, device=device)[None]
    cachegen.dequantize_reference(coded.part(0, 1), levels[None], own, expected)

    def poison() -> None:
        out.fill_(0xAB)
        pages.poison()

    def check(restored: int) -> None:
        for region in range(restored):
            values = pages.rows[:, pages.slots[region]]
            if not (torch.equal(out[region], levels) and torch.equal(values, expected)):
                raise CuveeError(f"{name}: the CacheGen-style decoder does not reproduce the coded symbols")

    poison()
    first = clock.once(lambda: both(slice(0, regions)))
    check(regions)
    runs = []
    for count in scope.chunks:
        sets = turns(count * size, l2, regions // count)
        at = [slice(index * count, (index + 1) * count) for index in range(sets)]
        poison()
        timings = {
            stage: clock.inside([partial(call, part) for part in at])
            for stage, call in (("entropy", entropy), ("dequantize", scale), ("whole", both))
        }
        check(sets * count)
        copied = link.measure(count * size)
        restored = timings["whole"].median + copied.median
        runs.append(
            {
                "chunks": count,
                "sets": sets,
                "raw_bytes": count * chunk.nbytes,
                "compressed_bytes": count * size,
                "bits_per_value": 8 * size / one.values,
                "seconds": {stage: timing.to_dict() for stage, timing in timings.items()},
                "gb_per_s": timings["whole"].per_second(count * chunk.nbytes / 1e9),
                "compressed_gb_per_s": timings["whole"].per_second(count * size / 1e9),
                "compressed_copy_seconds": copied.to_dict(),
                "restore_speedup": raw[count].median / restored,
            }
        )
    return {"shape": name, "cpu_encode_seconds": encode_seconds, "first_call_seconds": first, "runs": runs}
