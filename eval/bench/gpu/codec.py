"""Encode and decode of a paged cache as a caller sees them, and the stages inside."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from cuvee.codec.errors import CuveeError
from cuvee.codec.format.container import read_header, read_section
from cuvee.eval.bench.gpu.cases import GpuCase, GpuScope, Pages
from cuvee.eval.bench.gpu.ceilings import SYNTHESIS, Link, limits, stage_work
from cuvee.eval.bench.gpu.clock import Clock, turns
from cuvee.eval.timing import Timing

__all__ = ["measure_case", "rates", "verify"]


def measure_case(
    clock: Clock,
    case: GpuCase,
    scope: GpuScope,
    pages: Pages,
    link: Link,
    raw: Mapping[int, Timing],
    incumbent: Mapping[int, float],
    ceilings: Mapping[str, Any],
    l2: int,
) -> dict[str, Any]:
    """Time encode and decode with every number of chunks.

    Args:
        clock: for this device.
        case: what to code.
        scope: of the run.
        pages: with room for the largest number of chunks.
        link: for copying the compressed bytes.
        raw: time to copy the uncompressed cache, by number of chunks.
        incumbent: seconds that CacheGen's decoder takes on the device, by number of chunks.
        ceilings: from `measure_ceilings`.
        l2: bytes of the L2 cache.

    Raises:
        CuveeError: a cache did not come back, or batches of different sizes give different bytes.
    """
    began = time.perf_counter()
    codec, chunks, regions = case.codec, case.chunks, len(pages.slots)
    starts = [chunks[region % len(chunks)].start for region in range(regions)]

    def encode(at: slice) -> list[bytes]:
        return codec.encode_paged(pages.cache, pages.slots[at], starts[at])

    distinct: list[bytes] = []
    pages.fill(chunks)
    first = {"encode": clock.once(lambda: distinct.extend(encode(slice(0, len(chunks)))))}
    # Copies in memory of their own, as chunks from a store would be.
    blobs = [bytes(bytearray(distinct[region % len(distinct)])) for region in range(regions)]

    def decode(at: slice) -> None:
        codec.decode_paged(blobs[at], pages.cache, pages.slots[at], starts[at]).check()

    pages.poison()
    first["decode"] = clock.once(lambda: decode(slice(0, regions)))
    error = pages.check(chunks, range(regions))
    each = chunks[0].nbytes
    runs: list[dict[str, Any]] = []
    for count in scope.chunks:
        sets = turns(count * each, l2, regions // count)
        parts = [slice(index * count, (index + 1) * count) for index in range(sets)]
        compressed = sum(map(len, blobs[:count]))
        pages.fill(chunks)  # what was decoded before is quantized, and so easier to code
        if encode(parts[-1]) != blobs[parts[-1]]:
            raise CuveeError(f"{case.shape}, group {case.group}: {count} chunks at once become other bytes")
        encodes = [partial(encode, part) for part in parts]
        decodes = [partial(decode, part) for part in parts]
        work = stage_work(case.profile, scope.tokens * count, compressed)
        whole, stages = clock.whole(encodes), clock.stages(encodes)
        encoding = rates(whole, stages, count * each, compressed)
        encoding["stage_limits"] = limits(work["encode"], stages, ceilings)
        pages.poison()  # what the timed runs leave behind is checked
        whole, stages = clock.whole(decodes), clock.stages(decodes)
        decoding = rates(whole, stages, count * each, compressed)
        decoding["stage_limits"] = limits(work["decode"], stages, ceilings)
        pages.check(chunks, range(sets * count))
        synthesis, flop = stages.get(SYNTHESIS), work["decode"][SYNTHESIS].flop
        matrix = 1e12 * ceilings["matrix_tflop_per_s"]["median"]
        device = decoding["device_seconds"]
        runs.append(
            {
                "chunks": count,
                "sets": sets,
                "raw_bytes": count * each,
                "compressed_bytes": compressed,
                "bits_per_value": 16 * compressed / (count * each),
                "encode": encoding,
                "decode": decoding,
                "verify_seconds": clock.whole([partial(verify, blobs[:count])]).to_dict(),
                "restore": {
                    "raw_copy_seconds": raw[count].to_dict(),
                    "compressed_copy_seconds": link.measure(compressed).to_dict(),
                    "decode_seconds": whole.to_dict(),
                    "speedup": raw[count].median / whole.median,
                },
                "incumbent": {
                    "speedup": incumbent[count] / whole.median,
                    "device_speedup": incumbent[count] / device if device else None,
                },
                "synthesis": {
                    "flop": flop,
                    "tflop_per_s": flop / synthesis.median / 1e12 if synthesis else None,
                    "share_of_matrix_product": flop / synthesis.median / matrix if synthesis else None,
                },
            }
        )
    return {
        "shape": case.shape,
        "group": case.group,
        "tokens": scope.tokens,
        "error": error,
        "first_call_seconds": first,
        "seconds": time.perf_counter() - began,
        "runs": runs,
    }


def verify(blobs: Sequence[bytes]) -> None:
    """Check headers and checksums of blobs, as the host does before a device gets them."""
    for blob in blobs:
        header = read_header(blob)
        for index in range(len(header.section_bytes)):
            read_section(blob, header, index)


def rates(whole: Timing, stages: Mapping[str, Timing], raw: int, compressed: int) -> dict[str, Any]:
    """The seconds of a call and of its stages, and what they are in GB/s of bfloat16 and of compressed bytes."""
    device = sum(stage.median for stage in stages.values())
    return {
        "seconds": whole.to_dict(),
        "gb_per_s": whole.per_second(raw / 1e9),
        "compressed_gb_per_s": whole.per_second(compressed / 1e9),
        "stage_seconds": {name: stage.to_dict() for name, stage in stages.items()},
        "device_seconds": device or None,
        "device_gb_per_s": raw / device / 1e9 if device else None,
    }
