"""The step `speed`: bytes to a paged bfloat16 cache and back, beside what the machine could do at best.

    ceilings    device copy, casts to FP8 and back, copy from pinned memory
    runs        for each group and number of chunks: encode and decode as a caller sees them, from an idle device, with
                checksums, copies and the final check
    kernels     time on the device by kernel, for the largest call of each group

Nothing is timed before it is proved right: the CPU and the device read each other's bytes, which for a lossless group
are the same (products differ in their last bits, and so may a few symbols), every cache is compared with what it was
made from, and so is what the timed runs leave behind. Profiles and caches are synthetic (`cases.py`). Times are
medians, with the 20th and 80th percentiles. 1 GB is 10**9 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cuvee.codec.chunk import KVChunk
from cuvee.codec.codec import Codec
from cuvee.codec.errors import CuveeError
from cuvee.codec.paged_chunks import PagedChunks
from cuvee.eval.bench.gpu.cases import (
    GPU_FULL,
    GPU_REHEARSAL,
    LOSSLESS,
    MOST_ERROR,
    Effort,
    GpuScope,
    Pages,
    make_case,
    stack,
)
from cuvee.eval.bench.timing import rates, spread

__all__ = ["Clock", "measure_group", "measure_speed", "run_step"]

_L2_TIMES = 3  # what is written between two calls is this many times as large as the L2 cache


def run_step(device: torch.device, save: Callable[[object], None]) -> None:
    """Measure and save.

    Raises:
        CuveeError: something did not come back as it went in. The other groups have been measured.
    """
    report = measure_speed(GPU_FULL if device.type == "cuda" else GPU_REHEARSAL, device, save)
    if report["errors"]:
        raise CuveeError("; ".join(f"{group}: {error}" for group, error in report["errors"].items()))


class Clock:
    """Times calls that leave their work to a device. On the CPU, all times are those of the host."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self._effort = device, effort
        self._gpu = device.type == "cuda"
        size = _L2_TIMES * torch.cuda.get_device_properties(device).L2_cache_size if self._gpu else 0
        self._other = torch.empty(size, dtype=torch.uint8, device=device)

    def whole(self, call: Callable[[], object]) -> list[float]:
        """Seconds of each call, from an idle device with a cold cache until it is idle, the host's work included."""
        call()
        effort = self._effort
        seconds: list[float] = []
        while len(seconds) < effort.least or (sum(seconds) < effort.seconds and len(seconds) < effort.most):
            self._other.zero_()
            self._synchronize()
            began = time.perf_counter()
            call()
            self._synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds

    def inside(self, call: Callable[[], object]) -> list[float]:
        """Seconds of each call on the device, by its events: for calls whose launches run ahead of the device."""
        if not self._gpu:
            return self.whole(call)
        from triton.testing import do_bench

        seconds: list[float] = do_bench(call, rep=int(1e3 * self._effort.seconds), return_mode="all")
        return [1e-3 * milliseconds for milliseconds in seconds]

    def kernels(self, call: Callable[[], object]) -> list[tuple[str, int, float]]:
        """Return the name, launches and microseconds of each kernel of a call, the longest first; on the CPU none."""
        if not self._gpu:
            call()
            return []
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            self._synchronize()
        spent = [(event.key, event.count, event.self_device_time_total) for event in found.key_averages()]
        return sorted(spent, key=lambda entry: -entry[2])

    def _synchronize(self) -> None:
        if self._gpu:
            torch.cuda.synchronize(self.device)


def measure_speed(scope: GpuScope, device: torch.device, save: Callable[[object], None]) -> dict[str, Any]:
    """Measure group after group, and save the report after each.

    Returns:
        The report, as a dict for JSON. `errors` names the groups in which something did not come back.
    """
    clock = Clock(device, scope.effort)
    report: dict[str, Any] = {"scope": scope.name, "ceilings": _ceilings(clock, scope)}
    report |= {"runs": [], "kernels": {}, "errors": {}}
    print(*(f"{name}: {rate['median']:,.0f} GB/s" for name, rate in report["ceilings"].items()), sep=", ", flush=True)
    save(report)
    pages = Pages(scope.layout, max(scope.chunks), scope.tokens, scope.block_tokens, device)
    for group in scope.groups:
        print(f"group {group}", flush=True)
        try:
            found = measure_group(clock, group, scope, pages, report["kernels"])
        except CuveeError as error:
            report["errors"][group] = str(error)
            found = []
        report["runs"] += found
        save(report)
        for run in found:
            encode, decode = (f"{run[f'{way}_gb_per_s']['median']:.1f} GB/s" for way in ("encode", "decode"))
            size = f"{run['tokens']:,} tokens, {run['bits_per_value']:.2f} bits per value"
            print(f"  {size}: encode {encode}, decode {decode}, {1e3 * run['decode_seconds']['median']:.2f} ms")
    return report


