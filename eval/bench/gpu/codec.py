"""Encode and decode of a paged cache as a caller sees them, the stages inside, and the kernels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from cuvee.codec.errors import CuveeError
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.eval.bench.gpu.cases import LOSSLESS, GpuCase, GpuScope, Pages
from cuvee.eval.bench.gpu.clock import Clock, turns
from cuvee.eval.bench.timing import Timing

__all__ = ["measure_case", "rates"]


def measure_case(
    clock: Clock, case: GpuCase, scope: GpuScope, pages: Pages, raw: Mapping[int, Timing], l2: int
) -> dict[str, Any]:
    """Time encode and decode with every number of chunks.

    Args:
        clock: for this device.
        case: what to code.
        scope: of the run.
        pages: with room for the largest number of chunks.
        raw: time to copy the uncompressed cache, by number of chunks.
        l2: bytes of the L2 cache.

    Raises:
        CuveeError: a cache did not come back, or batches of different sizes give different bytes.
    """
    began = time.perf_counter()
    codec, chunks, regions = case.codec, case.chunks, len(pages.slots)
    starts = [chunks[region % len(chunks)].start for region in range(regions)]

    def encode(at: slice) -> list[bytes]:
        return codec.encode(PagedChunks(pages.cache, pages.slots[at], starts[at]))

    distinct: list[bytes] = []
    pages.fill(chunks)
    first = {"encode": clock.once(lambda: distinct.extend(encode(slice(0, len(chunks)))))}
    # Copies in memory of their own, as chunks from a store would be.
    blobs = [bytes(bytearray(distinct[region % len(distinct)])) for region in range(regions)]

    def decode(at: slice) -> None:
        codec.decode_paged(blobs[at], pages.cache, pages.slots[at], starts[at]).check()

    def check(restored: range) -> float:
        error = pages.check(chunks, restored)
        if case.group == LOSSLESS and error > 0:
            raise CuveeError(f"a lossless cache came back with a relative error of {error:.3g}; nothing is reported")
        return error

    pages.poison()
    first["decode"] = clock.once(lambda: decode(slice(0, regions)))
    error = check(range(regions))
    each = chunks[0].nbytes
    runs: list[dict[str, Any]] = []
    for count in scope.chunks:
        sets = turns(count * each, l2, regions // count)
        parts = [slice(index * count, (index + 1) * count) for index in range(sets)]
        compressed = sum(map(len, blobs[:count]))
        pages.fill(chunks)  # what was decoded before is quantized, and so easier to code
        if encode(parts[-1]) != blobs[parts[-1]]:
            raise CuveeError(f"group {case.group}: {count} chunks at once become other bytes")
        encodes = [partial(encode, part) for part in parts]
        decodes = [partial(decode, part) for part in parts]
        encoding = rates(clock.whole(encodes), clock.stages(encodes), count * each)
        pages.poison()  # what the timed runs leave behind is checked
        whole = clock.whole(decodes)
        decoding = rates(whole, clock.stages(decodes), count * each)
        check(range(sets * count))
        runs.append(
            {
                "chunks": count,
                "tokens": count * scope.tokens,
                "sets": sets,
                "raw_bytes": count * each,
                "compressed_bytes": compressed,
                "bits_per_value": 16 * compressed / (count * each),
                "encode": encoding,
                "decode": decoding,
                "raw_copy_seconds": raw[count].to_dict(),
                "decode_over_copy": raw[count].median / whole.median,
            }
        )
    return {
        "group": case.group,
        "error": error,
        "first_call_seconds": first,
        "seconds": time.perf_counter() - began,
        "runs": runs,
    }


def rates(whole: Timing, stages: Mapping[str, Timing], raw: int) -> dict[str, Any]:
    """The seconds of a call and of its stages, and what they are in GB/s of bfloat16."""
    device = sum(stage.median for stage in stages.values())
    return {
        "seconds": whole.to_dict(),
        "gb_per_s": whole.per_second(raw / 1e9),
        "stage_seconds": {name: stage.to_dict() for name, stage in stages.items()},
        "device_seconds": device or None,
        "device_gb_per_s": raw / device / 1e9 if device else None,
    }