def _ceilings(clock: Clock, scope: GpuScope) -> dict[str, Any]:
    """GB/s of a copy (bytes read and written), casts of bfloat16 to FP8 and back, and a copy from pinned memory."""
    size, device = scope.copy_bytes, clock.device
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    values, small = source.view(torch.bfloat16), target[: size // 2].view(torch.float8_e4m3fn)
    timed = {
        "device copy": (2, partial(target.copy_, source)),
        "to FP8": (1, partial(small.copy_, values)),
        "from FP8": (1, partial(values.copy_, small)),
        "copy from the host": (1, partial(target.copy_, _pinned(size, device), non_blocking=True)),
    }
    return {name: rates(clock.inside(call), times * size / 1e9) for name, (times, call) in timed.items()}


def _pinned(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def measure_group(
    clock: Clock, group: str, scope: GpuScope, pages: Pages, kernels: dict[str, list[tuple[str, int, float]]]
) -> list[dict[str, Any]]:
    """Time encode and decode with every number of chunks, and add the group's kernels to `kernels`.

    Raises:
        CuveeError: a cache did not come back, or the bytes differ from the CPU's or from those of a smaller batch.
    """
    profile, chunks = make_case(group, scope, clock.device)
    setting: dict[str, Any] = {"quality": LOSSLESS} if group == LOSSLESS else {"step": 1.0}
    codec, regions = Codec(profile, **setting, backend="triton"), len(pages.slots)
    starts = [chunks[region % len(chunks)].start for region in range(regions)]

    def encode(count: int) -> list[bytes]:
        return codec.encode(PagedChunks(pages.cache, pages.slots[:count], starts[:count]))

    def decode(count: int) -> None:
        codec.decode_paged(blobs[:count], pages.cache, pages.slots[:count], starts[:count]).check()

    def check(restored: int) -> None:
        error = pages.check(chunks, range(restored))
        if group == LOSSLESS and error > 0:
            raise CuveeError(f"a lossless cache came back with a relative error of {error:.3g}; nothing is reported")

    pages.fill(chunks)
    distinct = encode(len(chunks))
    first, from_cpu = chunks[0], _exchange(codec, Codec(profile, **setting, backend="numba"), chunks[0], distinct[0])
    # Copies in memory of their own, as chunks from a store would be.
    blobs = [bytes(bytearray(distinct[region % len(distinct)])) for region in range(regions)]
    pages.poison()
    codec.decode_paged([from_cpu], pages.cache, pages.slots[:1], starts[:1]).check()
    check(1)
    pages.poison()
    decode(regions)
    check(regions)
    runs = []
    for count in scope.chunks:
        raw = count * first.nbytes
        pages.fill(chunks)  # what was decoded before is quantized, and so easier to code
        if encode(count) != blobs[:count]:
            raise CuveeError(f"{count} chunks at once become other bytes; nothing is reported")
        encoding = clock.whole(partial(encode, count))
        pages.poison()  # what the timed runs leave behind is checked
        decoding = clock.whole(partial(decode, count))
        check(count)
        target = torch.empty(raw, dtype=torch.uint8, device=clock.device)
        copying = clock.inside(partial(target.copy_, _pinned(raw, clock.device), non_blocking=True))
        compressed = sum(map(len, blobs[:count]))
        runs.append(
            {
                "group": group,
                "tokens": count * scope.tokens,
                "raw_bytes": raw,
                "compressed_bytes": compressed,
                "bits_per_value": 16 * compressed / raw,
                "encode_seconds": spread(encoding),
                "encode_gb_per_s": rates(encoding, raw / 1e9),
                "decode_seconds": spread(decoding),
                "decode_gb_per_s": rates(decoding, raw / 1e9),
                "raw_copy_seconds": spread(copying),
            }
        )

    def both() -> None:
        encode(regions)
        decode(regions)

    kernels[group] = clock.kernels(both)
    return runs


def _exchange(codec: Codec, other: Codec, chunk: KVChunk, blob: bytes) -> bytes:
    """Return the bytes of the CPU's codec for a chunk, once it has read the device's.

    Raises:
        CuveeError: it reads something else, or a lossless codec's bytes are other ones.
    """
    keys, values = ([tensor.cpu() for tensor in tensors] for tensors in (chunk.keys, chunk.values))
    here = KVChunk(keys, values, chunk.layout, chunk.start)
    want, got = stack(here).float(), stack(other.decode(blob)).float()
    error = float(((got - want).norm(dim=(1, 2)) / want.norm(dim=(1, 2))).max())
    from_cpu = other.encode(here)
    if not error < MOST_ERROR:
        raise CuveeError(f"the CPU reads these bytes with a relative error of {error:.3g}; nothing is reported")
    if codec.lossless and from_cpu != blob:
        raise CuveeError("lossless bytes are not those of the CPU; nothing is reported")
    return from_cpu
